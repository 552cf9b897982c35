"""Rows and cells -> pictures, as PNG. This is the only file that imports matplotlib.

lab/panels.py says what the panels of a picture show; `draw` makes a figure of them, with the name
of each line at its right end. Figures are made without pyplot, so no window system matters.
"""

import functools
import math
import os

import numpy as np

# A notebook's shell names a backend that need not be installed here; matplotlib would not load.
os.environ.pop("MPLBACKEND", None)

from matplotlib import colormaps
from matplotlib.figure import Figure
from matplotlib.patches import Arc, Circle
from matplotlib.ticker import LogLocator, NullFormatter, NullLocator

from lab.files import write_atomically
from lab.panels import (
    COLOURS,
    Panel,
    alibi_as_it_is,
    buckets,
    colours,
    context_panels,
    extrapolation_panels,
    long_context_panels,
    longer_panels,
    loss_panel,
    named_lines,
    short,
    training_of,
)
from lab.rows import select

__all__ = ["COLOURS", "buckets", "colours", "short"]  # of lab/panels.py, for others that draw
GREY = "#555555"
GAP = 0.058  # between two names, of the height of the plot
WIDE, NARROW, HIGH = 7.0, 4.2, 4.3  # inches of a plot alone and beside others
LETTER = 0.1  # inches, of a bold name


def draw(panels, title="", same_y=False):
    """Panels -> a figure, with up to three panels in one row, more in rows of two."""
    columns = len(panels) if len(panels) < 4 else 2
    rows = math.ceil(len(panels) / columns)
    widths = [max(_width(panel, columns) for panel in panels[i::columns]) for i in range(columns)]
    most = max(len(panel.lines) for panel in panels)
    figure = Figure((sum(widths), rows * max(HIGH, 0.2 * most + 1.2)), layout="constrained")
    if title:
        figure.suptitle(title, fontsize=11)
    axes = list(figure.subplots(rows, columns, sharey=same_y, squeeze=False).flat)
    for axis in axes[len(panels) :]:
        axis.set_visible(False)
    for axis, panel in zip(axes, panels):
        _draw_panel(axis, panel)
        if axis.get_subplotspec().is_first_col() or not same_y:
            axis.set_ylabel(panel.y_name)
    for axis, panel in zip(axes, panels):  # now that a shared y axis has its limits
        _number_y(axis)
        _name_ends(axis, panel.lines)
    return figure


def write(figure, path):
    """Save a figure, with all that stands out of it, as PNG."""
    options = dict(format="png", dpi=100, bbox_inches="tight", metadata={"Software": None})
    write_atomically(path, functools.partial(figure.savefig, **options))


def _width(panel, columns):
    """Inches of a panel: its plot and the names beside it, or its title."""
    longest = max((len(line.name) for line in panel.lines), default=0)
    plot = (WIDE if columns == 1 else NARROW) + LETTER * longest
    return max(plot, LETTER * max(map(len, panel.title.splitlines()), default=0))


def _draw_panel(axis, panel):
    axis.set_xscale("log" if "x" in panel.log else "linear")
    axis.set_yscale("log" if "y" in panel.log else "linear")
    axis.margins(x=0.03)
    panel.tell_apart()
    for line in panel.lines:
        look = dict(color=line.colour, ls=line.style, lw=line.width, ms=4)
        marker = "o" if line.name and len(line.xs) < 32 else ""
        axis.plot(line.xs, line.ys, marker=marker, **look)
        if line.band:
            axis.fill_between(line.xs, *line.band, color=line.colour, alpha=0.2, lw=0)
    axis.set_title(panel.title, loc="left", fontsize=11)
    axis.set_xlabel(panel.x_name)
    axis.spines[["top", "right"]].set_visible(False)
    if panel.y_limits:
        axis.set_ylim(panel.y_limits)
    _number_x(axis, panel)
    if panel.mark:
        axis.axvline(panel.mark, color=GREY, lw=1, ls=":")
        where = dict(xy=(panel.mark, 1), xycoords=("data", "axes fraction"), va="top")
        where |= dict(xytext=(4, -4), textcoords="offset points")
        axis.annotate(panel.mark_name, color=GREY, fontsize=9, bbox=_box(0.8, 1), **where)


def _box(alpha, pad):
    """What is behind a text, so that it can be read above lines."""
    return dict(facecolor="white", edgecolor="none", alpha=alpha, pad=pad)


def _number_x(axis, panel):
    """Write numbers at the ticks of the panel; of a logarithmic axis else at powers of two."""
    if "x" in panel.log:
        axis.xaxis.set_minor_locator(NullLocator())
        axis.xaxis.set_major_locator(LogLocator(2, numticks=10))
        axis.xaxis.set_major_formatter("{x:g}")
    if panel.ticks:
        texts = panel.ticks if isinstance(panel.ticks, dict) else {x: f"{x:g}" for x in panel.ticks}
        axis.set_xticks(list(texts), list(texts.values()))


def _number_y(axis):
    """Write plain numbers: logarithmic at 1, 2, 3 and 5 of each power of ten, if these are few."""
    low, high = axis.get_ylim()
    if axis.get_yscale() == "log":
        axis.yaxis.set_minor_locator(LogLocator(subs=(2, 3, 5)))
        axis.yaxis.set_minor_formatter("{x:g}" if high / low < 300 else NullFormatter())
    axis.yaxis.set_major_formatter("{x:g}")


def _name_ends(axis, lines):
    """Write the name of each line at its right end, apart from each other."""
    log = axis.get_yscale() == "log"
    ends = [(line, line.points(log)) for line in lines if line.name and line.points(log)]
    if not ends:
        return
    ends.sort(key=_heights)
    fractions = axis.transScale + axis.transLimits  # of the plot's width and height
    heights = fractions.transform([points[0] for _, points in ends])[:, 1]
    for (line, points), height in zip(ends, pushed_apart(heights, GAP)):
        where = dict(xy=(points[0][0], height), xycoords=("data", "axes fraction"), va="center")
        where |= dict(xytext=(6, 0), textcoords="offset points", annotation_clip=False)
        look = dict(color=line.colour, fontweight="bold", bbox=_box(0.7, 0.5), parse_math=False)
        axis.annotate(line.name, **where, **look)


def _heights(end):
    """The heights of a line's points from its end back: lines that end alike go by those before."""
    return [float(f"{y:.3g}") for _, y in end[1]]


def pushed_apart(heights, gap):
    """Heights in rising order -> moved as little as makes them `gap` apart, between 0 and 1."""
    gap = min(gap, 1 / len(heights))
    means, sizes = [], []  # of (height − place × gap): those that touch are moved together
    for place, height in enumerate(heights):
        mean, size = height - place * gap, 1
        while means and means[-1] > mean:
            mean, size = mean * size + means.pop() * sizes[-1], size + sizes.pop()
            mean /= size
        means.append(mean)
        sizes.append(size)
    places = np.arange(len(heights)) * gap
    return np.clip(np.repeat(means, sizes), 0, 1 - places[-1]) + places


# Pictures of rows and cells


def plot_loss_curves(path, rows):
    """Training loss by step, a line per scheme: rows with metric "loss"."""
    write(draw([loss_panel(with_value(rows, "value"))]), path)


def plot_extrapolation(path, cells, by_position, train_len):
    """Perplexity by length under each protocol, and the loss by position in the longest window.

    cells as lab.tables.summarise makes them; by_position {name: nats per position}.
    """
    cells = with_value(cells, "ppl")
    write(draw(extrapolation_panels(cells, by_position, train_len)), path)


def plot_longer(path, cells, train_len):
    """Perplexity by length of all ways to read or train a model, a panel for each kind of way.

    Only one protocol is drawn: fixed, where it was measured.
    """
    cells = with_value(cells, "ppl")
    title, fixed = "Windows without overlap (span protocol)", select(cells, protocol="fixed")
    if fixed:
        title, cells = "Same targets, more context (fixed protocol)", fixed
    title += "; pale blue: ALiBi as it is" if alibi_as_it_is(cells) else ""
    title += f"; dotted: trained at {train_len}"
    write(draw(longer_panels(cells, train_len), title, same_y=True), path)


def plot_context(path, rows, train_len):
    """What a model uses of its context, the mean over seeds: rows with table "context"."""
    rows = with_value(rows, "value")
    notes = [f"dotted: trained at {train_len} bytes", "means over seeds", training_of(rows)]
    title = f"What a model uses of its context ({'; '.join(filter(None, notes))})"
    write(draw(context_panels(rows, train_len), title), path)


def plot_lines(path, lines, title, x_name, y_name, mark=None, log=False):
    """One panel of named lines {name: (xs, ys)}; mark: the training length; log: of both axes."""
    ticks = max((list(xs) for xs, _ in lines.values()), key=len)
    ticks = ticks if len(ticks) < 20 else None
    panel = Panel(named_lines(lines), title, x_name, y_name, "xy" if log else "", ticks, mark=mark)
    write(draw([panel]), path)


def plot_long_context(path, rows):
    """Time and peak memory of one attention layer by T: rows of bench/long_context.py."""
    write(draw(long_context_panels(rows)), path)


def with_value(rows, key):
    return [row for row in rows if row[key] is not None]


# The rotation of RoPE


def draw_rotation(path, head_dim=32, pairs=(0, 2, 4, 8), steps=10):
    """Where one vector points at positions 0 … steps − 1, and that q and k keep their angle."""
    figure = Figure((2.7 * len(pairs), 6), layout="constrained")
    for (top, bottom), pair in zip(figure.subplots(2, len(pairs), squeeze=False).T, pairs):
        turn = math.degrees(10000.0 ** (-2 * pair / head_dim))  # per token
        for axis in (top, bottom):
            axis.add_patch(Circle((0, 0), 1, fill=False, color="#BBBBBB"))
            axis.set(xlim=(-1.6, 1.6), ylim=(-1.4, 1.4), aspect="equal", xticks=[], yticks=[])
            axis.set_frame_on(False)
        speed = f"pair {pair}: {turn:.3g}° per token\none turn in {360 / turn:.3g} tokens"
        top.set_title(speed, fontsize=11)
        bottom.set_title(f"between q and k: {2 * turn:.3g}°, twice", fontsize=11)
        _draw_positions(top, turn, steps)
        _draw_distances(bottom, turn)
    about = f"head width {head_dim}, base 10000"
    figure.suptitle(f"RoPE: one and the same vector at positions 0, 1, 2, … ({about})", fontsize=12)
    told = "q at 3 and k at 1 (dark), q at 8 and k at 6 (pale): "
    figure.supxlabel(told + "the same distance, the same angle, hence the same score.", fontsize=11)
    write(figure, path)


def _draw_positions(axis, turn, steps):
    """One vector at positions 0 … steps − 1, which have labels where these stand apart."""
    shades = colormaps["viridis"](np.linspace(0, 0.9, steps))
    for p in range(steps):
        room = turn > 15 and p * turn < 350 or turn > 3 and p in (0, steps - 1)
        _draw_arrow(axis, p * turn, str(p) if room else "", shades[p])
    if turn <= 3:
        axis.text(1.08, 0.28, f"0 … {steps - 1}", color=shades[steps // 2])


def _draw_distances(axis, turn):
    """q and k at two positions each, two apart."""
    for m, n, alpha, radius in ((3, 1, 1.0, 0.45), (8, 6, 0.4, 0.6)):
        _draw_arrow(axis, m * turn, f"q at {m}" if turn > 3 else "", COLOURS["rope"], alpha)
        _draw_arrow(axis, n * turn, f"k at {n}" if turn > 3 else "", COLOURS["alibi"], alpha)
        between = dict(theta1=n * turn, theta2=m * turn, color="black", alpha=alpha, lw=1.5)
        axis.add_patch(Arc((0, 0), 2 * radius, 2 * radius, **between))


def _draw_arrow(axis, degrees, text, colour, alpha=1.0):
    """An arrow from the centre to the circle, with a text outside of it."""
    x, y = math.cos(math.radians(degrees)), math.sin(math.radians(degrees))
    look = dict(arrowstyle="->", color=colour, alpha=alpha, lw=1.8, shrinkA=0, shrinkB=0)
    axis.annotate("", (x, y), (0, 0), arrowprops=look)
    side = "center" if abs(x) < 0.35 else "left" if x > 0 else "right"
    look = dict(color=colour, alpha=alpha, ha=side, va="center")
    axis.text(1.08 * x, 1.15 * y, text, **look)
