import dataclasses
import itertools
import math
import os
import re
import subprocess
import sys

import pytest

from helpers import ROOT, RUN
from lab import panels, plots
from lab.panels import COLOURS, OTHERS, WAYS, Line, Panel, buckets, by_kind, colours, longer_panels
from lab.rows import measured

LONG = "learned, trained at random positions below 4096, trained with copies"


@pytest.fixture
def drawn(monkeypatch):
    """The figures that are drawn, in place of files."""
    figures = []
    monkeypatch.setattr(plots, "write", lambda figure, path: figures.append(figure))
    return figures


def row(scheme="rope", seed=0, value=1.0, **fields):
    run = dataclasses.replace(RUN, scheme=scheme, seed=seed)
    return run.flat() | measured(value=value, **fields)


def cell(scheme, n=16, trained="", way="", read_window=0, protocol="fixed", **fields):
    words = (scheme, trained, way, f"window {read_window}" * bool(read_window))
    made = dict(name=panels.joined(*words), scheme=scheme, trained=trained, way=way, n=n)
    made |= dict(factor=None, read_window=read_window, protocol=protocol, seeds=[0, 1])
    return made | dict(ppl=3.0, std=0.5, low=2.5, high=3.5, note="") | fields


def panel(ys, log=False, names=None):
    """A panel of lines from x = 1 to 2 that end at these heights, on an axis from 1 to 101."""
    names = names or map(str, range(len(ys)))
    lines = [Line([1, 2], [y, y], "#000000", name) for name, y in zip(names, ys)]
    return Panel(lines, "title", "x", "y", "y" if log else "", y_limits=(1, 101))


def heights(ys, log=False):
    """Where the names of these lines are, of the height of the plot."""
    axis = plots.draw([panel(ys, log)]).axes[0]
    found = {int(text.get_text()): text.xy[1] for text in axis.texts}
    return [found[i] for i in range(len(ys))]


def names_in(axis):
    return [text.get_text() for text in axis.texts if text.get_fontweight() == "bold"]


# Names at the ends of lines


def test_names_stand_at_the_ends_of_their_lines():
    assert heights([51, 91, 21]) == pytest.approx([0.5, 0.9, 0.2])
    assert heights([101**0.5, 101**0.25], log=True) == pytest.approx([0.5, 0.25])


@pytest.mark.parametrize(
    "ends, wanted",
    [
        ([0.5], [0.5]),
        ([0.48, 0.52], [0.45, 0.55]),
        ([0.5, 0.5, 0.5, 0.9], [0.4, 0.5, 0.6, 0.9]),
        ([0.5, 0.5, 0.59], [0.43, 0.53, 0.63]),  # the third would touch the moved second
        ([0.0, 0.0], [0.0, 0.1]),  # not below the plot
        ([1.0, 1.0], [0.9, 1.0]),  # nor above it
    ],
)
def test_names_that_would_touch_are_pushed_apart_about_their_ends(ends, wanted):
    assert plots.pushed_apart(ends, 0.1) == pytest.approx(wanted)


def test_any_number_of_names_stays_beside_the_plot():
    places = plots.pushed_apart([0.5] * 40, 0.1)
    assert 0 <= min(places) and max(places) <= 1
    assert [b - a for a, b in itertools.pairwise(places)] == pytest.approx([1 / 40] * 39)


def test_a_line_is_named_at_the_last_point_that_can_be_drawn():
    lines = [Line([1, 2, 3], [5, None, math.inf], "#000000", "ends early"),
             Line([1, 2, 3], [math.nan, None, 0], "#000000", "nowhere"),
             Line([1, 2, 3], [5, 6, 7], "#000000")]  # fmt: skip
    axis = plots.draw([Panel(lines, "", "x", "y", "y")]).axes[0]
    assert [(text.get_text(), text.xy[0]) for text in axis.texts] == [("ends early", 1)]


def test_lines_that_end_alike_are_named_in_the_order_of_the_points_before():
    lines = [Line([1, 2, 3], [0, y, 1], "#000000", str(y)) for y in (0.4, 0.2, 0.6)]
    axis = plots.draw([Panel(lines, "", "x", "y")]).axes[0]
    assert names_in(axis) == ["0.2", "0.4", "0.6"]  # from below


@pytest.mark.parametrize("names", [[LONG], [LONG * 2] * 12, ["a", "b"]])
@pytest.mark.parametrize("count", [1, 3, 4])
def test_no_name_or_title_is_clipped_or_covers_another_panel(names, count):
    shown = [panel(range(10, 10 + len(names)), names=names) for _ in range(count)]
    shown[0].title = "A title that is longer than the plot below it\n(with a second line)"
    figure = plots.draw(shown, "All of them")
    figure.draw_without_rendering()
    whole, axes = figure.bbox, [axis for axis in figure.axes if axis.get_visible()]
    boxes = [axis.get_window_extent() for axis in axes]
    assert all(box.width > 200 and box.height > 200 for box in boxes)  # pixels
    for axis, own in zip(axes, boxes):
        texts = [child for child in axis.get_children() if hasattr(child, "get_text")]
        assert len([text for text in texts if text.get_text()]) == 1 + len(names)  # and the title
        for box in (text.get_window_extent() for text in texts if text.get_text()):
            assert whole.x0 <= box.x0 and box.x1 <= whole.x1 and box.y1 <= whole.y1
            assert not any(box.overlaps(other) for other in boxes if other is not own)


@pytest.mark.parametrize(
    "count, shape", [(1, (1, 1)), (2, (1, 2)), (3, (1, 3)), (4, (2, 2)), (5, (3, 2))]
)
def test_no_picture_has_an_empty_quarter_unless_it_must(count, shape):
    axes = plots.draw([panel([5]) for _ in range(count)]).axes
    assert axes[0].get_gridspec().get_geometry() == shape
    assert [axis.get_visible() for axis in axes].count(True) == count


# Colours and styles


def test_colours_tell_ways_from_schemes_and_from_each_other():
    assert len({*OTHERS, *COLOURS.values()}) == 10
    assert {WAYS["no scaling"], WAYS["base 10,000"]} == {COLOURS["rope"]}
    rope = ("linear", "ntk", "dynamic", "yarn", "llama3", "no scaling")
    for ways in (rope, ("linear", "clamp", "wrap", "interpolate")):
        assert len({WAYS[way] for way in ways}) == len(ways)


def test_own_schemes_take_the_other_colours_in_turn():
    own = [f"my.py:Mine{i}" for i in range(6)]
    found = colours(["rope", *own])
    assert found["rope"] == COLOURS["rope"]
    assert [found[name] for name in own] == [*OTHERS, OTHERS[0]]
    assert plots.short(own[0]) == "Mine0" and plots.short("rope:base=10") == "rope:base=10"


def test_no_two_lines_of_a_panel_look_alike():
    schemes = ["rope", "alibi", *(f"my.py:Mine{i}" for i in range(14))]
    metrics = ("accuracy", "accuracy without the first")
    pairs = itertools.product(schemes, metrics)
    rows = [row(scheme, protocol="copy", metric=metric, n=16) for scheme, metric in pairs]
    (copy,) = panels.context_panels(rows, 16)
    plots.draw([copy])
    looks = {(line.colour, line.style) for line in copy.lines}
    assert len(copy.lines) == len(looks) == 2 * len(schemes)


# What the pictures show


def test_means_are_over_all_seeds_where_all_have_a_value():
    rows = [row(seed=0, step=10, value=4.0), row(seed=0, step=20, value=2.0),
            row(seed=1, step=10, value=2.0)]  # fmt: skip
    assert panels.mean_by(rows, "step") == ([10], [3.0])


def test_buckets_are_means_of_equal_parts():
    assert buckets([1.0, 3.0, 5.0, 7.0, 100.0], 2) == ([1.0, 3.0], [2.0, 6.0])
    assert buckets([1.0, 2.0], 32) == ([0.5, 1.5], [1.0, 2.0])


def test_loss_curves_have_a_line_per_scheme_and_say_how_all_were_trained(drawn):
    rows = [row(s, step=step, metric="loss", value=5 / step) | {"copies": True}
            for s in ("rope", "a/my.py:Mine") for step in (10, 20)]  # fmt: skip
    plots.plot_loss_curves("loss.png", [*rows, row("sin", step=10, value=None)])
    axis = drawn[0].axes[0]
    assert sorted(names_in(axis)) == ["Mine", "rope"]
    assert axis.get_title(loc="left").endswith("\n(trained with copies)")
    plots.plot_loss_curves("loss.png", [*rows, row("rope", step=10, value=1.0)])
    assert set(names_in(drawn[1].axes[0])) == {
        "Mine, trained with copies", "rope, trained with copies", "rope"}  # fmt: skip


def test_extrapolation_has_a_panel_per_protocol_and_one_by_position(drawn):
    cells = [cell("rope", n, protocol=p) for p in ("span", "fixed") for n in (16, 32)]
    cells.append(cell("learned", 16) | {"ppl": None})
    plots.plot_extrapolation("lengths.png", cells, {"rope": [1.0] * 32, "sin": [1.0]}, 16)
    titles = [axis.get_title(loc="left").split("\n")[0] for axis in drawn[0].axes]
    assert titles == ["Same targets, more context before them", "Windows without overlap",
                      "Loss by position in a window of 32"]  # fmt: skip
    assert [names_in(axis) for axis in drawn[0].axes] == [["rope"]] * 3
    plots.plot_extrapolation("lengths.png", cells[2:], {}, 16)
    assert len(drawn[1].axes) == 1


def test_longer_has_a_panel_for_each_kind_of_way_by_the_fields_alone():
    named = "my.py:trained_window_yarn"
    plain, yarn = cell("rope"), cell("rope", way="yarn")
    sin, linear = cell("sin"), cell("sin", way="linear")
    window, trained = cell(named, read_window=16), cell(named, trained="trained with window 8")
    cells = [plain, yarn, sin, linear, window, trained, cell("none"), cell(named)]
    assert by_kind(cells) == {
        "Frequencies rescaled": [plain, yarn],
        "Positions moved or scaled": [sin, linear],
        "Sliding window": [window],
        "Trained in another way": [trained],
    }
    without_ways = [plain, window, trained]
    assert by_kind(without_ways) == {"": without_ways}
    assert by_kind([trained]) == {"Trained in another way": [trained]}


def test_longer_says_in_the_title_what_all_lines_of_a_panel_share():
    cells = [cell(s, read_window=16) for s in ("rope", "alibi")] + [cell("rope", way="yarn")]
    cells += [cell("alibi"), cell("rope", trained="trained with copies"),
              cell("rope", trained="trained at 8 16")]  # fmt: skip
    rescaled, window, trained = longer_panels(cells, 16)
    assert rescaled.title == "Frequencies rescaled: yarn" and rescaled.lines[1].name == "rope"
    assert window.title == "Sliding window: window 16"
    assert [line.name for line in window.lines] == ["", "rope", "alibi"]  # the first: pale ALiBi
    assert [line.name for line in trained.lines] == ["", "rope, with copies", "rope, at 8 16"]


def test_longer_draws_one_protocol_and_names_it(drawn):
    both = [cell("rope", protocol=p, way=w) for p in ("fixed", "span") for w in ("", "yarn")]
    plots.plot_longer("longer.png", both, 16)
    plots.plot_longer("longer.png", both[2:], 16)
    assert "fixed protocol" in drawn[0].get_suptitle() and "pale" not in drawn[0].get_suptitle()
    assert "span protocol" in drawn[1].get_suptitle()
    assert names_in(drawn[0].axes[0]) == ["rope", "rope, yarn"]


def test_context_has_a_panel_per_kind_and_thin_lines_without_the_first_string():
    rows = [row(protocol="use", metric="ppl", n=n) for n in (8, 16)]
    rows += [row(protocol="copy", metric="accuracy", n=16, value=0.9)]
    rows += [row(protocol="copy", metric="accuracy without the first", n=16, value=0.04)]
    rows += [row(protocol="attention", n=n, within=d) for n in (16, 64) for d in (1, 16)]
    use, copy, *attention = panels.context_panels(rows, 16)
    assert use.lines[0].xs == [8, 16] and use.log == "xy"
    assert [(line.name, line.ys, line.width) for line in copy.lines] == [
        ("rope", [0.9], 1.8), ("", [0.04], 1)]  # fmt: skip
    assert copy.y_limits == pytest.approx((-0.02, 0.945))
    assert [shares.title.split()[-2] for shares in attention] == ["16", "64"]
    assert len(panels.context_panels(rows[:2], 16)) == 1


def test_long_context_leaves_out_what_was_not_measured():
    common = dict(what="layer", scheme="rope", seconds=0.1)
    rows = [common | dict(who="ours", T=1024, extra_mb=5.0),
            common | dict(who="ours", T=1500, extra_mb=None),
            common | dict(who="textbook formula", T=1024, extra_mb=None),
            common | dict(what="model", who="ours", T=4096, extra_mb=1.0)]  # fmt: skip
    time, memory = panels.long_context_panels(rows)
    assert time.ticks == {1024: "1k", 1500: "1500"} and time.lines[0].xs == [1024, 1500]
    assert [line.name for line in time.lines] == ["rope", "rope, textbook"]
    assert [line.style for line in time.lines] == ["-", "--"]
    assert memory.lines[0].xs == [1024] and memory.lines[1].xs == []


def test_named_lines_have_the_colours_of_their_schemes_and_ways(drawn):
    lines = {"yarn": ([1, 2], [3, 4]), "rope": ([1, 2, 4], [1, 2, 3]), "bag": ([1], [2])}
    plots.plot_lines("lines.png", lines, "title", "x", "y", mark=2, log=True)
    axis = drawn[0].axes[0]
    found = [line.get_color() for line in axis.lines]
    assert found == [WAYS["yarn"], COLOURS["rope"], OTHERS[0], plots.GREY]
    assert list(axis.get_xticks()) == [1, 2, 4] and axis.get_yscale() == "log"


def test_rotation_turns_each_pair_by_its_angle(drawn):
    plots.draw_rotation("rotation.png", head_dim=4, pairs=(0, 1), steps=3)
    top = drawn[0].axes[:2]
    assert [axis.get_title().split("\n")[0] for axis in top] == [
        "pair 0: 57.3° per token", "pair 1: 0.573° per token"]  # fmt: skip
    arrows = [text.xy for text in top[0].texts if text.get_text() == "" and hasattr(text, "xy")]
    assert arrows == [pytest.approx((math.cos(p), math.sin(p))) for p in range(3)]


# Files


def test_pictures_are_reproducible_and_name_no_software(tmp_path):
    for name in ("a.png", "b.png"):
        plots.plot_lines(tmp_path / name, {"rope": ([1, 2], [3, 4])}, "title", "x", "y")
    plots.draw_rotation(tmp_path / "rotation.png")
    first, second = (tmp_path / "a.png").read_bytes(), (tmp_path / "b.png").read_bytes()
    assert first == second and first.startswith(b"\x89PNG") and b"Software" not in first
    assert sorted(os.listdir(tmp_path)) == ["a.png", "b.png", "rotation.png"]


def test_the_backend_of_a_notebook_does_not_matter():
    backend = {"MPLBACKEND": "module://matplotlib_inline.backend_inline"}
    code = "from lab import plots; plots.draw([plots.Panel([], '', 'x', 'y')])"
    command = [sys.executable, "-c", code]
    done = subprocess.run(command, cwd=ROOT, env=os.environ | backend, capture_output=True)
    assert done.returncode == 0, done.stderr


def test_only_plots_imports_matplotlib():
    pattern = re.compile(r"^\s*(import|from) matplotlib", re.M)
    folders = (".", "bench", "data", "experiments", "lab", "schemes")
    sources = [path for folder in folders for path in (ROOT / folder).glob("*.py")]
    users = [path.name for path in sources if pattern.search(path.read_text("utf-8"))]
    assert users == ["plots.py"]
