import json
import math

import numpy as np
import pytest
import torch
from torch import nn

import context_test
import train_compare
from conftest import train_tiny
from context_test import attention_by_distance, copy_accuracy, texts_with_copies
from tiny_lm import TinyLM

DATA = np.random.default_rng(1).integers(32, 64, 5000).astype(np.uint8)


def test_texts_differ_in_the_first_string_only():
    with_it, without = (texts_with_copies(DATA, 100, 6, first) for first in (True, False))
    assert with_it.shape == (6, 132) and (with_it[:, 32:] == without[:, 32:]).all()
    assert (with_it[:, :32] == with_it[:, -32:]).all() and ((97 <= with_it[:, :32]) & (with_it[:, :32] < 123)).all()
    assert (without[:, :32] < 64).all() and all(bytes(row[:100].tolist()) in bytes(DATA) for row in without)
    assert len({bytes(row.tolist()) for row in with_it[:, :32]}) == 6
    adjacent = texts_with_copies(DATA, 32, 2, True)
    assert adjacent.shape == (2, 64) and (adjacent[:, :32] == adjacent[:, 32:]).all()


class Copier(nn.Module):
    """Predicts the byte that stood `distance` before the one to come, and 0 where there is none."""

    def __init__(self, distance):
        super().__init__()
        self.distance = distance

    def forward(self, ids):
        back = nn.functional.pad(ids.long(), (self.distance - 1, 0))[:, :ids.shape[1]]
        return nn.functional.one_hot(back, 256).float()


def test_a_copier_gets_all_right_and_only_where_there_is_something_to_copy():
    assert copy_accuracy(Copier(100), DATA, 100, 6, True) == 1
    assert copy_accuracy(Copier(100), DATA, 100, 6, False) == 0
    assert copy_accuracy(Copier(64), DATA, 100, 6, True) == 0
    assert copy_accuracy(lambda ids: torch.eye(256)[torch.full_like(ids.long(), 97)], DATA, 64, 400, True) == pytest.approx(1 / 26, abs=0.01)


@pytest.mark.parametrize("scheme, weights", [
    ("none", lambda h, d: 1.0),
    ("alibi", lambda h, d: math.exp(-d * 2 ** (-4 * (h + 1))))])
def test_attention_by_distance_of_equal_tokens(scheme, weights):
    """With q·k = 0 the weights are known: equal for `none`, falling by the slope (2 heads: 1/16, 1/256) for ALiBi."""
    model, n, queries = TinyLM(scheme, 16, 2, 2), 40, 3
    with torch.no_grad():
        for block in model.blocks:
            block.attention.qkv.weight.zero_()
    kept = [block.attention.attend for block in model.blocks]
    ids = torch.randint(0, 256, (2, n))
    measured = attention_by_distance(model, ids, queries=queries)
    expected = np.zeros(n)
    for position in range(n - queries, n):
        for head in range(2):
            mass = [weights(head, d) for d in range(position + 1)]
            expected[:position + 1] += np.array(mass) / sum(mass) / queries / 2
    assert measured == pytest.approx(expected, abs=1e-6) and measured.sum() == pytest.approx(1, abs=1e-5)
    assert [block.attention.attend for block in model.blocks] == kept
    windowed = attention_by_distance(TinyLM(scheme, 16, 2, 2, window=5), ids, window=5, queries=queries)
    assert windowed[5:].sum() == 0 and windowed.sum() == pytest.approx(1, abs=1e-5)


@pytest.fixture(scope="module")
def out(tmp_path_factory):
    return train_tiny(tmp_path_factory.mktemp("context"), "--steps 3 --batch-size 2 --train-len 64 --dim 16 --n-layer 1 --n-head 2", 3000)


def test_rows_tables_and_picture(cli, out):
    code, stdout, _ = cli(context_test, "--out", out, "--device", "cpu", "--windows", 3)
    assert code == 0
    rows = json.loads((out / "context.json").read_text())["rows"]
    kinds = {row["what"] for row in rows}
    assert kinds == {"use", "copy", "copy without the first", "attention at 64", "attention at 256"}
    assert [row["x"] for row in rows if row["what"] == "use" and row["scheme"] == "rope"] == [64, 68, 72, 80, 96, 112, 128, 192, 256]
    assert [row["x"] for row in rows if row["what"] == "copy" and row["scheme"] == "rope"] == [32, 48, 64, 96, 128, 256, 512, 1024]
    learned = {row["x"]: row for row in rows if row["what"] == "copy" and row["scheme"] == "learned"}
    assert learned[1024]["note"] == "max_len 1024" and learned[1024]["value"] is None and learned[512]["value"] is not None
    for row in rows:
        if row["what"] == "attention at 64" and row["x"] == 64:
            assert row["value"] == pytest.approx(1, abs=1e-4)
    text = (out / "context.md").read_text()
    assert text in stdout and "max_len 1024" in text and (out / "context.png").stat().st_size > 10_000


def test_wrong_arguments(cli, out):
    for wrong, message in (("--what use use", "--what: use is given 2 times"), ("--what all", "invalid choice"), ("--schemes x", "no checkpoint of x"),
                           ("--windows 1", "'1' is not a whole number from 2"), ("--data nowhere", "no such file or folder")):
        code, stdout, stderr = cli(context_test, "--out", out, *wrong.split())
        assert code == 2 and stdout == "" and message in stderr and stderr.count("\n") == 1


def test_models_are_read_at_their_positions_and_windows(cli, out, tmp_path):
    """Every number of a model with random positions and a window, against the functions called by hand."""
    import score
    from data.corpus import load_corpus
    from tiny_lm import load_model
    flags = "--steps 3 --batch-size 2 --train-len 64 --dim 16 --n-layer 1 --n-head 2 --dtype fp32 --device cpu --schemes sin --random-positions 600 --window 20".split()
    assert cli(train_compare, *flags, "--data", out.parent / "words.txt", "--out", tmp_path / "o")[0] == 0
    assert cli(context_test, "--out", tmp_path / "o", "--device", "cpu", "--windows", 3)[0] == 0
    rows = {(r["what"], r["x"]): r for r in json.loads((tmp_path / "o" / "context.json").read_text())["rows"]}
    model, saved = load_model(tmp_path / "o" / "checkpoints" / "sin-seed0.pt")
    read = train_compare.at_its_positions(model, saved["settings"])
    val = load_corpus(str(out.parent / "words.txt")).val
    ends = score.fixed_ends(len(val), 256, 12)
    assert rows["use", 128]["value"] == pytest.approx(score.scores(score.fixed(read, val, 128, ends))["ppl"], abs=1e-4)
    assert rows["copy", 512]["value"] == round(copy_accuracy(read, val, 512, 3, True), 5)
    assert "do not fit in 600 random positions" in rows["copy", 1024]["note"]
    ids = torch.from_numpy(np.array(val[ends[:8, None] + np.arange(-64, 0)]))
    share = np.cumsum(attention_by_distance(model, ids, 20, read=read))
    for x in (1, 8, 16):
        assert rows["attention at 64", x]["value"] == pytest.approx(share[x - 1], abs=1e-5)
    assert rows["attention at 64", 23]["value"] == pytest.approx(1, abs=1e-5)


def test_tables_by_hand():
    row = lambda what, x, value, seed=0, note="": dict(what=what, scheme="rope", variant="", seed=seed, x=x, value=value, note=note)
    text = context_test.tables([row("use", 64, 5.0), row("use", 128, 4.04), row("use", 256, 4.0), row("use", 512, 4.2), row("use", 1024, 4.3),
                                row("copy", 64, 0.5), row("copy", 64, 0.7, 1), row("copy without the first", 64, 0.1), row("copy", 128, None, 0, "max_len 9"),
                                row("attention at 256", 256, None, 0, "it has none")], 256)
    assert "| rope | 5.00 | 4.04 | 4.00 | 4.20 | 4.30 | 128 | 512 |" in text
    assert "| rope | 0.60 (0.10) | max_len 9 |" in text and "– rope, attention at 256: it has none." in text


def test_models_too_short_for_it(cli, out, tmp_path):
    flags = "--steps 1 --batch-size 2 --train-len 16 --dim 16 --n-layer 1 --n-head 2 --dtype fp32 --device cpu --schemes none".split()
    assert cli(train_compare, *flags, "--data", out.parent / "words.txt", "--out", tmp_path / "o")[0] == 0
    code, _, stderr = cli(context_test, "--out", tmp_path / "o")
    assert code == 2 and "trained at 16 bytes; this needs at least 64" in stderr
