import re
import subprocess
from pathlib import Path

import pytest

from report import fill_readme
from tiny_lm import TinyLM

HERE = Path(__file__).parent.parent
README = (HERE / "README.md").read_text("utf-8")
SNIPPETS = re.findall(r"```python\n(.*?)```", README, re.S)


def test_tables_are_those_of_the_results():
    assert README.count("<!-- end -->") == 10
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
        "<!-- a.md: Fixed-target -->\n\nFixed-target: y.\n\n| F |\n\n<!-- end -->")


@pytest.mark.parametrize("snippet", [s for s in SNIPPETS if not s.startswith("# my_pos.py")])
def test_snippets_run(snippet):
    exec(snippet, {})


def test_the_scheme_of_ones_own_plugs_in(tmp_path):
    snippet, = [s for s in SNIPPETS if s.startswith("# my_pos.py")]
    (tmp_path / "my_pos.py").write_text(snippet)
    model = TinyLM(f"{tmp_path / 'my_pos.py'}:Ramp:scale=0.02", dim=16, n_layer=1, n_head=2)
    assert model.position.scale == 0.02


@pytest.mark.parametrize("driver", ["train_compare", "extrapolation_test", "context_test"])
def test_every_flag_is_in_the_readme_and_every_flag_in_the_readme_is_one(driver):
    flags = set(re.findall(r"add_argument\(\"(--[a-z-]+)\"", (HERE / f"{driver}.py").read_text("utf-8")))
    after = README.split("## Options", 1)[1].split(f"`python {driver}.py`", 1)[1].split("\n\n", 2)
    section = after[0] if driver == "context_test" else after[1]
    assert set(re.findall(r"--[a-z][a-z-]*", section)) == flags


def test_files_named_in_the_readme_are_there():
    for name in set(re.findall(r"\b[\w/-]+\.(?:py|txt|png)\b", README)) - {"my_pos.py"}:
        assert (HERE / name).exists(), name
