"""Tokens per second of a whole training step: this repository against the libraries people would use instead.

    pip install -r bench/requirements.txt
    python bench/train_step.py             # about 6 minutes on two CPU cores
    python bench/train_step.py --quick     # half a minute, a smaller network

On the CPU, same layers, width, heads, vocabulary, batch and length for all. A step is forward, loss, backward and update;
ours is that of train_compare.py, the peers' is with fused AdamW. Each peer is first tried with every dtype and attention
it offers and keeps its fastest. Then all take turns in one process, so that a machine that slows down slows all of them;
the memory allocator is set as train_compare.py sets it, for all. The bound is the time of nothing but the matrix products
of the `none` step, at their real shapes and in the faster dtype. Writes bench_train.json, .csv and .md into --out.
"""
import contextlib
import ctypes
import statistics
import sys
import time
import warnings
from pathlib import Path
from unittest.mock import patch

sys.path[:0] = [str(Path(__file__).parent.parent), str(Path(__file__).parent)]
import torch
import torch.nn.functional as F

import tiny_lm
import train_compare
from common import Parser, keep_freed_memory, pick_dtype, provenance, run, whole, writable_folder, write_file, write_json
from data.corpus import load_corpus
from pos_alibi import fused
from peers import peers
from report import markdown_table, write_csv
from tiny_lm import SCHEMES, BlockCausalAttention

CPU = torch.device("cpu")
OURS, PRODUCTS = "this repository", "the matrix products alone"


@contextlib.contextmanager
def memory_given_back(largest):
    """glibc's malloc as it sets itself: it gives back what is free above twice the largest block (in bytes) so far."""
    ctypes.CDLL(None).mallopt(-1, 2 * largest)  # M_TRIM_THRESHOLD
    yield
    keep_freed_memory()


class Clock:
    """Stands in for the progress bar of train_compare.train and notes when each step ended."""

    def __init__(self):
        self.at = []

    def set_postfix_str(self, text, refresh):
        pass

    def update(self):
        self.at.append(time.perf_counter())


def our_steps(scheme, count, size, data, dtype):
    """Seconds of each of `count` steps of train_compare.train after a first one."""
    clock = Clock()
    length = size["train_len"]
    train_compare.train(dict(scheme=scheme, seed=0, steps=count + 1, max_len=16 * length, trained_len=length, train_lens=[length],
                             window=0, random_positions=0, copies=False, lr=0.02, adam_lr=0.015, **size), data, CPU, dtype, clock)
    return [after - before for before, after in zip(clock.at, clock.at[1:])]


class Peer:
    """One library's model at one setting, with its optimizer."""

    def __init__(self, make, attention, precision):
        torch.manual_seed(0)
        self.setting = f"{precision}, {attention} attention"
        self.model = make(attention).to(torch.bfloat16 if precision == "bf16 weights" else torch.float32)
        self.autocast = torch.autocast("cpu", torch.bfloat16, enabled=precision == "bf16 autocast")
        self.optimizer = torch.optim.AdamW(self.model.parameters(), lr=1e-3, fused=True)

    def steps(self, count, size, data):
        """Seconds of each of `count` steps after a first one."""
        at = []
        for step in range(count + 1):
            x, y = train_compare.batch(data, 0, step, size["batch_size"], size["train_len"])
            with self.autocast:
                logits = self.model(x.long())
            F.cross_entropy(logits.float().flatten(0, 1), y.long().flatten()).backward()
            self.optimizer.step()
            self.optimizer.zero_grad()
            at.append(time.perf_counter())
        return [after - before for before, after in zip(at, at[1:])]


def fastest(make, attentions, size, data):
    """The Peer at the setting that takes the least time, of three turns of each."""
    candidates = [Peer(make, attention, precision) for attention in attentions
                  for precision in ("fp32", "bf16 weights", "bf16 autocast")]
    least = dict.fromkeys(candidates, float("inf"))
    for _ in range(3):
        for peer in candidates:
            least[peer] = min(least[peer], *peer.steps(2, size, data))
    return min(candidates, key=least.get)


def products(size, dtype):
    """[(how often, product)] of one `none` step: forward, gradient of the input and of the weight of every layer, attention."""
    B, T, C, H, layers = (size[key] for key in ("batch_size", "train_len", "dim", "n_head", "n_layer"))
    found = []
    for count, wide, narrow in ((layers, C, 3 * C), (layers, C, C), (layers, C, 4 * C), (layers, 4 * C, C), (1, C, 256)):
        x, weight, grad = (torch.randn(shape, dtype=dtype) for shape in ((B * T, wide), (narrow, wide), (B * T, narrow)))
        found += [(count, lambda x=x, w=weight: x @ w.t()), (count, lambda g=grad, w=weight: g @ w), (count, lambda g=grad, x=x: g.t() @ x)]
    for start in range(0, T, BlockCausalAttention.STRIP):
        end = min(start + BlockCausalAttention.STRIP, T)
        few, many, score = (torch.randn(B * H, *shape, dtype=dtype) for shape in ((end - start, C // H), (end, C // H), (end - start, end)))
        found += [(2 * layers, lambda a=few, b=many: torch.bmm(a, b.transpose(1, 2))),  # scores; gradient of the weights
                  (2 * layers, lambda s=score, b=many: torch.bmm(s, b)),  # result; gradient of q
                  (2 * layers, lambda s=score, a=few: torch.bmm(s.transpose(1, 2), a))]  # gradients of k and v
    return found


def seconds_of(found):
    started = time.perf_counter()
    for count, product in found:
        for _ in range(count):
            product()
    return time.perf_counter() - started


def measure(size, rounds, data, dtype):
    """All in turn, `rounds` times -> {(scheme, who): [seconds per step]}; who is OURS, a peer at its setting, or PRODUCTS."""
    rivals = {}
    for scheme in SCHEMES:
        for name, (make, attentions) in peers(scheme, size).items():
            peer = fastest(make, attentions, size, data)
            rivals[scheme, f"{name} ({peer.setting})"] = peer
            print(f"{scheme}: {name} is fastest with {peer.setting}", file=sys.stderr)
    bounds = [products(size, kind) for kind in (torch.bfloat16, torch.float32)]
    largest = size["batch_size"] * size["train_len"] * 4 * size["dim"] * dtype.itemsize  # between the MLP's two layers
    # The `none` step with one of the speed paths replaced by what it stands in for.
    without = {"torch's fused attention in place of strips": lambda: patch.object(tiny_lm, "attend", fused)}
    if keep_freed_memory():
        without["freed memory given back"] = lambda: memory_given_back(largest)
    seconds = {}
    for turn in range(rounds):
        print(f"round {turn + 1} of {rounds}", file=sys.stderr)
        ours = [*SCHEMES, *SCHEMES][turn % len(SCHEMES):][:len(SCHEMES)]  # another first each time
        for scheme in ours:
            seconds.setdefault((scheme, OURS), []).extend(our_steps(scheme, 2, size, data, dtype))
        for rival in rivals:
            seconds.setdefault(rival, []).extend(rivals[rival].steps(2, size, data))
        for name, change in without.items():
            with change():
                seconds.setdefault(("none", f"{OURS}, {name}"), []).extend(our_steps("none", 2, size, data, dtype))
        seconds.setdefault(("none", PRODUCTS), []).append(min(map(seconds_of, bounds)))
    return seconds


def table_rows(seconds, tokens):
    """{(scheme, who): [seconds]} -> a row for each. A ratio is the median over rounds of that in the round, as machines drift."""
    median = {key: statistics.median(values) for key, values in seconds.items()}
    rounds, rows = len(seconds["none", PRODUCTS]), []
    by_round = {key: [statistics.mean(values[len(values) * i // rounds:len(values) * (i + 1) // rounds]) for i in range(rounds)]
                for key, values in seconds.items()}
    ratio = lambda a, b: statistics.median(x / y for x, y in zip(by_round[a], by_round[b]))
    for (scheme, who), spent in median.items():
        row = dict(scheme=scheme, who=who, tokens_per_second=round(tokens / spent), ms_per_step=round(1000 * spent, 1),
                   times_best_peer=None, times_none=None, of_bound=None)
        if who.startswith(OURS):
            mine, none = (scheme, who), ("none", OURS)
            best = min((key for key in median if key[0] == scheme and not key[1].startswith((OURS, PRODUCTS))), key=median.get)
            row |= dict(times_best_peer=round(ratio(best, mine), 2), times_none=round(ratio(mine, none), 3), of_bound=round(ratio(("none", PRODUCTS), mine), 2))
        rows.append(row)
    return rows


def table(rows):
    """Ours beside the best peer, scheme by scheme; then what the bound and the speed paths are worth."""
    lines = []
    for scheme in SCHEMES:
        ours = next(row for row in rows if row["scheme"] == scheme and row["who"] == OURS)
        best = min((row for row in rows if row["scheme"] == scheme and not row["who"].startswith((OURS, PRODUCTS))),
                   key=lambda row: row["ms_per_step"])
        lines.append([scheme, f"{ours['tokens_per_second']:,}", f"{ours['times_none']:.2f}", f"{ours['of_bound']:.2f}",
                      f"{ours['times_best_peer']:.2f}", f"{best['tokens_per_second']:,}", best["who"]])
    header = ["scheme", "tokens/s", "step / step of `none`", "of the bound", "times the best peer", "its tokens/s", "which"]
    text = [markdown_table(header, lines)]
    for row in rows:
        if row["who"] == PRODUCTS:
            text.append(f"The bound, {PRODUCTS} of a `none` step: {row['tokens_per_second']:,} tokens/s.")
        elif row["who"].startswith(OURS + ", "):
            text.append(f"A `none` step with {row['who'].removeprefix(OURS + ', ')}: {row['times_none']:.2f} times as long.")
    return "\n".join(text) + "\n"


def main():
    parser = Parser(__doc__)
    parser.add_argument("--rounds", type=whole(1), default=10, help="turns of each, of two steps (default: 10)")
    parser.add_argument("--out", default="results", help="folder for bench_train.* (default: results)")
    parser.add_argument("--quick", action="store_true", help="a small network and two rounds, into results/quick/")
    if "--quick" in sys.argv[1:]:
        parser.set_defaults(rounds=2, out="results/quick")
    args = parser.parse_args()
    size = dict(batch_size=32, train_len=256, dim=128, n_layer=4, n_head=4)
    if args.quick:
        size = dict(batch_size=16, train_len=64, dim=64, n_layer=2, n_head=4)
    try:
        out, corpus, dtype = writable_folder(args.out), load_corpus("numpy"), pick_dtype("auto", CPU)
    except ValueError as error:
        parser.error(str(error))
    warnings.filterwarnings("ignore")
    about = provenance(corpus, CPU, dtype)
    seconds = measure(size, args.rounds, corpus.train, dtype)
    rows = table_rows(seconds, size["batch_size"] * size["train_len"])
    write_json(out / "bench_train.json", about | dict(size=size, rounds=args.rounds, rows=rows, seconds={
        f"{scheme}: {who}": [round(value, 5) for value in values] for (scheme, who), values in seconds.items()}))
    write_csv(out / "bench_train.csv", rows)
    text = table(rows)
    write_file(out / "bench_train.md", text)
    print(text + f"\nwrote {out / 'bench_train'}.json .csv .md")


if __name__ == "__main__":
    run(main)
