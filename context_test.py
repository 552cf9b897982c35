"""What a model uses of its context: a flat perplexity may only mean that far text is ignored.

    python context_test.py           # every checkpoint of train_compare.py; about 3 minutes for
                                     # five on two CPU cores
    python context_test.py --quick   # those of train_compare.py --quick, some seconds

    use        fixed-target perplexity (lab/score.py) at many lengths, below and above the training
               length L: where does more context stop helping, and where does it begin to harm?
    copy       a unique random string stands in the text, and again d bytes later: how many bytes
               of the second one, after its first 8, are predicted right, and how many without the
               first one? Chance is 1 in 26. Models trained on the corpus alone cannot do it at any
               distance; train with --copies.
    attention  the share of the attention of the last 64 bytes that goes to the bytes up to a
               distance, mean over heads and blocks, at n = L and n = 4L

What is measured goes into the checkpoints; context.json, .csv, .md and .png in --out are then
written from all of them.
"""

import sys
from pathlib import Path

import numpy as np
import torch

from lab import command, plots, score
from lab.checkpoints import add_rows, find, require_alike
from lab.collect import alike, text_of
from lab.command import int_in_range, option
from lab.copying import SHOWN, STRING, copy_accuracy
from lab.files import folder_lock, writable_folder
from lab.lengths import on_targets
from lab.machine import pick_device
from lab.probes import attention_by_distance
from lab.provenance import stamp
from lab.reading import why_not
from lab.rows import label, measured, select
from lab.stats import measured_ppl
from lab.tables import context_tables, write_table
from schemes.scheme import tidy

QUICK = dict(out="results/quick", windows=8)
KINDS = ("use", "copy", "attention")
USE = (1/4, 3/8, 1/2, 3/4, 1, 17/16, 9/8, 5/4, 3/2, 7/4, 2, 3, 4)  # × L  # fmt: skip
COPY = (1/4, 1/2, 3/4, 1, 3/2, 2, 4, 8, 16)  # × L  # fmt: skip


def arguments(words):
    parser = command.Parser(__doc__)
    what = parser.add_argument_group("what to measure")
    text = "use copy attention"
    option(what, "--what", str, list(KINDS), text, nargs="+", choices=KINDS, metavar="WHAT")
    option(what, "--schemes", tidy, None, "only these", nargs="+", metavar="SCHEME")
    option(what, "--seeds", int_in_range(0), None, "only these", nargs="+")
    text = "texts per cell for copy; four times as many windows for use"
    option(what, "--windows", int_in_range(2), 32, text)
    where = parser.add_argument_group("where to read, run and write")
    option(where, "--data", str, None, "text to read: held out in the training, if not said")
    command.add_place(where, what="with checkpoints/, and for the results")
    if "--quick" in words:
        parser.set_defaults(**QUICK)
    return parser, parser.read(words)


def measure_use(read, data, L, windows, device):
    """(fields of a row, what computes it) for each length."""
    lengths = dict.fromkeys(n for n in (round(L * share) for share in USE) if n >= score.K)
    ends = score.fixed_ends(len(data), max(lengths), 4 * windows)
    for n in lengths:

        def compute(n=n):
            return [measured_ppl(score.fixed(read, data, n, ends, device))]

        yield dict(protocol="use", n=n, metric="ppl"), compute


def measure_copy(read, data, L, windows, device):
    for d in (round(L * share) for share in COPY):
        for first in (True, False) if d >= STRING else ():
            metric = "accuracy" if first else "accuracy without the first"

            def compute(d=d, first=first):
                share = copy_accuracy(read, data, d, windows, first, device)
                return [dict(value=round(share, 5), count=windows * (STRING - SHOWN))]

            yield dict(protocol="copy", n=d, metric=metric), compute


def measure_attention(model, read, data, L, windows, device):
    ends = score.fixed_ends(len(data), round(L * max(USE)), 4 * windows)
    for n in (L, 4 * L):
        ids = torch.from_numpy(np.array(data[ends[:8, None] + np.arange(-n, 0)])).to(device)

        def compute(ids=ids, n=n):
            shares = np.cumsum(attention_by_distance(model, ids, read=read))
            halves = (round(2 ** (step / 2)) for step in range(2 * n.bit_length()))
            near = sorted({distance for distance in halves if distance <= n})
            return [dict(within=d, value=round(float(shares[d - 1]), 5)) for d in near]

        yield dict(protocol="attention", n=n, metric="share"), compute


def measure(args, one, data, device):
    """The rows of one model. Whatever a scheme raises in a cell, the others go on."""
    run, model, rows = one.run, one.model().to(device), []
    read, L, windows = run.read_by(model), one.run.train_len, args.windows
    plans = dict(
        use=measure_use(read, data, L, windows, device),
        copy=measure_copy(read, data, L, windows, device),
        attention=measure_attention(model, read, data, L, windows, device),
    )
    cells = [cell for kind in args.what for cell in plans[kind]]
    with command.progress_bar(len(cells), "cell") as bar:
        for fields, compute in cells:
            at = f"{label(run.flat() | measured())}, seed {run.seed}"
            bar.set_description(f"{at}, {fields['protocol']} {fields['n']}", refresh=False)
            row = measured(table="context", **fields)
            try:
                rows += [row | found for found in compute()]
            except Exception as error:  # somebody's own class may raise anything
                reach = fields["n"] + (STRING if fields["protocol"] == "copy" else 0)
                rows.append(row | dict(note=why_not(error, model, run, reach)))
            bar.update()
    return rows


def write_results(out, like, new):
    """Write the tables and the picture of all models that were trained like this one.

    Only rows with as many targets of the same text as those measured now are comparable.
    """
    bad = []
    found = find([out], bad=bad)
    everything = [row for one in found for row in select(one.rows, table="context")]
    scored = [row for row in new if row["value"] is not None]
    targets = {row["protocol"]: (row["count"], row["first_end"]) for row in scored}
    rows = on_targets(select(everything, text=new[0]["text"]), targets)
    command.notice_other_targets(len(everything) - len(rows))
    rows, others = alike(rows, like)
    command.notice_left_out(bad, others)
    text = context_tables(rows, like.train_len)
    write_table(Path(out), "context", rows, text)
    drawn = [row for row in rows if row["value"] is not None]
    if drawn:
        plots.plot_context(Path(out) / "context.png", drawn, like.train_len)
    return text


def main():
    parser, args = arguments(sys.argv[1:])
    try:
        for name in ("what", "schemes", "seeds"):
            command.no_duplicates(f"--{name}", getattr(args, name))
        device = pick_device(args.device)
        found = find([args.out], args.schemes, args.seeds)
        command.require_found(found, [args.out], args.schemes, args.seeds, QUICK["out"])
        require_alike(found)
        first = found[0].run
        L = first.train_len
        if L < score.K:
            raise ValueError(f"the models were trained at {L} bytes; this needs at least {score.K}")
        corpus = text_of(first, args.data)
        corpus.require(L * round(max(COPY)) + STRING)
        score.fixed_ends(len(corpus.val), L * round(max(USE)), 4 * args.windows)
        writable_folder(args.out)
    except ValueError as error:
        parser.error(error)
    command.notice_other_text(corpus, first)
    stamped = stamp(command.command_line(sys.argv), corpus, device, torch.float32)
    for one in found:
        new = [row | stamped for row in measure(args, one, corpus.val, device)]
        add_rows(one, new)
    with folder_lock(args.out):
        text = write_results(args.out, first, new)
    print(f"\n{text}\nwrote {Path(args.out) / 'context'}.json .csv .md .png")


if __name__ == "__main__":
    command.run(main)
