import json
import math

import numpy as np
import pytest
import torch

import break_position
import score
import train_compare
from conftest import train_tiny
from break_position import (LONGEST, bags_and_next, bidirectional, count_model_ppl, first_break, full_turns, orders, permutation, probe, read_bag, scramble,
                            sentences, split_sentences)
from data.corpus import load_corpus
from tiny_lm import SCHEMES, TinyLM, load_model

A, B = (torch.tensor(list(text.encode())) for text in ("我打你", "你打我"))


def test_permutation_by_hand():
    assert permutation([5, 6, 5, 7], [7, 5, 6, 5]).tolist() == [3, 0, 1, 2]
    assert torch.equal(A[permutation(A.tolist(), B.tolist())], B)
    with pytest.raises(ValueError, match="'ab' is not 'aa' in another order"):
        permutation(list(b"aa"), list(b"ab"))


@pytest.mark.parametrize("scheme", ["none", "learned", "sin", "rope", "alibi"])
def test_only_without_positions_are_the_outputs_permuted(scheme):
    """Permutation equivariance of unmasked attention, in float64: exact for `none` but for the order of sums, gone with positions."""
    torch.set_default_dtype(torch.float64)
    try:
        with torch.no_grad():
            read = bidirectional(scheme)
            x, y = read(A), read(B)
    finally:
        torch.set_default_dtype(torch.float32)
    equivariant = (y - x[permutation(A.tolist(), B.tolist())]).abs().max() / x.abs().max()
    pooled = (y.mean(0) - x.mean(0)).norm() / x.mean(0).norm()
    assert (equivariant < 1e-13 and pooled < 1e-13) if scheme == "none" else (equivariant > 1e-2 and pooled > 1e-3)


def test_probe_on_states_with_a_known_answer():
    torch.manual_seed(0)
    T, noise = torch.arange(50.0), torch.randn(2, 40, 50, 8)
    marked = noise.clone()
    marked[..., 3] = 0.1 * T + 5
    assert probe(*marked) == pytest.approx(1, abs=1e-3)
    assert abs(probe(*noise)) < 0.05
    half = noise.clone()  # position plus noise of the same variance: half of it can be explained
    half[..., 3] = (T - T.mean()) / T.std() + torch.randn(2, 40, 50)
    assert probe(*half) == pytest.approx(0.5, abs=0.03)


def test_count_models_by_hand():
    train, val = (np.frombuffer(text, np.uint8) for text in (b"abab", b"abb"))
    # after a: b twice of 2 + 256; after b: a once of 1 + 256. The text b, b is scored after a, b.
    assert count_model_ppl(train, val, 1) == pytest.approx(math.sqrt(258 / 3 * 257 / 1))
    # counts of b, a, b, one added: b 3, a 2, of 259
    assert count_model_ppl(train, val, 0) == pytest.approx(259 / 3)


def test_sentences_by_hand():
    text = b"""Returns the sum, of both\n    arrays. It is. A sentence of 3 numbers. No end
    It is what it is. Is it. What does it do? What does it do! Wow, This Is Not One.
    A much longer sentence that has more than eight words in all."""
    assert sentences(np.frombuffer(text, np.uint8)) == [["returns", "the", "sum", "of", "both", "arrays"], ["it", "is", "what", "it", "is"],
                                                         ["what", "does", "it", "do"]]


def test_no_held_out_sentence_has_the_words_of_a_training_sentence():
    train, held = split_sentences(load_corpus())
    known = {" ".join(sorted(words)) for words in train}
    assert len(train) > 1500 and len(held) > 300 and not any(" ".join(sorted(words)) in known for words in held)
    assert all(3 <= len(words) <= 8 and len(" ".join(words)) <= LONGEST for words in train + held)
    text = np.frombuffer(b"One two three. Three one two. One two four. ", np.uint8)
    both = lambda: None
    both.train, both.val = text[:15], text[15:]
    assert split_sentences(both) == ([["one", "two", "three"]], [["one", "two", "four"]])


def test_the_target_is_a_permutation_of_the_input():
    _, held = split_sentences(load_corpus())
    texts, answer = scramble(held, np.random.default_rng(0))
    assert texts.shape == (len(held), 2 * LONGEST + 2) and answer.shape == (len(held), 2 * LONGEST + 1)
    for row, marks, words in zip(texts, answer, held):
        mixed, original, rest = bytes(row).split(b"\n")
        assert original.decode().split(" ") == words and mixed != original
        assert sorted(mixed.split(b" ")) == sorted(original.split(b" ")) and set(rest) <= {0}
        assert bytes(row[1:][marks]) == original + b"\n"  # the targets that count: all of the original, nothing of the input
    again, _ = scramble(held, np.random.default_rng(0))
    assert torch.equal(texts, again) and not torch.equal(texts, scramble(held, np.random.default_rng(1))[0])


def test_orders_by_hand():
    assert [orders(text.split()) for text in ("a b c", "a b a", "a a b b", "a a")] == [6, 3, 6, 1]


@pytest.mark.parametrize("none, four, verdict", [("all but ends", "all", "refuted"), ("few", "all", "confirmed"), ("half", "all", "partly"),
                                                 ("nothing", "nothing", "partly")])
def test_the_verdict_of_unscramble(cli, tmp_path, monkeypatch, none, four, verdict):
    """…and what is counted as right, of models that know every next byte, or only some of them."""
    class Knows(torch.nn.Module):
        def __init__(self, scheme, *size, **more):
            super().__init__()
            self.knows = none if scheme == "none" else four
        def forward(self, ids):
            following = torch.cat((ids[:, 1:], torch.full((len(ids), 1), 10)), 1).long()  # the last a line end
            wrong = {"all": following < 0, "all but ends": following == 10, "half": following > ord("h"), "few": following < ord("t"), "nothing": following >= 0}[self.knows]
            return torch.nn.functional.one_hot(torch.where(wrong, 0, following), 256).float()
    monkeypatch.setattr(break_position, "TinyLM", Knows)
    monkeypatch.setattr(break_position, "fit", lambda model, *rest, **more: model)
    assert cli(break_position, "unscramble", "--quick", "--device", "cpu", "--out", tmp_path)[0] == 0
    result = json.loads((tmp_path / "break_unscramble.json").read_text())
    rows = {row["scheme"]: row for row in result["rows"]}
    assert result["verdict"] == verdict
    if four == "all":
        assert rows["rope"]["bytes_right"] == rows["rope"]["exact"] == 1 and set(rows["rope"]["exact_by_words"].values()) == {1}
    if none == "all but ends":
        assert 0.9 < rows["none"]["bytes_right"] < 1 and rows["none"]["exact"] == 0
    assert 0.1 < rows["pairs of bytes"]["bytes_right"] < 0.5 and rows["pairs of bytes"]["exact"] == 0
    assert rows["any order of the words"]["exact_by_words"]["3"] == pytest.approx(1 / 5)  # none of three words twice


def test_the_target_of_a_bag_is_the_byte_after_it():
    data = np.arange(200, dtype=np.uint8)
    for width in (1, 4, 64):
        ids, target = bags_and_next(data, width, 50, np.random.default_rng(0))
        assert ids.shape == (50, width) and (ids.long().diff() == 1).all() and torch.equal(target, ids[:, -1].long() + 1)
        assert len(set(ids[:, 0].tolist())) > 20 and target.max() <= 199


@pytest.mark.parametrize("best, gain, pairs, verdict", [(4, 3.0, 9.5, "refuted"), (1, 3.0, 9.5, "confirmed"), (16, 0.02, 9.5, "partly"), (4, 3.0, 1.2, "partly")])
def test_the_verdict_of_bag(cli, out, tmp_path, monkeypatch, best, gain, pairs, verdict):
    """One width is guessed a little or much better than the others, by a model that is not trained at all."""
    monkeypatch.setattr(break_position, "fit", lambda model, *rest, **more: model)
    monkeypatch.setattr(break_position, "bags_and_next", lambda data, width, count, rng: (torch.zeros(count, width, dtype=torch.uint8), torch.zeros(count, dtype=torch.long)))
    def read(model, ids, average):
        logits = torch.zeros(len(ids), 256)
        logits[:, 0] = 3.4 + gain * (ids.shape[1] == best)
        return logits
    monkeypatch.setattr(break_position, "read_bag", read)
    monkeypatch.setattr(break_position, "count_model_ppl", lambda train, val, back: pairs)  # 256 logits, one of 3.4: 9.5
    code, stdout, _ = cli(break_position, "bag", "--quick", "--out", out, "--device", "cpu")
    result = json.loads((out / "break_bag.json").read_text())
    assert code == 0 and result["verdict"] == verdict
    ppl = {row["width"]: row["ppl"] for row in result["rows"] if row["model"] == "bag: attention without mask"}
    assert ppl[best] == pytest.approx(1 + 255 * math.exp(-3.4 - gain)) and max(ppl.values()) == pytest.approx(1 + 255 * math.exp(-3.4))


@pytest.mark.parametrize("average", [False, True])
def test_a_bag_has_no_order(average):
    torch.manual_seed(0)
    model = TinyLM("none", 16, 2, 2).double()
    causal = TinyLM("none", 16, 2, 2).double()
    for weight in model.parameters():
        torch.nn.init.normal_(weight, 0, 0.3)
    causal.load_state_dict(model.state_dict())
    for block in model.blocks:
        block.attention.attend = lambda q, k, v, is_causal: torch.nn.functional.scaled_dot_product_attention(q, k, v)
    ids = torch.randint(0, 256, (20, 12))
    mixed, other = ids[:, torch.randperm(12)], ids.clone()
    other[:, 3] += 1
    assert torch.allclose(read_bag(model, ids, average), read_bag(model, mixed, average), rtol=0, atol=1e-12)
    assert (read_bag(model, ids, average) - read_bag(model, other % 256, average)).abs().amax(-1).min() > 1e-6  # every byte counts
    if not average:
        assert (read_bag(causal, ids, average) - read_bag(causal, mixed, average)).abs().max() > 1e-3


def test_full_turns_by_hand():
    """Head width 32, 256 tokens: pair i turns in 2π·base^(i/16) tokens, so base^(i/16) ≤ 40.7 is asked."""
    assert [full_turns(base, 32, 256) for base in (10, 100, 10_000, 1_000_000)] == [16, 13, 7, 5]
    assert full_turns(10_000, 2, 6) == 0 and full_turns(10_000, 2, 7) == 1


def test_theta_trains_the_other_bases_once(cli, out):
    """…with the settings of the checkpoint it starts from; 10,000 is that checkpoint."""
    assert cli(break_position, "theta", "--quick", "--out", out, "--device", "cpu")[0] == 0
    code, stdout, _ = cli(break_position, "theta", "--quick", "--out", out, "--device", "cpu")
    assert code == 0 and stdout.count("already trained") == 5
    rows = {row["base"]: row for row in json.loads((out / "break_theta.json").read_text())["rows"]}
    assert list(rows) == [10, 100, 1000, 10_000, 100_000, 1_000_000]
    val = load_corpus(str(out.parent / "words.txt")).val
    rope, saved = load_model(out / "checkpoints" / "rope-seed0.pt")
    near, other = load_model(out / "theta" / "checkpoints" / "rope-base=10-seed0.pt")
    assert other["settings"] == saved["settings"] | {"scheme": "rope:base=10"}
    for base, model in ((10, near), (10_000, rope)):
        ppl = score.perplexity(score.fixed(model, val, 128, score.fixed_ends(len(val), 1024, 8)))
        assert rows[base]["fixed"]["128"] == pytest.approx(ppl, rel=1e-5)
    plain = TinyLM("rope", 16, 2, 2)
    plain.load_state_dict(near.state_dict())  # the base is no weight, and it matters
    ids = torch.arange(64)[None]
    assert (plain(ids) - near(ids)).abs().max() > 1e-3


def test_first_break_by_hand():
    nats = np.full(400, 2.0)
    assert first_break(nats, 64, 2.0) is None and first_break(nats, 64, 1.8) == 64
    nats[200:] = 4.0  # a mean over 32 passes 2.2 with the fourth broken position
    assert first_break(nats, 64, 2.0) == 200 - 28
    nats[:] = 2.19
    assert first_break(nats, 64, 2.0) is None


@pytest.fixture(scope="module")
def out(tmp_path_factory):
    return train_tiny(tmp_path_factory.mktemp("break"), "--steps 30 --batch-size 4 --train-len 64 --dim 16 --n-layer 2 --n-head 2", 3000)


def test_every_experiment_says_what_it_found(cli, out):
    code, stdout, stderr = cli(break_position, "--quick", "--out", out, "--device", "cpu")
    assert code == 1 and "unscramble was not possible: words.txt: 0 sentences of 3 to 8 words" in stderr  # and the others go on
    done = [name for name in break_position.EXPERIMENTS if name != "unscramble"]
    for name in done:
        result = json.loads((out / f"break_{name}.json").read_text())
        assert result["verdict"] in ("confirmed", "partly", "refuted") and result["expectation"] in stdout
        assert (out / f"break_{name}.md").read_text() in stdout
    table = (out / "break.md").read_text().splitlines()
    assert [line.split(" | ")[0] for line in table[2:]] == [f"| {name}" for name in done] and "**confirmed** |" in table[2]
    assert (out / "break_long.png").stat().st_size > 10_000
    swap = {row["scheme"]: row["ppl"] for row in json.loads((out / "break_swap.json").read_text())["rows"]}
    close = lambda scheme, name: swap[scheme][name] == pytest.approx(swap[scheme]["its own"], rel=1e-3)
    assert all(close("none", name) for name in ("+ 1", "+ 1000", "reversed", "all equal"))
    assert all(close(s, f"+ {shift}") for s in ("rope", "alibi") for shift in (1, 10, 100, 1000))
    assert close("alibi", "reversed") and not close("rope", "reversed")  # |i − j| is the same read backwards
    assert not close("learned", "+ 10") and not close("sin", "+ 10")
    assert all(f"read as {s}" in swap["rope"] for s in SCHEMES if s != "rope")
    assert swap["rope"]["read as none"] == pytest.approx(swap["rope"]["all equal"], rel=1e-4)
    probes = {row["scheme"]: row["r2"] for row in json.loads((out / "break_no-encoding.json").read_text())["rows"]}
    assert probes["sin"][0] > 0.7 and abs(probes["none"][0]) < 0.05 and probes["none, untrained"][2] > 0.1
    assert swap["learned"]["+ 1000"] is None  # its table ends at 16 × 64


def test_a_damaged_result_is_named_and_left_out(cli, out):
    (out / "break_swap.json").write_text("garbage")
    (out / "break_long.json").write_text('{"verdict": 1}')
    code, _, stderr = cli(break_position, "order", "--out", out)
    assert code == 0 and stderr.count("is not a result of this experiment, and is left out of break.md") == 2
    assert [line.split(" | ")[0] for line in (out / "break.md").read_text().splitlines()[2:3]] == ["| order"]
    for name in ("swap", "long"):
        (out / f"break_{name}.json").unlink()


def test_theta_wants_models_of_this_code(cli, out, tmp_path, monkeypatch):
    monkeypatch.setattr(break_position, "training_hash", lambda cls: "0123")
    code, _, stderr = cli(break_position, "theta", "--quick", "--out", out, "--device", "cpu")
    assert code == 1 and "theta was not possible: rope, seed 0, was trained by other code or on other text" in stderr


def test_models_of_short_windows(cli, out, tmp_path):
    base = "--steps 2 --batch-size 2 --train-len 32 --dim 16 --n-layer 1 --n-head 2 --dtype fp32 --device cpu --schemes rope".split()
    assert cli(train_compare, *base, "--data", out.parent / "words.txt", "--out", tmp_path)[0] == 0
    code, _, stderr = cli(break_position, "theta", "--quick", "--out", tmp_path, "--device", "cpu")
    assert code == 1 and "the training length 32 is below 64" in stderr and not (tmp_path / "theta").exists()


def test_without_models_the_text_is_still_theirs(cli, out, tmp_path):
    code, _, stderr = cli(break_position, "unscramble", "--quick", "--out", out, "--device", "cpu")
    assert code == 1 and "words.txt: 0 sentences" in stderr


def test_wrong_arguments(cli, out):
    for wrong, message in (("everything", "unknown experiment 'everything': use order, no-encoding, unscramble, bag, theta, long, swap"),
                           ("order order", "EXPERIMENT: order is given 2 times"), ("order --sentences ab cd", "'cd' is not 'ab' in another order"),
                           ("swap --seeds 7", "no checkpoint"), ("swap --device abacus", "no such device")):
        code, stdout, stderr = cli(break_position, "--out", out, *wrong.split())
        assert code == 2 and stdout == "" and message in stderr and stderr.count("\n") == 1


def test_sentences_that_cannot_differ(cli, out):
    for pair in (("ab", "ab"), ("", "")):
        code, _, stderr = cli(break_position, "order", "--sentences", *pair, "--out", out)
        assert code == 2 and "twice; give two sentences that differ in order" in stderr


def test_long_and_swap_read_what_they_say(cli, out):
    """Against models built by hand: `long` with yarn at 16 × 64, `swap` of RoPE's weights read as ALiBi."""
    assert cli(break_position, "long", "swap", "--quick", "--out", out, "--device", "cpu")[0] == 0
    val = load_corpus(str(out.parent / "words.txt")).val
    weights = load_model(out / "checkpoints" / "rope-seed0.pt")[0].state_dict()
    yarn = TinyLM("rope:scaling=yarn,factor=16,trained_len=64", 16, 2, 2)
    yarn.load_state_dict(weights)
    plain = score.span(load_model(out / "checkpoints" / "rope-seed0.pt")[0], val, 1024, len(val) // 1024 * 1024).mean(0)[32:64].mean()
    nats = score.span(yarn, val, 1024, len(val) // 1024 * 1024).mean(0)
    row = next(row for row in json.loads((out / "break_long.json").read_text())["rows"] if row["way"] == "yarn")
    assert row["first"] == pytest.approx(math.exp(nats[:64].mean())) and row["last"] == pytest.approx(math.exp(nats[-64:].mean()))
    assert row["ppl"] == pytest.approx(math.exp(nats.mean())) and row["breaks_at"] == first_break(nats, 64, plain)
    alibi = TinyLM("alibi", 16, 2, 2)
    alibi.load_state_dict(weights)
    row = next(row for row in json.loads((out / "break_swap.json").read_text())["rows"] if row["scheme"] == "rope")
    assert row["ppl"]["read as alibi"] == pytest.approx(score.perplexity(score.span(alibi, val, 64, 64 * 64)))


def test_models_of_another_training_are_refused(cli, out, tmp_path):
    base = "--steps 2 --batch-size 2 --train-len 64 --dim 16 --n-layer 1 --n-head 2 --dtype fp32 --device cpu --schemes rope --window 8".split()
    assert cli(train_compare, *base, "--data", out.parent / "words.txt", "--out", tmp_path / "w")[0] == 0
    code, _, stderr = cli(break_position, "long", "--out", tmp_path / "w", "--device", "cpu")
    assert code == 2 and "rope in" in stderr and "was trained with window 8; the experiments are about the plain training" in stderr
