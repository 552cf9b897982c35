"""The measuring rules as code: which targets are scored, and with how much context.

A window of n bytes starting at i is x = data[i : i+n], y = data[i+1 : i+n+1]; every position
predicts its next byte.

span    a fixed stretch of the text is cut into windows of n without overlap (the protocol of the
        ALiBi paper). Every n scores the same targets, but a short window has more targets with
        little context before them, so perplexity falls with n for that reason alone.
fixed   windows of n bytes all end at the same places, and only the last K targets of each are
        scored. Every n scores the same targets, each with at least n − K bytes before it: if
        perplexity falls the model uses the far context, if it is flat it ignores it, if it rises
        the scheme breaks.

A model is anything that maps ids (B, n) to logits (B, n, 256).
"""

import math

import numpy as np
import torch
import torch.nn.functional as F

SPAN_BYTES = 131072  # targets scored under `span`, unless there are fewer
FIXED_WINDOWS = 128  # windows under `fixed`
K = 64  # targets scored at the end of each window under `fixed`


def window_nats(model, x, y, last, device="cpu", tokens_at_once=8192):
    """nll in nats of the last `last` targets of each window: x, y uint8 (W, n) -> (W, last).

    A batch that does not fit in memory is tried again at half its size, down to one window.
    """
    windows, n = x.shape
    rows, start, scored = max(1, min(windows, tokens_at_once // n)), 0, []
    with torch.no_grad():
        while start < windows:
            ids, targets = x[start : start + rows], y[start : start + rows, n - last :]
            try:
                scored.append(_batch_nats(model, ids, targets, device))
            except RuntimeError as error:  # torch.OutOfMemoryError is one, and the CPU's as well
                if "memory" not in str(error) or rows == 1:
                    raise
                rows = rows // 2
                continue
            start += rows
    return np.concatenate(scored)


def _batch_nats(model, ids, targets, device):
    """ids (B, n), targets (B, last), uint8 -> nats of the targets, float64 (B, last)."""
    last = targets.shape[1]
    targets = torch.from_numpy(targets).to(device).long().flatten()
    logits = model(torch.from_numpy(ids).to(device))[:, -last:].flatten(0, 1)  # (B·last, 256)
    nats = [  # in parts: never all in float32 a second time
        F.cross_entropy(some.float(), target, reduction="none")
        for some, target in zip(logits.split(4096), targets.split(4096))
    ]
    return torch.cat(nats).view(-1, last).cpu().double().numpy()


def span_length(lengths, size, available):
    """The largest multiple of every length that is ≤ size and leaves a byte to predict.

    ValueError if there is none.
    """
    step = math.lcm(*lengths)
    length = min(size, available - 1) // step * step
    if not length:
        raise ValueError(
            f"no span of at most {min(size, available - 1):,} bytes is a multiple of all lengths "
            f"{lengths} (the smallest is {step:,}); use lengths that divide each other, a larger "
            "--span-bytes, or --protocol fixed"
        )
    return length


def span(model, data, n, length, device="cpu"):
    """Span protocol: windows of n over the first `length` targets -> nats (length / n, n)."""
    x, y = np.array(data[:length]), np.array(data[1 : length + 1])
    return window_nats(model, x.reshape(-1, n), y.reshape(-1, n), n, device)


def fixed_ends(available, longest, windows):
    """Where the windows of the fixed protocol end: evenly over the text, at least K apart.

    The first leaves `longest` bytes before it, and 32,768 where the text is long enough, so that
    the places, and with them the targets, do not move when a longer length is asked for.
    ValueError if the text is too short.
    """
    first = max(longest, min(32768, available // 4))
    windows = min(windows, (available - 1 - first) // K + 1)
    if windows < 1 or first > available - 1:
        raise ValueError(
            f"{available:,} held-out bytes are too few for windows of {longest:,} "
            f"(needed: {longest + 1:,}); give more text or shorter lengths"
        )
    return np.linspace(first, available - 1, windows).astype(np.int64)


def fixed(model, data, n, ends, device="cpu"):
    """Fixed-target protocol: windows of n bytes that end at `ends` -> nats of the last K (W, K).

    ValueError for n < K.
    """
    if n < K:
        raise ValueError(f"{n} < {K} targets")
    index = ends[:, None] + np.arange(-n, 1)  # (W, n + 1)
    window = np.asarray(data[index])
    return window_nats(model, window[:, :-1], window[:, 1:], K, device)
