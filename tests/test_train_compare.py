"""What train_compare.py writes, what it trains again, and what it refuses."""

import csv
import io
import math
import os

import pytest
import torch

import train_compare
from data.corpus import load_corpus
from helpers import RUN, TINY, rows_of, tree, without_pictures
from lab import jobs
from lab.checkpoints import load
from lab.rows import distinct, measured, select, values
from lab.tables import training_table
from schemes.scheme import SCHEMES


@pytest.fixture(autouse=True)
def no_pictures(monkeypatch):
    without_pictures(monkeypatch)


@pytest.fixture
def train(cli, text, tmp_path):
    """train(*flags) -> (exit code, stdout, stderr) of a tiny training into tmp_path/out."""

    def call(*flags):
        return cli(train_compare, *TINY, "--data", text, "--out", tmp_path / "out", *flags)

    return call


@pytest.fixture
def trained(monkeypatch):
    """The schemes that are trained from now on, each time that they are."""
    names, real = [], jobs.train

    def recorded(run, *rest):
        names.append(run.scheme)
        return real(run, *rest)

    monkeypatch.setattr(jobs, "train", recorded)
    return names


def validation(rows, **wanted):
    """{scheme: validation perplexity}."""
    return {row["scheme"]: row["value"] for row in select(rows, protocol="span", **wanted)}


# Files, rows and tables


def test_files_of_a_run(train, tmp_path):
    code, stdout, _ = train("--seeds", 0, 1)
    assert code == 0
    out = tmp_path / "out"
    models = [f"checkpoints/{scheme}-seed{seed}.pt" for scheme in SCHEMES for seed in (0, 1)]
    tables = [f"train_compare.{kind}" for kind in ("csv", "json", "md", "png")]
    assert tree(out) == sorted([*models, *tables, "train_compare_curves.csv"])
    assert (out / "train_compare.md").read_text() in stdout
    rows = rows_of(out)
    assert distinct(rows, "scheme", "seed") == [(s, n) for s in SCHEMES for n in (0, 1)]
    found = list(csv.DictReader(io.StringIO((out / "train_compare.csv").read_text())))
    assert [float(line["value"]) for line in found] == [row["value"] for row in rows]


def test_curves_have_a_line_for_every_ten_steps(train, tmp_path):
    assert train("--schemes", "rope", "--steps", 25)[0] == 0
    text = (tmp_path / "out" / "train_compare_curves.csv").read_text()
    lines = list(csv.DictReader(io.StringIO(text)))
    assert [(line["scheme"], line["seed"], line["step"]) for line in lines] == [
        ("rope", "0", step) for step in ("10", "20", "25")
    ]
    saved = load(tmp_path / "out" / "checkpoints" / "rope-seed0.pt")
    assert [float(line["value"]) for line in lines] == values(saved.rows, metric="loss")


def test_rows_of_a_run(train, tmp_path):
    assert train("--schemes", "learned", "rope", "--seeds", 0, 1)[0] == 0
    rows = rows_of(tmp_path / "out")
    assert all(row["note"] == "" and row["tokens"] == 6 * 2 * 16 for row in rows)
    assert all(1 < ppl < 300 for ppl in values(rows, metric="ppl", protocol="span", n=16))
    assert set(values(rows, scheme="learned", metric="position_parameters")) == {16 * 16 * 16}
    assert set(values(rows, scheme="rope", metric="position_parameters")) == {0}
    saved = load(tmp_path / "out" / "checkpoints" / "rope-seed1.pt")
    assert (saved.run.scheme, saved.run.seed) == ("rope", 1)
    (loss,) = values(saved.rows, metric="loss", step=6)
    assert values(saved.rows, metric="train_ppl") == [pytest.approx(math.exp(loss), rel=1e-4)]
    in_table = select(rows, scheme="rope", seed=1)
    assert validation(saved.rows) == validation(in_table) and len(saved.rows) == len(in_table) + 1
    assert "position" not in " ".join(saved.weights)


def test_rows_say_where_they_come_from(train, text, tmp_path):
    assert train("--schemes", "rope")[0] == 0
    for row in rows_of(tmp_path / "out"):
        assert row["command"].startswith("python train_compare.py --steps 6")
        assert row["text"] == row["sha256"] == load_corpus(text).sha256
        assert row["text_name"] == "words.txt" and row["torch"] == torch.__version__
        assert row["commit"] and row["device"] == "cpu" and row["read_dtype"] == "float32"


def test_a_later_command_keeps_where_rows_come_from(train, tmp_path):
    assert train("--schemes", "rope", "--save-every", 7)[0] == 0
    before = select(rows_of(tmp_path / "out"), scheme="rope")
    assert train("--schemes", "none")[0] == 0
    rows = rows_of(tmp_path / "out")
    assert select(rows, scheme="rope") == before
    assert all("--save-every 7" in row["command"] for row in before)
    assert all("--save-every" not in row["command"] for row in select(rows, scheme="none"))


def test_the_table_shows_the_median_of_the_seconds():
    rows = []
    for seed, seconds in ((0, 100.4), (1, 300.4)):
        flat = RUN.replace(seed=seed).flat()
        rows.append(flat | measured(metric="train_ppl", value=3.0))
        rows.append(flat | measured(metric="ppl", protocol="span", n=16, value=3.1))
        numbers = dict(parameters=10, position_parameters=0, tokens_per_second=77)
        for metric, value in (numbers | {"seconds": seconds}).items():
            rows.append(flat | measured(metric=metric, value=value))
    line = "| rope | 2 | 3.00 ± 0.00 | 3.10 ± 0.00 | 0 | 10 | 200 | 77 |"
    assert line in training_table(rows)


# What is trained again


def test_what_is_trained_is_not_trained_again(train, trained, tmp_path):
    assert train("--schemes", "rope")[0] == 0 and trained == ["rope"]
    before = rows_of(tmp_path / "out")
    assert train("--schemes", "rope", "none")[0] == 0 and trained == ["rope", "none"]
    assert select(rows_of(tmp_path / "out"), scheme="rope") == before
    assert train("--schemes", "rope", "none", "--force")[0] == 0 and trained[2:] == ["rope", "none"]
    assert validation(rows_of(tmp_path / "out"), scheme="rope") == validation(before)


def test_other_settings_are_another_model(train, trained):
    train("--schemes", "rope")
    code, stdout, _ = train("--schemes", "rope", "--lr", "0.01")
    assert code == 0 and trained == ["rope", "rope"]
    assert "rope-seed0.pt was trained with lr 0.02, not 0.01; it will be replaced" in stdout


def test_what_is_special_in_a_training_retrains(train, tmp_path):
    special = ("--random-positions", 64), ("--window", 8), ("--copies",), ("--train-len", 8, 16)
    for flags in ((), *special):
        code, stdout, _ = train("--schemes", "sin", *flags)
        assert code == 0 and "already trained" not in stdout
        assert "already trained" in train("--schemes", "sin", *flags)[1]
        rows = rows_of(tmp_path / "out")
        assert {row["tokens"] for row in rows} == {6 * 2 * 16}
        assert validation(rows)["sin"] > 1


def test_a_text_is_known_by_its_bytes_and_not_by_its_path(train, text, tmp_path, monkeypatch):
    monkeypatch.chdir(text.parent)
    assert train("--schemes", "none", "--data", "words.txt")[0] == 0
    copy = tmp_path / "a copy.txt"
    copy.write_bytes(text.read_bytes())
    for spelling in ("./words.txt", text, os.path.relpath(text), copy):
        code, stdout, _ = train("--schemes", "none", "--data", spelling)
        assert code == 0 and "already trained" in stdout, spelling
    copy.write_bytes(text.read_bytes() + b"more")
    assert "was trained with other text" in train("--schemes", "none", "--data", copy)[1]


# Partial runs


def test_a_partial_run_removes_no_rows(train, tmp_path):
    assert train()[0] == 0
    before = rows_of(tmp_path / "out")
    code, stdout, _ = train("--schemes", "none")
    assert code == 0 and all(f"| {scheme} | 1 |" in stdout for scheme in SCHEMES)
    assert rows_of(tmp_path / "out") == before and distinct(before, "scheme") == list(SCHEMES)


def test_seeds_come_one_after_another(train, tmp_path):
    for seed in (1, 0):
        assert train("--schemes", "rope", "--seeds", seed)[0] == 0
    assert distinct(rows_of(tmp_path / "out"), "seed") == [0, 1]
    assert "| rope | 2 |" in (tmp_path / "out" / "train_compare.md").read_text()


def test_models_trained_otherwise_are_left_out_with_a_notice(train, tmp_path):
    assert train("--schemes", "rope", "none")[0] == 0
    before = rows_of(tmp_path / "out")
    code, stdout, _ = train("--schemes", "sin", "--steps", 8)
    assert code == 0
    assert "notice: trained otherwise, and not in the tables: rope seed 0, none seed 0" in stdout
    assert distinct(rows_of(tmp_path / "out"), "scheme") == ["sin"]
    code, stdout, _ = train("--schemes", "rope")
    assert code == 0 and "not in the tables: sin seed 0" in stdout
    assert rows_of(tmp_path / "out") == before


def test_a_huge_training_loss_is_noted(train, tmp_path):
    code, stdout, _ = train("--schemes", "rope", "none", "--adam-lr", "1000")
    assert code == 0 and "| none | 1 | – | – |" in stdout
    rows = rows_of(tmp_path / "out")
    assert len(rows) == 2
    assert all(row["value"] is None and "nats" in row["note"] for row in rows)


# What is refused

WRONG = [
    ("--steps 0", "argument --steps: '0' is not a whole number from 1"),
    ("--steps -3", "'-3' is not a whole number"),
    ("--steps many", "'many' is not a whole number"),
    ("--batch-size 99999999999999", "is not a whole number from 1 to 2147483647"),
    ("--lr 0", "'0' is not a number above 0"),
    ("--lr nan", "'nan' is not a number above 0"),
    ("--lr 1e30", "'1e30' is not a number above 0 and at most 1000"),
    ("--seeds 0 0", "--seeds: 0 is given 2 times"),
    ("--schemes rope rope", "--schemes: rope is given 2 times"),
    ("--schemes rope ropes", "unknown scheme 'ropes': use learned, sin, rope, alibi, none"),
    ("--schemes rope:base=x", "base must be a float, not 'x'"),
    ("--schemes rope:base=10,base=20", "base is given twice"),
    ("--schemes rope:", "scheme 'rope:': no option ''"),
    ("--schemes learned:max_len=8", "position 15 has no row: max_len is 8"),
    ("--schemes learned:max_len=32 --random-positions 64", "position 63 has no row"),
    ("--random-positions 15", "--random-positions 15 is below the training length 16"),
    ("--train-len 16 16", "--train-len: 16 is given 2 times"),
    ("--window -1", "'-1' is not a whole number from 0"),
    ("--dim 15", "dim=15 does not divide into n_head=2 heads"),
    ("--dim 6", "head width 3: must be even"),
    ("--dim 2000000", "weights take"),
    ("--train-len 100000", "too few for windows of 100,000"),
    ("--grad-accum 3", "--batch-size 2 cannot be split in 3 parts"),
    ("--data nowhere", "--data nowhere: no such file or folder"),
    ("--data ~nosuchuser/x", "--data ~nosuchuser/x: cannot be read"),
    ("--data " + "x" * 300, "cannot be read (File name too long)"),
    ("--dtype fp8", "invalid choice: 'fp8'"),
    ("--device abacus", "--device abacus: there is no such device here"),
    ("--device meta", "--device meta: there is no such device here"),
    ("--device hpu", "--device hpu: there is no such device here"),
    ("--scaling yarn", "unrecognized arguments: --scaling yarn"),
    ("--quic", "unrecognized arguments: --quic"),
    ("--no-such-flag", "unrecognized arguments: --no-such-flag"),
]


@pytest.mark.parametrize("wrong, message", WRONG)
def test_wrong_arguments_get_one_line_and_write_nothing(train, tmp_path, wrong, message):
    code, stdout, stderr = train(*wrong.split())
    assert code == 2 and not (tmp_path / "out").exists() and stdout == ""
    assert message in stderr and stderr.count("\n") == 1
    assert stderr.startswith("train_compare.py: ")


def test_out_that_cannot_be_a_folder(train, tmp_path):
    (tmp_path / "file").touch()
    for out in (tmp_path / "file", tmp_path / "file" / "below"):
        code, _, stderr = train("--out", out)
        assert code == 2 and f"--out {out}: cannot be made" in stderr and stderr.count("\n") == 1


def test_schemes_that_would_share_a_checkpoint_are_refused(train, tmp_path):
    code, _, stderr = train("--schemes", "rope:base=10", "rope:base=10.0")
    assert code == 0, stderr  # two files
    for name in ("a b.py", "a-b.py"):
        (tmp_path / name).write_text(
            "from tiny_lm import Attention\n\n\nclass Mine(Attention):\n    pass\n"
        )
    code, _, stderr = train("--schemes", *(f"{tmp_path / n}.py:Mine" for n in ("a b", "a-b")))
    assert code == 2 and "would share the checkpoint" in stderr


@pytest.mark.skipif(torch.cuda.is_available(), reason="CUDA is here")
def test_cuda_where_there_is_none(train, tmp_path):
    code, _, stderr = train("--device", "cuda")
    assert code == 2 and "--device cuda: there is no such device here" in stderr
    assert not (tmp_path / "out").exists()


@pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device here")
def test_training_on_cuda(train, tmp_path):
    assert train("--device", "cuda", "--dtype", "bf16")[0] == 0
    weights = load(tmp_path / "out" / "checkpoints" / "alibi-seed0.pt").weights
    assert {weight.device.type for weight in weights.values()} == {"cpu"}


@pytest.mark.slow
def test_the_picture_is_drawn(train, tmp_path, monkeypatch):
    monkeypatch.undo()
    assert train("--schemes", "rope", "none")[0] == 0
    assert (tmp_path / "out" / "train_compare.png").stat().st_size > 10_000
