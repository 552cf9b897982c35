import argparse
import csv
import io
import json
import math
import shutil

import pytest
import torch

import extrapolation_test
import train_compare
from conftest import train_tiny
from extrapolation_test import measure, paired, summarise, tables
from tiny_lm import SCHEMES

CPU = ("--device", "cpu")
ASKED = argparse.Namespace(span_bytes=1024, windows=5, scaling=["none"], factor=None, beyond=["untrained"], window=[0], longer=False)


@pytest.fixture(scope="module")
def trained(tmp_path_factory):
    """Five tiny models of two seeds, trained at 16 bytes, so that a learned table has 256 rows."""
    return train_tiny(tmp_path_factory.mktemp("trained"), "--steps 6 --batch-size 2 --train-len 16 --dim 16 --n-layer 1 --n-head 2 --seeds 0 1", 1000)


@pytest.fixture
def out(trained, tmp_path):
    return shutil.copytree(trained, tmp_path / "out")


def test_table_of_all_schemes(cli, out):
    code, stdout, stderr = cli(extrapolation_test, "--out", out, *CPU, "--lengths", 64, 128, 512, "--span-bytes", 2048, "--windows", 6)
    assert code == 0
    result = json.loads((out / "extrapolation.json").read_text())
    assert [(r["scheme"], r["seed"], r["protocol"], r["n"]) for r in result["rows"]] == [
        (s, seed, p, n) for s in SCHEMES for seed in (0, 1) for p in ("span", "fixed") for n in (64, 128, 512)]
    for row in result["rows"]:
        if row["scheme"] == "learned" and row["n"] == 512:  # a row that cannot be computed says why
            assert row["ppl"] is None and row["note"] == "max_len 256"
        else:
            assert row["low"] <= row["ppl"] <= row["high"] and row["note"] == ""
            assert row["targets"] == (2048 if row["protocol"] == "span" else 6 * 64)
    text = (out / "extrapolation.md").read_text()
    assert text in stdout and text.count("max_len 256") == 2 and "seeds 0, 1" in text
    assert result["corpus"]["sha256"] and result["command"].startswith("python extrapolation_test.py")
    assert (out / "extrapolation.png").stat().st_size > 10_000
    table = list(csv.DictReader(io.StringIO((out / "extrapolation.csv").read_text())))
    assert len(table) == 60 and table[0]["scheme"] == "learned"
    assert "notice" not in stdout


def test_default_lengths_shorter_than_the_fixed_targets(cli, out):
    code, stdout, _ = cli(extrapolation_test, "--out", out, *CPU, "--schemes", "none", "--seeds", 0)
    assert code == 0
    rows = {(r["protocol"], r["n"]): r for r in json.loads((out / "extrapolation.json").read_text())["rows"]}
    assert rows["fixed", 16]["note"] == "16 < 64 targets" and rows["fixed", 64]["ppl"] > 1 and rows["span", 16]["ppl"] > 1


def test_the_number_at_the_training_length_is_the_one_of_training(cli, out):
    rows = json.loads((out / "train_compare.json").read_text())["rows"]
    cli(extrapolation_test, "--out", out, *CPU, "--lengths", 16, "--protocol", "span")
    again = json.loads((out / "extrapolation.json").read_text())["rows"]
    assert {(r["scheme"], r["seed"]): r["ppl"] for r in again} == {(r["scheme"], r["seed"]): r["val_ppl"] for r in rows}


def test_default_lengths_and_choice_of_schemes(cli, out):
    code, *_ = cli(extrapolation_test, "--out", out, *CPU, "--schemes", "rope", "alibi", "--seeds", 1, "--protocol", "span")
    rows = json.loads((out / "extrapolation.json").read_text())["rows"]
    assert code == 0 and [(r["scheme"], r["n"]) for r in rows] == [(s, n) for s in ("rope", "alibi") for n in (16, 32, 64, 128)]


def test_other_text_is_noticed(cli, out, tmp_path):
    (tmp_path / "other.txt").write_bytes(b"something else " * 2000)
    code, stdout, _ = cli(extrapolation_test, "--out", out, *CPU, "--data", tmp_path / "other.txt", "--schemes", "none", "--protocol", "span")
    assert code == 0 and "notice: the models were trained on other text, or another part of it, than this (other.txt" in stdout


def test_summary_is_mean_and_sample_deviation_over_seeds():
    row = lambda seed, ppl, note="": dict(scheme="rope", variant="", seed=seed, protocol="fixed", n=64, nll=ppl and math.log(ppl),
                                          ppl=ppl, low=1, high=9, note=note)
    cell, = summarise([row(0, 2.0), row(1, 3.0), row(2, 7.0)])
    assert (cell["ppl"], cell["std"], cell["seeds"]) == (4.0, 2.6458, [0, 1, 2]) and (cell["low"], cell["high"]) == (1.3542, 6.6458)
    cell, = summarise([row(0, 2.0)])
    assert (cell["ppl"], cell["std"], cell["low"], cell["high"]) == (2.0, 0, 1, 9)  # one seed: the bootstrap interval
    cell, = summarise([row(0, 2.0), row(1, None, "out of memory")])
    assert (cell["ppl"], cell["seeds"], cell["note"]) == (2.0, [0], "out of memory")


def test_out_of_memory_marks_the_cell_and_goes_on():
    import numpy as np
    class Hungry(torch.nn.Module):
        position = None
        def forward(self, ids):
            if ids.shape[1] > 100:
                raise RuntimeError("CUDA out of memory")
            return torch.zeros(*ids.shape, 256)
    settings = dict(scheme="none", seed=0, train_len=64, train_lens=[64], window=0, random_positions=0, copies=False, finetuned_from=None)
    rows, _, by_window = measure([(Hungry(), settings)], np.zeros(5000, np.uint8), [64, 128, 64 * 4], ["fixed"], ASKED, "cpu")
    assert [row["note"] for row in rows] == ["", "out of memory", "out of memory"]
    text = tables(rows, summarise(rows), paired(by_window), [64, 128, 256], ["fixed"], 64)
    assert "| none | 256.0 | out of memory | out of memory | 64 |" in text


@pytest.mark.parametrize("wrong, message", [
    ("--lengths 0", "'0' is not a whole number from 1"),
    ("--lengths 64 64", "--lengths: 64 is given 2 times"),
    ("--lengths 999999", "too few for windows of 999,999"),
    ("--lengths 64 97 101", "no span of at most"),
    ("--schemes rope sinus", "no checkpoint of sinus in"),
    ("--seeds 5", "no checkpoint in"),
    ("--data nowhere", "--data nowhere: no such file or folder"),
    ("--protocol exact", "invalid choice: 'exact'"),
    ("--windows 1", "'1' is not a whole number from 2"),
    ("--device abacus", "there is no such device here"),
])
def test_wrong_arguments_get_one_line_and_write_nothing(cli, out, wrong, message):
    code, stdout, stderr = cli(extrapolation_test, "--out", out, *wrong.split())
    assert code == 2 and stdout == "" and not list(out.glob("extrapolation*"))
    assert message in stderr and stderr.count("\n") == 1 and stderr.startswith("extrapolation_test.py: ")


def test_no_checkpoints_names_the_command_that_makes_them(cli, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    for flags, command in (([], "train first: python train_compare.py\n"), (["--quick"], "train first: python train_compare.py --quick\n"),
                           (["--out", "mine"], "train first: python train_compare.py --out mine\n"),
                           (["--schemes", "rope:base=10"], "train first: python train_compare.py --schemes rope:base=10\n")):
        code, _, stderr = cli(extrapolation_test, *flags)
        assert code == 2 and stderr.endswith(command) and stderr.count("\n") == 1
    assert list(tmp_path.iterdir()) == []


def test_seeds_that_differ_between_schemes_are_named(cli, out):
    (out / "checkpoints" / "rope-seed1.pt").unlink()
    code, stdout, _ = cli(extrapolation_test, "--out", out, *CPU, "--protocol", "span", "--schemes", "rope", "alibi")
    assert code == 0 and "over seeds 0; alibi: 0, 1. " in stdout


def test_a_model_that_gives_nan_is_noted(cli, out):
    path = out / "checkpoints" / "rope-seed1.pt"
    saved = torch.load(path, weights_only=True)
    saved["model"]["norm.weight"][:] = float("nan")
    torch.save(saved, path)
    code, stdout, _ = cli(extrapolation_test, "--out", out, *CPU, "--schemes", "rope", "--seeds", 1)
    assert code == 0 and "| rope | loss nan nats | loss nan nats |" in stdout
    assert "NaN" not in (out / "extrapolation.json").read_text()


def test_a_broken_checkpoint_is_named(cli, out):
    (out / "checkpoints" / "rope-seed1.pt").write_bytes(b"cut short")
    code, _, stderr = cli(extrapolation_test, "--out", out)
    assert code == 2 and "rope-seed1.pt is not a whole checkpoint" in stderr and stderr.count("\n") == 1
    assert cli(extrapolation_test, "--out", out, *CPU, "--seeds", 0, "--protocol", "span")[0] == 0  # that one is not asked for


@pytest.mark.parametrize("key", extrapolation_test.SAME)
def test_unlike_training_is_not_put_in_one_table(cli, out, key):
    path = out / "checkpoints" / "rope-seed1.pt"
    saved = torch.load(path, weights_only=True)
    was = saved["settings"][key]
    saved["settings"][key] = was + was  # another number, or another text
    torch.save(saved, path)
    code, _, stderr = cli(extrapolation_test, "--out", out)
    if key in ("dim", "n_layer"):  # then the weights do not fit either
        assert code == 2 and "rope-seed1.pt does not fit this code" in stderr
    else:
        assert code == 2 and f"rope seed 1 was trained with {key} {was + was}, alibi seed 0 with {was}" in stderr
    assert stderr.count("\n") == 1
    assert cli(extrapolation_test, "--out", out, *CPU, "--schemes", "rope", "--seeds", 0, "--protocol", "span")[0] == 0


def test_dtype_of_the_evaluation(cli, out):
    results = {}
    for dtype in ("fp32", "bf16"):
        assert cli(extrapolation_test, "--out", out, *CPU, "--schemes", "rope", "--seeds", 0, "--protocol", "span", "--dtype", dtype)[0] == 0
        results[dtype] = json.loads((out / "extrapolation.json").read_text())
    exact, low = (results[dtype]["rows"][0]["nll"] for dtype in ("fp32", "bf16"))
    assert low != exact and low == pytest.approx(exact, abs=0.05)
    assert results["bf16"]["machine"]["dtype"] == "bfloat16"


def test_one_scheme_that_fails_at_a_length_stops_no_other(cli, tmp_path):
    (tmp_path / "words.txt").write_bytes(b"".join(b"%d bottles of beer on the wall\n" % i for i in range(400)))
    (tmp_path / "short.py").write_text("import torch\nfrom torch import nn\nclass Table(nn.Module):\n    def __init__(self, dim):\n        super().__init__()\n"
                                       "        self.max_len, self.rows = None, nn.Parameter(torch.zeros(32, dim))\n    def forward(self, positions):\n        return self.rows[positions]\n")
    scheme = f"{tmp_path / 'short.py'}:Table"
    cli(train_compare, *"--steps 2 --batch-size 2 --train-len 16 --dim 16 --n-layer 1 --n-head 2 --device cpu".split(), "--data", tmp_path / "words.txt",
        "--out", tmp_path / "out", "--schemes", scheme, "none")
    code, stdout, _ = cli(extrapolation_test, "--out", tmp_path / "out", *CPU, "--lengths", 32, 64, "--protocol", "span")
    assert code == 0 and "IndexError: index 32 is out of bounds" in stdout
    rows = json.loads((tmp_path / "out" / "extrapolation.json").read_text())["rows"]
    assert [row["ppl"] is not None for row in rows] == [True, True, True, False]  # none, then the table
    (tmp_path / "short.py").unlink()
    code, _, stderr = cli(extrapolation_test, "--out", tmp_path / "out", *CPU)
    assert code == 2 and "does not fit this code (scheme file" in stderr and "no such file" in stderr
    assert cli(extrapolation_test, "--out", tmp_path / "out", *CPU, "--schemes", "none", "--protocol", "span")[0] == 0
    (tmp_path / "words.txt").unlink()
    code, _, stderr = cli(extrapolation_test, "--out", tmp_path / "out", *CPU, "--schemes", "none")
    assert code == 2 and "the models were trained on it, say with --data where it is now" in stderr


def test_the_same_text_split_otherwise_is_noticed(cli, out, tmp_path):
    path = tmp_path / "again"
    path.mkdir()
    (path / "words.txt").write_bytes(b"".join(b"%d bottles of beer on the wall\n" % i for i in range(1000)))
    code, stdout, _ = cli(extrapolation_test, "--out", out, *CPU, "--data", path, "--schemes", "none", "--protocol", "span")
    assert code == 0 and "notice: the models were trained on other text, or another part of it" in stdout


# Ways to read a model past its length

def rows_of(out, name="extrapolation"):
    rows = json.loads((out / f"{name}.json").read_text())["rows"]
    return {(r["scheme"], r["variant"], r["seed"], r["protocol"], r["n"]): r for r in rows}


def test_longer_has_a_row_for_every_way(cli, out):
    code, stdout, _ = cli(extrapolation_test, "--out", out, *CPU, "--longer", "--span-bytes", 1024, "--windows", 4)
    assert code == 0 and not (out / "extrapolation.json").exists()
    rows = rows_of(out, "longer")
    variants = {s: [v for v in dict.fromkeys(key[1] for key in rows if key[0] == s)] for s in SCHEMES}
    assert variants == dict(learned=["", "clamp", "wrap", "interpolate", "window 16"], sin=["", "linear", "window 16"], alibi=["", "window 16"],
                            rope=["", "linear", "ntk", "dynamic", "yarn", "llama3", "window 16"], none=["", "window 16"])
    assert {key[4] for key in rows} == {16, 32, 64, 128, 256}
    for (scheme, variant, seed, protocol, n), row in rows.items():
        plain = rows[scheme, "", seed, protocol, n]["ppl"]
        if n <= 16:  # nothing is past the trained length yet
            assert row["ppl"] == plain
        elif variant and row["ppl"] and "window" not in variant and protocol == "span":
            assert row["ppl"] != plain, (scheme, variant)
    lines = list(csv.DictReader(io.StringIO((out / "longer_wide.csv").read_text())))
    assert list(lines[0]) == ["scheme", "variant", "seed", "protocol", "16", "32", "64", "128", "256"] and len(lines) == 19 * 2 * 2
    assert float(lines[0]["32"]) == rows["learned", "", 0, "span", 32]["ppl"]
    assert (out / "longer.png").stat().st_size > 10_000
    assert "| rope, yarn |" in (out / "longer.md").read_text()


def test_a_way_is_the_scheme_with_that_option(cli, out, trained):
    """The row of `rope, yarn` at 64 is what a model with rope:scaling=yarn,factor=4,trained_len=16 gives; a window likewise."""
    import score
    from data.corpus import load_corpus
    from tiny_lm import TinyLM, load_model
    cli(extrapolation_test, "--out", out, *CPU, "--lengths", 64, "--seeds", 0, "--span-bytes", 1024, "--windows", 4, "--scaling", "none", "yarn",
        "--beyond", "interpolate", "--window", 0, 5)
    rows, val = rows_of(out), load_corpus(str(trained.parent / "words.txt")).val
    for scheme, variant, changed in (("rope", "yarn", dict(scheme="rope:scaling=yarn,factor=4,trained_len=16")), ("rope", "window 5", dict(window=5)),
                                     ("learned", "interpolate", dict(scheme="learned:beyond=interpolate,trained_len=16"))):
        saved = load_model(out / "checkpoints" / f"{scheme}-seed0.pt")[0]
        model = TinyLM(**dict(scheme=scheme, dim=16, n_layer=1, n_head=2, max_len=256) | changed)
        model.load_state_dict(saved.state_dict())
        assert rows[scheme, variant, 0, "span", 64]["ppl"] == score.scores(score.span(model, val, 64, 1024))["ppl"]
    assert ("learned", "", 0, "span", 64) not in rows and ("sin", "", 0, "span", 64) in rows


def test_a_fixed_factor_is_paid_at_short_lengths(cli, out):
    cli(extrapolation_test, "--out", out, *CPU, "--lengths", 16, 64, "--protocol", "span", "--span-bytes", 1024, "--schemes", "rope", "sin",
        "--scaling", "none", "linear", "--factor", 4, "--seeds", 0)
    rows = rows_of(out)
    assert rows["rope", "linear", 0, "span", 16]["ppl"] != rows["rope", "", 0, "span", 16]["ppl"]
    assert rows["sin", "linear", 0, "span", 16]["ppl"] != rows["sin", "", 0, "span", 16]["ppl"]
    fixed = rows["rope", "linear", 0, "span", 64]["ppl"]
    cli(extrapolation_test, "--out", out, *CPU, "--lengths", 64, "--protocol", "span", "--span-bytes", 1024, "--schemes", "rope", "--scaling", "linear", "--seeds", 0)
    assert rows_of(out)["rope", "linear", 0, "span", 64]["ppl"] == fixed  # 64 / 16 is 4 as well


def test_folders_in_one_table(cli, out, trained, tmp_path):
    base = "--steps 6 --batch-size 2 --dim 16 --n-layer 1 --n-head 2 --dtype fp32 --device cpu --schemes sin".split()
    for name, flags in (("random", ["--train-len", 16, "--random-positions", 64]), ("mixed", ["--train-len", 8, 16]), ("window", ["--train-len", 16, "--window", 8])):
        assert cli(train_compare, *base, *flags, "--data", trained.parent / "words.txt", "--out", tmp_path / name)[0] == 0
    folders = [out, tmp_path / "random", tmp_path / "mixed", tmp_path / "window"]
    code, stdout, _ = cli(extrapolation_test, *CPU, "--from", *folders, "--out", tmp_path / "all", "--name", "ways", "--schemes", "sin", "--protocol", "span", "--span-bytes", 1024)
    rows = rows_of(tmp_path / "all", "ways")
    assert code == 0 and {key[1] for key in rows} == {"", "trained at random positions below 64", "trained at 8 16", "trained with window 8"}
    cell = rows["sin", "trained at random positions below 64", 0, "span", 128]
    assert cell["ppl"] is None and cell["note"] == "128 bytes do not fit in 64 random positions"
    assert rows["sin", "trained at random positions below 64", 0, "span", 64]["ppl"] > 1
    code, _, stderr = cli(extrapolation_test, *CPU, "--from", tmp_path / "mixed", shutil.copytree(tmp_path / "mixed", tmp_path / "again"), "--out", tmp_path / "all")
    assert code == 2 and "is there twice" in stderr


def columns(means, spread=0.0):
    import numpy as np
    return {(name, seed, "fixed", 64): np.array([value - 0.1, value + 0.1]) for name, values in means.items() for seed, value in enumerate(values)}


def test_pairs_and_what_cannot_be_told_apart():
    means = {"a": [1.0, 1.1, 1.2], "b": [1.5, 1.6, 1.71], "c": [1.01, 1.08, 1.22]}
    found = paired(columns(means))
    pairs = {(p["a"], p["b"]): p for p in found}
    assert list(pairs) == [("a", "b"), ("a", "c"), ("b", "c")] and pairs["a", "b"]["over"] == "3 seeds"
    assert pairs["a", "b"]["nats_a_minus_b"] == pytest.approx(-0.50333, abs=1e-5) and pairs["a", "b"]["p"] < 1e-4 and pairs["a", "c"]["p"] > 0.5
    assert extrapolation_test.not_told_apart(found, "fixed", 64) == {"a", "c"}
    single = paired({key: value for key, value in columns(means).items() if key[1] == 0})
    assert single[0]["over"] == "2 windows"
    assert extrapolation_test.not_told_apart([], "fixed", 64) == {None}


def test_a_row_that_is_much_worse_is_never_bold():
    """However little three seeds can decide: b is worse by 0.5 ± 0.6 nats."""
    found = paired(columns({"a": [1.0, 1.0, 1.0], "b": [1.1, 1.2, 2.2]}))
    assert found[0]["p"] > 0.05 and extrapolation_test.not_told_apart(found, "fixed", 64) == {"a"}


def test_holm_decides_and_not_each_p_alone():
    rows = {"a": [1.0, 1.0, 1.0], "b": [1.010, 1.012, 1.015], "c": [1.010, 1.012, 1.016]}  # each p about 0.014, doubled 0.03
    found = paired(columns(rows))
    assert extrapolation_test.not_told_apart(found, "fixed", 64) == {"a"}
    many = rows | {f"d{i}": [1.010, 1.012, 1.016 + i / 1e4] for i in range(4)}
    assert extrapolation_test.not_told_apart(paired(columns(many)), "fixed", 64) >= {"a", "b", "c"}


def test_all_rows_of_a_column_are_compared_over_the_same_seeds():
    import numpy as np
    means = columns({"a": [1.0, 1.1], "b": [1.02, 1.13]})
    means["c", 1, "fixed", 64] = np.array([1.0, 1.3, 1.2])
    means["a", 1, "fixed", 64], means["b", 1, "fixed", 64] = np.array([1.0, 1.1, 1.3]), np.array([1.1, 1.1, 1.35])
    found = paired(means)
    assert {pair["over"] for pair in found} == {"3 windows"}
    assert found[0]["nats_a_minus_b"] == pytest.approx(-0.05)  # of seed 1 alone
    none_in_common = {key: value for key, value in means.items() if key[:2] != ("b", 1)}
    assert paired(none_in_common) == []


@pytest.mark.parametrize("wrong, message", [
    ("--scaling cubic", "invalid choice: 'cubic'"),
    ("--scaling yarn --schemes alibi none", "--scaling yarn: none of the models takes it"),
    ("--beyond wrap --schemes rope", "--beyond wrap: none of the models takes it"),
    ("--scaling yarn yarn", "--scaling: yarn is given 2 times"),
    ("--factor 0.5 --scaling ntk", "--factor 0.5 is below 1"),
    ("--window -1", "'-1' is not a whole number from 0"),
    ("--name a/b", "--name 'a/b' is not a name for these files"),
    ("--name ..", "is not a name for these files"),
    ("--name train_compare", "is not a name for these files"),
    ("--from nowhere", "no checkpoint in nowhere/checkpoints"),
    ("--factor 4", "--factor 4 goes with --scaling"),
    ("--seeds 0 7", "--seeds 7: no checkpoint of that seed"),
])
def test_wrong_ways_get_one_line(cli, out, wrong, message):
    code, stdout, stderr = cli(extrapolation_test, "--out", out, *wrong.split())
    assert code == 2 and stdout == "" and message in stderr and stderr.count("\n") == 1
    assert not list(out.glob("*.md")) or list(out.glob("*.md")) == [out / "train_compare.md"]


def test_a_folder_without_checkpoints_is_said(cli, out):
    code, _, stderr = cli(extrapolation_test, "--from", out, out / "nowhere", "--out", out)
    assert code == 2 and f"--from {out / 'nowhere'}: no checkpoint in" in stderr


def test_windows_do_not_need_the_plain_row(cli, out):
    code, *_ = cli(extrapolation_test, "--out", out, *CPU, "--lengths", 64, "--seeds", 0, "--schemes", "rope", "--protocol", "span", "--span-bytes", 1024,
                   "--scaling", "yarn", "--window", 5)
    assert code == 0 and {key[1] for key in rows_of(out)} == {"yarn", "window 5"}


def test_one_window_has_no_p_value(cli, out):
    code, *_ = cli(extrapolation_test, "--out", out, *CPU, "--lengths", 64, "--seeds", 0, "--schemes", "rope", "sin", "--protocol", "span", "--span-bytes", 64)
    assert code == 0 and next(csv.DictReader(io.StringIO((out / "extrapolation_pairs.csv").read_text())))["p"] == ""
    code, *_ = cli(extrapolation_test, "--out", out, *CPU, "--lengths", 64, "--seeds", 0, "--schemes", "rope", "--protocol", "span", "--span-bytes", 1024)
    assert (out / "extrapolation_pairs.csv").read_text().splitlines()[1:] == [",,,,,,"]  # nothing of the run before


def test_options_that_are_in_the_scheme_already(cli, trained, tmp_path):
    (tmp_path / "own.py").write_text("import torch\nfrom torch import nn\nclass Own(nn.Module):\n    def __init__(self, dim, factor=2.0):\n        super().__init__()\n"
                                     "        self.dim, self.factor = dim, factor\n    def forward(self, positions):\n        return self.factor * torch.ones(len(positions), self.dim)\n")
    base = "--steps 2 --batch-size 2 --train-len 64 --dim 16 --n-layer 1 --n-head 2 --dtype fp32 --device cpu".split()
    schemes = ("rope:scaling=none", "rope:scaling=linear,factor=2", "sin:factor=2", "learned:beyond=wrap", f"{tmp_path / 'own.py'}:Own")
    assert cli(train_compare, *base, "--data", trained.parent / "words.txt", "--out", tmp_path / "o", "--schemes", *schemes)[0] == 0
    assert cli(extrapolation_test, *CPU, "--longer", "--out", tmp_path / "o", "--lengths", 64, 128, "--span-bytes", 1024, "--windows", 4, "--window", 0)[0] == 0
    rows = rows_of(tmp_path / "o", "longer")
    assert {key[:2] for key in rows} == {(scheme, "") for scheme in schemes} and all(row["ppl"] for row in rows.values())
