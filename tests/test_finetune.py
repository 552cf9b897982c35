"""What finetune.py goes on from, what it keeps, writes and refuses."""

import csv
import io
import re

import pytest
import torch

import extrapolation_test
import finetune
import train_compare
from data.corpus import load_corpus
from helpers import RUN, TINY, rows_of, train_tiny, tree, without_pictures
from lab import score
from lab.checkpoints import load, weights_hash
from lab.jobs import WATCHED_WINDOWS
from lab.rows import distinct, measured, select, values
from lab.stats import measured_ppl
from lab.tables import finetune_table

TUNE = "--train-len 64 --steps 5 --dtype fp32 --device cpu".split()


@pytest.fixture(autouse=True)
def no_pictures(monkeypatch):
    without_pictures(monkeypatch)


@pytest.fixture(scope="module")
def parent(tmp_path_factory):
    """Models trained at 16 bytes; nothing is written into their folder."""
    with pytest.MonkeyPatch.context() as patch:
        without_pictures(patch)
        return train_tiny(tmp_path_factory.mktemp("parent"), " ".join(TINY), 400)


@pytest.fixture
def tune(cli, parent, tmp_path):
    """tune(*flags) -> (exit code, stdout, stderr), from `parent` into tmp_path/tuned."""

    def call(*flags):
        return cli(finetune, "--from", parent, "--out", tmp_path / "tuned", *TUNE, *flags)

    return call


NAMES = [
    "alibi",
    "learned",
    "rope-scaling=linear,factor=4,trained_len=16",
    "rope-scaling=yarn,factor=4,trained_len=16",
    "sin-factor=4",
]


def test_files_and_rows_of_a_fine_tuning(tune, parent, tmp_path):
    schemes = ("rope", "alibi", "learned", "sin")
    code, stdout, _ = tune("--schemes", *schemes, "--scaling", "linear", "yarn")
    assert code == 0
    tuned = tmp_path / "tuned"
    tables = [f"finetune.{kind}" for kind in ("csv", "json", "md")]
    assert tree(tuned) == sorted([*(f"checkpoints/{n}-seed0.pt" for n in NAMES), *tables])
    assert (tuned / "finetune.md").read_text() in stdout
    assert "steps to ALiBi's start" in stdout and "| rope, yarn × 4 | 1 |" in stdout
    rows = select(rows_of(tuned, "finetune"), protocol="fixed")
    assert distinct(rows, "step") == [0, 5] and len(rows) == 2 * 5
    assert {row["tokens"] for row in rows} == {5 * 64} and {row["n"] for row in rows} == {64}
    lines = list(csv.DictReader(io.StringIO((tuned / "finetune.csv").read_text())))
    assert [line["value"] for line in lines if line["protocol"] == "fixed"] == [
        str(row["value"]) for row in rows
    ]
    assert all("finetune.py" in row["command"] for row in rows)


def test_a_fine_tuning_goes_on_from_the_checkpoint(tune, parent, tmp_path):
    assert tune("--schemes", "rope", "--scaling", "yarn")[0] == 0
    found = load(tmp_path / "tuned" / "checkpoints" / f"{NAMES[3]}-seed0.pt")
    old = load(parent / "checkpoints" / "rope-seed0.pt")
    run = found.run
    assert run.start == old.run and run.start_weights == weights_hash(old.weights)
    assert (run.train_len, run.trained_len, run.max_len, run.steps) == (64, 16, 256, 5)
    assert run.batch_size == 1  # 2·16/64 windows, at least one
    assert found.model().blocks[0].attention.scaling == "yarn"

    # before the first step it is the parent, read with that scaling
    val = load_corpus(run.data).val
    ends = score.fixed_ends(len(val), 64, WATCHED_WINDOWS)
    nats = score.fixed(old.model(scheme=run.scheme), val, 64, ends)
    first, last = (values(found.rows, protocol="fixed", step=step)[0] for step in (0, 5))
    assert first == measured_ppl(nats)["value"] != last


def test_a_fine_tuned_model_is_not_tuned_again(tune):
    assert "already trained" not in tune("--schemes", "alibi")[1]
    code, stdout, _ = tune("--schemes", "alibi")
    assert code == 0 and "alibi, seed 0: already trained" in stdout


def test_a_partial_fine_tuning_removes_no_rows(tune, tmp_path):
    assert tune("--schemes", "rope", "alibi", "--scaling", "none", "yarn")[0] == 0
    before = rows_of(tmp_path / "tuned", "finetune")
    code, stdout, _ = tune("--schemes", "alibi")
    assert code == 0 and rows_of(tmp_path / "tuned", "finetune") == before
    for name in ("rope", "rope, yarn × 4", "alibi"):
        assert f"| {name} | 1 |" in stdout


def test_models_tuned_otherwise_are_left_out_with_a_notice(tune, tmp_path):
    assert tune("--schemes", "rope")[0] == 0
    code, stdout, _ = tune("--schemes", "alibi", "--lr", "0.01")
    assert code == 0 and "not in the tables: rope seed 0" in stdout
    assert distinct(rows_of(tmp_path / "tuned", "finetune"), "scheme") == ["alibi"]


def test_fine_tuned_models_can_be_read_at_other_lengths(cli, tune, tmp_path):
    assert tune("--schemes", "rope", "--scaling", "none", "yarn")[0] == 0
    flags = ("--lengths", 64, 128, "--protocol", "span", "--span-bytes", 1024, "--device", "cpu")
    assert cli(extrapolation_test, "--out", tmp_path / "tuned", *flags)[0] == 0
    rows = rows_of(tmp_path / "tuned", "extrapolation")
    assert distinct(rows, "n") == [64, 128] and all(row["value"] > 1 for row in rows)
    assert {row["start_len"] for row in rows} == {16} and len(distinct(rows, "scheme")) == 2


WRONG = [
    ("--scaling cubic", "invalid choice: 'cubic'"),
    ("--schemes alibi --scaling yarn", "--scaling yarn: none of these schemes takes it"),
    ("--schemes rope rope", "--schemes: rope is given 2 times"),
    ("--schemes rope --scaling yarn yarn", "--scaling: yarn is given 2 times"),
    (
        "--schemes ropes",
        "no checkpoint .*ropes-seed0.pt; train first: python train_compare.py --schemes ropes "
        "--seeds 0",
    ),
    ("--seeds 4", "no checkpoint .*rope-seed4.pt"),
    ("--train-len 32", "--train-len 32: fine-tuning is watched under the fixed protocol, which"),
    ("--train-len 64 64", "--train-len: 64 is given 2 times"),
    ("--train-len 100000", "too few for windows of 100,000"),
    ("--batch-size 2 --grad-accum 3", "--batch-size 2 cannot be split in 3 parts"),
    ("--random-positions 40", "--random-positions 40 is below the training length 64"),
    ("--dim 32", "unrecognized arguments: --dim 32"),
    ("--copies", "unrecognized arguments: --copies"),
    ("--data nowhere", "--data nowhere: no such file or folder"),
    ("--device abacus", "there is no such device here"),
]


@pytest.mark.parametrize("wrong, message", WRONG)
def test_wrong_arguments_get_one_line(tune, tmp_path, wrong, message):
    code, stdout, stderr = tune(*wrong.split())
    assert code == 2 and stdout == "" and stderr.count("\n") == 1, stderr
    assert re.search(message, stderr) and stderr.startswith("finetune.py: ")
    assert not (tmp_path / "tuned").exists()


def test_a_scaling_needs_a_longer_length(cli, text, tmp_path):
    flags = (*TINY, "--data", text, "--out", tmp_path / "long", "--schemes", "rope")
    assert cli(train_compare, *flags, "--train-len", 64)[0] == 0
    start = ("--from", tmp_path / "long", "--out", tmp_path / "tuned", "--schemes", "rope")
    code, _, stderr = cli(finetune, *start, "--scaling", "none", "yarn", "--train-len", 64)
    told = "--scaling yarn: --train-len 64 must be above the length trained at so far, 64"
    assert code == 2 and told in stderr and stderr.count("\n") == 1


def test_what_it_starts_from_is_not_written_over(cli, parent):
    before = tree(parent)
    code, _, stderr = cli(finetune, "--schemes", "rope", "--from", parent, "--out", parent, *TUNE)
    assert code == 2 and "holds the checkpoints to start from" in stderr
    assert tree(parent) == before


@pytest.fixture
def special(cli, text, tmp_path):
    """Models trained with a window, random positions and copies -> (folder, schemes)."""
    schemes = ("learned:beyond=interpolate", "rope:scaling=yarn,factor=4")
    flags = ("--window", 8, "--random-positions", 300, "--copies", "--schemes", *schemes)
    assert cli(train_compare, *TINY, "--data", text, "--out", tmp_path / "o", *flags)[0] == 0
    return tmp_path / "o", schemes


def test_what_is_not_said_is_as_in_the_checkpoint(tune, special, tmp_path):
    out, schemes = special
    assert tune("--from", out, "--schemes", *schemes)[0] == 0
    paths = sorted((tmp_path / "tuned" / "checkpoints").glob("*.pt"))
    assert len(paths) == 2
    for path in paths:
        found = load(path)
        run = found.run
        assert (run.window, run.random_positions, run.copies) == (8, 300, True)
        assert (run.trained_len, run.max_len) == (16, 300)
        assert found.model().blocks[0].attention.attend.keywords == dict(window=8)


def test_a_flag_changes_what_the_checkpoint_has(tune, special, tmp_path):
    out, schemes = special
    assert tune("--from", out, "--schemes", *schemes, "--window", 0)[0] == 0
    for path in (tmp_path / "tuned" / "checkpoints").glob("*.pt"):
        assert (load(path).run.window, load(path).run.copies) == (0, True)


def test_unlike_parents_are_refused(cli, text, tune, special):
    out, schemes = special
    flags = ("--data", text, "--out", out, "--schemes", "alibi")
    assert cli(train_compare, *TINY, *flags)[0] == 0
    code, _, stderr = tune("--from", out, "--schemes", "alibi", schemes[1])
    assert code == 2 and "was trained with window 8, alibi seed 0 with 0" in stderr


def test_other_weights_are_tuned_again(cli, text, tune, tmp_path):
    out = tmp_path / "o"
    flags = ("--data", text, "--out", out, "--schemes", "alibi")
    assert cli(train_compare, *TINY, *flags)[0] == 0
    assert tune("--from", out, "--schemes", "alibi")[0] == 0
    path = out / "checkpoints" / "alibi-seed0.pt"
    saved = torch.load(path, weights_only=True)
    saved["model"]["norm.weight"] *= 2
    torch.save(saved, path)
    code, stdout, _ = tune("--from", out, "--schemes", "alibi")
    assert code == 0 and "already trained" not in stdout and "another start" in stdout


def test_other_text_is_noticed(tune, tmp_path):
    assert "notice: " not in tune("--schemes", "alibi")[1]
    (tmp_path / "else.txt").write_bytes(b"something else entirely " * 300)
    code, stdout, _ = tune("--schemes", "alibi", "--data", tmp_path / "else.txt")
    assert code == 0 and "notice: the models were trained on other text" in stdout


def test_the_table_by_hand():
    rows = []

    def add(scheme, seed, *ppl):
        run = RUN.replace(scheme=scheme, seed=seed, steps=20, batch_size=1, train_lens=(100,))
        for step, value in zip((0, 5, 20), ppl):
            found = measured(protocol="fixed", metric="ppl", n=64, step=step, value=value)
            rows.append(run.flat() | found)

    add("rope", 0, 9.0, 3.0, 2.0)
    add("rope", 1, 9.0, 4.0, 2.0)
    add("sin", 0, 9.0, 8.0, 7.0)
    add("alibi", 0, 3.2, 3.0, 3.0)
    text = finetune_table(rows, 64)
    assert "| rope | 2 | 9.00 ± 0.00 | 3.50 ± 0.71 | 2.00 ± 0.00 | 20 |" in text
    assert "| sin | 1 | 9.00 | 8.00 | 7.00 | > 20 |" in text
    assert "| alibi | 1 | 3.20 | 3.00 | 3.00 | 0 |" in text
    assert "5 (0k)" in text and "20 (2k)" in text
