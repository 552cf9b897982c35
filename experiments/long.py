"""RoPE trained at L, read at 16·L: where it breaks, and what each scaling saves."""

import numpy as np

from experiments.setup import Picture, Verdict, mean_of
from lab import score
from lab.plots import buckets
from lab.probes import first_break
from lab.reading import reader, readings
from lab.rows import distinct, select, values
from lab.stats import perplexity
from lab.tables import markdown_table, mean_std_text
from schemes.rope_scaling import SCALINGS

TIMES = 16  # the training length
BUCKETS = 64  # into which the positions of a picture are summed up


def measure(setup):
    """Perplexity of all of a long window, of its beginning and of its end; where it breaks."""
    ropes, L = setup.models_of("rope"), setup.run.train_len
    n, val, rows = TIMES * L, setup.corpus.val, []
    size = TIMES * n if setup.quick else score.SPAN_BYTES
    length = score.span_length([n], size, len(val))
    for run, model in ropes:
        level = None
        for reading in readings(run, scaling=SCALINGS):
            read = reader(model, run, reading, n)
            nats = score.span(read, val, n, length, setup.device).mean(0)  # (n,)
            if level is None:  # the model as it is comes first
                level = nats[L // 2 : L].mean()
            named = dict(way=reading.way or "none", seed=run.seed, train_len=L, n=n)
            rows += [named | row for row in rows_of(nats, L, level)]
    return rows


def rows_of(nats, L, level):
    """The rows of one reading: nats (n,) by position."""
    curve = [round(mean, 5) for mean in buckets(nats, BUCKETS)[1]]
    return [
        dict(metric="ppl", value=perplexity(nats)),
        dict(metric="ppl of the first", value=perplexity(nats[:L])),
        dict(metric="ppl of the last", value=perplexity(nats[-L:])),
        dict(metric="breaks at", value=first_break(nats, L, level)),
        dict(metric="nats", value=curve),
    ]


def rule(breaks, unscaled, best):
    """Confirmed if the loss breaks without scaling and the best scaling keeps it within 10 %;
    partly if it only breaks. unscaled, best: perplexity of the end over that of the beginning.
    """
    if not (breaks and unscaled > 1.5):
        return "refuted"
    return "confirmed" if best < 1.1 else "partly"


def judge(rows):
    L, n = rows[0]["train_len"], rows[0]["n"]
    start = mean_of(rows, way="none", metric="ppl of the first")
    ratio = {}
    for way in distinct(rows, "way"):
        ratio[way] = mean_of(rows, way=way, metric="ppl of the last") / start
    best = min((way for way in ratio if way != "none"), key=ratio.get)
    breaks = values(rows, way="none", metric="breaks at")
    places = ", ".join(f"{at:,}" for at in breaks) or "none"
    return Verdict(
        "RoPE without scaling breaks soon past its training length; a scaling extends it to "
        f"{n:,} without training.",
        f"Without scaling the loss leaves its level at position {places}, and the last {L} of "
        f"{n:,} bytes have a perplexity {ratio['none']:.1f} times that of the first {L}. The best "
        f"scaling, {best}, leaves a factor of {ratio[best]:.1f}.",
        rule(bool(breaks), ratio["none"], ratio[best]),
    )


def show(rows):
    L, n = rows[0]["train_len"], rows[0]["n"]
    table, lines, width = [], {}, max(1, n // BUCKETS)
    for way in distinct(rows, "way"):
        mine = select(rows, way=way)
        breaks = [row["value"] for row in select(mine, metric="breaks at")]
        line = [way]
        for metric in ("ppl of the first", "ppl of the last", "ppl"):
            line.append(mean_std_text(values(mine, metric=metric)))
        places = ("nowhere" if at is None else f"{at:,}" for at in breaks)
        table.append([*line, ", ".join(places)])
        nats = np.mean(values(mine, metric="nats"), axis=0).tolist()
        centres = [(i + 0.5) * width for i in range(len(nats))]
        lines["no scaling" if way == "none" else way] = (centres, nats)
    header = ["scaling", f"perplexity of the first {L}", f"of the last {L}", f"of all {n:,}"]
    header.append(f"over 1.1 × the loss of none at {L // 2} … {L - 1} from")
    picture = Picture(
        lines,
        f"RoPE trained at {L}, read at {n:,} (scalings: factor {n // L}): loss by position",
        "position in the window, bytes",
        "loss, nats per byte",
        mark=L,
    )
    return markdown_table(header, table), picture
