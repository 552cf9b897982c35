import json
import math

import numpy as np
import pytest
import torch

import break_position
import train_compare
from conftest import train_tiny
from break_position import bidirectional, count_model_ppl, first_break, permutation, probe
from tiny_lm import SCHEMES

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
    code, stdout, _ = cli(break_position, "--quick", "--out", out, "--device", "cpu")
    assert code == 0
    for name in break_position.EXPERIMENTS:
        result = json.loads((out / f"break_{name}.json").read_text())
        assert result["verdict"] in ("confirmed", "partly", "refuted") and result["expectation"] in stdout
        assert (out / f"break_{name}.md").read_text() in stdout
    table = (out / "break.md").read_text().splitlines()
    assert [line.split(" | ")[0] for line in table[2:]] == ["| order", "| no-encoding", "| long", "| swap"] and "**confirmed** |" in table[2]
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


def test_wrong_arguments(cli, out):
    for wrong, message in (("everything", "unknown experiment 'everything': use order, no-encoding, long, swap"),
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
    import score
    from data.corpus import load_corpus
    from tiny_lm import TinyLM, load_model
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
