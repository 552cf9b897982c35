import json
import re
import subprocess
from pathlib import Path

import pytest

from common import code_hash
from report import code_lines, fill_readme, mean_std, summary
from tiny_lm import SCHEMES, TinyLM
from train_compare import training_hash

HERE = Path(__file__).parent.parent
README = (HERE / "README.md").read_text("utf-8")
SNIPPETS = re.findall(r"```python\n(.*?)```", README, re.S)


# Of earlier code, which they name by commit only: they train for long, and were not made again.
EARLIER = {"otherwise.json", "finetune.json", "break_unscramble.json", "break_bag.json", "break_theta.json"}


@pytest.fixture
def committed():
    try:
        changed = subprocess.run(["git", "-C", str(HERE), "status", "--porcelain", "--", "results", "*.py"], capture_output=True, text=True, check=True).stdout
    except (OSError, subprocess.CalledProcessError):
        pytest.skip("there is no git here to tell whether results/ is the committed one")
    if changed:
        pytest.skip("results/ or the code is your own, not what was committed")


def test_tables_are_those_of_the_results(committed):
    assert README.count("<!-- end -->") == 5
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


@pytest.mark.parametrize("path", [path for path in sorted((HERE / "results").glob("*.json")) + [HERE / "results" / "shakespeare" / "train_compare.json", HERE / "results" / "shakespeare" / "extrapolation.json",
    HERE / "results" / "finetune" / "finetune.json"] if path.name not in EARLIER], ids=lambda path: path.name)
def test_the_results_are_of_this_code(path, committed):
    result = json.loads(path.read_text("utf-8"))
    stale = [file for file, was in result.get("code", {}).items() if code_hash((HERE / file).read_bytes()) != was]
    assert "code" in result and not stale, f"run again: {result['command']}"
    if path.name == "train_compare.json":
        assert all(row["code"] == training_hash(SCHEMES[row["scheme"]]) for row in result["rows"])


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


def phrases():
    """What the prose of the README says in numbers, with the numbers from results/."""
    load = lambda name: json.loads((HERE / "results" / f"{name}.json").read_text("utf-8"))
    cell = lambda name, protocol: {(c["scheme"], c["variant"], c["n"]): c["ppl"] for c in load(name)["summary"] if c["protocol"] == protocol}
    fixed, span, longer, otherwise = cell("extrapolation", "fixed"), cell("extrapolation", "span"), cell("longer", "fixed"), cell("otherwise", "fixed")
    learned, sin, rope, alibi = (fixed[scheme, "", 256] for scheme in ("learned", "sin", "rope", "alibi"))
    broken = int(min(fixed["learned", "", 512], fixed["sin", "", 512]))
    flat = {f"{fixed['alibi', '', n]:.2f}" for n in (512, 1024, 2048)}
    rope_step, = (row["times_none"] for row in load("bench_train")["rows"] if (row["scheme"], row["who"]) == ("rope", "this repository"))
    assert len(flat) == 1
    yield f"At 256 both do well here ({learned:.2f} and {sin:.2f}); at 512 they are above {broken}"
    yield f"level with ALiBi as the best ({rope:.2f} and {alibi:.2f})"
    yield f"costs {100 * (rope_step - 1):.0f} % of a step. Past that it breaks ({fixed['rope', '', 512]:.0f} at 512)"
    yield f"only fade: {flat.pop()} at every length"
    yield f"（{learned:.2f}、{sin:.2f}），512 处已超过 {broken}"
    yield f"并列最好（{rope:.2f}、{alibi:.2f}），没有参数，每步多花 {100 * (rope_step - 1):.0f}% 时间"
    yield f"RoPE at 256 is {rope:.2f} here and {longer['rope', '', 256]:.2f} further down"
    yield f"triples at twice the length ({longer['learned', '', 256]:.2f} to {longer['learned', 'interpolate', 512]:.2f})"
    yield f"ALiBi's from {span['alibi', '', 256]:.2f} to {span['alibi', '', 2048]:.2f}"

    worse = lambda way, n: 100 * (longer["rope", way, n] / longer["rope", "", 256] - 1)
    first = lambda way: mean_std([row["first"] for row in load("break_long")["rows"] if row["way"] == way])[0]
    yield f"of a text have {first('yarn'):.2f} with YaRN and {first('llama3'):.2f} with llama3 in place of {first('none'):.2f}"
    yield f"(at 4 times {worse('llama3', 1024):.0f} % worse), with YaRN further out (8 times: {worse('yarn', 2048):.0f} % worse)"
    trained = "trained at random positions below 4096"
    costs = [100 * (otherwise[scheme, trained, 256] / otherwise[scheme, "", 256] - 1) for scheme in ("learned", "sin", "rope")]
    yield f"cost {min(costs):.0f} to {max(costs):.0f} % at 256 and bring learned and sinusoidal from above {int(min(otherwise['learned', '', 512], otherwise['sin', '', 512]))} to about {(otherwise['learned', trained, 512] + otherwise['sin', trained, 512]) / 2:.0f} at 512"

    rows = [row for row in load("context")["rows"] if row["x"] == 64 and row["what"].startswith("attention")]
    seen = lambda scheme, n: f"{100 * mean_std([row['value'] for row in rows if (row['scheme'], row['what']) == (scheme, f'attention at {n}')])[0]:.0f}"
    yield (f"the last 64 tokens give {seen('alibi', 1024)} % of their attention to the last 64 bytes with ALiBi ({seen('alibi', 256)} % in one of 256), but "
           f"{seen('rope', 1024)} % with RoPE ({seen('rope', 256)} %), and {seen('learned', 1024)} % with learned and sinusoidal ({seen('learned', 256)} and {seen('sin', 256)} %)")
    near, usual, far = ([row for row in load("break_theta")["rows"] if row["base"] == base] for base in (10, 10_000, 1_000_000))
    fixed_at = lambda rows, n: mean_std([row["fixed"][n] for row in rows])[0]
    share = lambda rows: f"{100 * mean_std([row['near']['32'] for row in rows])[0]:.0f} %"
    yield f"than base 10,000 does ({share(near)} against {share(usual)})"
    yield f"no worse at 256 ({fixed_at(far, '256'):.2f} against {fixed_at(usual, '256'):.2f}"
    yield f"at 4,096 base 10 has {fixed_at(near, '4096'):.0f} in place of {fixed_at(usual, '4096'):.0f}"

    shakespeare = load("shakespeare/train_compare")["rows"]
    end = lambda scheme: mean_std([row["val_ppl"] for row in shakespeare if row["scheme"] == scheme])[0]
    seconds = lambda scheme: f"{sorted(row['seconds'] for row in shakespeare if row['scheme'] == scheme)[1]:.0f}"
    yield f"ends at perplexity {end('rope'):.2f} (RoPE) and {end('alibi'):.2f} (ALiBi) after {seconds('rope')} and {seconds('alibi')} seconds"
    long = {(row["what"], row["scheme"], row["who"], row["T"]): row["seconds"] for row in load("bench_long")["rows"]}
    yield (f"at 8k our layer is {long['layer', 'alibi', 'textbook formula', 8192] / long['layer', 'alibi', 'this repository', 8192]:.0f} times as fast, "
           f"and the whole model {long['model', 'alibi', 'x-transformers', 8192] / long['model', 'alibi', 'this repository', 8192]:.0f} times as fast as x-transformers'")


def test_numbers_in_the_prose(committed):
    text = re.sub(r"\s+", " ", README)
    missing = [phrase for phrase in phrases() if phrase not in text]
    assert not missing
