"""Models of several folders, or trained in several ways, in one table."""

import shutil

import pytest

import extrapolation_test
import finetune
import train_compare
from helpers import TINY, rows_of, without_pictures
from lab.rows import distinct, label, select

READ = "--lengths 64 --protocol span --span-bytes 128 --device cpu".split()
TUNE = "--schemes rope --train-len 64 --steps 2 --dtype fp32 --device cpu".split()


@pytest.fixture(autouse=True)
def no_pictures(monkeypatch):
    without_pictures(monkeypatch)


@pytest.fixture
def train(cli, text, tmp_path):
    """train(folder, *flags) -> (exit code, stdout, stderr)"""

    def call(folder, *flags):
        return cli(train_compare, *TINY, "--data", text, "--out", tmp_path / folder, *flags)

    return call


@pytest.fixture
def read(cli, tmp_path):
    """read(*folders) -> (exit code, stdout, stderr) of one table of them, in tmp_path/all."""

    def call(*folders):
        sources = [tmp_path / folder for folder in folders]
        return cli(extrapolation_test, "--from", *sources, "--out", tmp_path / "all", *READ)

    return call


def lines(rows):
    return distinct([row | {"label": label(row)} for row in rows], "label", "seed")


def test_a_run_in_two_folders_is_read_once(train, read, tmp_path):
    assert train("a", "--schemes", "sin", "rope")[0] == 0
    shutil.copytree(tmp_path / "a", tmp_path / "b")
    code, stdout, _ = read("b", "a")
    assert code == 0 and stdout.count("| sin |") == stdout.count("| rope |") == 1
    assert lines(rows_of(tmp_path / "all", "extrapolation")) == [("sin", 0), ("rope", 0)]
    assert "Seed 0." in stdout


def test_the_same_scheme_and_seed_trained_otherwise_has_its_own_line(train, read, tmp_path):
    assert train("a", "--schemes", "sin")[0] == 0
    assert train("b", "--schemes", "sin", "--window", 8)[0] == 0
    assert train("c", "--schemes", "sin", "--copies")[0] == 0
    code, stdout, _ = read("a", "b", "c")
    assert code == 0
    names = ["sin", "sin, trained with copies", "sin, trained with window 8"]
    assert sorted(lines(rows_of(tmp_path / "all", "extrapolation"))) == [(n, 0) for n in names]
    assert all(stdout.count(f"| {name} |") == 1 for name in names)


def test_what_no_label_tells_apart_is_refused(cli, train, read, tmp_path):
    for folder, rate in (("a", 0.02), ("b", 0.01)):
        assert train(folder, "--schemes", "rope", "--lr", rate)[0] == 0
        place = ("--from", tmp_path / folder, "--out", tmp_path / f"tuned {folder}")
        assert cli(finetune, *place, *TUNE)[0] == 0
    code, stdout, stderr = read("tuned a", "tuned b")
    assert code == 2 and stdout == "" and stderr.count("\n") == 1
    assert "was trained with start_recipe 6 2 16 0.01 0.015, rope seed 0 with" in stderr
    assert read("tuned a")[0] == 0


def test_a_window_has_its_own_line_in_the_table_of_the_training(train, tmp_path):
    assert train("a", "--schemes", "rope")[0] == 0
    code, stdout, _ = train("a", "--schemes", "none", "--window", 8)
    assert (
        code == 0 and "| rope | 1 |" in stdout and "| none, trained with window 8 | 1 |" in stdout
    )
    code, stdout, _ = train("a", "--schemes", "none", "--seeds", 1)
    assert (
        code == 0 and "| none | 1 |" in stdout and "| none, trained with window 8 | 1 |" in stdout
    )


def test_seeds_of_one_scheme_that_were_trained_otherwise_are_not_averaged(train):
    assert train("a", "--schemes", "rope")[0] == 0
    code, stdout, _ = train("a", "--schemes", "rope", "--seeds", 1, "--window", 8)
    assert (
        code == 0 and "| rope | 1 |" in stdout and "| rope, trained with window 8 | 1 |" in stdout
    )


def test_a_table_of_one_special_training_has_plain_names(train, tmp_path):
    code, stdout, _ = train("a", "--schemes", "rope", "none", "--window", 8)
    assert code == 0 and "| rope | 1 |" in stdout and "| none | 1 |" in stdout
    assert distinct(select(rows_of(tmp_path / "a"), protocol="span"), "window") == [8]


def test_a_fine_tuned_model_can_be_fine_tuned_again(cli, train, tmp_path):
    assert train("a", "--schemes", "rope")[0] == 0
    flags = ("--steps", 2, "--dtype", "fp32", "--device", "cpu", "--scaling", "yarn")
    once = ("--from", tmp_path / "a", "--out", tmp_path / "once", "--train-len", 64)
    assert cli(finetune, *once, *flags, "--schemes", "rope")[0] == 0
    scheme = "rope:scaling=yarn,factor=4,trained_len=16"
    twice = ("--from", tmp_path / "once", "--out", tmp_path / "twice", "--train-len", 128)
    code, stdout, _ = cli(finetune, *twice, *flags[:-2], "--schemes", scheme)
    assert code == 0 and f"| {scheme} | 1 |" in stdout
    assert distinct(rows_of(tmp_path / "twice", "finetune"), "start_len") == [64]
