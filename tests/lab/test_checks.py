"""Schemes that cannot work are refused before training; --check says what the others do."""

import pytest

from helpers import CPU, RUN
from lab import checks
from lab.checks import awake, check_scheme, require_parts
from schemes.scheme import SCHEMES
from tiny_lm import TinyLM

OWN = """
import torch
from torch import nn
from tiny_lm import Attention

class Zero(nn.Module):
    def __init__(self, dim):
        super().__init__()
        self.dim = dim

    def forward(self, positions):
        return torch.zeros(*positions.shape, self.dim)

class Table(nn.Module):  # 16 rows and no more
    def __init__(self, dim):
        super().__init__()
        self.rows = nn.Parameter(torch.zeros(16, dim))

    def forward(self, positions):
        return self.rows[positions]

class Idle(Zero):
    def __init__(self, dim):
        super().__init__(dim)
        self.unused = nn.Parameter(torch.zeros(3))

class Peeks(Attention):
    def forward(self, x, positions=None):
        mean = self.qkv(x)[..., : x.shape[-1]].mean(1, keepdim=True)
        return self.out(mean.expand(x.shape))

class Shortens(Attention):
    def forward(self, x, positions=None):
        return super().forward(x)[:, :-1]

class Drops(Attention):
    def forward(self, x, positions=None):
        return nn.functional.dropout(super().forward(x), 0.5, self.training)

class Nine(Attention):
    def forward(self, x, positions=None):
        if x.shape[1] == 9:
            raise RuntimeError("nine\\nand more")
        return super().forward(x)

class Stops(Attention):
    def forward(self, x, positions=None):
        raise SystemExit(3)

class Hungry(Attention):
    def forward(self, x, positions=None):
        raise RuntimeError("DefaultCPUAllocator: can't allocate memory")

class Float32(Attention):
    def forward(self, x, positions=None):
        return self.out(self.qkv(x)[..., :16] + torch.zeros(16))
"""


@pytest.fixture
def own(tmp_path):
    """own(name) -> a run of a class of OWN."""
    (tmp_path / "own.py").write_text(OWN)
    return lambda name, **more: RUN.replace(scheme=f"{tmp_path / 'own.py'}:{name}", **more)


def refused(run, length=16):
    with pytest.raises(ValueError) as error:
        check_scheme(run, length, CPU)
    told = str(error.value)
    assert told.startswith(f"scheme '{run.scheme}'") and "\n" not in told
    return told


# What is refused


@pytest.mark.parametrize("scheme", SCHEMES)
@pytest.mark.parametrize("length", [1, 2, 16])
def test_the_five_schemes_work(scheme, length):
    for dtype in ("float32", "bfloat16"):
        check_scheme(RUN.replace(scheme=scheme, dtype=dtype), length, CPU)


def test_a_scheme_is_tried_without_dropout(own):
    check_scheme(own("Drops"), 16, CPU)


def test_a_scheme_that_sees_what_it_is_to_predict_is_refused(own):
    assert "sees what it is to predict: a later byte moves earlier logits" in refused(own("Peeks"))
    check_scheme(own("Peeks"), 16, CPU, allow_future=True)
    check_scheme(own("Peeks"), 1, CPU)  # one byte has no future


@pytest.mark.parametrize("name, message", [
    ("Shortens", "does not work in this network (float32): RuntimeError: "),
    ("Stops", "does not work in this network (float32): SystemExit: 3"),
    ("Hungry", "two windows of 16 do not fit in memory; use a shorter --train-len or a smaller"),
])  # fmt: skip
def test_a_scheme_that_fails_is_refused_with_its_reason(own, name, message):
    assert message in refused(own(name))


def test_a_scheme_is_tried_at_the_length_that_is_asked_for(own):
    check_scheme(own("Nine"), 16, CPU)
    assert refused(own("Nine"), 9).endswith("RuntimeError: nine")


def test_a_scheme_is_tried_in_the_dtype_of_the_run(own):
    check_scheme(own("Float32"), 16, CPU)
    told = refused(own("Float32", dtype="bfloat16"))
    assert "does not work in this network (bfloat16): RuntimeError" in told


def test_a_scheme_is_tried_at_the_largest_random_positions(own):
    check_scheme(own("Table"), 16, CPU)
    assert "IndexError" in refused(own("Table", random_positions=64))


def test_a_weight_without_gradient_is_refused_under_torchrun(own, monkeypatch):
    check_scheme(own("Idle"), 16, CPU)
    monkeypatch.setattr(checks, "ranks", lambda: 2)
    assert "position.unused gets no gradient" in refused(own("Idle"))


def test_a_batch_needs_a_window_for_every_part(monkeypatch):
    require_parts(6, 6)
    with pytest.raises(ValueError, match="--batch-size 6 cannot be split in 7 parts"):
        require_parts(6, 7)
    monkeypatch.setattr(checks, "ranks", lambda: 3)
    require_parts(6, 2)
    with pytest.raises(ValueError, match=r"in 9 parts \(3 processes × --grad-accum 3\)"):
        require_parts(6, 3)


def test_an_awake_model_has_no_weight_at_rest():
    model = awake(TinyLM("rope", 16, 1, 2))
    assert all(weight.std() > 0.1 for weight in model.parameters())


# What is told of a scheme


@pytest.fixture
def answers(monkeypatch):
    """answers(run) -> {question: answer}, without the time that is taken."""
    monkeypatch.setattr(checks, "forward_backward", lambda *arguments: None)
    return lambda run: dict(checks.report(run))


@pytest.mark.parametrize("scheme, told", [
    ("learned", {
        "kind": "embedding", "shapes and causality": "right", "a window": "works",
        "reads past its training length": "yes, tried at 64",
        "reads in chunks with a cache": "as in one pass", "positions moved by 100": "seen",
        "ways to read it longer": "clamp, wrap, interpolate",
        "its own parameters": "position.weight (256, 16): by AdamW",
    }),
    ("rope", {
        "kind": "attention", "positions moved by 100": "no difference: relative, or blind",
        "ways to read it longer": "linear, ntk, dynamic, yarn, llama3",
        "its own parameters": "none",
    }),
    ("none", {"kind": "relation", "ways to read it longer": "none (no LONGER)"}),
    ("Table", {
        "reads past its training length": "no: IndexError",
        "reads in chunks with a cache": "no: IndexError", "positions moved by 100": "fails: Index",
        "its own parameters": "position.rows (16, 16): by AdamW",
    }),
    ("Drops", {
        "reads in chunks with a cache": "no: ValueError: scheme", "a window": "works",
        "shapes and causality": "right",
    }),
])  # fmt: skip
def test_a_report_says_what_a_scheme_does(own, answers, scheme, told):
    found = answers(RUN.replace(scheme=scheme) if scheme in SCHEMES else own(scheme))
    for question, answer in told.items():
        assert found[question].startswith(answer), (question, found[question])
    assert found["time of a training step"].endswith(" × that of none")


def test_a_report_refuses_what_training_would(own):
    with pytest.raises(ValueError, match="sees what it is to predict"):
        checks.report(own("Peeks"))


def test_a_report_is_the_same_every_time(answers):
    first, second = (answers(RUN.replace(scheme="alibi")) for _ in range(2))
    first.pop("time of a training step"), second.pop("time of a training step")
    assert first == second
