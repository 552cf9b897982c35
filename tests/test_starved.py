"""Foreign files, missing permissions, full disks: one line, and earlier results stay."""

import ctypes
import io
import json
import os
import pickle

import pytest
import torch

import train_compare
from helpers import TINY, child, stopped_at, tree, without_pictures
from lab import command
from lab.checkpoints import find, load

THIRTY = [*TINY, "--steps", "30", "--batch-size", "4", "--save-every", "0"]


@pytest.fixture(autouse=True)
def no_pictures(monkeypatch):
    without_pictures(monkeypatch)


@pytest.fixture
def start(cli, text, tmp_path):
    def call(*flags):
        return cli(train_compare, *THIRTY, "--data", text, "--out", tmp_path / "out", *flags)

    return call


# Foreign files


class Evil:
    """Makes a folder when it is unpickled."""

    def __init__(self, path):
        self.path = path

    def __reduce__(self):
        return os.mkdir, (str(self.path),)


def saved(value):
    file = io.BytesIO()
    torch.save(value, file)
    return file.getvalue()


@pytest.mark.parametrize("kind", ["empty", "cut short", "no zip", "other keys", "list", "code"])
def test_foreign_files_in_the_place_of_a_state_or_a_model(start, tmp_path, kind):
    with stopped_at(26):
        start("--schemes", "rope")
    state = tmp_path / "out" / "checkpoints" / "rope-seed0.resume"
    bad = {
        "empty": b"",
        "cut short": state.read_bytes()[:-500],
        "no zip": b"PK\3\4 or not",
        "other keys": saved({"model": {}, "run": []}),
        "list": saved([1, 2, 3]),
        "code": pickle.dumps(Evil(tmp_path / "owned"), protocol=2),
    }[kind]
    state.write_bytes(bad)
    state.with_suffix(".pt").write_bytes(bad)
    code, stdout, _ = start("--schemes", "rope")
    told = f"{state} is not a whole state of an interrupted run; this one starts at the beginning"
    assert code == 0 and told in stdout
    assert "rope-seed0.pt is not a whole checkpoint of train_compare.py" in stdout
    assert not (tmp_path / "owned").exists() and not state.exists()
    assert load(state.with_suffix(".pt")).run.steps == 30


def test_a_run_with_unknown_fields_is_not_used(start, tmp_path):
    assert start("--schemes", "rope")[0] == 0
    path = tmp_path / "out" / "checkpoints" / "rope-seed0.pt"
    content = torch.load(path, weights_only=True)
    content["run"]["colour"] = "red"
    torch.save(content, path)
    code, stdout, _ = start("--schemes", "rope")
    assert code == 0 and "rope-seed0.pt is not a whole checkpoint of train_compare.py" in stdout


def test_a_run_that_lacks_newer_fields_is_used(start, tmp_path):
    assert start("--schemes", "rope")[0] == 0
    path = tmp_path / "out" / "checkpoints" / "rope-seed0.pt"
    content = torch.load(path, weights_only=True)
    del content["run"]["copies"], content["run"]["task"]
    torch.save(content, path)
    assert "rope, seed 0: already trained" in start("--schemes", "rope")[1]


def test_other_files_among_the_checkpoints_are_left_alone(start, tmp_path):
    folder = tmp_path / "out" / "checkpoints"
    folder.mkdir(parents=True)
    for name in ("notes.txt", "rope.pt", "-seed.pt", "x-seed0.failed"):
        (folder / name).write_bytes(b"mine")
    code, stdout, _ = start("--schemes", "rope")
    assert code == 0 and {"notes.txt", "rope.pt"} < set(tree(folder))
    assert [one.run.scheme for one in find([tmp_path / "out"], ["rope"], [0])] == ["rope"]


def test_a_checkpoint_without_permission_is_named(tmp_path, monkeypatch):
    def refuses(*arguments, **options):
        raise PermissionError(13, "Permission denied")

    monkeypatch.setattr(torch, "load", refuses)
    with pytest.raises(ValueError, match=r"rope-seed0.pt cannot be read \(Permission denied\)"):
        load(tmp_path / "rope-seed0.pt")


@pytest.mark.parametrize("name", ["rope-seed0.pt", "rope-seed0.resume"])
def test_a_folder_in_the_place_of_a_file_is_told_before_training(start, tmp_path, name):
    (tmp_path / "out" / "checkpoints" / name).mkdir(parents=True)
    code, _, stderr = start("--schemes", "rope")
    assert code == 2 and f"{name} is a folder, where a file must be written" in stderr
    assert stderr.count("\n") == 1


# Disks


@pytest.mark.slow
@pytest.mark.parametrize("limit", [2_000, 40_000, 110_000])
def test_a_full_disk_is_one_line_and_earlier_results_stay(start, text, tmp_path, limit):
    """A limit on the size of files stands in for it: state, model or picture do not fit."""
    out = tmp_path / "out"
    assert start("--schemes", "none")[0] == 0
    before = {path: (out / path).read_bytes() for path in tree(out)}
    code = f"import resource\nresource.setrlimit(resource.RLIMIT_FSIZE, ({limit}, {limit}))\n"
    full = child(code, *THIRTY, "--data", text, "--out", out, "--schemes", "none", "rope")
    assert "Traceback" not in full.stderr and not list(out.rglob("*.part"))
    line = full.stderr.strip().splitlines()[-1]
    if limit < 110_000:
        assert full.returncode == 1 and "File too large" in line, full.stderr
        assert line.startswith("train_compare.py: ")
    model = "checkpoints/none-seed0.pt"
    assert (out / model).read_bytes() == before[model]
    assert all((out / path).stat().st_size > 0 for path in before)
    json.loads((out / "train_compare.json").read_text())


# Streams and allocators


def test_a_command_runs_where_the_output_is_no_terminal_file(monkeypatch):
    for stream in (None, object()):  # nobody is listening; a notebook's stream
        monkeypatch.setattr("sys.stdout", stream)
        command.run(list)


def test_freed_memory_is_kept_while_a_command_runs(monkeypatch):
    calls = []

    class Library:
        def __init__(self, name):
            pass

        def mallopt(self, parameter, value):
            calls.append((parameter, value))
            return 1

    monkeypatch.setattr(ctypes, "CDLL", Library)
    command.run(lambda: calls.append("main"))
    # trim threshold and mmap threshold, as malloc.h numbers them
    assert calls == [(-1, 2**31 - 1), (-3, 32 * 2**20), "main"]
