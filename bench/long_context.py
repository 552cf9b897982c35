"""Time and memory of a forward pass at long context: one attention layer, and the whole model.

    pip install -r bench/requirements.txt
    python bench/long_context.py           # about 10 minutes a round on two CPU cores
    python bench/long_context.py --quick   # half a minute, short lengths, into results/quick/

On the CPU in float32, one sequence of T tokens. The layers stand beside the textbook formula, which
holds all scores and the bias as (H, T, T) matrices. The models, with their loss, stand beside
transformers and x-transformers, with fused attention where they have it. Each measurement is a
process of its own, all in turn, `--rounds` times; the numbers are medians. Memory is the peak of
the first pass over what the process held before, time the median of up to five more where a pass
takes less than 5 s. The memory allocator is set as the commands set it, for all. What does not fit,
or takes over half a minute, is not tried at the next T. Writes bench_long.json, .csv, .md and .png
into --out.
"""

import functools
import multiprocessing
import statistics
import sys
import time
import warnings
from pathlib import Path
from types import SimpleNamespace
from typing import NamedTuple

sys.path.insert(0, str(Path(__file__).parent.parent))
import numpy as np
import torch

from attend import attend
from bench.peers import peers
from lab import command, score
from lab.command import int_in_range, no_duplicates, option, switch
from lab.files import writable_folder, write_atomically, write_csv, write_json
from lab.machine import keep_freed_memory, out_of_memory
from lab.plots import plot_long_context
from lab.provenance import stamp
from lab.rows import distinct, select
from lab.runs import Run
from lab.tables import markdown_table
from pos_alibi import alibi_bias, alibi_slopes
from pos_rope import apply_rope, rope_cos_sin, rope_frequencies
from schemes.scheme import SCHEMES, parse_scheme, reason
from tiny_lm import Attention

OURS, TEXTBOOK = "this repository", "textbook formula"
DIM, N_HEAD, N_LAYER = 128, 4, 4
LAYERS = ("rope", "alibi", "none")  # learned and sin add nothing to the layer of none
PATIENCE = 30  # seconds for a process
MB = 2**20
RANDOM_BYTES = SimpleNamespace(name="none: random bytes", sha256="")
QUICK = dict(lengths=[512, 1024], rounds=1, out="results/quick")
PRELOADED = ("torch", "matplotlib.pyplot", "x_transformers") + tuple(
    f"transformers.models.{name}.modeling_{name}" for name in ("gpt2", "llama", "bloom", "mpt")
)


class Case(NamedTuple):
    """What is measured: "layer" or "model", of which scheme, by whom."""

    what: str
    scheme: str
    who: str


def all_cases():
    cases = [Case("layer", scheme, who) for scheme in LAYERS for who in (OURS, TEXTBOOK)]
    for scheme in SCHEMES:
        cases += [Case("model", scheme, who) for who in (OURS, *peers(scheme, run_of(64)))]
    return cases


def run_of(longest):
    """The size of the models, which read texts up to `longest` tokens."""
    size = dict(dim=DIM, n_layer=N_LAYER, n_head=N_HEAD)
    return Run(train_lens=(longest,), max_len=longest, **size)


# In a process of its own


def new_layer(scheme):
    """One attention layer of this repository, with weights drawn at random."""
    scheme = parse_scheme(scheme)
    if scheme.cls is None:
        return Attention(DIM, N_HEAD)
    return scheme.build(DIM, N_HEAD, attend=attend)


def textbook(layer, scheme, x):
    """The layer's formula with everything written out: scores, bias and mask as (H, T, T)."""
    B, T, C = x.shape
    D, positions = C // N_HEAD, torch.arange(T)
    q, k, v = layer.qkv(x).view(B, T, 3, N_HEAD, D).permute(2, 0, 3, 1, 4)  # each (B, H, T, D)
    if scheme == "rope":
        cos, sin = rope_cos_sin(positions, rope_frequencies(D))  # each (T, D/2)
        q, k = apply_rope(q, cos, sin), apply_rope(k, cos, sin)
    scores = q @ k.transpose(-1, -2) / D**0.5  # (B, H, T, T)
    if scheme == "alibi":
        scores = scores + alibi_bias(alibi_slopes(N_HEAD), positions, positions)
    scores = scores.masked_fill(torch.ones(T, T, dtype=torch.bool).triu(1), float("-inf"))
    return layer.out((scores.softmax(-1) @ v).transpose(1, 2).reshape(B, T, C))


def forward_pass(case, longest):
    """A function of T, at most `longest`, that makes one forward pass."""
    torch.manual_seed(0)
    if case.what == "layer":
        layer = new_layer(case.scheme)
        if case.who == TEXTBOOK:
            layer = functools.partial(textbook, layer, case.scheme)
        return functools.partial(pass_of_layer, layer)
    run = run_of(longest)
    if case.who == OURS:
        model = run.new_model(scheme=case.scheme)
    else:
        make, attentions = peers(case.scheme, run)[case.who]
        model = make(attentions[0])
    text = np.random.default_rng(0).integers(0, 256, longest + 1, np.uint8)
    return functools.partial(pass_of_model, model.eval(), text[None])


def pass_of_layer(layer, T):
    layer(torch.randn(1, T, DIM))


def pass_of_model(model, text, T):
    """A model's nll of all T targets of a text, uint8 (1, T + 1 or more)."""
    score.window_nats(lambda ids: model(ids.long()), text[:, :T], text[:, 1 : T + 1], T)


def memory(key, path="/proc/self/status"):
    """A field of this file in bytes; None where there is no such file."""
    try:
        lines = Path(path).read_text().splitlines()
    except OSError:
        return None
    return next(int(line.split()[1]) * 1024 for line in lines if line.startswith(key + ":"))


def measure_here(pipe, case, T, spare):
    """Send dict(seconds, extra, total), in bytes (None if unknown), or why there are none."""
    warnings.filterwarnings("ignore")
    keep_freed_memory()
    try:
        if spare:  # so that what does not fit is refused, and does not slow the whole machine down
            import resource

            resource.setrlimit(resource.RLIMIT_AS, (memory("VmSize") + spare,) * 2)
        with torch.no_grad():
            pipe.send(time_and_memory(forward_pass(case, T), T))
    except Exception as error:
        pipe.send("out of memory" if out_of_memory(error) else reason(error))


def time_and_memory(forward, T):
    forward(64)
    before = memory("VmRSS")
    if before:
        Path("/proc/self/clear_refs").write_text("5")  # the high-water mark starts anew
    seconds, peak = [], None
    while len(seconds) < 6 and sum(seconds) < 5:
        started = time.perf_counter()
        forward(T)
        seconds.append(time.perf_counter() - started)
        if len(seconds) == 1:
            peak = memory("VmHWM")
    extra = peak and peak - before
    return dict(seconds=statistics.median(seconds[1:] or seconds), extra=extra, total=peak)


# All processes in turn


def measure(context, case, T, spare):
    """One measurement in a new process: dict(seconds, extra, total), or why there is none."""
    receiver, sender = context.Pipe()
    child = sender, case, T, spare
    process = context.Process(target=measure_here, args=child, daemon=True)
    process.start()
    sender.close()
    try:
        return receiver.recv() if receiver.poll(PATIENCE) else f"over {PATIENCE} s"
    except EOFError:  # killed, as systems do when memory runs out
        process.join()
        return f"process ended with {process.exitcode}"
    finally:
        process.kill()
        process.join()


def measure_all(cases, lengths, rounds):
    """All in turn, `rounds` times at each length -> a row for each case and length."""
    context = multiprocessing.get_context("forkserver")  # packages are imported once, in there
    context.set_forkserver_preload(list(PRELOADED))
    available = memory("MemAvailable", "/proc/meminfo")
    spare = available and available * 9 // 10
    rows, given_up = [], {}
    with command.progress_bar(len(lengths) * rounds * len(cases), "run") as bar:
        for T in lengths:
            results = {case: [] for case in cases}
            for case in cases * rounds:
                if case not in given_up:
                    result = measure(context, case, T, spare)
                    if isinstance(result, str):
                        given_up[case] = f"{result} at {T}"
                    else:
                        results[case].append(result)
                bar.update()
            rows += [row_of(case, T, results[case], given_up.get(case, "")) for case in cases]
    return rows


def row_of(case, T, results, note):
    """The medians of results, or the note that says why there are none."""
    row = case._asdict() | dict(T=T, seconds=None, extra_mb=None, total_mb=None, note=note)
    if note:
        return row
    row["seconds"] = round(statistics.median(result["seconds"] for result in results), 5)
    for key in ("extra", "total"):
        sizes = [result[key] for result in results]
        if sizes[0] is not None:
            row[f"{key}_mb"] = round(statistics.median(sizes) / MB, 1)
    return row


# Tables


def tables(rows):
    """Milliseconds and peak memory by T, for the layers and for the models, and what they say."""
    size = f"width {DIM}, {N_HEAD} heads"
    layers = f"One attention layer, {size}, one sequence, float32, forward:"
    models = f"The whole model ({N_LAYER} blocks) and its loss:"
    text = [
        f"{layers}\n\n{table(select(rows, what='layer'))}",
        f"{models}\n\n{table(select(rows, what='model'))}",
        *sentences(rows),
    ]
    noted = [row for row in rows if row["note"]]
    notes = {f"{row['scheme']} {row['what']}, {row['who']}: {row['note']}" for row in noted}
    return "\n".join(text) + (f"\n– {'; '.join(sorted(notes))}.\n" if notes else "")


def table(rows):
    lines, lengths = [], distinct(rows, "T")
    for scheme, who in distinct(rows, "scheme", "who"):
        cells = [cell_text(row) for row in select(rows, scheme=scheme, who=who)]
        lines.append([scheme, who, *cells])
    return markdown_table(["scheme", "who", *(f"T = {T:,}" for T in lengths)], lines)


def cell_text(row):
    if row["seconds"] is None:
        return "–"
    text = f"{1000 * row['seconds']:,.0f} ms"
    return text if row["extra_mb"] is None else f"{text}, {row['extra_mb']:,.0f} MB"


def sentences(rows):
    """ALiBi beside the formula at the largest T that both can, and how much a process holds."""
    by_case = {(row["what"], row["scheme"], row["who"], row["T"]): row for row in rows}
    lengths, text = distinct(rows, "T"), []
    for T in reversed(lengths):
        ours, book = (by_case["layer", "alibi", who, T] for who in (OURS, TEXTBOOK))
        if book["seconds"] and ours["extra_mb"]:
            none = by_case["layer", "none", OURS, T]
            slower, more = book["seconds"] / ours["seconds"], ours["extra_mb"] / none["extra_mb"]
            text.append(
                f"At T = {T:,} the textbook formula takes {slower:.0f} times as long as the ALiBi "
                f"layer, whose memory is {more:.2f} times that of the `none` layer."
            )
            break
    T = lengths[-1]
    totals = [by_case["model", scheme, OURS, T]["total_mb"] for scheme in SCHEMES]
    if all(totals):
        told = f"At T = {T:,} a process with a model of this repository holds at most"
        text.append(f"{told} {max(totals):,.0f} MB in all.")
    return text


# The command


def arguments(words):
    parser = command.Parser(__doc__)
    lengths, more = [1024, 2048, 4096, 8192, 16384, 32768], dict(nargs="+", metavar="T")
    option(parser, "--lengths", int_in_range(64), lengths, "tokens", **more)
    option(parser, "--rounds", int_in_range(1), 2, "turns of each")
    option(parser, "--out", str, "results", "folder for bench_long.*")
    switch(parser, "--quick", "lengths 512 and 1024, one round, into results/quick/")
    if "--quick" in words:
        parser.set_defaults(**QUICK)
    return parser, parser.read(words)


def main():
    parser, args = arguments(sys.argv[1:])
    try:
        no_duplicates("--lengths", args.lengths)
        out = writable_folder(args.out)
    except ValueError as error:
        parser.error(error)
    line = command.command_line(sys.argv)
    provenance = stamp(line, RANDOM_BYTES, torch.device("cpu"), torch.float32)
    rows = measure_all(all_cases(), sorted(args.lengths), args.rounds)
    size = dict(dim=DIM, n_head=N_HEAD, n_layer=N_LAYER)
    about = dict(provenance=provenance, **size, rounds=args.rounds)
    write_json(out / "bench_long.json", about | dict(rows=rows))
    write_csv(out / "bench_long.csv", rows)
    text = tables(rows)
    write_atomically(out / "bench_long.md", text)
    plot_long_context(out / "bench_long.png", rows)
    print(text + f"\nwrote {out / 'bench_long'}.json .csv .md .png")


if __name__ == "__main__":
    command.run(main)
