"""Text as bytes, and which of them are held out.

    from data.corpus import load_corpus
    corpus = load_corpus("numpy")      # corpus.train and corpus.val: uint8 arrays

Sources:
  numpy        (default) the .py files of the installed NumPy: code and English documentation, the
               same bytes on every machine with the pinned NumPy, nothing to download
  shakespeare  Tiny Shakespeare, fetched once into data/ and checked by its SHA-256
  PATH         a file (memory-mapped, never read whole), a folder (every text file below it but
               hidden ones), or a glob

With several files, a file is held out when the SHA-256 of its relative path, as an integer, is
divisible by 10. Of a single file, and where that rule would leave one side empty, the last 10 % are
held out.
"""

import glob
import hashlib
import http.client
import itertools
import os
import urllib.request
from dataclasses import dataclass
from pathlib import Path

import numpy as np

# of NumPy 2.4.6, the pinned one
NUMPY_SHA256 = "73b8507fdd13f8d36989897367324716146ddaaa2e08fe6885dd7e7728c3b77a"
SHAKESPEARE_SHA256 = "86c4e6aa9db7c042ec79f339dcb96d42b0075e16b8fc2e86bf0ca57e2dc565ed"
SHAKESPEARE_URL = (
    "https://raw.githubusercontent.com/karpathy/char-rnn/master/data/tinyshakespeare/input.txt"
)
SHAKESPEARE_PATH = Path(__file__).parent / "tinyshakespeare.txt"
TIMEOUT = 30  # seconds without a byte


@dataclass
class Corpus:
    name: str  # what to call it in a table
    sha256: str  # of all bytes, train and held out, in sorted order of the files
    files: int
    held_out: str  # the rule that was used
    train: np.ndarray  # uint8
    val: np.ndarray  # uint8

    def describe(self):
        """What every results file says about its text."""
        return dict(
            name=self.name,
            sha256=self.sha256,
            files=self.files,
            bytes=len(self.train) + len(self.val),
            train_bytes=len(self.train),
            val_bytes=len(self.val),
            held_out=self.held_out,
        )

    def require(self, length):
        """ValueError unless both parts hold a window of `length` bytes and the byte after it."""
        for part, data in (("training", self.train), ("held-out", self.val)):
            if len(data) < length + 1:
                few = f"{len(data):,} {part} bytes are too few for windows of {length:,}"
                needed = f"(needed: {length + 1:,}); give more text or a shorter length"
                raise ValueError(f"{self.name}: {few} {needed}")


def load_corpus(source="numpy"):
    """The corpus named or found at `source`. ValueError says what is wrong with it."""
    try:
        return _load(source)
    except (
        OSError,
        RuntimeError,
    ) as error:  # no permission, a name too long, a home folder that is not there
        raise ValueError(
            f"--data {source}: cannot be read ({getattr(error, 'strerror', None) or error})"
        ) from None


def _load(source):
    if source == "numpy":
        return _numpy()
    if source == "shakespeare":
        return _single_file(_fetch_shakespeare(), "Tiny Shakespeare")
    path = Path(source).expanduser()
    if path.is_file():
        return _single_file(path, path.name)
    if path.is_dir():
        below = (p for p in path.rglob("*") if p.is_file())
        files, root = [p for p in below if not _is_hidden(p.relative_to(path))], path
    elif glob.has_magic(str(path)):
        matches = (Path(p) for p in glob.glob(str(path), recursive=True))
        files = {p.resolve(): p for p in matches if p.is_file()}.values()  # each once
        fixed = itertools.takewhile(lambda part: not glob.has_magic(part), path.parts)
        root = Path(*fixed)
    elif path.exists():
        raise ValueError(
            f"--data {source}: not a file or a folder; give a regular file, a folder or a glob"
        )
    else:
        raise ValueError(f"--data {source}: no such file or folder (or use: numpy, shakespeare)")
    texts = {p.relative_to(root).as_posix(): p.read_bytes() for p in files}
    texts = {name: text for name, text in texts.items() if _is_text(text)}
    if not texts:
        raise ValueError(
            f"--data {source}: found {len(files)} files, none of them a text with anything in it"
        )
    return _many_files(texts, Path(source).name or str(source))


def _is_hidden(path):
    return any(part.startswith(".") for part in path.parts)


def _is_text(content):
    return bool(content) and b"\0" not in content[:8192]


def _numpy():
    root = Path(np.__file__).parent
    out = {"numpy/__init__.py", "numpy/__config__.py", "numpy/version.py"}  # differ between builds
    texts = {}
    for path in root.rglob("*.py"):
        relative = path.relative_to(root.parent)
        if relative.as_posix() not in out and not {"tests", "distutils"} & set(relative.parts):
            texts[relative.as_posix()] = path.read_bytes()
    return _many_files(texts, f"NumPy {np.__version__} sources")


def _many_files(texts, name):
    texts = {path: texts[path].replace(b"\r\n", b"\n") for path in sorted(texts)}
    rule = "files whose path's SHA-256 is divisible by 10"
    held = {path for path in texts if _path_number(path) % 10 == 0}
    train = b"".join(text for path, text in texts.items() if path not in held)
    val = b"".join(text for path, text in texts.items() if path in held)
    everything = b"".join(texts.values())
    if not train or not val:
        cut = len(everything) * 9 // 10
        train, val = everything[:cut], everything[cut:]
        rule = "the last 10 % (no file fell to the rule by path)"
    sha256 = hashlib.sha256(everything).hexdigest()
    parts = (np.frombuffer(part, np.uint8) for part in (train, val))
    return Corpus(name, sha256, len(texts), rule, *parts)


def _path_number(path):
    return int(hashlib.sha256(os.fsencode(path)).hexdigest(), 16)


def _single_file(path, name):
    if path.stat().st_size == 0:
        raise ValueError(f"--data {path}: the file is empty")
    data = np.memmap(path, np.uint8, mode="r")
    cut = len(data) * 9 // 10
    return Corpus(name, _file_sha256(path), 1, "the last 10 % of the file", data[:cut], data[cut:])


def _file_sha256(path):
    with open(path, "rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def _fetch_shakespeare():
    by_hand = f"put the file at {SHAKESPEARE_PATH} by hand (from {SHAKESPEARE_URL})"
    if not SHAKESPEARE_PATH.exists():
        try:
            with urllib.request.urlopen(SHAKESPEARE_URL, timeout=TIMEOUT) as reply:
                text = reply.read(10 * 2**20)
        except (OSError, ValueError, http.client.HTTPException) as error:
            raise ValueError(
                f"--data shakespeare: could not be fetched ({error}); {by_hand}"
            ) from None
        if hashlib.sha256(text).hexdigest() != SHAKESPEARE_SHA256:
            came = f"what came ({len(text):,} bytes) is not the known text"
            raise ValueError(f"--data shakespeare: {came}; {by_hand}")
        partial = SHAKESPEARE_PATH.with_suffix(f".{os.getpid()}.part")
        try:
            partial.write_bytes(text)
            partial.replace(SHAKESPEARE_PATH)
        except OSError as error:
            raise ValueError(f"--data shakespeare: cannot be kept ({error}); {by_hand}") from None
        finally:
            partial.unlink(missing_ok=True)
    if _file_sha256(SHAKESPEARE_PATH) != SHAKESPEARE_SHA256:
        raise ValueError(
            f"--data shakespeare: {SHAKESPEARE_PATH} is not the known text; delete it, or {by_hand}"
        )
    return SHAKESPEARE_PATH
