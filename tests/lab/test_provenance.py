"""What rows say of their origin, and the signature of a scheme; tests/test_fingerprints.py has
the fingerprints."""

import json
import math
import subprocess

import numpy as np
import pytest
import torch

import pos_alibi
import tiny_lm
from data.corpus import Corpus
from helpers import CPU, RUN
from lab import provenance
from lab.provenance import moved, random_network, same_signature, signature, stamp
from pos_alibi import alibi_slopes
from schemes import rope_scaling
from schemes.rope_scaling import rope_frequencies
from schemes.scheme import SCHEMES
from tiny_lm import attend

DEFAULT = dict(dim=128, n_layer=4, n_head=4, trained_len=256, train_lens=(256,), max_len=4096)
TEXT = Corpus("words.txt", "abc", 1, "the last 10 %", np.zeros(9), np.zeros(1))


# Stamps


def test_a_stamp_says_where_a_row_comes_from():
    found = stamp("python train_compare.py", TEXT, CPU, torch.bfloat16)
    assert (found["command"], found["text_name"]) == ("python train_compare.py", "words.txt")
    assert (found["text"], found["device"], found["read_dtype"]) == ("abc", "cpu", "bfloat16")
    assert found["torch"] == torch.__version__ and found["threads"] == torch.get_num_threads()
    json.dumps(found)


@pytest.mark.parametrize("commit, changed, told", [
    ("abc", "", "abc"), ("abc", " M tiny_lm.py", "abc with uncommitted changes"),
    ("", "", "unknown"),
])  # fmt: skip
def test_a_stamp_names_the_commit_and_whether_code_was_changed(monkeypatch, commit, changed, told):
    answers = {"rev-parse": commit, "status": changed}
    monkeypatch.setattr(provenance, "git", lambda first, *rest: answers[first])
    assert stamp("", TEXT, CPU, torch.float32)["commit"] == told


@pytest.mark.parametrize("error", [FileNotFoundError(), subprocess.TimeoutExpired("git", 20)])
def test_without_git_nothing_is_known(monkeypatch, error):
    def fails(*arguments, **options):
        raise error

    monkeypatch.setattr(subprocess, "run", fails)
    assert provenance.git("rev-parse", "HEAD") == ""


# Random networks


def test_every_part_of_a_random_network_does_something():
    model = random_network(scheme="learned", dim=16, n_layer=2, n_head=2, max_len=64)
    for name, weight in model.named_parameters():
        if "norm" in name:
            assert torch.equal(weight, torch.ones_like(weight))
        else:
            assert weight.std().item() == pytest.approx(provenance.STD, rel=0.15)
    assert not model.training


def test_a_random_network_is_the_same_every_time():
    first, second = (random_network(seed=3, scheme="rope", dim=16, n_head=2) for _ in range(2))
    pairs = zip(first.parameters(), second.parameters(), strict=True)
    assert all(torch.equal(a, b) for a, b in pairs)


# Signatures


def other_frequencies(head_dim, base=10000.0):
    return rope_frequencies(head_dim, base * 0.999)


def steeper(n_head):
    return alibi_slopes(n_head) * 1.001


def stronger(*arguments, **options):
    return attend(*arguments, **options) * 1.001


PLANTED = [
    ("rope", rope_scaling, "rope_frequencies", other_frequencies),
    ("alibi", pos_alibi, "alibi_slopes", steeper),
    *((scheme, tiny_lm, "attend", stronger) for scheme in SCHEMES),
]


@pytest.mark.parametrize("scheme, module, name, change", PLANTED)
def test_a_signature_moves_with_its_scheme(monkeypatch, scheme, module, name, change):
    run = RUN.replace(scheme=scheme, **DEFAULT)
    before = signature(run)
    assert signature(run) == before
    monkeypatch.setattr(module, name, change)
    assert not same_signature(before, signature(run))


@pytest.mark.parametrize("change", [
    dict(scheme="sin"), dict(n_layer=2), dict(n_head=4), dict(window=8), dict(dim=32),
])  # fmt: skip
def test_a_signature_depends_on_the_network(change):
    assert not same_signature(signature(RUN), signature(RUN.replace(**change)))


@pytest.mark.parametrize("change", [
    dict(seed=1), dict(sha256="x"), dict(steps=3), dict(lr=0.1), dict(dtype="bfloat16"),
    dict(start=RUN), dict(copies=True),
])  # fmt: skip
def test_a_signature_does_not_depend_on_the_training(change):
    assert signature(RUN) == signature(RUN.replace(**change))


def test_a_signature_moves_no_generator():
    before = torch.get_rng_state()
    signature(RUN)
    assert torch.equal(torch.get_rng_state(), before)


OWN = """
import torch
from torch import nn
from tiny_lm import Attention

class Table(nn.Module):  # 16 rows and no more
    def __init__(self, dim):
        super().__init__()
        self.rows = nn.Parameter(torch.zeros(16, dim))

    def forward(self, positions):
        return self.rows[positions]

class Float32(Attention):  # refuses float64
    def forward(self, x, positions=None):
        if x.dtype != torch.float32:
            raise RuntimeError("expected float32")
        return super().forward(x)

class Nan(Attention):
    def forward(self, x, positions=None):
        return super().forward(x) * float("nan")
"""


@pytest.mark.parametrize("name", ["Table", "Float32"])
def test_a_scheme_that_can_be_trained_has_a_signature(tmp_path, name):
    (tmp_path / "own.py").write_text(OWN)
    run = RUN.replace(scheme=f"{tmp_path / 'own.py'}:{name}")
    found = signature(run)
    assert 5 < found[0] < 8 and signature(run) == found


@pytest.mark.parametrize("length", [1, 2, 16])
def test_a_table_of_the_training_length_has_a_signature(length):
    run = RUN.replace(scheme="learned", train_lens=(length,), trained_len=length, max_len=length)
    assert 5 < signature(run)[0] < 8


def test_a_scheme_that_gives_nan_has_the_same_signature_every_time(tmp_path):
    (tmp_path / "own.py").write_text(OWN)
    found = signature(RUN.replace(scheme=f"{tmp_path / 'own.py'}:Nan"))
    assert math.isnan(found[0]) and same_signature(found, found)
    number = [5.5, *found[1:]]
    assert not same_signature(found, number) and not same_signature(number, found)


OWN_START = """import torch
from torch import nn
class Table(nn.Module):
    def __init__(self, dim):
        super().__init__()
        self.rows = nn.Parameter(torch.randn(64, dim) * 0.02)
    def forward(self, positions):
        return self.rows[positions]
"""


@pytest.mark.parametrize("old, new", [("0.02", "0.5"), ("self.rows[", "self.rows.detach()[")])
def test_a_changed_start_or_gradient_moves_the_signature(tmp_path, old, new):
    (tmp_path / "own.py").write_text(OWN_START)
    run = RUN.replace(scheme=f"{tmp_path / 'own.py'}:Table")
    before = signature(run)
    (tmp_path / "own.py").write_text(OWN_START.replace(old, new))
    after = signature(run)
    assert before[0] == after[0] and not same_signature(before, after)


def test_a_scheme_for_wide_heads_alone_has_a_signature(tmp_path):
    code = OWN_START.replace("super()", "assert dim == 128\n        super()", 1)
    (tmp_path / "own.py").write_text(code)
    assert signature(RUN.replace(scheme=f"{tmp_path / 'own.py'}:Table", dim=128))[0] > 5


# What moved


def test_what_moved_is_told_in_words():
    saved = dict.fromkeys(provenance.TOLERANCES, 2.0)
    assert moved(saved, saved) == ""
    for name, tolerance in provenance.TOLERANCES.items():
        assert moved(saved, saved | {name: 2 * (1 + 0.9 * tolerance)}) == ""
        now = 2 * (1 + 1.1 * tolerance)
        assert moved(saved, saved | {name: now}) == f"{name} was 2 and is {now:.7g}"


@pytest.mark.parametrize("value", [float("nan"), float("inf"), 0.0])
def test_a_number_that_says_nothing_has_moved(value):
    saved = dict.fromkeys(provenance.TOLERANCES, 2.0)
    assert moved(saved, saved | {"gradient_norm": value}).startswith("gradient_norm was 2 and is")


def test_a_number_that_was_not_saved_has_moved():
    now = dict.fromkeys(provenance.TOLERANCES, 2.0)
    assert moved({}, now).count("was nan") == len(now)
