"""The command: what it reads, writes and says. What the experiments find: tests/experiments/."""

import json
import shutil

import pytest

import break_position
import train_compare
from data.corpus import load_corpus
from helpers import train_tiny, tree

SMALL = "--steps 2 --batch-size 2 --dim 16 --n-layer 1 --n-head 2 --dtype fp32 --device cpu"
CPU = ("--device", "cpu")
QUICK = ("--quick", *CPU)
NOTE = "(--quick: too small to judge by)"
MINE = """
from pos_sin import SinusoidalPositionalEncoding

class Mine(SinusoidalPositionalEncoding):
    pass
"""


@pytest.fixture(autouse=True)
def small_batches(monkeypatch):
    monkeypatch.setattr(break_position.bag, "BATCH", 64)
    monkeypatch.setattr(break_position.bag, "QUICK_TESTED", 64)


@pytest.fixture(scope="module")
def trained(tmp_path_factory):
    flags = "--steps 30 --batch-size 4 --train-len 64 --dim 16 --n-layer 2 --n-head 2"
    return train_tiny(tmp_path_factory.mktemp("break"), flags, 3000)


@pytest.fixture
def out(trained, tmp_path):
    """A folder with the five models, of its own for each test."""
    shutil.copytree(trained / "checkpoints", tmp_path / "out" / "checkpoints")
    return tmp_path / "out"


@pytest.fixture(scope="module")
def words(trained):
    return trained.parent / "words.txt"


def result_of(out, name):
    return json.loads((out / f"break_{name}.json").read_text())


def names_in(table):
    return [line.split(" | ")[0].removeprefix("| ") for line in table.splitlines()[2:]]


def train(cli, words, out, *flags):
    return cli(train_compare, *SMALL.split(), "--data", words, "--out", out, *flags)


@pytest.mark.slow
def test_every_experiment_says_what_it_found(cli, out):
    code, stdout, stderr = cli(break_position, *QUICK, "--out", out)
    # and the others go on
    assert code == 1
    assert "unscramble was not possible: words.txt: 0 sentences of 3 to 8 words" in stderr
    done = [name for name in break_position.EXPERIMENTS if name != "unscramble"]
    for name in done:
        result = result_of(out, name)
        assert set(result) == {
            "expectation", "measured", "verdict", "quick", "rows", "seconds", "provenance"
        }  # fmt: skip
        assert result["verdict"] in ("confirmed", "partly", "refuted")
        assert result["expectation"] in stdout and result["rows"]
        assert result["provenance"]["command"].startswith("python break_position.py --quick")
        assert (out / f"break_{name}.md").read_text() in stdout
    table = (out / "break.md").read_text()
    assert names_in(table) == done and "| **confirmed** |" in table.splitlines()[2]
    pictures = [path for path in tree(out) if path.endswith(".png")]
    assert pictures == [f"break_{name}.png" for name in sorted(set(done) - {"order"})]
    assert (out / "break_long.png").stat().st_size > 10_000


@pytest.mark.slow
def test_what_is_saved_can_be_judged_and_shown_again(cli, out):
    wanted = ("order", "no-encoding", "bag", "long", "swap")
    assert cli(break_position, *wanted, *QUICK, "--out", out)[0] == 0
    for name in wanted:
        result, experiment = result_of(out, name), break_position.EXPERIMENTS[name]
        verdict = experiment.judge(result["rows"])
        assert (verdict.measured, verdict.verdict) == (result["measured"], result["verdict"])
        assert experiment.show(result["rows"])[0] in (out / f"break_{name}.md").read_text()


@pytest.mark.slow
def test_quick_says_that_it_is_too_small_to_judge_by(cli, out):
    _, stdout, _ = cli(break_position, "order", "swap", *QUICK, "--out", out)
    assert stdout.count(NOTE) == 1  # order is the same with --quick
    order, swap = (out / "break.md").read_text().splitlines()[2:]
    assert NOTE in swap and NOTE not in order
    assert result_of(out, "swap")["quick"] and NOTE in (out / "break_swap.md").read_text()
    _, stdout, _ = cli(break_position, "swap", *CPU, "--out", out)
    assert NOTE not in stdout and NOTE not in (out / "break.md").read_text()


def test_a_damaged_result_is_named_and_left_out(cli, out):
    (out / "break_swap.json").write_text("garbage")
    (out / "break_long.json").write_text('{"verdict": 1}')
    code, _, stderr = cli(break_position, "order", "--out", out)
    told = "is not a result of this experiment, and is left out of break.md"
    assert code == 0 and stderr.count(told) == 2
    assert names_in((out / "break.md").read_text()) == ["order"]


def test_without_models_the_text_is_still_theirs(cli, out):
    code, _, stderr = cli(break_position, "unscramble", *QUICK, "--out", out)
    assert code == 1 and "words.txt: 0 sentences" in stderr


def test_order_needs_no_models(cli, tmp_path):
    code, stdout, _ = cli(break_position, "order", "--out", tmp_path / "new")
    assert code == 0 and "*Verdict:* **confirmed**" in stdout
    assert result_of(tmp_path / "new", "order")["provenance"]["text"] == load_corpus().sha256


def test_schemes_picks_the_models_that_are_read(cli, out):
    code, _, _ = cli(break_position, "swap", "--schemes", "rope", "sin", *QUICK, "--out", out)
    assert code == 0
    assert [row["scheme"] for row in result_of(out, "swap")["rows"]][::11] == ["rope", "sin"]


def test_an_experiment_without_its_scheme_says_so_and_the_others_go_on(cli, out):
    wanted = ("theta", "long", "no-encoding", "bag", "swap")
    flags = (*QUICK, "--out", out, "--schemes", "alibi", "sin")
    code, stdout, stderr = cli(break_position, *wanted, *flags)
    assert code == 1
    assert "theta was not possible: it needs a checkpoint of rope" in stderr
    assert "long was not possible: it needs a checkpoint of rope" in stderr
    assert "no-encoding was not possible: it needs a checkpoint of none" in stderr
    assert "bag was not possible: it needs a checkpoint of none" in stderr
    assert names_in((out / "break.md").read_text()) == ["swap"] and not (out / "theta").exists()


@pytest.mark.slow
def test_own_schemes_have_rows_beside_the_five(cli, out, words, tmp_path):
    path = tmp_path / "my_pos.py"
    path.write_text(MINE)
    mine, size = f"{path}:Mine", ("--train-len", 64, "--n-layer", 2, "--steps", 30)
    size += ("--batch-size", 4)
    assert train(cli, words, out, "--schemes", mine, *size)[0] == 0
    wanted = ("no-encoding", "bag", "swap")
    code, stdout, _ = cli(break_position, *wanted, *QUICK, "--out", out)
    assert code == 0 and stdout.count(f"| {mine} | ") == 3
    code, stdout, _ = cli(break_position, "swap", "--schemes", "rope", mine, *QUICK, "--out", out)
    assert code == 0 and stdout.count(f"| {mine} | ") == 1 and "| alibi | " not in stdout


def test_models_of_another_training_are_left_out_or_refused(cli, out, words):
    flags = ("--train-len", 64, "--schemes", "rope", "--window", 8)
    assert train(cli, words, out / "w", *flags)[0] == 0
    told = "was trained with window 8"
    code, _, stderr = cli(break_position, "long", *CPU, "--out", out / "w")
    assert code == 2 and "rope in" in stderr
    assert f"{told}; the experiments are about the plain training" in stderr
    assert train(cli, words, out, *flags, "--seeds", 1)[0] == 0
    flags = ("--seeds", 0, 1, *QUICK, "--out", out)
    code, _, stderr = cli(break_position, "swap", *flags)
    assert code == 0 and f"{told}, and is left out" in stderr
    code, _, stderr = cli(break_position, "swap", "--schemes", "rope", *flags)
    assert code == 2 and told in stderr


def test_theta_needs_windows_of_the_fixed_protocol(cli, words, tmp_path):
    assert train(cli, words, tmp_path, "--train-len", 32, "--schemes", "rope")[0] == 0
    code, _, stderr = cli(break_position, "theta", *QUICK, "--out", tmp_path)
    assert code == 1 and "the training length 32 is below 64" in stderr
    assert not (tmp_path / "theta").exists()


def test_a_text_that_is_too_short_is_refused(cli, text, tmp_path):
    assert train(cli, text, tmp_path, "--train-len", 64, "--schemes", "rope")[0] == 0
    code, _, stderr = cli(break_position, "long", *QUICK, "--out", tmp_path)
    assert code == 2 and "held-out bytes are too few for the experiments (needed: 8,193)" in stderr


@pytest.mark.parametrize(
    "wrong, message",
    [
        (
            "everything",
            "unknown experiment 'everything': use order, no-encoding, unscramble, bag, theta, "
            "long, swap",
        ),
        ("order order", "EXPERIMENT: order is given 2 times"),
        ("order --sentences ab cd", "'cd' is not 'ab' in another order"),
        ("order --sentences ab ab", "twice; give two sentences that differ in order"),
        ("swap --seeds 7", "no checkpoint"),
        ("swap --schemes rope t6", "unknown scheme 't6'"),
        ("swap --schemes rope rope", "--schemes: rope is given 2 times"),
        ("swap --schemes rope rope:base=3", "no checkpoint of rope:base=3"),
        ("swap --device abacus", "no such device"),
    ],
)
def test_wrong_arguments_get_one_line(cli, trained, wrong, message):
    code, stdout, stderr = cli(break_position, "--out", trained, *wrong.split())
    assert code == 2 and stdout == "" and message in stderr and stderr.count("\n") == 1


def test_empty_sentences_are_refused(cli, trained):
    code, _, stderr = cli(break_position, "order", "--sentences", "", "", "--out", trained)
    assert code == 2 and "twice; give two sentences that differ in order" in stderr


def test_sentences_may_be_given_again(cli, tmp_path):
    more = ("--sentences", "abc", "bca", "--sentences", "three", "ethre")
    code, stdout, _ = cli(break_position, "order", *more, "--out", tmp_path)
    assert code == 0 and "| abc / bca | " in stdout and "| three / ethre | " in stdout
