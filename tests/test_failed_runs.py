"""Runs that end without a model: NaN, too little memory. They have a row, and the others go on."""

import numpy as np
import pytest
import torch

import finetune
import train_compare
from helpers import TINY, rows_of, tree, without_pictures
from lab import jobs
from lab import train as training
from lab.rows import distinct, select

THIRTY = ("--steps", 30, "--batch-size", 4, "--save-every", 0)


@pytest.fixture(autouse=True)
def no_pictures(monkeypatch):
    without_pictures(monkeypatch)


@pytest.fixture
def start(cli, text, tmp_path):
    def call(*flags):
        return cli(train_compare, *TINY, "--data", text, "--out", tmp_path / "out", *flags)

    return call


def poison(patch, steps, factor=float("nan")):
    """Multiply the losses of these steps, counted from 1 over all that is trained from now on."""
    real, calls = training.forward_backward, []

    def poisoned(*arguments):
        calls.append(1)
        return real(*arguments) * (factor if len(calls) in steps else 1)

    patch.setattr(training, "forward_backward", poisoned)


def break_weights(patch, step):
    """The update of this step, counted from 1, leaves weights that are infinite."""
    real, calls = torch.optim.Muon.step, []

    def broken(self, *rest):
        calls.append(1)
        real(self, *rest)
        if len(calls) == step:
            with torch.no_grad():
                self.param_groups[0]["params"][0].fill_(float("inf"))

    patch.setattr(torch.optim.Muon, "step", broken)


def fail(start, *flags):
    """A run of rope that diverges."""
    with pytest.MonkeyPatch.context() as patch:
        poison(patch, (4, 5, 6))
        return start("--schemes", "rope", *flags)


def step_of(path):
    return torch.load(path, weights_only=True)["step"]


# NaN


def test_a_run_that_diverges_says_so_and_the_others_go_on(start, tmp_path, monkeypatch):
    poison(monkeypatch, (4, 5, 6))
    code, stdout, stderr = start("--schemes", "rope", "none")
    told = "loss nan at step 4 of 6 (rates 0.0168 and 0.0126); try a lower --lr and --adam-lr"
    assert code == 0 and f"rope, seed 0: {told}\n" in stderr and "| rope | 1 | – | – |" in stdout
    assert tree(tmp_path / "out" / "checkpoints") == ["none-seed0.pt", "rope-seed0.failed"]
    (row,) = select(rows_of(tmp_path / "out"), scheme="rope")
    assert row["value"] is None and row["note"] == told
    assert row["command"].startswith("python train_compare.py") and row["tokens"] == 6 * 2 * 16
    (row,) = select(rows_of(tmp_path / "out"), scheme="none", metric="ppl")
    assert row["value"] > 1


def test_a_failed_run_keeps_its_row_in_a_later_partial_run(start, tmp_path):
    assert fail(start)[0] == 0
    code, stdout, _ = start("--schemes", "none")
    assert code == 0 and "| rope | 1 | – | – |" in stdout and "loss nan at step 4" in stdout
    assert sorted(distinct(rows_of(tmp_path / "out"), "scheme")) == ["none", "rope"]


def test_a_failed_run_loses_its_row_when_it_is_trained_well(start, tmp_path):
    assert fail(start)[0] == 0
    code, stdout, _ = start("--schemes", "rope")
    assert code == 0 and "already trained" not in stdout and "loss nan" not in stdout
    assert tree(tmp_path / "out" / "checkpoints") == ["rope-seed0.pt"]
    assert all(row["note"] == "" for row in rows_of(tmp_path / "out"))


def test_a_failed_run_has_its_row_beside_an_earlier_model(start, tmp_path):
    """The model of other settings stays, and comes back into the table with them."""
    assert start("--schemes", "rope")[0] == 0
    before = rows_of(tmp_path / "out")
    code, stdout, _ = fail(start, "--lr", "0.01")
    assert code == 0 and "| rope | 1 | – | – |" in stdout
    assert tree(tmp_path / "out" / "checkpoints") == ["rope-seed0.failed", "rope-seed0.pt"]
    code, stdout, _ = start("--schemes", "rope")
    assert code == 0 and "already trained" in stdout and rows_of(tmp_path / "out") == before


def test_all_runs_of_a_command_may_fail(start, tmp_path):
    code, stdout, _ = fail(start)
    assert code == 0 and "| rope | 1 | – | – |" in stdout
    tables = [f"train_compare.{kind}" for kind in ("csv", "json", "md")]
    assert tree(tmp_path / "out") == ["checkpoints/rope-seed0.failed", *tables]


def test_a_diverged_run_keeps_its_last_good_state(start, tmp_path, monkeypatch):
    poison(monkeypatch, (27,), float("inf"))
    code, _, stderr = start(*THIRTY, "--schemes", "rope", "none")
    folder = tmp_path / "out" / "checkpoints"
    # 1 − 0.95·(26/30 − 0.4)/0.6 = 0.261 of the peaks 0.02 and 0.015
    assert code == 0
    assert (
        "rope, seed 0: loss inf at step 27 of 30 (rates 0.00522 and 0.00392); try a lower --lr and "
        f"--adam-lr; {folder / 'rope-seed0.resume'} keeps the last good state"
    ) in stderr
    assert tree(folder) == ["none-seed0.pt", "rope-seed0.failed", "rope-seed0.resume"]
    assert step_of(folder / "rope-seed0.resume") == 20


def test_a_run_that_breaks_in_its_last_step_is_no_model(start, tmp_path, monkeypatch):
    """Every loss was finite, the weights after the last update are not."""
    folder = tmp_path / "out" / "checkpoints"
    assert start(*THIRTY, "--schemes", "rope")[0] == 0
    before = (folder / "rope-seed0.pt").read_bytes()
    break_weights(monkeypatch, 25)
    code, stdout, stderr = start(*THIRTY, "--schemes", "rope", "--steps", 25)
    told = "loss nan nats on the held-out text after the last step; try a lower --lr and --adam-lr"
    assert code == 0 and told in stderr and "| rope | 1 | – | – |" in stdout
    assert (folder / "rope-seed0.pt").read_bytes() == before
    assert step_of(folder / "rope-seed0.resume") == 20


def test_weights_that_are_not_finite_are_not_saved(start, tmp_path, monkeypatch):
    break_weights(monkeypatch, 20)  # its loss was still finite
    code, _, stderr = start(*THIRTY, "--schemes", "rope")
    assert code == 0 and "loss nan at step 21 of 30" in stderr
    assert step_of(tmp_path / "out" / "checkpoints" / "rope-seed0.resume") == 10


def test_a_fine_tuning_that_fails_has_its_row(cli, start, tmp_path, monkeypatch):
    assert start("--schemes", "rope", "alibi")[0] == 0
    flags = ("--steps", 5, "--train-len", 64, "--dtype", "fp32", "--device", "cpu")
    place = ("--from", tmp_path / "out", "--out", tmp_path / "tuned")
    poison(monkeypatch, (3,))
    code, stdout, _ = cli(finetune, *place, *flags, "--schemes", "rope", "alibi")
    assert code == 0 and "| rope | 1 | – | – |" in stdout and "| alibi | 1 |" in stdout
    assert "loss nan at step 3 of 5" in stdout
    code, stdout, _ = cli(finetune, *place, *flags, "--schemes", "alibi")
    assert code == 0 and "loss nan at step 3 of 5" in stdout
    code, stdout, _ = cli(finetune, *place, *flags, "--schemes", "rope")
    assert code == 0 and "loss nan" not in stdout


# Too little memory


def test_too_little_memory_is_a_row_and_the_others_go_on(start, tmp_path, monkeypatch):
    real = jobs.train
    errors = {
        "rope": np._core._exceptions._ArrayMemoryError((2**50,), np.dtype(float)),
        "sin": torch.OutOfMemoryError("CUDA out of memory"),
    }

    def starved(run, *rest):
        if run.scheme in errors:
            raise errors[run.scheme]
        return real(run, *rest)

    monkeypatch.setattr(jobs, "train", starved)
    code, stdout, stderr = start("--schemes", "rope", "sin", "none")
    told = "out of memory; try a larger --grad-accum, or a smaller --batch-size"
    assert code == 0 and stderr.count(told) == 2 and stdout.count("out of memory") == 2
    models = tree(tmp_path / "out" / "checkpoints")
    assert models == ["none-seed0.pt", "rope-seed0.failed", "sin-seed0.failed"]


def test_a_failure_file_that_is_damaged_is_no_row(start, tmp_path):
    assert fail(start)[0] == 0
    (tmp_path / "out" / "checkpoints" / "rope-seed0.failed").write_text("{}")
    code, stdout, _ = start("--schemes", "none")
    assert code == 0 and "rope" not in stdout
