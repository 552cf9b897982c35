"""Rows and cells -> what a picture shows: Panels of Lines. lab/plots.py draws them.

rows   as in lab/rows.py
cells  one for each line of a table, protocol and length: lab.tables.summarise
"""

import dataclasses
import itertools
import math
import operator
from dataclasses import dataclass

from lab.rows import distinct, label, read_as, select, trained_as
from lab.stats import mean_std

# One colour per scheme in all pictures (the palette of Okabe and Ito, for the colour-blind too).
COLOURS = {"learned": "#E69F00", "sin": "#56B4E9", "rope": "#D55E00", "alibi": "#0072B2",
           "none": "#7F7F7F"}  # fmt: skip
OTHERS = ("#009E73", "#CC79A7", "#000000", "#B8A800", "#8C564B")
# Ways to read a scheme past its length, alike in all pictures; RoPE as it is keeps its colour.
WAYS = {"no scaling": COLOURS["rope"], "base 10,000": COLOURS["rope"], "linear": OTHERS[0],
        "ntk": OTHERS[1], "dynamic": OTHERS[2], "yarn": OTHERS[3], "llama3": OTHERS[4],
        "clamp": OTHERS[1], "wrap": OTHERS[2], "interpolate": OTHERS[3]}  # fmt: skip
RESCALED = ("ntk", "dynamic", "yarn", "llama3")  # ways that change the frequencies of rotations
PALE_BLUE = "#B3D5E8"
STYLES = ("-", "--", ":", "-.", (0, (8, 2)), (0, (6, 2, 1, 2, 1, 2)), (0, (1, 3)), (0, (12, 3)))
HOW = ("trained", "way", "factor", "read_window")  # fields: how a cell was trained and read
OTHERWISE = "Trained in another way"
LENGTH, PPL, NATS = "evaluation length n, bytes", "perplexity per byte", "loss, nats per byte"


@dataclass
class Line:
    xs: list
    ys: list  # None or an infinite value leaves a gap
    colour: str
    name: str = ""  # at its right end
    style: str | tuple = "-"
    width: float = 1.8
    band: tuple | None = None  # lows, highs

    def points(self, log=False):
        """The points that can be drawn, from the right end back."""
        points = [(x, y) for x, y in zip(self.xs, self.ys) if y is not None and math.isfinite(y)]
        return [(x, y) for x, y in points[::-1] if y > 0 or not log]


@dataclass
class Panel:
    lines: list
    title: str
    x_name: str
    y_name: str
    log: str = ""  # the logarithmic axes: "x", "y" or "xy"
    ticks: list | dict | None = None  # of the x axis; {tick: its text}
    y_limits: tuple | None = None
    mark: int | None = None  # the training length, as a dotted line
    mark_name: str = ""

    def tell_apart(self):
        """Give a line with the colour and style of an earlier one the next style that is free."""
        taken = set()
        for line in self.lines:
            free = [s for s in (line.style, *STYLES) if (line.colour, s) not in taken]
            line.style = free[0] if free else line.style
            taken.add((line.colour, line.style))


def colours(schemes):
    """{scheme: colour}; schemes that are not among the five take the other colours in turn."""
    others = [scheme for scheme in schemes if scheme not in COLOURS]
    found = {scheme: OTHERS[i % len(OTHERS)] for i, scheme in enumerate(others)}
    return {scheme: COLOURS.get(scheme) or found[scheme] for scheme in schemes}


def short(scheme):
    """The scheme's name in a picture: without the folder and file of a user's own."""
    return scheme.split(".py:")[-1]


def joined(*words):
    return ", ".join(filter(None, words))


def buckets(nats, count=32):
    """Values by position -> the centres and means of `count` equal buckets."""
    size = max(1, len(nats) // count)
    starts = range(0, len(nats) - size + 1, size)
    means = [float(sum(nats[start : start + size]) / size) for start in starts]
    return [start + size / 2 for start in starts], means


# Lines from rows: means over seeds


def mean_by(rows, x):
    """The mean value over seeds by the field x, where all seeds have one -> (xs, means)."""
    values, seeds = {}, len(distinct(rows, "seed"))
    for row in rows:
        values.setdefault(row[x], []).append(row["value"])
    xs = [x for x in sorted(values) if len(values[x]) == seeds]
    return xs, [mean_std(values[x])[0] for x in xs]


def training_of(rows):
    """What was special in the training of all rows alike; nothing if they differ."""
    ways = set(map(trained_as, rows))
    return ways.pop() if len(ways) == 1 else ""


def names_of(rows):
    """{label: (name of its line, colour)}; what all have in common is not in the names."""
    palette, alike, names = colours(distinct(rows, "scheme")), training_of(rows), {}
    for row in rows:
        name = joined(short(row["scheme"]), "" if alike else trained_as(row))
        names[label(row)] = name, palette[row["scheme"]]
    return names


def mean_lines(rows, x, names):
    """A Line for each label of the rows, with the name and colour of names_of."""
    lines, groups = [], {}
    for row in rows:
        groups.setdefault(label(row), []).append(row)
    for text, (name, colour) in names.items():
        if text in groups:
            lines.append(Line(*mean_by(groups[text], x), colour, name))
    return lines


def loss_panel(rows):
    """Training loss by step."""
    special = training_of(rows)
    title = "Training loss: same batches, same network, only the scheme differs"
    title += f"\n({special})" if special else ""
    lines = mean_lines(rows, "step", names_of(rows))
    return Panel(lines, title, "step", "training loss, nats per byte (log scale)", "y")


def context_panels(rows, train_len):
    """Perplexity by length, copying by distance, and attention by distance for each length."""
    names, mark = names_of(rows), dict(mark=train_len)
    title = "More context: does it help?\n(fixed-target protocol)"
    lines = mean_lines(select(rows, protocol="use"), "n", names)
    panels = [Panel(lines, title, "window length n, bytes", PPL, "xy", **mark)]

    copies = select(rows, protocol="copy")
    title = "Copying a string from d bytes back\n(thin: the same without it)"
    lines = mean_lines(select(copies, metric="accuracy"), "n", names)
    for line in mean_lines(select(copies, metric="accuracy without the first"), "n", names):
        lines.append(dataclasses.replace(line, name="", width=1, style="--"))
    high = max(0.2, 1.05 * max((row["value"] for row in copies), default=0))  # chance is 0.04
    words = title, "distance d, bytes", "share of bytes right"
    panels.append(Panel(lines, *words, "x", y_limits=(-0.02, high), **mark))

    shares = select(rows, protocol="attention")
    for n in distinct(shares, "n"):
        title = f"Attention of the last tokens\nin a text of {n} bytes"
        lines = mean_lines(select(shares, n=n), "within", names)
        words = title, "within the last … tokens", "share of attention"
        panels.append(Panel(lines, *words, "x", y_limits=(-0.02, 1.05), **mark))
    return [panel for panel in panels if panel.lines]


# Lines from cells


def grouped(cells):
    """{name of a line: its cells, the shortest first}"""
    groups = {}
    for cell in sorted(cells, key=operator.itemgetter("n")):
        groups.setdefault(cell["name"], []).append(cell)
    return {name: groups[name] for name in distinct(cells, "name")}


def cell_line(cells, colour, name, style="-", band=True):
    """The cells of one line -> perplexity by length."""
    lengths, ppl, low, high = ([cell[key] for cell in cells] for key in ("n", "ppl", "low", "high"))
    return Line(lengths, ppl, colour, name, style, band=(low, high) if band else None)


def extrapolation_panels(cells, by_position, train_len):
    """Perplexity by length under each protocol, and loss by position in the longest window.

    by_position: {name: nats per position, mean over seeds}
    """
    ticks, panels = sorted(set(distinct(cells, "n"))), []
    mark = dict(mark=train_len, mark_name=f"trained at {train_len}")
    names = dict(distinct(cells, "name", "scheme"))
    palette = colours(names.values())
    titles = dict(
        fixed="Same targets, more context before them\n(fixed protocol: up means it breaks)",
        span="Windows without overlap\n(span protocol of the ALiBi paper)",
    )
    for protocol, title in titles.items():
        lines = []
        for name, mine in grouped(select(cells, protocol=protocol)).items():
            lines.append(cell_line(mine, palette[names[name]], short(name)))
        panels.append(Panel(lines, title, LENGTH, PPL, "xy", ticks, **mark))

    there = {name: by_position[name] for name in names if name in by_position}
    n = max(map(len, there.values()), default=0)
    title = (
        f"Loss by position in a window of {n}\n(means of seeds, windows and {n // 32} positions)"
    )
    lines = []
    for name, nats in there.items():
        lines.append(Line(*buckets(nats), palette[names[name]], short(name)))
    panels.append(Panel(lines, title, "position in the window, bytes", NATS, **mark))
    return [panel for panel in panels if panel.lines]


def longer_panels(cells, train_len):
    """Perplexity by length of all ways to read or train a model, a Panel for each kind of way."""
    palette, ticks = colours(distinct(cells, "scheme")), sorted(set(distinct(cells, "n")))
    alibi, panels = alibi_as_it_is(cells), []
    for title, mine in by_kind(cells).items():
        lines = [longer_line(group, mine, palette) for group in grouped(mine).values()]
        if alibi:
            pale = cell_line(alibi, PALE_BLUE, "", band=False)
            lines.insert(0, dataclasses.replace(pale, width=6))
        title = ": ".join(filter(None, (title, described(in_common(mine)))))
        panels.append(Panel(lines, title, LENGTH, PPL, "xy", ticks, mark=train_len))
    return panels


def alibi_as_it_is(cells):
    return select(cells, scheme="alibi", trained="", way="", read_window=0)


def by_kind(cells):
    """{title: cells} by how they were trained and read; all together if no way of reading is there.

    A scheme as it is stands beside its own ways.
    """
    plain = [cell for cell in select(cells, trained="") if not cell["read_window"]]
    with_ways = {cell["scheme"] for cell in plain if cell["way"]}
    rescaled = {cell["scheme"] for cell in plain if cell["way"] in RESCALED}
    moved = with_ways - rescaled
    if not with_ways:
        return {"" if select(cells, trained="") else OTHERWISE: cells}
    kinds = {
        "Frequencies rescaled": [cell for cell in plain if cell["scheme"] in rescaled],
        "Positions moved or scaled": [cell for cell in plain if cell["scheme"] in moved],
        "Sliding window": [cell for cell in select(cells, trained="") if cell["read_window"]],
        OTHERWISE: [cell for cell in cells if cell["trained"]],
    }
    return {title: mine for title, mine in kinds.items() if mine}


def in_common(cells):
    """How all of these cells were trained and read alike."""
    return {key: cells[0][key] for key in HOW if len(distinct(cells, key)) == 1}


def described(fields):
    """How a cell, or what cells have in common, was trained and read, in words."""
    fields = dict(trained="", way="", factor=None, read_window=0) | fields
    return joined(fields["trained"], read_as(fields))


def longer_line(cells, panel, palette):
    """The cells of one line among those of its panel: ways of reading have their own colours."""
    cell, common = cells[0], in_common(panel)
    special = described({key: cell[key] for key in HOW if key not in common})
    if not select(panel, trained=""):  # the panel's title says so
        special = special.removeprefix("trained ")
    name = joined(short(cell["scheme"]), special)
    colour, style = palette[cell["scheme"]], "-"
    if cell["way"] and not cell["trained"]:
        colour, style = WAYS.get(cell["way"], OTHERS[4]), "--"
    return cell_line(cells, colour, name, style, band=len(cell["seeds"]) > 1)


# Lines from elsewhere


def named_lines(lines):
    """{name: (xs, ys)} -> Lines; schemes and ways to read them have their colours."""
    others, found = itertools.cycle(OTHERS), []
    for name, (xs, ys) in lines.items():
        colour = COLOURS.get(name) or WAYS.get(name) or next(others)
        found.append(Line(list(xs), list(ys), colour, short(name)))
    return found


def long_context_panels(rows):
    """Time and peak memory of one attention layer by T; dashed: the textbook formula.

    rows: dicts with what (those of "layer" are drawn), scheme, who, T, seconds and extra_mb (None
    where it was not measured).
    """
    rows = select(rows, what="layer")
    palette, lengths = colours(distinct(rows, "scheme")), sorted(set(distinct(rows, "T")))
    ticks = {T: f"{T // 1024}k" if T % 1024 == 0 else str(T) for T in lengths}
    panels = []
    for key, what, unit in (
        ("seconds", "time", "seconds"),
        ("extra_mb", "memory", "peak memory, MB"),
    ):
        lines = []
        for scheme, who in distinct(rows, "scheme", "who"):
            mine = [row for row in select(rows, scheme=scheme, who=who) if row[key]]
            textbook = who == "textbook formula"
            name = joined(short(scheme), "textbook" * textbook)
            xs, ys = [row["T"] for row in mine], [row[key] for row in mine]
            lines.append(Line(xs, ys, palette[scheme], name, "--" if textbook else "-"))
        title = f"One attention layer at long context: {what}"
        panels.append(Panel(lines, title, "T, tokens", unit, "xy", ticks))
    return panels
