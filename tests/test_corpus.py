import contextlib
import hashlib
import io
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
from data.corpus import NUMPY_SHA256, SHAKESPEARE_SHA256, load_corpus


def test_default_corpus():
    text = load_corpus()
    if np.__version__ == "2.4.6":
        assert text.sha256 == NUMPY_SHA256 and text.files == 171
        assert (len(text.train), len(text.val)) == (3_212_883, 434_013)
    assert text.train.dtype == text.val.dtype == np.uint8
    assert b"\r" not in bytes(text.val)


def test_default_corpus_does_not_depend_on_line_ends_or_order(tmp_path, monkeypatch):
    """The same files written the Windows way, found in another order, are the same corpus."""
    source = Path(np.__file__).parent
    for path in sorted(source.rglob("*.py"), reverse=True):
        copy = tmp_path / "numpy" / path.relative_to(source)
        copy.parent.mkdir(parents=True, exist_ok=True)
        copy.write_bytes(path.read_bytes().replace(b"\n", b"\r\n"))
    there = load_corpus()
    monkeypatch.setattr(corpus.np, "__file__", str(tmp_path / "numpy" / "__init__.py"))
    assert load_corpus().sha256 == there.sha256
    assert bytes(load_corpus().val) == bytes(there.val)


def test_split_of_several_files_goes_by_the_hash_of_their_path(tmp_path):
    names = [f"sub/{i}.txt" for i in range(40)]
    for name in names:
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).write_bytes(f"<{name}>\r\n".encode())
    (tmp_path / ".hidden").write_text("no")
    (tmp_path / "binary").write_bytes(b"\0\1\2")
    (tmp_path / "empty.txt").write_text("")
    held = [n for n in sorted(names) if int(hashlib.sha256(n.encode()).hexdigest(), 16) % 10 == 0]
    kept = [n for n in sorted(names) if n not in held]
    assert held and kept
    for source in (tmp_path, tmp_path / "**" / "*.txt"):
        text = load_corpus(str(source))
        assert bytes(text.val).decode() == "".join(f"<{n}>\n" for n in held)
        assert bytes(text.train).decode() == "".join(f"<{n}>\n" for n in kept)
        assert text.sha256 == hashlib.sha256("".join(f"<{n}>\n" for n in sorted(names)).encode()).hexdigest()
        assert text.files == 40


def test_a_few_files_of_which_the_rule_holds_none_out(tmp_path):
    (tmp_path / "a").write_bytes(b"x" * 90)
    (tmp_path / "b").write_bytes(b"y" * 10)
    text = load_corpus(str(tmp_path))
    assert (bytes(text.train), bytes(text.val)) == (b"x" * 90, b"y" * 10) and "last 10 %" in text.held_out


def test_single_file_is_memory_mapped_and_loses_its_last_tenth(tmp_path):
    path = tmp_path / "one.bin"
    path.write_bytes(bytes(range(250)) * 4)
    text = load_corpus(str(path))
    assert isinstance(text.train, np.memmap) and (len(text.train), len(text.val)) == (900, 100)
    assert bytes(text.train) + bytes(text.val) == path.read_bytes()
    assert text.sha256 == hashlib.sha256(path.read_bytes()).hexdigest()


def test_too_little_text_names_the_sizes(tmp_path):
    path = tmp_path / "short.txt"
    path.write_bytes(b"a" * 1000)
    text = load_corpus(str(path))
    text.require(99)
    with pytest.raises(ValueError, match=r"short.txt: 100 held-out bytes are too few for windows of 100 \(needed: 101\)"):
        text.require(100)
    with pytest.raises(ValueError, match="900 training bytes are too few for windows of 5,000"):
        text.require(5000)


def test_wrong_sources(tmp_path):
    (tmp_path / "empty").touch()
    (tmp_path / "folder").mkdir()
    (tmp_path / "folder" / "binary").write_bytes(b"\0" * 50)
    for source, message in (("nowhere.txt", "no such file or folder"), ("empty", "the file is empty"),
                            ("folder", "found 1 files, none of them a text"), ("*.nothing", "found 0 files, none of them a text")):
        with pytest.raises(ValueError, match=message):
            load_corpus(str(tmp_path / source))


def test_shakespeare_is_checked_and_never_half_there(tmp_path, monkeypatch):
    target = tmp_path / "tinyshakespeare.txt"
    monkeypatch.setattr(corpus, "SHAKESPEARE_PATH", target)
    answer = lambda content: monkeypatch.setattr(corpus.urllib.request, "urlopen", lambda url, timeout: io.BytesIO(content))
    answer(b"not it")
    with pytest.raises(ValueError, match=r"what came \(6 bytes\) is not the known text; put the file at"):
        load_corpus("shakespeare")
    def refuse(url, timeout):
        raise OSError("connection refused")
    monkeypatch.setattr(corpus.urllib.request, "urlopen", refuse)
    with pytest.raises(ValueError, match="could not be fetched .connection refused.; put the file at"):
        load_corpus("shakespeare")
    assert list(tmp_path.iterdir()) == []
    answer(b"to be " * 100)
    monkeypatch.setattr(corpus, "SHAKESPEARE_SHA256", hashlib.sha256(b"to be " * 100).hexdigest())
    assert len(load_corpus("shakespeare").train) == 540
    assert list(tmp_path.iterdir()) == [target]
    target.write_bytes(b"tampered")
    with pytest.raises(ValueError, match="is not the known text; delete it"):
        load_corpus("shakespeare")


def test_tiny_shakespeare_where_there_is_a_copy():
    path = Path(__file__).parents[2] / "shared" / "data" / "tinyshakespeare.txt"
    if not path.exists():
        pytest.skip("no copy of Tiny Shakespeare here")
    text = load_corpus(str(path))
    assert text.sha256 == SHAKESPEARE_SHA256 and len(text.train) + len(text.val) == 1_115_394


# A download, from a server that does not always do what it should

SONG = b"to be or not to be\n" * 3000


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


def send(handler, content, length=None, code=200):
    handler.send_response(code)
    handler.send_header("Content-Length", str(len(content) if length is None else length))
    handler.end_headers()
    handler.wfile.write(content)


def stalls(handler):
    send(handler, SONG[:1000], len(SONG))
    handler.wfile.flush()
    time.sleep(3)


@pytest.mark.parametrize("answer, message", [
    (lambda handler: send(handler, SONG[:1000], len(SONG)), r"what came .1,000 bytes. is not the known text"),
    (lambda handler: send(handler, SONG[:-1] + b"?"), r"what came .57,000 bytes. is not the known text"),
    (lambda handler: send(handler, b"<html>", code=404), "could not be fetched .HTTP Error 404: Not Found."),
    (lambda handler: send(handler, b"", code=500), "could not be fetched .HTTP Error 500"),
    (lambda handler: handler.wfile.write(b"what?\r\n"), "could not be fetched .what."),
    (stalls, "could not be fetched .*timed out"),
    (None, "could not be fetched .*Connection refused"),
])
def test_a_download_that_goes_wrong_leaves_nothing(tmp_path, monkeypatch, answer, message):
    target = tmp_path / "tinyshakespeare.txt"
    monkeypatch.setattr(corpus, "SHAKESPEARE_PATH", target)
    monkeypatch.setattr(corpus, "SHAKESPEARE_SHA256", hashlib.sha256(SONG).hexdigest())
    monkeypatch.setattr(corpus, "TIMEOUT", 0.5)
    with server(answer or send) as address:
        if answer:
            monkeypatch.setattr(corpus, "SHAKESPEARE_URL", address)
            with pytest.raises(ValueError, match=message) as error:
                load_corpus("shakespeare")
    if not answer:  # nobody listens there any more
        monkeypatch.setattr(corpus, "SHAKESPEARE_URL", address)
        with pytest.raises(ValueError, match=message) as error:
            load_corpus("shakespeare")
    assert f"put the file at {target} by hand (from {address})" in str(error.value)
    assert list(tmp_path.iterdir()) == []


def test_a_download_that_goes_well(tmp_path, monkeypatch):
    """…beside what an earlier one left half-way; and once it is there nothing is fetched again."""
    target = tmp_path / "tinyshakespeare.txt"
    (tmp_path / "tinyshakespeare.99999.part").write_bytes(SONG[:500])
    monkeypatch.setattr(corpus, "SHAKESPEARE_PATH", target)
    monkeypatch.setattr(corpus, "SHAKESPEARE_SHA256", hashlib.sha256(SONG).hexdigest())
    asked = []
    with server(lambda handler: asked.append(handler.path) or send(handler, SONG)) as address:
        monkeypatch.setattr(corpus, "SHAKESPEARE_URL", address)
        for _ in range(2):
            text = load_corpus("shakespeare")
    assert asked == ["/input.txt"] and bytes(text.train) + bytes(text.val) == SONG and target.read_bytes() == SONG


def test_a_folder_that_cannot_keep_the_download(tmp_path, monkeypatch):
    (tmp_path / "file").touch()
    monkeypatch.setattr(corpus, "SHAKESPEARE_PATH", tmp_path / "gone" / "tinyshakespeare.txt")
    monkeypatch.setattr(corpus, "SHAKESPEARE_SHA256", hashlib.sha256(SONG).hexdigest())
    with server(lambda handler: send(handler, SONG)) as address, pytest.raises(ValueError, match="cannot be kept .*; put the file at"):
        monkeypatch.setattr(corpus, "SHAKESPEARE_URL", address)
        load_corpus("shakespeare")


# Odd files

def test_line_ends_and_bytes_of_a_single_file_stay_as_they_are(tmp_path):
    for content in (b"one\r\ntwo\r\n" * 30, bytes(range(256)) * 3, "Größe, 我打你".encode("utf-16") * 9):
        (tmp_path / "file").write_bytes(content)
        text = load_corpus(str(tmp_path / "file"))
        assert bytes(text.train) + bytes(text.val) == content


def test_a_pipe_and_one_byte(tmp_path):
    os.mkfifo(tmp_path / "pipe")
    with pytest.raises(ValueError, match="not a file or a folder; give a regular file, a folder or a glob"):
        load_corpus(str(tmp_path / "pipe"))
    (tmp_path / "byte").write_bytes(b"x")
    with pytest.raises(ValueError, match=r"byte: 0 training bytes are too few for windows of 1 \(needed: 2\)"):
        load_corpus(str(tmp_path / "byte")).require(1)


def test_five_gigabytes_are_read_in_bounded_memory(tmp_path):
    """A sparse file: its pages are mapped, hashed in pieces and never held."""
    code = """
import resource, sys
from data.corpus import load_corpus
from train_compare import batch
before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
text = load_corpus(sys.argv[1])
batch(text.train, 0, 0, 64, 256)
print(len(text.train) + len(text.val), (resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before) // 1024)
"""
    with open(tmp_path / "large", "wb") as file:
        file.truncate(5 * 2**30)
    done = subprocess.run([sys.executable, "-c", code, tmp_path / "large"], capture_output=True, text=True, cwd=Path(__file__).parent.parent, timeout=300)
    size, grown = map(int, done.stdout.split())
    assert size == 5 * 2**30 and grown < 300  # MB; the kernel maps a megabyte or two around each byte that is read
