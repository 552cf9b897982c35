"""Train one tiny causal LM per scheme: same bytes, same batches, same network, same starting weights.

    python train_compare.py            # five schemes, one seed: about 11 minutes on two CPU cores
    python train_compare.py --quick    # the same in small, half a minute, into results/quick/

Writes train_compare.json, .csv, .md and .png and checkpoints/ into --out. A (scheme, seed) that is already trained
with the same settings and code is not trained again (see --force), so an interrupted comparison goes on with the first
model that was not finished.
"""
import copy
import inspect
import io
import math
import re
import sys
import time
from pathlib import Path

import numpy as np
import torch
import torch.nn.functional as F
from tqdm import tqdm

import score
from common import (HERE, Parser, code_hash, distinct, pick_device, pick_dtype, positive, provenance, run, whole, writable_folder,
                    write_file, write_json)
from data.corpus import NUMPY_SHA256, load_corpus
from report import markdown_table, plot_loss_curves, spread, write_csv
from tiny_lm import SCHEMES, TinyLM, load_model, parse_scheme, reason

QUICK = dict(steps=250, batch_size=16, train_len=64, dim=64, n_layer=2, out="results/quick")


class Diverged(Exception):
    """The loss became NaN or infinite."""


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
    size = parser.add_argument_group("network and recipe, the same for every scheme")
    size.add_argument("--steps", type=whole(1), default=500, help="optimizer steps (default: 500)")
    size.add_argument("--batch-size", type=whole(1), default=32, help="windows per step (default: 32)")
    size.add_argument("--train-len", type=whole(1), default=256, help="bytes per window (default: 256)")
    size.add_argument("--dim", type=whole(1), default=128, help="model width (default: 128)")
    size.add_argument("--n-layer", type=whole(1), default=4, help="blocks (default: 4)")
    size.add_argument("--n-head", type=whole(1), default=4, help="attention heads per block (default: 4)")
    size.add_argument("--lr", type=positive, default=0.02,
                      help="peak learning rate of Muon, for the matrices of the blocks (default: 0.02)")
    size.add_argument("--adam-lr", type=positive, default=0.015,
                      help="peak learning rate of AdamW, for all other weights (default: 0.015)")
    where = parser.add_argument_group("where to run and write")
    where.add_argument("--device", default="auto", help="auto (cuda, then mps, then cpu), cpu, cuda, cuda:1, mps")
    where.add_argument("--dtype", choices=("auto", "bf16", "fp32"), default="auto",
                       help="training precision; auto: bf16 where the hardware has units for it")
    where.add_argument("--out", default="results", help="folder for results and checkpoints (default: results)")
    where.add_argument("--force", action="store_true", help="train again what is already trained")
    where.add_argument("--quick", action="store_true",
                       help="a small network and 250 steps, into results/quick/; other flags still count")
    if "--quick" in sys.argv[1:]:
        parser.set_defaults(**QUICK)
    return parser, parser.parse_args()


def batch(data, seed, step, batch_size, length):
    """The batch of one step, a function of (seed, step) alone: uint8 (B, length + 1) -> inputs x, targets y (B, length)."""
    starts = np.random.default_rng((seed, step)).integers(0, len(data) - length, batch_size)
    window = torch.from_numpy(np.asarray(data[starts[:, None] + np.arange(length + 1)]))
    return window[:, :-1], window[:, 1:]


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


def train(settings, data, device, dtype, bar):
    """One model from its settings -> (TinyLM in float32 on `device`, curve {"step", "loss"}). Diverged on a bad loss.

    In bf16 the products run on a bf16 copy of the weights, while the optimizers keep and update the float32 ones.
    """
    torch.manual_seed(settings["seed"])
    model = TinyLM(settings["scheme"], **{key: settings[key] for key in ("dim", "n_layer", "n_head", "max_len")}).to(device)
    worker = model if dtype == torch.float32 else copy.deepcopy(model).to(dtype)
    pairs = list(zip(model.parameters(), worker.parameters()))
    both = optimizers(model, settings["lr"], settings["adam_lr"])
    peaks = [optimizer.param_groups[0]["lr"] for optimizer in both]
    curve, recent = {"step": [], "loss": []}, []
    started = time.perf_counter()
    for step in range(settings["steps"]):
        x, y = batch(data, settings["seed"], step, settings["batch_size"], settings["train_len"])
        logits = worker(x.to(device))  # (B, L, 256)
        loss = F.cross_entropy(logits.float().flatten(0, 1), y.to(device).long().flatten())
        loss.backward()
        for main, copied in pairs:
            if main is not copied and copied.grad is not None:
                main.grad, copied.grad = copied.grad.float(), None
        for optimizer, peak in zip(both, peaks):
            optimizer.param_groups[0]["lr"] = peak * learning_rate(step, settings["steps"])
            optimizer.step()
            optimizer.zero_grad()
        with torch.no_grad():
            if worker is not model:
                torch._foreach_copy_([copied for _, copied in pairs], [main for main, _ in pairs])
        recent.append(loss.detach())
        if len(recent) == 10 or step + 1 == settings["steps"]:  # reading a loss waits for the device, so not every step
            mean = torch.stack(recent).mean().item()
            if not math.isfinite(mean):
                raise Diverged(f"loss {mean} by step {step + 1} of {settings['steps']} (peak learning rate {settings['lr']:g}); "
                               "try a lower --lr")
            curve["step"].append(step + 1)
            curve["loss"].append(round(mean, 5))
            tokens = (step + 1) * settings["batch_size"] * settings["train_len"]
            bar.set_postfix_str(f"loss {mean:.3f}, {tokens / (time.perf_counter() - started) / 1000:.1f}k tokens/s", refresh=False)
            recent = []
        bar.update()
    return model, curve


def train_and_score(settings, corpus, device, dtype):
    """One (scheme, seed) -> (model, row): trained, then scored on the held-out text at the training length.

    A run that diverges or does not fit in memory gives no model, and a row that says so.
    """
    n, plain = settings["train_len"], TinyLM("none", **{key: settings[key] for key in ("dim", "n_layer", "n_head")})
    row = dict(scheme=settings["scheme"], seed=settings["seed"], steps=settings["steps"],
               tokens=settings["steps"] * settings["batch_size"] * n, train_ppl=None, val_ppl=None, parameters=None,
               position_parameters=None, seconds=None, tokens_per_second=None, dtype=settings["dtype"], note="",
               curve={"step": [], "loss": []})
    quiet = 0.1 if sys.stderr.isatty() else 30  # seconds between updates
    started = time.perf_counter()
    name = f"{settings['scheme']}, seed {settings['seed']}"
    with tqdm(total=settings["steps"], desc=name, unit="step", mininterval=quiet) as bar:
        try:
            model, curve = train(settings, corpus.train, device, dtype, bar)
        except Diverged as error:
            return None, row | {"note": str(error)}
        except RuntimeError as error:
            if "memory" not in str(error):
                raise
            return None, row | {"note": "out of memory; try a smaller --batch-size"}
    seconds = time.perf_counter() - started
    scored = score.scores(score.span(model, corpus.val, n, score.span_length([n], score.SPAN_BYTES, len(corpus.val)), device))
    last = max(1, len(curve["loss"]) // 10)
    parameters = sum(p.numel() for p in model.parameters())
    return model, row | dict(
        train_ppl=score.scores(np.array([curve["loss"][-last:]]))["ppl"], val_ppl=scored["ppl"], note=scored["note"],
        parameters=parameters, position_parameters=parameters - sum(p.numel() for p in plain.parameters()),
        seconds=round(seconds, 1), tokens_per_second=round(row["tokens"] / seconds), curve=curve)


def checkpoint_path(out, scheme, seed):
    """results/checkpoints/rope-base=10-seed0.pt for rope:base=10, seed 0."""
    return Path(out) / "checkpoints" / (re.sub(r"[^A-Za-z0-9=.,+-]+", "-", scheme).strip("-.") + f"-seed{seed}.pt")


def try_out(scheme, size, length, device, dtype):
    """A forward and a backward as in training, so that a scheme that cannot work is told before anything is trained.

    The two sequences differ in their last byte only: an attention that sees what it predicts shows it in earlier logits.
    """
    ids = torch.arange(length).repeat(2, 1)
    ids[1, -1] += 1
    ids = (ids % 256).to(device, torch.uint8)
    try:
        model = TinyLM(scheme, **size).to(device)
        with torch.no_grad():
            for weight in model.parameters():
                weight.normal_(0, 0.2)  # the output projections start at zero, and would hide what a block does
            exact = model(ids)  # (2, T, 256)
        if exact.shape == (2, length, 256):
            model.to(dtype)(ids).float().square().sum().backward()
    except ValueError:
        raise
    except Exception as error:  # somebody's own class may raise anything
        name = str(dtype).removeprefix("torch.")
        raise ValueError(f"scheme '{scheme}' does not work in this network ({name}): {reason(error)}") from None
    if exact.shape != (2, length, 256):
        raise ValueError(f"scheme '{scheme}': logits have shape {tuple(exact.shape)}, must be (2, {length}, 256)")
    if length > 1 and (exact[0, :-1] - exact[1, :-1]).abs().max() > 1e-4 * exact.abs().max():
        raise ValueError(f"scheme '{scheme}' sees what it is to predict: a later byte moves earlier logits; "
                         "its attention must be causal")


def prepare(args):
    """Everything that can be wrong with the arguments is found here, before anything is trained or written."""
    distinct("--schemes", args.schemes)
    distinct("--seeds", args.seeds)
    device = pick_device(args.device)
    dtype = pick_dtype(args.dtype, device)
    corpus = load_corpus(args.data)
    corpus.require(args.train_len)
    score.span_length([args.train_len], score.SPAN_BYTES, len(corpus.val))
    size = dict(dim=args.dim, n_layer=args.n_layer, n_head=args.n_head, max_len=16 * args.train_len)
    paths, runs = {}, []
    for scheme in args.schemes:
        cls, _ = parse_scheme(scheme)
        try_out(scheme, size, args.train_len, device, dtype)
        functions = [inspect.getsource(part).encode() for part in (batch, learning_rate, optimizers, train)]
        files = [HERE / "tiny_lm.py", HERE / "score.py", HERE / "data" / "corpus.py", Path(inspect.getfile(cls))]
        code = code_hash(*functions, *(file.read_bytes() for file in files))
        for seed in args.seeds:
            path = checkpoint_path(args.out, scheme, seed)
            if path in paths:
                raise ValueError(f"schemes '{paths[path]}' and '{scheme}' would share the checkpoint {path}; "
                                 "rename one of their files")
            paths[path] = scheme
            runs.append((path, dict(
                scheme=scheme, seed=seed, steps=args.steps, batch_size=args.batch_size, train_len=args.train_len, **size,
                lr=args.lr, adam_lr=args.adam_lr, dtype=str(dtype).removeprefix("torch."), data=args.data,
                sha256=corpus.sha256, held_out=corpus.held_out, code=code)))
    return device, dtype, corpus, runs


def already_trained(path, settings):
    """The row of a checkpoint with the same settings, or None."""
    try:
        _, saved = load_model(path)
    except (FileNotFoundError, ValueError):
        return None
    return saved["row"] if saved["settings"] == settings else None


def write_results(out, rows, about):
    """The rows so far -> train_compare.json, .csv, .md, .png; returns the table."""
    write_json(out / "train_compare.json", about | {"rows": rows})
    write_csv(out / "train_compare.csv", [{key: value for key, value in row.items() if key != "curve"} for row in rows])
    table = []
    for scheme in dict.fromkeys(row["scheme"] for row in rows):
        mine = [row for row in rows if row["scheme"] == scheme]
        column = lambda key: [row[key] for row in mine if row[key] is not None]
        middle = lambda key: f"{np.median(column(key)):,.0f}" if column(key) else "–"
        table.append([scheme, len(mine), spread(column("train_ppl")), spread(column("val_ppl")), middle("position_parameters"),
                      middle("parameters"), middle("seconds"), middle("tokens_per_second"), "; ".join(filter(None, column("note")))])
    header = ["scheme", "seeds", "train ppl", "validation ppl", "position parameters", "all parameters", "seconds", "tokens/s", "note"]
    text = markdown_table(header, table)
    write_file(out / "train_compare.md", text)
    if any(row["curve"]["step"] for row in rows):
        plot_loss_curves(out / "train_compare.png", rows)
    return text


def main():
    parser, args = arguments()
    try:
        device, dtype, corpus, runs = prepare(args)
        out = writable_folder(args.out)
        writable_folder(out / "checkpoints")
    except ValueError as error:
        parser.error(str(error))
    print(f"{corpus.name}: {len(corpus.train):,} bytes to train on, {len(corpus.val):,} held out; "
          f"{device.type}, {str(dtype).removeprefix('torch.')}, {torch.get_num_threads()} threads")
    if args.data == "numpy" and corpus.sha256 != NUMPY_SHA256:
        print(f"notice: this is not the text of the committed results (that is NumPy 2.4.6); its SHA-256 is {corpus.sha256}")
    about, rows = provenance(corpus, device, dtype), []
    try:
        for path, settings in runs:
            row = None if args.force else already_trained(path, settings)
            if row:
                print(f"{settings['scheme']}, seed {settings['seed']}: already trained, {path}")
            else:
                model, row = train_and_score(settings, corpus, device, dtype)
                if model is None:
                    print(f"{settings['scheme']}, seed {settings['seed']}: {row['note']}", file=sys.stderr)
                else:
                    file, weights = io.BytesIO(), {name: weight.cpu() for name, weight in model.state_dict().items()}
                    torch.save({"settings": settings, "row": row, "model": weights}, file)
                    write_file(path, file.getvalue())
            rows.append(row)
            table = write_results(out, rows, about)
    except KeyboardInterrupt:
        print(f"\nstopped; {len(rows)} of {len(runs)} runs are finished and kept, the same command goes on from there",
              file=sys.stderr)
        raise
    print("\n" + table)
    flags = (" --quick" if args.quick else "") + (f" --out {args.out}" if args.out != parser.get_default("out") else "")
    print(f"wrote {out / 'train_compare'}.json .csv .md .png and {out / 'checkpoints'}/; next: python extrapolation_test.py{flags}")


if __name__ == "__main__":
    run(main)
