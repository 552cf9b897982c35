"""Go on from trained models at another length, with fresh optimizers.

    python finetune.py --schemes rope alibi --scaling none linear ntk yarn --train-len 1024
                                  # from results/, 1 to 2 minutes a model, into results/finetune/
    python finetune.py --quick    # from results/quick/ into results/quick/finetune/

The held-out text is scored under the fixed protocol on the way. Rates are a quarter of those of the
training, each step reads as many bytes as there, and whatever is not said is as in the checkpoint.
Models go into --out/checkpoints, and finetune.json, .csv and .md are written from all of them; the
same command goes on with an interrupted run.
"""

import dataclasses
import sys
from pathlib import Path

import torch
from torch import distributed

from data.corpus import load_corpus
from lab import command, score
from lab.checkpoints import ADVICE, checkpoint_path, claim, load, require_alike, weights_hash
from lab.checks import check_scheme, require_parts
from lab.collect import alike, collect
from lab.command import int_in_range, option
from lab.files import folder_lock
from lab.jobs import How, train_run
from lab.machine import join_ranks, pick_device, pick_dtype, rank, ranks, require_memory
from lab.provenance import stamp
from lab.reading import readings, require_scalings
from lab.tables import finetune_table, write_table
from schemes.rope_scaling import SCALINGS
from schemes.scheme import parse_scheme, tidy

QUICK = dict(steps=20, source="results/quick", out="results/quick/finetune")
# Of the models that one command goes on from, these must be the same.
ALIKE = (
    "steps", "lr", "adam_lr", "train_lens", "batch_size", "dim", "n_layer", "n_head", "window",
    "random_positions", "copies", "sha256", "held_out",
)  # fmt: skip


def arguments(words):
    parser = command.Parser(__doc__)
    what = parser.add_argument_group("what to train on")
    text = "the schemes whose checkpoints to go on from"
    option(what, "--schemes", tidy, ["rope", "alibi"], text, nargs="+", metavar="SCHEME")
    option(what, "--seeds", int_in_range(0), [0], "one model per scheme and seed", nargs="+")
    option(what, "--from", str, "results", "where they are", dest="source", metavar="FOLDER")
    text = f"{' '.join(SCALINGS)}: rope is rescaled by the new length over the old, sin by linear"
    what.add_argument(
        "--scaling", nargs="+", choices=SCALINGS, default=["none"], metavar="KIND", help=text
    )
    option(what, "--data", str, None, "another text than that of the training")
    other = parser.add_argument_group("how; what is not said is as in the checkpoint")
    text = "bytes per window: 4 times as many as before, if not said"
    option(other, "--train-len", int_in_range(1), None, text, nargs="+")
    option(
        other, "--batch-size", int_in_range(1), None, "windows per step: as many bytes as before"
    )
    option(other, "--window", int_in_range(0), None, "a token sees the last N tokens only; 0: all")
    text = "train at ordered random positions below N"
    option(other, "--random-positions", int_in_range(0, 2**20), None, text)
    command.add_recipe(other, lr=0.005, adam_lr=0.004, steps=100)
    where = parser.add_argument_group("where and how to run")
    command.add_training_place(where, "results/finetune")
    if "--quick" in words:
        parser.set_defaults(**QUICK)
    return parser, parser.read(words)


def starts(args):
    """The checkpoints to go on from. ValueError for one that is not there or unlike the others."""
    found = []
    for scheme in args.schemes:
        for seed in args.seeds:
            path = checkpoint_path(args.source, scheme, seed)
            try:
                found.append(load(path))
            except FileNotFoundError:
                wanted = f"--schemes {scheme} --seeds {seed}"
                how = command.train_first(args.source, QUICK["source"], wanted)
                raise ValueError(f"no checkpoint {path}; {how}") from None
            except ValueError as error:
                raise ValueError(f"{error}; {ADVICE}") from None
    require_alike(found, ALIKE)
    return found


def plan(args, parents, corpus, device):
    """The runs of a command -> [(run, the weights it goes on from, way and factor of its rows)]."""
    first = parents[0].run
    lengths = tuple(sorted(args.train_len or [4 * first.train_len]))
    L = lengths[-1]
    require_length(L)
    require_scalings(args.scaling, [one.run for one in parents], L)
    corpus.require(L)
    score.span_length([L], score.SPAN_BYTES, len(corpus.val))
    changes = dict(
        data=args.data or first.data, sha256=corpus.sha256, held_out=corpus.held_out,
        steps=args.steps, train_lens=lengths, lr=args.lr, adam_lr=args.adam_lr,
        batch_size=args.batch_size or max(1, first.batch_size * first.train_len // L),
        dtype=str(pick_dtype(args.dtype, device)).removeprefix("torch."),
    )  # fmt: skip
    for name in ("window", "random_positions"):
        if name in args.given:
            changes[name] = getattr(args, name)
    command.require_positions(changes.get("random_positions", first.random_positions), L)
    require_parts(changes["batch_size"], args.grad_accum)
    planned = []
    for parent in parents:
        old = parent.run
        changes |= dict(start=old, start_weights=weights_hash(parent.weights))
        for reading in readings(old, scaling=args.scaling):
            scheme, fields = old.scheme, {}
            if reading.way and L > old.train_len:
                scheme = parse_scheme(scheme).longer(reading.way, L, old.train_len)
                fields = dict(way=reading.way, factor=L / old.train_len)
            run = old.replace(scheme=scheme, **changes)
            require_memory(run)
            for length in lengths:
                check_scheme(run, length, device)
            planned.append((run, parent.weights, fields))
    return planned


def require_length(L):
    """ValueError for a training length that is too short to be watched."""
    if L < score.K:
        raise ValueError(
            f"--train-len {L}: fine-tuning is watched under the fixed protocol, which needs at "
            f"least {score.K}"
        )


def write_results(out, run):
    """Write the table of all models in `out` that were fine-tuned like `run`."""
    rows, bad = collect(out, "finetune")
    rows, others = alike(rows, run)
    command.notice_left_out(bad, others)
    rows = [row for row in rows if row["metric"] != "loss"]
    text = finetune_table(rows, run.train_len)
    write_table(out, "finetune", rows, text)
    return text


def main():
    parser, args = arguments(sys.argv[1:])
    try:
        for name in ("schemes", "seeds", "scaling", "train_len"):
            command.no_duplicates(f"--{name.replace('_', '-')}", getattr(args, name))
        if Path(args.source).resolve() == Path(args.out).resolve():
            raise ValueError(
                f"--out {args.out} holds the checkpoints to start from; write into another folder"
            )
        device, parents, out = pick_device(args.device), starts(args), Path(args.out)
        corpus = load_corpus(args.data or parents[0].run.data)
        planned = plan(args, parents, corpus, device)
        paths, locks = claim(out, [run for run, _, _ in planned])
    except ValueError as error:
        parser.error(error)
    command.introduce(corpus, device, planned[0][0].dtype)
    command.notice_other_text(corpus, parents[0].run)
    how = How(
        stamp=stamp(command.command_line(sys.argv), corpus, device, torch.float32),
        table="finetune",
        save_every=args.save_every,
        grad_accum=args.grad_accum,
        compiled=args.compile,
        force=args.force,
    )
    with locks, command.explain_stop(args, paths) as done:
        join_ranks(device)
        for path, (run, weights, fields) in zip(paths, planned):
            how = dataclasses.replace(how, fields=fields)
            train_run(run, corpus, path, device, how, start=weights)
            done.append(path)
            if not rank():
                with folder_lock(out):
                    table = write_results(out, run)
    if ranks() > 1:
        distributed.destroy_process_group()
    if not rank():
        print(f"\n{table}")
    then = f"python extrapolation_test.py{command.flag('--out', args.out, 'results')}"
    print(f"wrote finetune.json .csv .md and checkpoints/ into {out}; next: {then}")


if __name__ == "__main__":
    command.run(main, many=True)
