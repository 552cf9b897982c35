import matplotlib.pyplot as plt
import pytest

import report
from report import COLOURS, OTHERS, WAYS, _grid, _label_ends


def labelled(ys, log=False):
    """The heights at which lines that end at these heights, on an axis from 1 to 101, get their names."""
    figure, axis = plt.subplots()
    axis.set_yscale("log" if log else "linear")
    axis.set_ylim(1, 101)
    _label_ends(axis, {str(i): (1, y, "k") for i, y in enumerate(ys)}, log)
    heights = {int(text.get_text()): text.xy[1] for text in axis.texts}
    plt.close(figure)
    return [heights[i] for i in range(len(ys))]


def test_names_stand_at_the_ends_of_their_lines_or_are_pushed_apart_about_them():
    assert labelled([50, 90, 20]) == pytest.approx([50, 90, 20])
    assert labelled([52, 48]) == pytest.approx([50 + 2.9, 50 - 2.9])  # 5.8 % of the axis apart
    assert labelled([50, 50, 90, 50]) == pytest.approx([50 - 5.8, 50, 90, 50 + 5.8])
    assert labelled([50, 51, 55]) == pytest.approx([52 - 5.8, 52, 52 + 5.8])  # the third would touch the second that was moved
    assert labelled([1, 1]) == pytest.approx([1, 6.8])  # not below the axis
    assert labelled([101, 101]) == pytest.approx([95.2, 101])  # nor above it
    assert 1 <= min(labelled([50] * 25)) and max(labelled([50] * 25)) <= 101  # however many
    low, high = labelled([10, 10], log=True)
    assert low * high == pytest.approx(100) and high / low == pytest.approx(101 ** 0.058)


@pytest.mark.parametrize("ends", [{}, {"a": (1, float("nan"), "k")}, {"a": (1, 0.0, "k"), "b": (1, 2.0, "k")}])
def test_a_line_that_ends_nowhere_gets_no_name(ends):
    figure, axis = plt.subplots()
    axis.set_yscale("log")
    _label_ends(axis, ends, True)
    assert [text.get_text() for text in axis.texts] == [name for name, (_, y, _) in ends.items() if y > 0]
    plt.close(figure)


def test_colours_tell_ways_from_schemes_and_from_each_other():
    assert set(OTHERS).isdisjoint(COLOURS.values()) and len({*OTHERS, *COLOURS.values()}) == 10
    assert {WAYS["no scaling"], WAYS["base 10,000"]} == {COLOURS["rope"]}
    for panel in (("linear", "ntk", "dynamic", "yarn", "llama3", "no scaling"), ("linear", "clamp", "wrap", "interpolate")):
        assert len({WAYS[way] for way in panel}) == len(panel)


@pytest.mark.parametrize("panels, shape", [(1, (1, 1)), (2, (1, 2)), (3, (1, 3)), (4, (2, 2)), (5, (3, 2))])
def test_no_picture_has_an_empty_quarter_unless_it_must(panels, shape):
    figure, axes = _grid(panels, 3)
    assert axes[0].get_gridspec().get_geometry() == shape and len(axes) == panels
    plt.close(figure)


def test_wrong_flags_write_nothing(cli, monkeypatch):
    monkeypatch.setattr(report, "write_file", lambda *_: pytest.fail("written"))
    assert cli(report, "--help")[:1] == (0,)
    code, _, stderr = cli(report, "--nosuch")
    assert code == 2 and stderr.count("\n") == 1 and "--nosuch" in stderr


def test_results_of_ones_own_that_lack_a_scheme_are_said_to(cli, monkeypatch, tmp_path):
    (tmp_path / "results").mkdir()
    for name in ("train_compare", "extrapolation", "bench_train", "bench_long"):
        (tmp_path / "results" / f"{name}.json").write_text('{"rows": [], "trained": {"train_len": 8}, "summary": []}')
    monkeypatch.setattr(report, "HERE", tmp_path)
    code, _, stderr = cli(report)
    assert code == 2 and stderr.count("\n") == 1 and "README.md" in stderr and len(list(tmp_path.rglob("*.md"))) == 0
