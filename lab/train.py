"""Training: optimizers, schedule, one step, and the loop that calls hooks.

    trained = train(run, lambda step: text_batch(corpus.train, run, step), device)
    trained.model, trained.curve

A hook is called as hook(steps done, trained): once before the first step with 0, then after every
step. It may save, score or report; it changes nothing of the training.
"""

import contextlib
import copy

import torch
import torch.nn.functional as F
from torch import distributed

from lab.machine import rank, ranks

RECORD_EVERY = 10  # steps; reading a loss waits for the device, so not every step


class Diverged(Exception):
    """A loss is NaN or infinite."""


def learning_rate(step, steps):
    """The fraction of the peak: up over the first tenth, flat to 40 %, then down to 5 %."""
    warm_up = min(1.0, (step + 1) / max(1, steps // 10))
    decay = 1 - 0.95 * max(0.0, step / steps - 0.4) / 0.6
    return warm_up * decay


def optimizers(model, lr, adam_lr):
    """Muon (Jordan et al. 2024) for qkv, out, up and down of the blocks, AdamW for all else.

    Which of them trains a weight does not depend on its shape. No weight decay.
    """
    matrices = model.matrices()
    known = {id(weight) for weight in matrices}
    others = [weight for weight in model.parameters() if id(weight) not in known]
    return [
        torch.optim.Muon(matrices, lr=lr, momentum=0.95, weight_decay=0.0),
        torch.optim.AdamW(others, lr=adam_lr, betas=(0.9, 0.95), weight_decay=0.0),
    ]


def update(pair, rates):
    """One step of each optimizer at its rate; gradients are let go."""
    for optimizer, rate in zip(pair, rates):
        optimizer.param_groups[0]["lr"] = rate
        optimizer.step()
        optimizer.zero_grad()


def forward_backward(worker, x, y, positions, device, grad_accum=1):
    """Mean loss over the batch x, y (B, T); its gradient is added to worker's.

    The batch is split over all ranks, and on each into `grad_accum` parts, one after another.
    """
    first, count = rank() * grad_accum, ranks() * grad_accum
    inputs, targets = (part.tensor_split(count)[first : first + grad_accum] for part in (x, y))
    if positions is not None:
        positions = positions.to(device)
    loss = torch.zeros((), device=device)
    for i in range(grad_accum):
        wait = ranks() > 1 and i + 1 < grad_accum  # gradients are exchanged after the last part
        with worker.no_sync() if wait else contextlib.nullcontext():
            logits = worker(inputs[i].to(device), positions)  # (B, T, 256)
            part = F.cross_entropy(
                logits.float().flatten(0, 1), targets[i].to(device).long().flatten()
            ) * (len(inputs[i]) / len(x))
            (part * ranks()).backward()  # the exchange takes the mean over ranks
        loss += part.detach()
    if ranks() > 1:
        distributed.all_reduce(loss)
    return loss


class Trained:
    """A model in training, and what an interrupted run needs to go on to the same numbers.

    model       TinyLM in float32, which the optimizers update
    worker      the same weights in the dtype of the run, which compute (the model in float32)
    step        how many steps are done
    curve       {"step": […], "loss": […]}: mean training loss of each ten steps
    """

    def __init__(self, run, device, start=None, state=None, compiled=False):
        """start: weights to begin with. state: `state()` of an interrupted run."""
        torch.manual_seed(run.seed)
        self.run, self.device = run, device
        self.model = run.new_model()
        if start:
            self.model.load_state_dict(start)
        self.model.to(device)
        self.optimizers = optimizers(self.model, run.lr, run.adam_lr)
        self.generators = [torch]
        if device.type != "cpu":
            self.generators.append(torch.get_device_module(device))
        self.step, self.curve, self.recent = 0, {"step": [], "loss": []}, []
        if state:
            self._resume(state)
        dtype = getattr(torch, run.dtype)
        self.worker = self.model
        if dtype != torch.float32:
            self.worker = copy.deepcopy(self.model).to(dtype)
        self._pairs = list(zip(self.model.parameters(), self.worker.parameters()))
        if compiled:
            self.worker = torch.compile(self.worker)
        if ranks() > 1:
            self.worker = torch.nn.parallel.DistributedDataParallel(self.worker)

    def _resume(self, state):
        self.step, self.curve = state["step"], copy.deepcopy(state["curve"])
        self.model.load_state_dict(state["model"])
        for optimizer, saved in zip(self.optimizers, state["optimizers"]):
            optimizer.load_state_dict(saved)
        for generator, saved in zip(self.generators, state["generators"]):
            generator.set_rng_state(saved)

    def state(self):
        """All that the rest of the training depends on."""
        return dict(
            step=self.step,
            model=self.model.state_dict(),
            optimizers=[optimizer.state_dict() for optimizer in self.optimizers],
            generators=[generator.get_rng_state() for generator in self.generators],
            curve=self.curve,
        )

    def rates(self, step):
        """The learning rates of Muon and AdamW in a step."""
        fraction = learning_rate(step, self.run.steps)
        return [peak * fraction for peak in (self.run.lr, self.run.adam_lr)]

    def update(self):
        """Gradients up to the float32 weights, optimizers, weights down to the worker."""
        copied = [(main, low) for main, low in self._pairs if main is not low]
        for main, low in copied:
            if low.grad is not None:
                main.grad, low.grad = low.grad.float(), None
        update(self.optimizers, self.rates(self.step))
        if copied:
            with torch.no_grad():
                torch._foreach_copy_([low for _, low in copied], [main for main, _ in copied])
        self.step += 1

    def record(self, loss):
        """Note a step's loss; every ten steps look at them. Diverged if one is not finite."""
        self.recent.append(loss)
        if not self.recorded:
            return
        for i, value in enumerate(self.recent):
            if not value.isfinite():
                self._diverged(self.step - len(self.recent) + i, value)
        self.curve["step"].append(self.step)
        self.curve["loss"].append(round(torch.stack(self.recent).mean().item(), 5))
        self.recent = []

    @property
    def recorded(self):
        """Whether all losses so far are looked at, and found finite."""
        return self.step % RECORD_EVERY == 0 or self.step == self.run.steps

    def _diverged(self, step, loss):
        muon, adam = self.rates(step)
        raise Diverged(
            f"loss {loss} at step {step + 1} of {self.run.steps} (rates {muon:.3g} and {adam:.3g});"
            " try a lower --lr and --adam-lr"
        )


def train(run, batch_at, device, state=None, hooks=(), start=None, grad_accum=1, compiled=False):
    """Train one run -> Trained. batch_at(step) -> x, y (B, T), positions or None.

    state, start and compiled as in Trained, grad_accum as in forward_backward. Diverged on a bad
    loss.
    """
    trained = Trained(run, device, start, state, compiled)
    if not state:
        for hook in hooks:
            hook(0, trained)
    for step in range(trained.step, run.steps):
        loss = forward_backward(trained.worker, *batch_at(step), device, grad_accum)
        trained.update()
        trained.record(loss)
        for hook in hooks:
            hook(step + 1, trained)
    return trained


def fit(model, steps, loss_at, lr=0.02, adam_lr=0.015, progress=iter):
    """Train a model in float32 by the same recipe on another loss: loss_at(step) -> loss.

    progress wraps the steps, as tqdm does.
    """
    pair = optimizers(model, lr, adam_lr)
    for step in progress(range(steps)):
        loss_at(step).backward()
        fraction = learning_rate(step, steps)
        update(pair, (lr * fraction, adam_lr * fraction))
    return model.eval()
