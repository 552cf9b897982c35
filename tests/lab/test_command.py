import argparse
import sys

import pytest

from data.corpus import Corpus
from helpers import RUN
from lab import command
from lab.checkpoints import Checkpoint
from lab.command import Parser, int_in_range, no_duplicates, option, positive

PLACES = dict(folders=["results"], schemes=None, seeds=None, quick="results/quick")


@pytest.fixture
def parser():
    parser = Parser("What it does.")
    option(parser, "--steps", int_in_range(1), 500, "optimizer steps")
    option(parser, "--seeds", int_in_range(0), [0], "one model each", nargs="+")
    option(parser, "--data", str, "", "text")
    command.switch(parser, "--quick", "in small")
    return parser


# Arguments


def test_given_are_the_flags_that_the_user_wrote(parser):
    assert parser.read([]).given == set()
    args = parser.read(["--steps", "500", "--quick"])
    assert args.given == {"steps", "quick"} and (args.steps, args.seeds) == (500, [0])


def test_help_shows_the_defaults(parser, capsys):
    with pytest.raises(SystemExit) as stop:
        parser.read(["--help"])
    text = capsys.readouterr().out
    assert stop.value.code == 0 and "What it does." in text
    assert "optimizer steps (default: 500)" in text and "one model each (default: 0)" in text
    assert "text (default" not in text


@pytest.mark.parametrize("words, message", [
    (["--steps", "0"], "argument --steps: '0' is not a whole number from 1 to 2147483647"),
    (["--step", "3"], "unrecognized arguments: --step 3"),  # no abbreviations
    (["--seeds"], "argument --seeds: expected at least one argument"),
])  # fmt: skip
def test_a_wrong_argument_gets_one_line_and_exit_code_2(parser, capsys, words, message):
    with pytest.raises(SystemExit) as stop:
        parser.read(words)
    told = capsys.readouterr()
    assert stop.value.code == 2 and told.out == ""
    assert message in told.err and told.err.count("\n") == 1


def test_an_error_of_two_lines_is_told_in_one(parser, capsys):
    with pytest.raises(SystemExit):
        parser.error("first\r\nsecond")
    assert capsys.readouterr().err.endswith(": first second\n")


@pytest.mark.parametrize("text", ["", "x", "1.0", "1e3", "--1", "²", "٣", "-1", "9", "+2"])
def test_what_is_no_whole_number_in_range_is_refused(text):
    told = f"'{text}' is not a whole number from 0 to 8".replace("+", r"\+")
    with pytest.raises(argparse.ArgumentTypeError, match=told):
        int_in_range(0, 8)(text)


def test_whole_numbers_in_range_are_taken():
    assert [int_in_range(-2, 8)(text) for text in ("0", "8", "-2", "007")] == [0, 8, -2, 7]


@pytest.mark.parametrize("text", ["0", "-1", "nan", "inf", "1e30", "1000.1", "x", ""])
def test_what_is_no_positive_number_is_refused(text):
    with pytest.raises(argparse.ArgumentTypeError, match="is not a number above 0 and at most"):
        positive(text)


def test_positive_numbers_are_taken():
    assert [positive(text) for text in ("1000", "1e-9", ".5")] == [1000, 1e-9, 0.5]


def test_duplicates_are_named():
    no_duplicates("--seeds", [0, 1])
    no_duplicates("--seeds", None)
    with pytest.raises(ValueError, match="--seeds: 1 is given 2 times; once is enough"):
        no_duplicates("--seeds", [0, 1, 1])


# What is said


def test_the_command_line_is_the_one_a_user_types():
    script = command.ROOT / "train_compare.py"
    line = command.command_line([str(script), "--data", "my text.txt"])
    assert line == "python train_compare.py --data 'my text.txt'"
    bench = command.ROOT / "bench" / "train_step.py"
    assert command.command_line([str(bench)]) == "python bench/train_step.py"
    assert command.command_line(["/elsewhere/pytest", "x"]) == "python pytest x"


def test_the_command_line_under_torchrun_names_it(monkeypatch):
    monkeypatch.setenv("TORCHELASTIC_RUN_ID", "none")
    monkeypatch.setenv("WORLD_SIZE", "4")
    line = command.command_line([str(command.ROOT / "finetune.py")])
    assert line == "torchrun --nproc_per_node=4 finetune.py"


@pytest.mark.parametrize("folder, flags, told", [
    ("results", "", "train first: python train_compare.py"),
    ("results/quick", "", "train first: python train_compare.py --quick"),
    ("my results", "", "train first: python train_compare.py --out 'my results'"),
    ("mine", "--copies", "train first: python train_compare.py --copies --out mine"),
])  # fmt: skip
def test_the_command_that_makes_checkpoints_is_named(folder, flags, told):
    assert command.train_first(folder, "results/quick", flags) == told


def found(*runs):
    return [Checkpoint(None, RUN.replace(scheme=s, seed=n), [], 0.0, None) for s, n in runs]


def test_checkpoints_that_are_all_there_are_enough():
    here = found(("rope", 0), ("rope", 1), ("sin", 0))
    command.require_found(here, **PLACES | dict(schemes=["sin", "rope"], seeds=[1, 0]))


@pytest.mark.parametrize("here, wanted, told", [
    ([], {}, "no checkpoint in results/checkpoints; train first: python train_compare.py"),
    ([("rope", 0)], dict(seeds=[0, 7]), "--seeds 7: no checkpoint of that seed in results"),
    ([("rope", 0)], dict(schemes=["rope", "sin"]), "no checkpoint of sin in results/checkpoints;"),
    ([], dict(schemes=["rope:base=10"]), "train_compare.py --schemes rope:base=10"),
    ([("rope", 0)], dict(folders=["none", "results"]), "--from none: no checkpoint in none/check"),
])  # fmt: skip
def test_checkpoints_that_are_missing_are_named(here, wanted, told):
    with pytest.raises(ValueError, match=told):
        command.require_found(found(*here), **PLACES | wanted)


def test_another_text_is_noticed(capsys):
    run = RUN.replace(sha256="a" * 64, held_out="files")
    for sha256, held_out in (("a" * 64, "files"), ("b" * 64, "files"), ("a" * 64, "the end")):
        command.notice_other_text(Corpus("words", sha256, 1, held_out, b"", b""), run)
        told = capsys.readouterr().out
        assert ("notice: the models were trained on other text" in told) == (
            (sha256, held_out) != (run.sha256, run.held_out)
        )


# How a command ends


@pytest.fixture
def ended(monkeypatch, capsys):
    """ended(main) -> (exit code, stdout, stderr)."""

    def call(main, many=False):
        monkeypatch.setattr(sys, "argv", ["/somewhere/train_compare.py"])
        try:
            command.run(main, many)
            code = 0
        except SystemExit as stop:
            code = stop.code
        return (code, *capsys.readouterr())

    return call


def raises(error):
    def main():
        raise error

    return main


def test_a_command_that_succeeds_just_ends(ended):
    assert ended(lambda: print("done")) == (0, "done\n", "")


def test_ctrl_c_ends_in_exit_code_130_without_a_word(ended):
    assert ended(raises(KeyboardInterrupt())) == (130, "", "")


def test_what_the_system_refuses_is_one_line(ended):
    error = OSError(28, "No space left on device", "results/rope.pt")
    told = "train_compare.py: [Errno 28] No space left on device: 'results/rope.pt'\n"
    assert ended(raises(error)) == (1, "", told)


def test_an_error_of_the_code_keeps_its_traceback(ended):
    with pytest.raises(ZeroDivisionError):
        ended(raises(ZeroDivisionError()))


def test_a_command_of_one_process_is_refused_under_torchrun(ended, monkeypatch):
    monkeypatch.setenv("TORCHELASTIC_RUN_ID", "none")
    monkeypatch.setenv("WORLD_SIZE", "2")
    monkeypatch.setenv("RANK", "0")
    code, *_ = ended(raises(ZeroDivisionError()))
    assert code.startswith("train_compare.py: this is one process; start it with python")


def stop(error, tmp_path, force=False, compiled=False):
    """Stop the second of three runs with this error."""
    paths = [tmp_path / f"rope-seed{n}.pt" for n in range(3)]
    args = argparse.Namespace(force=force, compile=compiled, save_every=30)
    with command.explain_stop(args, paths) as done:
        done.append(paths[0])
        raise error


def test_ctrl_c_says_what_is_kept_and_how_to_go_on(tmp_path, capsys):
    for saved in (False, True):
        with pytest.raises(KeyboardInterrupt):
            stop(KeyboardInterrupt(), tmp_path, force=saved)
        told = capsys.readouterr().err
        assert "stopped; 1 of 3 runs are finished and kept, the same command" in told
        assert ("from its start, since it was not saved yet (every 30 s)" in told) != saved
        assert ("the same command without --force goes on" in told) == saved
        (tmp_path / "rope-seed1.resume").touch()


def test_a_compiler_that_does_not_work_is_told(tmp_path):
    error = RuntimeError("Failed to find C compiler.\nPlease specify one")
    with pytest.raises(SystemExit, match="--compile does not work here: .*compiler.; leave it out"):
        stop(error, tmp_path, compiled=True)
    with pytest.raises(RuntimeError, match="Please specify one"):
        stop(error, tmp_path)
