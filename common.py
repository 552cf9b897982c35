"""What the drivers share: arguments and their errors, device and dtype, provenance, files that are whole or not there."""
import argparse
import ast
import contextlib
import ctypes
import hashlib
import json
import os
import platform
import shlex
import subprocess
import sys
import textwrap
import time
from datetime import timedelta
from pathlib import Path

import numpy as np
import torch
from torch import distributed

HERE = Path(__file__).parent


class Parser(argparse.ArgumentParser):
    """Shows each default in --help; a wrong argument gets one line and exit code 2."""

    def __init__(self, description):
        super().__init__(description=description, formatter_class=argparse.RawDescriptionHelpFormatter, allow_abbrev=False)

    def error(self, message):
        self.exit(2, None if rank() else f"{self.prog}: {' '.join(message.split())}\n")


def rank():
    """The number of this process under torchrun; 0 without."""
    return int(os.environ["RANK"]) if "TORCHELASTIC_RUN_ID" in os.environ else 0


def ranks():
    """How many processes torchrun started; 1 without."""
    return int(os.environ["WORLD_SIZE"]) if "TORCHELASTIC_RUN_ID" in os.environ else 1


def join_ranks(device):
    """Connect the processes of torchrun: by nccl on CUDA, else by gloo. They may wait for rank 0, which scores, for hours."""
    if ranks() > 1:
        distributed.init_process_group("nccl" if device.type == "cuda" else "gloo", timeout=timedelta(hours=6))


def from_rank_0(value):
    """The value that rank 0 has, in every process."""
    box = [value]
    if ranks() > 1:
        distributed.broadcast_object_list(box)
    return box[0]


def whole(low, high=2**31 - 1):
    """argparse type: a whole number from low to high."""
    def parse(text):
        if not text.isascii() or not text.removeprefix("-").isdigit() or not low <= int(text) <= high:
            raise argparse.ArgumentTypeError(f"'{text}' is not a whole number from {low} to {high}")
        return int(text)
    return parse


def positive(text):
    """argparse type: a number above 0, at most 1000."""
    try:
        if 0 < float(text) <= 1000:
            return float(text)
    except ValueError:
        pass
    raise argparse.ArgumentTypeError(f"'{text}' is not a number above 0 and at most 1000")


def distinct(flag, values):
    """ValueError if a value was given twice."""
    for value in values:
        if values.count(value) > 1:
            raise ValueError(f"{flag}: {value} is given {values.count(value)} times; once is enough")


def pick_device(name):
    """auto: cuda, then mps, then cpu; under torchrun each process has a CUDA device of its own. ValueError for one not here."""
    if name == "auto":
        name = "cuda" if torch.cuda.is_available() else "mps" if torch.backends.mps.is_available() and ranks() == 1 else "cpu"
    if ranks() > 1 and name == "cuda":
        here, wanted = torch.cuda.device_count(), int(os.environ["LOCAL_WORLD_SIZE"])
        if here < wanted:
            raise ValueError(f"--device cuda: {wanted} processes and {here} CUDA devices here; use at most as many processes, or --device cpu")
        name = f"cuda:{os.environ['LOCAL_RANK']}"
    elif ranks() > 1 and name != "cpu":
        raise ValueError(f"--device {name}: under torchrun use auto, cpu or cuda, which gives each process its own")
    try:
        if name.partition(":")[0] not in ("cpu", "cuda", "mps"):
            raise RuntimeError
        device = torch.device(name)
        torch.empty(1, device=device)
        if device.index is not None and device.type == "cuda":
            torch.cuda.set_device(device)  # so that its generator is the one that is saved
    except (RuntimeError, AssertionError, NotImplementedError):
        raise ValueError(f"--device {name}: there is no such device here; use auto or cpu") from None
    return device


def pick_dtype(name, device):
    """auto: bfloat16 where the products run on bfloat16 units (CUDA, CPUs with AMX or AVX512-BF16), else float32."""
    if name == "auto":
        cpu = torch.cpu.get_capabilities()
        units = {"cuda": lambda: torch.cuda.is_bf16_supported(), "cpu": lambda: cpu.get("amx_bf16") or cpu.get("avx512_bf16")}
        return torch.bfloat16 if units.get(device.type, lambda: False)() else torch.float32
    return {"bf16": torch.bfloat16, "fp32": torch.float32}[name]


def keep_freed_memory():
    """Let glibc keep freed memory for the next step, in place of giving it back and fetching it anew; True if it could.

    bench/train_step.py measures what that saves.
    """
    try:
        mallopt = ctypes.CDLL(None).mallopt
    except (OSError, TypeError, AttributeError):  # another C library
        return False
    M_TRIM_THRESHOLD, M_MMAP_THRESHOLD = -1, -3
    mallopt(M_TRIM_THRESHOLD, 2**31 - 1)
    return bool(mallopt(M_MMAP_THRESHOLD, 32 * 2**20))  # the largest it takes


def code_hash(*sources):
    """One short hash over pieces of Python source: what it does, whatever its comments, docstrings and line ends."""
    parts = []
    for source in sources:
        tree = ast.parse(textwrap.dedent(source.decode("utf-8-sig", "replace")))
        for node in ast.walk(tree):
            body = getattr(node, "body", None)
            if isinstance(body, list) and body and isinstance(body[0], ast.Expr) and isinstance(body[0].value, ast.Constant):
                del body[0]  # a docstring
        parts.append(ast.unparse(tree))
    return hashlib.sha256("\0".join(parts).encode()).hexdigest()[:16]


def code_hashes():
    """{file: its code_hash} of this command's own file, the protocols, the network, the four schemes and the text."""
    name = Path(sys.argv[0]).name
    own = [file for file in (HERE / name, HERE / "bench" / name) if name.endswith(".py") and file.is_file()]
    files = own + [HERE / file for file in ("score.py", "tiny_lm.py", "pos_alibi.py", "pos_learned.py", "pos_rope.py", "pos_sin.py", "data/corpus.py")]
    return {file.relative_to(HERE).as_posix(): code_hash(file.read_bytes()) for file in files}


def given(flag):
    """Whether the user wrote this flag on the command line."""
    return any(word.partition("=")[0] == flag for word in sys.argv[1:])


def provenance(corpus, device, dtype):
    """Where a results file comes from: command, commit, code, versions, machine and text."""
    def git(*args):
        try:
            return subprocess.run(("git", "-C", str(HERE)) + args, capture_output=True, text=True, timeout=20).stdout.strip()
        except (OSError, subprocess.TimeoutExpired):
            return ""
    commit, changed = git("rev-parse", "HEAD"), git("status", "--porcelain", "--", "*.py")
    return dict(
        command=shlex.join((["torchrun", f"--nproc_per_node={ranks()}"] if ranks() > 1 else ["python"])
                           + ["bench/" * (Path(sys.argv[0]).resolve().parent == HERE / "bench") + Path(sys.argv[0]).name] + sys.argv[1:]),
        commit=(commit or "unknown") + (" with uncommitted changes" if changed else ""),
        code=code_hashes(),
        versions=dict(python=platform.python_version(), torch=torch.__version__, numpy=np.__version__),
        machine=dict(system=platform.system(), processor=platform.machine(), capability=torch.backends.cpu.get_cpu_capability(),
                     threads=torch.get_num_threads(), device=device.type, dtype=str(dtype).removeprefix("torch.")),
        corpus=corpus.describe(),
    )


def write_file(path, content):
    """Write bytes, text, or what content(file) writes, so that a reader sees the old file or the new one, never half of it."""
    path = Path(path)
    path.parent.mkdir(parents=True, exist_ok=True)
    partial = path.with_name(f".{path.name}.{os.getpid()}.part")
    try:
        with open(partial, "wb") as file:
            if callable(content):
                content(file)
            else:
                file.write(content.encode("utf-8", "backslashreplace") if isinstance(content, str) else content)
            file.flush()
            os.fsync(file.fileno())
        partial.replace(path)
    except (OSError, RuntimeError) as error:
        cause = error.__context__ if isinstance(error, RuntimeError) else error  # torch.save covers the disk's error with its own
        if isinstance(cause, OSError):
            raise type(cause)(cause.errno, cause.strerror, str(path)) from None
        raise
    finally:
        partial.unlink(missing_ok=True)


def writable_folder(path):
    """Make the folder --out. ValueError if it cannot be made or written to, before anything is computed for it."""
    try:
        Path(path).mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise ValueError(f"--out {path}: cannot be made ({error.strerror})") from None
    if not os.access(Path(path), os.W_OK | os.X_OK):
        raise ValueError(f"--out {path}: cannot be written to")
    for partial in Path(path).glob(".*.part"):  # what a killed process left; a living one is done within seconds
        if time.time() - partial.stat().st_mtime > 600:
            partial.unlink(missing_ok=True)
    return Path(path)


def only_writer(folder):
    """Keep other processes from writing to this folder: `with` what this returns. ValueError if another one is at it.

    The lock ends with the process, however that ends. Not on Windows, which cannot lock a folder.
    """
    lock = contextlib.ExitStack()
    try:
        import fcntl
    except ImportError:
        return lock
    handle = os.open(folder, os.O_RDONLY)
    lock.callback(os.close, handle)
    try:
        fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        lock.close()
        raise ValueError(f"another process is writing to {folder}; wait until it is done, or use another --out") from None
    except OSError:  # a file system without locks
        pass
    return lock


def write_json(path, data):
    write_file(path, json.dumps(data, indent=1, ensure_ascii=False, allow_nan=False) + "\n")


def run(main, many=False):
    """Run a driver; Ctrl-C and what the operating system refuses end in one line, not a traceback. many: under torchrun too."""
    for stream in (sys.stdout, sys.stderr):
        if hasattr(stream, "reconfigure"):  # not where a notebook or nobody is listening
            stream.reconfigure(errors="replace")  # a terminal that cannot show ± gets a question mark
    keep_freed_memory()
    name = Path(sys.argv[0]).name
    if ranks() > 1 and not many:
        sys.exit(f"{name}: this is one process; start it with python, only train_compare.py runs under torchrun" if not rank() else 2)
    try:
        main()
    except KeyboardInterrupt:
        sys.exit(130)
    except OSError as error:
        print(f"{name}: {error}", file=sys.stderr)
        sys.exit(1)
