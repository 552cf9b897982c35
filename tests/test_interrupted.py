"""A run that is stopped or killed goes on to the same numbers, bit for bit."""

import io
import json
import os
import signal

import pytest
import torch

import finetune
import pos_rope
import train_compare
from data.batches import text_batch
from helpers import (
    CPU,
    RUN,
    TINY,
    TWENTY,
    child,
    rows_of,
    same_weights,
    stopped_at,
    tree,
    without_pictures,
)
from lab.checkpoints import load
from lab.rows import distinct, select
from lab.train import train
from schemes.scheme import SCHEMES

THIRTY = [*TINY, "--steps", "30", "--batch-size", "4", "--save-every", "0"]
MODEL = "checkpoints/rope-seed0.pt"
TABLES = [f"train_compare{kind}" for kind in (".csv", ".json", ".md", ".png", "_curves.csv")]


@pytest.fixture(autouse=True)
def no_pictures(monkeypatch):
    without_pictures(monkeypatch)


@pytest.fixture
def start(cli, text, tmp_path):
    """start(*flags) -> (exit code, stdout, stderr) of 30 steps that are saved every ten."""

    def call(*flags):
        return cli(train_compare, *THIRTY, "--data", text, "--out", tmp_path / "out", *flags)

    return call


# Exact resume


def saved_on_the_way(run):
    """A run -> (what became of it, its states after steps 10 and 20, through files)."""
    states = []

    def save(done, trained):
        if done in (10, 20):
            file = io.BytesIO()
            torch.save(trained.state(), file)
            states.append(torch.load(io.BytesIO(file.getvalue()), weights_only=True))

    return train(run, lambda step: text_batch(TWENTY, run, step), CPU, hooks=[save]), states


def resumed(run, state):
    return train(run, lambda step: text_batch(TWENTY, run, step), CPU, state)


@pytest.mark.parametrize("scheme", SCHEMES)
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_resumed_training_is_bit_equal(scheme, dtype):
    run = RUN.replace(steps=30, batch_size=4, scheme=scheme, dtype=dtype)
    whole, states = saved_on_the_way(run)
    assert whole.curve["step"] == [10, 20, 30] and [state["step"] for state in states] == [10, 20]
    for state in states:
        again = resumed(run, state)
        assert again.curve == whole.curve
        assert same_weights(whole.model.state_dict(), again.model.state_dict())


DRAWS = """
import torch
from torch import nn

from tiny_lm import Attention


class Noise(nn.Module):
    def __init__(self, dim):
        super().__init__()
        self.dim = dim

    def forward(self, positions):
        return torch.rand(*positions.shape, self.dim)


class Dropout(Attention):
    def forward(self, x, positions=None):
        return nn.functional.dropout(super().forward(x), 0.2, self.training)
"""


def test_what_draws_in_training_resumes_too(tmp_path):
    """The state of torch's generator is part of the state of a run."""
    (tmp_path / "own.py").write_text(DRAWS)
    run = RUN.replace(steps=30, batch_size=4, scheme=f"{tmp_path / 'own.py'}:Noise")
    whole, states = saved_on_the_way(run)
    torch.manual_seed(99)
    again = resumed(run, states[0])
    assert again.curve == whole.curve
    assert same_weights(whole.model.state_dict(), again.model.state_dict())


def whole_and_stopped(cli, folder, command, *arguments):
    """The only checkpoint of a command run through, and of one stopped in step 26."""
    assert cli(command, *arguments, "--out", folder / "whole")[0] == 0
    with stopped_at(26):
        cli(command, *arguments, "--out", folder / "stopped")
    code, stdout, _ = cli(command, *arguments, "--out", folder / "stopped")
    assert code == 0 and "goes on from step 20" in stdout
    paths = (next((folder / name / "checkpoints").glob("*.pt")) for name in ("whole", "stopped"))
    return [load(path) for path in paths]


def measurements(one):
    """What was measured of a model, without its times."""
    timed = ("seconds", "tokens_per_second")
    rows = [row for row in one.rows if row["metric"] not in timed]
    return [(row["protocol"], row["metric"], row["step"], row["value"]) for row in rows]


def test_an_attention_with_dropout_resumes(cli, text, tmp_path):
    (tmp_path / "own.py").write_text(DRAWS)
    flags = ("--data", text, "--schemes", f"{tmp_path / 'own.py'}:Dropout")
    whole, stopped = whole_and_stopped(cli, tmp_path, train_compare, *THIRTY, *flags)
    assert measurements(whole) == measurements(stopped)
    assert same_weights(whole.weights, stopped.weights)


def test_fine_tuning_resumes_with_what_was_watched(cli, start, tmp_path):
    assert start("--schemes", "rope")[0] == 0
    flags = "--schemes rope --train-len 64 --steps 30 --save-every 0 --device cpu --dtype fp32"
    arguments = ("--from", tmp_path / "out", *flags.split())
    whole, stopped = whole_and_stopped(cli, tmp_path, finetune, *arguments)
    assert measurements(whole) == measurements(stopped)
    assert distinct(select(whole.rows, protocol="fixed"), "step") == [0, 5, 10, 20, 30]


# What a saved state is used for


@pytest.fixture
def interrupted(start, tmp_path):
    """--out of a run that was stopped after step 20 of 30."""
    with stopped_at(26):
        start("--schemes", "rope")
    assert tree(tmp_path / "out") == ["checkpoints/rope-seed0.resume"]
    return tmp_path / "out"


def test_an_interrupted_run_goes_on_under_another_spelling(start, interrupted, text, monkeypatch):
    monkeypatch.chdir(text.parent)
    code, stdout, _ = start("--schemes", "rope", "--data", "./words.txt")
    assert code == 0 and "rope, seed 0: goes on from step 20" in stdout
    assert tree(interrupted) == [MODEL, *TABLES]


def test_a_state_of_another_run_is_told_of_and_not_used(start, interrupted):
    code, stdout, _ = start("--schemes", "rope", "--lr", "0.01")
    assert code == 0 and "goes on" not in stdout
    assert "is of a run with lr 0.02, not 0.01; this one starts at the beginning" in stdout
    code, stdout, _ = start("--schemes", "rope", "--steps", "20")
    told = "rope-seed0.pt was trained with steps 30, not 20, lr 0.01, not 0.02; it will be replaced"
    assert code == 0 and told in stdout


def test_a_state_of_a_changed_scheme_is_told_of_and_not_used(start, interrupted, monkeypatch):
    real = pos_rope.apply_rope
    monkeypatch.setattr(pos_rope, "apply_rope", lambda x, *rest: 1.01 * real(x, *rest))
    code, stdout, _ = start("--schemes", "rope")
    assert code == 0 and "goes on" not in stdout
    assert "rope behaves otherwise than when it was saved; this one starts at the" in stdout


def test_force_starts_at_the_beginning(start, interrupted):
    code, stdout, _ = start("--schemes", "rope", "--force")
    assert code == 0 and "goes on" not in stdout and "notice" not in stdout


# Ctrl-C


def test_ctrl_c_keeps_what_is_finished(start, tmp_path):
    with stopped_at(76):  # in the third of five runs
        start()
    out = tmp_path / "out"
    models = ["learned-seed0.pt", "rope-seed0.resume", "sin-seed0.pt"]
    assert tree(out / "checkpoints") == models
    assert distinct(rows_of(out), "scheme") == ["learned", "sin"]


def test_ctrl_c_says_how_to_go_on(start, capsys):
    with stopped_at(36):
        start("--schemes", "rope", "none", "--force")
    told = (
        "1 of 2 runs are finished and kept, the same command without --force goes on with the next "
        "from its start, since it was not saved yet"
    )
    assert told in capsys.readouterr().err
    with stopped_at(26):
        start("--schemes", "sin")
    told = "0 of 1 runs are finished and kept, the same command goes on with the next where it was"
    assert told in capsys.readouterr().err
    code, stdout, _ = start("--schemes", "rope", "none")
    assert code == 0 and "rope, seed 0: already trained" in stdout
    assert "none, seed 0: goes on from step" not in stdout  # it was in its first ten


def test_states_are_saved_every_so_many_seconds(start, tmp_path):
    with stopped_at(26):
        start("--schemes", "rope", "--save-every", 30)
    assert tree(tmp_path / "out") == []


# Killed

KILL = """
import os, signal
count = 0

def at(number, call, before=lambda *arguments: None):
    def counted(*arguments):
        global count
        count += 1
        if count == number:
            before(*arguments)
            os.kill(os.getpid(), signal.SIGKILL)
        return call(*arguments)
    return counted

def half(file):
    os.ftruncate(file, 999)

import torch
torch.set_num_threads({threads})
"""
KILLS = [
    ("torch.optim.Muon.step = at(8, torch.optim.Muon.step)", 0),  # before anything was saved
    ("torch.optim.Muon.step = at(26, torch.optim.Muon.step)", 20),
    ("os.fsync = at(1, os.fsync, half)", 0),  # the first save is half written
    ("os.fsync = at(2, os.fsync)", 10),  # the second is whole, and not yet in its place
    ("os.fsync = at(3, os.fsync, half)", 20),  # the model itself
    ("os.fsync = at(4, os.fsync)", 30),  # train_compare.json
]


@pytest.mark.slow
@pytest.mark.parametrize("where, step", KILLS)
def test_a_killed_run_goes_on_to_the_same_numbers(start, text, tmp_path, where, step):
    whole, out = tmp_path / "whole", tmp_path / "out"
    assert start("--schemes", "rope", "--out", whole)[0] == 0
    code = KILL.format(threads=torch.get_num_threads()) + where
    killed = child(code, *THIRTY, "--data", text, "--schemes", "rope", "--out", out)
    assert killed.returncode == -signal.SIGKILL, killed.stderr
    for path in out.rglob("*.json"):
        json.loads(path.read_text())

    code, stdout, stderr = start("--schemes", "rope")
    assert code == 0
    goes_on = f"goes on from step {step}" in stdout and f"| {step}/30" in stderr  # so does the bar
    assert goes_on == (step in (10, 20))
    assert ("already trained" in stdout) == (step == 30)
    one, other = load(whole / MODEL), load(out / MODEL)
    assert same_weights(one.weights, other.weights) and measurements(one) == measurements(other)

    for partial in out.rglob("*.part"):  # left by the kill, until it is old enough to be nobody's
        os.utime(partial, (0, 0))
    assert start("--schemes", "rope")[0] == 0
    assert tree(out) == tree(whole) == [MODEL, *TABLES] and not list(out.rglob("*.part"))
