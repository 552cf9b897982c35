"""README.md says what is so: its tables, snippets, commands, flags, files and numbers."""

import importlib
import json
import re
import shlex
import subprocess
import sys

import pytest

from helpers import ROOT
from lab.rows import read_rows, select, values
from lab.stats import mean_std
from lab.tables import (
    context_tables,
    finetune_table,
    lengths_tables,
    summarise,
    training_table,
)
from report import fill_readme, summary
from tiny_lm import TinyLM

README = (ROOT / "README.md").read_text("utf-8")
PAGES = README + (ROOT / "CONTRIBUTING.md").read_text("utf-8")
RESULTS = ROOT / "results"
SNIPPETS = re.findall(r"```python\n(.*?)```", README, re.S)
COMMANDS = ("train_compare", "finetune", "extrapolation_test", "context_test", "break_position")


@pytest.fixture
def committed():
    """Skip where results/ is the reader's own, not what was committed."""
    command = ["git", "-C", str(ROOT), "status", "--porcelain", "--", "results"]
    try:
        told = subprocess.run(command, capture_output=True, text=True, check=True).stdout
    except (OSError, subprocess.CalledProcessError):
        pytest.skip("there is no git here to tell whether results/ is the committed one")
    if told:
        pytest.skip("results/ is your own, not what was committed")


# Tables


def test_tables_of_the_readme_are_those_of_the_results(committed):
    assert README.count("<!-- end -->") == 5
    assert fill_readme(README, RESULTS) == README, "run: python report.py"


def test_the_summary_is_that_of_the_results(committed):
    written = (RESULTS / "summary.md").read_text("utf-8")
    assert summary(RESULTS) == written, "run: python report.py"


@pytest.mark.parametrize("folder", [".", "random", "mixed", "window", "shakespeare"])
def test_training_tables_are_those_of_their_rows(committed, folder):
    path = RESULTS / folder / "train_compare.json"
    assert numbers(training_table(read_rows(path))) == numbers_in(path)


@pytest.mark.parametrize("name", ["extrapolation", "longer", "otherwise"])
def test_tables_by_length_are_those_of_their_rows(committed, name):
    path = RESULTS / f"{name}.json"
    rows = read_rows(path)
    assert numbers(lengths_tables(rows, summarise(rows), [], 256)) == numbers_in(path)


def test_tables_of_finetuning_and_context_are_those_of_their_rows(committed):
    path = RESULTS / "finetune" / "finetune.json"
    assert numbers(finetune_table(read_rows(path), 1024)) == numbers_in(path)
    path = RESULTS / "context.json"
    assert numbers(context_tables(read_rows(path), 256)) == numbers_in(path)


def numbers(text):
    return re.findall(r"\d[\d.,]*", text)


def numbers_in(path):
    """The numbers of the Markdown table beside a file of rows."""
    return numbers(path.with_suffix(".md").read_text("utf-8"))


# Snippets, commands, flags, files


@pytest.mark.parametrize("snippet", [s for s in SNIPPETS if not s.startswith("# my_pos.py")])
def test_snippets_run(snippet):
    exec(snippet, {})


def test_the_schemes_of_ones_own_plug_in(tmp_path):
    (snippet,) = (s for s in SNIPPETS if s.startswith("# my_pos.py"))
    (tmp_path / "my_pos.py").write_text(snippet, "utf-8")
    size = dict(dim=16, n_layer=1, n_head=2)
    model = TinyLM(f"{tmp_path / 'my_pos.py'}:Ramp:scale=0.02", **size)
    assert model.scheme.kind == "embedding" and model.position.scale == 0.02
    model = TinyLM(f"{tmp_path / 'my_pos.py'}:LogDistance", **size)
    assert model.scheme.kind == "relation"
    assert model.blocks[0].attention.relation.slopes.tolist() == [1.0, 1.0]


def commands_in(text):
    """The words of each command line `python NAME.py …` of our commands in a page."""
    blocks = "".join(re.findall(r"```\n(.*?)```", text, re.S)).replace("\\\n", " ")
    inline = re.findall(r"`(python [^`]+)`", re.sub(r"```.*?```", "", text, flags=re.S))
    lines = blocks.splitlines() + [" ".join(words.split()) for words in inline]
    words = [shlex.split(line, comments=True) for line in lines if line.startswith("python ")]
    return [w for w in words if w[1].removesuffix(".py") in COMMANDS]


@pytest.mark.parametrize("words", commands_in(PAGES), ids=" ".join)
def test_commands_in_the_pages_are_understood(words):
    module = importlib.import_module(words[1].removesuffix(".py"))
    _, args = module.arguments(words[2:])
    assert args.given or len(words) == 2


def test_flags_in_the_pages_are_flags():
    flags = {"--help", "--nproc"}
    for file in [*ROOT.glob("*.py"), *ROOT.glob("bench/*.py"), ROOT / "lab" / "command.py"]:
        flags |= set(re.findall(r"\"(--[a-z][a-z-]*)\"", file.read_text("utf-8")))
    pages = re.sub(r"<!--|-->", "", PAGES)
    assert set(re.findall(r"(?<![-\w])--[a-z][a-z-]*", pages)) <= flags


@pytest.mark.parametrize("name", COMMANDS)
def test_help_says_time_and_what_is_written(name, monkeypatch):
    monkeypatch.setattr(sys, "argv", [f"{name}.py"])
    parser, _ = importlib.import_module(name).arguments([])
    text = parser.format_help()
    assert re.search(r"minutes?\b", text) and "None" not in text
    assert re.search(r"\bwrit(es|ten)\b", text, re.I)
    assert all(action.help for action in parser._actions)


def test_files_named_in_the_pages_are_there():
    pages = re.sub(r"<!--.*?-->", "", PAGES)
    named = set(re.findall(r"\b[\w/-]+\.(?:py|txt|png|md|json|toml)\b", pages))
    named -= {"my_pos.py", "NAME.py", "schemes/NAME.py"}
    missing = [name for name in named if not (ROOT / name).exists()]
    assert not missing


def test_lines_of_prose_are_no_longer_than_100_columns():
    lines = [line for line in PAGES.splitlines() if not line.startswith(("|", "<!--"))]
    assert not [line for line in lines if len(line) > 100]


# Numbers in the prose, from results/


def load(name):
    return json.loads((RESULTS / f"{name}.json").read_text("utf-8"))


def ppl_of(name, protocol="fixed"):
    """{(scheme, how trained or read, n): perplexity, mean over seeds} of a file of rows."""
    cells = summarise(select(read_rows(RESULTS / f"{name}.json"), protocol=protocol))
    return {(c["scheme"], c["trained"] or c["read"], c["n"]): c["ppl"] for c in cells}


def mean(numbers):
    return mean_std(list(numbers))[0]


def median(numbers):
    return sorted(numbers)[len(numbers) // 2]


def phrases_on_extrapolation():
    fixed, span = ppl_of("extrapolation"), ppl_of("extrapolation", "span")
    schemes = ("learned", "sin", "rope", "alibi")
    learned, sin, rope, alibi = (fixed[scheme, "", 256] for scheme in schemes)
    broken = int(min(fixed["learned", "", 512], fixed["sin", "", 512]))
    (flat,) = {f"{fixed['alibi', '', n]:.2f}" for n in (512, 1024, 2048)}
    steps = select(load("bench_train")["rows"], scheme="rope", who="this repository")
    cost, beyond = 100 * (steps[0]["times_none"] - 1), fixed["rope", "", 512]

    yield f"At 256 both do well here ({learned:.2f} and {sin:.2f}); at 512 they are above {broken}"
    yield f"level with ALiBi as the best ({rope:.2f} and {alibi:.2f})"
    yield f"costs {cost:.0f} % of a step. Past that it breaks ({beyond:.0f} at 512)"
    yield f"only fade: {flat} at every length"
    yield f"（{learned:.2f}、{sin:.2f}），512 处已超过 {broken}"
    yield f"并列最好（{rope:.2f}、{alibi:.2f}），没有参数，每步多花 {cost:.0f}% 时间"
    yield f"RoPE at 256 is {rope:.2f} here"
    yield f"ALiBi's from {span['alibi', '', 256]:.2f} to {span['alibi', '', 2048]:.2f}"


def phrases_on_longer_texts():
    longer, otherwise = ppl_of("longer"), ppl_of("otherwise")
    plain, stretched = longer["learned", "", 256], longer["learned", "interpolate", 512]
    llama3, yarn = longer["rope", "llama3", 1024], longer["rope", "yarn", 2048]
    rope = longer["rope", "", 256]
    first = {}
    for row in load("break_long")["rows"]:
        first.setdefault(row["way"], []).append(row["first"])
    first = {way: f"{mean(ppl):.2f}" for way, ppl in first.items()}

    yield f"and {rope:.2f} further down"
    yield f"triples at twice the length ({plain:.2f} to {stretched:.2f})"
    yield f"(at 4 times {100 * (llama3 / rope - 1):.0f} % worse), with YaRN"
    yield f"(8 times: {100 * (yarn / rope - 1):.0f} % worse)"
    yield f"{first['yarn']} with YaRN and {first['llama3']} with llama3 in place of {first['none']}"

    trained = "trained at random positions below 4096"
    ratios = [
        otherwise[s, trained, 256] / otherwise[s, "", 256] for s in ("learned", "sin", "rope")
    ]
    low, high = (100 * (ratio - 1) for ratio in (min(ratios), max(ratios)))
    before = int(min(otherwise[s, "", 512] for s in ("learned", "sin")))
    after = mean(otherwise[s, trained, 512] for s in ("learned", "sin"))
    yield f"positions cost {low:.0f} to {high:.0f} % at 256"
    yield f"from above {before} to about {after:.0f} at 512"


def phrases_on_attention():
    rows = select(read_rows(RESULTS / "context.json"), protocol="attention", within=64)
    seen = {}
    for scheme in ("learned", "sin", "rope", "alibi"):
        for n in (256, 1024):
            seen[scheme, n] = f"{100 * mean(values(rows, scheme=scheme, n=n)):.0f}"
    assert seen["learned", 1024] == seen["sin", 1024]
    alibi, in_short, rope = seen["alibi", 1024], seen["alibi", 256], seen["rope", 1024]
    yield f"{alibi} % of their attention to the last 64 bytes with ALiBi ({in_short} % in one of"
    yield f"but {rope} % with RoPE ({seen['rope', 256]} %), and {seen['sin', 1024]} % with learned"
    yield f"sinusoidal ({seen['learned', 256]} and {seen['sin', 256]} %)"


def phrases_on_theta():
    rows = load("break_theta")["rows"]
    near, usual, far = (select(rows, base=base) for base in (10, 10_000, 1_000_000))

    def fixed_at(rows, n):
        return mean(row["fixed"][n] for row in rows)

    def share(rows):
        return f"{100 * mean(row['near']['32'] for row in rows):.0f} %"

    yield f"than base 10,000 does ({share(near)} against {share(usual)})"
    yield f"no worse at 256 ({fixed_at(far, '256'):.2f} against {fixed_at(usual, '256'):.2f}"
    far_out = f"{fixed_at(near, '4096'):.0f} in place of {fixed_at(usual, '4096'):.0f}"
    yield f"at 4,096 base 10 has {far_out}"


def phrases_on_speed():
    rows = read_rows(RESULTS / "shakespeare" / "train_compare.json")
    rope, alibi = (select(rows, scheme=scheme) for scheme in ("rope", "alibi"))
    ends = [mean(values(mine, metric="ppl")) for mine in (rope, alibi)]
    seconds = [median(values(mine, metric="seconds")) for mine in (rope, alibi)]
    yield f"ends at perplexity {ends[0]:.2f} (RoPE) and {ends[1]:.2f} (ALiBi)"
    yield f"after {seconds[0]:.0f} and {seconds[1]:.0f} seconds"

    long = {}
    for row in select(load("bench_long")["rows"], scheme="alibi", T=8192):
        long[row["what"], row["who"]] = row["seconds"]
    layer = long["layer", "textbook formula"] / long["layer", "this repository"]
    model = long["model", "x-transformers"] / long["model", "this repository"]
    yield f"at 8k our layer is {layer:.0f} times as fast"
    yield f"and the whole model {model:.0f} times as fast as x-transformers'"


@pytest.mark.parametrize(
    "phrases",
    [
        phrases_on_extrapolation,
        phrases_on_longer_texts,
        phrases_on_attention,
        phrases_on_theta,
        phrases_on_speed,
    ],
)
def test_numbers_in_the_prose_are_those_of_the_results(committed, phrases):
    text = re.sub(r"\s+", " ", README)
    missing = [phrase for phrase in phrases() if phrase not in text]
    assert not missing
