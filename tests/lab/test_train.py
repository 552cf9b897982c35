"""The schedule, the optimizers, the loop and what it promises."""

import functools
import math

import numpy as np
import pytest
import torch

from data.batches import text_batch
from helpers import CPU, RUN, TWENTY, same_weights
from lab import train as lab_train
from lab.train import Diverged, Trained, fit, forward_backward, learning_rate, optimizers, train
from schemes.scheme import SCHEMES
from tiny_lm import TinyLM

OWN = """
import torch
from torch import nn

class Matrices(nn.Module):
    def __init__(self, n_head, head_dim, rows=4):
        super().__init__()
        self.table = nn.Parameter(torch.zeros(n_head, rows))
        self.up = nn.Linear(head_dim, head_dim, bias=False)  # a name that Muon knows elsewhere

    def bias(self, q, k, q_positions, k_positions):
        return self.table.mean() + self.up(q) @ self.up(k).transpose(-2, -1)
"""


@pytest.fixture
def own(tmp_path):
    """own(name) -> the scheme string of a class of OWN."""
    (tmp_path / "own.py").write_text(OWN)
    return lambda name: f"{tmp_path / 'own.py'}:{name}"


def trained(run=RUN, **more):
    """Train a run on TWENTY."""
    return train(run, lambda step: text_batch(TWENTY, run, step), CPU, **more)


def weights(found):
    return found.model.state_dict()


# Schedule


@pytest.mark.parametrize("step, fraction", [
    (0, 0.1), (4, 0.5), (9, 1), (10, 1), (40, 1), (70, 1 - 0.95 / 2), (99, 1 - 0.95 * 0.59 / 0.6),
])  # fmt: skip
def test_the_learning_rate_rises_stays_and_falls(step, fraction):
    assert learning_rate(step, 100) == pytest.approx(fraction)


@pytest.mark.parametrize("steps", [1, 2, 9, 10, 11, 500])
def test_no_step_is_lost_to_a_rate_of_zero(steps):
    rates = [learning_rate(step, steps) for step in range(steps)]
    assert min(rates) > 0 and max(rates) == 1


def test_both_optimizers_follow_the_schedule():
    seen = []

    def hook(done, found):
        seen.append([optimizer.param_groups[0]["lr"] for optimizer in found.optimizers])

    run = RUN.replace(lr=0.02, adam_lr=0.004)
    trained(run, hooks=[hook])
    fractions = [learning_rate(step, 12) for step in range(12)]
    assert seen[1:] == [[0.02 * fraction, 0.004 * fraction] for fraction in fractions]


# Optimizers


def names_of(model, optimizer):
    names = {id(weight): name for name, weight in model.named_parameters()}
    return {names[id(weight)] for weight in optimizer.param_groups[0]["params"]}


@pytest.mark.parametrize("scheme", [*SCHEMES, "Matrices"])
def test_muon_trains_four_matrices_of_each_block_and_nothing_else(scheme, own):
    model = TinyLM(own(scheme) if scheme == "Matrices" else scheme, 16, 2, 2, max_len=16)
    muon, adam = (names_of(model, optimizer) for optimizer in optimizers(model, 0.02, 0.004))
    layers = ("attention.qkv", "attention.out", "up", "down")
    assert muon == {f"blocks.{i}.{layer}.weight" for i in range(2) for layer in layers}
    assert muon | adam == {name for name, _ in model.named_parameters()} and not muon & adam


def test_the_optimizer_of_a_table_does_not_depend_on_its_shape(own):
    """A table of 32 rows for 1 head and one of 1 row for 32 heads are trained by AdamW."""
    for options in (":rows=1", ":rows=32"):
        model = TinyLM(own("Matrices") + options, 16, 1, 2)
        muon, adam = (names_of(model, optimizer) for optimizer in optimizers(model, 0.02, 0.004))
        own_weights = {f"blocks.0.attention.relation.{name}" for name in ("table", "up.weight")}
        assert own_weights <= adam


def test_weights_do_not_decay():
    model = TinyLM("learned", 16, 1, 2, max_len=32)
    for optimizer in optimizers(model, 0.02, 0.004):
        assert optimizer.param_groups[0]["weight_decay"] == 0
    before = model.position.state_dict()
    (unseen,) = (table[16:].clone() for table in before.values())  # positions never trained
    found = trained(RUN.replace(scheme="learned", max_len=32), start=model.state_dict())
    (after,) = found.model.position.state_dict().values()
    assert torch.equal(after[16:], unseen) and not torch.equal(after[:16], before["weight"][:16])


# The same for all schemes, and every time


def test_all_schemes_start_from_the_same_common_weights():
    plain = weights(Trained(RUN.replace(scheme="none"), CPU))
    for scheme in SCHEMES:
        own = weights(Trained(RUN.replace(scheme=scheme), CPU))
        assert all(torch.equal(own[name], plain[name]) for name in plain)


def test_other_seeds_start_from_other_weights():
    first, second = (weights(Trained(RUN.replace(seed=seed), CPU)) for seed in (0, 1))
    assert not torch.equal(first["embed.weight"], second["embed.weight"])


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_equal_runs_give_equal_weights_bit_for_bit(dtype):
    run = RUN.replace(scheme="learned", dtype=dtype)
    first = trained(run)
    torch.manual_seed(99)
    second = trained(run)
    assert same_weights(weights(first), weights(second)) and first.curve == second.curve


def test_another_seed_gives_other_weights():
    first, second = trained(), trained(RUN.replace(seed=1))
    assert first.curve != second.curve


# The loop


def test_a_text_that_repeats_is_learned():
    found = trained(RUN.replace(steps=60, batch_size=8))
    assert found.curve["step"] == [10, 20, 30, 40, 50, 60]
    assert found.curve["loss"][0] > 5 and found.curve["loss"][-1] < 2.5


def test_the_first_loss_is_that_of_knowing_nothing():
    x, y, _ = text_batch(TWENTY, RUN, 0)
    loss = forward_backward(RUN.new_model(), x, y, None, CPU)
    assert loss.item() == pytest.approx(math.log(256), rel=1e-6)


def test_the_curve_has_the_mean_loss_of_every_ten_steps():
    losses, real = [], lab_train.forward_backward
    with pytest.MonkeyPatch.context() as patch:

        def kept(*arguments):
            losses.append(real(*arguments))
            return losses[-1]

        patch.setattr(lab_train, "forward_backward", kept)
        curve = trained(RUN.replace(steps=25)).curve
    parts = [losses[:10], losses[10:20], losses[20:]]
    assert curve["step"] == [10, 20, 25]
    assert curve["loss"] == pytest.approx([np.mean([*part]) for part in parts], abs=1e-5)


def test_each_step_reads_its_own_batch():
    asked = []

    def batch_at(step):
        asked.append(step)
        return text_batch(TWENTY, RUN, step)

    train(RUN, batch_at, CPU)
    assert asked == list(range(12))


def test_hooks_are_called_before_the_first_step_and_after_every_step():
    calls = []

    def note(name, done, found):
        calls.append((name, done, found.step))

    trained(RUN.replace(steps=2), hooks=[functools.partial(note, name) for name in "ab"])
    assert calls == [(name, done, done) for done in (0, 1, 2) for name in "ab"]


def test_a_run_that_goes_on_calls_no_hook_before_its_first_step():
    states, calls = [], []
    trained(hooks=[lambda done, found: states.append(found.state()) if done == 10 else None])
    trained(state=states[0], hooks=[lambda done, found: calls.append(done)])
    assert calls == [11, 12]


def test_training_goes_on_from_the_weights_it_is_given():
    start = weights(trained(RUN.replace(seed=5)))
    seen = []
    found = trained(hooks=[lambda done, found: seen.append(found.curve["loss"])], start=start)
    assert found.curve["loss"][0] < trained().curve["loss"][0]
    again = trained(start=start)
    assert same_weights(weights(found), weights(again))


def test_random_positions_reach_the_network():
    plain, moved = (trained(RUN.replace(random_positions=n)) for n in (0, 64))
    assert plain.curve != moved.curve


# bfloat16


def test_bfloat16_follows_float32():
    exact, low = (trained(RUN.replace(dtype=dtype)) for dtype in ("float32", "bfloat16"))
    assert low.curve["loss"] == pytest.approx(exact.curve["loss"], rel=0.02)
    assert low.curve != exact.curve


def test_weights_stay_in_float32_and_the_worker_has_them_rounded():
    found = trained(RUN.replace(dtype="bfloat16"))
    for main, low in zip(found.model.parameters(), found.worker.parameters(), strict=True):
        assert main.dtype == torch.float32 and low.dtype == torch.bfloat16
        assert torch.equal(main.bfloat16(), low)


def test_in_float32_the_model_itself_computes():
    found = Trained(RUN, CPU)
    assert found.worker is found.model


# Losses that are not finite


@pytest.mark.parametrize("value", ["inf", "nan"])
def test_a_loss_that_is_not_finite_names_its_step_and_rates(monkeypatch, value):
    real, calls = lab_train.F.cross_entropy, []

    def poisoned(*arguments, **options):
        calls.append(1)
        return real(*arguments, **options) * (float(value) if len(calls) == 7 else 1)

    monkeypatch.setattr(lab_train.F, "cross_entropy", poisoned)
    # In step 6 of 0 … 11: 1 − 0.95·(6/12 − 0.4)/0.6 = 0.8417 of the peaks 0.02 and 0.004
    told = rf"loss {value} at step 7 of 12 \(rates 0.0168 and 0.00337\); try a lower --lr and"
    with pytest.raises(Diverged, match=told):
        trained()


# Another loss


def test_fit_trains_on_any_loss_and_leaves_the_model_ready_to_be_read():
    model, seen = TinyLM("none", 16, 1, 2), []

    def loss_at(step):
        seen.append(step)
        return model(torch.zeros(1, 4, dtype=torch.uint8)).square().mean() + 1

    def progress(steps):
        assert list(steps) == list(range(5))
        return iter(steps)

    model.train()
    assert fit(model, 5, loss_at, progress=progress) is model
    assert seen == list(range(5)) and not model.training
    assert all(weight.grad is None for weight in model.parameters())
