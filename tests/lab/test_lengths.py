import numpy as np
import pytest
import torch

from helpers import CPU, RUN
from lab import score
from lab.checkpoints import Checkpoint
from lab.lengths import Protocols, by_position, comparable, on_targets, score_readings
from lab.reading import Reading
from lab.rows import measured, select, values
from lab.stats import measured_ppl

DATA = np.random.default_rng(0).integers(0, 256, 3000).astype(np.uint8)
PLAIN = Reading()


class Uniform(torch.nn.Module):
    """Knows nothing, and counts how often it is asked at which length."""

    def __init__(self, most=10**6, error="CUDA out of memory"):
        super().__init__()
        self.weight, self.position = torch.nn.Parameter(torch.zeros(1)), None
        self.most, self.error, self.asked = most, error, []

    def forward(self, ids):
        self.asked.append(ids.shape[1])
        if ids.shape[1] > self.most:
            raise RuntimeError(self.error)
        return torch.zeros(*ids.shape, 256)


def scored(model, plan=(PLAIN,), run=RUN, lengths=(64, 128), names=("span", "fixed"), tick=None):
    protocols = Protocols.at(DATA, lengths, names, 1024, 5)
    checkpoint = Checkpoint(None, run, [], 0.0, None)
    return score_readings(checkpoint, model, plan, protocols, CPU, tick), protocols


# Places


def test_both_protocols_score_the_same_targets_at_all_lengths():
    found = Protocols.at(DATA, [128, 64], ["span", "fixed"], 1024, 5)
    assert found.cells() == [("span", 64), ("span", 128), ("fixed", 64), ("fixed", 128)]
    assert found.targets("span") == (1024, 0)
    assert found.targets("fixed") == (5 * 64, int(score.fixed_ends(3000, 128, 5)[0]))


def test_a_protocol_that_is_not_wanted_asks_for_nothing():
    assert Protocols.at(DATA, [7, 11, 13], ["fixed"], 1000, 5).cells()[0] == ("fixed", 7)
    assert Protocols.at(DATA[:300], [256], ["span"], 256, 5).targets("span") == (256, 0)


@pytest.mark.parametrize("lengths, names, message", [
    ([7, 11, 13], ["span"], "no span of at most 1,000 bytes is a multiple of all lengths"),
    ([4000], ["fixed"], "3,000 held-out bytes are too few for windows of 4,000"),
])  # fmt: skip
def test_a_text_that_is_too_short_is_refused(lengths, names, message):
    with pytest.raises(ValueError, match=message):
        Protocols.at(DATA, lengths, names, 1000, 5)


# Scoring


def test_there_is_a_row_for_every_reading_protocol_and_length():
    plan = [PLAIN, Reading("yarn"), Reading(window=8)]
    rows, _ = scored(RUN.new_model(), plan)
    assert [(r["way"], r["read_window"], r["protocol"], r["n"]) for r in rows] == [
        (reading.way, reading.window, protocol, n)
        for reading in plan for protocol in ("span", "fixed") for n in (64, 128)
    ]  # fmt: skip
    assert all(row["value"] == pytest.approx(256, rel=1e-6) for row in rows)


def test_a_row_is_what_the_protocol_measures():
    model = RUN.new_model()
    torch.nn.init.normal_(model.head.weight)
    rows, protocols = scored(model)
    (row,) = select(rows, protocol="span", n=128)
    expected = measured_ppl(score.span(model, DATA, 128, 1024))
    assert {name: row[name] for name in expected} == expected and row["first_end"] == 0
    (row,) = select(rows, protocol="fixed", n=64)
    expected = measured_ppl(score.fixed(model, DATA, 64, protocols.ends))
    assert {name: row[name] for name in expected} == expected
    assert row["first_end"] == protocols.ends[0]


def test_rows_keep_the_mean_nats_of_windows_and_of_positions_in_the_longest():
    model = RUN.new_model()
    torch.nn.init.normal_(model.head.weight)
    rows, _ = scored(model, names=["span"])
    nats = {n: score.span(model, DATA, n, 1024) for n in (64, 128)}
    for row in rows:
        assert np.array_equal(row["by_window"], nats[row["n"]].mean(axis=1))
    assert "by_position" not in rows[0]
    assert np.array_equal(rows[1]["by_position"], nats[128].mean(axis=0))


def test_readings_in_the_same_network_are_scored_once():
    model = Uniform()
    rows, _ = scored(model, [PLAIN, Reading("yarn")], lengths=[8, 16], names=["span"])
    assert len(rows) == 4 and model.asked == [8, 16]  # nothing is past the trained length
    assert values(rows, way="yarn") == values(rows, way="")


def test_a_length_that_needs_too_much_memory_has_a_note_and_the_others_go_on():
    rows, _ = scored(Uniform(most=100), names=["fixed"], lengths=[64, 128, 256])
    assert [row["note"] for row in rows] == ["", "out of memory", "out of memory"]
    assert [row["value"] for row in rows] == [256.0, None, None]


def test_fewer_bytes_than_fixed_targets_have_a_note():
    rows, _ = scored(Uniform(), lengths=[16, 64])
    assert [row["note"] for row in rows] == ["", "", "16 < 64 targets", ""]


def test_a_model_that_gives_nan_is_noted():
    model = RUN.new_model()
    torch.nn.init.constant_(model.norm.weight, float("nan"))
    rows, _ = scored(model)
    assert {row["note"] for row in rows} == {"loss nan nats"} and values(rows) == []


def test_progress_is_told_before_every_cell():
    told = []

    def tick(reading, protocol, n):
        told.append((reading.way, protocol, n))

    plan = [PLAIN, Reading("yarn")]
    scored(Uniform(), plan, lengths=[8], tick=tick)
    assert told == [(way, name, 8) for way in ("", "yarn") for name in ("span", "fixed")]


# What may stand in one table


STAMP = dict(text="words", read_dtype="float32")


def row(value=2.0, protocol="span", count=1024, first_end=0, **more):
    found = dict(value=value, protocol=protocol, count=count, first_end=first_end)
    return measured(**found) | STAMP | more


def test_rows_on_the_same_targets_are_comparable():
    protocols = Protocols(DATA, [64], ("span", "fixed"), span=1024, ends=np.array([100, 200]))
    same = [row(), row(protocol="fixed", count=128, first_end=100), row(value=None, count=None)]
    other = [
        row(count=512), row(text="other"), row(read_dtype="bfloat16"),
        row(protocol="fixed", count=128, first_end=99),
    ]  # fmt: skip
    assert comparable(same + other, protocols, STAMP) == same


def test_of_another_protocol_the_targets_of_most_rows_count():
    rows = [row(), row(count=512), row(), row(protocol="fixed", count=5, first_end=1)]
    assert on_targets(rows, {"fixed": (5, 1)}) == [rows[0], rows[2], rows[3]]


def test_nats_by_position_are_the_mean_over_seeds():
    longest = [
        row(n=128, by_position=torch.full((128,), nats), **RUN.replace(seed=seed).flat())
        for seed, nats in enumerate((1.0, 2.0))
    ]
    shorter = row(n=64, **RUN.flat())
    failed = row(n=128, value=None, **RUN.replace(scheme="sin").flat())
    found = by_position([shorter, failed, *longest])
    assert list(found) == ["rope"] and np.array_equal(found["rope"], np.full(128, 1.5))


def test_of_another_protocol_the_targets_of_most_rows_are_kept():
    base = measured(protocol="fixed", value=2.0)
    rows = [base | dict(count=count, first_end=0) for count in (64, 320, 320)]
    kept = on_targets(rows, {})
    assert [row["count"] for row in kept] == [320, 320]
