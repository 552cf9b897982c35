"""report.py: the summary, the tables of README.md, and what a user is told."""

import json

import pytest

import report
from lab.rows import measured, write_rows
from lab.runs import Run
from report import code_lines, fill_readme, summary
from schemes.scheme import SCHEMES

RUN = Run(train_lens=(8,), trained_len=8)
PPL = dict(learned=(3.0, 9.0), sin=(3.0, 8.0), rope=(2.5, 4.0), alibi=(2.0, 2.1), none=(5.0, 9.0))


def write_results(folder, schemes=SCHEMES):
    """The four files that the summary is made of, with small numbers."""
    trained, lengths, steps, layers = [], [], [], []
    for scheme in schemes:
        flat = RUN.replace(scheme=scheme).flat()
        for seed, ppl in ((0, 3.0), (1, 4.0)):
            trained.append(flat | measured(metric="train_ppl", value=ppl) | {"seed": seed})
        parameters = measured(metric="position_parameters", value=1024 * (scheme == "learned"))
        trained.append(flat | parameters)
        for protocol in ("span", "fixed"):
            for n, ppl in zip((8, 16), PPL[scheme]):
                ppl -= protocol == "span"
                cell = measured(protocol=protocol, n=n, metric="ppl", value=ppl, low=ppl, high=ppl)
                lengths.append(flat | cell)
        steps.append(dict(scheme=scheme, who=report.OURS, times_none=1.2))
        steps.append(dict(scheme=scheme, who="a peer", times_none=None))
    for who, scheme, length, memory in (
        (report.OURS, "none", 8192, 20),
        (report.OURS, "alibi", 8192, 30),
        (report.OURS, "alibi", 1024, 1),
        ("textbook formula", "alibi", 8192, 900),
    ):
        layers.append(dict(what="layer", scheme=scheme, who=who, T=length, extra_mb=memory))
    write_rows(folder / "train_compare.json", trained)
    write_rows(folder / "extrapolation.json", lengths)
    (folder / "bench_train.json").write_text(json.dumps({"rows": steps}))
    (folder / "bench_long.json").write_text(json.dumps({"rows": layers}))


@pytest.fixture
def house(tmp_path, monkeypatch):
    """A folder that report.py takes for the repository -> its results/."""
    (tmp_path / "results").mkdir()
    for scheme in SCHEMES:
        (tmp_path / f"pos_{scheme}.py").write_text("one = 1\ntwo = 2\n")
    (tmp_path / "README.md").write_text("<!-- summary.md -->\nold\n<!-- end -->\n")
    monkeypatch.setattr(report, "ROOT", tmp_path)
    monkeypatch.setattr(report, "RESULTS", tmp_path / "results")
    return tmp_path / "results"


def test_summary_has_a_line_for_each_scheme(house):
    write_results(house)
    lines = summary(house).splitlines()
    assert lines[0].startswith("| scheme | train ppl | ppl at 8 | ppl at 16 | usable length | ")
    assert lines[1].endswith("| ---: | --- |")
    alibi = "| alibi | 3.50 ± 0.71 | 2.00 | 2.10 | ≥ 16 | 0 | 2 | 1.20 | 1.5 | longer texts"
    assert lines[5].startswith(alibi)
    assert lines[2].startswith(
        "| learned | 3.50 ± 0.71 | 3.00 | 9.00 | 8 | 1,024 | 2 | 1.20 | 1.0 |"
    )
    assert lines[6].startswith("| none | 3.50 ± 0.71 | 5.00 | 9.00 | 8 | 0 | – | 1.20 | 1.0 |")
    assert len(lines) == 2 + len(SCHEMES)


def test_summary_leaves_out_models_read_in_another_way(house):
    write_results(house)
    path = house / "extrapolation.json"
    rows, expected = report.read_rows(path), summary(house)
    others = [rows[2] | changed for changed in ({"way": "clamp"}, {"read_window": 8})]
    write_rows(path, rows + [row | {"value": 99.0} for row in others])
    assert summary(house) == expected


def test_report_fills_in_summary_and_readme(house, cli):
    write_results(house)
    assert cli(report)[0] == 0
    text = (house / "summary.md").read_text("utf-8")
    page = (house.parent / "README.md").read_text("utf-8")
    assert text == summary(house) and text in page and "old" not in page


def test_report_names_what_results_of_ones_own_lack(house, cli):
    page = (house.parent / "README.md").read_text("utf-8")
    for schemes in ((), ("rope", "alibi")):
        write_results(house, schemes)
        code, _, stderr = cli(report)
        assert code == 2 and stderr.count("\n") == 1 and "README.md" in stderr
    assert not (house / "summary.md").exists()
    assert (house.parent / "README.md").read_text("utf-8") == page


def test_report_names_a_file_of_an_older_version(house, cli):
    write_results(house)
    (house / "train_compare.json").write_text('{"rows": [{"scheme": "rope", "val_ppl": 3.1}]}')
    code, _, stderr = cli(report)
    assert code == 2 and stderr.count("\n") == 1 and "train_compare.json" in stderr


def test_wrong_flags_write_nothing(house, cli):
    write_results(house)
    assert cli(report, "--help")[0] == 0
    code, _, stderr = cli(report, "--nosuch")
    assert code == 2 and stderr.count("\n") == 1 and "--nosuch" in stderr
    assert not (house / "summary.md").exists()


def test_fingerprints_are_written_for_every_scheme(house, cli, monkeypatch):
    monkeypatch.setattr(report, "fingerprint", lambda scheme, corpus: {"nll_at_L": len(scheme)})
    assert cli(report, "--fingerprints")[0] == 0
    found = json.loads((house / "fingerprints.json").read_text("utf-8"))
    assert found == {scheme: {"nll_at_L": len(scheme)} for scheme in SCHEMES}
    assert not (house / "summary.md").exists()


def test_tables_are_filled_in_from_folders_too(tmp_path):
    (tmp_path / "deep").mkdir()
    (tmp_path / "a.md").write_text("| A |\n")
    (tmp_path / "deep" / "b.md").write_text("| B |\n")
    text = "x\n<!-- a.md -->\nold\n<!-- end -->\ny\n<!-- deep/b.md -->\n<!-- end -->\nz"
    filled = fill_readme(text, tmp_path)
    assert filled == (
        "x\n<!-- a.md -->\n\n| A |\n\n<!-- end -->\ny\n<!-- deep/b.md -->\n\n| B |\n\n"
        "<!-- end -->\nz"
    )
    assert fill_readme(filled, tmp_path) == filled


def test_a_marker_may_name_one_table_and_some_of_its_rows(tmp_path):
    path = tmp_path / "a.md"
    path.write_text("Note.\n\nSpan: x.\n\n| S |\n\nFixed-target: y.\n\n| F |\n")
    marker = "<!-- a.md: Fixed-target -->"
    text = fill_readme(f"{marker}\nold\n<!-- end -->", tmp_path)
    assert text == f"{marker}\n\n| F |\n\n<!-- end -->"

    rows = "| rope | 1 |\n| rope, yarn | 2 |\n| alibi | 3 |\n"
    path.write_text(f"Span: x.\n\n| s | n |\n| --- | ---: |\n{rows}")
    marker = "<!-- a.md: Span: rope|alibi -->"
    text = fill_readme(f"{marker}\n<!-- end -->", tmp_path)
    table = "| s | n |\n| --- | ---: |\n| rope | 1 |\n| alibi | 3 |"
    assert text == f"{marker}\n\n{table}\n\n<!-- end -->"


def test_lines_of_code_by_hand(tmp_path):
    (tmp_path / "a.py").write_text('''"""A docstring
of two lines."""
import os  # one

# nothing

def f(x):  # two
    """Doc."""
    text = """three
four"""
    return (x,  # five
            text)  # six
class A:  # seven
    "Doc"
    y = "eight"
''')
    assert code_lines(tmp_path / "a.py") == 8
