"""Refuse a scheme that cannot work before anything is trained, and tell its author what it does."""

import time

import torch

from lab.machine import out_of_memory, ranks
from lab.provenance import same_signature, signature
from lab.train import forward_backward, optimizers, update
from schemes.scheme import reason
from tiny_lm import TinyLM

CPU = torch.device("cpu")


def check_scheme(run, length, device, allow_future=False):
    """Try a run's scheme: a forward and a backward pass as in training, at one of its lengths.

    The two sequences differ in their last byte only: an attention that sees what it is to predict
    shows it in earlier logits. ValueError says what is wrong.
    """
    ids = torch.arange(length).repeat(2, 1)
    ids[1, -1] += 1
    ids = (ids % 256).to(device, torch.uint8)
    positions = None
    if run.random_positions:
        maximum = run.random_positions
        positions = torch.arange(maximum - length, maximum, device=device)
    model, exact = _try(run, ids, positions)
    if exact.shape != (2, length, 256):
        shape = tuple(exact.shape)
        raise ValueError(
            f"scheme '{run.scheme}': logits have shape {shape}, must be (2, {length}, 256)"
        )
    if not exact.isfinite().all():
        raise ValueError(f"scheme '{run.scheme}': its logits are not all finite numbers")
    idle = [name for name, weight in model.named_parameters() if weight.grad is None]
    if ranks() > 1 and idle:
        raise ValueError(
            f"scheme '{run.scheme}': {idle[0]} gets no gradient, which training under torchrun "
            "needs for every weight"
        )
    if not allow_future and length > 1 and not _is_causal(exact):
        raise ValueError(
            f"scheme '{run.scheme}' sees what it is to predict: a later byte moves earlier logits; "
            "its attention must be causal (or say --allow-future)"
        )
    _try_signature(run)


def _try_signature(run):
    """ValueError if a checkpoint of the run could not be recognised, after all its steps."""
    try:
        first, second = signature(run), signature(run)
    except Exception as error:  # somebody's own class may raise anything
        raise ValueError(
            f"scheme '{run.scheme}' does not work in a small network: {reason(error)}"
        ) from None
    if not same_signature(first, second):
        raise ValueError(
            f"scheme '{run.scheme}' behaves otherwise each time it is made; let it draw from "
            "torch's generator alone"
        )


def require_parts(batch_size, grad_accum):
    """ValueError if a batch has too few windows for all processes and their parts."""
    parts = ranks() * grad_accum
    if batch_size < parts:
        raise ValueError(
            f"--batch-size {batch_size} cannot be split in {parts} parts ({ranks()} processes × "
            f"--grad-accum {grad_accum})"
        )


def _try(run, ids, positions):
    """The network after a backward pass in the run's dtype, and its logits in float32."""
    length = ids.shape[1]
    try:
        model = awake(run.new_model().to(ids.device))
        with torch.no_grad():
            exact = model.eval()(ids, positions)  # (2, T, 256), without dropout
        if exact.shape == (2, length, 256):
            low = model.train().to(getattr(torch, run.dtype))
            low(ids, positions).float().square().sum().backward()
    except ValueError:
        raise
    except (Exception, SystemExit) as error:  # somebody's own class may raise anything
        if out_of_memory(error):
            raise ValueError(
                f"scheme '{run.scheme}': two windows of {length} do not fit in memory; use a "
                "shorter --train-len or a smaller network"
            ) from None
        raise ValueError(
            f"scheme '{run.scheme}' does not work in this network ({run.dtype}): {reason(error)}"
        ) from None
    return model, exact


def awake(model):
    """The model with random weights: output projections start at zero, and would hide a block."""
    with torch.no_grad():
        for weight in model.parameters():
            weight.normal_(0, 0.2)
    return model


def _is_causal(logits):
    """Whether logits (2, T, 256) of two texts that differ in the last byte agree before it."""
    difference = (logits[0, :-1] - logits[1, :-1]).abs().max()
    return bool(difference <= 1e-4 * logits.abs().max())


def report(run, allow_future=False):
    """What there is to know of a scheme before training it -> lines (question, answer)."""
    check_scheme(run, run.train_len, CPU, allow_future)
    torch.manual_seed(0)
    model = awake(run.new_model()).eval()
    ids = torch.randint(0, 256, (1, 64), generator=torch.Generator().manual_seed(0))
    return [
        ("kind", model.scheme.kind),
        ("shapes" if allow_future else "shapes and causality", "right"),
        ("reads past its training length", _past(model, run)),
        ("reads in chunks with a cache", _cached(model, ids)),
        ("positions moved by 100", _shifted(model, ids)),
        ("ways to read it longer", ", ".join(model.scheme.longer_ways) or "none (no LONGER)"),
        ("a window", _windowed(run)),
        ("its own parameters", _own_parameters(run)),
        ("time of a training step", f"{_step_ratio(run):.2f} × that of none"),
    ]


def _past(model, run):
    length = 4 * run.train_len
    try:
        with torch.no_grad():
            model(torch.zeros(1, length, dtype=torch.uint8))
    except Exception as error:  # somebody's own class may raise anything
        return f"no: {reason(error)} at {length}"
    return f"yes, tried at {length}"


def _cached(model, ids):
    try:
        caches = model.caches()
        with torch.no_grad():
            parts = torch.cat([model(part, caches=caches) for part in ids.split(7, 1)], 1)
            difference = (parts - model(ids)).abs().max().item()
    except Exception as error:  # somebody's own class may raise anything
        return f"no: {reason(error)}"
    told = "as in one pass" if difference < 1e-3 else "NOT as in one pass"
    return f"{told} (logits differ by up to {difference:.1e})"


def _shifted(model, ids):
    try:
        with torch.no_grad():
            moved = model(ids, torch.arange(ids.shape[1]) + 100)
            difference = (moved - model(ids)).abs().max().item()
    except Exception as error:  # somebody's own class may raise anything
        return f"fails: {reason(error)}"
    told = "no difference: relative, or blind to positions" if difference < 1e-3 else "seen"
    return f"{told} (logits differ by up to {difference:.1e})"


def _windowed(run):
    try:
        run.new_model(window=8)
    except ValueError as error:
        return f"no: {error}"
    return "works"


def _own_parameters(run):
    """The parameters that `none` has not, those of the blocks once, and who trains them."""
    plain = set(run.new_model(scheme="none").state_dict())
    model = run.new_model()
    muon = {id(weight) for weight in model.matrices()}
    own = {}
    for name, weight in model.named_parameters():
        if name not in plain:
            trainer = "Muon" if id(weight) in muon else "AdamW"
            own.setdefault(trainer, []).append(f"{_of_any_block(name)} {tuple(weight.shape)}")
    told = [f"{', '.join(dict.fromkeys(names))}: by {name}" for name, names in own.items()]
    return "; ".join(told) or "none"


def _of_any_block(name):
    """blocks.2.attention.x -> blocks.*.attention.x"""
    return ".".join("*" if part.isdigit() else part for part in name.split("."))


def _step_ratio(run, rounds=5, batch_size=8):
    """The time of a training step over that of none, median over rounds in turns."""
    ids = torch.randint(0, 256, (batch_size, run.train_len + 1), dtype=torch.uint8)
    x, y = ids[:, :-1], ids[:, 1:]
    models = [TinyLM("none", run.dim, run.n_layer, run.n_head), run.new_model()]
    pairs = [optimizers(model, run.lr, run.adam_lr) for model in models]
    ratios = []
    for number in range(rounds + 1):
        spent = []
        for model, pair in zip(models, pairs):
            since = time.perf_counter()
            forward_backward(model, x, y, None, CPU)
            update(pair, (run.lr, run.adam_lr))
            spent.append(time.perf_counter() - since)
        if number:  # the first warms up
            ratios.append(spent[1] / spent[0])
    return sorted(ratios)[len(ratios) // 2]
