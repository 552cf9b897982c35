"""What tests of several files share."""

import contextlib
import os
import subprocess
import sys
import textwrap
from pathlib import Path

import numpy as np
import pytest
import torch

from lab.rows import read_rows
from lab.runs import Run

ROOT = Path(__file__).parent.parent
CPU = torch.device("cpu")
# A run that takes a moment, and the same on the command line.
RUN = Run(
    sha256="words", steps=12, batch_size=2, train_lens=(16,), trained_len=16, max_len=256,
    dim=16, n_layer=1, n_head=2, lr=0.02, adam_lr=0.004, dtype="float32",
)  # fmt: skip
TINY = (
    "--steps 6 --batch-size 2 --train-len 16 --dim 16 --n-layer 1 --n-head 2 --dtype fp32 "
    "--device cpu"
).split()
TWENTY = np.tile(np.arange(20, dtype=np.uint8), 100)  # a text that a tiny model learns


def song(lines):
    """A text of so many lines, as bytes."""
    return b"".join(b"%d bottles of beer on the wall\n" % i for i in range(lines))


def tree(folder):
    """The files below a folder that are not hidden, as sorted relative paths."""
    found = (path.relative_to(folder) for path in folder.rglob("*") if path.is_file())
    return sorted(str(path) for path in found if not path.name.startswith("."))


def train_tiny(folder, flags, lines):
    """Train all five schemes for a moment with these flags on a song -> the folder --out."""
    import train_compare

    (folder / "words.txt").write_bytes(song(lines))
    place = ["--data", str(folder / "words.txt"), "--out", str(folder / "out")]
    words = ["train_compare.py", *flags.split(), "--dtype", "fp32", "--device", "cpu", *place]
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("sys.argv", words)
        train_compare.main()
    return folder / "out"


def same_weights(a, b):
    return all(torch.equal(x, y) for x, y in zip(a.values(), b.values(), strict=True))


@contextlib.contextmanager
def stopped_at(step):
    """Ctrl-C in this step of the training in here, counted from 1."""
    real, calls = torch.optim.Muon.step, []

    def stops(*arguments):
        calls.append(1)
        if len(calls) == step:
            raise KeyboardInterrupt
        return real(*arguments)

    with pytest.MonkeyPatch.context() as patch, pytest.raises(KeyboardInterrupt):
        patch.setattr(torch.optim.Muon, "step", stops)
        yield


def child(code, *arguments):
    """Run Python code, and then train_compare with the arguments, in a process of its own."""
    words = ["train_compare.py", *map(str, arguments)]
    script = f"import sys\nsys.path.insert(0, {str(ROOT)!r})\n" + textwrap.dedent(code)
    script += textwrap.dedent(f"""
        import train_compare
        from lab import command
        sys.argv = {words!r}
        command.run(train_compare.main, many=True)
    """)
    return subprocess.run(
        [sys.executable, "-c", script],
        capture_output=True,
        text=True,
        timeout=120,
        env=os.environ | {"OMP_NUM_THREADS": "1"},
    )


def torchrun(processes, *command):
    """Run a command in so many processes."""
    start = [sys.executable, "-m", "torch.distributed.run", "--standalone"]
    return subprocess.run(
        [*start, f"--nproc_per_node={processes}", *map(str, command)],
        capture_output=True,
        text=True,
        timeout=100,
        env=os.environ | {"OMP_NUM_THREADS": "1"},
    )


def rows_of(out, name="train_compare"):
    """The rows of a table that a command wrote."""
    return read_rows(out / f"{name}.json")


def without_pictures(patch):
    """Let commands write a few bytes where drawing a picture would take a second."""
    from lab import plots

    def draw(path, *arguments):
        path.write_bytes(b"a picture")

    for name in ("plot_loss_curves", "plot_extrapolation", "plot_longer", "plot_context"):
        patch.setattr(plots, name, draw)
