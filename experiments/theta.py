"""RoPE with base 10 … 1,000,000 in place of 10,000.

Trains the other bases with the settings of each checkpoint of rope, and keeps them in --out/theta.
"""

import math

import numpy as np
import torch

from experiments.setup import Picture, Verdict, mean_of
from lab import score
from lab.checkpoints import checkpoint_path, load
from lab.files import file_lock, writable_folder
from lab.jobs import train_run
from lab.lengths import Protocols
from lab.probes import attention_by_distance
from lab.rows import distinct, select, values
from lab.stats import perplexity
from lab.tables import markdown_table, mean_std_text, usable_cell

BASES = (10, 100, 1_000, 10_000, 100_000, 1_000_000)
NEAR, USUAL, FAR = BASES[0], 10_000, BASES[-1]
TIMES = (1, 2, 4, 8, 16)  # the training length, that the models are read at
SPAN_BYTES, WINDOWS, QUICK_WINDOWS = 65536, 32, 8
CLOSE = 32  # tokens


def full_turns(base, head_dim, length):
    """How many of the D/2 pairs make a whole turn in `length` tokens: 2π·base^(2i/D) ≤ length."""
    wavelengths = (2 * math.pi * base ** (2 * i / head_dim) for i in range(head_dim // 2))
    return sum(wavelength <= length for wavelength in wavelengths)


def with_base(setup, run, base):
    """A model trained like `run` but for the base; from an earlier call, if it made it."""
    run = run.replace(scheme=f"rope:base={base}")
    path = checkpoint_path(setup.out / "theta", run.scheme, run.seed)
    with file_lock(path):
        rows = train_run(run, setup.corpus, path, setup.device, setup.how)
    for row in select(rows, table=setup.how.table, metric="ppl", protocol="span"):
        if row["value"] is None:
            raise ValueError(f"base {base}, seed {run.seed}: {row['note']}")
    return load(path).model().to(setup.device)


def measure(setup):
    """Perplexity by length under both protocols, and attention by distance, of every base."""
    ropes, L = setup.models_of("rope"), setup.run.train_len
    if L < score.K:
        raise ValueError(
            f"the training length {L} is below {score.K}, which the fixed protocol needs"
        )
    for run, _ in ropes:
        if run.sha256 != setup.corpus.sha256:
            raise ValueError(
                f"rope, seed {run.seed}, was trained on other text than the other bases would be; "
                "first: python train_compare.py --schemes rope with the same flags"
            )
    writable_folder(setup.out / "theta")
    writable_folder(setup.out / "theta" / "checkpoints")
    plan, ids = protocols(setup)
    rows = []
    for base in BASES:
        for run, model in ropes:
            if base != USUAL:
                model = with_base(setup, run, base)
            rows += rows_of(model, base, run, plan, ids)
    return rows


def protocols(setup):
    """What the models of all bases are read on: both protocols, and texts of L bytes (8, L)."""
    val, L = setup.corpus.val, setup.run.train_len
    lengths = [L * times for times in TIMES]
    size = lengths[-1] if setup.quick else SPAN_BYTES
    windows = QUICK_WINDOWS if setup.quick else WINDOWS
    plan = Protocols.at(val, lengths, ("fixed", "span"), size, windows)
    texts = np.array(val[plan.ends[:8, None] + np.arange(-L, 0)])
    return plan, torch.from_numpy(texts).to(setup.device)


def rows_of(model, base, run, plan, ids):
    """The rows of a model: full turns, attention up to a distance, perplexity."""
    L, head_dim = run.train_len, run.dim // run.n_head
    named = dict(base=base, seed=run.seed, train_len=L, pairs=head_dim // 2)
    rows = [named | dict(metric="full turns", value=full_turns(base, head_dim, L))]
    share = np.cumsum(attention_by_distance(model, ids))
    for within in (2**i for i in range(L.bit_length())):
        value = float(share[within - 1])
        rows.append(named | dict(metric="attention", within=within, value=value))
    for protocol, n in plan.cells():
        ppl = perplexity(plan.nats(model, protocol, n, ids.device))
        rows.append(named | dict(metric="ppl", protocol=protocol, n=n, value=ppl))
    return rows


def rule(near_sees_close, near_worse, far_worse):
    """Confirmed if base 10 gives the last 32 tokens over 1.25 times the attention that 10,000
    gives them, and both ends are over 5 % worse than 10,000; partly if some of this is so.
    """
    claims = (near_sees_close > 1.25, near_worse > 1.05, far_worse > 1.05)
    return "confirmed" if all(claims) else "partly" if any(claims) else "refuted"


def judge(rows):
    L, ends, fixed = rows[0]["train_len"], (NEAR, USUAL, FAR), select(rows, protocol="fixed")
    longest = distinct(fixed, "n")[-1]
    ppl = {base: mean_of(fixed, base=base, n=L) for base in ends}
    far = {base: mean_of(fixed, base=base, n=longest) for base in ends}
    close = {base: mean_of(rows, base=base, metric="attention", within=CLOSE) for base in ends}
    turns = {base: values(rows, base=base, metric="full turns")[0] for base in ends}
    return Verdict(
        "Base 10 makes RoPE see only neighbours, base 1,000,000 makes near and far hard to tell "
        "apart: both are worse than 10,000.",
        f"At {L}, perplexity with base 10, 10,000 and 1,000,000 is {ppl[NEAR]:.2f}, "
        f"{ppl[USUAL]:.2f} and {ppl[FAR]:.2f}; the last {CLOSE} tokens get {close[NEAR]:.0%}, "
        f"{close[USUAL]:.0%} and {close[FAR]:.0%} of the attention. At {longest:,} it is "
        f"{far[NEAR]:.1f}, {far[USUAL]:.1f} and {far[FAR]:.1f}: with base 10 all "
        f"{rows[0]['pairs']} pairs make a whole turn within {L} tokens, so that no angle is new "
        f"further out; with 10,000 {turns[USUAL]} do, with 1,000,000 {turns[FAR]}.",
        rule(close[NEAR] / close[USUAL], ppl[NEAR] / ppl[USUAL], ppl[FAR] / ppl[USUAL]),
    )


def show(rows):
    L, pairs = rows[0]["train_len"], rows[0]["pairs"]
    lengths = distinct(select(rows, metric="ppl"), "n")
    header = ["base", f"pairs with a whole turn in {L}", f"attention to the last {CLOSE}"]
    header += [f"fixed {n}" for n in lengths] + ["usable length"] + [f"span {n}" for n in lengths]
    table, lines = [], {}
    for base in distinct(rows, "base"):
        mine = select(rows, base=base)
        turns, close = values(mine, metric="full turns"), values(mine, within=CLOSE)
        fixed = {n: mean_of(mine, protocol="fixed", n=n) for n in lengths}
        line = [f"{base:,}", f"{turns[0]} of {pairs}", mean_std_text(close)]
        line += [mean_std_text(values(mine, protocol="fixed", n=n)) for n in lengths]
        line.append(usable_cell(fixed, L))
        line += [mean_std_text(values(mine, protocol="span", n=n)) for n in lengths]
        table.append(line)
        lines[f"base {base:,}"] = (lengths, list(fixed.values()))
    picture = Picture(
        lines,
        f"RoPE trained at {L} with another base: same targets, more context (fixed protocol)",
        "evaluation length n, bytes",
        "perplexity per byte",
        mark=L,
        log=True,
    )
    return markdown_table(header, table), picture
