"""Schemes of one's own in train_compare.py: used, refused, and looked at with --check."""

import pytest
import torch

import extrapolation_test
import train_compare
from data.corpus import load_corpus
from helpers import TINY, rows_of, tree, without_pictures
from lab import score
from lab.checkpoints import load
from lab.rows import select, values
from lab.stats import measured_ppl

OWN = '''
import torch
from torch import nn

from tiny_lm import Attention


class Zero(nn.Module):
    """An embedding."""

    def __init__(self, dim, x=1):
        super().__init__()
        self.dim = dim

    def forward(self, positions):
        return torch.zeros(*positions.shape, self.dim)


class Bias(nn.Module):
    """A relation."""

    def __init__(self, n_head, head_dim):
        super().__init__()
        self.slopes = nn.Parameter(torch.full((n_head, 1, 1), 0.1))

    def bias(self, q, k, q_positions, k_positions):
        return -self.slopes * (q_positions[:, None] - k_positions).abs()


class Plain(Attention):
    """An attention with a cache and an `attend`."""


class WithoutCache(nn.Module):
    """An attention without either."""

    def __init__(self, dim, n_head):
        super().__init__()
        self.inner = Attention(dim, n_head)
        self.qkv, self.out = self.inner.qkv, self.inner.out

    def forward(self, x, positions=None):
        return self.inner(x, positions)


class Peeks(Attention):
    def forward(self, x, positions=None):
        mean = self.qkv(x)[..., : x.shape[-1]].mean(1, keepdim=True)
        return self.out(mean.expand(x.shape))


class Odd(Attention):
    def forward(self, x, positions=None):
        if x.shape[1] == 9:
            raise RuntimeError("nine")
        return super().forward(x)
'''


@pytest.fixture(autouse=True)
def no_pictures(monkeypatch):
    without_pictures(monkeypatch)


@pytest.fixture
def own(tmp_path):
    """own(name) -> the scheme string of a class of OWN."""
    (tmp_path / "own.py").write_text(OWN)

    def scheme(name):
        return f"{tmp_path / 'own.py'}:{name}"

    return scheme


@pytest.fixture
def train(cli, text, tmp_path):
    def call(*flags):
        return cli(train_compare, *TINY, "--data", text, "--out", tmp_path / "out", *flags)

    return call


def test_an_embedding_of_zeros_is_no_encoding(train, own, tmp_path):
    scheme = own("Zero:x=3")
    assert train("--schemes", scheme, "none")[0] == 0
    rows = rows_of(tmp_path / "out")
    mine, plain = (values(rows, scheme=name, protocol="span") for name in (scheme, "none"))
    assert mine == plain and len(mine) == 1


def test_a_relation_trains_and_reads_with_a_window(cli, train, text, own, tmp_path):
    scheme, out = own("Bias"), tmp_path / "out"
    assert train("--schemes", scheme)[0] == 0
    flags = ("--lengths", 64, "--protocol", "span", "--span-bytes", 1024, "--window", 0, 5)
    assert cli(extrapolation_test, "--out", out, "--device", "cpu", *flags)[0] == 0
    (plain,), (windowed,) = (
        values(rows_of(out, "extrapolation"), read_window=window) for window in (0, 5)
    )
    saved = load(next((out / "checkpoints").glob("*.pt")))
    nats = score.span(saved.model(window=5), load_corpus(str(text)).val, 64, 1024)
    assert windowed == measured_ppl(nats)["value"] != plain
    assert train("--schemes", scheme, "--window", 8)[0] == 0
    assert load(saved.path).run.window == 8


def test_the_trained_slopes_of_a_relation_are_kept(train, own, tmp_path):
    assert train("--schemes", own("Bias"), "--steps", 20)[0] == 0
    weights = load(next((tmp_path / "out" / "checkpoints").glob("*.pt"))).weights
    slopes = weights["blocks.0.attention.relation.slopes"]
    assert slopes.shape == (2, 1, 1) and not torch.equal(slopes, torch.full((2, 1, 1), 0.1))
    (own_parameters,) = {
        row["value"] for row in select(rows_of(tmp_path / "out"), metric="position_parameters")
    }
    assert own_parameters == 2


def test_a_scheme_that_ends_at_its_training_length_is_trained(cli, train, tmp_path):
    assert train("--schemes", "learned:max_len=16", "none")[0] == 0
    flags = ("--lengths", 16, 64, "--protocol", "span", "--device", "cpu")
    code, stdout, _ = cli(extrapolation_test, "--out", tmp_path / "out", *flags)
    assert code == 0 and "max_len 16" in stdout
    found = values(rows_of(tmp_path / "out", "extrapolation"), scheme="learned:max_len=16")
    assert len(found) == 1


# Refused before training

BODIES = [
    ("raise KeyError('gone')", "KeyError: 'gone'"),
    ("raise RuntimeError", "RuntimeError"),
    ("raise SystemExit(3)", "SystemExit: 3"),
    ("assert False", "AssertionError"),
    ("return x[:, :-1]", "does not work in this network"),
    ("return self.out(self.qkv(x)[..., :16]).double()", "does not work in this network"),
    (
        "return self.out(self.qkv(x)[..., :16] + torch.zeros(16))",
        "does not work in this network (bfloat16): RuntimeError",
    ),
    (
        "return self.out(self.qkv(x)[..., :16].mean(1, keepdim=True).expand(x.shape))",
        "sees what it is to predict",
    ),
    (
        "y = self.qkv(x)[..., :16].exp(); z = self.out(y); y.add_(1); return z",
        "modified by an inplace operation",
    ),
]


@pytest.mark.parametrize("body, message", BODIES)
def test_what_cannot_work_is_told_before_training(train, tmp_path, body, message):
    (tmp_path / "mine.py").write_text(
        "import torch\n"
        "from tiny_lm import Attention\n"
        "class A(Attention):\n"
        "    def forward(self, x, positions=None):\n"
        f"        {body}\n"
    )
    code, _, stderr = train("--dtype", "bf16", "--schemes", f"{tmp_path / 'mine.py'}:A")
    assert code == 2 and message in stderr and stderr.count("\n") == 1
    assert not (tmp_path / "out").exists()


def test_an_own_scheme_is_tried_at_every_training_length(train, own, tmp_path):
    code, _, stderr = train("--train-len", 16, 9, "--schemes", own("Odd"))
    assert code == 2 and "does not work in this network (float32): RuntimeError: nine" in stderr
    assert not (tmp_path / "out").exists()


def test_an_attention_that_peeks_is_trained_when_told_to(train, own):
    code, _, stderr = train("--schemes", own("Peeks"))
    assert code == 2 and "its attention must be causal (or say --allow-future)" in stderr
    assert train("--schemes", own("Peeks"), "--allow-future")[0] == 0


def test_a_window_needs_an_attention_that_takes_attend(train, own):
    code, _, stderr = train("--schemes", own("WithoutCache"), "--window", 4)
    assert code == 2 and "a window needs an attention class that takes `attend`" in stderr
    assert train("--schemes", own("WithoutCache"))[0] == 0


# --check

EXPECTED = {
    "Zero": {
        "kind": "embedding",
        "reads in chunks with a cache": "as in one pass",
        "positions moved by 100": "no difference",
        "a window": "works",
        "its own parameters": "none",
    },
    "Bias": {
        "kind": "relation",
        "reads in chunks with a cache": "as in one pass",
        "positions moved by 100": "no difference",
        "a window": "works",
        "its own parameters": "blocks.*.attention.relation.slopes (4, 1, 1)",
    },
    "Plain": {
        "kind": "attention",
        "reads in chunks with a cache": "as in one pass",
        "a window": "works",
        "its own parameters": "none",
    },
    "WithoutCache": {
        "kind": "attention",
        "reads in chunks with a cache": "no: ValueError: scheme",
        "a window": "no: scheme",
    },
}


@pytest.mark.slow
@pytest.mark.parametrize("name", EXPECTED)
def test_check_says_what_is_known_before_training(cli, own, tmp_path, monkeypatch, name):
    monkeypatch.chdir(tmp_path)
    code, stdout, stderr = cli(train_compare, "--check", own(name))
    assert code == 0 and stderr == "" and tree(tmp_path) == ["own.py"]
    answers = {line[:32].strip(): line[32:].strip() for line in stdout.splitlines()}
    assert answers["shapes and causality"] == "right"
    assert answers["reads past its training length"] == "yes, tried at 1024"
    assert answers["ways to read it longer"] == "none (no LONGER)"
    assert "× that of none" in answers["time of a training step"]
    for question, answer in EXPECTED[name].items():
        assert answers[question].startswith(answer)


def test_check_refuses_what_cannot_be_trained(cli, own, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    for scheme, message in (
        (own("Peeks"), "sees what it is to predict"),
        ("ropes", "unknown scheme 'ropes'"),
        ("nowhere.py:A", "no such file"),
    ):
        code, stdout, stderr = cli(train_compare, "--check", scheme)
        assert code == 2 and stdout == "" and message in stderr and stderr.count("\n") == 1
