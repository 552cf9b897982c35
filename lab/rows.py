"""Rows: what tables and pictures read. A row is a flat dict: its run, what was measured, whence.

fields of the Run       scheme, seed, task, dim, … (lab/runs.py, `flat`)
table                   for which table it was measured: train_compare, extrapolation, …
way, factor             how the scheme was read past its length ("" as it is); a fixed factor
read_window             the window it was read with (0: that of its training)
protocol, n             span, fixed, …; the length
step                    after which training step (None: after the last)
within                  attention: the distance up to which it is added up
metric, value           ppl, loss, parameters, …
low, high               95 % bootstrap interval over windows, of a perplexity
count                   how many targets
note                    why there is no value
text, command, commit … where the row comes from (lab/provenance.py, `stamp`)
"""

import json
import math
from pathlib import Path

from lab.files import write_atomically

MEASURED = dict(
    table="", way="", factor=None, read_window=0, protocol="", n=None, step=None, within=None,
    metric="", value=None, low=None, high=None, count=None, first_end=None, note="",
)  # fmt: skip
# Kept in checkpoints beside a row's value, for tests and pictures: mean nats of each window, and of
# each position in a window.
ARRAYS = ("by_window", "by_position")
# Two rows of one model with these alike are of the same cell, and if they are of the same targets
# as well, the same measurement made twice.
CELL = (
    "table", "way", "factor", "read_window", "protocol", "n", "step", "within", "metric", "text",
)  # fmt: skip
TARGETS = ("count", "first_end", "read_dtype")


def measured(**values):
    """What was measured, with every other field at its default."""
    return MEASURED | values


def cell_of(row):
    return tuple(row.get(name) for name in CELL)


def key_of(row):
    return cell_of(row) + tuple(row.get(name) for name in TARGETS)


def merged(old, new):
    """Old rows of one model with the new ones in the place of the same measurement.

    An old row without a value gives way to any new one of its cell. A value that is not a finite
    number becomes a note, since no file of rows could hold it.
    """
    old, new = ([_finite(row) for row in rows] for rows in (old, new))
    again = {cell_of(row) for row in new}
    kept = [row for row in old if row["value"] is not None or cell_of(row) not in again]
    return list(({key_of(row): row for row in kept} | {key_of(row): row for row in new}).values())


def _finite(row):
    value = row["value"]
    if isinstance(value, float) and not math.isfinite(value):
        return row | dict(value=None, note=row["note"] or f"{row['metric']} is {value}")
    return row


def select(rows, **wanted):
    """The rows whose fields are as wanted."""
    return [row for row in rows if all(row.get(key) == value for key, value in wanted.items())]


def values(rows, **wanted):
    """The values, where there are any, of the rows whose fields are as wanted."""
    return [row["value"] for row in select(rows, **wanted) if row["value"] is not None]


def distinct(rows, *names):
    """The different values of a field, or tuples of several fields, in the order of the rows."""
    if len(names) == 1:
        return list(dict.fromkeys(row[names[0]] for row in rows))
    return list(dict.fromkeys(tuple(row[name] for name in names) for row in rows))


def trained_as(row):
    """Say what was special in the training of a row or a Run's `flat`; nothing if it was plain."""
    words = []
    if row["random_positions"]:
        words.append(f"trained at random positions below {row['random_positions']}")
    if len(row["train_lens"]) > 1:
        words.append(f"trained at {' '.join(map(str, row['train_lens']))}")
    if row["window"]:
        words.append(f"trained with window {row['window']}")
    if row["copies"]:
        words.append("trained with copies")
    if row["start_len"]:
        words.append(f"fine-tuned after {row['start_len']}")
    return ", ".join(words)


def read_as(row):
    """Say how a row's model was read; nothing if it was read as it is."""
    words = [row["way"]] if row["way"] else []
    if row["factor"]:
        words.append(f"factor {row['factor']:g}")
    if row["read_window"]:
        words.append(f"window {row['read_window']}")
    return ", ".join(words)


def label(row):
    """The name of a row's line in a table: its scheme, and what is special about it."""
    return ", ".join(filter(None, (row["scheme"], trained_as(row), read_as(row))))


def pack(rows):
    """Rows -> {"same": fields alike in all of them, "rows": the others}, without the arrays."""
    rows = [{key: value for key, value in row.items() if key not in ARRAYS} for row in rows]
    same = dict(rows[0]) if rows else {}
    for row in rows:
        same = {key: value for key, value in same.items() if key in row and row[key] == value}
    others = [{key: value for key, value in row.items() if key not in same} for row in rows]
    return {"same": same, "rows": others}


def unpack(packed):
    """The rows of `pack`. ValueError if it is something else."""
    try:
        rows = [packed["same"] | row for row in packed["rows"]]
        return [row | {"train_lens": tuple(row["train_lens"])} for row in rows]
    except (KeyError, TypeError):
        raise ValueError("not a file of rows") from None


def write_rows(path, rows):
    """Rows as JSON: what they have in common, then a line for each."""
    packed = pack(rows)
    same = json.dumps(packed["same"], indent=1, ensure_ascii=False, allow_nan=False)
    lines = (json.dumps(row, ensure_ascii=False, allow_nan=False) for row in packed["rows"])
    text = f'{{"same": {same},\n"rows": [\n' + ",\n".join(lines) + "\n]}\n"
    write_atomically(path, text)


def read_rows(path):
    """The rows of a file of write_rows. ValueError names a file of another kind."""
    try:
        return unpack(json.loads(Path(path).read_text("utf-8")))
    except ValueError:
        raise ValueError(f"{path} is not a file of rows of this version") from None


def for_csv(rows):
    """Rows with the fields that differ between them, and what was measured, as plain cells."""
    packed = pack(rows)
    always = ("scheme", "seed", "protocol", "n", "metric", "value")
    if any(row.get("step") is not None for row in rows):
        always += ("step",)
    keys = [key for key in rows[0] if key in always or key not in packed["same"]]
    keys = list(dict.fromkeys(keys + [key for row in packed["rows"] for key in row]))
    keys = [key for key in keys if key not in ARRAYS]
    return [{key: _cell(row.get(key)) for key in keys} for row in rows]


def _cell(value):
    return " ".join(map(str, value)) if isinstance(value, tuple) else value
