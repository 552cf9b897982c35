"""Time and memory of a forward pass at long context: one attention layer, and the whole language model with its loss.

    pip install -r bench/requirements.txt
    python bench/long_context.py           # about 10 minutes a round on two CPU cores
    python bench/long_context.py --quick   # half a minute, short lengths, into results/quick/

On the CPU in float32, one sequence of T tokens. The layers stand beside the textbook formula, which holds all scores and
the bias as (H, T, T) matrices; the models beside transformers and x-transformers, with fused attention where they have it.
Each measurement is a process of its own, all in turn, `--rounds` times; the numbers are medians. Memory is the peak of the
first pass over what the process held before, time the median of up to five more where a pass takes less than 5 s. The memory
allocator is set as the drivers set it, for all. What does not fit, or takes over half a minute, is not tried at the next T. Writes bench_long.json, .csv, .md and .png into --out.
"""
import multiprocessing
import statistics
import sys
import time
import warnings
from pathlib import Path

sys.path[:0] = [str(Path(__file__).parent.parent), str(Path(__file__).parent)]
import numpy as np
import torch
from tqdm import tqdm

import score
from common import Parser, distinct, keep_freed_memory, provenance, run, whole, writable_folder, write_file, write_json
from data.corpus import load_corpus
from peers import peers
from pos_alibi import alibi_bias, alibi_slopes
from pos_rope import apply_rope, rope_cos_sin
from report import markdown_table, plot_long_context, write_csv
from tiny_lm import SCHEMES, TinyLM, attend, parse_scheme, reason

OURS, TEXTBOOK = "this repository", "textbook formula"
DIM, N_HEAD, N_LAYER = 128, 4, 4
LAYERS = ("rope", "alibi", "none")  # learned and sin add nothing to the layer of none
PATIENCE = 30  # seconds for a process


def textbook(layer, scheme, x):
    """The layer's formula with everything written out: scores, bias and mask as (H, T, T)."""
    B, T, C = x.shape
    where = torch.arange(T)
    q, k, v = layer.qkv(x).view(B, T, 3, N_HEAD, C // N_HEAD).permute(2, 0, 3, 1, 4)
    if scheme == "rope":
        cos, sin = rope_cos_sin(where, C // N_HEAD)
        q, k = apply_rope(q, cos, sin), apply_rope(k, cos, sin)
    scores = q @ k.transpose(-1, -2) / (C // N_HEAD) ** 0.5  # (B, H, T, T)
    if scheme == "alibi":
        scores = scores + alibi_bias(alibi_slopes(N_HEAD), where, where)
    scores = scores.masked_fill(torch.ones(T, T, dtype=torch.bool).triu(1), float("-inf"))
    return layer.out((scores.softmax(-1) @ v).transpose(1, 2).reshape(B, T, C))


def forward_pass(what, scheme, who, longest):
    """A function of T that makes one forward pass."""
    torch.manual_seed(0)
    if what == "layer":
        layer = parse_scheme(scheme)[0](DIM, N_HEAD, attend=attend)
        return lambda T: (layer(torch.randn(1, T, DIM)) if who == OURS else textbook(layer, scheme, torch.randn(1, T, DIM)))
    size = dict(dim=DIM, n_layer=N_LAYER, n_head=N_HEAD, train_len=longest)
    if who == OURS:
        model = TinyLM(scheme, DIM, N_LAYER, N_HEAD, max_len=longest)
    else:
        make, attentions = peers(scheme, size)[who]
        model = make(attentions[0])
    model.eval()
    text = np.random.default_rng(0).integers(0, 256, longest + 1, np.uint8)[None]
    return lambda T: score.window_nats(lambda ids: model(ids.long()), text[:, :T], text[:, 1:T + 1], T)


def memory(key):
    """A field of /proc/self/status in bytes; None where there is no such file."""
    try:
        lines = Path("/proc/self/status").read_text().splitlines()
    except OSError:
        return None
    return next(int(line.split()[1]) * 1024 for line in lines if line.startswith(key + ":"))


def measure_here(pipe, what, scheme, who, T, spare):
    """In a process of its own: send dict(seconds, extra, total), or a note."""
    warnings.filterwarnings("ignore")
    keep_freed_memory()
    try:
        if spare:  # so that what does not fit is refused, instead of the whole machine slowing to a crawl
            import resource
            resource.setrlimit(resource.RLIMIT_AS, (memory("VmSize") + spare,) * 2)
        with torch.no_grad():
            forward = forward_pass(what, scheme, who, T)
            forward(64)
            held = memory("VmRSS")
            if held:
                Path("/proc/self/clear_refs").write_text("5")  # the high-water mark starts anew
            seconds, peak = [], None
            while len(seconds) < 6 and sum(seconds) < 5:
                started = time.perf_counter()
                forward(T)
                seconds.append(time.perf_counter() - started)
                if len(seconds) == 1:
                    peak = memory("VmHWM")
            pipe.send(dict(seconds=statistics.median(seconds[1:] or seconds), extra=peak and peak - held, total=peak))
    except Exception as error:
        pipe.send("out of memory" if isinstance(error, MemoryError) or "memory" in str(error) else reason(error))


def measure(context, *cell):
    """One measurement: dict(seconds, extra, total), or a note."""
    here, there = context.Pipe()
    process = context.Process(target=measure_here, args=(there, *cell), daemon=True)
    process.start()
    there.close()
    try:
        return here.recv() if here.poll(PATIENCE) else f"over {PATIENCE} s"
    except EOFError:  # killed, as systems do when memory runs out
        process.join()
        return f"process ended with {process.exitcode}"
    finally:
        process.kill()
        process.join()


def main():
    parser = Parser(__doc__)
    parser.add_argument("--lengths", nargs="+", type=whole(64), metavar="T", default=[1024, 2048, 4096, 8192, 16384, 32768],
                        help="tokens (default: 1024 to 32768)")
    parser.add_argument("--rounds", type=whole(1), default=2, help="turns of each (default: 2)")
    parser.add_argument("--out", default="results", help="folder for bench_long.* (default: results)")
    parser.add_argument("--quick", action="store_true", help="lengths 512 and 1024, one round, into results/quick/")
    if "--quick" in sys.argv[1:]:
        parser.set_defaults(lengths=[512, 1024], rounds=1, out="results/quick")
    args = parser.parse_args()
    try:
        distinct("--lengths", args.lengths)
        out, about = writable_folder(args.out), provenance(load_corpus("numpy"), torch.device("cpu"), torch.float32)
    except ValueError as error:
        parser.error(str(error))
    about["corpus"] = "none: random bytes"
    contenders = [("layer", scheme, who) for scheme in LAYERS for who in (OURS, TEXTBOOK)]
    for scheme in SCHEMES:
        names = peers(scheme, dict(dim=DIM, n_layer=N_LAYER, n_head=N_HEAD, train_len=64))
        contenders += [("model", scheme, who) for who in (OURS, *names)]
    context = multiprocessing.get_context("forkserver")  # packages are imported once; each child is a fork of that process
    context.set_forkserver_preload(["torch", "matplotlib.pyplot", "x_transformers"] + [
        f"transformers.models.{name}.modeling_{name}" for name in ("gpt2", "llama", "bloom", "mpt")])
    try:
        spare = next(int(line.split()[1]) * 1024 for line in open("/proc/meminfo") if line.startswith("MemAvailable")) * 9 // 10
    except OSError:
        spare = None

    rows, given_up = [], {}
    lengths = sorted(args.lengths)
    with tqdm(total=len(lengths) * args.rounds * len(contenders), unit="run", mininterval=0.1 if sys.stderr.isatty() else 30) as bar:
        for T in lengths:
            found = {contender: [] for contender in contenders}
            for _ in range(args.rounds):
                for contender in contenders:
                    if contender not in given_up:
                        result = measure(context, *contender, T, spare)
                        if isinstance(result, str):
                            given_up[contender] = f"{result} at {T}"
                        else:
                            found[contender].append(result)
                    bar.update()
            for contender, results in found.items():
                row = dict(zip(("what", "scheme", "who"), contender)) | dict(T=T, seconds=None, extra_mb=None, total_mb=None, note="")
                if contender in given_up:
                    row["note"] = given_up[contender]
                else:
                    middle = {key: statistics.median(r[key] for r in results) for key in results[0] if results[0][key] is not None}
                    row["seconds"] = round(middle["seconds"], 5)
                    if "extra" in middle:
                        row |= dict(extra_mb=round(middle["extra"] / 2**20, 1), total_mb=round(middle["total"] / 2**20, 1))
                rows.append(row)
    write_json(out / "bench_long.json", about | dict(dim=DIM, n_head=N_HEAD, n_layer=N_LAYER, rounds=args.rounds, rows=rows))
    write_csv(out / "bench_long.csv", rows)
    text = tables(rows, lengths)
    write_file(out / "bench_long.md", text)
    plot_long_context(out / "bench_long.png", rows)
    print(text + f"\nwrote {out / 'bench_long'}.json .csv .md .png")


def tables(rows, lengths):
    """Milliseconds and peak memory by T, for the layers and for the models."""
    text = []
    for what, title in (("layer", f"One attention layer, width {DIM}, {N_HEAD} heads, one sequence, float32, forward:"),
                        ("model", f"The whole model ({N_LAYER} blocks) and its loss:")):
        lines = []
        for scheme, who in dict.fromkeys((row["scheme"], row["who"]) for row in rows if row["what"] == what):
            mine = {row["T"]: row for row in rows if (row["what"], row["scheme"], row["who"]) == (what, scheme, who)}
            lines.append([scheme, who] + [
                "–" if mine[T]["seconds"] is None
                else f"{1000 * mine[T]['seconds']:,.0f} ms" + ("" if mine[T]["extra_mb"] is None else f", {mine[T]['extra_mb']:,.0f} MB")
                for T in lengths])
        text.append(title + "\n\n" + markdown_table(["scheme", "who"] + [f"T = {T:,}" for T in lengths], lines))
    cell = {(row["what"], row["scheme"], row["who"], row["T"]): row for row in rows}
    both = [T for T in lengths if cell["layer", "alibi", TEXTBOOK, T]["seconds"] and cell["layer", "alibi", OURS, T]["extra_mb"]]
    for T in both[-1:]:
        ours, book, none = (cell["layer", scheme, who, T] for scheme, who in (("alibi", OURS), ("alibi", TEXTBOOK), ("none", OURS)))
        text.append(f"At T = {T:,} the textbook formula takes {book['seconds'] / ours['seconds']:.0f} times as long as the ALiBi layer, "
                    f"whose memory is {ours['extra_mb'] / none['extra_mb']:.2f} times that of the `none` layer.")
    totals = [cell["model", scheme, OURS, lengths[-1]]["total_mb"] for scheme in SCHEMES]
    if all(totals):
        text.append(f"At T = {lengths[-1]:,} a process with a model of this repository holds at most {max(totals):,.0f} MB in all.")
    notes = sorted({f"{row['scheme']} {row['what']}, {row['who']}: {row['note']}" for row in rows if row["note"]})
    return "\n".join(text) + ("\n– " + "; ".join(notes) + ".\n" if notes else "")


if __name__ == "__main__":
    run(main)
