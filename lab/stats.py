"""Statistics of losses and perplexities: how large, how sure, and which differ.

nats are negative log-likelihoods, float64 (windows, targets). Perplexity is exp(mean nats).
"""

import math

import numpy as np

TOLERANCE = 1.05  # a perplexity within this factor counts as the same


def perplexity(nats):
    """exp of the mean over all targets: windows have equal numbers of targets, so all count alike.

    None where that says nothing: the loss is NaN, infinite, or above 100 nats.
    """
    nll = float(nats.mean())
    return math.exp(nll) if nll < 100 else None


def bootstrap(nats, resamples=1000):
    """95 % interval of the perplexity over windows, drawn with replacement -> (low, high)."""
    means = nats.mean(axis=1)
    drawn = np.random.default_rng(0).integers(0, len(means), (resamples, len(means)))
    low, high = np.percentile(means[drawn].mean(axis=1), (2.5, 97.5))
    return math.exp(low), math.exp(high)


def measured_ppl(nats):
    """What a row says of its nats: value (the perplexity), low, high, count, and a note.

    Without a perplexity the note says what the loss is.
    """
    value = perplexity(nats)
    if value is None:
        note = f"loss {float(nats.mean()):.4g} nats"
        return dict(metric="ppl", value=None, low=None, high=None, count=nats.size, note=note)
    low, high = (round(bound, 4) for bound in bootstrap(nats))
    value = round(value, 4)
    return dict(metric="ppl", value=value, low=low, high=high, count=nats.size, note="")


def mean_std(values):
    """Mean and sample standard deviation (ddof 1; 0 for one value)."""
    mean = sum(values) / len(values)
    if len(values) == 1:
        return mean, 0.0
    return mean, (sum((v - mean) ** 2 for v in values) / (len(values) - 1)) ** 0.5


def average(values):
    """Mean of perplexities; infinite where one is so large that it is not given."""
    return math.inf if None in values else float(np.mean(values))


def paired_t(differences):
    """Student's paired t-test: N differences of seeds or windows -> two-sided p-value.

    With ν = N − 1 and θ = arctan(|t|/√ν): p = ∫ cos^(ν−1) from θ to π/2, over the same from 0 to
    π/2. None for fewer than two differences.
    """
    count = len(differences)
    if count < 2:
        return None
    mean, deviation = float(np.mean(differences)), float(np.std(differences, ddof=1))
    if deviation == 0:
        return float(mean == 0)
    theta = math.atan(abs(mean) / deviation * math.sqrt(count / (count - 1)))
    tail, everything = (np.linspace(start, math.pi / 2, 10001) for start in (theta, 0))
    area = np.trapezoid(np.cos(tail) ** (count - 2), tail)
    return float(area / np.trapezoid(np.cos(everything) ** (count - 2), everything))


def holm(p_values):
    """p-values of several comparisons -> those that may be read together (Holm 1979)."""
    adjusted, largest = [0.0] * len(p_values), 0.0
    for rank, index in enumerate(sorted(range(len(p_values)), key=p_values.__getitem__)):
        largest = max(largest, min(1.0, (len(p_values) - rank) * p_values[index]))
        adjusted[index] = largest
    return adjusted


def usable_length(ppl, train_len):
    """The largest n with ppl(n) ≤ 1.05 × ppl(train_len), there and at every smaller measured n.

    ppl: {n: perplexity}. None when the training length itself was not measured.
    """
    usable = None
    for n in sorted(n for n in ppl if n >= train_len):
        if train_len not in ppl or ppl[n] is None or ppl[n] > TOLERANCE * ppl[train_len]:
            break
        usable = n
    return usable


def compare_pair(a, b):
    """Two rows of one column -> how they differ: mean nats of a − b, p-value, over what.

    a, b: {seed: mean nats per window, float64 (windows,)}. The test is over the seeds that both
    have; if that is one seed, over its windows. None without a common seed.
    """
    seeds = [seed for seed in a if seed in b]
    if not seeds:
        return None
    differences = [a[seed] - b[seed] for seed in seeds]
    many = len(seeds) > 1
    p = paired_t([d.mean() for d in differences] if many else differences[0])
    return dict(
        nats_a_minus_b=round(float(np.mean(differences)), 6),
        p=p and float(f"{p:.3g}"),
        over=f"{len(seeds)} seeds" if many else f"{len(differences[0])} windows",
    )


def tied_with_best(pairs):
    """The names that are best in a column or as good as the best, from its compared pairs.

    pairs: dicts with a, b, nats_a_minus_b and p. As good: within 5 % of the best, and not told
    from it by the test (5 %, Holm's correction). Few seeds decide little: without the 5 %, rows
    that are clearly worse would be among them.
    """
    behind = {}  # how far each name is behind the best of its rivals, in nats
    for pair in pairs:
        difference = pair["nats_a_minus_b"]
        behind[pair["a"]] = max(behind.get(pair["a"], 0), difference)
        behind[pair["b"]] = max(behind.get(pair["b"], 0), -difference)
    best = next((name for name, nats in behind.items() if nats <= 0), None)
    against = [pair for pair in pairs if best in (pair["a"], pair["b"])]
    adjusted = holm([1.0 if pair["p"] is None else pair["p"] for pair in against])
    tied = {best}
    for pair, p in zip(against, adjusted):
        if p >= 0.05 and abs(pair["nats_a_minus_b"]) <= math.log(TOLERANCE):
            tied |= {pair["a"], pair["b"]}
    return tied
