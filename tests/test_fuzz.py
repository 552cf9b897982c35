"""Command lines drawn at random, most of them wrong.

Each gets one line that says what is wrong, no traceback, and nothing half written.
"""

import json
import os
import random

import pytest

import break_position
import context_test
import extrapolation_test
import finetune
import train_compare
from helpers import train_tiny, without_pictures

SMALL = (
    "--steps 2 --batch-size 2 --train-len 64 --dim 16 --n-layer 1 --n-head 2 --device cpu "
    "--dtype fp32"
).split()
SMALL_NUMBERS = [
    "0", "-1", "1", "2", "3", "7", "64", "100", "99999999999", "1e3", "nan", "inf", "many", "",
    " ", "٣", "0x10", "1.5", "--", *["1", "2", "4", "16", "64"] * 5,
]  # fmt: skip
NUMBERS = ["2147483647", *SMALL_NUMBERS]
WRONG_SCHEMES = [
    "ropes", "", ":", "rope:", "rope:base=0", "rope:base=nan", "rope:base=-3", "rope:base=1e400",
    "rope:interleaved=maybe", "learned:max_len=0", "learned:max_len=5", "learned:beyond=up",
    "sin:factor=0", "rope:scaling=yarn", "rope:scaling=dynamic,factor=2",
    "rope:scaling=yarn,factor=inf", "alibi:slopes=1", "nowhere.py:A", "broken.py:A", "mine.py:B",
    "mine.py:", "mine.py:Peeks", "mine.py:Shape", "mine.py:Raises", "mine.py:Exits", "folder.py:A",
    ".py:", "a" * 300,
]  # fmt: skip
SCHEMES = ["rope", "alibi", "none", "learned", "sin", "mine.py:Bias", *WRONG_SCHEMES]
DATA = [
    "words.txt", "nowhere", "empty", "byte", "binary", "latin1.txt", "crlf.txt", "folder",
    "folder/*.txt", "*", "pipe", "", "/dev/null", "x" * 300,
]  # fmt: skip
TO = ["other", "words.txt", "words.txt/below", "new/deep", "", "/proc/nowhere"]
FROM = ["out", *TO]
DEVICES = ["cpu", "cuda", "meta", "cpu:7", "", "xla"]
TRAINING = {
    "--schemes": SCHEMES, "--seeds": NUMBERS, "--data": DATA, "--train-len": NUMBERS,
    "--batch-size": SMALL_NUMBERS, "--lr": NUMBERS, "--adam-lr": NUMBERS,
    "--random-positions": NUMBERS, "--window": NUMBERS, "--grad-accum": NUMBERS,
    "--save-every": NUMBERS, "--device": DEVICES, "--dtype": ["fp32", "bf16", "fp8"], "--out": TO,
    "--force": None, "--step": ["3"], "rope": None,
}  # fmt: skip
READING = {
    "--schemes": SCHEMES, "--seeds": NUMBERS, "--data": DATA, "--device": DEVICES, "--out": FROM,
}  # fmt: skip
FLAGS = {
    train_compare: TRAINING | {
        "--dim": NUMBERS, "--n-layer": NUMBERS, "--n-head": NUMBERS, "--copies": None,
        "--allow-future": None, "--check": WRONG_SCHEMES, "--scaling": ["yarn"],
    },
    finetune: TRAINING | {
        "--from": FROM, "--scaling": ["none", "yarn", "linear", "cubic"], "--copies": None,
    },
    extrapolation_test: READING | {
        "--lengths": NUMBERS, "--protocol": ["span", "fixed", "both", "all"],
        "--span-bytes": NUMBERS, "--windows": NUMBERS, "--scaling": ["none", "yarn", "cubic"],
        "--factor": NUMBERS, "--beyond": ["wrap", "error", "grow"], "--window": NUMBERS,
        "--from": FROM, "--name": ["x", "", "../x", "train_compare", "a b"],
        "--dtype": ["fp32", "fp8"], "--lenghts": ["3"],
    },
    context_test: READING | {
        "--what": ["use", "copy", "attention", "all"], "--windows": SMALL_NUMBERS, "more": None,
    },
    break_position: {
        "order": None, "swap": None, "long": None, "everything": None, "unscramble": None,
        "--sentences": ["ab", "ba", "a", "", "我打你"], "--seeds": NUMBERS, "--schemes": SCHEMES,
        "--device": DEVICES, "--out": FROM, "--quick": None,
    },
}  # fmt: skip
BASE = {
    train_compare: [*SMALL, "--data", "words.txt", "--out", "fresh", "--schemes", "rope"],
    finetune: "--device cpu --dtype fp32 --steps 2 --train-len 64 --from out --out tuned".split(),
    extrapolation_test: ["--device", "cpu", "--out", "out"],
    context_test: ["--device", "cpu", "--out", "out", "--windows", "2"],
    break_position: ["--device", "cpu", "--out", "out"],
}
OWN = """
import torch
from torch import nn

from tiny_lm import Attention


class Bias(nn.Module):
    def __init__(self, n_head, head_dim):
        super().__init__()

    def bias(self, q, k, q_positions, k_positions):
        return -(q_positions[:, None] - k_positions).abs()[None].to(q.dtype)


class Peeks(Attention):
    def forward(self, x, positions=None):
        return self.out(x.mean(1, keepdim=True).expand(x.shape))


class Shape(Attention):
    def forward(self, x, positions=None):
        return x[:, :1, :3]


class Raises(Attention):
    def forward(self, x, positions=None):
        raise KeyError("gone")


class Exits(Attention):
    def forward(self, x, positions=None):
        raise SystemExit(3)
"""
FILES = {
    "empty": b"",
    "byte": b"x",
    "binary": bytes(range(256)) * 40,
    "latin1.txt": "é\n".encode("latin-1") * 4000,
    "crlf.txt": b"one\r\ntwo\r\n" * 900,
    "broken.py": b"def (",
    "mine.py": OWN.encode(),
    "folder/zeros": bytes(99),
    "folder.py/x": b"",
}


@pytest.fixture(autouse=True)
def no_pictures(monkeypatch):
    without_pictures(monkeypatch)


@pytest.fixture(scope="module")
def place(tmp_path_factory):
    """A folder with models in out/, and with every kind of text and scheme file that is wrong."""
    folder = tmp_path_factory.mktemp("fuzz")
    with pytest.MonkeyPatch.context() as patch:
        without_pictures(patch)
        train_tiny(folder, " ".join(SMALL[:-4]), 400)
    for name, content in FILES.items():
        (folder / name).parent.mkdir(exist_ok=True)
        (folder / name).write_bytes(content)
    os.mkfifo(folder / "pipe")
    return folder


def draw(command, rng):
    """One command line: some flags of the command, each with up to three values."""
    words = list(BASE[command])
    for flag in rng.sample(list(FLAGS[command]), rng.randint(1, 3)):
        words.append(flag)
        if FLAGS[command][flag] is not None:
            words += rng.choices(FLAGS[command][flag], k=rng.choice([1, 1, 1, 2, 3, 0]))
    return words


def listing(folder):
    """{path: when it was written} of the files in a folder, without locks."""
    paths = (path for path in folder.rglob("*") if path.is_file() and path.suffix != ".lock")
    return {str(path): path.stat().st_mtime_ns for path in paths}


def refused(constant):
    raise AssertionError(f"{constant} in a JSON file")


def check(command, words, answer, before, after):
    """What must hold of any command line."""
    code, stdout, stderr = answer
    assert code in (0, 1, 2) or isinstance(code, str), (words, code)
    assert "Traceback" not in stdout + stderr, words
    said = stderr.split("\r")[-1]
    if code == 2:
        name = command.__name__
        assert after == before, (words, stderr)
        assert said.startswith(f"{name}.py: ") and said.count("\n") == 1, (words, stderr)
        assert len(said) > len(name) + 20, (words, stderr)
    for path in set(after) - set(before):
        assert not path.endswith(".part"), words
        if path.endswith(".json"):
            json.loads(open(path).read(), parse_constant=refused)


SEEDS = [0, *(pytest.param(seed, marks=pytest.mark.slow) for seed in range(1, 5))]


@pytest.mark.parametrize("seed", SEEDS)
@pytest.mark.parametrize("command", FLAGS, ids=lambda command: command.__name__)
def test_no_command_line_ends_in_a_traceback(cli, place, command, seed, monkeypatch):
    monkeypatch.chdir(place)
    rng = random.Random(seed)
    for _ in range(25 if seed else 12):
        words, before = draw(command, rng), listing(place)
        try:
            answer = cli(command, *words)
        except OSError:  # command.run makes one line of it
            assert not [path for path in listing(place) if path.endswith(".part")], words
            continue
        except BaseException as error:
            told = f"{command.__name__} {words}: {type(error).__name__}: {error}"
            raise AssertionError(told) from error
        check(command, words, answer, before, listing(place))
