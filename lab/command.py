"""What the commands share in dealing with a user: arguments, one-line errors, exit codes."""

import argparse
import contextlib
import os
import shlex
import sys
from pathlib import Path

import torch
from tqdm import tqdm

from lab.machine import keep_freed_memory, rank, ranks
from schemes.scheme import SCHEMES, reason

ROOT = Path(__file__).parent.parent


class Parser(argparse.ArgumentParser):
    """An ArgumentParser whose errors are one line and exit code 2.

    parser.read(words) -> args, in which args.given is the set of names that the user wrote.
    """

    def __init__(self, description):
        layout = argparse.RawDescriptionHelpFormatter
        super().__init__(description=description, formatter_class=layout, allow_abbrev=False)

    def read(self, words):
        args = self.parse_args(words)
        unset = []  # argparse leaves alone what the namespace has already, or copies it to append
        blank = argparse.Namespace(**dict.fromkeys(vars(args), unset))
        written = vars(self.parse_args(words, blank))
        args.given = {name for name, value in written.items() if value is not unset}
        return args

    def error(self, message):
        self.exit(2, None if rank() else f"{self.prog}: {' '.join(str(message).split())}\n")


def int_in_range(low, high=2**31 - 1):
    """An argparse type: a whole number from low to high."""

    def parse(text):
        is_whole = text.isascii() and text.removeprefix("-").isdigit()
        if not is_whole or not low <= int(text) <= high:
            raise argparse.ArgumentTypeError(f"'{text}' is not a whole number from {low} to {high}")
        return int(text)

    return parse


def positive(text):
    """An argparse type: a number above 0, at most 1000."""
    try:
        if 0 < float(text) <= 1000:
            return float(text)
    except ValueError:
        pass
    raise argparse.ArgumentTypeError(f"'{text}' is not a number above 0 and at most 1000")


def no_duplicates(flag, values):
    """ValueError if a value was given twice."""
    for value in values or ():
        if values.count(value) > 1:
            times = values.count(value)
            raise ValueError(f"{flag}: {value} is given {times} times; once is enough")


def option(group, name, kind, default, text, **more):
    """Add a flag with a value, or with nargs="+" several; --help shows its default."""
    shown = " ".join(map(str, default)) if isinstance(default, list) else default
    if default not in (None, ""):
        text = f"{text} (default: {shown})"
    if kind is not str and "metavar" not in more:
        more["metavar"] = "N"
    group.add_argument(name, type=kind, default=default, help=text, **more)


def switch(group, name, text):
    """Add a flag without a value."""
    group.add_argument(name, action="store_true", help=text)


def add_place(group, out="results", what="for results and checkpoints"):
    """Add --device, --out and --quick, which nearly every command has."""
    option(group, "--device", str, "auto", "auto (cuda, then mps, then cpu), cpu, cuda:1, mps")
    option(group, "--out", str, out, f"folder {what}")
    switch(group, "--quick", "all in small, into results/quick/; other flags still count")


def add_recipe(group, lr, adam_lr, steps):
    """Add the flags of the recipe that training and fine-tuning share, with their defaults."""
    option(group, "--steps", int_in_range(1), steps, "optimizer steps")
    option(group, "--lr", positive, lr, "peak learning rate of Muon, for qkv, out, up and down")
    option(group, "--adam-lr", positive, adam_lr, "peak learning rate of AdamW, for all else")


def add_training_place(group, out):
    """Add the flags that say how to train, which change nothing of what comes out."""
    add_place(group, out)
    group.add_argument(
        "--dtype",
        choices=("auto", "bf16", "fp32"),
        default="auto",
        help="training precision; auto: bf16 where the hardware has units for it",
    )
    whole = int_in_range(1)
    option(group, "--grad-accum", whole, 1, "compute each batch in N parts, at less memory")
    option(group, "--save-every", int_in_range(0), 30, "seconds between saves of a run in progress")
    switch(group, "--compile", "torch.compile the network: slow to begin, then faster on a GPU")
    switch(group, "--force", "train again, from the start, what is already trained")


def quiet_interval():
    """Seconds between updates of a progress bar: few on a terminal, many in a file."""
    return 0.1 if sys.stderr.isatty() else 30


def progress_bar(total, unit):
    return tqdm(total=total, unit=unit, mininterval=quiet_interval())


def training_bar(run, done):
    """A progress bar over the steps of a run; `done` of them were done before."""
    return tqdm(
        total=run.steps,
        initial=done,
        desc=f"{run.scheme}, seed {run.seed}",
        unit="step",
        mininterval=quiet_interval(),
        disable=rank() > 0,
    )


def command_line(argv):
    """The command as a user would type it in the repository's folder."""
    script = Path(argv[0]).resolve()
    name = script.relative_to(ROOT) if script.is_relative_to(ROOT) else Path(script.name)
    start = ["torchrun", f"--nproc_per_node={ranks()}"] if ranks() > 1 else ["python"]
    return shlex.join([*start, name.as_posix(), *argv[1:]])


def train_first(folder, quick, flags=""):
    """The command that makes checkpoints in a folder; `quick` is the folder of --quick."""
    start = "train first: python train_compare.py"
    if str(folder) == quick:
        return f"{start} --quick {flags}".rstrip()
    return f"{start} {flags}".rstrip() + flag("--out", folder, "results")


def require_found(found, folders, schemes, seeds, quick):
    """ValueError if a folder, scheme or seed that was asked for has no checkpoint."""
    for folder in folders if len(folders) > 1 else ():
        if not any((Path(folder) / "checkpoints").glob("*-seed*.pt")):
            raise ValueError(f"--from {folder}: no checkpoint in {Path(folder) / 'checkpoints'}")
    there = {one.run.seed for one in found}
    absent = [seed for seed in seeds or () if found and seed not in there]
    if absent:
        where = ", ".join(map(str, folders))
        raise ValueError(f"--seeds {absent[0]}: no checkpoint of that seed in {where}")
    missing = [s for s in schemes or () if s not in {one.run.scheme for one in found}]
    if missing or not found:
        wanted = f"--schemes {' '.join(schemes)}" if set(missing) - set(SCHEMES) else ""
        where = ", ".join(str(Path(folder) / "checkpoints") for folder in folders)
        of = f" of {', '.join(missing)}" if missing else ""
        how = train_first(folders[0], quick, wanted)
        raise ValueError(f"no checkpoint{of} in {where}; {how}")


def require_positions(maximum, L):
    """ValueError for random positions among which a window of L does not fit (0: none)."""
    if 0 < maximum < L:
        raise ValueError(
            f"--random-positions {maximum} is below the training length {L}; use 2 to 16 times that"
        )


def notice_other_text(corpus, run):
    """Say so if this is not the text, or not the part of it, that a model was held out from."""
    if (corpus.sha256, corpus.held_out) != (run.sha256, run.held_out):
        print(
            "notice: the models were trained on other text, or another part of it, than this "
            f"({corpus.name}, SHA-256 {corpus.sha256[:16]}…); what is held out here may have been "
            "seen in training, or may be of another kind"
        )


def notice_left_out(bad, others):
    """Say which models are not in the tables: `bad` says why, `others` were trained otherwise."""
    for why in bad:
        print(f"notice: {why}; not in the tables")
    if others:
        print(f"notice: trained otherwise, and not in the tables: {', '.join(others)}")


def notice_other_targets(left):
    """Say how many rows are not in the tables because they were measured on other targets."""
    if left:
        print(f"notice: rows measured on other targets are kept, and not in the tables: {left}")


def introduce(corpus, device, dtype):
    """Say what is about to be trained on what."""
    processes = f" in each of {ranks()} processes" if ranks() > 1 else ""
    print(
        f"{corpus.name}: {len(corpus.train):,} bytes to train on, {len(corpus.val):,} held out; "
        f"{device.type}, {dtype}, {torch.get_num_threads()} threads{processes}"
    )


@contextlib.contextmanager
def explain_stop(args, paths):
    """Say what an interrupted or broken training leaves behind, and how to go on.

    Gives a list, to which each finished path is to be added.
    """
    done = []
    try:
        yield done
    except KeyboardInterrupt:
        unfinished = paths[len(done) : len(done) + 1]
        saved = any(path.with_suffix(".resume").exists() for path in unfinished)
        where = "where it was last saved"
        if not saved:
            where = f"from its start, since it was not saved yet (every {args.save_every} s)"
        complain(
            f"\nstopped; {len(done)} of {len(paths)} runs are finished and kept, the same command"
            f"{' without --force' * args.force} goes on with the next {where}"
        )
        raise
    except RuntimeError as error:
        name = Path(sys.argv[0]).name
        if ranks() > 1:  # another process is gone, or this one ran out of memory
            sys.exit(
                f"{name}, rank {rank()} of {ranks()}: {reason(error)}; all ranks end, the same "
                "command goes on where it was last saved"
            )
        if args.compile:
            sys.exit(f"{name}: --compile does not work here: {reason(error)}; leave it out")
        raise


def flag(name, value, default):
    """' --name value' for a command that is proposed; nothing where the default will do."""
    return "" if str(value) == default else f" {name} {shlex.quote(str(value))}"


def complain(message):
    """One line for the user on standard error."""
    print(message, file=sys.stderr)


def run(main, many=False):
    """Run a command; Ctrl-C and what the system refuses end in one line, not a traceback.

    many: it may run under torchrun.
    """
    for stream in (sys.stdout, sys.stderr):
        if hasattr(stream, "reconfigure"):  # not where a notebook or nobody is listening
            stream.reconfigure(errors="replace")  # a terminal without ± gets a question mark
    keep_freed_memory()
    name = Path(sys.argv[0]).name
    if ranks() > 1 and not many:
        told = f"{name}: this is one process; start it with python, only train_compare.py and "
        told += "finetune.py run under torchrun"
        sys.exit(2 if rank() else told)
    if rank():  # rank 0 alone speaks
        sys.stdout = open(os.devnull, "w")
    try:
        main()
    except KeyboardInterrupt:
        sys.exit(130)
    except OSError as error:
        print(f"{name}: {error}", file=sys.stderr)
        sys.exit(1)
