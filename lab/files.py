"""Files that a reader sees whole or not at all: atomic writes, CSV, JSON, locks."""

import contextlib
import csv
import io
import json
import os
import time
from pathlib import Path


def write_atomically(path, content):
    """Write bytes, text, or what content(file) writes: a reader sees the old file or the new."""
    path = Path(path)
    path.parent.mkdir(parents=True, exist_ok=True)
    partial = path.with_name(f".{path.name}.{os.getpid()}.part")
    try:
        with open(partial, "wb") as file:
            if callable(content):
                content(file)
            elif isinstance(content, str):
                file.write(content.encode("utf-8", "backslashreplace"))
            else:
                file.write(content)
            file.flush()
            os.fsync(file.fileno())
        partial.replace(path)
    except (OSError, RuntimeError) as error:
        # torch.save covers the disk's error with one of its own
        cause = error.__context__ if isinstance(error, RuntimeError) else error
        if isinstance(cause, OSError):
            raise type(cause)(cause.errno, cause.strerror, str(path)) from None
        raise
    finally:
        partial.unlink(missing_ok=True)


def write_json(path, value):
    text = json.dumps(value, indent=1, ensure_ascii=False, allow_nan=False)
    write_atomically(path, text + "\n")


def csv_text(rows):
    """Rows with the same keys -> CSV with those keys as its header."""
    text = io.StringIO()
    writer = csv.DictWriter(text, list(rows[0]), lineterminator="\n")
    writer.writeheader()
    writer.writerows(rows)
    return text.getvalue()


def write_csv(path, rows):
    write_atomically(path, csv_text(rows))


def writable_folder(path):
    """Make the folder --out, and clear away what a killed process left half written in it.

    ValueError if it cannot be made or written to, before anything is computed for it.
    """
    try:
        Path(path).mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise ValueError(f"--out {path}: cannot be made ({error.strerror})") from None
    if not os.access(Path(path), os.W_OK | os.X_OK):
        raise ValueError(f"--out {path}: cannot be written to")
    for partial in Path(path).glob(".*.part"):  # a living process is done with one in seconds
        if time.time() - partial.stat().st_mtime > 600:
            partial.unlink(missing_ok=True)
    return Path(path)


@contextlib.contextmanager
def file_lock(path):
    """Keep other processes from the work on `path` while this one is at it.

    ValueError if another process is at it. The lock is a hidden file beside `path`; it ends with
    the process, however that ends. Not on Windows, which has no flock.
    """
    try:
        import fcntl
    except ImportError:
        yield
        return
    path = Path(path)
    lock = path.with_name(f".{path.name}.lock")
    handle = _locked(lock, fcntl)
    if handle is None:
        raise ValueError(f"another process is at work on {path}; wait until it is done")
    try:
        yield
    finally:
        with contextlib.suppress(OSError):
            lock.unlink()
        os.close(handle)


def _locked(lock, fcntl):
    """A handle that holds the lock file, or None if another process does."""
    while True:
        handle = os.open(lock, os.O_CREAT | os.O_RDWR, 0o666)
        try:
            fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            os.close(handle)
            return None
        except OSError:  # a file system without locks
            return handle
        with contextlib.suppress(OSError):
            if os.path.samestat(os.fstat(handle), os.stat(lock)):
                return handle
        os.close(handle)  # its last holder has just removed it


@contextlib.contextmanager
def folder_lock(folder):
    """Wait until no other process is writing tables into this folder, and keep them out."""
    try:
        import fcntl
    except ImportError:
        yield
        return
    handle = os.open(folder, os.O_RDONLY)
    try:
        with contextlib.suppress(OSError):  # a file system without locks
            fcntl.flock(handle, fcntl.LOCK_EX)
        yield
    finally:
        os.close(handle)
