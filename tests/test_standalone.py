"""What a reader copies into a project of their own imports nothing of this repository."""

import ast
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent
ALONE = ["pos_learned.py", "pos_sin.py", "pos_rope.py", "pos_alibi.py", "attend.py"]
SCALING = "schemes/rope_scaling.py"

# Runs each copy as `python FILE` would, from its own folder, with this repository out of reach.
RUN_EACH = """
import runpy, sys
reach = list(sys.path)
for path in sys.argv[1:]:
    sys.path[:] = [path.rpartition("/")[0], *reach]
    print("###", path)
    runpy.run_path(path, run_name="__main__")

from rope_scaling import ScaledRoPEAttention
import torch
layer = ScaledRoPEAttention(16, 2, scaling="yarn", factor=2, trained_len=8)
print(tuple(layer(torch.randn(1, 12, 16)).shape))
"""


def imported(path):
    """The top-level names of all that a file imports, wherever in it."""
    names = set()
    for node in ast.walk(ast.parse(path.read_text("utf-8"))):
        if isinstance(node, ast.Import):
            names |= {alias.name.split(".")[0] for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0
            names.add(node.module.split(".")[0])
    return names


@pytest.mark.parametrize("name", [*ALONE, SCALING])
def test_a_file_to_copy_needs_torch_alone(name):
    beside = {"pos_rope"} if name == SCALING else set()
    assert imported(ROOT / name) - set(sys.stdlib_module_names) - beside == {"torch"}
    assert len((ROOT / name).read_text("utf-8").splitlines()) < 260


def test_copies_run_alone(tmp_path):
    copies = []
    for name in [*ALONE, SCALING]:
        folder = tmp_path / Path(name).stem
        folder.mkdir()
        copies.append(shutil.copy(ROOT / name, folder))
    shutil.copy(ROOT / "pos_rope.py", tmp_path / "rope_scaling")
    command = [sys.executable, "-I", "-c", RUN_EACH, *copies]
    run = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, timeout=100)
    assert run.returncode == 0 and run.stderr == "", run.stderr
    *demonstrations, last = run.stdout.split("###")[1:]
    assert last.endswith("(1, 12, 16)\n")
    for name, output in zip(ALONE, demonstrations, strict=True):
        shows = name.startswith("pos_")  # its demonstration
        assert (len(output.splitlines()) > 2) == shows, output
    assert list(tmp_path.rglob("*.png")) == []  # only lab/plots.py draws
