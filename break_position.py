"""Break position on purpose, and compare what happens with what the textbooks say.

    python break_position.py                # all experiments, on the models of train_compare.py;
                                            # theta alone trains five models of 2 to 3 minutes
    python break_position.py order swap     # some of them
    python break_position.py swap --schemes rope my_pos.py:Mine
    python break_position.py --quick        # on those of train_compare.py --quick, 1 to 2 minutes

    order        without positions attention cannot tell 我打你 from 你打我
    no-encoding  a model without positions cannot learn order; and: the causal mask tells it where
                 it is
    unscramble   words in the wrong order in, the sentence out: trained and tested for each scheme
                 (trains 10 small models a seed)
    bag          neither mask nor positions: the next byte from the bag of the bytes before it
                 (trains 2 models a seed)
    theta        RoPE with base 10 … 1,000,000 in place of 10,000 (trains 5 models a seed and keeps
                 them in --out/theta)
    long         trained at 256, read at 4096: where it breaks, and what each scaling saves
    swap         a model read at other positions than it was trained with, or with another scheme

Each prints the expectation, what was measured and the verdict: confirmed, partly or refuted, by the
function `rule` in its file in experiments/. The verdict is about the five schemes; your own have
rows beside them. Writes break_<name>.json and .md of what was read this time into --out, .png where
a picture helps, and break.md with a line for each.
"""

import json
import sys
import time
from pathlib import Path

import torch

from data.corpus import load_corpus
from experiments import bag, long, no_encoding, order, swap, theta, unscramble
from experiments.setup import Setup
from lab import command, plots
from lab.checkpoints import find, load, require_alike
from lab.command import int_in_range, option
from lab.files import folder_lock, writable_folder, write_atomically, write_json
from lab.jobs import How
from lab.machine import pick_device
from lab.provenance import stamp
from lab.rows import trained_as
from lab.tables import markdown_table
from schemes.scheme import SCHEMES, parse_scheme, tidy

EXPERIMENTS = {"order": order, "no-encoding": no_encoding, "unscramble": unscramble, "bag": bag,
               "theta": theta, "long": long, "swap": swap}  # fmt: skip
WITHOUT_MODELS, ONLY_ROPE = {"order", "unscramble"}, {"theta", "long"}  # the others read all
WINDOWS = 128  # of the training length that the held-out text must have
QUICK = dict(out="results/quick")
QUICK_NOTE = " (--quick: too small to judge by)"


def arguments(words):
    parser = command.Parser(__doc__)
    names = f"{' '.join(EXPERIMENTS)}; all, if none is said"
    parser.add_argument("experiments", nargs="*", metavar="EXPERIMENT", help=names)
    text = "the models to read: all in --out that were trained in the plain way, if not said"
    option(parser, "--schemes", tidy, None, text, nargs="+", metavar="SCHEME")
    text = "of the models that are read or trained"
    option(parser, "--seeds", int_in_range(0), [0], text, nargs="+")
    text = "order: two sentences more, of the same bytes in another order; may be given again"
    more = dict(action="append", default=[], metavar=("A", "B"), help=text)
    parser.add_argument("--sentences", nargs=2, **more)
    command.add_place(parser, what="with checkpoints/, and for the results")
    if "--quick" in words:
        parser.set_defaults(**QUICK)
    args = parser.read(words)
    args.experiments = args.experiments or list(EXPERIMENTS)
    return parser, args


def check(args):
    """ValueError for whatever can be wrong with the arguments alone."""
    command.no_duplicates("EXPERIMENT", args.experiments)
    for name in ("schemes", "seeds"):
        command.no_duplicates(f"--{name}", getattr(args, name))
    for name in args.experiments:
        if name not in EXPERIMENTS:
            raise ValueError(f"unknown experiment '{name}': use {', '.join(EXPERIMENTS)}")
    for scheme in args.schemes or ():
        parse_scheme(scheme)
    for pair in args.sentences:
        order.permutation(*(text.encode() for text in pair))


def prepare(args):
    """The models and the text that the experiments need -> Setup. ValueError if they lack."""
    device, needing = pick_device(args.device), set(args.experiments) - WITHOUT_MODELS
    found = trained_models(args, only_rope=needing <= ONLY_ROPE) if needing else []
    if found:
        corpus, needed = load_corpus(found[0].run.data), WINDOWS * found[0].run.train_len + 1
        if len(corpus.val) < needed:
            raise ValueError(
                f"{corpus.name}: {len(corpus.val):,} held-out bytes are too few for the "
                f"experiments (needed: {needed:,})"
            )
    else:  # the text of the models that are there, if any
        paths = sorted((Path(args.out) / "checkpoints").glob("*-seed*.pt"))
        corpus = load_corpus(load(paths[0], check=False).run.data if paths else "numpy")
    return Setup(
        corpus=corpus,
        device=device,
        out=writable_folder(args.out),
        models=[(one.run, one.model().to(device)) for one in found],
        seeds=args.seeds,
        own_schemes=[scheme for scheme in args.schemes or () if scheme not in SCHEMES],
        sentences=args.sentences,
        quick=args.quick,
        how=How(stamp=stamp(command.command_line(sys.argv), corpus, device, torch.float32)),
    )


def trained_models(args, only_rope):
    """The wanted checkpoints of the plain training -> [Checkpoint]. ValueError if there is none."""
    schemes = args.schemes or (["rope"] if only_rope else None)
    found = find([args.out], schemes, args.seeds)
    command.require_found(found, [args.out], schemes, args.seeds, QUICK["out"])
    special = [one for one in found if trained_as(one.run.flat())]
    for one in special:
        told = f"{one.run.scheme} in {args.out} was {trained_as(one.run.flat())}"
        if schemes or len(special) == len(found):
            raise ValueError(f"{told}; the experiments are about the plain training")
        command.complain(f"notice: {told}, and is left out")
    plain = [one for one in found if not trained_as(one.run.flat())]
    require_alike(plain)
    return plain


def carry_out(name, setup):
    """Measure, judge and show -> (what goes into the .json, the text, the Picture or None)."""
    experiment, started = EXPERIMENTS[name], time.perf_counter()
    rows = experiment.measure(setup)
    verdict = experiment.judge(rows)
    table, picture = experiment.show(rows)
    quick = setup.quick and experiment is not order  # which has nothing to make smaller
    text = (
        f"*Expectation:* {verdict.expectation}\n\n*Measured:* {verdict.measured}\n\n"
        f"*Verdict:* **{verdict.verdict}**{QUICK_NOTE * quick}\n\n{table}"
    )
    result = vars(verdict) | dict(quick=quick, rows=rows, provenance=setup.how.stamp)
    result["seconds"] = round(time.perf_counter() - started)
    return result, text, picture


def write(out, name, result, text, picture):
    """Write an experiment's files, and break.md with all that are there."""
    with folder_lock(out):
        write_json(out / f"break_{name}.json", result)
        write_atomically(out / f"break_{name}.md", text)
        if picture:
            plots.plot_lines(out / f"break_{name}.png", **vars(picture))
        write_atomically(out / "break.md", overview(out))


def overview(out):
    """All experiments that have left their results in this folder, a line each."""
    lines = []
    for name in EXPERIMENTS:
        path = out / f"break_{name}.json"
        try:
            result = json.loads(path.read_text("utf-8"))
            told = result["expectation"], result["measured"]
            verdict = f"**{result['verdict']}**" + QUICK_NOTE * result.get("quick", False)
            lines.append([name, *told, verdict])
        except FileNotFoundError:
            pass
        except (OSError, ValueError, KeyError, TypeError):
            told = "is not a result of this experiment, and is left out of break.md"
            command.complain(f"notice: {path} {told}")
    header = ["experiment", "expectation", "measured", "verdict"]
    return markdown_table(header, lines).replace("---:", "---")


def main():
    parser, args = arguments(sys.argv[1:])
    try:
        check(args)
        setup = prepare(args)
    except ValueError as error:
        parser.error(error)
    failed = False
    for name in args.experiments:
        try:
            result, text, picture = carry_out(name, setup)
        except ValueError as error:  # the other experiments go on
            command.complain(f"\n{name} was not possible: {error}")
            failed = True
            continue
        print(f"\n{name} ({result['seconds']} s)\n\n{text}")
        write(setup.out, name, result, text, picture)
    print(f"wrote break_*.json, .md and .png, and break.md with all there are, into {setup.out}")
    if failed:
        sys.exit(1)


if __name__ == "__main__":
    command.run(main)
