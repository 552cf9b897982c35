"""Perplexity by length: rows, tables, partial runs, and what is refused."""

import csv
import io
import shutil

import numpy as np
import pytest
import torch
from torch import nn

import extrapolation_test
import train_compare
from helpers import RUN, TINY, rows_of, song, train_tiny, without_pictures
from lab.checkpoints import Checkpoint
from lab.lengths import Protocols, score_readings
from lab.reading import Reading
from lab.rows import distinct, select, values
from lab.runs import RECIPE
from lab.tables import compare_all, lengths_tables, summarise
from schemes.scheme import SCHEMES

QUICK = ("--lengths", 64, "--protocol", "span", "--span-bytes", 1024)


@pytest.fixture(autouse=True)
def no_pictures(monkeypatch):
    without_pictures(monkeypatch)


@pytest.fixture(scope="module")
def trained(tmp_path_factory):
    """Five tiny models of two seeds, trained at 16 bytes: a learned table has 256 rows."""
    folder, flags = tmp_path_factory.mktemp("trained"), " ".join(TINY)
    with pytest.MonkeyPatch.context() as patch:
        without_pictures(patch)
        return train_tiny(folder, f"{flags} --seeds 0 1", 1000)


@pytest.fixture
def out(trained, tmp_path):
    return shutil.copytree(trained, tmp_path / "out")


@pytest.fixture
def read(cli, out):
    """read(*flags) -> (exit code, stdout, stderr) of reading the models in `out`."""

    def call(*flags):
        return cli(extrapolation_test, "--out", out, "--device", "cpu", *flags)

    return call


# Rows and tables


def test_a_table_of_all_schemes(read, out):
    flags = ("--lengths", 64, 128, 512, "--span-bytes", 2048, "--windows", 6)
    code, stdout, _ = read(*flags)
    assert code == 0 and "notice" not in stdout
    rows = rows_of(out, "extrapolation")
    assert distinct(rows, "scheme", "seed") == [(s, seed) for s in SCHEMES for seed in (0, 1)]
    cells = [(p, n) for p in ("span", "fixed") for n in (64, 128, 512)]
    assert distinct(rows, "protocol", "n") == cells and len(rows) == 10 * len(cells)
    for row in rows:
        if row["scheme"] == "learned" and row["n"] == 512:  # what cannot be computed says why
            assert row["value"] is None and row["note"] == "max_len 256"
        else:
            assert row["low"] <= row["value"] <= row["high"] and row["note"] == ""
            assert row["count"] == (2048 if row["protocol"] == "span" else 6 * 64)
    text = (out / "extrapolation.md").read_text()
    assert text in stdout and text.count("max_len 256") == 2 and "seeds 0, 1" in text
    assert all(row["command"].startswith("python extrapolation_test.py") for row in rows)
    lines = list(csv.DictReader(io.StringIO((out / "extrapolation.csv").read_text())))
    assert len(lines) == 60 and lines[0]["scheme"] == "learned"


@pytest.mark.slow
def test_the_picture_is_drawn(read, out, monkeypatch):
    monkeypatch.undo()
    assert read("--span-bytes", 1024, "--windows", 4)[0] == 0
    assert (out / "extrapolation.png").stat().st_size > 10_000


def test_lengths_shorter_than_the_fixed_targets_say_so(read, out):
    assert read("--schemes", "none", "--seeds", 0)[0] == 0  # at 16, 32, 64 and 128
    rows = rows_of(out, "extrapolation")
    (short,) = select(rows, protocol="fixed", n=16)
    assert short["note"] == "16 < 64 targets" and short["value"] is None
    assert values(rows, protocol="fixed", n=64)[0] > 1 and values(rows, protocol="span", n=16)


def test_the_number_at_the_training_length_is_the_one_of_training(read, out):
    assert read("--lengths", 16, "--protocol", "span")[0] == 0
    trained = select(rows_of(out), protocol="span")
    again = rows_of(out, "extrapolation")
    assert [(row["scheme"], row["seed"], row["value"]) for row in again] == [
        (row["scheme"], row["seed"], row["value"]) for row in trained
    ]


def test_default_lengths_and_choice_of_schemes(read, out):
    assert read("--schemes", "rope", "alibi", "--seeds", 1, "--protocol", "span")[0] == 0
    rows = rows_of(out, "extrapolation")
    assert [(row["scheme"], row["n"]) for row in rows] == [
        (scheme, n) for scheme in ("rope", "alibi") for n in (16, 32, 64, 128)
    ]


def test_dtype_of_the_reading(read, out):
    found = {}
    for dtype in ("fp32", "bf16"):
        assert read(*QUICK, "--schemes", "rope", "--seeds", 0, "--dtype", dtype)[0] == 0
        (found[dtype],) = rows_of(out, "extrapolation")
    exact, low = (found[dtype]["value"] for dtype in ("fp32", "bf16"))
    assert low != exact and low == pytest.approx(exact, rel=0.05)
    assert found["bf16"]["read_dtype"] == "bfloat16"


def test_seeds_that_differ_between_schemes_are_named(read, out):
    (out / "checkpoints" / "rope-seed1.pt").unlink()
    code, stdout, _ = read("--protocol", "span", "--schemes", "rope", "alibi")
    assert code == 0 and "over seeds 0; alibi: 0, 1. " in stdout


# Cells that cannot be computed


class Hungry(nn.Module):
    position = None

    def forward(self, ids):
        if ids.shape[1] > 100:
            raise RuntimeError("CUDA out of memory")
        return torch.zeros(*ids.shape, 256)


def test_too_little_memory_marks_the_cell_and_the_others_go_on():
    run = RUN.replace(scheme="none", train_lens=(64,))
    one = Checkpoint("none-seed0.pt", run, [], 0.0, None)
    data = np.zeros(5000, np.uint8)
    protocols = Protocols.at(data, [64, 128, 256], ["fixed"], 1024, 5)
    rows = score_readings(one, Hungry(), [Reading()], protocols, "cpu")
    assert [row["note"] for row in rows] == ["", "out of memory", "out of memory"]
    rows = [run.flat() | row for row in rows]
    text = lengths_tables(rows, summarise(rows), compare_all(rows), 64)
    assert "| none | 256.0 | out of memory | out of memory | 64 |" in text.replace("**", "")


def test_a_model_that_gives_nan_is_noted(read, out):
    path = out / "checkpoints" / "rope-seed1.pt"
    saved = torch.load(path, weights_only=True)
    saved["model"]["norm.weight"][:] = float("nan")
    torch.save(saved, path)
    code, stdout, _ = read("--schemes", "rope", "--seeds", 1)
    assert code == 0 and "| rope | loss nan nats | loss nan nats |" in stdout
    assert "NaN" not in (out / "extrapolation.json").read_text()


TABLE = """
import torch
from torch import nn


class Table(nn.Module):
    def __init__(self, dim):
        super().__init__()
        self.max_len, self.rows = None, nn.Parameter(torch.zeros(32, dim))

    def forward(self, positions):
        return self.rows[positions]
"""


@pytest.fixture
def with_table(cli, tmp_path):
    """A folder with a model of an own scheme that fails past 32, beside one of `none`."""
    (tmp_path / "words.txt").write_bytes(song(400))
    (tmp_path / "short.py").write_text(TABLE)
    schemes = ("--schemes", f"{tmp_path / 'short.py'}:Table", "none")
    place = ("--data", tmp_path / "words.txt", "--out", tmp_path / "own")
    assert cli(train_compare, *TINY, *place, *schemes)[0] == 0
    return tmp_path


def test_a_scheme_that_fails_at_a_length_stops_no_other(cli, with_table):
    out = ("--out", with_table / "own", "--device", "cpu")
    flags = ("--lengths", 32, 64, "--protocol", "span")
    code, stdout, _ = cli(extrapolation_test, *out, *flags)
    assert code == 0 and "IndexError: index 32 is out of bounds" in stdout
    rows = rows_of(with_table / "own", "extrapolation")
    assert distinct(rows, "scheme")[0] == "none"
    assert [row["value"] is not None for row in rows] == [True, True, True, False]


def test_a_scheme_file_or_a_text_that_is_gone_is_named(cli, with_table):
    out = ("--out", with_table / "own", "--device", "cpu")
    (with_table / "short.py").unlink()
    code, _, stderr = cli(extrapolation_test, *out)
    assert code == 2 and "does not fit this code (scheme file" in stderr
    assert "no such file" in stderr and stderr.count("\n") == 1
    assert cli(extrapolation_test, *out, *QUICK, "--schemes", "none")[0] == 0
    (with_table / "words.txt").unlink()
    code, _, stderr = cli(extrapolation_test, *out, "--schemes", "none")
    assert code == 2 and "the models were trained on it, say with --data where it is now" in stderr


# Other texts, other trainings


def test_other_text_is_noticed(read, out, tmp_path):
    (tmp_path / "other.txt").write_bytes(b"something else " * 2000)
    flags = ("--data", tmp_path / "other.txt", "--schemes", "none", "--protocol", "span")
    code, stdout, _ = read(*flags)
    told = "notice: the models were trained on other text, or another part of it, than this (other"
    assert code == 0 and told in stdout


def test_the_same_text_split_otherwise_is_noticed(read, tmp_path):
    path = tmp_path / "again"
    path.mkdir()
    (path / "words.txt").write_bytes(song(1000))
    code, stdout, _ = read("--data", path, "--schemes", "none", "--protocol", "span")
    assert code == 0 and "notice: the models were trained on other text, or another" in stdout


OTHER = dict(
    task="other", sha256="other", held_out="other", steps=7, batch_size=3, train_lens=(16, 32),
    dim=32, n_layer=2, n_head=4, lr=0.01, adam_lr=0.01, dtype="bfloat16",
)  # fmt: skip


@pytest.mark.parametrize("key", OTHER)
def test_unlike_training_is_not_put_in_one_table(read, out, key):
    assert set(OTHER) == set(RECIPE) - {"start_recipe"}  # that is made of a start's own fields
    path = out / "checkpoints" / "rope-seed1.pt"
    saved = torch.load(path, weights_only=True)
    saved["run"][key] = OTHER[key]
    torch.save(saved, path)
    code, _, stderr = read()
    assert code == 2 and stderr.count("\n") == 1
    if key in ("dim", "n_layer"):  # then the weights do not fit either
        assert "rope-seed1.pt does not fit this code" in stderr
    elif key == "n_head":  # then the scheme is another one
        assert "rope-seed1.pt: rope behaves otherwise than when it was trained" in stderr
    else:
        assert f"rope seed 1 was trained with {key} " in stderr
    assert read(*QUICK, "--schemes", "rope", "--seeds", 0)[0] == 0
