"""Perplexity by length: models trained at one length, read at longer ones.

    python extrapolation_test.py           # every checkpoint of train_compare.py; about 3 minutes for five on two CPU cores
    python extrapolation_test.py --quick   # those of train_compare.py --quick, some seconds

Writes extrapolation.json, .csv, .md and .png into --out. Two protocols (score.py has them in full): `span`, windows
without overlap, and `fixed`, the same targets with more and more text before them, from which to argue.
"""
import sys
from pathlib import Path

import numpy as np
from tqdm import tqdm

import score
from common import Parser, distinct, pick_device, pick_dtype, provenance, run, whole, writable_folder, write_file, write_json
from data.corpus import load_corpus
from report import buckets, markdown_table, mean_std, plot_extrapolation, spread, write_csv
from tiny_lm import SCHEMES, load_model, reason
from train_compare import checkpoint_path

QUICK = dict(out="results/quick", span_bytes=16384, windows=32)
# What must be the same of all models in one table.
SAME = ("steps", "batch_size", "train_len", "dim", "n_layer", "n_head", "lr", "adam_lr", "dtype", "sha256", "held_out")


def arguments():
    parser = Parser(__doc__)
    what = parser.add_argument_group("what to measure")
    what.add_argument("--schemes", nargs="+", metavar="SCHEME", help="only these (default: every checkpoint there is)")
    what.add_argument("--seeds", nargs="+", type=whole(0), metavar="N", help="only these (default: every seed there is)")
    what.add_argument("--lengths", nargs="+", type=whole(1), metavar="N",
                      help="in bytes (default: 1, 2, 4 and 8 times the training length: 256 512 1024 2048)")
    what.add_argument("--protocol", choices=("span", "fixed", "both"), default="both", help="(default: both)")
    what.add_argument("--span-bytes", type=whole(1), default=score.SPAN_BYTES,
                      help=f"span: how many held-out bytes are scored (default: {score.SPAN_BYTES})")
    what.add_argument("--windows", type=whole(2), default=128,
                      help=f"fixed: how many windows, with {score.K} targets each (default: 128)")
    where = parser.add_argument_group("where to read, run and write")
    where.add_argument("--data", help="text to read (default: the held-out part of what the models were trained on)")
    where.add_argument("--device", default="auto", help="auto (cuda, then mps, then cpu), cpu, cuda, cuda:1, mps")
    where.add_argument("--dtype", choices=("auto", "bf16", "fp32"), default="fp32",
                       help="(default: fp32, whatever the training was in)")
    where.add_argument("--out", default="results", help="folder with checkpoints/, and for the results (default: results)")
    where.add_argument("--quick", action="store_true", help="less text, in results/quick/; other flags still count")
    if "--quick" in sys.argv[1:]:
        parser.set_defaults(**QUICK)
    return parser, parser.parse_args()


def find_checkpoints(out, schemes, seeds):
    """The wanted checkpoints -> [(model, settings)], in the order of SCHEMES. ValueError if none, or of unlike training."""
    found = []
    patterns = [checkpoint_path(out, scheme, seed).name if scheme else f"*-seed{seed}.pt"
                for scheme in schemes or [None] for seed in seeds or ["*"]]
    for path in sorted({path for pattern in patterns for path in (Path(out) / "checkpoints").glob(pattern)}):
        model, saved = load_model(path)
        settings = saved["settings"]
        if (schemes is None or settings["scheme"] in schemes) and (seeds is None or settings["seed"] in seeds):
            found.append((model, settings))
    missing = [s for s in schemes or () if s not in {settings["scheme"] for _, settings in found}]
    if missing or not found:
        flags = f" --schemes {' '.join(schemes)}" if set(missing) - set(SCHEMES) else ""
        flags += "" if out == "results" else " --quick" if out == QUICK["out"] else f" --out {out}"
        raise ValueError(f"no checkpoint{' of ' + ', '.join(missing) if missing else ''} in {Path(out) / 'checkpoints'}; "
                         f"train first: python train_compare.py{flags}")
    first = found[0][1]
    for _, settings in found:
        for key in SAME:
            if settings[key] != first[key]:
                raise ValueError(f"{settings['scheme']} seed {settings['seed']} was trained with {key} {settings[key]}, "
                                 f"{first['scheme']} seed {first['seed']} with {first[key]}; run train_compare.py again for "
                                 "all, or choose with --schemes and --seeds")
    place = {scheme: i for i, scheme in enumerate(schemes or SCHEMES)}
    found.sort(key=lambda item: (place.get(item[1]["scheme"], len(place)), item[1]["scheme"], item[1]["seed"]))
    return found


def measure(models, data, lengths, protocols, span_bytes, windows, device):
    """[(model, settings)] -> a row per scheme, seed, protocol and length, and {scheme: [nats by position, per seed]}."""
    rows, by_position = [], {}
    longest = max(lengths)
    stretch = score.span_length(lengths, span_bytes, len(data)) if "span" in protocols else 0
    ends = score.fixed_ends(len(data), longest, windows) if "fixed" in protocols else ()
    bar = tqdm(total=len(models) * len(lengths) * len(protocols), unit="cell", mininterval=0.1 if sys.stderr.isatty() else 30)
    for model, settings in models:
        for protocol in protocols:
            for n in lengths:
                bar.set_description(f"{settings['scheme']}, seed {settings['seed']}, {protocol} {n}", refresh=False)
                row = dict(scheme=settings["scheme"], seed=settings["seed"], protocol=protocol, n=n, nll=None, ppl=None,
                           low=None, high=None, targets=0, note="")
                try:
                    nats = (score.span(model, data, n, stretch, device) if protocol == "span"
                            else score.fixed(model, data, n, ends, device))
                    row |= score.scores(nats)
                    if protocol == "span" and n == longest and row["ppl"] is not None:
                        by_position.setdefault(settings["scheme"], []).append(nats.mean(axis=0))
                except Exception as error:  # whatever a scheme raises at a length, its other cells and the other rows go on
                    limit = getattr(model.position, "max_len", None)
                    row["note"] = (f"max_len {limit}" if isinstance(limit, int) and limit < n
                                   else str(error) if isinstance(error, ValueError)
                                   else "out of memory" if "memory" in str(error) else reason(error))
                rows.append(row)
                bar.update()
    bar.close()
    return rows, by_position


def summarise(rows):
    """Rows -> one dict per scheme, protocol and length: over seeds mean ± std, of one seed its bootstrap interval."""
    cells = {}
    for row in rows:
        cells.setdefault((row["scheme"], row["protocol"], row["n"]), []).append(row)
    summary = []
    for (scheme, protocol, n), seeds in cells.items():
        done = [row for row in seeds if row["ppl"] is not None]
        cell = dict(scheme=scheme, protocol=protocol, n=n, seeds=[row["seed"] for row in done], ppl=None, std=None,
                    low=None, high=None, note="; ".join(sorted({row["note"] for row in seeds if row["note"]})))
        if done:
            mean, std = mean_std([row["ppl"] for row in done])
            low, high = (mean - std, mean + std) if len(done) > 1 else (done[0]["low"], done[0]["high"])
            cell |= dict(ppl=round(mean, 4), std=round(std, 4), low=round(low, 4), high=round(high, 4))
        summary.append(cell)
    return summary


def tables(rows, summary, lengths, protocols, train_len):
    """The wide tables, one per protocol, as one Markdown text."""
    titles = dict(span="Span protocol: windows of n without overlap. A longer window has fewer targets with little before them, "
                       "so a sound scheme falls a little.",
                  fixed=f"Fixed-target protocol: the same {score.K} last targets of each window, with n bytes before the last. "
                        "Falling: it uses far context. Flat: it ignores it. Rising: it breaks.")
    text = []
    for protocol in protocols:
        lines = []
        for scheme in dict.fromkeys(row["scheme"] for row in rows):
            line, ppl = [scheme], {}
            for n in lengths:
                cells = [row for row in rows if (row["scheme"], row["protocol"], row["n"]) == (scheme, protocol, n)]
                summed = next(c for c in summary if (c["scheme"], c["protocol"], c["n"]) == (scheme, protocol, n))
                ppl[n] = summed["ppl"]
                line.append(spread([row["ppl"] for row in cells]) if summed["ppl"] is not None else summed["note"])
            if protocol == "fixed":
                usable = score.usable_length(ppl, train_len)
                line.append("–" if usable is None else f"≥ {usable}" if usable == lengths[-1] else usable)
            lines.append(line)
        header = ["perplexity at n ="] + lengths + (["usable length"] if protocol == "fixed" else [])
        text.append(titles[protocol] + "\n\n" + markdown_table(header, lines))
    seeds = {}
    for row in rows:
        seeds.setdefault(row["scheme"], {})[str(row["seed"])] = True  # a dict for its order
    named = {scheme: ", ".join(each) for scheme, each in seeds.items()}
    which = named[rows[0]["scheme"]]
    if len(set(named.values())) > 1:
        which = "; ".join(f"{scheme}: {each}" for scheme, each in named.items())
    spread_over = "Mean ± sample standard deviation over seeds" if "," in which else "Seed"
    note = f"Trained at {train_len} bytes. {spread_over} {which}."
    return note + "\n\n" + "\n".join(text)


def prepare(args):
    """Everything that can be wrong with the arguments is found here, before anything is measured or written."""
    for flag in ("schemes", "seeds", "lengths"):
        distinct(f"--{flag}", getattr(args, flag) or [])
    device = pick_device(args.device)
    dtype = pick_dtype(args.dtype, device)
    models = find_checkpoints(args.out, args.schemes, args.seeds)
    trained = models[0][1]
    try:
        corpus = load_corpus(trained["data"] if args.data is None else args.data)
    except ValueError as error:
        where = "; the models were trained on it, say with --data where it is now" if args.data is None else ""
        raise ValueError(f"{error}{where}") from None
    lengths = sorted(args.lengths or [trained["train_len"] * factor for factor in (1, 2, 4, 8)])
    corpus.require(max(lengths))
    protocols = ["span", "fixed"] if args.protocol == "both" else [args.protocol]
    if "span" in protocols:
        score.span_length(lengths, args.span_bytes, len(corpus.val))
    for model, _ in models:
        model.to(device, dtype)
    writable_folder(args.out)
    return device, dtype, models, corpus, lengths, protocols


def main():
    parser, args = arguments()
    try:
        device, dtype, models, corpus, lengths, protocols = prepare(args)
    except ValueError as error:
        parser.error(str(error))
    trained = models[0][1]
    if (corpus.sha256, corpus.held_out) != (trained["sha256"], trained["held_out"]):
        print(f"notice: the models were trained on other text, or another part of it, than this ({corpus.name}, SHA-256 "
              f"{corpus.sha256[:16]}…); what is held out here may have been seen in training, or may be of another kind")
    try:
        rows, by_position = measure(models, corpus.val, lengths, protocols, args.span_bytes, args.windows, device)
    except KeyboardInterrupt:
        print("\nstopped; nothing was written, earlier results are as they were", file=sys.stderr)
        raise
    summary = summarise(rows)
    by_position = {scheme: np.mean(nats, axis=0) for scheme, nats in by_position.items()}
    curves = {scheme: [round(nats, 4) for nats in buckets(values, 128)[1]] for scheme, values in by_position.items()}
    text, out = tables(rows, summary, lengths, protocols, trained["train_len"]), Path(args.out)
    write_json(out / "extrapolation.json", provenance(corpus, device, dtype) | {
        "trained": {key: trained[key] for key in SAME}, "summary": summary, "rows": rows,
        "by_position": {"window": max(lengths), "nats_in_equal_buckets": curves}})
    write_csv(out / "extrapolation.csv", rows)
    write_file(out / "extrapolation.md", text)
    drawn = [cell for cell in summary if cell["ppl"] is not None]
    if drawn:
        plot_extrapolation(out / "extrapolation.png", drawn, by_position, trained["train_len"])
    print("\n" + text)
    print(f"wrote {out / 'extrapolation'}.json .csv .md .png")


if __name__ == "__main__":
    run(main)
