"""Two commands at once in one folder: a lock per checkpoint, and tables one after another."""

import os
import subprocess
import sys
import threading
import time

import pytest

import extrapolation_test
import finetune
import train_compare
from helpers import ROOT, RUN, TINY, rows_of, tree, without_pictures
from lab.checkpoints import add_rows, checkpoint_path, find, load, save_model
from lab.files import file_lock, folder_lock
from lab.rows import distinct, measured, select, values


@pytest.fixture(autouse=True)
def no_pictures(monkeypatch):
    without_pictures(monkeypatch)


@pytest.fixture
def start(cli, text, tmp_path):
    def call(*flags):
        return cli(train_compare, *TINY, "--data", text, "--out", tmp_path / "out", *flags)

    return call


@pytest.fixture
def locked(tmp_path):
    """Another process is at work on rope, seed 0, of tmp_path/out."""
    path = checkpoint_path(tmp_path / "out", "rope", 0)
    path.parent.mkdir(parents=True)
    with file_lock(path):
        yield path


def test_the_same_scheme_is_refused_in_one_line(start, locked):
    code, stdout, stderr = start("--schemes", "none", "rope")
    assert code == 2 and stdout == ""
    told = f"another process is at work on {locked}; wait until it is done"
    assert stderr == f"train_compare.py: {told}\n"
    assert tree(locked.parent) == []  # none was not trained either


def test_other_schemes_seeds_and_folders_are_trained(start, locked, tmp_path):
    assert start("--schemes", "none")[0] == 0
    assert start("--schemes", "rope", "--seeds", 1)[0] == 0
    assert start("--schemes", "rope", "--out", tmp_path / "other")[0] == 0


def test_a_scheme_is_trained_when_the_other_process_is_done(start, tmp_path):
    path = checkpoint_path(tmp_path / "out", "rope", 0)
    path.parent.mkdir(parents=True)
    with file_lock(path):
        assert start("--schemes", "rope")[0] == 2
    assert start("--schemes", "rope")[0] == 0
    assert not [name for name in os.listdir(path.parent) if name.endswith(".lock")]


def test_fine_tuning_is_refused_where_another_process_is_at_work(cli, start, tmp_path):
    assert start("--schemes", "rope")[0] == 0
    path = checkpoint_path(tmp_path / "tuned", "rope", 0)
    path.parent.mkdir(parents=True)
    flags = ("--from", tmp_path / "out", "--out", tmp_path / "tuned", "--schemes", "rope")
    with file_lock(path):
        code, _, stderr = cli(finetune, *flags, "--train-len", 64, "--device", "cpu")
    assert code == 2 and f"another process is at work on {path}" in stderr
    assert stderr.count("\n") == 1


def test_models_are_read_while_another_process_has_their_lock(cli, start, tmp_path):
    """train_compare.py keeps the locks of its finished models until its last one is trained."""
    out = tmp_path / "out"
    assert start("--schemes", "rope")[0] == 0
    flags = ("--lengths", 64, "--protocol", "span", "--span-bytes", 128, "--device", "cpu")
    with file_lock(checkpoint_path(out, "rope", 0)):
        assert cli(extrapolation_test, "--out", out, *flags)[0] == 0
    (one,) = find([out])
    assert len(values(one.rows, table="extrapolation")) == 1


# Rows


@pytest.fixture
def model(tmp_path):
    """The path of a checkpoint of RUN."""
    path = checkpoint_path(tmp_path, RUN.scheme, RUN.seed)
    save_model(path, RUN, RUN.new_model(), [measured(table="train_compare", value=1.0)])
    return path


def test_rows_added_at_the_same_time_are_all_kept(model):
    one = load(model)

    def add(name):
        for n in range(5):
            add_rows(one, [measured(table=name, n=n, value=2.0)])

    threads = [threading.Thread(target=add, args=(name,)) for name in ("a", "b", "c", "d")]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(load(model).rows) == 1 + 4 * 5


# Real processes


def start_process(out, text, *flags):
    words = [*TINY, "--data", text, "--out", out, *flags]
    return subprocess.Popen(
        [sys.executable, str(ROOT / "train_compare.py"), *map(str, words)],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        env=os.environ | {"OMP_NUM_THREADS": "1"},
    )


@pytest.mark.slow
def test_two_processes_train_different_schemes_into_one_folder(text, tmp_path):
    out, steps = tmp_path / "out", ("--steps", 100)
    processes = [
        start_process(out, text, *steps, "--schemes", *schemes)
        for schemes in (("learned", "rope"), ("sin", "alibi"))
    ]
    for process in processes:
        _, stderr = process.communicate(timeout=100)
        assert process.returncode == 0, stderr
    rows = rows_of(out)
    assert distinct(rows, "scheme") == ["learned", "sin", "rope", "alibi"]
    assert len(select(rows, protocol="span")) == 4 and not list(out.rglob("*.part"))


@pytest.mark.slow
def test_tables_wait_for_those_of_another_process(text, tmp_path):
    out = tmp_path / "out"
    out.mkdir()
    with folder_lock(out):
        process = start_process(out, text, "--schemes", "none")
        until = time.monotonic() + 60
        while not checkpoint_path(out, "none", 0).exists() and time.monotonic() < until:
            time.sleep(0.1)
        time.sleep(1)
        assert tree(out) == ["checkpoints/none-seed0.pt"] and process.poll() is None
    _, stderr = process.communicate(timeout=100)
    assert process.returncode == 0, stderr
    assert distinct(rows_of(out), "scheme") == ["none"]
