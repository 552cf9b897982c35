"""Tables are collected from all checkpoints of a folder, and from the runs that failed there."""

import contextlib
import json
from pathlib import Path

from data.corpus import load_corpus
from lab.checkpoints import find, largest
from lab.rows import select, trained_as
from lab.runs import RECIPE, Run


def collect(out, table):
    """The rows of a table from all checkpoints and failed runs in `out` -> rows, complaints.

    A run that failed has its row where no model of an equal run is; there may be one of another.
    """
    bad = []
    found = find([out], bad=bad)
    rows = [row for one in found for row in select(one.rows, table=table)]
    there = [one.run for one in found]
    for run, failed in failures(out):
        if run not in there:
            rows += select(failed, table=table)
    return rows, bad


def failures(folder):
    """The runs that ended without a model, of the *.failed files in folder/checkpoints.

    -> [(run, rows)]
    """
    found = []
    for path in sorted((Path(folder) / "checkpoints").glob("*-seed*.failed")):
        with contextlib.suppress(OSError, ValueError, KeyError, TypeError):
            content = json.loads(path.read_text("utf-8"))
            run = Run.from_dict(content["run"])
            flat = run.flat()
            found.append((run, [flat | row for row in content["rows"]]))
    return found


def alike(rows, like):
    """The rows whose training recipe is that of the Run `like`, and the labels of the others.

    Of several training lengths the largest counts.
    """
    recipe, same, others = _recipe(like.flat()), [], []
    for row in rows:
        if _recipe(row) == recipe:
            same.append(row)
        else:
            others.append(f"{row['scheme']} seed {row['seed']}")
    return same, list(dict.fromkeys(others))


def _recipe(row):
    return [largest(row[name]) for name in RECIPE]


def one_per_line(found, first, bad):
    """The checkpoints without those whose line and seed in a table another one has.

    Those at the paths `first` are preferred; `bad` is told of what is left out.
    """
    kept = {}
    for one in sorted(found, key=lambda one: one.path not in first):
        line = (one.run.scheme, one.run.seed, trained_as(one.run.flat()))
        other = kept.setdefault(line, one)
        if other is not one:
            bad.append(f"{one.path} is of another model of the same line and seed as {other.path}")
    chosen = {one.path for one in kept.values()}
    return [one for one in found if one.path in chosen]


def text_of(run, data=None):
    """The text that a model was trained on, or another one. ValueError if it is not there."""
    try:
        return load_corpus(run.data if data is None else data)
    except ValueError as error:
        if data is not None:
            raise
        told = "the models were trained on it, say with --data where it is now"
        raise ValueError(f"{error}; {told}") from None
