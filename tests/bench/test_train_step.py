"""bench/train_step.py measures what it says, and its ratios are those computed by hand."""

import json

import numpy as np
import pytest
import torch
from torch.utils.flop_counter import FlopCounterMode

import attend
import tiny_lm
from bench import clock, train_step
from bench.train_step import BOUND, CHANGED, OURS, table, table_rows
from helpers import RUN
from lab.rows import select
from schemes.scheme import SCHEMES

SIZE = dict(batch_size=4, train_len=32, dim=64, n_layer=2, n_head=2)
DATA = np.tile(np.arange(50, dtype=np.uint8), 100)
STRIPS, MEMORY = CHANGED


def plain_attention(q, k, v, is_causal):
    return (q @ k.transpose(-1, -2)).softmax(-1) @ v


def test_bound_counts_the_products_of_a_step(monkeypatch):
    """torch counts as many operations forward and backward; 32 tokens are one strip, a square."""
    monkeypatch.setattr(tiny_lm, "attend", plain_attention)
    run = train_step.run_of(SIZE, torch.float32).replace(scheme="none")
    with FlopCounterMode(display=False) as bound:
        train_step.seconds_of(train_step.products(run, torch.float32))
    model = run.new_model()
    with FlopCounterMode(display=False) as step:
        model(torch.randint(0, 256, (4, 32))).sum().backward()
    assert bound.get_total_flops() == step.get_total_flops() > 0


def test_first_step_of_a_turn_is_not_timed(monkeypatch):
    run = RUN.replace(steps=3, scheme="none")
    ticks = iter([10.0, 11.0, 13.5])  # one after each step
    monkeypatch.setattr(clock.time, "perf_counter", lambda: next(ticks))
    assert clock.our_steps(run, DATA) == [1.0, 2.5]


def test_peer_takes_its_steps_on_the_batches_of_ours(monkeypatch):
    batches = []

    class Learner(torch.nn.Module):
        def __init__(self):
            super().__init__()
            self.weight = torch.nn.Parameter(torch.zeros(256, 256))

        def forward(self, ids):
            batches.append(ids)
            return self.weight[ids]

    run = train_step.run_of(SIZE, torch.float32).replace(scheme="none")
    peer = train_step.Peer(lambda attention: Learner(), "plain", "fp32")
    assert len(peer.steps(run, DATA)) == 2
    for step, ids in enumerate(batches):
        assert torch.equal(ids, clock.text_batch(DATA, run, step)[0].long())
    assert len(batches) == 3 and peer.model.weight.count_nonzero()


def test_ratios_are_medians_of_those_within_a_round():
    # The machine is three times as slow in the second round, and five times in the third.
    seconds = {
        ("rope", OURS): [0.3, 0.1, 0.7, 0.5, 1.0, 1.0],
        ("rope", "a (fp32)"): [0.5, 0.5, 1.5, 1.5, 4.5, 4.5],
        ("rope", "b"): [2.0] * 6,
        ("none", OURS): [0.16, 0.48, 0.8],
        ("none", "a"): [0.32, 0.96, 1.6],
        ("none", BOUND): [0.08, 0.24, 0.4],
    }
    rows = table_rows(seconds, tokens=1000)
    (ours,) = select(rows, scheme="rope", who=OURS)
    assert ours["tokens_per_second"] == 1667
    assert (ours["times_best_peer"], ours["times_none"], ours["of_bound"]) == (2.5, 1.25, 0.4)
    (peer,) = select(rows, who="b")
    assert peer["times_best_peer"] is peer["of_bound"] is None
    (none,) = select(rows, scheme="none", who=OURS)
    assert none["times_best_peer"] == 2.0
    (bound,) = select(rows, who=BOUND)
    assert bound["tokens_per_second"] == 4167


@pytest.fixture
def turns(monkeypatch):
    """The schemes in the order of their turns, with nothing computed."""
    order = []

    def note(run, data):
        order.append(run.scheme)
        return [0.1] * 2

    monkeypatch.setattr(train_step, "peers", lambda scheme, run: {})
    monkeypatch.setattr(train_step, "products", lambda run, dtype: [])
    monkeypatch.setattr(train_step, "keep_freed_memory", lambda: False)
    monkeypatch.setattr(train_step, "our_steps", note)
    return order


def test_another_scheme_begins_each_round(turns):
    seconds = train_step.measure(train_step.run_of(SIZE, torch.float32), 6, DATA)
    rounds = [turns[i : i + 6] for i in range(0, 36, 6)]  # all five, and none without strips
    assert [schemes[0] for schemes in rounds] == [*SCHEMES, "learned"]
    assert all(sorted(schemes[:5]) == sorted(SCHEMES) for schemes in rounds)
    assert all(len(seconds[scheme, OURS]) == 12 for scheme in SCHEMES)
    assert len(seconds["none", STRIPS]) == 12 and ("none", MEMORY) not in seconds


def test_step_without_strips_takes_the_fused_kernel(monkeypatch):
    def refuse(*tensors):
        raise AssertionError("strips")

    monkeypatch.setattr(attend.CausalStrips, "apply", refuse)
    run = train_step.run_of(SIZE, torch.float32).replace(scheme="none")
    with pytest.raises(AssertionError, match="strips"):
        clock.our_steps(run, DATA)
    with train_step.without_speed_paths(run)[STRIPS]():
        assert len(clock.our_steps(run, DATA)) == 2


def test_fastest_setting_of_a_peer_is_kept(monkeypatch):
    # The best of three turns decides, not the first.
    spent = {("plain", "fp32"): [5, 5, 1], ("plain", "bf16 autocast"): [2, 2, 2]}

    class Fake:
        def __init__(self, make, attention, precision):
            self.setting = attention, precision
            self.turns = iter(spent.get(self.setting, [9, 9, 9]))

        def steps(self, run, data):
            return [next(self.turns)] * 2

    monkeypatch.setattr(train_step, "Peer", Fake)
    peer = train_step.fastest(None, ("fused", "plain"), None, None)
    assert peer.setting == ("plain", "fp32")


def test_table_names_the_best_peer():
    speeds = {OURS: 0.1, "slow (fp32)": 0.5, "fast (bf16)": 0.25}
    seconds = {}
    for scheme in SCHEMES:
        seconds |= {(scheme, who): [spent] for who, spent in speeds.items()}
    seconds |= {("none", STRIPS): [0.15], ("none", BOUND): [0.05]}
    text = table(table_rows(seconds, tokens=1000))
    assert "| alibi | 10,000 | 1.00 | 0.50 | 2.50 | 4,000 | fast (bf16) |" in text
    assert "The bound, the matrix products alone of a `none` step: 20,000 tokens/s." in text
    told = "A `none` step with torch's fused attention in place of strips: 1.50 times as long."
    assert told in text


def test_quick_run_is_small_and_other_flags_still_count():
    _, args = train_step.arguments(["--quick", "--rounds", "3"])
    assert (args.rounds, args.out) == (3, "results/quick")


def test_results_say_where_they_come_from(cli, turns, tmp_path, monkeypatch):
    monkeypatch.setattr(train_step, "table_rows", lambda seconds, tokens: [{"tokens": tokens}])
    monkeypatch.setattr(train_step, "table", lambda rows: "a table")
    code, told, _ = cli(train_step, "--quick", "--out", tmp_path)
    assert code == 0 and "a table" in told
    saved = json.loads((tmp_path / "bench_train.json").read_text("utf-8"))
    command = saved["provenance"]["command"]
    assert command == f"python bench/train_step.py --quick --out {tmp_path}"
    assert saved["rows"] == [{"tokens": 16 * 64}] and saved["size"]["dim"] == 64
    assert saved["seconds"]["none: this repository"] == [0.1] * 4
