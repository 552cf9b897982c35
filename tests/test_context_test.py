"""What a model uses of its context: use, copy, attention, their rows and tables."""

import shutil

import numpy as np
import pytest
import torch
from torch import nn

import context_test
import train_compare
from data.corpus import load_corpus
from helpers import RUN, TINY, rows_of, train_tiny, without_pictures
from lab import score
from lab.checkpoints import load
from lab.copying import copy_accuracy, texts_with_copies
from lab.probes import attention_by_distance
from lab.rows import distinct, measured, select, values
from lab.stats import measured_ppl
from lab.tables import context_tables

DATA = np.random.default_rng(1).integers(32, 64, 5000).astype(np.uint8)
SIZE = [*TINY, "--train-len", "64", "--steps", "3"]


@pytest.fixture(autouse=True)
def no_pictures(monkeypatch):
    without_pictures(monkeypatch)


@pytest.fixture(scope="module")
def trained(tmp_path_factory):
    """Five tiny models, trained at 64 bytes."""
    with pytest.MonkeyPatch.context() as patch:
        without_pictures(patch)
        return train_tiny(tmp_path_factory.mktemp("context"), " ".join(SIZE), 3000)


@pytest.fixture
def out(trained, tmp_path):
    return shutil.copytree(trained, tmp_path / "out")


@pytest.fixture
def read(cli, out):
    """read(*flags) -> (exit code, stdout, stderr) of reading the models in `out`."""

    def call(*flags):
        return cli(context_test, "--out", out, "--device", "cpu", "--windows", 3, *flags)

    return call


# Copying


def test_texts_differ_in_the_first_string_only():
    repeated, without = (texts_with_copies(DATA, 100, 6, first) for first in (True, False))
    first = repeated[:, :32]
    assert repeated.shape == (6, 132) and (repeated[:, 32:] == without[:, 32:]).all()
    assert (first == repeated[:, -32:]).all() and ((97 <= first) & (first < 123)).all()
    assert (without[:, :32] < 64).all()
    assert all(bytes(row[:100].tolist()) in bytes(DATA) for row in without)
    assert len({bytes(row.tolist()) for row in first}) == 6
    adjacent = texts_with_copies(DATA, 32, 2, True)
    assert adjacent.shape == (2, 64) and (adjacent[:, :32] == adjacent[:, 32:]).all()


class Copier(nn.Module):
    """Predicts the byte that stood `distance` before the next one, and 0 where there is none."""

    def __init__(self, distance):
        super().__init__()
        self.distance = distance

    def forward(self, ids):
        back = nn.functional.pad(ids.long(), (self.distance - 1, 0))[:, : ids.shape[1]]
        return nn.functional.one_hot(back, 256).float()


def always_a(ids):
    return torch.eye(256)[torch.full_like(ids.long(), 97)]


def test_a_copier_is_right_only_where_there_is_something_to_copy():
    assert copy_accuracy(Copier(100), DATA, 100, 6, True) == 1
    assert copy_accuracy(Copier(100), DATA, 100, 6, False) == 0
    assert copy_accuracy(Copier(64), DATA, 100, 6, True) == 0


def test_chance_is_one_letter_in_26():
    assert copy_accuracy(always_a, DATA, 64, 400, True) == pytest.approx(1 / 26, abs=0.01)


# The command


def test_rows_and_tables(read, out):
    code, stdout, _ = read()
    assert code == 0
    rows = rows_of(out, "context")
    assert distinct(rows, "protocol") == ["use", "copy", "attention"]
    assert distinct(rows, "metric") == [
        "ppl", "accuracy", "accuracy without the first", "share"
    ]  # fmt: skip
    rope = select(rows, scheme="rope")
    use = [row["n"] for row in select(rope, protocol="use")]
    assert use == [64, 68, 72, 80, 96, 112, 128, 192, 256]
    copy = [row["n"] for row in select(rope, metric="accuracy")]
    assert copy == [32, 48, 64, 96, 128, 256, 512, 1024]
    assert distinct(select(rope, protocol="attention"), "n") == [64, 256]
    for row in select(rows, protocol="attention", n=64, within=64):
        assert row["value"] == pytest.approx(1, abs=1e-4)
    (far,) = select(rows, scheme="learned", metric="accuracy", n=1024)
    assert far["note"] == "max_len 1024" and far["value"] is None
    assert values(rows, scheme="learned", metric="accuracy", n=512)
    text = (out / "context.md").read_text()
    assert text in stdout and "max_len 1024" in text
    assert all(row["command"].startswith("python context_test.py") for row in rows)


@pytest.mark.slow
def test_the_picture_is_drawn(read, out, monkeypatch):
    monkeypatch.undo()
    assert read()[0] == 0 and (out / "context.png").stat().st_size > 10_000


def test_models_are_read_at_their_positions_and_windows(cli, trained, tmp_path):
    """Every number of such a model against the functions called by hand."""
    out, text = tmp_path / "o", trained.parent / "words.txt"
    flags = ("--schemes", "sin", "--random-positions", 600, "--window", 20)
    assert cli(train_compare, *SIZE, *flags, "--data", text, "--out", out)[0] == 0
    assert cli(context_test, "--out", out, "--device", "cpu", "--windows", 3)[0] == 0
    rows = rows_of(out, "context")
    one = load(out / "checkpoints" / "sin-seed0.pt")
    model, val = one.model(), load_corpus(str(text)).val
    read, ends = one.run.read_by(model), score.fixed_ends(len(val), 256, 12)

    expected = measured_ppl(score.fixed(read, val, 128, ends))["value"]
    assert values(rows, protocol="use", n=128) == [pytest.approx(expected, abs=1e-4)]
    expected = round(copy_accuracy(read, val, 512, 3, True), 5)
    assert values(rows, metric="accuracy", n=512) == [expected]
    (far,) = select(rows, metric="accuracy", n=1024)
    assert "do not fit in 600 random positions" in far["note"]
    ids = torch.from_numpy(np.array(val[ends[:8, None] + np.arange(-64, 0)]))
    shares = np.cumsum(attention_by_distance(model, ids, read=read))
    for within in (1, 8, 16):
        found = values(rows, protocol="attention", n=64, within=within)
        assert found == [pytest.approx(shares[within - 1], abs=1e-5)]
    assert values(rows, protocol="attention", n=64, within=23) == [pytest.approx(1, abs=1e-5)]


# Partial runs


def measurements(rows):
    names = ("scheme", "seed", "protocol", "metric", "n", "within")
    return {tuple(row[name] for name in names): row["value"] for row in rows}


@pytest.mark.parametrize("flags", ["--schemes none", "--what copy", "--what use --schemes rope"])
def test_a_partial_run_removes_no_rows(read, out, flags):
    assert read()[0] == 0
    before = measurements(rows_of(out, "context"))
    code, stdout, _ = read(*flags.split())
    assert code == 0 and measurements(rows_of(out, "context")) == before
    assert "notice: " not in stdout


@pytest.mark.parametrize("kind", ["use", "copy"])
def test_rows_on_other_targets_are_kept_and_left_out(read, out, kind):
    assert read("--what", kind)[0] == 0
    before = measurements(rows_of(out, "context"))
    of_this_kind = measurements(select(rows_of(out, "context"), protocol=kind))
    code, stdout, _ = read("--what", kind, "--schemes", "none", "--windows", 2)
    assert code == 0 and "notice: rows measured on other targets are kept" in stdout
    rows = rows_of(out, "context")
    assert {row["scheme"] for row in rows if row["value"] is not None} == {"none"}
    assert read("--what", "attention", "--schemes", "none")[0] == 0
    shown = select(rows_of(out, "context"), protocol=kind)
    assert measurements(shown) == of_this_kind  # those that most models have
    assert read("--what", kind, "--schemes", "none")[0] == 0
    assert measurements(select(rows_of(out, "context"), protocol=kind)) == before


def test_other_text_is_noticed_and_has_its_own_table(read, out, tmp_path):
    assert read("--what", "use")[0] == 0
    (tmp_path / "other.txt").write_bytes(b"something else " * 3000)
    flags = ("--what", "use", "--schemes", "none", "--data", tmp_path / "other.txt")
    code, stdout, _ = read(*flags)
    assert code == 0 and "notice: the models were trained on other text" in stdout
    assert distinct(rows_of(out, "context"), "scheme") == ["none"]


# What is refused


@pytest.mark.parametrize(
    "wrong, message",
    [
        ("--what use use", "--what: use is given 2 times"),
        ("--what all", "invalid choice"),
        ("--schemes x", "no checkpoint of x"),
        ("--windows 1", "'1' is not a whole number from 2"),
        ("--data nowhere", "no such file or folder"),
        ("--device abacus", "there is no such device here"),
    ],
)
def test_wrong_arguments_get_one_line(read, out, wrong, message):
    code, stdout, stderr = read(*wrong.split())
    assert code == 2 and stdout == "" and message in stderr and stderr.count("\n") == 1
    assert stderr.startswith("context_test.py: ") and not list(out.glob("context*"))


def test_models_too_short_for_it_are_refused(cli, trained, tmp_path):
    place = ("--data", trained.parent / "words.txt", "--out", tmp_path / "o", "--schemes", "none")
    assert cli(train_compare, *TINY, *place)[0] == 0
    code, _, stderr = cli(context_test, "--out", tmp_path / "o")
    assert code == 2 and "trained at 16 bytes; this needs at least 64" in stderr


# Tables


def test_tables_by_hand():
    rows = []

    def add(protocol, n, value, seed=0, **more):
        found = measured(protocol=protocol, n=n, value=value, **more)
        rows.append(RUN.replace(seed=seed).flat() | found)

    for n, ppl in ((64, 5.0), (128, 4.04), (256, 4.0), (512, 4.2), (1024, 4.3)):
        add("use", n, ppl, metric="ppl")
    add("copy", 64, 0.5, metric="accuracy")
    add("copy", 64, 0.7, seed=1, metric="accuracy")
    add("copy", 64, 0.1, metric="accuracy without the first")
    add("copy", 128, None, metric="accuracy", note="max_len 9")
    add("attention", 256, None, metric="share", note="it has none")
    text = context_tables(rows, 256)
    assert "| rope | 5.00 | 4.04 | 4.00 | 4.20 | 4.30 | 128 | 512 |" in text
    assert "| rope | 0.60 (0.10) | max_len 9 |" in text
    assert "– rope, attention at 256: it has none." in text
