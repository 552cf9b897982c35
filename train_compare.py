"""Train one tiny causal LM per scheme: same bytes, batches, network and starting weights.

    python train_compare.py            # five schemes, one seed: about 12 minutes on two CPU cores
    python train_compare.py --quick    # the same in small, half a minute, into results/quick/
    python train_compare.py --check my_pos.py:Mine     # what there is to know before training it
    torchrun --nproc_per_node=4 train_compare.py       # each batch split over 4 processes, one per
                                                       # GPU where there are GPUs

Each model and everything measured of it goes into a checkpoint in --out/checkpoints. A (scheme,
seed) that is already trained with the same settings is not trained again (see --force), and an
interrupted run goes on where it was last saved, to the same numbers bit for bit: give the same
command again. train_compare.json, .csv, _curves.csv, .md and .png in --out are then written from
all checkpoints there. finetune.py goes on from them at another length.
"""

import sys
from pathlib import Path

import torch
from torch import distributed

from data.corpus import NUMPY_SHA256, load_corpus
from lab import command, plots, score
from lab.checkpoints import claim
from lab.checks import check_scheme, report, require_parts
from lab.collect import alike, collect
from lab.command import int_in_range, option, switch
from lab.files import folder_lock, write_csv
from lab.jobs import How, train_run
from lab.machine import join_ranks, pick_device, pick_dtype, rank, ranks, require_memory
from lab.provenance import stamp
from lab.rows import for_csv, select
from lab.runs import Run
from lab.tables import training_table, write_table
from schemes.scheme import SCHEMES, tidy

QUICK = dict(steps=250, batch_size=16, train_len=[64], dim=64, n_layer=2, out="results/quick")


def arguments(words):
    parser, whole = command.Parser(__doc__), int_in_range(1)
    what = parser.add_argument_group("what to train")
    text = "schemes, with options as in rope:base=10, or your own as in my_pos.py:MyAttention"
    option(what, "--schemes", tidy, list(SCHEMES), text, nargs="+", metavar="SCHEME")
    option(what, "--seeds", int_in_range(0), [0], "one model per scheme and seed", nargs="+")
    text = "numpy (the installed NumPy's sources), shakespeare, or a file, folder or glob"
    option(what, "--data", str, "numpy", text)
    text = "train nothing: say of one scheme what can be said before training"
    option(what, "--check", tidy, None, text, metavar="SCHEME")
    other = parser.add_argument_group("trained in another way, the same for every scheme")
    text = "train at ordered random positions below N, other ones each step; 0: at 0 … T − 1"
    option(other, "--random-positions", int_in_range(0, 2**20), 0, text)
    option(other, "--window", int_in_range(0), 0, "a token sees the last N tokens only; 0: all")
    switch(other, "--copies", "half of the windows repeat a random string, for context_test.py")
    size = parser.add_argument_group("network and recipe, the same for every scheme")
    command.add_recipe(size, Run.lr, Run.adam_lr, Run.steps)
    option(size, "--batch-size", whole, Run.batch_size, "windows per step")
    text = "bytes per window; several lengths take turns step by step, with as many bytes each"
    option(size, "--train-len", whole, [256], text, nargs="+")
    option(size, "--dim", whole, Run.dim, "model width")
    option(size, "--n-layer", int_in_range(1, 1000), Run.n_layer, "blocks")
    option(size, "--n-head", whole, Run.n_head, "attention heads per block")
    where = parser.add_argument_group("where and how to run")
    command.add_training_place(where, "results")
    switch(where, "--allow-future", "train an attention of your own that sees what it predicts")
    if "--quick" in words:
        parser.set_defaults(**QUICK)
    return parser, parser.read(words)


def run_of(args, device):
    """What the flags say of every run; its scheme, seed and text are still open."""
    lengths = tuple(sorted(args.train_len))
    L, maximum = lengths[-1], args.random_positions
    command.require_positions(maximum, L)
    return Run(
        data=args.data, dim=args.dim, n_layer=args.n_layer, n_head=args.n_head,
        window=args.window, trained_len=L, max_len=max(16 * L, maximum), train_lens=lengths,
        steps=args.steps, batch_size=args.batch_size, random_positions=maximum,
        copies=args.copies, lr=args.lr, adam_lr=args.adam_lr,
        dtype=str(pick_dtype(args.dtype, device)).removeprefix("torch."),
    )  # fmt: skip


def plan(args, corpus, device):
    """The runs of a command. ValueError for whatever can be wrong with its arguments."""
    for name in ("schemes", "seeds", "train_len"):
        command.no_duplicates(f"--{name.replace('_', '-')}", getattr(args, name))
    like = run_of(args, device).replace(sha256=corpus.sha256, held_out=corpus.held_out)
    corpus.require(like.train_len)
    score.span_length([like.train_len], score.SPAN_BYTES, len(corpus.val))
    require_parts(args.batch_size, args.grad_accum)
    require_memory(like)
    for scheme in args.schemes:
        for length in like.train_lens:
            check_scheme(like.replace(scheme=scheme), length, device, args.allow_future)
    return [
        like.replace(scheme=scheme, seed=seed) for scheme in args.schemes for seed in args.seeds
    ]


def write_results(out, run):
    """Write the tables and the picture of all models in `out` that were trained like `run`."""
    rows, bad = collect(out, "train_compare")
    rows, others = alike(rows, run)
    command.notice_left_out(bad, others)
    losses = select(rows, metric="loss")
    rows = [row for row in rows if row["metric"] != "loss"]
    text = training_table(rows)
    write_table(out, "train_compare", rows, text)
    if losses:
        write_csv(out / "train_compare_curves.csv", for_csv(losses))
        plots.plot_loss_curves(out / "train_compare.png", losses)
    else:  # all of them diverged at once; an earlier run's would not be theirs
        (out / "train_compare_curves.csv").unlink(missing_ok=True)
    return text


def main():
    parser, args = arguments(sys.argv[1:])
    try:
        device = pick_device(args.device)
        if args.check:
            run = run_of(args, device).replace(scheme=args.check, dtype="float32")
            for question, answer in report(run, args.allow_future):
                print(f"{question:<32}{answer}")
            return
        corpus = load_corpus(args.data)
        runs, out = plan(args, corpus, device), Path(args.out)
        paths, locks = claim(out, runs)
    except ValueError as error:
        parser.error(error)
    command.introduce(corpus, device, runs[0].dtype)
    if runs[0].data == "numpy" and corpus.sha256 != NUMPY_SHA256:
        print(
            "notice: this is not the text of the committed results (that is NumPy 2.4.6); its "
            f"SHA-256 is {corpus.sha256}"
        )
    how = How(
        stamp=stamp(command.command_line(sys.argv), corpus, device, torch.float32),
        save_every=args.save_every,
        grad_accum=args.grad_accum,
        compiled=args.compile,
        force=args.force,
    )
    with locks, command.explain_stop(args, paths) as done:
        join_ranks(device)
        for run, path in zip(runs, paths):
            train_run(run, corpus, path, device, how)
            done.append(path)
            if not rank():
                with folder_lock(out):
                    table = write_results(out, run)
    if ranks() > 1:
        distributed.destroy_process_group()
    if not rank():
        print(f"\n{table}")
    flags = " --quick" * args.quick
    flags += command.flag("--out", args.out, QUICK["out"] if args.quick else "results")
    print(
        "wrote train_compare.json .csv .md .png, _curves.csv and "
        f"{out / 'checkpoints'}/ into {out}; next: python extrapolation_test.py{flags}"
    )


if __name__ == "__main__":
    command.run(main, many=True)
