import torch

from bench import bias_step, clock
from bench.bias_step import BIASED, NONE, ClampedDistance
from helpers import RUN, TWENTY


def test_bias_is_that_of_the_clamped_distance():
    relation = ClampedDistance(2, 8)
    relation.table.data = torch.arange(256.0).view(2, 128)
    bias = relation.bias(None, None, torch.arange(100, 200), torch.arange(200))  # (2, 100, 200)
    assert bias.shape == (2, 100, 200)
    assert bias[0, 50, 150] == 0 and bias[1, 50, 140] == 128 + 10
    assert bias[0, 99, 0] == 127 and bias[0, 0, 199] == 0


def test_biased_step_trains_the_table():
    run = RUN.replace(scheme=BIASED)
    trained = clock.train(run, lambda step: clock.text_batch(TWENTY, run, step), clock.CPU)
    tables = [block.attention.relation.table for block in trained.model.blocks]
    assert all(table.count_nonzero() for table in tables)


def test_both_take_turns_to_begin(monkeypatch):
    order = []

    def note(run, data):
        order.append(run.scheme)
        return [1.0, 2.0]

    monkeypatch.setattr(bias_step, "our_steps", note)
    seconds = bias_step.measure(RUN, 2, TWENTY)
    assert order == [BIASED, NONE, NONE, BIASED]
    assert seconds == {NONE: [1.5, 1.5], BIASED: [1.5, 1.5]}


def test_summary_gives_the_median_of_the_ratios_of_rounds():
    # The machine is three times as slow in the second round.
    text = bias_step.summary({NONE: [0.1, 0.3, 0.1], BIASED: [0.11, 0.36, 0.15]}, 2)
    assert text.startswith("2 threads: 1.20 times as long as `none` (150 and 100 ms; 1.10 to 1.50")
    assert text.endswith("within the goal of 1.25")
