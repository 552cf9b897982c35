"""Hundreds of command lines drawn at random, most of them wrong: one line on what is wrong, nothing half-written, no traceback."""
import itertools
import json
import os
import random

import pytest

import break_position
import context_test
import extrapolation_test
import train_compare
from conftest import train_tiny

SMALL = "--steps 2 --batch-size 2 --train-len 64 --dim 16 --n-layer 1 --n-head 2 --device cpu --dtype fp32".split()
NUMBERS = ["0", "-1", "1", "2", "3", "7", "64", "100", "99999999999", "1e3", "nan", "inf", "many", "", " ", "٣", "0x10", "1.5", "--", "2147483647"] + ["1", "2", "4", "16", "64"] * 5
SCHEMES = ["rope", "alibi", "none", "learned", "sin", "ropes", "", ":", "rope:", "rope:base=0", "rope:base=nan", "rope:base=-3", "rope:base=1e400", "rope:interleaved=maybe",
           "learned:max_len=0", "learned:max_len=5", "learned:beyond=up", "sin:factor=0", "rope:scaling=yarn", "rope:scaling=dynamic,factor=2", "rope:scaling=yarn,factor=inf",
           "alibi:slopes=1", "nowhere.py:A", "broken.py:A", "mine.py:B", "mine.py:", "mine.py:Peeks", "mine.py:Shape", "mine.py:Raises", "mine.py:Exits", "folder.py:A", ".py:", "a" * 300]
DATA = ["words.txt", "nowhere", "empty", "byte", "binary", "latin1.txt", "crlf.txt", "folder", "folder/*.txt", "*", "pipe", "", "/dev/null", "x" * 300]
FOLDERS = ["out", "words.txt", "words.txt/below", "new/deep", "", "/proc/nowhere"]
FLAGS = {
    train_compare: {"--schemes": SCHEMES, "--seeds": NUMBERS, "--data": DATA, "--train-len": NUMBERS, "--dim": NUMBERS, "--n-layer": NUMBERS, "--n-head": NUMBERS,
                    "--batch-size": [number for number in NUMBERS if number != "2147483647"], "--lr": NUMBERS, "--adam-lr": NUMBERS, "--random-positions": NUMBERS, "--window": NUMBERS, "--copies": None,
                    "--finetune-from": SCHEMES, "--scaling": ["none", "yarn", "linear", "cubic"], "--from": FOLDERS, "--device": ["cpu", "cuda", "meta", "cpu:7", "", "xla"],
                    "--dtype": ["fp32", "bf16", "fp8"], "--out": FOLDERS, "--force": None, "--grad-accum": NUMBERS, "--save-every": NUMBERS, "--allow-future": None,
                    "--step": ["3"], "rope": None},
    extrapolation_test: {"--schemes": SCHEMES, "--seeds": NUMBERS, "--lengths": NUMBERS, "--protocol": ["span", "fixed", "both", "all"], "--span-bytes": NUMBERS, "--windows": NUMBERS,
                         "--scaling": ["none", "yarn", "cubic"], "--factor": NUMBERS, "--beyond": ["wrap", "error", "grow"], "--window": NUMBERS, "--from": FOLDERS, "--data": DATA,
                         "--name": ["x", "", "../x", "train_compare", "a b"], "--device": ["cpu", "cuda", "meta"], "--dtype": ["fp32", "fp8"], "--out": FOLDERS, "--lenghts": ["3"]},
    context_test: {"--what": ["use", "copy", "attention", "all"], "--schemes": SCHEMES, "--seeds": NUMBERS, "--windows": NUMBERS, "--data": DATA, "--device": ["cpu", "cuda"],
                   "--out": FOLDERS, "more": None},
    break_position: {"order": None, "swap": None, "long": None, "everything": None, "--sentences": ["ab", "ba", "a", "", "我打你"], "--seeds": NUMBERS,
                     "--device": ["cpu", "cuda", ""], "--out": FOLDERS, "--quick": None, "unscramble": None},
}
BASE = {train_compare: [*SMALL, "--data", "words.txt", "--out", "fresh", "--schemes", "rope"], extrapolation_test: ["--device", "cpu", "--out", "out"],
        context_test: ["--device", "cpu", "--out", "out", "--windows", "2"], break_position: ["--device", "cpu", "--out", "out"]}
OWN = """import torch
from torch import nn
class Base(nn.Module):
    def __init__(self, dim, n_head):
        super().__init__()
        self.qkv, self.out = nn.Linear(dim, 3 * dim, bias=False), nn.Linear(dim, dim, bias=False)
class Peeks(Base):
    def forward(self, x, positions=None): return self.out(x.mean(1, keepdim=True).expand(x.shape))
class Shape(Base):
    def forward(self, x, positions=None): return x[:, :1, :3]
class Raises(Base):
    def forward(self, x, positions=None): raise KeyError("gone")
class Exits(Base):
    def forward(self, x, positions=None): raise SystemExit(3)
"""


@pytest.fixture(scope="module")
def place(tmp_path_factory):
    """A folder with models in out/, and with every kind of text and scheme file that can be wrong."""
    folder = tmp_path_factory.mktemp("fuzz")
    train_tiny(folder, " ".join(SMALL[:-4]), 400)
    for name, content in {"empty": b"", "byte": b"x", "binary": bytes(range(256)) * 40, "latin1.txt": "é\n".encode("latin-1") * 4000, "crlf.txt": b"one\r\ntwo\r\n" * 900,
                          "broken.py": b"def (", "mine.py": OWN.encode(), "folder/zeros": bytes(99), "folder.py/x": b""}.items():
        (folder / name).parent.mkdir(exist_ok=True)
        (folder / name).write_bytes(content)
    os.mkfifo(folder / "pipe")
    return folder


def draw(driver, rng):
    """One command line: some flags of the driver, each with one to three values, mostly wrong ones."""
    words = list(BASE[driver])
    for flag in rng.sample(list(FLAGS[driver]), rng.randint(1, 3)):
        values = FLAGS[driver][flag]
        words += [flag] + ([] if values is None else rng.choices(values, k=rng.choice([1, 1, 1, 2, 3, 0])))
    return words


def listing(folder):
    return {str(path): path.stat().st_mtime_ns for path in folder.rglob("*") if path.is_file()}


@pytest.mark.parametrize("driver, seed", itertools.product(FLAGS, range(4)), ids=lambda value: getattr(value, "__name__", value))
def test_no_command_line_ends_in_a_traceback(cli, place, driver, seed, monkeypatch):
    monkeypatch.chdir(place)
    rng = random.Random(seed)
    for _ in range(25):
        words, before = draw(driver, rng), listing(place)
        try:
            code, stdout, stderr = cli(driver, *words)
        except BaseException as error:
            if isinstance(error, OSError):  # common.run makes one line of it
                assert not [path for path in listing(place) if path.endswith(".part")], words
                continue
            raise AssertionError(f"{driver.__name__} {words}: {type(error).__name__}: {error}") from error
        said = stderr.split("\r")[-1]
        assert code in (0, 1, 2) or isinstance(code, str), (words, code)
        assert "Traceback" not in stdout + stderr, words
        after = listing(place)
        if code == 2:
            assert after == before, (words, stderr)
            assert said.startswith(f"{driver.__name__}.py: ") and said.count("\n") == 1 and len(said) > 30, (words, stderr)
        for path in set(after) - set(before):
            assert not path.endswith(".part"), words
            if path.endswith(".json"):
                json.loads(open(path).read(), parse_constant=lambda text: pytest.fail(f"{text} in {path}"))
