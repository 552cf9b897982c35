import json
import re
import subprocess
from pathlib import Path

import pytest

from report import code_lines, fill_readme, summary
from tiny_lm import SCHEMES, TinyLM
from train_compare import training_hash

HERE = Path(__file__).parent.parent
README = (HERE / "README.md").read_text("utf-8")
SNIPPETS = re.findall(r"```python\n(.*?)```", README, re.S)


def test_tables_are_those_of_the_results():
    assert README.count("<!-- end -->") == 6
    own = subprocess.run(["git", "-C", str(HERE), "status", "--porcelain", "--", "results"], capture_output=True, text=True).stdout
    if own:
        pytest.skip("results/ holds a run of your own, not the committed one of the README")
    assert fill_readme(README, HERE / "results") == README, "run: python report.py"


def test_tables_are_filled_in_from_folders_too(tmp_path):
    (tmp_path / "deep").mkdir()
    (tmp_path / "a.md").write_text("| A |\n")
    (tmp_path / "deep" / "b.md").write_text("| B |\n")
    text = "x\n<!-- a.md -->\nold\n<!-- end -->\ny\n<!-- deep/b.md -->\n<!-- end -->\nz"
    expected = "x\n<!-- a.md -->\n\n| A |\n\n<!-- end -->\ny\n<!-- deep/b.md -->\n\n| B |\n\n<!-- end -->\nz"
    assert fill_readme(text, tmp_path) == expected
    (tmp_path / "a.md").write_text("Note.\n\nSpan: x.\n\n| S |\n\nFixed-target: y.\n\n| F |\n")
    assert fill_readme("<!-- a.md: Fixed-target -->\nold\n<!-- end -->", tmp_path) == (
        "<!-- a.md: Fixed-target -->\n\n| F |\n\n<!-- end -->")
    (tmp_path / "a.md").write_text("Span: x.\n\n| s | n |\n| --- | ---: |\n| rope | 1 |\n| rope, yarn | 2 |\n| alibi | 3 |\n")
    assert fill_readme("<!-- a.md: Span: rope|alibi -->\n<!-- end -->", tmp_path) == (
        "<!-- a.md: Span: rope|alibi -->\n\n| s | n |\n| --- | ---: |\n| rope | 1 |\n| alibi | 3 |\n\n<!-- end -->")


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


def test_the_summary_is_read_out_of_the_results(tmp_path):
    write = lambda name, content: (tmp_path / f"{name}.json").write_text(json.dumps(content))
    write("train_compare", {"rows": [dict(scheme=s, train_ppl=p, position_parameters=n) for s, p, n in (("learned", 3.0, 1024), ("learned", 4.0, 1024), ("alibi", 2.0, 0))]})
    write("extrapolation", {"trained": {"train_len": 8}, "summary": [dict(scheme=s, protocol=protocol, n=n, ppl=ppl) for s, protocol, n, ppl in (
        ("learned", "fixed", 8, 3.0), ("learned", "fixed", 16, 9.0), ("learned", "span", 8, 1.0), ("alibi", "fixed", 8, 2.0), ("alibi", "fixed", 16, 2.1))]})
    write("bench_train", {"rows": [dict(scheme="learned", who="this repository", times_none=1.01), dict(scheme="learned", who="peer", times_none=None),
                                   dict(scheme="alibi", who="this repository", times_none=1.2)]})
    write("bench_long", {"rows": [dict(what="layer", scheme=s, who=who, T=T, extra_mb=mb) for s, who, T, mb in (
        ("none", "this repository", 8192, 20), ("alibi", "this repository", 8192, 30), ("alibi", "textbook formula", 8192, 900), ("alibi", "this repository", 1024, 1))]})
    lines = summary(tmp_path, {"learned": HERE / "pos_learned.py", "alibi": None}).splitlines()
    assert lines[2].startswith(f"| learned | 3.50 ± 0.71 | 3.00 | 9.00 | 8 | 1,024 | {code_lines(HERE / 'pos_learned.py')} | 1.01 | 1.0 | ")
    assert lines[3].startswith("| alibi | 2.00 | 2.00 | 2.10 | ≥ 16 | 0 | – | 1.20 | 1.5 | ")


def test_the_results_are_of_this_code():
    """The committed models were trained by what is in the tree."""
    rows = json.loads((HERE / "results" / "train_compare.json").read_text("utf-8"))["rows"]
    if [row["scheme"] for row in rows] != [scheme for scheme in SCHEMES for _ in range(3)]:
        pytest.skip("results/ holds a run of your own")
    assert all(row["code"] == training_hash(SCHEMES[row["scheme"]]) for row in rows), "run: python train_compare.py --seeds 0 1 2"


@pytest.mark.parametrize("snippet", [s for s in SNIPPETS if not s.startswith("# my_pos.py")])
def test_snippets_run(snippet):
    exec(snippet, {})


def test_the_scheme_of_ones_own_plugs_in(tmp_path):
    snippet, = [s for s in SNIPPETS if s.startswith("# my_pos.py")]
    (tmp_path / "my_pos.py").write_text(snippet)
    model = TinyLM(f"{tmp_path / 'my_pos.py'}:Ramp:scale=0.02", dim=16, n_layer=1, n_head=2)
    assert model.position.scale == 0.02


def test_flags_in_the_readme_are_flags():
    flags = set()
    for file in [*HERE.glob("*.py"), *HERE.glob("bench/*.py")]:
        flags |= set(re.findall(r"add_argument\(\"(--[a-z-]+)\"", file.read_text("utf-8")))
    assert set(re.findall(r"(?<![-\w])--[a-z][a-z-]*", re.sub(r"<!--|-->", "", README))) <= flags | {"--help", "--nproc"}


@pytest.mark.parametrize("driver", ["train_compare", "extrapolation_test", "context_test", "break_position"])
def test_help_says_time_and_what_is_written(driver):
    import importlib
    module = importlib.import_module(driver)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("sys.argv", [f"{driver}.py"])
        parser, _ = module.arguments()
    text = parser.format_help()
    assert re.search(r"minutes?\b", text) and "Writes" in text and "None" not in text
    assert all(action.help for action in parser._actions)


def test_files_named_in_the_readme_are_there():
    for name in set(re.findall(r"\b[\w/-]+\.(?:py|txt|png)\b", README)) - {"my_pos.py"}:
        assert (HERE / name).exists(), name
