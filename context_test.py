"""What a model uses of its context: a flat perplexity past the training length may only mean that the far text is ignored.

    python context_test.py           # every checkpoint of train_compare.py; about 3 minutes for five on two CPU cores
    python context_test.py --quick   # those of train_compare.py --quick, some seconds

    use        fixed-target perplexity (score.py) at many lengths, below and above the training length L: where does more
               context stop helping, and where does it begin to harm?
    copy       a unique random string stands in the text, and again d bytes later: how many bytes of the second one, after its
               first 8, are predicted right, and how many without the first one? Chance is 1 in 26.
               Models trained on the corpus alone cannot do it at any distance; train with --copies.
    attention  the share of the attention of the last 64 bytes that goes to the bytes up to a distance, mean over heads and
               blocks, at n = L and n = 4L

Writes context.json, .csv, .md and .png into --out.
"""
import sys
from pathlib import Path

import numpy as np
import torch
from tqdm import tqdm

import score
from common import Parser, distinct, only_writer, pick_device, provenance, run, whole, writable_folder, write_file, write_json
from data.corpus import load_corpus
from extrapolation_test import SAME, find_checkpoints, trained_as
from report import label, markdown_table, plot_context, spread, usable_cell, write_csv
from tiny_lm import attend, reason
from train_compare import LETTERS, at_its_positions

QUICK = dict(out="results/quick", windows=8)
USE = (1/4, 3/8, 1/2, 3/4, 1, 17/16, 9/8, 5/4, 3/2, 7/4, 2, 3, 4)  # times the training length
COPY = (1/4, 1/2, 3/4, 1, 3/2, 2, 4, 8, 16)
STRING, SHOWN = 32, 8  # bytes of the copied string, and how many of the second one are given


def arguments():
    parser = Parser(__doc__)
    what = parser.add_argument_group("what to measure")
    what.add_argument("--what", nargs="+", choices=("use", "copy", "attention"), default=["use", "copy", "attention"],
                      metavar="WHAT", help="use copy attention (default: all)")
    what.add_argument("--schemes", nargs="+", metavar="SCHEME", help="only these (default: every checkpoint there is)")
    what.add_argument("--seeds", nargs="+", type=whole(0), metavar="N", help="only these (default: every seed there is)")
    what.add_argument("--windows", type=whole(2), default=32,
                      help="texts per cell for copy; four times as many windows for use (default: 32)")
    where = parser.add_argument_group("where to read, run and write")
    where.add_argument("--data", help="text to read (default: the held-out part of what the models were trained on)")
    where.add_argument("--device", default="auto", help="auto (cuda, then mps, then cpu), cpu, cuda, cuda:1, mps")
    where.add_argument("--out", default="results", help="folder with checkpoints/, and for the results (default: results)")
    where.add_argument("--quick", action="store_true", help="fewer windows, in results/quick/; other flags still count")
    if "--quick" in sys.argv[1:]:
        parser.set_defaults(**QUICK)
    return parser, parser.parse_args()


def texts_with_copies(data, distance, count, first):
    """`count` texts of the data that end with a random string of letters; if `first`, it also stands `distance` before.

    uint8 (count, distance + STRING). The texts and strings are the same for every model, and with and without the first.
    """
    rng = np.random.default_rng(distance)
    length = distance + STRING
    starts = rng.integers(0, len(data) - length, count)
    texts = np.array(data[starts[:, None] + np.arange(length)])
    strings = rng.integers(*LETTERS, (count, STRING), dtype=np.uint8)
    texts[:, -STRING:] = strings
    if first:
        texts[:, :STRING] = strings
    return texts


def copy_accuracy(model, data, distance, count, first, device="cpu"):
    """The share of the bytes of the second string, after the first SHOWN of it, that get the largest logit."""
    texts = torch.from_numpy(texts_with_copies(data, distance, count, first))
    right = 0
    with torch.no_grad():
        for text in texts.split(max(1, 8192 // texts.shape[1])):
            logits = model(text[:, :-1].to(device))[:, SHOWN - STRING:]  # (B, STRING − SHOWN, 256)
            right += (logits.argmax(-1).cpu() == text[:, SHOWN - STRING:]).sum().item()
    return right / (count * (STRING - SHOWN))


def attention_by_distance(model, ids, window=0, queries=score.K, read=None):
    """Attention weights of the last `queries` tokens by distance: ids (B, n) -> mean over tokens, heads and blocks, (n,).

    read: what to call in place of the model, as at_its_positions gives it.
    """
    n, found, kept = ids.shape[1], [], [block.attention.attend for block in model.blocks]

    def spy(q, k, v, scale=None, attn_mask=None, **options):
        scores = (q[..., -queries:, :] @ k.transpose(-1, -2)).float() * (q.shape[-1] ** -0.5 if scale is None else scale)
        distance = torch.arange(n - queries, n, device=q.device)[:, None] - torch.arange(n, device=q.device)  # (queries, n)
        if attn_mask is not None:  # ALiBi's plain bias
            scores = scores + attn_mask[..., -queries:, :]
        hidden = (distance < 0) | (distance >= (window or n))
        weights = scores.masked_fill(hidden, float("-inf")).softmax(-1).mean(dim=(0, 1))  # (queries, n), by key
        by_distance = torch.zeros(queries, n, device=q.device).scatter_add_(1, distance.clamp(min=0), weights)
        found.append(by_distance.mean(0))
        return attend(q, k, v, scale=scale, window=window, attn_mask=attn_mask, **options)

    try:
        for block in model.blocks:
            block.attention.attend = spy
        with torch.no_grad():
            (read or model)(ids)
    finally:
        for block, own in zip(model.blocks, kept):
            block.attention.attend = own
    return torch.stack(found).mean(0).cpu().numpy()


def measure(models, data, what, windows, device):
    """[(model, settings)] -> rows: what, scheme, variant, seed, x (a length or a distance), value, note."""
    rows = []
    L = models[0][1]["train_len"]
    lengths = [n for n in dict.fromkeys(round(L * share) for share in USE) if n >= score.K]
    distances = [round(L * share) for share in COPY if round(L * share) >= STRING]
    ends = score.fixed_ends(len(data), max(lengths), 4 * windows)
    plan = dict(use=lengths, copy=[d for d in distances for _ in range(2)], attention=[L, 4 * L])
    bar = tqdm(total=len(models) * sum(len(plan[kind]) for kind in what), unit="cell", mininterval=0.1 if sys.stderr.isatty() else 30)
    for model, settings in models:
        who = dict(scheme=settings["scheme"], variant=trained_as(settings), seed=settings["seed"])
        reader = at_its_positions(model, settings)
        cells = [("use", n, lambda n=n: score.scores(score.fixed(reader, data, n, ends, device))["ppl"]) for n in lengths]
        for d in distances:
            cells.append(("copy", d, lambda d=d: copy_accuracy(reader, data, d, windows, True, device)))
            cells.append(("copy without the first", d, lambda d=d: copy_accuracy(reader, data, d, windows, False, device)))
        for n in (L, 4 * L):
            ids = torch.from_numpy(np.array(data[ends[:8, None] + np.arange(-n, 0)])).to(device)  # (8, n)
            cells.append((f"attention at {n}", n, lambda ids=ids: np.cumsum(
                attention_by_distance(model, ids, settings["window"], read=reader))))
        for kind, x, value in cells:
            if kind.split()[0] not in what:
                continue
            bar.set_description(f"{label(who)}, seed {who['seed']}, {kind} {x}", refresh=False)
            row = dict(what=kind, **who, x=x, value=None, note="")
            try:
                result = value()
            except Exception as error:  # whatever a scheme raises at a length, its other cells and the other rows go on
                limit = getattr(model.position, "max_len", None)
                row["note"] = f"max_len {limit}" if isinstance(limit, int) and limit < x + STRING else reason(error)
                result = None
            if isinstance(result, np.ndarray):  # shares within distances: at powers of two and in between
                for distance in sorted({round(2 ** (step / 2)) for step in range(2 * x.bit_length() - 1) if 2 ** (step / 2) <= x}):
                    rows.append(row | dict(x=distance, value=round(float(result[distance - 1]), 5)))
            else:
                rows.append(row | dict(value=result and round(result, 5)))
            bar.update()
    bar.close()
    return rows


def tables(rows, L):
    """The rows as Markdown tables, one per kind."""
    titles = {
        "use": f"Use: fixed-target perplexity with n bytes in all. Trained at {L}.",
        "copy": f"Copy: the share of the bytes right in a random string that stood d bytes before as well, and in brackets without "
                f"that. Trained at {L}; chance is 0.04.",
    }
    text = []
    for kind, title in titles.items():
        mine = [row for row in rows if row["what"] == kind]
        if not mine:
            continue
        xs, lines = list(dict.fromkeys(row["x"] for row in mine)), []
        for who in dict.fromkeys(map(label, mine)):
            line, ppl = [who], {}
            for x in xs:
                of = lambda what: [row for row in rows if (row["what"], label(row), row["x"]) == (what, who, x)]
                values = [row["value"] for row in of(kind) if row["value"] is not None]
                notes = sorted({row["note"] for row in of(kind) if row["note"]})
                cell = spread(values) if values else "; ".join(notes)
                without = [row["value"] for row in of("copy without the first") if row["value"] is not None]
                if kind == "copy" and values and without:
                    cell = f"{np.mean(values):.2f} ({np.mean(without):.2f})"
                ppl[x] = np.mean(values) if values else None
                line.append(cell)
            if kind == "use":
                best = min((p for p in ppl.values() if p is not None), default=None)
                line.append(next((x for x in xs if ppl[x] is not None and ppl[x] <= 1.01 * best), "–"))
                line.append(usable_cell(ppl, L))
            lines.append(line)
        header = ["n =" if kind == "use" else "d ="] + xs + (["within 1 % of its best at", "usable length"] if kind == "use" else [])
        text.append(title + "\n\n" + markdown_table(header, lines))
    shares = []
    for what in dict.fromkeys(row["what"] for row in rows if row["what"].startswith("attention")):
        mine = [row for row in rows if row["what"] == what and row["value"] is not None]
        for who in dict.fromkeys(map(label, mine)):
            within = lambda x: spread([row["value"] for row in mine if label(row) == who and row["x"] == x])
            shares.append([who, what.split()[-1]] + [within(x) for x in dict.fromkeys((1, 8, 64, L))])
    if shares:
        order = [line[0] for line in shares]
        shares.sort(key=lambda line: order.index(line[0]))
        text.append("Attention: the share that goes to the last 1 (the token itself), 8, 64 … tokens.\n\n"
                    + markdown_table(["", "n", *dict.fromkeys((1, 8, 64, L))], shares))
    notes = dict.fromkeys(f"{label(row)}, {row['what']}: {row['note']}" for row in rows if row["note"] and row["what"].startswith("attention"))
    if notes:
        text.append("– " + "; ".join(notes) + ".\n")
    return "\n".join(text)


def main():
    parser, args = arguments()
    try:
        for flag in ("what", "schemes", "seeds"):
            distinct(f"--{flag}", getattr(args, flag) or [])
        device = pick_device(args.device)
        models = find_checkpoints([args.out], args.schemes, args.seeds)
        trained = models[0][1]
        if trained["train_len"] < score.K:
            raise ValueError(f"the models were trained at {trained['train_len']} bytes; this needs at least {score.K}")
        corpus = load_corpus(trained["data"] if args.data is None else args.data)
        corpus.require(trained["train_len"] * round(max(COPY)) + STRING)
        score.fixed_ends(len(corpus.val), trained["train_len"] * round(max(USE)), 4 * args.windows)
        lock = only_writer(writable_folder(args.out))
    except ValueError as error:
        parser.error(str(error))
    with lock:
        measure_and_write(args, device, models, corpus)


def measure_and_write(args, device, models, corpus):
    """All there is after the arguments have been found right."""
    out, trained, about = Path(args.out), models[0][1], provenance(corpus, device, torch.float32)
    for model, _ in models:
        model.to(device)
    try:
        rows = measure(models, corpus.val, args.what, args.windows, device)
    except KeyboardInterrupt:
        print("\nstopped; nothing was written, earlier results are as they were", file=sys.stderr)
        raise
    text = tables(rows, trained["train_len"])
    write_json(out / "context.json", about | {
        "trained": {key: trained[key] for key in SAME}, "rows": rows})
    write_csv(out / "context.csv", rows)
    write_file(out / "context.md", text)
    drawn = [row for row in rows if row["value"] is not None]
    if drawn:
        plot_context(out / "context.png", drawn, trained["train_len"])
    print("\n" + text)
    print(f"wrote {out / 'context'}.json .csv .md .png")


if __name__ == "__main__":
    run(main)
