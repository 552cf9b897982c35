"""Train one tiny causal LM per scheme: same bytes, same batches, same network, same starting weights.

    python train_compare.py            # five schemes, one seed: about 12 minutes on two CPU cores
    python train_compare.py --quick    # the same in small, half a minute, into results/quick/
    python train_compare.py --finetune-from rope alibi --scaling linear ntk yarn --train-len 1024 --steps 100
                                       # what is trained already, on longer windows, into results/finetune/
    torchrun --nproc_per_node=4 train_compare.py   # each batch split over 4 processes, one per GPU where there are GPUs

Writes train_compare.json, .csv, _curves.csv, .md and .png (fine-tuning: finetune.json, .csv and .md) and checkpoints/ into --out. A
(scheme, seed) that is already trained with the same settings and code is not trained again (see --force), and an interrupted
run goes on where it was last saved, to the same numbers bit for bit: give the same command again.
"""
import contextlib
import copy
import functools
import hashlib
import inspect
import os
import re
import sys
import time
from pathlib import Path

import numpy as np
import torch
import torch.nn.functional as F
from torch import distributed
from tqdm import tqdm

import score
from common import (HERE, Parser, code_hash, distinct, from_rank_0, given, join_ranks, only_writer, pick_device, pick_dtype, positive,
                    provenance, rank, ranks, run, whole, writable_folder, write_file, write_json)
from data.corpus import NUMPY_SHA256, load_corpus
from pos_rope import SCALINGS
from pos_sin import SinusoidalPositionalEncoding
from report import markdown_table, plot_loss_curves, spread, write_csv
from tiny_lm import SCHEMES, VOCABULARY, TinyLM, load_model, parse_scheme, reason, size_of

QUICK = dict(steps=250, batch_size=16, train_len=[64], dim=64, n_layer=2, out="results/quick")
# Fine-tuning: rates are a quarter of those of the training, and the network is that of the checkpoint.
FINETUNE = dict(steps=100, lr=0.005, adam_lr=0.004, out="results/finetune")
WATCHED = (0, 5, 10, 20, 50, 100, 200, 500, 1000)  # fine-tuning steps after which the held-out text is scored, and at the end
WATCHED_WINDOWS = 64
LETTERS = 97, 123  # a to z, of which random strings are made for --copies


class Diverged(Exception):
    """A loss is NaN or infinite."""


def arguments():
    parser = Parser(__doc__)
    what = parser.add_argument_group("what to train")
    what.add_argument("--schemes", nargs="+", default=list(SCHEMES), metavar="SCHEME",
                      help="learned sin rope alibi none (the default: all), with options as in rope:base=10, "
                           "or your own as in my_pos.py:MyAttention")
    what.add_argument("--seeds", nargs="+", type=whole(0), default=[0], metavar="N",
                      help="one model per scheme and seed (default: 0)")
    what.add_argument("--data", default="numpy",
                      help="numpy (the installed NumPy's sources, the default), shakespeare, or a file, folder or glob")
    other = parser.add_argument_group("trained in another way, the same for every scheme")
    other.add_argument("--random-positions", type=whole(0, 2**20), default=0, metavar="MAX",
                       help="train at ordered random positions below MAX, other ones each step (Ruoss et al. 2023)")
    other.add_argument("--window", type=whole(0), default=0, metavar="N", help="a token sees the last N tokens only; 0: all (default)")
    other.add_argument("--copies", action="store_true",
                       help="half of the windows repeat a random string, for context_test.py's long-range copy")
    tune = parser.add_argument_group("fine-tuning (defaults there: --steps 100, --lr 0.005, --adam-lr 0.004, as many bytes per step as in the "
                                     "training, --out results/finetune; what is not said is as in the checkpoint)")
    tune.add_argument("--finetune-from", nargs="+", metavar="SCHEME",
                      help="go on from the checkpoints of these schemes, with fresh optimizers")
    tune.add_argument("--from", dest="source", metavar="FOLDER", help="where those checkpoints are (default: results)")
    tune.add_argument("--scaling", nargs="+", choices=list(SCALINGS), metavar="KIND",
                      help=f"{' '.join(SCALINGS)}: rope is rescaled by the new length over the old, and sin by linear (default: none)")
    size = parser.add_argument_group("network and recipe, the same for every scheme")
    size.add_argument("--steps", type=whole(1), default=500, help="optimizer steps (default: 500)")
    size.add_argument("--batch-size", type=whole(1), default=32, help="windows per step (default: 32)")
    size.add_argument("--train-len", type=whole(1), nargs="+", default=[256], metavar="N",
                      help="bytes per window; of several lengths one step each in turn, with as many bytes (default: 256)")
    size.add_argument("--dim", type=whole(1), default=128, help="model width (default: 128)")
    size.add_argument("--n-layer", type=whole(1, 1000), default=4, help="blocks (default: 4)")
    size.add_argument("--n-head", type=whole(1), default=4, help="attention heads per block (default: 4)")
    size.add_argument("--lr", type=positive, default=0.02,
                      help="peak learning rate of Muon, for the matrices of the blocks (default: 0.02)")
    size.add_argument("--adam-lr", type=positive, default=0.015,
                      help="peak learning rate of AdamW, for all other weights (default: 0.015)")
    where = parser.add_argument_group("where to run and write")
    where.add_argument("--device", default="auto", help="auto (cuda, then mps, then cpu), cpu, cuda, cuda:1, mps")
    where.add_argument("--dtype", choices=("auto", "bf16", "fp32"), default="auto",
                       help="training precision; auto: bf16 where the hardware has units for it")
    where.add_argument("--grad-accum", type=whole(1), default=1, metavar="K",
                       help="compute each batch in K parts one after another, at less memory (default: 1)")
    where.add_argument("--compile", action="store_true", help="torch.compile the network: a minute first, then faster on a GPU")
    where.add_argument("--save-every", type=whole(0), default=30, metavar="S",
                       help="seconds between saves of a run in progress (default: 30)")
    where.add_argument("--allow-future", action="store_true",
                       help="train an attention of your own even if it sees what it is to predict")
    where.add_argument("--out", default="results", help="folder for results and checkpoints (default: results)")
    where.add_argument("--force", action="store_true", help="train again, from the start, what is already trained")
    where.add_argument("--quick", action="store_true",
                       help="a small network and 250 steps, into results/quick/; other flags still count")
    if "--quick" in sys.argv[1:]:
        parser.set_defaults(**QUICK)
    if given("--finetune-from"):
        parser.set_defaults(**FINETUNE | ({"out": "results/quick/finetune"} if "--quick" in sys.argv[1:] else {}))
    return parser, parser.parse_args()


def batch(data, seed, step, batch_size, length, with_copies=False):
    """The batch of one step, a function of (seed, step) alone: uint8 (B, length + 1) -> inputs x, targets y (B, length)."""
    starts = np.random.default_rng((seed, step)).integers(0, len(data) - length, batch_size)
    window = torch.from_numpy(np.asarray(data[starts[:, None] + np.arange(length + 1)]))
    if with_copies:
        copies(window, seed, step)
    return window[:, :-1], window[:, 1:]


def copies(window, seed, step):
    """The first half of the windows (B, length + 1) become a random string of letters, 16 … ¾·length long, again and again."""
    rng, length = np.random.default_rng((seed, step, 1)), window.shape[1]
    for row in window[:(len(window) + 1) // 2]:
        string = rng.integers(*LETTERS, rng.integers(min(16, length), max(16, 3 * length // 4) + 1))
        row[:] = torch.from_numpy(np.resize(string, length))


def random_positions(seed, step, length, maximum):
    """`length` positions below `maximum`, drawn without replacement and put in order: int64 (length,)."""
    if length > maximum:
        raise ValueError(f"{length} bytes do not fit in {maximum} random positions")
    return torch.from_numpy(np.sort(np.random.default_rng((seed, step, 2)).choice(maximum, length, replace=False)))


def at_its_positions(model, settings):
    """The model as ids -> logits, at positions like those of its training: random ones are drawn once per length."""
    maximum = settings["random_positions"]
    if not maximum:
        return model
    return lambda ids: model(ids, random_positions(0, 0, ids.shape[1], maximum).to(ids.device))


def learning_rate(step, steps):
    """The fraction of the peak: up over the first tenth, flat to 40 %, then down in a line to 5 % at the end."""
    warm_up = min(1.0, (step + 1) / max(1, steps // 10))
    decay = 1 - 0.95 * max(0.0, step / steps - 0.4) / 0.6
    return warm_up * decay


def optimizers(model, lr, adam_lr):
    """Muon (Jordan et al. 2024) for the matrices of the blocks, AdamW for all other weights; no weight decay."""
    matrices = [p for p in model.blocks.parameters() if p.ndim == 2]
    others = [p for p in model.parameters() if not any(p is m for m in matrices)]
    return [torch.optim.Muon(matrices, lr=lr, momentum=0.95, weight_decay=0.0),
            torch.optim.AdamW(others, lr=adam_lr, betas=(0.9, 0.95), weight_decay=0.0)]


def forward_backward(worker, x, y, positions, device, grad_accum=1):
    """Mean loss over the batch x, y (B, T), its gradient added to worker's: over all ranks, in `grad_accum` parts on each."""
    parts = [part.tensor_split(ranks() * grad_accum)[rank() * grad_accum:(rank() + 1) * grad_accum] for part in (x, y)]
    loss = torch.zeros((), device=device)
    for i, (inputs, targets) in enumerate(zip(*parts)):
        wait = ranks() > 1 and i + 1 < grad_accum  # gradients are exchanged after the last part
        with worker.no_sync() if wait else contextlib.nullcontext():
            logits = worker(inputs.to(device), positions)  # (B, T, 256)
            part = F.cross_entropy(logits.float().flatten(0, 1), targets.to(device).long().flatten()) * (len(inputs) / len(x))
            (part * ranks()).backward()  # the exchange takes the mean over ranks
        loss += part.detach()
    if ranks() > 1:
        distributed.all_reduce(loss)
    return loss


def train(settings, data, device, dtype, bar, start=None, watch=None, saved=None, save=None, grad_accum=1, compiled=False):
    """One model from its settings -> (TinyLM in float32 on `device`, curve {"step", "loss"}). Diverged on a bad loss.

    In bf16 the products run on a bf16 copy of the weights, while the optimizers keep and update the float32 ones.
    start: weights to go on from. watch: called as watch(model, steps done), first before step 0.
    saved: the state of an interrupted run, to go on to the same numbers. save: called every 10 steps with such a state.
    """
    torch.manual_seed(settings["seed"])
    model = TinyLM(settings["scheme"], **size_of(settings))
    if start:
        model.load_state_dict(start)
    model.to(device)
    both = optimizers(model, settings["lr"], settings["adam_lr"])
    generators = [torch] + ([torch.get_device_module(device)] if device.type != "cpu" else [])
    first, curve, recent = 0, {"step": [], "loss": []}, []
    if saved:
        first, curve = saved["step"], copy.deepcopy(saved["curve"])
        model.load_state_dict(saved["model"])
        for optimizer, state in zip(both, saved["optimizers"]):
            optimizer.load_state_dict(state)
        for generator, state in zip(generators, saved["generators"]):
            generator.set_rng_state(state)
    worker = model if dtype == torch.float32 else copy.deepcopy(model).to(dtype)
    pairs = list(zip(model.parameters(), worker.parameters()))
    if compiled:
        worker = torch.compile(worker)
    if ranks() > 1:
        worker = torch.nn.parallel.DistributedDataParallel(worker)
    started = time.perf_counter()
    if watch and not saved:
        watch(model, 0)
    for step in range(first, settings["steps"]):
        length = settings["train_lens"][step % len(settings["train_lens"])]
        x, y = batch(data, settings["seed"], step, settings["batch_size"] * settings["train_len"] // length, length,
                     settings["copies"])
        positions = None
        if settings["random_positions"]:
            positions = random_positions(settings["seed"], step, length, settings["random_positions"]).to(device)
        loss = forward_backward(worker, x, y, positions, device, grad_accum)
        for main, copied in pairs:
            if main is not copied and copied.grad is not None:
                main.grad, copied.grad = copied.grad.float(), None
        rates = [peak * learning_rate(step, settings["steps"]) for peak in (settings["lr"], settings["adam_lr"])]
        for optimizer, rate in zip(both, rates):
            optimizer.param_groups[0]["lr"] = rate
            optimizer.step()
            optimizer.zero_grad()
        with torch.no_grad():
            if dtype != torch.float32:
                torch._foreach_copy_([copied for _, copied in pairs], [main for main, _ in pairs])
        recent.append(loss)
        done = step + 1
        if watch:
            watch(model, done)
        if done % 10 == 0 or done == settings["steps"]:  # reading a loss waits for the device, so not every step
            bad = next((i for i, value in enumerate(recent) if not value.isfinite()), None)
            if bad is not None:
                at = done - len(recent) + bad
                rates = [peak * learning_rate(at, settings["steps"]) for peak in (settings["lr"], settings["adam_lr"])]
                raise Diverged(f"loss {recent[bad]} at step {at + 1} of {settings['steps']} (rates {rates[0]:.3g} and {rates[1]:.3g}); "
                               "try a lower --lr and --adam-lr")
            mean = torch.stack(recent).mean().item()
            curve["step"].append(done)
            curve["loss"].append(round(mean, 5))
            tokens = (done - first) * settings["batch_size"] * settings["train_len"]
            bar.set_postfix_str(f"loss {mean:.3f}, {tokens / (time.perf_counter() - started) / 1000:.1f}k tokens/s", refresh=False)
            recent = []
            if save and done < settings["steps"]:
                save(dict(step=done, model=model.state_dict(), optimizers=[optimizer.state_dict() for optimizer in both], curve=curve,
                          generators=[generator.get_rng_state() for generator in generators]))
        bar.update()
    return model, curve


def train_and_score(settings, corpus, device, dtype, start=None, saved=None, resume=None, save_every=30, grad_accum=1, compiled=False):
    """One (scheme, seed) -> (model, row): trained, then scored on the held-out text at the training length.

    A run that diverges or does not fit in memory gives no model, and a row that says so. With weights to start from, the
    fixed-target perplexity at the training length is scored on the way as well. Every `save_every` seconds the state of the
    run goes to the file `resume`, from which it can go on as `saved`.
    """
    n, plain = settings["train_len"], TinyLM("none", **{key: settings[key] for key in ("dim", "n_layer", "n_head")})
    lengths, steps = settings["train_lens"], settings["steps"]
    taken = {length: len(range(i, steps, len(lengths))) for i, length in enumerate(lengths)}  # how many steps of each
    row = dict(scheme=settings["scheme"], seed=settings["seed"], steps=settings["steps"],
               tokens=sum(count * length * (settings["batch_size"] * n // length) for length, count in taken.items()), train_ppl=None, val_ppl=None,
               parameters=None, position_parameters=None, seconds=None, tokens_per_second=None, dtype=settings["dtype"], code=settings["code"], note="",
               curve={"step": [], "loss": []})
    quiet = 0.1 if sys.stderr.isatty() else 30  # seconds between updates
    watched = saved["watched"] if saved else {"step": [], "ppl": []}
    ends = score.fixed_ends(len(corpus.val), n, WATCHED_WINDOWS) if start else None
    clock = {"started": time.perf_counter() - (saved["seconds"] if saved else 0), "saved": time.perf_counter()}

    def watch(model, step):
        if rank() == 0 and (step in WATCHED or step == settings["steps"]):
            since = time.perf_counter()
            watched["step"].append(step)
            watched["ppl"].append(score.scores(score.fixed(at_its_positions(model, settings), corpus.val, n, ends, device))["ppl"])
            clock["started"] += time.perf_counter() - since  # scoring is no training time

    def save(state):
        now = time.perf_counter()
        if rank() or now - clock["saved"] < save_every or not all(weight.isfinite().all() for weight in state["model"].values()):
            return
        state = state | dict(settings=settings, watched=watched, seconds=now - clock["started"])
        write_file(resume, lambda file: torch.save(state, file))
        clock["saved"] = time.perf_counter()

    with tqdm(total=settings["steps"], initial=saved["step"] if saved else 0, desc=f"{settings['scheme']}, seed {settings['seed']}",
              unit="step", mininterval=quiet, disable=rank() > 0) as bar:
        try:
            model, curve = train(settings, corpus.train, device, dtype, bar, start, watch if start else None, saved,
                                 save if resume else None, grad_accum, compiled)
        except Diverged as error:
            return None, row | {"note": str(error)}
        except (RuntimeError, MemoryError) as error:
            if not isinstance(error, MemoryError) and "memory" not in str(error) or ranks() > 1:  # of several ranks the others would wait for this one
                raise
            return None, row | {"note": "out of memory; try a larger --grad-accum, or a smaller --batch-size"}
    if rank():
        return model, row
    seconds = time.perf_counter() - clock["started"]
    span = score.span(at_its_positions(model, settings), corpus.val, n,
                      score.span_length([n], score.SPAN_BYTES, len(corpus.val)), device)
    scored = score.scores(span)
    if scored["ppl"] is None:  # the last steps broke it
        return None, row | {"note": f"{scored['note']} on the held-out text after the last step; try a lower --lr and --adam-lr"}
    last = max(1, len(curve["loss"]) // 10)
    parameters = sum(p.numel() for p in model.parameters())
    return model, row | dict(
        train_ppl=score.scores(np.array([curve["loss"][-last:]]))["ppl"], val_ppl=scored["ppl"],
        parameters=parameters, position_parameters=parameters - sum(p.numel() for p in plain.parameters()),
        seconds=round(seconds, 1), tokens_per_second=round(row["tokens"] / seconds),
        curve=curve | ({"watched": watched} if start else {}))


def differences(old, new):
    """In words, where the settings of a file are not those of this command."""
    names = {"code": "other code", "sha256": "other text", "finetuned_from": "another start", "train_lens": None}
    words = [names.get(key, f"{key} {old.get(key)}, not {new[key]}") for key in new if old.get(key) != new[key]]
    return ", ".join(filter(None, words)) or "other lengths"


def finished(path, settings):
    """The row of a checkpoint with the same settings, or None; one of other settings is told of, since it will be replaced."""
    try:
        _, saved = load_model(path)
    except FileNotFoundError:
        return None
    except ValueError as error:
        print(f"notice: {error}")
        return None
    if saved["settings"] != settings:
        print(f"notice: {path} was trained with {differences(saved['settings'], settings)}; it will be replaced")
        return None
    return saved["row"]


def unfinished(path, settings):
    """The state that an interrupted run of the same settings has saved, or None."""
    try:
        saved = torch.load(path, map_location="cpu", weights_only=True)
        old, _ = saved["settings"], [saved[key] for key in ("step", "model", "optimizers", "curve", "generators", "watched", "seconds")]
    except FileNotFoundError:
        return None
    except Exception:  # torch.load raises a dozen types for a file that is cut short or of another kind
        print(f"notice: {path} is not the whole state of an interrupted run; this one starts at the beginning")
        return None
    if old != settings:
        print(f"notice: {path} is of a run with {differences(old, settings)}; this one starts at the beginning and replaces it")
        return None
    return saved


def find_or_train(path, settings, corpus, device, dtype, start=None, force=False, **how):
    """The row of the model at `path`: found there, or trained, from where it was interrupted, and put there.

    how: save_every, grad_accum and compiled of train_and_score. A row with a note and no perplexity has no model.
    """
    who, resume = f"{settings['scheme']}, seed {settings['seed']}", path.with_suffix(".resume")
    row = from_rank_0(None if force or rank() else finished(path, settings))
    if row:
        print(f"{who}: already trained, {path}")
        return row
    saved = from_rank_0(None if force or rank() else unfinished(resume, settings))
    if saved:
        print(f"{who}: goes on from step {saved['step']}")
    model, row = train_and_score(settings, corpus, device, dtype, start, saved, resume, **how)
    if rank():
        return row
    if model is None:
        kept = f"; {resume} keeps the last good state" if resume.exists() else ""
        print(f"{who}: {row['note']}{kept}", file=sys.stderr)
        return row
    weights = {name: weight.cpu() for name, weight in model.state_dict().items()}
    write_file(path, lambda file: torch.save({"settings": settings, "row": row, "model": weights}, file))
    resume.unlink(missing_ok=True)
    return row


def checkpoint_path(out, scheme, seed):
    """results/checkpoints/rope-base=10-seed0.pt for rope:base=10, seed 0."""
    return Path(out) / "checkpoints" / (re.sub(r"[^A-Za-z0-9=.,+_-]+", "-", scheme).strip("-.") + f"-seed{seed}.pt")


def try_out(scheme, size, length, device, dtype, maximum=0, allow_future=False):
    """A forward and a backward as in training, so that a scheme that cannot work is told before anything is trained.

    maximum: of the random positions, if there are any. allow_future: do not mind an attention that sees what it predicts.

    The two sequences differ in their last byte only: an attention that sees what it predicts shows it in earlier logits.
    """
    ids = torch.arange(length).repeat(2, 1)
    ids[1, -1] += 1
    ids = (ids % 256).to(device, torch.uint8)
    positions = torch.arange(maximum - length, maximum, device=device) if maximum else None
    try:
        model = TinyLM(scheme, **size).to(device)
        with torch.no_grad():
            for weight in model.parameters():
                weight.normal_(0, 0.2)  # the output projections start at zero, and would hide what a block does
            exact = model.eval()(ids, positions)  # (2, T, 256); two rows that dropout would make differ
        if exact.shape == (2, length, 256):
            model.train().to(dtype)(ids, positions).float().square().sum().backward()
    except ValueError:
        raise
    except (Exception, SystemExit) as error:  # somebody's own class may raise anything
        name = str(dtype).removeprefix("torch.")
        if "memory" in str(error):
            raise ValueError(f"scheme '{scheme}': two windows of {length} do not fit in memory; use a shorter --train-len or a smaller "
                             "network") from None
        raise ValueError(f"scheme '{scheme}' does not work in this network ({name}): {reason(error)}") from None
    if exact.shape != (2, length, 256):
        raise ValueError(f"scheme '{scheme}': logits have shape {tuple(exact.shape)}, must be (2, {length}, 256)")
    idle = [name for name, weight in model.named_parameters() if weight.grad is None]
    if ranks() > 1 and idle:
        raise ValueError(f"scheme '{scheme}': {idle[0]} gets no gradient, which training under torchrun needs for every weight")
    if not allow_future and length > 1 and (exact[0, :-1] - exact[1, :-1]).abs().max() > 1e-4 * exact.abs().max():
        raise ValueError(f"scheme '{scheme}' sees what it is to predict: a later byte moves earlier logits; "
                         "its attention must be causal (or say --allow-future)")


def prepare(args):
    """Everything that can be wrong with the arguments is found here, before anything is trained or written."""
    for flag in ("schemes", "seeds", "train_len", "finetune_from", "scaling"):
        distinct(f"--{flag.replace('_', '-')}", getattr(args, flag) or [])
    if not args.finetune_from:
        for flag, value in (("--from", args.source), ("--scaling", args.scaling)):
            if value:
                raise ValueError(f"{flag} goes with --finetune-from; to train with a scaling from the start: "
                                 "--schemes rope:scaling=yarn,factor=4")
    device = pick_device(args.device)
    dtype = pick_dtype(args.dtype, device)
    lengths = sorted(args.train_len)
    L = lengths[-1]
    starts = finetune_starts(args, L) if args.finetune_from else [(scheme, seed, None, {}) for scheme in args.schemes
                                                                  for seed in args.seeds]
    data = args.data if given("--data") else starts[0][3].get("data", args.data)
    for key in ("window", "random_positions", "copies"):
        if args.finetune_from and not given(f"--{key.replace('_', '-')}"):
            setattr(args, key, starts[0][3][key])  # as in the training so far
    corpus = load_corpus(data)
    corpus.require(L)
    score.span_length([L], score.SPAN_BYTES, len(corpus.val))
    parts = ranks() * args.grad_accum
    if args.batch_size < parts:
        raise ValueError(f"--batch-size {args.batch_size} cannot be split in {parts} parts ({ranks()} processes × --grad-accum {args.grad_accum})")
    if args.random_positions and args.random_positions < L:
        raise ValueError(f"--random-positions {args.random_positions} is below the training length {L}; use 2 to 16 times that")
    size = dict(dim=args.dim, n_layer=args.n_layer, n_head=args.n_head, max_len=max(16 * L, args.random_positions),
                trained_len=L, window=args.window)
    weights = args.n_layer * 12 * args.dim**2 + (2 * VOCABULARY + size["max_len"]) * args.dim  # the last of a learned table
    memory = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE") if hasattr(os, "sysconf") else float("inf")
    if 16 * weights > memory:  # with gradients and the optimizers' averages
        raise ValueError(f"--dim {args.dim} --n-layer {args.n_layer}: {weights:,} weights take {16 * weights / 1e9:,.0f} GB in training, and "
                         f"this machine has {memory / 1e9:.0f} GB")
    paths, runs, codes = {}, [], {}
    for scheme, seed, start, parent in starts:
        cls, _ = parse_scheme(scheme)
        kept = {key: parent[key] for key in ("dim", "n_layer", "n_head", "max_len", "trained_len") if parent}
        if scheme not in codes:
            for length in lengths:
                try_out(scheme, size | kept, length, device, dtype, args.random_positions, args.allow_future)
            codes[scheme] = training_hash(cls, args.copies, args.random_positions)
        path = checkpoint_path(args.out, scheme, seed)
        if path in paths:
            raise ValueError(f"schemes '{paths[path]}' and '{scheme}' would share the checkpoint {path}; rename one of their files")
        for taken in (path, path.with_suffix(".resume")):
            if taken.is_dir():
                raise ValueError(f"{taken} is a folder, where a file must be written; move it away")
        paths[path] = scheme
        runs.append((path, start, dict(
            scheme=scheme, seed=seed, steps=args.steps, batch_size=args.batch_size, train_len=L, train_lens=lengths,
            **(size | kept), random_positions=args.random_positions, copies=args.copies, lr=args.lr, adam_lr=args.adam_lr,
            dtype=str(dtype).removeprefix("torch."), data=data, sha256=corpus.sha256, held_out=corpus.held_out,
            code=codes[scheme],
            finetuned_from=parent | {"weights": weights_hash(start)} if parent else None)))
    return device, dtype, corpus, runs


def training_hash(cls, with_copies=False, at_random_positions=False):
    """A hash of all code that decides what a model of this class becomes, and how it is scored."""
    parts = [batch, learning_rate, optimizers, forward_backward, train] + [copies] * with_copies + [random_positions] * bool(at_random_positions)
    files = [HERE / "tiny_lm.py", HERE / "score.py", HERE / "data" / "corpus.py", Path(inspect.getfile(cls))]
    return code_hash(*(inspect.getsource(part).encode() for part in parts), *(file.read_bytes() for file in files))


def weights_hash(weights):
    """One short hash of a state dict."""
    return hashlib.sha256(b"".join(weight.numpy().tobytes() for weight in weights.values())).hexdigest()[:16]


def finetune_starts(args, length):
    """The checkpoints to go on from, and what they become -> [(scheme, seed, weights, their settings)]."""
    source, starts = Path(args.source or ("results/quick" if args.quick else "results")), []
    kinds = args.scaling or ["none"]
    if length < score.K:
        raise ValueError(f"--train-len {length}: fine-tuning is watched under the fixed protocol, which needs at least {score.K}")
    if source.resolve() == Path(args.out).resolve():
        raise ValueError(f"--out {args.out} holds the checkpoints to start from; write into another folder")
    for flag in ("--schemes", "--dim", "--n-layer", "--n-head"):
        if given(flag):
            raise ValueError(f"{flag} does not go with --finetune-from: it is that of the checkpoint")
    for scheme in args.finetune_from:
        for seed in args.seeds:
            path = checkpoint_path(source, scheme, seed)
            try:
                model, saved = load_model(path)
            except FileNotFoundError:
                quick = " --quick" if args.quick else ""
                raise ValueError(f"no checkpoint {path}; train first: python train_compare.py{quick} --schemes {scheme} --seeds {seed}"
                                 + ("" if str(source) in ("results", QUICK["out"]) else f" --out {source}")) from None
            settings = saved["settings"]
            first = starts[0][3] if starts else settings
            for key in ("train_len", "batch_size", "dim", "n_layer", "n_head", "window", "random_positions", "copies", "sha256", "held_out"):
                if settings[key] != first[key]:
                    raise ValueError(f"{path} was trained with {key} {settings[key]}, {first['scheme']} with {first[key]}; "
                                     "fine-tune them apart, or train again")
            for options in ways(settings, kinds).values():
                starts.append((with_options(scheme, **options(length)), seed, model.state_dict(), settings))
    if not given("--batch-size"):  # as many bytes per step as before
        args.batch_size = max(1, first["batch_size"] * first["train_len"] // length)
    taken = {kind for *_, settings in starts for kind in ways(settings, kinds)}
    for kind in kinds:
        if kind != "none" and (kind not in taken or length <= first["train_len"]):
            raise ValueError(f"--scaling {kind}: " + ("none of these schemes takes it" if kind not in taken else
                             f"--train-len {length} must be above the length trained at so far, {first['train_len']}"))
    return starts


def ways(settings, scaling, factor=None, beyond=("untrained",)):
    """How a checkpoint can be read past its length L -> {name: (n -> options of the scheme)}; as it is: no name, no options."""
    scheme, L = settings["scheme"], settings["train_len"]
    cls, chosen = parse_scheme(scheme)
    takes = set(inspect.signature(cls).parameters) - set(chosen)
    s = lambda n: factor or max(1, n / L)
    as_it_is = lambda n: {}
    if settings["random_positions"]:  # it has seen larger positions than L, so that L says nothing of them
        return {"": as_it_is}
    if {"scaling", "factor", "trained_len"} <= takes:
        scaled = lambda kind: lambda n: dict(scaling=kind, factor=s(n), trained_len=L) if s(n) > 1 or factor else {}
        return {"" if kind == "none" else kind: as_it_is if kind == "none" else scaled(kind) for kind in scaling}
    if issubclass(cls, SinusoidalPositionalEncoding) and "factor" in takes:
        kinds = [kind for kind in scaling if kind in ("none", "linear")] or ["none"]
        return {"" if kind == "none" else kind: as_it_is if kind == "none" else lambda n: dict(factor=s(n)) for kind in kinds}
    if {"beyond", "trained_len"} <= takes:
        policy = lambda kind: lambda n: dict(beyond=kind, trained_len=L) if n > L else {}
        return {"" if kind == "untrained" else kind: as_it_is if kind == "untrained" else policy(kind) for kind in beyond}
    return {"": as_it_is}


def with_options(scheme, **options):
    """rope:base=10 and scaling="yarn" -> rope:base=10,scaling=yarn."""
    colon = "," if ":" in scheme.split(".py:")[-1] else ":"
    text = (f"{key}={value:.10g}" if isinstance(value, float) else f"{key}={value}" for key, value in options.items())
    return scheme + (colon + ",".join(text) if options else "")


def write_results(out, rows, about):
    """The rows so far -> train_compare.json, .csv, _curves.csv (losses by step), .md, .png; returns the table."""
    write_json(out / "train_compare.json", about | {"rows": rows})
    write_csv(out / "train_compare.csv", [{key: value for key, value in row.items() if key != "curve"} for row in rows])
    logs = [dict(scheme=row["scheme"], seed=row["seed"], step=step, loss=loss)
            for row in rows for step, loss in zip(row["curve"]["step"], row["curve"]["loss"])]
    if logs:
        write_csv(out / "train_compare_curves.csv", logs)
    else:  # all of them diverged at once; an earlier run's would not be theirs
        (out / "train_compare_curves.csv").unlink(missing_ok=True)
    table = []
    for scheme in dict.fromkeys(row["scheme"] for row in rows):
        mine = [row for row in rows if row["scheme"] == scheme]
        column = lambda key: [row[key] for row in mine if row[key] is not None]
        middle = lambda key: f"{np.median(column(key)):,.0f}" if column(key) else "–"
        table.append([scheme, len(mine), spread(column("train_ppl")), spread(column("val_ppl")), middle("position_parameters"),
                      middle("parameters"), middle("seconds"), middle("tokens_per_second"), "; ".join(filter(None, column("note")))])
    header = ["scheme", "seeds", "train ppl", "validation ppl", "position parameters", "all parameters", "seconds", "tokens/s", "note"]
    text = markdown_table(*without_empty_notes(header, table))
    write_file(out / "train_compare.md", text)
    if any(row["curve"]["step"] for row in rows):
        plot_loss_curves(out / "train_compare.png", rows)
    return text


def without_empty_notes(header, table):
    """The table without its last column, where nothing was noted in it."""
    return (header, table) if any(line[-1] for line in table) else (header[:-1], [line[:-1] for line in table])


def write_finetune(out, rows, about, train_len):
    """The rows of fine-tuning -> finetune.json, .csv, .md; returns the table."""
    write_json(out / "finetune.json", about | {"rows": rows})
    flat, table = [], []
    for row in rows:
        for step, ppl in zip(*row["curve"].get("watched", {"step": [], "ppl": []}).values()):
            flat.append(dict(scheme=row["scheme"], seed=row["seed"], step=step, tokens=row["tokens"] * step // row["steps"],
                             n=train_len, protocol="fixed", ppl=ppl))
    steps, alibi = sorted({line["step"] for line in flat}), any(line["scheme"] == "alibi" for line in flat)
    at = lambda scheme, step: [line["ppl"] for line in flat if (line["scheme"], line["step"]) == (scheme, step) and line["ppl"]]
    reaches = lambda scheme, step: at(scheme, step) and np.mean(at(scheme, step)) <= np.mean(at("alibi", 0))
    for scheme in dict.fromkeys(row["scheme"] for row in rows):
        mine = [row for row in rows if row["scheme"] == scheme]
        when = [next((step for step in steps if reaches(scheme, step)), f"> {steps[-1]}")] if alibi else []
        name = re.sub(r"[:,]scaling=(\w+),factor=([\d.]+),trained_len=\d+", r", \1 × \2", scheme)
        table.append([name, len(mine), *(spread(at(scheme, step)) for step in steps), *when,
                      "; ".join(sorted({row["note"] for row in mine if row["note"]}))])
    if flat:
        write_csv(out / "finetune.csv", flat)
    tokens = {line["step"]: line["tokens"] for line in flat}
    header = (["scheme; steps (bytes read)", "seeds"] + [f"{step} ({tokens[step] / 1000:.0f}k)" if step else "0" for step in steps]
              + ["steps to ALiBi's start"] * alibi + ["note"])
    text = (f"Fixed-target perplexity at n = {train_len} while fine-tuning there. The rates fall to 5 % over these {steps[-1] if steps else 0} "
            "steps, so a number on the way is not where a run of so few steps would end.\n\n" + markdown_table(*without_empty_notes(header, table)))
    write_file(out / "finetune.md", text)
    return text


def main():
    parser, args = arguments()
    if rank():  # rank 0 alone speaks and writes
        sys.stdout = open(os.devnull, "w")
    try:
        device, dtype, corpus, runs = prepare(args)
        out, lock = Path(args.out), contextlib.nullcontext()
        if rank() == 0:
            writable_folder(out)
            lock = only_writer(writable_folder(out / "checkpoints"))
    except ValueError as error:
        parser.error(str(error))
    print(f"{corpus.name}: {len(corpus.train):,} bytes to train on, {len(corpus.val):,} held out; "
          f"{device.type}, {str(dtype).removeprefix('torch.')}, {torch.get_num_threads()} threads"
          + (f" in each of {ranks()} processes" if ranks() > 1 else ""))
    parent = runs[0][2]["finetuned_from"]
    if parent and (corpus.sha256, corpus.held_out) != (parent["sha256"], parent["held_out"]):
        print("notice: the checkpoints were trained on other text, or another part of it; what is held out here may have been seen there")
    elif runs[0][2]["data"] == "numpy" and corpus.sha256 != NUMPY_SHA256:
        print(f"notice: this is not the text of the committed results (that is NumPy 2.4.6); its SHA-256 is {corpus.sha256}")
    about, rows, table = provenance(corpus, device, dtype), [], ""
    write = functools.partial(write_finetune, train_len=max(args.train_len)) if args.finetune_from else write_results
    try:
        with lock:
            join_ranks(device)
            for path, start, settings in runs:
                rows.append(find_or_train(path, settings, corpus, device, dtype, start, args.force, save_every=args.save_every,
                                          grad_accum=args.grad_accum, compiled=args.compile))
                if rank() == 0:
                    table = write(out, rows, about)
    except KeyboardInterrupt:
        saved = any(path.with_suffix(".resume").exists() for path, *_ in runs[len(rows):len(rows) + 1])
        print(f"\nstopped; {len(rows)} of {len(runs)} runs are finished and kept, the same command{' without --force' * args.force} goes on with the next "
              + ("where it was last saved" if saved else f"from its start, since it was not saved yet (every {args.save_every} s)"), file=sys.stderr)
        raise
    except RuntimeError as error:
        if ranks() > 1:  # another process is gone, or this one ran out of memory
            sys.exit(f"train_compare.py, rank {rank()} of {ranks()}: {reason(error)}; all ranks end, the same command goes on where it was "
                     "last saved")
        if args.compile:
            sys.exit(f"train_compare.py: --compile does not work here: {reason(error)}; leave it out")
        raise
    if ranks() > 1:
        distributed.destroy_process_group()
    print("\n" + table)
    name = "finetune" if args.finetune_from else "train_compare"
    flags = (" --quick" if args.quick else "") + (f" --out {args.out}" if args.finetune_from or given("--out") else "")
    print(f"wrote {name}.json .csv .md{'' if args.finetune_from else ' .png, _curves.csv'} and {out / 'checkpoints'}/ into {out}; next: python extrapolation_test.py{flags}")


if __name__ == "__main__":
    run(main, many=True)
