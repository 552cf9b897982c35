"""Where results come from, and whether the code still behaves as when they were made.

stamp        goes into every row when it is made: command, commit, versions, machine, text
signature    one number that moves when a scheme or the network moves; every checkpoint has one
fingerprint  four numbers per scheme that also see the text, the scoring and the recipe, in
             results/fingerprints.json; a test compares them with the code of the tree

No hash of source code decides anything: moving, renaming, reformatting and drawing are free.
"""

import math
import platform
import subprocess
from pathlib import Path

import numpy as np
import torch
from torch import nn

from data.batches import text_batch
from lab import score
from lab.runs import Run
from lab.train import train
from tiny_lm import TinyLM

ROOT = Path(__file__).parent.parent
STD = 0.15  # of all weights of a random network
CPU = torch.device("cpu")
TWENTY_STEPS = 20
# How far each number of a fingerprint may move, relative, between machines. Measured between thread
# counts and instruction sets: up to 5e-8, 1.3e-7, 2.6e-7 and 9e-6 (Muon rounds to bfloat16), and
# 2e-8 for signatures. What must be seen moves at least one number by 5 tolerances and more: a RoPE
# base of 9,990, slopes or attention stronger by 0.1 %, a learning rate higher by 1 %.
TOLERANCES = {
    "nll_at_L": 1e-6,
    "nll_at_4L": 1e-6,
    "gradient_norm": 2e-6,
    "loss_of_twenty_steps": 5e-5,
}
SIGNATURE_TOLERANCE = 2e-7


def git(*arguments):
    """What git says about this repository; nothing where there is no git."""
    command = ("git", "-C", str(ROOT), *arguments)
    try:
        return subprocess.run(command, capture_output=True, text=True, timeout=20).stdout.strip()
    except (OSError, subprocess.TimeoutExpired):
        return ""


def stamp(command, corpus, device, dtype):
    """What every row says of its origin. `dtype`: in which the models are read."""
    commit, changed = git("rev-parse", "HEAD"), git("status", "--porcelain", "--", "*.py")
    return dict(
        text_name=corpus.name,
        text=corpus.sha256,
        command=command,
        commit=(commit or "unknown") + (" with uncommitted changes" if changed else ""),
        python=platform.python_version(),
        torch=str(torch.__version__),
        numpy=np.__version__,
        system=platform.system(),
        processor=platform.machine(),
        capability=torch.backends.cpu.get_cpu_capability(),
        threads=torch.get_num_threads(),
        device=device.type,
        read_dtype=str(dtype).removeprefix("torch."),
    )


def random_network(seed=0, **size):
    """A TinyLM with all weights drawn from N(0, 0.15²), so that every part of it does something.

    But for the gains of the norms, which stay 1: gains of 0.15 would hide what attention does.
    """
    torch.default_generator.manual_seed(seed)  # the CPU's alone: a GPU may be in use
    return _drawn(TinyLM(**size), seed)


def _drawn(model, seed):
    generator = torch.Generator().manual_seed(seed)
    gains = {id(module.weight) for module in model.modules() if isinstance(module, nn.LayerNorm)}
    with torch.no_grad():
        for weight in model.parameters():
            if id(weight) not in gains:
                weight.normal_(0, STD, generator=generator)
    return model.eval()


def signature(run):
    """What a small network of this run's scheme does -> [nll, gradient norm, norm at its start].

    nll and gradient are those of random weights; the start is that of the weights which the scheme
    draws itself. In float64, where the scheme allows it: so they move by less than 1e-7 between
    machines. The heads are at most 32 wide, where the scheme allows that, and the text is 2 × 96
    bytes; some milliseconds.
    """
    before, width = torch.get_rng_state(), run.dim // run.n_head
    trained_len = min(run.trained_len, run.train_len)
    names = ("scheme", "n_layer", "n_head", "trained_len", "max_len", "window")
    size = {name: getattr(run, name) for name in names}
    attempts = [(min(width, 32), torch.float64), (min(width, 32), torch.float32)]
    attempts.append((width, torch.float32))
    try:
        for wide, dtype in attempts:
            try:
                return _signature(size | {"dim": wide * run.n_head}, dtype, trained_len)
            except Exception as error:  # somebody's own class may raise anything
                failure = error
        raise failure
    finally:
        torch.set_rng_state(before)


def _signature(size, dtype, trained_len):
    torch.default_generator.manual_seed(0)
    model = TinyLM(**size)
    start = _norm(model.parameters())
    model = _drawn(model, 0).to(dtype)
    ids = torch.randint(0, 256, (2, 97), generator=torch.Generator().manual_seed(0))
    nll = _nll(model, ids, trained_len)
    return [nll, _norm(w.grad for w in model.parameters() if w.grad is not None), start]


def _norm(tensors):
    squares = [tensor.detach().double().square().sum() for tensor in tensors]
    return torch.stack(squares).sum().sqrt().item()


def _nll(model, ids, trained_len):
    """Mean nll of ids (B, T + 1), by the paths of training and of reading, at 0 … and further.

    Its gradient is left in the model. A scheme that cannot read that far is read up to its
    training length.
    """
    far = torch.arange(ids.shape[1] - 1) * max(1, trained_len // 64)
    try:
        losses = _losses(model, ids) + _losses(model, ids, far)
    except Exception:  # somebody's own class may raise anything
        model.zero_grad()
        losses = _losses(model, ids[:, : trained_len + 1])
    return float(np.mean(losses))


def _losses(model, ids, positions=None):
    """nll of ids (B, T + 1) with gradients, which are added to the model's, and without."""
    losses = []
    for gradients in (True, False):
        with torch.set_grad_enabled(gradients):
            logits = model(ids[:, :-1], positions).flatten(0, 1)
            loss = nn.functional.cross_entropy(logits, ids[:, 1:].flatten())
        if gradients:
            loss.backward()
        losses.append(loss.item())
    return losses


def same_signature(a, b):
    """Whether two signatures are of the same behaviour; NaN is that of a scheme that gives NaN."""
    return len(a) == len(b) and all(map(_same, a, b))


def _same(a, b):
    both_nan = math.isnan(a) and math.isnan(b)
    return both_nan or math.isclose(a, b, rel_tol=SIGNATURE_TOLERANCE)


def signature_text(numbers):
    return " ".join(f"{number:.8g}" for number in numbers)


def fingerprint(scheme, corpus):
    """Four numbers of a scheme at the default size, in float32 on one thread.

    nll_at_L, nll_at_4L   a random network under the fixed protocol, 8 windows
    gradient_norm         of the same network's loss on one batch of 4 windows
    loss_of_twenty_steps  mean loss of twenty training steps with the whole schedule in them, at a
                          tenth of the learning rates: at all of them it moves with every rounding
    """
    rates = dict(lr=Run.lr / 10, adam_lr=Run.adam_lr / 10)
    run = Run(scheme=scheme, steps=TWENTY_STEPS, batch_size=2, dtype="float32", **rates)
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        model, L = random_network(scheme=scheme), run.train_len
        ends = score.fixed_ends(len(corpus.val), 4 * L, 8)
        nll = [float(score.fixed(model, corpus.val, n, ends).mean()) for n in (L, 4 * L)]
        x, y, _ = text_batch(corpus.train, run.replace(batch_size=4), 0)
        logits = model(x).flatten(0, 1)
        torch.nn.functional.cross_entropy(logits, y.long().flatten()).backward()
        norm = _norm(w.grad for w in model.parameters() if w.grad is not None)
        curve = train(run, lambda step: text_batch(corpus.train, run, step), CPU).curve
    finally:
        torch.set_num_threads(threads)
    return dict(zip(TOLERANCES, (*nll, norm, float(np.mean(curve["loss"]))), strict=True))


def moved(saved, now):
    """What of a fingerprint is not as it was saved, as words; nothing if it is the same."""
    words = []
    for name, tolerance in TOLERANCES.items():
        old, new = saved.get(name, float("nan")), now[name]
        if not abs(new - old) <= tolerance * abs(old):
            words.append(f"{name} was {old:.7g} and is {new:.7g}")
    return ", ".join(words)
