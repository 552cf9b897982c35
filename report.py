"""Rows -> tables and pictures. A row is a dict; the drivers make rows, this file only shows them.

    python report.py    # the tables of README.md anew from results/
"""
import csv
import io
import itertools
import json
import math
import re
import tokenize

import matplotlib

matplotlib.use("Agg")
import matplotlib.pyplot as plt

from common import HERE, Parser, run, write_file
from score import usable_length

# One colour per scheme in every picture (Okabe and Ito's palette, readable by the colour-blind).
COLOURS = {"learned": "#E69F00", "sin": "#56B4E9", "rope": "#D55E00", "alibi": "#0072B2", "none": "#7F7F7F"}
OTHERS = ("#009E73", "#CC79A7", "#000000", "#B8A800", "#8C564B")
# Ways to read a scheme past its length, alike in all pictures; RoPE as it is keeps its colour.
WAYS = {"no scaling": COLOURS["rope"], "base 10,000": COLOURS["rope"], "linear": OTHERS[0], "ntk": OTHERS[1], "dynamic": OTHERS[2], "yarn": OTHERS[3],
        "llama3": OTHERS[4], "clamp": OTHERS[1], "wrap": OTHERS[2], "interpolate": OTHERS[3]}


def colours(schemes):
    """{scheme: colour}; schemes that are not among the five take the remaining colours in turn."""
    others = [s for s in schemes if s not in COLOURS]
    return {s: COLOURS.get(s) or OTHERS[others.index(s) % len(OTHERS)] for s in schemes}


def short(scheme):
    """The scheme's name for a picture: without the folder and file of somebody's own."""
    return scheme.split(".py:")[-1]


def label(row):
    """The name of a row: its scheme, and what is special about it."""
    return ", ".join(filter(None, (row["scheme"], row.get("variant", ""))))


def markdown_table(header, rows):
    """A header and rows of cells -> a Markdown table; the first column is left-aligned, the others right."""
    lines = [header, ["---"] + ["---:"] * (len(header) - 1), *rows]
    return "\n".join("| " + " | ".join(map(str, line)) + " |" for line in lines) + "\n"


def write_csv(path, rows):
    """Rows with the same keys -> a CSV file with those keys as its header."""
    text = io.StringIO()
    writer = csv.DictWriter(text, list(rows[0]), lineterminator="\n")
    writer.writeheader()
    writer.writerows(rows)
    write_file(path, text.getvalue())


def spread(values):
    """mean ± sample standard deviation as text, or the one value, or a dash."""
    values = [v for v in values if v is not None]
    if not values:
        return "–"
    mean, deviation = mean_std(values)
    style = ".2f" if mean < 100 else ".1f" if mean < 1e5 else ".3g"
    return f"{mean:{style}}" + (f" ± {deviation:{style}}" if len(values) > 1 else "")


def usable_cell(ppl, train_len):
    """The usable length (score.py) of {n: ppl} as text: ≥ where it is all that was measured, a dash where there is none."""
    usable = usable_length(ppl, train_len)
    return "–" if usable is None else f"≥ {usable}" if usable == max(ppl) else str(usable)


def mean_std(values):
    """Mean and sample standard deviation (ddof 1; 0 for one value)."""
    mean = sum(values) / len(values)
    return mean, (sum((v - mean) ** 2 for v in values) / (len(values) - 1)) ** 0.5 if len(values) > 1 else 0.0


def _figure(panels, width, height=4.4, rows=1, **options):
    plt.rcParams.update({"font.size": 10, "axes.spines.top": False, "axes.spines.right": False})
    return plt.subplots(rows, panels, figsize=(width, height), layout="constrained", squeeze=False, **options)


def _grid(panels, width, **options):
    """A figure with up to three panels in one row, more in rows of two -> (figure, its axes in order, as many as panels)."""
    columns = panels if panels < 4 else 2
    rows = -(-panels // columns)
    figure, axes = _figure(columns, width * columns, 4.2 * rows, rows, **options)
    for axis in axes.flat[panels:]:
        axis.set_visible(False)
    return figure, list(axes.flat[:panels])


def _plain_numbers(axis):
    """Perplexities as plain numbers on a logarithmic y axis, at 1, 2, 3 and 5 of each power of ten."""
    axis.yaxis.set_minor_locator(matplotlib.ticker.LogLocator(subs=(2, 3, 5)))
    axis.yaxis.set_major_formatter("{x:g}")
    axis.yaxis.set_minor_formatter("{x:g}")


def _length_axis(axis, lengths):
    """The measured lengths as ticks of a logarithmic x axis; perplexities as plain numbers on the y axis."""
    axis.set_xticks(lengths, [f"{n}" for n in lengths])
    axis.xaxis.set_minor_locator(matplotlib.ticker.NullLocator())
    _plain_numbers(axis)
    axis.set_xlim(lengths[0] / 1.1, lengths[-1] * 1.1)


def _save(figure, path):
    picture = io.BytesIO()
    figure.savefig(picture, format="png", dpi=100, metadata={"Software": None})
    write_file(path, picture.getvalue())
    plt.close(figure)


def _label_ends(axis, ends, log):
    """Each line's name at its right end, pushed apart where two would touch: ends {name: (x, y, colour)}."""
    ends = {name: end for name, end in ends.items() if math.isfinite(end[1]) and (end[1] > 0 or not log)}
    if not ends:
        return
    scale, back = (math.log, math.exp) if log else (float, float)
    low, high = (scale(v) for v in axis.get_ylim())
    gap, ends = (high - low) * min(0.058, 1 / len(ends)), sorted(ends.items(), key=lambda item: item[1][1])
    groups = []  # [mean, size] of (height − place × gap): those that touch are moved together, about where they were
    for place, (_, (_, y, _)) in enumerate(ends):
        groups.append([scale(y) - place * gap, 1])
        while len(groups) > 1 and groups[-2][0] > groups[-1][0]:
            (a, m), (b, n) = groups[-2:]
            groups[-2:] = [[(a * m + b * n) / (m + n), m + n]]
    means = [mean for mean, size in groups for _ in range(size)]
    for place, ((name, (x, _, colour)), mean) in enumerate(zip(ends, means)):
        height = min(max(mean, low), high - (len(ends) - 1) * gap) + place * gap  # neither below nor above the axis
        axis.annotate(short(name), (x, back(height)), xytext=(6, 0), textcoords="offset points", va="center", color=colour,
                      fontweight="bold", annotation_clip=False, bbox=dict(facecolor="white", edgecolor="none", alpha=0.7, pad=0.5))


def plot_loss_curves(path, runs):
    """Training loss against step: one line per scheme, the mean over its seeds.

    runs: dicts with `scheme` and `curve` {"step": […], "loss": […]}.
    """
    figure, ((axis,),) = _figure(1, 9)
    schemes, ends = list(dict.fromkeys(run["scheme"] for run in runs)), {}
    for scheme, colour in colours(schemes).items():
        curves = [run["curve"] for run in runs if run["scheme"] == scheme and run["curve"]["step"]]
        if not curves:
            continue
        loss = [sum(point) / len(point) for point in zip(*(c["loss"] for c in curves))]
        step = curves[0]["step"][:len(loss)]
        axis.plot(step, loss, color=colour, lw=1.8)
        ends[scheme] = (step[-1], loss[-1], colour)
    axis.set(xlabel="step", ylabel="training loss, nats per byte (log scale)", yscale="log",
             title="Training loss: same batches, same network, only the scheme differs")
    _plain_numbers(axis)
    axis.margins(x=0.02)
    _label_ends(axis, ends, log=True)
    _save(figure, path)


def plot_extrapolation(path, summary, by_position, train_len):
    """Perplexity by length under each protocol, with bands, and the loss by position in the longest window.

    summary      dicts with scheme, protocol, n, ppl, low, high (one per cell that could be computed)
    by_position  {scheme: nats per position, mean over seeds}
    """
    protocols = [p for p in ("fixed", "span") if any(cell["protocol"] == p for cell in summary)]
    figure, (axes,) = _figure(len(protocols) + bool(by_position), 4.6 * (len(protocols) + bool(by_position)))
    schemes = list(dict.fromkeys(cell["scheme"] for cell in summary))
    titles = {"fixed": "Same targets, more context before them\n(fixed protocol: up means it breaks)",
              "span": "Windows without overlap\n(span protocol of the ALiBi paper)"}
    for axis, protocol in zip(axes, protocols):
        ends = {}
        for scheme, colour in colours(schemes).items():
            cells = [c for c in summary if c["scheme"] == scheme and c["protocol"] == protocol]
            if cells:
                n, ppl = [c["n"] for c in cells], [c["ppl"] for c in cells]
                axis.plot(n, ppl, color=colour, lw=1.8, marker="o", ms=4)
                axis.fill_between(n, [c["low"] for c in cells], [c["high"] for c in cells], color=colour, alpha=0.25, lw=0)
                ends[scheme] = (n[-1], ppl[-1], colour)
        axis.set(xscale="log", yscale="log", xlabel="evaluation length n, bytes", ylabel="perplexity per byte",
                 title=titles[protocol])
        _length_axis(axis, sorted({c["n"] for c in summary}))
        _label_ends(axis, ends, log=True)
    if by_position:
        axis, ends = axes[-1], {}
        for scheme, colour in colours(schemes).items():
            if scheme in by_position:
                centres, means = buckets(by_position[scheme])
                axis.plot(centres, means, color=colour, lw=1.8)
                ends[scheme] = (centres[-1], means[-1], colour)
        longest = max(len(nats) for nats in by_position.values())
        axis.set(xlabel="position in the window, bytes", ylabel="loss, nats per byte", xlim=(0, longest),
                 title=f"Where in a window of {longest} it breaks\n(means of seeds, windows and {longest // 32} positions)")
        _label_ends(axis, ends, log=False)
    for axis in axes:
        axis.axvline(train_len, color="#555555", lw=1, ls=":")
        axis.annotate(f"trained at {train_len}", (train_len, 1), xycoords=("data", "axes fraction"), xytext=(4, -4),
                      textcoords="offset points", va="top", color="#555555", fontsize=9,
                      bbox=dict(facecolor="white", edgecolor="none", alpha=0.8, pad=1))
    _save(figure, path)


def plot_longer(path, summary, train_len):
    """Fixed-target perplexity by length of every way to read a model past its training length, one panel per kind of way.

    summary: dicts with scheme, variant, protocol, n, ppl, low, high (one per cell that could be computed). Only one protocol is
    drawn: fixed, where it was measured.
    """
    protocol = "fixed" if any(cell["protocol"] == "fixed" for cell in summary) else "span"
    summary = [cell for cell in summary if cell["protocol"] == protocol]
    way = lambda cell: next((word for word in ("trained", "tuned", "window") if word in cell["variant"]), "read")
    panels = {"RoPE, rescaled": lambda c: way(c) == "read" and c["scheme"].startswith("rope"),
              "Learned and sinusoidal": lambda c: way(c) == "read" and c["scheme"].startswith(("learned", "sin")),
              "Sliding window": lambda c: way(c) == "window",
              "Trained in another way": lambda c: way(c) in ("trained", "tuned")}
    panels = {title: list(filter(mine, summary)) for title, mine in panels.items()}
    panels = {title: cells for title, cells in panels.items() if cells}
    if not panels or not any(cell["variant"] for cell in summary if way(cell) == "read"):  # then the schemes as they are stand beside the others
        panels = {"": summary}
    alone, palette = len(panels) == 1, colours(list(dict.fromkeys(cell["scheme"] for cell in summary)))
    figure, axes = _grid(len(panels), 9 if alone else 4.8, sharey=True)
    lengths, styles = sorted({cell["n"] for cell in summary}), ("-", "--", ":", "-.", (0, (5, 1)), (0, (1, 1)))
    alibi = [(c["n"], c["ppl"]) for c in summary if c["scheme"] == "alibi" and not c["variant"]]
    for axis, (title, cells) in zip(axes, panels.items()):
        if alibi:
            axis.plot(*zip(*alibi), color=COLOURS["alibi"], alpha=0.3, lw=6, zorder=0)
        ends, seen = {}, {}
        shared = set.intersection(*(set(filter(None, c["variant"].split(", "))) for c in cells))
        for name in dict.fromkeys(map(label, cells)):
            mine = [c for c in cells if label(c) == name]
            scheme, variant = mine[0]["scheme"], ", ".join(v for v in mine[0]["variant"].split(", ") if v not in shared)
            colour, style = palette[scheme], "-"
            if variant and way(mine[0]) == "read":  # the scheme as it is keeps its colour
                colour, style = WAYS.get(variant.split(", ")[-1], OTHERS[4]), "--"
            elif variant:
                seen[scheme] = seen.get(scheme, 0 if alone else -1) + 1  # alone: solid is the scheme as it is
                style = styles[seen[scheme] % len(styles)]
            n, ppl = [c["n"] for c in mine], [c["ppl"] for c in mine]
            axis.plot(n, ppl, ls=style, color=colour, lw=1.8, marker="o", ms=3)
            if len(mine[0]["seeds"]) > 1:
                axis.fill_between(n, [c["low"] for c in mine], [c["high"] for c in mine], color=colour, alpha=0.15, lw=0)
            ends[", ".join(filter(None, (short(scheme), variant if alone else variant.removeprefix("trained "))))] = (n[-1], ppl[-1], colour)
        axis.set(xscale="log", yscale="log", xlabel="evaluation length n, bytes", ylabel="perplexity per byte",
                 title=": ".join(filter(None, (title, ", ".join(sorted(shared))))))
        _length_axis(axis, lengths)
        axis.axvline(train_len, color="#555555", lw=1, ls=":")
        axis.ends = ends
    for axis in axes:  # once the shared y axis is settled
        _label_ends(axis, axis.ends, log=True)
    note = "pale blue: ALiBi as it is; " if alibi else ""
    figure.suptitle(f"Same targets, more context ({protocol} protocol); {note}dotted: trained at {train_len}", fontsize=11)
    _save(figure, path)


def plot_context(path, rows, train_len):
    """What a model uses of its context, a panel per kind of row: perplexity by length, copying and attention by distance.

    rows: dicts with what, scheme, variant, seed, x, value; lines are means over seeds.
    """
    kinds = {"use": ("More context: does it help?\n(fixed-target protocol)", "window length n, bytes", "perplexity per byte"),
             "copy": ("Copying a string from d bytes back\n(dashed: the same without it)", "distance d, bytes", "share of bytes right")}
    for what in dict.fromkeys(row["what"] for row in rows if row["what"].startswith("attention")):
        kinds[what] = (f"Attention of the last tokens\nin a text of {what.split()[-1]} bytes", "within the last … tokens", "share of attention")
    kinds = {what: texts for what, texts in kinds.items() if any(row["what"] == what for row in rows)}
    figure, axes = _grid(len(kinds), 5.4)
    names = {label(row): row["scheme"] for row in rows}
    for axis, (what, (title, x_name, y_name)) in zip(axes, kinds.items()):
        lines = {}
        for name, scheme in names.items():
            for kind, style in ((what, "-"), (f"{what} without the first", "--")):
                mine = [row for row in rows if row["what"] == kind and label(row) == name]
                xs = list(dict.fromkeys(row["x"] for row in mine))
                means = [mean_std([row["value"] for row in mine if row["x"] == x])[0] for x in xs]
                if xs:
                    axis.plot(xs, means, style, color=colours(names.values())[scheme], lw=1.8 if style == "-" else 1, marker="o" * (style == "-"), ms=3)
                    if style == "-":
                        lines[name] = (xs, means, colours(names.values())[scheme])
        axis.set(xscale="log", xlabel=x_name, ylabel=y_name, title=title, yscale="log" if what == "use" else "linear")
        if what == "use":
            _plain_numbers(axis)
        else:  # a share; copying may be at chance, 0.04
            axis.set_ylim(-0.02, 1.05 if what != "copy" else max(0.2, 1.05 * max(row["value"] for row in rows if row["what"] == "copy")))
            axis.yaxis.set_major_formatter("{x:g}")
        axis.xaxis.set_major_locator(matplotlib.ticker.LogLocator(2, numticks=20))
        axis.xaxis.set_major_formatter("{x:g}")
        axis.xaxis.set_minor_locator(matplotlib.ticker.NullLocator())
        axis.axvline(train_len, color="#555555", lw=1, ls=":")
        points = min(len(xs) for xs, _, _ in lines.values())
        apart = lambda i: min((b - a for a, b in itertools.pairwise(sorted(m[i] for _, m, _ in lines.values()))), default=0)
        far_apart = max(range(points), key=apart)
        at = far_apart if what.startswith("attention") else -1  # all shares end at 1
        _label_ends(axis, {name: (xs[at], means[at], colour) for name, (xs, means, colour) in lines.items()}, log=what == "use")
    figure.suptitle(f"What a model uses of its context (dotted: trained at {train_len} bytes; means over seeds)", fontsize=11)
    _save(figure, path)


def plot_lines(path, lines, title, x_name, y_name, mark=None, log=False):
    """One panel of named lines {name: (xs, ys)}, each with its name at its end; `mark` is the training length.

    log: both axes logarithmic, with the xs of the longest line as ticks. Schemes have their colours.
    """
    figure, ((axis,),) = _figure(1, 8)
    ticks, ends = max((xs for xs, _ in lines.values()), key=len), {}
    few = len(ticks) < 20
    others = itertools.cycle(OTHERS)
    for name, (xs, ys) in lines.items():
        colour = COLOURS.get(name) or WAYS.get(name) or next(others)
        axis.plot(xs, ys, color=colour, lw=1.8, marker="o" if few else "", ms=4)
        ends[name] = (xs[-1], ys[-1], colour)
    axis.set(xlabel=x_name, ylabel=y_name, title=title)
    if log:
        axis.set(xscale="log", yscale="log")
        _length_axis(axis, ticks)
    elif few:
        axis.set_xticks(ticks)
    else:
        axis.set_xlim(0, max(xs[-1] for xs, _ in lines.values()) * 1.01)
    if mark:
        axis.axvline(mark, color="#555555", lw=1, ls=":")
    _label_ends(axis, ends, log=log)
    _save(figure, path)


def plot_long_context(path, rows):
    """Time and peak memory of one attention layer's forward pass against T: solid as it is, dashed the textbook formula.

    rows: dicts with what (those of "layer" are drawn), scheme, who, T, seconds and extra_mb (None where not measured).
    """
    figure, (axes,) = _figure(2, 11)
    rows = [row for row in rows if row["what"] == "layer"]
    lengths = sorted({row["T"] for row in rows})
    for axis, key, unit in zip(axes, ("seconds", "extra_mb"), ("seconds", "peak memory, MB")):
        ends = {}
        for scheme, who in dict.fromkeys((row["scheme"], row["who"]) for row in rows):
            points = [(row["T"], row[key]) for row in rows if (row["scheme"], row["who"]) == (scheme, who) and row[key]]
            if points:
                plain = who == "textbook formula"
                axis.plot(*zip(*points), "--" if plain else "-", color=COLOURS[scheme], lw=1.8, marker="o", ms=3)
                ends[f"{scheme}, textbook" if plain else scheme] = (*points[-1], COLOURS[scheme])
        axis.set(xscale="log", yscale="log", xlabel="T, tokens", ylabel=unit, xlim=(lengths[0] / 1.1, lengths[-1] * 2),
                 title="One attention layer at long context: " + ("time" if key == "seconds" else "memory"))
        axis.set_xticks(lengths, [f"{T // 1024}k" if T % 1024 == 0 else str(T) for T in lengths])
        axis.xaxis.set_minor_locator(matplotlib.ticker.NullLocator())
        axis.yaxis.set_major_formatter("{x:g}")
        axis.yaxis.set_minor_formatter("")
        axis.margins(y=0.12)  # room for the labels
        _label_ends(axis, ends, log=True)
    _save(figure, path)


def buckets(nats, count=32):
    """Values by position -> (centres, means) of `count` equal buckets."""
    size = max(1, len(nats) // count)
    starts = range(0, len(nats) - size + 1, size)
    return [s + size / 2 for s in starts], [float(sum(nats[s:s + size]) / size) for s in starts]


USE_WHEN = {
    "learned": "a model that has it must be matched",
    "sin": "the fewest lines count, and no text is longer than in training",
    "rope": "you can fine-tune at the longer length, or slide a window",
    "alibi": "longer texts will come, and no weight may change",
    "none": "a control is wanted",
}


def code_lines(path):
    """How many lines of a Python file have code on them: not comments, docstrings or nothing."""
    lines, start = set(), True  # start: of a statement
    for token in tokenize.generate_tokens(open(path, encoding="utf-8").readline):
        if token.type in (tokenize.NEWLINE, tokenize.INDENT, tokenize.DEDENT):
            start = True
        elif token.type not in (tokenize.COMMENT, tokenize.NL, tokenize.ENDMARKER):
            if not (start and token.type == tokenize.STRING):
                lines |= set(range(token.start[0], token.end[0] + 1))
            start = False
    return len(lines)


def summary(results, files):
    """One row per scheme out of all that was measured, as Markdown: files {scheme: its file, or None}.

    From train_compare.json, extrapolation.json, bench_train.json and bench_long.json. A scheme without a layer of its own is
    `none` in its layers, and has that one's memory.
    """
    load = lambda name: json.loads((results / f"{name}.json").read_text("utf-8"))
    trained, lengths, steps, long = load("train_compare")["rows"], load("extrapolation"), load("bench_train")["rows"], load("bench_long")["rows"]
    L, table = lengths["trained"]["train_len"], []
    cells = [cell for cell in lengths["summary"] if cell["protocol"] == "fixed"]
    measured = sorted({cell["n"] for cell in cells})
    memory = {row["scheme"]: row["extra_mb"] for row in long if (row["what"], row["who"], row["T"]) == ("layer", "this repository", 8192)}
    for scheme, file in files.items():
        mine = [row for row in trained if row["scheme"] == scheme]
        ppl = {cell["n"]: cell["ppl"] for cell in cells if cell["scheme"] == scheme}
        step, = (row["times_none"] for row in steps if (row["scheme"], row["who"]) == (scheme, "this repository"))
        table.append([scheme, spread([row["train_ppl"] for row in mine]), *(f"{ppl[n]:.2f}" for n in measured),
                      usable_cell(ppl, L), f"{mine[0]['position_parameters']:,}",
                      code_lines(file) if file else "–", f"{step:.2f}", f"{memory.get(scheme, memory['none']) / memory['none']:.1f}", USE_WHEN[scheme]])
    header = ["scheme", "train ppl", *(f"ppl at {n}" for n in measured), "usable length", "position parameters", "lines of code", "time of a step ¹", "layer's memory at 8k ¹", "use it when"]
    return markdown_table(header, table).replace("---: |\n", "--- |\n", 1)


def fill_readme(readme, results):
    """README text with each block between `<!-- NAME.md -->`, or FOLDER/NAME.md, and `<!-- end -->` anew from results/.

    `<!-- NAME.md: Word -->` takes only the table after the paragraph of the file that begins with that word, and
    `<!-- NAME.md: Word: a|b -->` only its rows whose first cell is a or b.
    """
    def block(match):
        text = (results / match[2]).read_text("utf-8").strip()
        if match[3]:
            parts = text.split("\n\n")
            start, = (i for i, part in enumerate(parts) if part.startswith(match[3]))
            text = parts[start + 1]
        if match[4]:
            head, line, *rows = text.splitlines()
            wanted = [f"| {name} |" for name in match[4].split("|")]
            text = "\n".join([head, line] + [row for row in rows if row.startswith(tuple(wanted))])
        return f"{match[1]}\n{text}\n\n<!-- end -->"
    return re.sub(r"(<!-- ([\w/]+\.md)(?:: ([\w-]+))?(?:: ([^>\n]+?))? -->\n).*?<!-- end -->", block, readme, flags=re.S)


def main():
    parser = Parser("Writes results/summary.md, and the tables of README.md, anew from the other files in results/.")
    parser.parse_args()
    try:
        table = summary(HERE / "results", {scheme: None if scheme == "none" else HERE / f"pos_{scheme}.py" for scheme in COLOURS})
        write_file(HERE / "results" / "summary.md", table)
        write_file(HERE / "README.md", fill_readme((HERE / "README.md").read_text("utf-8"), HERE / "results"))
    except (KeyError, ValueError, IndexError) as error:
        parser.error(f"results/ lacks what README.md shows of it ({error!r}); the commands are in README.md")
    print("wrote results/summary.md and the tables of README.md")


if __name__ == "__main__":
    run(main)
