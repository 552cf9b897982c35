import errno
import json
import multiprocessing
import os
import sys
import time

import pytest
import torch

from helpers import tree
from lab.files import (
    csv_text,
    file_lock,
    folder_lock,
    writable_folder,
    write_atomically,
    write_csv,
    write_json,
)

# Atomic writes


@pytest.mark.parametrize("content, bytes_there", [
    (b"\0bytes", b"\0bytes"),
    ("Größe\n", "Größe\n".encode()),
    ("half a pair \udc80", b"half a pair \\udc80"),  # a file name that is not UTF-8
])  # fmt: skip
def test_bytes_and_text_are_written_as_they_are(tmp_path, content, bytes_there):
    write_atomically(tmp_path / "below" / "file", content)
    assert (tmp_path / "below" / "file").read_bytes() == bytes_there


def test_a_reader_never_sees_half_a_file(tmp_path):
    path = tmp_path / "state"
    write_atomically(path, b"earlier")

    def content(file):
        file.write(b"la")
        file.flush()
        assert path.read_bytes() == b"earlier"
        file.write(b"ter")

    write_atomically(path, content)
    assert path.read_bytes() == b"later" and tree(tmp_path) == ["state"]


def fails(file):
    file.write(b"lat")
    raise OSError(errno.ENOSPC, "No space left on device")


def fails_in_torch(file):
    """As torch.save does, whose own error covers that of the disk."""
    try:
        fails(file)
    except OSError:
        raise RuntimeError("[enforce fail at inline_container.cc:664] . unexpected pos") from None


@pytest.mark.parametrize("content", [fails, fails_in_torch])
def test_a_write_that_fails_leaves_the_earlier_file_and_names_it(tmp_path, content):
    write_atomically(tmp_path / "state", b"earlier")
    with pytest.raises(OSError, match="No space left on device: '.*state'"):
        write_atomically(tmp_path / "state", content)
    assert (tmp_path / "state").read_bytes() == b"earlier"
    assert os.listdir(tmp_path) == ["state"]


def test_an_error_of_the_content_is_raised_as_it_is(tmp_path):
    def content(file):
        raise RuntimeError("not the disk")

    with pytest.raises(RuntimeError, match="not the disk"):
        write_atomically(tmp_path / "state", content)
    assert os.listdir(tmp_path) == []


def test_a_tensor_is_written_by_torch(tmp_path):
    write_atomically(tmp_path / "file", lambda file: torch.save(torch.arange(3), file))
    assert torch.equal(torch.load(tmp_path / "file"), torch.arange(3))


# JSON and CSV


def test_json_keeps_letters_and_refuses_what_it_lacks(tmp_path):
    write_json(tmp_path / "a.json", {"ä": [1, 2.5, None]})
    text = (tmp_path / "a.json").read_text("utf-8")
    assert json.loads(text) == {"ä": [1, 2.5, None]} and "ä" in text and text.endswith("}\n")
    with pytest.raises(ValueError):
        write_json(tmp_path / "b.json", float("inf"))
    assert tree(tmp_path) == ["a.json"]


def test_csv_has_the_keys_as_header_and_empty_cells_for_none(tmp_path):
    rows = [dict(a=1, b=None), dict(a="x, y", b=2.5)]
    assert csv_text(rows) == 'a,b\n1,\n"x, y",2.5\n'
    write_csv(tmp_path / "a.csv", rows)
    assert (tmp_path / "a.csv").read_text() == csv_text(rows)


# Folders


def test_a_writable_folder_is_made(tmp_path):
    assert writable_folder(tmp_path / "a" / "b").is_dir()


def test_a_folder_that_cannot_be_made_is_named(tmp_path):
    (tmp_path / "file").touch()
    for path in (tmp_path / "file", tmp_path / "file" / "below"):
        with pytest.raises(ValueError, match=f"--out {path}: cannot be made"):
            writable_folder(path)


def test_a_folder_that_cannot_be_written_to_is_named(tmp_path, monkeypatch):
    monkeypatch.setattr(os, "access", lambda path, mode: False)
    with pytest.raises(ValueError, match=f"--out {tmp_path}: cannot be written to"):
        writable_folder(tmp_path)


def test_old_part_files_are_cleared_away_and_young_ones_not(tmp_path):
    ages = {".a.json.1.part": 700, ".b.json.2.part": 300, "c.part": 10**6}
    for name, age in ages.items():
        (tmp_path / name).touch()
        os.utime(tmp_path / name, (time.time() - age,) * 2)
    writable_folder(tmp_path)
    assert sorted(os.listdir(tmp_path)) == [".b.json.2.part", "c.part"]


# Locks


def test_a_locked_file_is_refused_to_others(tmp_path):
    path = tmp_path / "rope-seed0.pt"
    with file_lock(path):
        told = "another process is at work on .*rope-seed0.pt; wait until it is done"
        with pytest.raises(ValueError, match=told), file_lock(path):
            pass
        with file_lock(tmp_path / "sin-seed0.pt"):
            pass
    with file_lock(path):
        pass
    assert os.listdir(tmp_path) == []


def hold_and_die(path, held):
    lock = file_lock(path)
    lock.__enter__()
    held.set()
    os._exit(9)


def test_a_lock_ends_with_its_process(tmp_path):
    path, process = tmp_path / "rope-seed0.pt", multiprocessing.get_context("fork")
    held = process.Event()
    child = process.Process(target=hold_and_die, args=(path, held))
    child.start()
    child.join(20)
    assert held.is_set() and child.exitcode == 9
    assert os.listdir(tmp_path) == [".rope-seed0.pt.lock"]
    with file_lock(path):
        pass


def add_one(folder, times):
    for _ in range(times):
        with folder_lock(folder):
            count = int((folder / "count").read_text())
            time.sleep(0.001)
            (folder / "count").write_text(str(count + 1))


def test_a_locked_folder_lets_writers_in_one_after_another(tmp_path):
    (tmp_path / "count").write_text("0")
    process = multiprocessing.get_context("fork")
    children = [process.Process(target=add_one, args=(tmp_path, 20)) for _ in range(3)]
    for child in children:
        child.start()
    for child in children:
        child.join(20)
    assert (tmp_path / "count").read_text() == "60"


def test_files_are_written_where_there_are_no_locks(tmp_path, monkeypatch):
    monkeypatch.setitem(sys.modules, "fcntl", None)  # as on Windows
    with file_lock(tmp_path / "a"), file_lock(tmp_path / "a"), folder_lock(tmp_path):
        write_atomically(tmp_path / "a", b"there")
    assert os.listdir(tmp_path) == ["a"]
