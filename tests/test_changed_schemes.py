"""Every command that reads a checkpoint notices a scheme that behaves otherwise than it did."""

import importlib
import shutil

import pytest
import torch

import context_test
import extrapolation_test
import finetune
import pos_rope
import tiny_lm
import train_compare
from helpers import TINY, rows_of, song, without_pictures
from lab.checkpoints import load
from lab.rows import distinct

SIZE = [*TINY, "--train-len", "64"]
MINE = """
import torch
from torch import nn

from pos_rope import RoPEAttention
from scale_of_mine import SCALE


class Scaled(nn.Module):
    def __init__(self, dim):
        super().__init__()
        self.dim = dim

    def forward(self, positions):
        rows = torch.arange(self.dim) * positions[..., None]
        return SCALE * torch.sin(rows / 10)


class Child(RoPEAttention):
    pass
"""


@pytest.fixture(scope="module")
def trained(tmp_path_factory):
    """A folder with an own scheme file, its helper file, and models of its schemes in out/."""
    folder = tmp_path_factory.mktemp("changed")
    (folder / "words.txt").write_bytes(song(3000))
    (folder / "mine.py").write_text(MINE)
    (folder / "scale_of_mine.py").write_text("SCALE = 0.5\n")
    schemes = [f"mine.py:{name}" for name in ("Scaled", "Child")]
    words = ["train_compare.py", *SIZE, "--data", "words.txt", "--out", "out"]
    with pytest.MonkeyPatch.context() as patch:
        without_pictures(patch)
        patch.chdir(folder)
        patch.setattr("sys.argv", [*words, "--schemes", *schemes, "rope", "none"])
        train_compare.main()
    return folder


@pytest.fixture
def place(trained, tmp_path, monkeypatch):
    """A copy of that folder, in which the commands run."""
    folder = shutil.copytree(trained, tmp_path / "place")
    without_pictures(monkeypatch)
    monkeypatch.chdir(folder)
    yield folder


@pytest.fixture
def commands(cli):
    """commands(scheme) -> {command's name: (exit code, stdout, stderr)} of each that reads it."""

    def call(scheme):
        device = ("--schemes", scheme, "--device", "cpu")
        read = ("--lengths", 64, "--protocol", "span", "--span-bytes", 128)
        tune = ("--from", "out", "--out", "tuned", "--steps", 2, "--dtype", "fp32")
        return {
            "extrapolation": cli(extrapolation_test, "--out", "out", *read, *device),
            "context": cli(
                context_test, "--out", "out", "--what", "attention", "--windows", 2, *device
            ),
            "finetune": cli(finetune, *tune, "--train-len", 128, *device),
            "train": cli(
                train_compare, *SIZE, "--data", "words.txt", "--out", "out", "--schemes", scheme
            ),
        }

    return call


def change_file(folder, monkeypatch):
    (folder / "mine.py").write_text(MINE.replace("rows / 10", "rows / 11"))
    return "mine.py:Scaled"


def change_helper(folder, monkeypatch):
    (folder / "scale_of_mine.py").write_text("SCALE = 0.51\n")
    importlib.invalidate_caches()
    return "mine.py:Scaled"


def change_parent_frequencies(folder, monkeypatch):
    real = pos_rope.rope_frequencies
    monkeypatch.setattr(pos_rope, "rope_frequencies", lambda d, base: real(d, 0.9 * base))
    return "mine.py:Child"


def change_parent_rotation(folder, monkeypatch):
    real = pos_rope.apply_rope
    monkeypatch.setattr(pos_rope, "apply_rope", lambda x, *rest: 1.01 * real(x, *rest))
    return "mine.py:Child"


def change_rotation_of_rope(folder, monkeypatch):
    change_parent_rotation(folder, monkeypatch)
    return "rope"


def change_kernel(folder, monkeypatch):
    real = tiny_lm.attend

    def other(q, k, v, **options):
        return real(1.01 * q, k, v, **options)

    monkeypatch.setattr(tiny_lm, "attend", other)
    return "none"


CHANGES = [
    change_file,
    change_helper,
    change_parent_frequencies,
    change_parent_rotation,
    change_rotation_of_rope,
    change_kernel,
]


@pytest.mark.parametrize("change", CHANGES)
def test_a_changed_scheme_is_noticed_by_every_command(place, commands, monkeypatch, change):
    scheme = change(place, monkeypatch)
    said = commands(scheme)
    for name in ("extrapolation", "context", "finetune"):
        code, stdout, stderr = said[name]
        assert code == 2 and stdout == "" and stderr.count("\n") == 1, (name, stderr)
        assert f"{scheme} behaves otherwise than when it was trained (signature" in stderr
    code, stdout, _ = said["train"]
    assert code == 0 and "already trained" not in stdout
    assert f"notice: out/checkpoints/{load_name(scheme)}: {scheme} behaves otherwise" in stdout
    assert all(code == 0 for code, _, _ in commands(scheme).values())  # it was trained again


def load_name(scheme):
    return f"{scheme.replace(':', '-')}-seed0.pt"


def test_comments_names_and_moves_change_nothing(place, commands):
    other = MINE.replace("rows", "angles").replace("import nn\n", "import nn\n\n# a comment\n")
    other = other.replace("from scale_of_mine import SCALE", "SCALE = 2**-1")
    other = other.replace("(nn.Module):\n", '(nn.Module):\n    """Its docstring."""\n\n')
    (place / "mine.py").write_text('"""What it is."""\n' + other)
    (place / "scale_of_mine.py").unlink()
    for scheme in ("mine.py:Scaled", "mine.py:Child"):
        said = commands(scheme)
        assert all(code == 0 for code, _, _ in said.values()), said
        assert f"{scheme}, seed 0: already trained" in said["train"][1]
        assert not any("notice" in stdout for _, stdout, _ in said.values())


def test_a_scheme_file_that_is_gone_is_named(place, commands):
    (place / "mine.py").rename(place / "moved.py")
    said = commands("mine.py:Child")
    for name in ("extrapolation", "context", "finetune"):
        code, _, stderr = said[name]
        assert code == 2 and stderr.count("\n") == 1
        assert "does not fit this code (scheme file mine.py: no such file)" in stderr
    assert said["train"][0] == 2 and "no such file" in said["train"][2]


def test_tables_without_a_changed_scheme_say_so(cli, place, monkeypatch):
    change_parent_rotation(place, monkeypatch)
    code, stdout, _ = cli(
        train_compare, *SIZE, "--data", "words.txt", "--out", "out", "--schemes", "none"
    )
    assert code == 0 and stdout.count("; not in the tables") == 2
    assert "notice: out/checkpoints/rope-seed0.pt: rope behaves otherwise" in stdout
    assert distinct(rows_of(place / "out"), "scheme") == ["none", "mine.py:Scaled"]


def test_a_checkpoint_of_an_earlier_version_is_named(place, commands):
    path = place / "out" / "checkpoints" / "rope-seed0.pt"
    weights = load(path).weights
    torch.save({"settings": {"scheme": "rope"}, "row": {}, "model": weights}, path)
    said = commands("rope")
    for name in ("extrapolation", "context", "finetune"):
        code, stdout, stderr = said[name]
        assert code == 2 and stdout == "" and stderr.count("\n") == 1
        assert "rope-seed0.pt is of an earlier version of this repository" in stderr
    code, stdout, _ = said["train"]
    assert code == 0 and "is of an earlier version of this repository" in stdout
    assert load(path).run.scheme == "rope"
