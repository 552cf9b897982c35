"""Tokens per second of a whole training step, beside the libraries people would use instead.

    pip install -r bench/requirements.txt
    python bench/train_step.py             # about 6 minutes on two CPU cores
    python bench/train_step.py --quick     # half a minute, a smaller network

On the CPU, with the same layers, width, heads, vocabulary, batch and length for all. A step is
forward, loss, backward and update: ours is that of train_compare.py, the peers' is with fused
AdamW. Each peer is first tried with every dtype and attention it offers and keeps its fastest. Then
all take turns in one process, so that a machine that slows down slows all of them; the memory
allocator is set as train_compare.py sets it, for all. The bound is the time of nothing but the
matrix products of the `none` step, at their real shapes and in the faster dtype. Writes
bench_train.json, .csv and .md into --out.
"""

import collections
import contextlib
import ctypes
import functools
import itertools
import statistics
import sys
import time
import warnings
from pathlib import Path
from unittest.mock import patch

sys.path.insert(0, str(Path(__file__).parent.parent))
import torch
import torch.nn.functional as F

import tiny_lm
from attend import STRIP, fused
from bench.clock import CPU, STEPS, durations, our_steps
from bench.peers import peers
from data.batches import windows
from data.corpus import load_corpus
from lab import command
from lab.command import complain, int_in_range, option, switch
from lab.files import writable_folder, write_atomically, write_csv, write_json
from lab.machine import keep_freed_memory, pick_dtype
from lab.provenance import stamp
from lab.rows import select
from lab.runs import Run
from lab.tables import markdown_table
from schemes.scheme import SCHEMES

OURS, BOUND = "this repository", "the matrix products alone"
# The `none` step with one of the speed paths replaced by what it stands in for.
CHANGES = ("torch's fused attention in place of strips", "freed memory given back")
CHANGED = {f"{OURS}, {change}": change for change in CHANGES}
SIZE = dict(batch_size=32, train_len=256, dim=128, n_layer=4, n_head=4)
QUICK_SIZE = dict(batch_size=16, train_len=64, dim=64, n_layer=2, n_head=4)
QUICK = dict(rounds=2, out="results/quick")


def run_of(size, dtype):
    """The Run of one turn."""
    L = size["train_len"]
    size = {name: value for name, value in size.items() if name != "train_len"}
    lengths = dict(train_lens=(L,), trained_len=L, max_len=16 * L)
    return Run(steps=STEPS, dtype=str(dtype).removeprefix("torch."), **lengths, **size)


# What takes turns


class Peer:
    """One library's model at one setting, with its optimizer."""

    def __init__(self, make, attention, precision):
        torch.manual_seed(0)
        self.setting = f"{precision}, {attention} attention"
        dtype = torch.bfloat16 if precision == "bf16 weights" else torch.float32
        self.model = make(attention).to(dtype)
        mixed = precision == "bf16 autocast"
        self.autocast = torch.autocast("cpu", torch.bfloat16, enabled=mixed)
        self.optimizer = torch.optim.AdamW(self.model.parameters(), lr=1e-3, fused=True)

    def steps(self, run, data):
        """Seconds of each step of a run, after a first one."""
        ends = []
        for step in range(run.steps):
            x, y = windows(data, run.seed, step, run.batch_size, run.train_len)  # each (B, T)
            with self.autocast:
                logits = self.model(x.long())  # (B, T, 256)
            F.cross_entropy(logits.float().flatten(0, 1), y.long().flatten()).backward()
            self.optimizer.step()
            self.optimizer.zero_grad()
            ends.append(time.perf_counter())
        return durations(ends)


def fastest(make, attentions, run, data):
    """The Peer at the setting that takes the least time, of three turns of each."""
    precisions = ("fp32", "bf16 weights", "bf16 autocast")
    settings = itertools.product(attentions, precisions)
    candidates = [Peer(make, attention, precision) for attention, precision in settings]
    least = dict.fromkeys(candidates, float("inf"))
    for _ in range(3):
        for peer in candidates:
            least[peer] = min(least[peer], *peer.steps(run, data))
    return min(candidates, key=least.get)


def rivals(run, data):
    """{(scheme, who): Peer}, each at its fastest setting."""
    chosen = {}
    for scheme in SCHEMES:
        for name, (make, attentions) in peers(scheme, run).items():
            peer = fastest(make, attentions, run, data)
            chosen[scheme, f"{name} ({peer.setting})"] = peer
            complain(f"{scheme}: {name} is fastest with {peer.setting}")
    return chosen


def products(run, dtype):
    """The matrix products of one `none` step -> [(how often, function, left, right)].

    Forward, the gradients of the input and of the weight of every linear layer, and attention.
    """
    B, T, C, H, layers = run.batch_size, run.train_len, run.dim, run.n_head, run.n_layer
    blocks = [(C, 3 * C), (C, C), (C, 4 * C), (4 * C, C)]  # (in, out) of qkv, out, up, down
    linear = [(layers, *shape) for shape in blocks] + [(1, C, 256)]
    all_products = []
    for count, wide, narrow in linear:
        shapes = (B * T, wide), (narrow, wide), (B * T, narrow)
        x, weight, grad = (torch.randn(shape, dtype=dtype) for shape in shapes)
        pairs = (x, weight.t()), (grad, weight), (grad.t(), x)
        all_products += [(count, torch.mm, *pair) for pair in pairs]
    for start in range(0, T, STRIP):
        end = min(start + STRIP, T)
        shapes = (end - start, C // H), (end, C // H), (end - start, end)
        few, many, scores = (torch.randn(B * H, *shape, dtype=dtype) for shape in shapes)
        pairs = (
            (few, many.transpose(1, 2)),  # scores; gradient of the weights
            (scores, many),  # result; gradient of q
            (scores.transpose(1, 2), few),  # gradients of k and v
        )
        all_products += [(2 * layers, torch.bmm, *pair) for pair in pairs]
    return all_products


def seconds_of(all_products):
    """The time that products take, one after another."""
    started = time.perf_counter()
    for count, product, left, right in all_products:
        for _ in range(count):
            product(left, right)
    return time.perf_counter() - started


@contextlib.contextmanager
def memory_given_back(largest):
    """glibc's malloc as it sets itself.

    It gives back what is free above twice the largest block (in bytes) so far.
    """
    M_TRIM_THRESHOLD = -1
    ctypes.CDLL(None).mallopt(M_TRIM_THRESHOLD, 2 * largest)
    yield
    keep_freed_memory()


def without_speed_paths(run):
    """{who: a context in which the `none` step lacks one of the speed paths}."""
    strips, memory = CHANGED
    contexts = {strips: functools.partial(patch.object, tiny_lm, "attend", fused)}
    if keep_freed_memory():
        width = getattr(torch, run.dtype).itemsize
        largest = run.batch_size * run.train_len * 4 * run.dim * width  # inside the MLP
        contexts[memory] = functools.partial(memory_given_back, largest)
    return contexts


def measure(run, rounds, data):
    """Let all take turns, `rounds` times -> {(scheme, who): [seconds per step]}.

    who is OURS, one of CHANGED, a peer at its setting, or BOUND (one value a round).
    """
    peers_at_best = rivals(run, data)
    bounds = [products(run, dtype) for dtype in (torch.bfloat16, torch.float32)]
    changes, none = without_speed_paths(run), run.replace(scheme="none")
    seconds = collections.defaultdict(list)
    for number in range(rounds):
        complain(f"round {number + 1} of {rounds}")
        first = number % len(SCHEMES)  # another each round
        for scheme in SCHEMES[first:] + SCHEMES[:first]:
            seconds[scheme, OURS] += our_steps(run.replace(scheme=scheme), data)
        for key, peer in peers_at_best.items():
            seconds[key] += peer.steps(run, data)
        for who, change in changes.items():
            with change():
                seconds["none", who] += our_steps(none, data)
        seconds["none", BOUND].append(min(map(seconds_of, bounds)))
    return dict(seconds)


# From seconds to rows and a table


def table_rows(seconds, tokens):
    """{(scheme, who): [seconds]} -> a row for each; a step reads so many tokens.

    A ratio is the median over rounds of the ratio within a round, as machines drift.
    """
    median = {key: statistics.median(values) for key, values in seconds.items()}
    rounds = len(seconds["none", BOUND])
    by_round = {key: round_means(values, rounds) for key, values in seconds.items()}
    rows = []
    for (scheme, who), spent in median.items():
        row = dict(scheme=scheme, who=who)
        row |= dict(tokens_per_second=round(tokens / spent), ms_per_step=round(1000 * spent, 1))
        row |= dict(times_best_peer=None, times_none=None, of_bound=None)
        if who == OURS or who in CHANGED:
            ours, none = by_round[scheme, who], by_round["none", OURS]
            peer_keys = [key for key in median if key[0] == scheme and is_peer(key[1])]
            best = by_round[min(peer_keys, key=median.get)]
            row["times_best_peer"] = round(median_ratio(best, ours), 2)
            row["times_none"] = round(median_ratio(ours, none), 3)
            row["of_bound"] = round(median_ratio(by_round["none", BOUND], ours), 2)
        rows.append(row)
    return rows


def is_peer(who):
    return who not in (OURS, BOUND, *CHANGED)


def round_means(values, rounds):
    """The mean of each round's values, as many in each."""
    count = len(values)
    edges = [count * i // rounds for i in range(rounds + 1)]
    return [statistics.mean(values[start:end]) for start, end in zip(edges, edges[1:])]


def median_ratio(a, b):
    return statistics.median(x / y for x, y in zip(a, b))


def table(rows):
    """Ours beside the best peer by scheme, then what the bound and the speed paths are worth."""
    lines = []
    for scheme in SCHEMES:
        (ours,) = select(rows, scheme=scheme, who=OURS)
        of_peers = [row for row in select(rows, scheme=scheme) if is_peer(row["who"])]
        best = min(of_peers, key=lambda row: row["ms_per_step"])
        ratios = [f"{ours[key]:.2f}" for key in ("times_none", "of_bound", "times_best_peer")]
        speeds = [f"{row['tokens_per_second']:,}" for row in (ours, best)]
        lines.append([scheme, speeds[0], *ratios, speeds[1], best["who"]])
    header = ["scheme", "tokens/s", "step / step of `none`", "of the bound", "times the best peer"]
    text = [markdown_table([*header, "its tokens/s", "which"], lines)]
    for row in rows:
        if row["who"] == BOUND:
            speed = f"{row['tokens_per_second']:,} tokens/s"
            text.append(f"The bound, {BOUND} of a `none` step: {speed}.")
        elif row["who"] in CHANGED:
            change, ratio = CHANGED[row["who"]], row["times_none"]
            text.append(f"A `none` step with {change}: {ratio:.2f} times as long.")
    return "\n".join(text) + "\n"


# The command


def arguments(words):
    parser = command.Parser(__doc__)
    option(parser, "--rounds", int_in_range(1), 10, "turns of each, of two steps")
    option(parser, "--out", str, "results", "folder for bench_train.*")
    switch(parser, "--quick", "a small network and two rounds, into results/quick/")
    if "--quick" in words:
        parser.set_defaults(**QUICK)
    return parser, parser.read(words)


def main():
    parser, args = arguments(sys.argv[1:])
    try:
        out, corpus = writable_folder(args.out), load_corpus("numpy")
    except ValueError as error:
        parser.error(error)
    warnings.filterwarnings("ignore")
    size, dtype = QUICK_SIZE if args.quick else SIZE, pick_dtype("auto", CPU)
    run = run_of(size, dtype)
    provenance = stamp(command.command_line(sys.argv), corpus, CPU, dtype)
    seconds = measure(run, args.rounds, corpus.train)
    rows = table_rows(seconds, run.batch_size * run.train_len)
    text, written = table(rows), {}
    for (scheme, who), values in seconds.items():
        written[f"{scheme}: {who}"] = [round(value, 5) for value in values]
    about = dict(provenance=provenance, size=size, rounds=args.rounds)
    write_json(out / "bench_train.json", about | dict(rows=rows, seconds=written))
    write_csv(out / "bench_train.csv", rows)
    write_atomically(out / "bench_train.md", text)
    print(text + f"\nwrote {out / 'bench_train'}.json .csv .md")


if __name__ == "__main__":
    command.run(main)
