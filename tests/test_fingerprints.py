"""The results are of the code of the tree: results/fingerprints.json has the numbers that say so.

A test that fails here says that something which decides the results has changed: the network, a
scheme, the text, the scoring or the recipe. CONTRIBUTING.md says what to do.
"""

import ast
import dataclasses
import json
import re
import subprocess
import sys

import numpy as np
import pytest

import pos_alibi
import tiny_lm
from data.corpus import NUMPY_SHA256, load_corpus
from helpers import ROOT
from lab import score
from lab.provenance import TOLERANCES, fingerprint, moved, same_signature, signature
from lab.runs import Run
from lab.train import Trained
from pos_alibi import alibi_slopes
from schemes import rope_scaling
from schemes.rope_scaling import rope_frequencies
from schemes.scheme import SCHEMES
from tiny_lm import attend

SAVED = ROOT / "results" / "fingerprints.json"
WHAT_TO_DO = (
    "undo the change, or train again what is in results/, then `python report.py --fingerprints`"
)


@pytest.fixture(scope="module")
def corpus():
    return load_corpus("numpy")


def what_moved(saved, now):
    """One line about all schemes whose numbers are not those that were saved; else nothing."""
    words = {scheme: moved(saved.get(scheme, {}), found) for scheme, found in now.items()}
    return "; ".join(f"{scheme}: {text}" for scheme, text in words.items() if text)


def test_results_are_of_the_code_of_the_tree(corpus):
    saved = json.loads(SAVED.read_text("utf-8"))
    told = what_moved(saved, {scheme: fingerprint(scheme, corpus) for scheme in SCHEMES})
    if told and corpus.sha256 != NUMPY_SHA256:
        told = f"the text is that of another NumPy ({np.__version__}), see requirements.txt; {told}"
    if told:
        pytest.fail(f"results/ is not of this code: {told}; {WHAT_TO_DO}", pytrace=False)


def test_there_are_fingerprints_of_all_schemes():
    saved = json.loads(SAVED.read_text("utf-8"))
    assert list(saved) == list(SCHEMES)
    assert all(list(numbers) == list(TOLERANCES) for numbers in saved.values())


def test_what_moved_is_told_in_one_line():
    saved = {scheme: dict.fromkeys(TOLERANCES, 2.0) for scheme in SCHEMES}
    assert what_moved(saved, saved) == ""
    now = saved | {"sin": saved["sin"] | {"nll_at_L": 2.5, "gradient_norm": 1.5}}
    told = "sin: nll_at_L was 2 and is 2.5, gradient_norm was 2 and is 1.5"
    assert what_moved(saved, now) == told


# Changes that must be seen


def other_frequencies(head_dim, base=10000.0):
    return rope_frequencies(head_dim, base * 0.999)


def steeper(n_head):
    return alibi_slopes(n_head) * 1.001


def stronger(*arguments, **options):
    return attend(*arguments, **options) * 1.001


def faster_muon(trained, step):
    muon, adam = RATES(trained, step)
    return [1.01 * muon, adam]


def faster_adam(trained, step):
    muon, adam = RATES(trained, step)
    return [muon, 1.01 * adam]


RATES = Trained.rates
NLL, GRADIENT, LOSS = "nll_at_L", "gradient_norm", "loss_of_twenty_steps"
PLANTED = {
    "RoPE base 9990": ("rope", rope_scaling, "rope_frequencies", other_frequencies, NLL),
    "slopes": ("alibi", pos_alibi, "alibi_slopes", steeper, GRADIENT),
    "attention of alibi": ("alibi", tiny_lm, "attend", stronger, NLL),
    "fixed targets": ("none", score, "K", 63, NLL),
    "rate of Muon": ("none", Trained, "rates", faster_muon, LOSS),
    "rate of AdamW": ("none", Trained, "rates", faster_adam, LOSS),
}
for name in ("learned", "sin", "rope", "none"):
    PLANTED[f"attention of {name}"] = (name, tiny_lm, "attend", stronger, GRADIENT)


def far_moved(saved, now):
    """The numbers that moved by more than five tolerances."""
    return {
        name
        for name, tolerance in TOLERANCES.items()
        if abs(now[name] - saved[name]) > 5 * tolerance * abs(saved[name])
    }


@pytest.mark.slow
@pytest.mark.parametrize("change", PLANTED)
def test_a_change_of_behaviour_is_seen(monkeypatch, corpus, change):
    scheme, module, name, value, seen_by = PLANTED[change]
    monkeypatch.setattr(module, name, value)
    saved, now = json.loads(SAVED.read_text("utf-8"))[scheme], fingerprint(scheme, corpus)
    assert seen_by in far_moved(saved, now) and seen_by in moved(saved, now)


@pytest.mark.slow
def test_another_split_of_the_text_is_seen(corpus):
    """One byte of the training text is held out."""
    train, val = corpus.train[:-1], np.concatenate([corpus.train[-1:], corpus.val])
    other = dataclasses.replace(corpus, train=train, val=val)
    saved = json.loads(SAVED.read_text("utf-8"))["none"]
    assert {NLL, GRADIENT} <= far_moved(saved, fingerprint("none", other))


# Changes that are free

FOLDERS = (".", "data", "lab", "schemes")
RENAMED = {
    r"from lab import score\b": "from lab import scoring as score",
    r"\bCausalStrips\b": "Triangles",
    r"\bfixed_ends\b": "places",
    r"\brope_frequencies\b": "inverse_frequencies",
}
NUMBERS = """
import json
from data.corpus import load_corpus
from lab import provenance, scoring
from lab.runs import Run
from schemes.scheme import SCHEMES

found = dict(file=provenance.__file__)
found["fingerprint"] = provenance.fingerprint("rope", load_corpus("numpy"))
found["signatures"] = {scheme: provenance.signature(Run(scheme=scheme)) for scheme in SCHEMES}
print(json.dumps(found))
"""


def without_words(text):
    """The code without docstrings and comments, formatted otherwise, with some names changed."""
    code = ast.parse(text)
    for node in ast.walk(code):
        if isinstance(node, ast.Module | ast.ClassDef | ast.FunctionDef) and ast.get_docstring(
            node
        ):
            node.body[0] = ast.Pass()
    text = ast.unparse(code)
    for old, new in RENAMED.items():
        text = re.sub(old, new, text)
    return text


def copy_code(folder):
    """Copy the code that decides results, moved and renamed, and without the drawing."""
    for part in FOLDERS:
        (folder / part).mkdir(exist_ok=True)
        for path in (ROOT / part).glob("*.py"):
            text = without_words(path.read_text("utf-8"))
            (folder / part / path.name).write_text(text, "utf-8")
    (folder / "lab" / "score.py").rename(folder / "lab" / "scoring.py")
    (folder / "lab" / "plots.py").write_text("raise ImportError('nothing is drawn here')\n")


@pytest.mark.slow
def test_moves_names_words_and_pictures_change_nothing(tmp_path):
    copy_code(tmp_path)
    words = [sys.executable, "-c", NUMBERS]
    done = subprocess.run(words, capture_output=True, text=True, cwd=tmp_path, timeout=100)
    found = json.loads(done.stdout)
    assert found["file"].startswith(str(tmp_path))
    saved = json.loads(SAVED.read_text("utf-8"))
    assert moved(saved["rope"], found["fingerprint"]) == ""
    for scheme, its in found["signatures"].items():
        assert same_signature(its, signature(Run(scheme=scheme)))
