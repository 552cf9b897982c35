import json

import pytest
import torch

from helpers import RUN
from lab.rows import (
    distinct,
    for_csv,
    label,
    measured,
    merged,
    pack,
    read_as,
    read_rows,
    select,
    trained_as,
    unpack,
    values,
    write_rows,
)
from lab.runs import Run


def row(run=RUN, **found):
    return run.flat() | measured(**found)


ROWS = [
    row(n=16, metric="ppl", value=2.5),
    row(n=32, metric="ppl", note="max_len 16"),
    row(RUN.replace(scheme="sin"), n=16, metric="ppl", value=3.5),
]

# Choosing rows


def test_a_measured_row_has_every_field():
    assert measured(n=16) == measured() | {"n": 16} and measured()["value"] is None


def test_rows_are_selected_by_any_of_their_fields():
    assert select(ROWS, scheme="rope") == ROWS[:2] and select(ROWS, n=16, scheme="sin") == ROWS[2:]
    assert select(ROWS) == ROWS and select(ROWS, nonsense=1) == []


def test_values_leave_out_what_could_not_be_computed():
    assert values(ROWS, metric="ppl") == [2.5, 3.5] and values(ROWS, n=32) == []


def test_distinct_values_keep_the_order_of_the_rows():
    assert distinct(ROWS[::-1], "n") == [16, 32]
    assert distinct(ROWS, "scheme", "n") == [("rope", 16), ("rope", 32), ("sin", 16)]


def test_a_new_measurement_takes_the_place_of_the_old_one():
    old = [measured(table="t", n=n, value=1.0) for n in (16, 32)]
    new = [measured(table="t", n=n, value=2.0) for n in (32, 64)]
    found = merged(old, new)
    assert [(r["n"], r["value"]) for r in found] == [(16, 1.0), (32, 2.0), (64, 2.0)]


@pytest.mark.parametrize("other", [
    dict(table="u"), dict(way="yarn"), dict(factor=2.0), dict(read_window=8), dict(step=10),
    dict(protocol="fixed"), dict(within=8), dict(metric="loss"), dict(text="another"),
])  # fmt: skip
def test_another_measurement_is_kept_beside_the_old_one(other):
    old, new = measured(table="t", n=16), measured(table="t", n=16) | other
    assert merged([old], [new]) == [old, new]


# Names


@pytest.mark.parametrize("change, words", [
    (dict(), ""),
    (dict(random_positions=64), "trained at random positions below 64"),
    (dict(train_lens=(8, 16)), "trained at 8 16"),
    (dict(window=8), "trained with window 8"),
    (dict(copies=True), "trained with copies"),
    (dict(start=RUN, train_lens=(64,)), "fine-tuned after 16"),
    (dict(window=8, copies=True), "trained with window 8, trained with copies"),
])  # fmt: skip
def test_trained_as_says_what_was_special_in_the_training(change, words):
    assert trained_as(RUN.replace(**change).flat()) == words


@pytest.mark.parametrize("found, words", [
    (dict(), ""),
    (dict(way="yarn"), "yarn"),
    (dict(way="linear", factor=4.0), "linear, factor 4"),
    (dict(read_window=16), "window 16"),
])  # fmt: skip
def test_read_as_says_how_a_model_was_read(found, words):
    assert read_as(measured(**found)) == words


def test_a_label_is_the_scheme_and_what_is_special_about_it():
    assert label(row()) == "rope"
    special = row(RUN.replace(window=8), way="yarn", factor=2.5)
    assert label(special) == "rope, trained with window 8, yarn, factor 2.5"


# Files


def test_rows_come_back_from_a_file_as_they_were(tmp_path):
    write_rows(tmp_path / "rows.json", ROWS)
    found = read_rows(tmp_path / "rows.json")
    assert found == ROWS and type(found[0]["train_lens"]) is tuple


def test_what_all_rows_share_is_written_once(tmp_path):
    write_rows(tmp_path / "rows.json", ROWS)
    content = json.loads((tmp_path / "rows.json").read_text())
    assert content["same"]["dim"] == 16
    assert content["rows"][0] == dict(scheme="rope", n=16, value=2.5, note="")


def test_a_row_has_a_line_of_its_own(tmp_path):
    write_rows(tmp_path / "rows.json", ROWS)
    lines = (tmp_path / "rows.json").read_text().splitlines()
    assert sum('"scheme": "' in line and '"n": ' in line for line in lines) == len(ROWS)


def test_no_rows_and_one_row_come_back_too(tmp_path):
    for rows in ([], ROWS[:1]):
        write_rows(tmp_path / "rows.json", rows)
        assert read_rows(tmp_path / "rows.json") == rows


def test_arrays_stay_out_of_files():
    rows = [ROWS[0] | dict(by_window=torch.zeros(3), by_position=torch.zeros(16)), ROWS[2]]
    assert unpack(pack(rows)) == [ROWS[0], ROWS[2]]
    assert not {"by_window", "by_position"} & set(for_csv(rows)[0])


def test_rows_with_unlike_fields_come_back_as_they_were():
    rows = [ROWS[0] | {"commit": "abc"}, ROWS[1]]
    assert unpack(pack(rows)) == rows


def test_a_number_that_json_lacks_is_refused(tmp_path):
    with pytest.raises(ValueError):
        write_rows(tmp_path / "rows.json", [row(value=float("nan"))])
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("content", ["{}", "[]", "[1, 2]", "not JSON", '{"rows": 3, "same": {}}'])
def test_a_file_of_another_kind_is_named(tmp_path, content):
    (tmp_path / "old.json").write_text(content)
    with pytest.raises(ValueError, match="old.json is not a file of rows of this version"):
        read_rows(tmp_path / "old.json")


def test_a_csv_has_the_fields_that_differ_and_what_was_measured():
    found = for_csv(ROWS)
    assert list(found[0]) == ["scheme", "seed", "protocol", "n", "metric", "value", "note"]
    assert [cells["value"] for cells in found] == [2.5, None, 3.5]


def test_a_csv_of_unlike_rows_has_a_cell_for_each():
    rows = [row(RUN.replace(train_lens=(8, 16))), row() | {"commit": "abc"}]
    found = for_csv(rows)
    assert [cells["train_lens"] for cells in found] == ["8 16", "16"]
    assert [cells["commit"] for cells in found] == [None, "abc"]


def test_rows_of_the_default_run_have_plain_values():
    json.dumps(Run().flat() | measured())
