import contextlib
import hashlib
import os
import subprocess
import sys
import threading
import time
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

import numpy as np
import pytest

from data import corpus
from data.corpus import NUMPY_SHA256, SHAKESPEARE_PATH, SHAKESPEARE_SHA256, load_corpus
from helpers import ROOT


def sha256(content):
    return hashlib.sha256(content).hexdigest()


# The corpora


def test_default_corpus_is_the_pinned_text():
    text = load_corpus()
    if np.__version__ == "2.4.6":
        assert text.sha256 == NUMPY_SHA256 and text.files == 171
        assert (len(text.train), len(text.val)) == (3_212_883, 434_013)
    assert text.train.dtype == text.val.dtype == np.uint8
    assert b"\r" not in bytes(text.val)


def test_default_corpus_does_not_depend_on_line_ends_or_order(tmp_path, monkeypatch):
    source = Path(np.__file__).parent
    for path in sorted(source.rglob("*.py"), reverse=True):
        copy = tmp_path / "numpy" / path.relative_to(source)
        copy.parent.mkdir(parents=True, exist_ok=True)
        copy.write_bytes(path.read_bytes().replace(b"\n", b"\r\n"))
    there = load_corpus()
    monkeypatch.setattr(corpus.np, "__file__", str(tmp_path / "numpy" / "__init__.py"))
    here = load_corpus()
    assert here.sha256 == there.sha256 and bytes(here.val) == bytes(there.val)


@pytest.fixture
def files(tmp_path):
    """A folder of 40 texts and of what is no text, and the texts' names in order."""
    names = sorted(f"sub/{i}.txt" for i in range(40))
    for name in names:
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).write_bytes(f"<{name}>\r\n".encode())
    (tmp_path / ".hidden").write_text("no")
    (tmp_path / "binary").write_bytes(b"\0\1\2")
    (tmp_path / "empty.txt").write_text("")
    return tmp_path, names


@pytest.mark.parametrize("pattern", ["", "**/*.txt"])
def test_several_files_are_split_by_the_hash_of_their_path(files, pattern):
    folder, names = files
    held = [name for name in names if int(sha256(name.encode()), 16) % 10 == 0]
    kept = [name for name in names if name not in held]
    assert held and kept
    text = load_corpus(str(folder / pattern))
    assert bytes(text.val).decode() == "".join(f"<{name}>\n" for name in held)
    assert bytes(text.train).decode() == "".join(f"<{name}>\n" for name in kept)
    assert text.sha256 == sha256("".join(f"<{name}>\n" for name in names).encode())
    assert text.files == 40 and "SHA-256" in text.held_out


def test_the_last_tenth_is_held_out_where_the_rule_by_path_holds_nothing_out(tmp_path):
    (tmp_path / "a").write_bytes(b"x" * 90)
    (tmp_path / "b").write_bytes(b"y" * 10)
    text = load_corpus(str(tmp_path))
    assert (bytes(text.train), bytes(text.val)) == (b"x" * 90, b"y" * 10)
    assert "last 10 %" in text.held_out


def test_a_single_file_is_memory_mapped_and_its_last_tenth_held_out(tmp_path):
    path = tmp_path / "one.bin"
    path.write_bytes(bytes(range(250)) * 4)
    text = load_corpus(str(path))
    assert isinstance(text.train, np.memmap) and (len(text.train), len(text.val)) == (900, 100)
    assert bytes(text.train) + bytes(text.val) == path.read_bytes()
    assert text.sha256 == sha256(path.read_bytes())


def test_a_corpus_describes_itself(tmp_path):
    (tmp_path / "one.txt").write_bytes(b"a" * 1000)
    told = load_corpus(str(tmp_path / "one.txt")).describe()
    assert told == dict(
        name="one.txt", sha256=sha256(b"a" * 1000), files=1, bytes=1000, train_bytes=900,
        val_bytes=100, held_out="the last 10 % of the file",
    )  # fmt: skip


# What cannot be used


def test_too_little_text_names_the_sizes(tmp_path):
    path = tmp_path / "short.txt"
    path.write_bytes(b"a" * 1000)
    text = load_corpus(str(path))
    text.require(99)
    few = r"short.txt: 100 held-out bytes are too few for windows of 100 \(needed: 101\)"
    with pytest.raises(ValueError, match=few):
        text.require(100)
    with pytest.raises(ValueError, match="900 training bytes are too few for windows of 5,000"):
        text.require(5000)


def test_one_byte_is_too_little(tmp_path):
    (tmp_path / "byte").write_bytes(b"x")
    few = r"byte: 0 training bytes are too few for windows of 1 \(needed: 2\)"
    with pytest.raises(ValueError, match=few):
        load_corpus(str(tmp_path / "byte")).require(1)


WRONG = [
    ("nowhere.txt", "no such file or folder"),
    ("empty", "the file is empty"),
    ("folder", "found 1 files, none of them a text"),
    ("*.nothing", "found 0 files, none of them a text"),
    ("pipe", "not a file or a folder; give a regular file, a folder or a glob"),
    ("x" * 300, r"cannot be read \(File name too long\)"),
]


@pytest.mark.parametrize("source, message", WRONG)
def test_a_source_that_is_no_text_is_refused(tmp_path, source, message):
    (tmp_path / "empty").touch()
    (tmp_path / "folder").mkdir()
    (tmp_path / "folder" / "binary").write_bytes(b"\0" * 50)
    os.mkfifo(tmp_path / "pipe")
    with pytest.raises(ValueError, match=message) as error:
        load_corpus(str(tmp_path / source))
    assert str(error.value).startswith(f"--data {tmp_path / source}: ")


def test_a_home_folder_that_is_not_there_is_refused():
    with pytest.raises(ValueError, match="--data ~nosuchuser/x: cannot be read"):
        load_corpus("~nosuchuser/x")


# Tiny Shakespeare, from a server that does not always do what it should

SONG = b"to be or not to be\n" * 3000


@pytest.fixture
def target(tmp_path, monkeypatch):
    """Where Tiny Shakespeare is kept; it is SONG here."""
    path = tmp_path / "tinyshakespeare.txt"
    monkeypatch.setattr(corpus, "SHAKESPEARE_PATH", path)
    monkeypatch.setattr(corpus, "SHAKESPEARE_SHA256", sha256(SONG))
    monkeypatch.setattr(corpus, "TIMEOUT", 0.3)
    return path


@contextlib.contextmanager
def server(answer):
    """A local HTTP server whose handler does `answer(handler)` -> its address."""

    class Handler(BaseHTTPRequestHandler):
        def do_GET(self):
            with contextlib.suppress(OSError):
                answer(self)

        def log_message(self, *arguments):
            pass

    running = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    running.daemon_threads = True
    thread = threading.Thread(target=running.serve_forever, args=(0.05,))
    thread.start()
    try:
        yield f"http://127.0.0.1:{running.server_port}/input.txt"
    finally:
        running.shutdown()
        thread.join()
        running.server_close()


def send(handler, content=SONG, length=None, code=200):
    handler.send_response(code)
    handler.send_header("Content-Length", str(len(content) if length is None else length))
    handler.end_headers()
    handler.wfile.write(content)


def cut_short(handler):
    send(handler, SONG[:1000], len(SONG))


def altered(handler):
    send(handler, SONG[:-1] + b"?")


def not_found(handler):
    send(handler, b"<html>", code=404)


def fails(handler):
    send(handler, b"", code=500)


def no_http(handler):
    handler.wfile.write(b"what?\r\n")


def stalls(handler):
    cut_short(handler)
    handler.wfile.flush()
    time.sleep(1)


BAD_ANSWERS = [
    (cut_short, r"what came \(1,000 bytes\) is not the known text"),
    (altered, r"what came \(57,000 bytes\) is not the known text"),
    (not_found, r"could not be fetched \(HTTP Error 404: Not Found\)"),
    (fails, r"could not be fetched \(HTTP Error 500"),
    (no_http, r"could not be fetched \(what"),
    (stalls, r"could not be fetched \(.*timed out"),
]


def require_refused(target, address, message):
    with pytest.raises(ValueError, match=message) as error:
        load_corpus("shakespeare")
    assert str(error.value).endswith(f"; put the file at {target} by hand (from {address})")
    assert list(target.parent.iterdir()) == []


@pytest.mark.parametrize("answer, message", BAD_ANSWERS)
def test_a_download_that_goes_wrong_leaves_nothing(target, monkeypatch, answer, message):
    with server(answer) as address:
        monkeypatch.setattr(corpus, "SHAKESPEARE_URL", address)
        require_refused(target, address, message)


def test_a_download_from_nobody_leaves_nothing(target, monkeypatch):
    with server(send) as address:
        monkeypatch.setattr(corpus, "SHAKESPEARE_URL", address)
    require_refused(target, address, "could not be fetched .*Connection refused")


def test_a_download_that_goes_well_is_kept_and_not_fetched_again(target, monkeypatch):
    target.with_name("tinyshakespeare.99999.part").write_bytes(SONG[:500])  # another's, half-way
    asked = []

    def answer(handler):
        asked.append(handler.path)
        send(handler)

    with server(answer) as address:
        monkeypatch.setattr(corpus, "SHAKESPEARE_URL", address)
        for _ in range(2):
            text = load_corpus("shakespeare")
    assert asked == ["/input.txt"] and target.read_bytes() == SONG
    assert bytes(text.train) + bytes(text.val) == SONG and text.name == "Tiny Shakespeare"


def test_a_kept_file_that_is_not_the_known_text_is_refused(target):
    target.write_bytes(b"tampered")
    with pytest.raises(ValueError, match="is not the known text; delete it, or put the file at"):
        load_corpus("shakespeare")


def test_a_folder_that_cannot_keep_the_download_is_told(target, monkeypatch):
    gone = target.parent / "gone" / "tinyshakespeare.txt"
    monkeypatch.setattr(corpus, "SHAKESPEARE_PATH", gone)
    with server(send) as address:
        monkeypatch.setattr(corpus, "SHAKESPEARE_URL", address)
        with pytest.raises(ValueError, match="cannot be kept .*; put the file at"):
            load_corpus("shakespeare")


@pytest.mark.skipif(not SHAKESPEARE_PATH.exists(), reason="Tiny Shakespeare was not fetched")
def test_tiny_shakespeare_is_the_known_text():
    text = load_corpus("shakespeare")
    assert text.sha256 == SHAKESPEARE_SHA256 and len(text.train) + len(text.val) == 1_115_394


# Odd files

ODD = (b"one\r\ntwo\r\n" * 30, bytes(range(256)) * 3, "Größe, 我打你".encode("utf-16") * 9)


@pytest.mark.parametrize("content", ODD)
def test_the_bytes_of_a_single_file_stay_as_they_are(tmp_path, content):
    (tmp_path / "file").write_bytes(content)
    text = load_corpus(str(tmp_path / "file"))
    assert bytes(text.train) + bytes(text.val) == content


LARGE = """
import resource, sys
from data.batches import windows
from data.corpus import load_corpus
before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
text = load_corpus(sys.argv[1])
windows(text.train, 0, 0, 64, 256)
grown = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before
print(len(text.train) + len(text.val), grown // 1024)
"""


@pytest.mark.slow
def test_a_gigabyte_is_read_in_bounded_memory(tmp_path):
    with open(tmp_path / "large", "wb") as file:
        file.truncate(2**30)  # a sparse file
    words = [sys.executable, "-c", LARGE, tmp_path / "large"]
    done = subprocess.run(words, capture_output=True, text=True, cwd=ROOT, timeout=300)
    size, grown = map(int, done.stdout.split())
    # The kernel maps a megabyte or two around each byte that is read.
    assert size == 2**30 and grown < 300
