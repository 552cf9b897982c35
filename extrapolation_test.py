"""Perplexity by length: models trained at one length, read at longer ones.

    python extrapolation_test.py           # every checkpoint of train_compare.py; about 3 minutes for five on two CPU cores
    python extrapolation_test.py --longer  # and every way to read them past their length, to 16 times it; 6 to 7 minutes
    python extrapolation_test.py --quick   # those of train_compare.py --quick, some seconds

Writes extrapolation.json, .csv (long), _wide.csv, _pairs.csv, .md and .png into --out; with --longer longer.* instead. Two
protocols (score.py has them in full): `span`, windows without overlap, and `fixed`, the same targets with more and more
text before them, from which to argue.
"""
import itertools
import math
import re
import sys
from pathlib import Path

import numpy as np
from tqdm import tqdm

import score
from common import (Parser, distinct, given, only_writer, pick_device, pick_dtype, positive, provenance, run, whole, writable_folder, write_file,
                    write_json)
from data.corpus import load_corpus
from pos_learned import BEYOND
from pos_rope import SCALINGS
from report import buckets, label, markdown_table, mean_std, plot_extrapolation, plot_longer, spread, usable_cell, write_csv
from tiny_lm import SCHEMES, TinyLM, load_model, reason, size_of
from train_compare import at_its_positions, checkpoint_path, ways, with_options

QUICK = dict(out="results/quick", span_bytes=16384, windows=32)
LONGER = dict(scaling=list(SCALINGS), beyond=["untrained", "clamp", "wrap", "interpolate"], times=(1, 2, 4, 8, 16),
              span_bytes=65536, windows=32, name="longer")  # and a window of the training length, see prepare
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
    past = parser.add_argument_group("ways to read a model past its training length, without training; each makes a row")
    past.add_argument("--scaling", nargs="+", choices=list(SCALINGS), metavar="KIND", default=["none"],
                      help=f"rope: {' '.join(SCALINGS)}; sin takes none and linear (default: none)")
    past.add_argument("--factor", type=positive, metavar="S",
                      help="of the scaling, at every length (default: n over the training length, column by column)")
    past.add_argument("--beyond", nargs="+", choices=list(BEYOND), metavar="POLICY", default=["untrained"],
                      help=f"learned: what becomes of rows that were not trained: {' '.join(BEYOND)} (default: untrained)")
    past.add_argument("--window", nargs="+", type=whole(0), metavar="N", default=[0],
                      help="every scheme as it is: a token sees the last N only; 0: all (default: 0)")
    past.add_argument("--longer", action="store_true",
                      help="all of them, at 1, 2, 4, 8 and 16 times the training length, on less text, for models of the plain "
                           "training; those trained in another way as they are; other flags still count")
    where = parser.add_argument_group("where to read, run and write")
    where.add_argument("--from", nargs="+", dest="sources", metavar="FOLDER",
                       help="folders whose checkpoints/ are read into one table (default: that of --out)")
    where.add_argument("--data", help="text to read (default: the held-out part of what the models were trained on)")
    where.add_argument("--device", default="auto", help="auto (cuda, then mps, then cpu), cpu, cuda, cuda:1, mps")
    where.add_argument("--dtype", choices=("auto", "bf16", "fp32"), default="fp32",
                       help="(default: fp32, whatever the training was in)")
    where.add_argument("--out", default="results", help="folder for the results (default: results)")
    where.add_argument("--name", default="extrapolation", help="what the files are called (default: extrapolation, or longer)")
    where.add_argument("--quick", action="store_true", help="less text, in results/quick/; other flags still count")
    parser.set_defaults(times=(1, 2, 4, 8))
    if "--longer" in sys.argv[1:]:
        parser.set_defaults(**LONGER)
    if "--quick" in sys.argv[1:]:
        parser.set_defaults(**QUICK)
    return parser, parser.parse_args()


def find_checkpoints(folders, schemes, seeds):
    """The wanted checkpoints -> [(model, settings)], in the order of SCHEMES. ValueError if none, or of unlike training."""
    found, paths = [], []
    patterns = [checkpoint_path(folder, scheme, seed) if scheme else Path(folder) / "checkpoints" / f"*-seed{seed}.pt"
                for folder in folders for scheme in schemes or [None] for seed in seeds or ["*"]]
    for path in dict.fromkeys(path for pattern in patterns for path in sorted(pattern.parent.glob(pattern.name))):
        model, saved = load_model(path)
        settings = saved["settings"]
        if (schemes is None or settings["scheme"] in schemes) and (seeds is None or settings["seed"] in seeds):
            found.append((model, settings))
            paths.append(path)
    for folder in folders:
        if len(folders) > 1 and not any(path.parent.parent == Path(folder) for path in paths):
            raise ValueError(f"--from {folder}: no checkpoint in {Path(folder) / 'checkpoints'}")
    absent = [seed for seed in seeds or () if found and seed not in {settings["seed"] for _, settings in found}]
    if absent:
        raise ValueError(f"--seeds {absent[0]}: no checkpoint of that seed in {', '.join(map(str, folders))}")
    missing = [s for s in schemes or () if s not in {settings["scheme"] for _, settings in found}]
    if missing or not found:
        flags = f" --schemes {' '.join(schemes)}" if set(missing) - set(SCHEMES) else ""
        flags += "" if folders == ["results"] else " --quick" if folders == [QUICK["out"]] else f" --out {folders[0]}"
        where = ", ".join(str(Path(folder) / "checkpoints") for folder in folders)
        raise ValueError(f"no checkpoint{' of ' + ', '.join(missing) if missing else ''} in {where}; "
                         f"train first: python train_compare.py{flags}")
    first, seen = found[0][1], set()
    for _, settings in found:
        for key in SAME:
            if settings[key] != first[key]:
                raise ValueError(f"{settings['scheme']} seed {settings['seed']} was trained with {key} {settings[key]}, "
                                 f"{first['scheme']} seed {first['seed']} with {first[key]}; run train_compare.py again for "
                                 "all, or choose with --schemes and --seeds")
        who = settings["scheme"], trained_as(settings), settings["seed"]
        if who in seen:
            raise ValueError(f"{', '.join(filter(None, who[:2]))}, seed {who[2]} is there twice, in {' and '.join(folders)}")
        seen.add(who)
    place = {scheme: i for i, scheme in enumerate(schemes or SCHEMES)}
    found.sort(key=lambda item: (place.get(item[1]["scheme"], len(place)), item[1]["scheme"], trained_as(item[1]), item[1]["seed"]))
    return found


def trained_as(settings):
    """What was special in the training, in words; nothing for the plain comparison."""
    words = []
    if settings["random_positions"]:
        words.append(f"trained at random positions below {settings['random_positions']}")
    if len(settings["train_lens"]) > 1:
        words.append(f"trained at {' '.join(map(str, settings['train_lens']))}")
    if settings["window"]:
        words.append(f"trained with window {settings['window']}")
    if settings["copies"]:
        words.append("trained with copies")
    if settings["finetuned_from"]:
        words.append(f"fine-tuned after {settings['finetuned_from']['train_len']}")
    return ", ".join(words)


def read_as(model, settings, options, window):
    """The same weights in a network whose scheme has these options, and with this window."""
    if not options and window == settings["window"]:
        return model
    changed = TinyLM(with_options(settings["scheme"], **options), **size_of(settings) | {"window": window})
    changed.load_state_dict(model.state_dict())
    weight = next(model.parameters())
    return changed.to(weight.device, weight.dtype).eval()


def measure(models, data, lengths, protocols, args, device):
    """[(model, settings)] -> a row per scheme, way to read it, seed, protocol and length; {label: [nats by position, per
    seed]}; {(label, seed, protocol, n): mean nats per window}."""
    rows, by_position, by_window = [], {}, {}
    longest = max(lengths)
    stretch = score.span_length(lengths, args.span_bytes, len(data)) if "span" in protocols else 0
    ends = score.fixed_ends(len(data), longest, args.windows) if "fixed" in protocols else ()
    plan, as_it_is = [], lambda n: {}
    for model, settings in models:
        if args.longer and trained_as(settings) and not any(map(given, ("--scaling", "--beyond", "--window"))):
            plan.append((model, settings, "", as_it_is, 0))  # or the table would be too long
            continue
        plan += [(model, settings, name, options, 0)
                 for name, options in ways(settings, args.scaling, args.factor, args.beyond).items() if name or 0 in args.window]
        plan += [(model, settings, "", as_it_is, window) for window in args.window if 0 < window < (settings["window"] or longest)]
    bar = tqdm(total=len(plan) * len(lengths) * len(protocols), unit="cell", mininterval=0.1 if sys.stderr.isatty() else 30)
    known, previous = {}, None  # the scores of one checkpoint: where two ways are the same, they are made once
    for model, settings, name, options, window in plan:
        if model is not previous:
            known, previous = {}, model
        variant = ", ".join(filter(None, (trained_as(settings), name, f"window {window}" if window else "")))
        for protocol in protocols:
            for n in lengths:
                row = dict(scheme=settings["scheme"], variant=variant, seed=settings["seed"], protocol=protocol, n=n, nll=None,
                           ppl=None, low=None, high=None, targets=0, note="")
                who = label(row)
                bar.set_description(f"{who}, seed {settings['seed']}, {protocol} {n}", refresh=False)
                width = 0 if window >= n else window
                width = min(filter(None, (width, settings["window"])), default=0)
                chosen = options(n)
                key = str(chosen), width, protocol, n
                try:
                    if key not in known:
                        reader = at_its_positions(read_as(model, settings, chosen, width), settings)
                        nats = (score.span(reader, data, n, stretch, device) if protocol == "span"
                                else score.fixed(reader, data, n, ends, device))
                        known[key] = score.scores(nats), nats.mean(axis=0), nats.mean(axis=1)
                    scored, positions, windows = known[key]
                    row |= scored
                    if row["ppl"] is not None:
                        by_window[who, settings["seed"], protocol, n] = windows
                        if protocol == "span" and n == longest:
                            by_position.setdefault(who, []).append(positions)
                except Exception as error:  # whatever a scheme raises at a length, its other cells and the other rows go on
                    limit = getattr(model.position, "max_len", None)
                    row["note"] = (f"max_len {limit}" if isinstance(limit, int) and limit < n and not settings["random_positions"]
                                   else str(error) if isinstance(error, ValueError)
                                   else "out of memory" if "memory" in str(error) else reason(error))
                rows.append(row)
                bar.update()
    bar.close()
    return rows, by_position, by_window


def paired(by_window):
    """{(label, seed, protocol, n): mean nats per window} -> a row per protocol, length and pair: a − b and its p-value.

    The test is over the seeds that all rows of that protocol and length have; if it is one seed, over its windows.
    """
    found = []
    for column in dict.fromkeys(key[2:] for key in by_window):
        seeds = {}
        for who, seed, *rest in by_window:
            if tuple(rest) == column:
                seeds.setdefault(who, []).append(seed)
        common = [seed for seed in next(iter(seeds.values())) if all(seed in each for each in seeds.values())]
        for a, b in itertools.combinations(seeds, 2):
            each = [by_window[a, seed, *column] - by_window[b, seed, *column] for seed in common]
            if each:
                p = score.paired_p([d.mean() for d in each] if len(each) > 1 else each[0])
                found.append(dict(protocol=column[0], n=column[1], a=a, b=b, nats_a_minus_b=round(float(np.mean(each)), 6),
                                  p=p and float(f"{p:.3g}"), over=f"{len(each)} seeds" if len(each) > 1 else f"{len(each[0])} windows"))
    return found


def not_told_apart(pairs, protocol, n):
    """The labels of the best row of a column, and of those within 5 % of it that the test (Holm's correction, 5 %) cannot tell
    from it. Few seeds decide little: without the 5 %, rows that are clearly worse would be among them."""
    pairs = [pair for pair in pairs if (pair["protocol"], pair["n"]) == (protocol, n)]
    names = list(dict.fromkeys(name for pair in pairs for name in (pair["a"], pair["b"])))
    behind = lambda name: max((pair["nats_a_minus_b"] * (1 if pair["a"] == name else -1) for pair in pairs if name in (pair["a"], pair["b"])), default=0)
    best = next((name for name in names if behind(name) <= 0), None)
    against = [pair for pair in pairs if best in (pair["a"], pair["b"])]
    adjusted = score.holm([1.0 if pair["p"] is None else pair["p"] for pair in against])
    return {best} | {pair["b"] if pair["a"] == best else pair["a"] for pair, p in zip(against, adjusted)
                     if p >= 0.05 and abs(pair["nats_a_minus_b"]) <= math.log(1.05)}


def summarise(rows):
    """Rows -> one dict per scheme, variant, protocol and length: over seeds mean ± std, of one seed its bootstrap interval."""
    cells = {}
    for row in rows:
        cells.setdefault((row["scheme"], row["variant"], row["protocol"], row["n"]), []).append(row)
    summary = []
    for (scheme, variant, protocol, n), seeds in cells.items():
        done = [row for row in seeds if row["ppl"] is not None]
        cell = dict(scheme=scheme, variant=variant, protocol=protocol, n=n, seeds=[row["seed"] for row in done], nll=None, ppl=None,
                    std=None, low=None, high=None, note="; ".join(sorted({row["note"] for row in seeds if row["note"]})))
        if done:
            mean, std = mean_std([row["ppl"] for row in done])
            low, high = (mean - std, mean + std) if len(done) > 1 else (done[0]["low"], done[0]["high"])
            nll = mean_std([row["nll"] for row in done])[0]
            cell |= dict(nll=round(nll, 5), ppl=round(mean, 4), std=round(std, 4), low=round(low, 4), high=round(high, 4))
        summary.append(cell)
    return summary


def wide(rows, lengths):
    """Rows -> one per scheme, variant, seed and protocol, with its perplexities under the lengths."""
    lines = {}
    for row in rows:
        key = {name: row[name] for name in ("scheme", "variant", "seed", "protocol")}
        lines.setdefault(tuple(key.values()), key | dict.fromkeys(lengths))[row["n"]] = row["ppl"]
    return list(lines.values())


def tables(rows, summary, pairs, lengths, protocols, train_len):
    """The wide tables, one per protocol, as one Markdown text."""
    titles = dict(span="Span protocol: windows of n without overlap. A longer window has fewer targets with little before them, "
                       "so a sound scheme falls a little.",
                  fixed=f"Fixed-target protocol: the same {score.K} last targets of each window, with n bytes before the last. "
                        "Falling: it uses far context. Flat: it ignores it. Rising: it breaks.")
    text = []
    for protocol in protocols:
        lines = []
        bold = {n: not_told_apart(pairs, protocol, n) for n in lengths}
        for who in dict.fromkeys(map(label, rows)):
            line, ppl = [who], {}
            for n in lengths:
                cells = [row for row in rows if (label(row), row["protocol"], row["n"]) == (who, protocol, n)]
                summed = next(c for c in summary if (label(c), c["protocol"], c["n"]) == (who, protocol, n))
                ppl[n] = summed["ppl"]
                cell = spread([row["ppl"] for row in cells]) if summed["ppl"] is not None else summed["note"]
                line.append(f"**{cell}**" if who in bold[n] else cell)
            if protocol == "fixed":
                line.append(usable_cell(ppl, train_len))
            lines.append(line)
        header = ["perplexity at n ="] + lengths + (["usable length"] if protocol == "fixed" else [])
        text.append(titles[protocol] + "\n\n" + markdown_table(header, lines))
    seeds = {}
    for row in rows:
        seeds.setdefault(label(row), {})[str(row["seed"])] = True  # a dict for its order
    named = {who: ", ".join(each) for who, each in seeds.items()}
    common = max(named.values(), key=list(named.values()).count)
    which = common + "".join(f"; {who}: {each}" for who, each in named.items() if each != common)
    many = any("," in each for each in named.values())
    over = "seeds" if many else "windows"
    note = (f"Trained at {train_len} bytes. {'Mean ± sample standard deviation over seeds' if many else 'Seed'} {which}. Bold: the best "
            f"of a column, and what is within 5 % of it and cannot be told from it by a paired t-test over {over} (5 %, Holm's correction).")
    return note + "\n\n" + "\n".join(text)


def prepare(args):
    """Everything that can be wrong with the arguments is found here, before anything is measured or written."""
    for flag in ("schemes", "seeds", "lengths", "scaling", "beyond", "window", "sources"):
        distinct(f"--{'from' if flag == 'sources' else flag}", getattr(args, flag) or [])
    if not re.fullmatch(r"[A-Za-z0-9][\w-]{0,60}", args.name) or args.name.startswith(("train_compare", "finetune", "context", "break_", "bench_")):
        raise ValueError(f"--name '{args.name}' is not a name for these files: letters, digits, - and _, and not that of other results; "
                         "the folder is --out")
    if args.factor is not None and set(args.scaling) == {"none"}:
        raise ValueError(f"--factor {args.factor:g} goes with --scaling linear, ntk, dynamic, yarn or llama3")
    if args.factor is not None and args.factor < 1:
        raise ValueError(f"--factor {args.factor:g} is below 1: it is the wanted over the trained length")
    device = pick_device(args.device)
    dtype = pick_dtype(args.dtype, device)
    models = find_checkpoints(args.sources or [args.out], args.schemes, args.seeds)
    trained = models[0][1]
    if args.longer and not given("--window"):
        args.window = [0, trained["train_len"]]
    readable = {name for _, settings in models for name in ways(settings, args.scaling, args.factor, args.beyond)}
    for flag, wanted, plain in (("--scaling", args.scaling, "none"), ("--beyond", args.beyond, "untrained")):
        for kind in wanted:
            if given(flag) and kind != plain and kind not in readable:
                raise ValueError(f"{flag} {kind}: none of the models takes it")
    try:
        corpus = load_corpus(trained["data"] if args.data is None else args.data)
    except ValueError as error:
        where = "; the models were trained on it, say with --data where it is now" if args.data is None else ""
        raise ValueError(f"{error}{where}") from None
    lengths = sorted(args.lengths or [trained["train_len"] * factor for factor in args.times])
    corpus.require(max(lengths))
    protocols = ["span", "fixed"] if args.protocol == "both" else [args.protocol]
    if "span" in protocols:
        score.span_length(lengths, args.span_bytes, len(corpus.val))
    for model, _ in models:
        model.to(device, dtype)
    return device, dtype, models, corpus, lengths, protocols


def main():
    parser, args = arguments()
    try:
        prepared = prepare(args)
        lock = only_writer(writable_folder(args.out))
    except ValueError as error:
        parser.error(str(error))
    with lock:
        measure_and_write(args, *prepared)


def measure_and_write(args, device, dtype, models, corpus, lengths, protocols):
    """All there is after the arguments have been found right."""
    trained, about = models[0][1], provenance(corpus, device, dtype)
    if (corpus.sha256, corpus.held_out) != (trained["sha256"], trained["held_out"]):
        print(f"notice: the models were trained on other text, or another part of it, than this ({corpus.name}, SHA-256 "
              f"{corpus.sha256[:16]}…); what is held out here may have been seen in training, or may be of another kind")
    try:
        rows, by_position, by_window = measure(models, corpus.val, lengths, protocols, args, device)
    except KeyboardInterrupt:
        print("\nstopped; nothing was written, earlier results are as they were", file=sys.stderr)
        raise
    summary, pairs = summarise(rows), paired(by_window)
    by_position = {who: np.mean(nats, axis=0) for who, nats in by_position.items()}
    curves = {who: [round(nats, 4) for nats in buckets(values, 128)[1]] for who, values in by_position.items()}
    text, out = tables(rows, summary, pairs, lengths, protocols, trained["train_len"]), Path(args.out)
    write_json(out / f"{args.name}.json", about | {
        "trained": {key: trained[key] for key in SAME}, "summary": summary, "rows": rows,
        "by_position": {"window": max(lengths), "nats_in_equal_buckets": curves}})
    write_csv(out / f"{args.name}.csv", rows)
    write_csv(out / f"{args.name}_wide.csv", wide(rows, lengths))
    write_csv(out / f"{args.name}_pairs.csv", pairs or [dict.fromkeys(("protocol", "n", "a", "b", "nats_a_minus_b", "p", "over"))])
    write_file(out / f"{args.name}.md", text)
    drawn = [cell for cell in summary if cell["ppl"] is not None]
    if drawn and any(cell["variant"] for cell in drawn):
        plot_longer(out / f"{args.name}.png", drawn, trained["train_len"])
    elif drawn:
        plot_extrapolation(out / f"{args.name}.png", drawn, by_position, trained["train_len"])
    print("\n" + text)
    print(f"wrote {out / args.name}.json .csv .md .png, _wide.csv and _pairs.csv")


if __name__ == "__main__":
    run(main)
