"""Perplexity by length: models trained at one length, read at longer ones.

    python extrapolation_test.py           # every checkpoint of train_compare.py; about 3 minutes
                                           # for five on two CPU cores
    python extrapolation_test.py --longer  # and every way to read them past their length, to 16
                                           # times it; 6 to 7 minutes
    python extrapolation_test.py --quick   # those of train_compare.py --quick, some seconds

Two protocols (lab/score.py has them in full): `span`, windows without overlap, and `fixed`, the
same targets with more and more text before them, from which to argue. What is measured goes into
the checkpoints; extrapolation.json, .csv, _wide.csv, _pairs.csv, .md and .png in --out (with
--longer longer.*) are then written from all that was measured on the same targets.
"""

import re
import sys
from pathlib import Path

from lab import command, plots, score
from lab.checkpoints import add_rows, find, require_alike
from lab.collect import alike, one_per_line, text_of
from lab.command import int_in_range, option, positive, switch
from lab.files import folder_lock, writable_folder, write_csv
from lab.lengths import Protocols, by_position, comparable, score_readings
from lab.machine import pick_device, pick_dtype
from lab.provenance import stamp
from lab.reading import Reading, readings, ways_of
from lab.rows import label, select, trained_as
from lab.tables import compare_all, lengths_tables, summarise, wide_rows, write_table
from pos_learned import BEYOND
from schemes.rope_scaling import SCALINGS
from schemes.scheme import tidy

QUICK = dict(out="results/quick", span_bytes=16384, windows=32)
LONGER = dict(times=(1, 2, 4, 8, 16), span_bytes=65536, windows=32, name="longer")
LONGER |= dict(scaling=list(SCALINGS), beyond=["untrained", "clamp", "wrap", "interpolate"])
OTHER_TABLES = ("train_compare", "finetune", "context", "break_", "bench_")


def arguments(words):
    parser = command.Parser(__doc__)
    what = parser.add_argument_group("what to measure")
    option(what, "--schemes", tidy, None, "only these", nargs="+", metavar="SCHEME")
    option(what, "--seeds", int_in_range(0), None, "only these", nargs="+")
    text = "in bytes: 1, 2, 4 and 8 times the training length, if not said"
    option(what, "--lengths", int_in_range(1), None, text, nargs="+")
    option(what, "--protocol", str, "both", "which rules", choices=("span", "fixed", "both"))
    text = "span: how many held-out bytes are scored"
    option(what, "--span-bytes", int_in_range(1), score.SPAN_BYTES, text)
    text = f"fixed: how many windows, with {score.K} targets each"
    option(what, "--windows", int_in_range(2), score.FIXED_WINDOWS, text)
    past = parser.add_argument_group("ways to read a model past its length; each makes a row")
    text = f"of rope: {' '.join(SCALINGS)}; sin takes none and linear"
    option(past, "--scaling", str, ["none"], text, nargs="+", choices=SCALINGS, metavar="KIND")
    text = "of the scaling, at every length; n over the training length, if not said"
    option(past, "--factor", positive, None, text, metavar="S")
    text = f"of learned, what becomes of rows not trained: {' '.join(BEYOND)}"
    option(past, "--beyond", str, ["untrained"], text, nargs="+", choices=BEYOND, metavar="POLICY")
    text = "every scheme as it is: a token sees the last N only; 0: all"
    option(past, "--window", int_in_range(0), [0], text, nargs="+")
    switch(past, "--longer", "all of them, at 1 to 16 times the training length, on less text; "
           "models that were not trained in the plain way as they are")  # fmt: skip
    where = parser.add_argument_group("where to read, run and write")
    text = "folders whose checkpoints/ are read into one table: --out, if not said"
    option(where, "--from", str, None, text, nargs="+", dest="sources", metavar="FOLDER")
    option(where, "--data", str, None, "text to read: held out in the training, if not said")
    choices = ("auto", "bf16", "fp32")
    option(where, "--dtype", str, "fp32", "of the reading, not of the training", choices=choices)
    command.add_place(where, what="for the results")
    option(where, "--name", str, "extrapolation", "what the files are called")
    parser.set_defaults(times=(1, 2, 4, 8))
    if "--longer" in words:
        parser.set_defaults(**LONGER)
    if "--quick" in words:
        parser.set_defaults(**QUICK)
    return parser, parser.read(words)


def plan(args, run):
    """The readings of one model."""
    special = trained_as(run.flat()) and not args.given & {"scaling", "beyond", "window"}
    if args.longer and special:  # or the table would be too long
        return [Reading()]
    windows = args.window
    if args.longer and "window" not in args.given:
        windows = [0, run.train_len]
    scaling = [*args.scaling, *ways_of(run)] if args.longer else args.scaling
    beyond = args.beyond
    return readings(run, scaling, beyond, windows, args.factor)


def check(args):
    """ValueError for whatever can be wrong with the arguments alone."""
    for name in ("schemes", "seeds", "lengths", "scaling", "beyond", "window", "sources"):
        flag = "from" if name == "sources" else name
        command.no_duplicates(f"--{flag}", getattr(args, name))
    if not re.fullmatch(r"[A-Za-z0-9][\w-]{0,60}", args.name) or args.name.startswith(OTHER_TABLES):
        raise ValueError(
            f"--name '{args.name}' is not a name for these files: letters, digits, - and _, and "
            "not that of other results; the folder is --out"
        )
    if args.factor is not None and set(args.scaling) == {"none"}:
        raise ValueError(
            f"--factor {args.factor:g} goes with --scaling linear, ntk, dynamic, yarn or llama3"
        )
    if args.factor is not None and args.factor < 1:
        raise ValueError(
            f"--factor {args.factor:g} is below 1: it is the wanted over the trained length"
        )


def require_taken(args, found):
    """ValueError for a way that was asked for and that no model takes."""
    taken = {way for one in found for way in ways_of(one.run)}
    for name, plain in (("scaling", "none"), ("beyond", "untrained")):
        for kind in getattr(args, name) if name in args.given else ():
            if kind not in taken | {plain}:
                raise ValueError(f"--{name} {kind}: none of the models takes it")


def measure(args, one, protocols, device, dtype, stamped):
    """Score one model in all its readings and put the rows into its checkpoint."""
    planned, model = plan(args, one.run), one.model().to(device, dtype)
    flat = one.run.flat()
    with command.progress_bar(len(planned) * len(protocols.cells()), "cell") as bar:

        def tick(reading, protocol, n):
            at = f"{label(flat | reading.fields())}, seed {flat['seed']}, {protocol} {n}"
            bar.set_description(at, refresh=False)
            bar.update()

        rows = score_readings(one, model, planned, protocols, device, tick)
    add_rows(one, [row | {"table": args.name} | stamped for row in rows])


def write_results(args, folders, scored, protocols, stamped):
    """Write tables and pictures of all that was measured on the same targets as `scored` now."""
    name, out, bad, like = args.name, Path(args.out), [], scored[0].run
    found = one_per_line(find(folders, bad=bad), [one.path for one in scored], bad)
    everything = [row for one in found for row in select(one.rows, table=name)]
    rows = comparable(everything, protocols, stamped)
    command.notice_other_targets(len(everything) - len(rows))
    rows, others = alike(rows, like)
    command.notice_left_out(bad, others)
    if not rows:
        sys.exit("extrapolation_test.py: the checkpoints were replaced or removed meanwhile")
    cells, pairs, L = summarise(rows), compare_all(rows), like.train_len
    text = lengths_tables(rows, cells, pairs, L)
    write_table(out, name, rows, text)
    write_csv(out / f"{name}_wide.csv", wide_rows(rows))
    empty = dict.fromkeys(("protocol", "n", "a", "b", "nats_a_minus_b", "p", "over"))
    write_csv(out / f"{name}_pairs.csv", pairs or [empty])
    drawn = [cell for cell in cells if cell["ppl"] is not None]
    if any(cell["trained"] or cell["read"] for cell in drawn):
        plots.plot_longer(out / f"{name}.png", drawn, L)
    elif drawn:
        plots.plot_extrapolation(out / f"{name}.png", drawn, by_position(rows), L)
    return text


def main():
    parser, args = arguments(sys.argv[1:])
    folders = args.sources or [args.out]
    try:
        check(args)
        device = pick_device(args.device)
        dtype = pick_dtype(args.dtype, device)
        found = find(folders, args.schemes, args.seeds)
        command.require_found(found, folders, args.schemes, args.seeds, QUICK["out"])
        require_alike(found)
        require_taken(args, found)
        first = found[0].run
        corpus = text_of(first, args.data)
        lengths = args.lengths or [first.train_len * times for times in args.times]
        corpus.require(max(lengths))
        names = ("span", "fixed") if args.protocol == "both" else (args.protocol,)
        protocols = Protocols.at(corpus.val, lengths, names, args.span_bytes, args.windows)
        writable_folder(args.out)
    except ValueError as error:
        parser.error(error)
    command.notice_other_text(corpus, first)
    stamped = stamp(command.command_line(sys.argv), corpus, device, dtype)
    for number, one in enumerate(found):
        try:
            measure(args, one, protocols, device, dtype, stamped)
        except KeyboardInterrupt:
            kept = f"{number} of {len(found)} models are scored and kept in their checkpoints"
            command.complain(f"\nstopped; {kept}, tables are as they were")
            raise
    with folder_lock(args.out):
        text = write_results(args, folders, found, protocols, stamped)
    path = Path(args.out) / args.name
    print(f"\n{text}\nwrote {path}.json .csv .md .png, _wide.csv and _pairs.csv")


if __name__ == "__main__":
    command.run(main)
