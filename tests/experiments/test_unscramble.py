from types import SimpleNamespace

import numpy as np
import pytest
import torch
from torch.nn.functional import one_hot

from data.corpus import load_corpus
from experiments import unscramble
from experiments.setup import Setup
from experiments.unscramble import ANY_ORDER, LONGEST, PAIRS, orders, rule, scramble, sentences
from helpers import CPU
from lab.rows import select, values


def test_sentences_by_hand():
    text = b"""Returns the sum, of both\n    arrays. It is. A sentence of 3 numbers. No end
    It is what it is. Is it. What does it do? What does it do! Wow, This Is Not One.
    A much longer sentence that has more than eight words in all."""
    assert sentences(np.frombuffer(text, np.uint8)) == [
        ["returns", "the", "sum", "of", "both", "arrays"],
        ["it", "is", "what", "it", "is"],
        ["what", "does", "it", "do"],
    ]


def test_no_held_out_sentence_has_the_words_of_a_training_sentence():
    train, held = unscramble.split_sentences(load_corpus())
    known = {" ".join(sorted(words)) for words in train}
    assert len(train) > 1500 and len(held) > 300
    assert not any(" ".join(sorted(words)) in known for words in held)
    for words in train + held:
        assert 3 <= len(words) <= 8 and len(" ".join(words)) <= LONGEST
    text = np.frombuffer(b"One two three. Three one two. One two four. ", np.uint8)
    corpus = SimpleNamespace(train=text[:15], val=text[15:])
    assert unscramble.split_sentences(corpus) == (
        [["one", "two", "three"]],
        [["one", "two", "four"]],
    )


def test_the_target_is_a_permutation_of_the_input():
    _, held = unscramble.split_sentences(load_corpus())
    texts, asked = scramble(held, np.random.default_rng(0))
    assert texts.shape == (len(held), 2 * LONGEST + 2)
    assert asked.shape == (len(held), 2 * LONGEST + 1)
    for row, marks, words in zip(texts, asked, held, strict=True):
        mixed, original, rest = bytes(row).split(b"\n")
        assert original.decode().split(" ") == words and mixed != original
        assert sorted(mixed.split(b" ")) == sorted(original.split(b" ")) and set(rest) <= {0}
        # what is asked for: all of the original, nothing of the input
        assert bytes(row[1:][marks]) == original + b"\n"
    again, _ = scramble(held, np.random.default_rng(0))
    other, _ = scramble(held, np.random.default_rng(1))
    assert torch.equal(texts, again) and not torch.equal(texts, other)


def test_orders_by_hand():
    counts = [orders(text.split()) for text in ("a b c", "a b a", "a a b b", "a a")]
    assert counts == [6, 3, 6, 1]


class Knowing(torch.nn.Module):
    """Knows the next bytes: all of them, or all but some."""

    def __init__(self, knows):
        super().__init__()
        self.knows = knows

    def forward(self, ids):
        end = torch.full((len(ids), 1), 10)
        following = torch.cat((ids[:, 1:], end), 1).long()
        wrong = {
            "all": following < 0,
            "all but ends": following == 10,
            "half": following > ord("h"),
            "few": following < ord("t"),
            "nothing": following >= 0,
        }[self.knows]
        return one_hot(torch.where(wrong, 0, following), 256).float()


def untrained(model, *arguments, **options):
    return model


@pytest.mark.parametrize(
    "none, four, verdict",
    [
        ("all but ends", "all", "refuted"),
        ("few", "all", "confirmed"),
        ("half", "all", "partly"),
        ("nothing", "nothing", "partly"),
    ],
)
def test_unscramble_judges_models_that_know_every_next_byte_or_some(
    monkeypatch, none, four, verdict
):
    def network(scheme, **size):
        return Knowing(none if scheme == "none" else four)

    monkeypatch.setattr(unscramble, "TinyLM", network)
    monkeypatch.setattr(unscramble, "fit", untrained)
    rows = unscramble.measure(Setup(corpus=load_corpus(), device=CPU, quick=True))
    assert unscramble.judge(rows).verdict == verdict
    exact = select(rows, metric="sentences right")
    if four == "all":
        assert values(rows, scheme="rope", metric="bytes right") == [1]
        assert set(values(exact, scheme="rope")) == {1}
    if none == "all but ends":
        assert 0.9 < values(rows, scheme="none", metric="bytes right")[0] < 1
        assert values(exact, scheme="none", words=None) == [0]
    assert 0.1 < values(rows, scheme=PAIRS, metric="bytes right")[0] < 0.5
    assert values(exact, scheme=PAIRS, words=None) == [0]
    # none of three words twice
    assert values(exact, scheme=ANY_ORDER, words=3) == [pytest.approx(1 / 5)]
    table, picture = unscramble.show(rows)
    assert "| corpus | any order of the words | – | " in table
    assert PAIRS not in picture.lines and "none" in picture.lines
    if four == "all":
        guesses = values(rows, metric="guess")
        assert len(guesses) == 3 and "; ".join(guesses) in table
        for guess in guesses:
            given, answer = guess.split(" → ")
            assert sorted(given.split()) == sorted(answer.split()) and given != answer


def test_rule_of_unscramble():
    assert rule(none=0.3, best_of_four=0.4, floor=0.3) == "partly"  # nobody learned it
    assert rule(none=0.3, best_of_four=0.9, floor=0.3) == "confirmed"
    assert rule(none=0.89, best_of_four=0.9, floor=0.3) == "refuted"
    assert rule(none=0.6, best_of_four=0.9, floor=0.3) == "partly"


@pytest.mark.slow
def test_unscramble_trains_own_schemes_as_well(monkeypatch, tmp_path):
    path = tmp_path / "own.py"
    path.write_text(
        "from pos_sin import SinusoidalPositionalEncoding\n"
        "class Mine(SinusoidalPositionalEncoding): pass\n"
        "class Broken(SinusoidalPositionalEncoding):\n"
        "    def forward(self, positions): return positions.no_such_thing\n"
    )
    monkeypatch.setattr(unscramble, "fit", untrained)
    setup = Setup(corpus=load_corpus(), device=CPU, quick=True, own_schemes=[f"{path}:Mine"])
    table, picture = unscramble.show(unscramble.measure(setup))
    assert f"| corpus | {path}:Mine | " in table and f"{path}:Mine" in picture.lines
    setup.own_schemes = [f"{path}:Broken"]
    with pytest.raises(ValueError, match="Broken' does not work in this network"):
        unscramble.measure(setup)


def test_unscramble_needs_enough_sentences(setup):
    with pytest.raises(ValueError, match="words.txt: 0 sentences of 3 to 8 words"):
        unscramble.measure(setup)
