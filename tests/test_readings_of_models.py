"""extrapolation_test.py: --longer, --scaling, --beyond, --window, --from, and wrong arguments."""

import csv
import io
import shutil

import pytest

import extrapolation_test
import train_compare
from data.corpus import load_corpus
from helpers import TINY, rows_of, train_tiny, without_pictures
from lab import score
from lab.checkpoints import load
from lab.rows import distinct, label, values
from lab.stats import measured_ppl
from schemes.scheme import SCHEMES

QUICK = ("--lengths", 64, "--protocol", "span", "--span-bytes", 1024, "--seeds", 0)


@pytest.fixture(autouse=True)
def no_pictures(monkeypatch):
    without_pictures(monkeypatch)


@pytest.fixture(scope="module")
def trained(tmp_path_factory):
    """Five tiny models of two seeds, trained at 16 bytes."""
    folder, flags = tmp_path_factory.mktemp("trained"), " ".join(TINY)
    with pytest.MonkeyPatch.context() as patch:
        without_pictures(patch)
        return train_tiny(folder, f"{flags} --seeds 0 1", 1000)


@pytest.fixture
def out(trained, tmp_path):
    return shutil.copytree(trained, tmp_path / "out")


@pytest.fixture
def read(cli, out):
    def call(*flags):
        return cli(extrapolation_test, "--out", out, "--device", "cpu", *flags)

    return call


def by_reading(out, name="extrapolation"):
    """{(scheme, how it is trained and read, seed, protocol, n): perplexity or None}."""
    found = {}
    for row in rows_of(out, name):
        variant = label(row).removeprefix(row["scheme"]).removeprefix(", ")
        found[row["scheme"], variant, row["seed"], row["protocol"], row["n"]] = row["value"]
    return found


def variants(out, name="extrapolation"):
    return set(list(zip(*by_reading(out, name)))[1])


WAYS = dict(
    learned=["", "clamp", "wrap", "interpolate", "window 16"],
    sin=["", "linear", "window 16"],
    rope=["", "linear", "ntk", "dynamic", "yarn", "llama3", "window 16"],
    alibi=["", "window 16"],
    none=["", "window 16"],
)


def test_longer_has_a_row_for_every_way(read, out):
    code, *_ = read("--longer", "--span-bytes", 1024, "--windows", 4, "--seeds", 0)
    assert code == 0 and not (out / "extrapolation.json").exists()
    found = by_reading(out, "longer")
    for scheme in SCHEMES:
        its = list(dict.fromkeys(variant for name, variant, *_ in found if name == scheme))
        assert its == WAYS[scheme]
    assert sorted({n for *_, n in found}) == [16, 32, 64, 128, 256]
    for (scheme, variant, seed, protocol, n), ppl in found.items():
        plain = found[scheme, "", seed, protocol, n]
        if n <= 16:  # nothing is past the trained length yet
            assert ppl == plain
        elif variant and ppl and "window" not in variant and protocol == "span":
            assert ppl != plain, (scheme, variant)
    assert "| rope, yarn |" in (out / "longer.md").read_text()
    lines = list(csv.DictReader(io.StringIO((out / "longer_wide.csv").read_text())))
    names = ["scheme", "variant", "seed", "protocol"]
    assert list(lines[0]) == [*names, "16", "32", "64", "128", "256"] and len(lines) == 19 * 2
    assert float(lines[0]["32"]) == found["learned", "", 0, "span", 32]


@pytest.mark.slow
def test_the_picture_of_longer_is_drawn(read, out, monkeypatch):
    monkeypatch.undo()
    assert read("--longer", "--span-bytes", 1024, "--windows", 4, "--seeds", 0)[0] == 0
    assert (out / "longer.png").stat().st_size > 10_000


def test_a_way_is_the_scheme_with_that_option(read, out, trained):
    ways = ("--scaling", "none", "yarn", "--beyond", "interpolate", "--window", 0, 5)
    assert read(*QUICK, *ways)[0] == 0
    found, val = by_reading(out), load_corpus(str(trained.parent / "words.txt")).val
    for scheme, variant, changes in (
        ("rope", "yarn", dict(scheme="rope:scaling=yarn,factor=4,trained_len=16")),
        ("rope", "window 5", dict(window=5)),
        ("learned", "interpolate", dict(scheme="learned:beyond=interpolate,trained_len=16")),
    ):
        model = load(out / "checkpoints" / f"{scheme}-seed0.pt").model(**changes)
        expected = measured_ppl(score.span(model, val, 64, 1024))["value"]
        assert found[scheme, variant, 0, "span", 64] == expected
    assert ("learned", "", 0, "span", 64) not in found
    assert ("sin", "", 0, "span", 64) in found


def test_a_fixed_factor_is_paid_at_short_lengths(read, out):
    flags = (*QUICK, "--schemes", "rope", "sin", "--scaling", "none", "linear")
    assert read(*flags, "--lengths", 16, 64, "--factor", 4)[0] == 0
    found = by_reading(out)
    for scheme in ("rope", "sin"):
        plain = found[scheme, "", 0, "span", 16]
        assert found[scheme, "linear, factor 4", 0, "span", 16] != plain
    assert read(*QUICK, "--schemes", "rope", "--scaling", "linear")[0] == 0
    found = by_reading(out)  # 64 / 16 is 4 as well
    assert (
        found["rope", "linear", 0, "span", 64] == found["rope", "linear, factor 4", 0, "span", 64]
    )


def test_windows_do_not_need_the_plain_row(read, out):
    assert read(*QUICK, "--schemes", "rope", "--scaling", "yarn", "--window", 5)[0] == 0
    assert variants(out) == {"yarn", "window 5"}


def test_one_window_has_no_p_value(read, out):
    def pairs():
        return (out / "extrapolation_pairs.csv").read_text()

    assert read(*QUICK, "--schemes", "rope", "sin", "--span-bytes", 64)[0] == 0
    assert next(csv.DictReader(io.StringIO(pairs())))["p"] == ""
    assert read(*QUICK, "--schemes", "rope")[0] == 0  # on other targets, so it stands alone
    assert pairs().splitlines()[1:] == [",,,,,,"]


OWN = """
import torch
from torch import nn


class Own(nn.Module):
    def __init__(self, dim, factor=2.0):
        super().__init__()
        self.dim, self.factor = dim, factor

    def forward(self, positions):
        return self.factor * torch.ones(*positions.shape, self.dim)
"""


def test_options_that_are_in_the_scheme_already_are_no_ways(cli, trained, tmp_path):
    (tmp_path / "own.py").write_text(OWN)
    schemes = (
        "rope:scaling=none",
        "rope:scaling=linear,factor=2",
        "sin:factor=2",
        "learned:beyond=wrap",
        f"{tmp_path / 'own.py'}:Own",
    )
    place = ("--data", trained.parent / "words.txt", "--out", tmp_path / "o")
    assert cli(train_compare, *TINY, "--train-len", 64, *place, "--schemes", *schemes)[0] == 0
    flags = ("--longer", "--lengths", 64, 128, "--span-bytes", 1024, "--windows", 4, "--window", 0)
    assert cli(extrapolation_test, "--device", "cpu", "--out", tmp_path / "o", *flags)[0] == 0
    found = by_reading(tmp_path / "o", "longer")
    assert {key[:2] for key in found} == {(scheme, "") for scheme in schemes}
    assert all(found.values())


# Models of several folders


@pytest.fixture(scope="module")
def otherwise(trained, tmp_path_factory):
    """Folders with sin trained at random positions, at two lengths, and with a window."""
    special = dict(
        random=["--random-positions", "64"],
        mixed=["--train-len", "8", "16"],
        window=["--window", "8"],
    )
    folders = []
    for name, flags in special.items():
        folders.append(tmp_path_factory.mktemp("otherwise") / name)
        place = ["--data", str(trained.parent / "words.txt"), "--out", str(folders[-1])]
        words = ["train_compare.py", *TINY, *flags, *place, "--schemes", "sin"]
        with pytest.MonkeyPatch.context() as patch:
            without_pictures(patch)
            patch.setattr("sys.argv", words)
            train_compare.main()
    return folders


def test_folders_come_into_one_table(cli, out, otherwise, tmp_path):
    flags = ("--name", "ways", "--schemes", "sin", "--protocol", "span", "--span-bytes", 1024)
    place = ("--from", out, *otherwise, "--out", tmp_path / "all", "--device", "cpu")
    assert cli(extrapolation_test, *place, *flags)[0] == 0
    at_random = "trained at random positions below 64"
    assert variants(tmp_path / "all", "ways") == {
        "", at_random, "trained at 8 16", "trained with window 8"
    }  # fmt: skip
    rows = rows_of(tmp_path / "all", "ways")
    (note,) = (row["note"] for row in rows if row["random_positions"] and row["n"] == 128)
    assert note == "128 bytes do not fit in 64 random positions"
    assert values(rows, random_positions=64, n=64)[0] > 1
    assert distinct(rows, "n") == [16, 32, 64, 128]


def test_special_models_are_read_as_they_are_in_longer(cli, out, otherwise, tmp_path):
    place = ("--from", out, otherwise[2], "--out", tmp_path / "all", "--device", "cpu")
    flags = ("--longer", "--lengths", 64, "--protocol", "span", "--schemes", "sin", "--seeds", 0)
    assert cli(extrapolation_test, *place, *flags)[0] == 0
    assert variants(tmp_path / "all", "longer") == {
        "", "linear", "window 16", "trained with window 8"
    }  # fmt: skip


# What is refused

WRONG = [
    ("--lengths 0", "'0' is not a whole number from 1"),
    ("--lengths 64 64", "--lengths: 64 is given 2 times"),
    ("--lengths 999999", "too few for windows of 999,999"),
    ("--lengths 64 97 101", "no span of at most"),
    ("--schemes rope sinus", "no checkpoint of sinus in"),
    ("--seeds 5", "no checkpoint in"),
    ("--seeds 0 7", "--seeds 7: no checkpoint of that seed"),
    ("--data nowhere", "--data nowhere: no such file or folder"),
    ("--protocol exact", "invalid choice: 'exact'"),
    ("--windows 1", "'1' is not a whole number from 2"),
    ("--device abacus", "there is no such device here"),
    ("--scaling cubic", "invalid choice: 'cubic'"),
    ("--scaling yarn --schemes alibi none", "--scaling yarn: none of the models takes it"),
    ("--beyond wrap --schemes rope", "--beyond wrap: none of the models takes it"),
    ("--scaling yarn yarn", "--scaling: yarn is given 2 times"),
    ("--factor 0.5 --scaling ntk", "--factor 0.5 is below 1"),
    ("--factor 4", "--factor 4 goes with --scaling"),
    ("--window -1", "'-1' is not a whole number from 0"),
    ("--name a/b", "--name 'a/b' is not a name for these files"),
    ("--name ..", "is not a name for these files"),
    ("--name train_compare", "is not a name for these files"),
    ("--name break_order", "is not a name for these files"),
    ("--from nowhere", "no checkpoint in nowhere/checkpoints"),
]


@pytest.mark.parametrize("wrong, message", WRONG)
def test_wrong_arguments_get_one_line_and_write_nothing(read, out, wrong, message):
    code, stdout, stderr = read(*wrong.split())
    assert code == 2 and stdout == "" and list(out.glob("*.md")) == [out / "train_compare.md"]
    assert message in stderr and stderr.count("\n") == 1
    assert stderr.startswith("extrapolation_test.py: ")


def test_a_folder_without_checkpoints_is_named(read, out):
    code, _, stderr = read("--from", out, out / "nowhere")
    assert code == 2 and f"--from {out / 'nowhere'}: no checkpoint in" in stderr


def test_a_broken_checkpoint_is_named(read, out):
    (out / "checkpoints" / "rope-seed1.pt").write_bytes(b"cut short")
    code, _, stderr = read()
    assert code == 2 and "rope-seed1.pt is not a whole checkpoint" in stderr
    assert stderr.count("\n") == 1
    code, stdout, _ = read(*QUICK)  # that one is not asked for
    assert code == 0 and "rope-seed1.pt is not a whole checkpoint" in stdout


def test_no_checkpoints_names_the_command_that_makes_them(cli, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    for flags, how in (
        ("", ""),
        ("--quick", " --quick"),
        ("--out mine", " --out mine"),
        ("--schemes rope:base=10", " --schemes rope:base=10"),
    ):
        code, _, stderr = cli(extrapolation_test, *flags.split())
        assert code == 2 and stderr.count("\n") == 1
        assert stderr.endswith(f"train first: python train_compare.py{how}\n")
    assert list(tmp_path.iterdir()) == []
