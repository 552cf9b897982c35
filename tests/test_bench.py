"""What bench/ measures is what it says: the same functions, the same sizes, the ratios as computed by hand."""
import multiprocessing
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from torch.utils.flop_counter import FlopCounterMode

sys.path.append(str(Path(__file__).parent.parent / "bench"))
import common
import long_context
import tiny_lm
import train_step
from data.corpus import load_corpus
from peers import peers
from tiny_lm import SCHEMES, TinyLM, attend, parse_scheme

SIZE = dict(dim=64, n_layer=2, n_head=2, train_len=32)


@pytest.mark.parametrize("scheme", long_context.LAYERS)
def test_textbook_and_layer_are_the_same_function(scheme):
    torch.manual_seed(0)
    layer, x = parse_scheme(scheme)[0](128, 4, attend=attend), torch.randn(1, 100, 128)
    with torch.no_grad():
        assert torch.allclose(long_context.textbook(layer, scheme, x), layer(x), atol=1e-5)


@pytest.mark.parametrize("scheme", SCHEMES)
def test_peers_are_causal_models_of_the_same_size(scheme):
    ours = sum(p.numel() for p in TinyLM(scheme, 64, 2, 2, max_len=32).parameters())
    ids = torch.arange(32).repeat(2, 1)
    ids[1, 20] += 1
    for name, (make, attentions) in peers(scheme, SIZE).items():
        for attention in attentions:
            model = make(attention).eval()
            with torch.no_grad():
                logits = model(ids)
            assert logits.shape == (2, 32, 256)
            assert torch.allclose(*logits[:, :20], atol=1e-5) and not torch.allclose(*logits[:, 20], atol=1e-5)
            assert abs(sum(p.numel() for p in model.parameters()) - ours) < 0.2 * ours, name
            rows = any(p.shape == (32, 64) for p in model.parameters())  # a trained row per position
            assert rows == (scheme == "learned"), name


def test_the_bound_counts_the_products_of_a_step(monkeypatch):
    """Against torch's count of the operations of a forward and backward; 32 tokens are one strip, so squares are whole."""
    def plain(q, k, v, is_causal):
        return (q @ k.transpose(-1, -2)).softmax(-1) @ v
    monkeypatch.setattr(tiny_lm, "attend", plain)
    with FlopCounterMode(display=False) as bound:
        train_step.seconds_of(train_step.products(SIZE | dict(batch_size=4), torch.float32))
    model = TinyLM("none", 64, 2, 2)
    with FlopCounterMode(display=False) as step:
        model(torch.randint(0, 256, (4, 32))).sum().backward()
    assert bound.get_total_flops() == step.get_total_flops() > 0


def test_ratios_by_hand():
    # The machine is three times as slow in the second round, and five times in the third.
    seconds = {("rope", train_step.OURS): [0.3, 0.1, 0.7, 0.5, 1.0, 1.0], ("rope", "a (fp32)"): [0.5, 0.5, 1.5, 1.5, 4.5, 4.5], ("rope", "b"): [2.0] * 6,
               ("none", train_step.OURS): [0.16, 0.48, 0.8], ("none", "a"): [0.32, 0.96, 1.6], ("none", train_step.PRODUCTS): [0.08, 0.24, 0.4]}
    rows = {(row["scheme"], row["who"]): row for row in train_step.table_rows(seconds, tokens=1000)}
    ours = rows["rope", train_step.OURS]
    assert (ours["tokens_per_second"], ours["times_best_peer"], ours["times_none"], ours["of_bound"]) == (1667, 2.5, 1.25, 0.4)
    assert rows["rope", "b"]["times_best_peer"] is rows["rope", "b"]["of_bound"] is None and rows["none", train_step.OURS]["times_best_peer"] == 2.0
    assert rows["none", train_step.PRODUCTS]["tokens_per_second"] == 4167


def test_another_scheme_begins_each_round(monkeypatch):
    order = []
    for name, stub in (("peers", lambda *_: {}), ("products", lambda *_: []), ("keep_freed_memory", lambda: False),
                       ("our_steps", lambda scheme, count, *_: order.append(scheme) or [0.1] * count)):
        monkeypatch.setattr(train_step, name, stub)
    seconds = train_step.measure(SIZE | dict(batch_size=4), 6, None, torch.float32)
    rounds = [order[i:i + 6] for i in range(0, 36, 6)]  # all five, and none once more with the fused attention
    assert [each[0] for each in rounds] == [*SCHEMES, "learned"] and all(sorted(each[:5]) == sorted(SCHEMES) for each in rounds)
    assert all(len(seconds[scheme, train_step.OURS]) == 12 for scheme in SCHEMES)


def test_a_child_says_what_went_wrong(monkeypatch):
    def broken(*cell):
        raise KeyError("some library's bug")
    monkeypatch.setattr(long_context, "forward_pass", broken)
    assert long_context.measure(multiprocessing.get_context("fork"), "layer", "none", "x", 64, None) == "KeyError: \"some library's bug\""


def test_a_measurement_leaves_out_the_first_pass_and_what_was_held(monkeypatch):
    clock, sent = iter([0, 3, 10, 10.5, 20, 20.7, 30, 30.6, 40, 40.9]), []  # passes of 3, 0.5, 0.7, 0.6 and 0.9 s
    monkeypatch.setattr(long_context.time, "perf_counter", lambda: next(clock))
    monkeypatch.setattr(long_context, "memory", lambda key: {"VmRSS": 100, "VmHWM": 350}[key])
    monkeypatch.setattr(long_context.Path, "write_text", lambda path, text: None)
    monkeypatch.setattr(long_context, "forward_pass", lambda *cell: lambda T: None)
    long_context.measure_here(SimpleNamespace(send=sent.append), "layer", "none", "x", 64, None)
    assert sent == [dict(seconds=pytest.approx(0.65), extra=250, total=350)]


def test_the_fastest_setting_of_a_peer_is_kept(monkeypatch):
    spent = {("plain", "fp32"): [5, 5, 1], ("plain", "bf16 autocast"): [2, 2, 2]}  # best of three turns, not of the first
    class Fake:
        def __init__(self, make, attention, precision):
            self.setting, self.turns = (attention, precision), iter(spent.get((attention, precision), [9, 9, 9]))
        def steps(self, count, size, data):
            return [next(self.turns)] * count
    monkeypatch.setattr(train_step, "Peer", Fake)
    assert train_step.fastest(None, ("fused", "plain"), None, None).setting == ("plain", "fp32")


def test_the_table_of_steps_names_the_best_peer():
    seconds = {(scheme, who): [spent] for scheme in SCHEMES for who, spent in
               ((train_step.OURS, 0.1), ("slow (fp32)", 0.5), ("fast (bf16)", 0.25))}
    seconds |= {("none", train_step.OURS + ", something left out"): [0.15], ("none", train_step.PRODUCTS): [0.05]}
    text = train_step.table(train_step.table_rows(seconds, tokens=1000))
    assert "| alibi | 10,000 | 1.00 | 0.50 | 2.50 | 4,000 | fast (bf16) |" in text
    assert "alone of a `none` step: 20,000 tokens/s." in text and "with something left out: 1.50 times as long." in text


def test_the_table_of_long_context_compares_alibi_with_the_formula_and_with_none():
    def row(what, scheme, who, T, seconds, extra):
        return dict(what=what, scheme=scheme, who=who, T=T, seconds=seconds, extra_mb=extra, total_mb=extra and extra + 300,
                    note="" if seconds else "out of memory at 128")
    rows = [row("layer", scheme, who, T, *cell) for scheme in long_context.LAYERS for T in (32, 64, 128) for who, cell in
            ((long_context.OURS, (0.01 * T, 6 if scheme == "alibi" else 4)),
             (long_context.TEXTBOOK, (None, None) if T == 128 else (0.2 * T, 90)))]
    rows += [row("model", scheme, long_context.OURS, T, 1.0, T - len(scheme)) for scheme in SCHEMES for T in (32, 64, 128)]
    text = long_context.tables(rows, [32, 64, 128])
    assert "At T = 64 the textbook formula takes 20 times as long as the ALiBi layer, whose memory is 1.50 times" in text
    assert "At T = 128 a process with a model of this repository holds at most 425 MB in all." in text
    assert "| alibi | textbook formula | 6,400 ms, 90 MB | 12,800 ms, 90 MB | – |" in text
    assert "– alibi layer, textbook formula: out of memory at 128; " in text


def test_results_of_a_benchmark_name_their_own_file(monkeypatch):
    monkeypatch.setattr("sys.argv", [train_step.__file__, "--quick"])
    about = common.provenance(load_corpus("numpy"), torch.device("cpu"), torch.float32)
    assert about["command"] == "python bench/train_step.py --quick"
    assert list(about["code"]) == ["bench/train_step.py", "score.py", "tiny_lm.py", "pos_alibi.py", "pos_learned.py", "pos_rope.py", "pos_sin.py", "data/corpus.py"]
