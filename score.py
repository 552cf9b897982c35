"""The measuring rules as code: which targets are scored, with how much context, and how sure the number is.

A window of n bytes starting at i is x = data[i : i+n], y = data[i+1 : i+n+1]; every position predicts its next byte.

span    a fixed stretch of the text is cut into windows of n without overlap (the protocol of the ALiBi paper). Every n
        scores the same targets, but a short window has more targets with little context before them, so perplexity
        falls with n for that reason alone.
fixed   windows of n bytes all end at the same places, and only the last K targets of each are scored. Every n scores the
        same targets, each with at least n − K bytes before it: if perplexity falls the model uses the far context, if
        it is flat it ignores it, if it rises the scheme breaks.

A model is anything that maps ids (B, n) to logits (B, n, 256). Perplexity is exp(sum of nats / number of targets).
"""
import math

import numpy as np
import torch
import torch.nn.functional as F

SPAN_BYTES = 131072  # targets scored under `span`, unless there are fewer
K = 64  # targets scored at the end of each window under `fixed`


def window_nats(model, x, y, last, device="cpu", tokens_at_once=8192):
    """Negative log-likelihood in nats of the last `last` targets of each window: x, y uint8 (W, n) -> float64 (W, last).

    A batch that does not fit in memory is tried again at half its size, down to one window.
    """
    windows, n = x.shape
    rows, start, scored = max(1, min(windows, tokens_at_once // n)), 0, []
    with torch.no_grad():
        while start < windows:
            try:
                ids = torch.from_numpy(x[start:start + rows]).to(device)  # (B, n)
                targets = torch.from_numpy(y[start:start + rows, n - last:]).to(device).long()  # (B, last)
                logits = model(ids)[:, n - last:].flatten(0, 1)  # (B·last, 256)
                nats = [F.cross_entropy(some.float(), target, reduction="none")  # in parts: never all in float32 a second time
                        for some, target in zip(logits.split(4096), targets.flatten().split(4096))]
                scored.append(torch.cat(nats).view(-1, last).cpu().double().numpy())
            except RuntimeError as error:  # torch.OutOfMemoryError is one; the CPU allocator raises a plain one
                if "memory" not in str(error) or rows == 1:
                    raise
                rows = rows // 2
                continue
            start += rows
    return np.concatenate(scored)


def span_length(lengths, size, available):
    """The largest multiple of every length that is ≤ size and leaves a byte to predict. ValueError if there is none."""
    step = math.lcm(*lengths)
    length = min(size, available - 1) // step * step
    if not length:
        raise ValueError(f"no span of at most {min(size, available - 1):,} bytes is a multiple of all lengths {lengths} "
                         f"(the smallest is {step:,}); use lengths that divide each other, a larger --span-bytes, or --protocol fixed")
    return length


def span(model, data, n, length, device="cpu"):
    """Span protocol: data uint8, windows of n over its first `length` targets -> nats, float64 (length / n, n)."""
    x, y = np.array(data[:length]), np.array(data[1:length + 1])
    return window_nats(model, x.reshape(-1, n), y.reshape(-1, n), n, device)


def fixed_ends(available, longest, windows):
    """Where the windows of the fixed protocol end: evenly over the text, at least K apart, leaving `longest` before each.

    The first end leaves 32,768 bytes before it where the text is long enough, so that the places, and with them the
    targets, do not move when a longer length is asked for. ValueError if the text is too short.
    """
    first = max(longest, min(32768, available // 4))
    windows = min(windows, (available - 1 - first) // K + 1)
    if windows < 1 or first > available - 1:
        raise ValueError(f"{available:,} held-out bytes are too few for windows of {longest:,} (needed: {longest + 1:,}); "
                         "give more text or shorter lengths")
    return np.linspace(first, available - 1, windows).astype(np.int64)


def fixed(model, data, n, ends, device="cpu"):
    """Fixed-target protocol: windows of n bytes that end at `ends` -> nats of the last K targets, float64 (W, K).

    ValueError for n < K.
    """
    if n < K:
        raise ValueError(f"{n} < {K} targets")
    index = ends[:, None] + np.arange(-n, 1)  # (W, n + 1)
    window = np.asarray(data[index])
    return window_nats(model, window[:, :-1], window[:, 1:], K, device)


def perplexity(nats):
    """exp of the mean over all targets: windows have equal numbers of targets, so no window counts more than another.

    None where that says nothing: the loss is NaN, infinite, or above 100 nats.
    """
    nll = float(nats.mean())
    return math.exp(nll) if nll < 100 else None


def bootstrap(nats, resamples=1000):
    """95 % interval of the perplexity over windows, drawn with replacement: nats (W, targets) -> (low, high)."""
    means = nats.mean(axis=1)
    drawn = np.random.default_rng(0).integers(0, len(means), (resamples, len(means)))
    low, high = np.percentile(means[drawn].mean(axis=1), (2.5, 97.5))
    return math.exp(low), math.exp(high)


def scores(nats):
    """What a row says of its nats: nll, ppl, its interval low … high, targets, and a note where there is no perplexity."""
    nll, ppl = float(nats.mean()), perplexity(nats)
    if ppl is None:
        return dict(nll=round(nll, 4) if math.isfinite(nll) else None, ppl=None, low=None, high=None, targets=nats.size,
                    note=f"loss {nll:.4g} nats")
    low, high = bootstrap(nats)
    return dict(nll=round(nll, 5), ppl=round(ppl, 4), low=round(low, 4), high=round(high, 4), targets=nats.size, note="")


def paired_p(differences):
    """Student's paired t-test: N differences of seeds or windows -> two-sided p-value, None for fewer than two.

    With ν = N − 1 and θ = arctan(|t|/√ν): p = ∫ cos^(ν−1) from θ to π/2, over the same from 0 to π/2.
    """
    count = len(differences)
    if count < 2:
        return None
    mean, deviation = float(np.mean(differences)), float(np.std(differences, ddof=1))
    if deviation == 0:
        return float(mean == 0)
    theta = math.atan(abs(mean) / deviation * math.sqrt(count / (count - 1)))
    tail, whole = (np.linspace(start, math.pi / 2, 10001) for start in (theta, 0))
    return float(np.trapezoid(np.cos(tail) ** (count - 2), tail) / np.trapezoid(np.cos(whole) ** (count - 2), whole))


def holm(p_values):
    """p-values of several comparisons -> those that may be read together (Holm 1979): the smallest times N, and so on."""
    adjusted, largest = [0.0] * len(p_values), 0.0
    for rank, index in enumerate(sorted(range(len(p_values)), key=lambda i: p_values[i])):
        largest = max(largest, min(1.0, (len(p_values) - rank) * p_values[index]))
        adjusted[index] = largest
    return adjusted


def usable_length(ppl, train_len):
    """The largest n with ppl(n) ≤ 1.05 × ppl(train_len) at it and at every smaller measured n ≥ train_len; {n: ppl} -> n.

    None when the training length itself was not measured.
    """
    usable = None
    for n in sorted(n for n in ppl if n >= train_len):
        if train_len not in ppl or ppl[n] is None or ppl[n] > 1.05 * ppl[train_len]:
            break
        usable = n
    return usable
