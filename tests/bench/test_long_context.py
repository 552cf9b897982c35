"""bench/long_context.py compares the same functions, and measures one pass and nothing else."""

import json
import multiprocessing
import sys
from types import SimpleNamespace

import pytest
import torch

from bench import long_context
from bench.long_context import LAYERS, OURS, TEXTBOOK, Case, tables
from lab.rows import distinct, select
from schemes.scheme import SCHEMES

CASE = Case("layer", "none", OURS)


@pytest.mark.parametrize("scheme", LAYERS)
def test_textbook_and_layer_are_the_same_function(scheme):
    torch.manual_seed(0)
    layer, x = long_context.new_layer(scheme), torch.randn(1, 100, 128)
    with torch.no_grad():
        assert torch.allclose(long_context.textbook(layer, scheme, x), layer(x), atol=1e-5)


@pytest.mark.parametrize("case", long_context.all_cases(), ids=", ".join)
def test_every_case_makes_a_pass(case):
    with torch.no_grad():
        long_context.forward_pass(case, 80)(80)


def test_child_says_what_went_wrong(monkeypatch):
    def broken(case, longest):
        raise KeyError("some library's bug")

    monkeypatch.setattr(long_context, "forward_pass", broken)
    context = multiprocessing.get_context("fork")
    told = long_context.measure(context, CASE, 64, None)
    assert told == 'KeyError: "some library\'s bug"'


def test_child_that_ends_early_leaves_a_note(monkeypatch):
    def end(pipe, case, T, spare):
        sys.exit(9)

    monkeypatch.setattr(long_context, "measure_here", end)
    context = multiprocessing.get_context("fork")
    assert long_context.measure(context, CASE, 64, None) == "process ended with 9"


def test_time_and_memory_leave_out_the_first_pass_and_what_was_held(monkeypatch):
    spent = iter([3, 0.5, 0.7, 0.6, 0.9])  # seconds of each pass; together over five
    clock, sizes = SimpleNamespace(now=0), {"VmRSS": 100, "VmHWM": 350}

    def forward(T):
        if T > 64:  # the pass of 64 tokens only warms up
            clock.now += next(spent)

    monkeypatch.setattr(long_context.time, "perf_counter", lambda: clock.now)
    monkeypatch.setattr(long_context, "memory", sizes.get)
    monkeypatch.setattr(long_context.Path, "write_text", lambda path, text: None)
    result = long_context.time_and_memory(forward, 128)
    assert result == dict(seconds=pytest.approx(0.65), extra=250, total=350)


def test_case_that_fails_is_not_tried_again(monkeypatch):
    tried = []

    def measure(context, case, T, spare):
        tried.append((case.scheme, T))
        if case.scheme == "rope":
            return "out of memory"
        return dict(seconds=0.001 * len(tried), extra=2**20, total=None)

    monkeypatch.setattr(long_context, "measure", measure)
    rope, none = (Case("layer", scheme, OURS) for scheme in ("rope", "none"))
    rows = long_context.measure_all([rope, none], [64, 128], rounds=2)
    assert tried == [("rope", 64), ("none", 64), ("none", 64), ("none", 128), ("none", 128)]
    notes = distinct(select(rows, scheme="rope"), "note", "seconds")
    assert notes == [("out of memory at 64", None)]
    cells = distinct(select(rows, scheme="none"), "T", "seconds", "extra_mb", "total_mb")
    assert cells == [(64, 0.0025, 1.0, None), (128, 0.0045, 1.0, None)]


def row(case, T, seconds, extra):
    note = "" if seconds else "out of memory at 128"
    total = extra and extra + 300
    cell = dict(T=T, seconds=seconds, extra_mb=extra, total_mb=total, note=note)
    return case._asdict() | cell


def rows_of_all(lengths):
    rows = []
    for scheme in LAYERS:
        ours, book = Case("layer", scheme, OURS), Case("layer", scheme, TEXTBOOK)
        rows += [row(ours, T, 0.01 * T, 6 if scheme == "alibi" else 4) for T in lengths]
        rows += [row(book, T, 0.2 * T, 90) for T in lengths[:-1]]
        rows.append(row(book, lengths[-1], None, None))
    for scheme in SCHEMES:
        case = Case("model", scheme, OURS)
        rows += [row(case, T, 1.0, T - len(scheme)) for T in lengths]
    return rows


def test_tables_compare_alibi_with_the_formula_and_with_none():
    text = tables(rows_of_all([32, 64, 128]))
    told = "At T = 64 the textbook formula takes 20 times as long as the ALiBi layer, whose memory "
    assert told + "is 1.50 times that of the `none` layer." in text
    assert "At T = 128 a process with a model of this repository holds at most 425 MB" in text
    assert "| alibi | textbook formula | 6,400 ms, 90 MB | 12,800 ms, 90 MB | – |" in text
    assert "– alibi layer, textbook formula: out of memory at 128; " in text


def test_tables_do_without_memory_where_it_is_unknown():
    rows = [one | dict(extra_mb=None, total_mb=None) for one in rows_of_all([32, 64, 128])]
    text = tables(rows)
    assert "| alibi | textbook formula | 6,400 ms | 12,800 ms | – |" in text
    assert "At T" not in text


def test_results_say_where_they_come_from(cli, tmp_path, monkeypatch):
    def measure_all(cases, lengths, rounds):
        assert (len(cases), rounds) == (2 * 3 + 2 * 5 + 4, 1)
        return rows_of_all(lengths)

    monkeypatch.setattr(long_context, "measure_all", measure_all)
    code, told, _ = cli(long_context, "--quick", "--lengths", 128, 64, "--out", tmp_path)
    assert code == 0 and "The whole model" in told
    saved = json.loads((tmp_path / "bench_long.json").read_text("utf-8"))
    about = saved["provenance"]
    assert about["command"].startswith("python bench/long_context.py --quick --lengths 128 64")
    assert about["text_name"] == "none: random bytes"
    assert saved["rows"] == rows_of_all([64, 128])
    names = sorted(path.name for path in tmp_path.iterdir())
    assert names == [f"bench_long.{kind}" for kind in ("csv", "json", "md", "png")]


def test_length_given_twice_is_refused(cli):
    code, _, error = cli(long_context, "--lengths", 64, 64)
    assert code == 2 and "--lengths: 64 is given 2 times" in error
