"""Neither mask nor positions: the next byte from the bag of the bytes before it."""

import math

import numpy as np
import torch
import torch.nn.functional as F

from experiments.setup import Picture, Verdict, mean_of, progress, unmasked
from lab import score
from lab.probes import count_model_ppl
from lab.rows import distinct, values
from lab.stats import perplexity
from lab.tables import markdown_table, mean_std_text
from lab.train import fit
from tiny_lm import TinyLM

BAGS = (1, 4, 16, 64)  # how many of the bytes before
STEPS, QUICK_STEPS, BATCH = 600, 20, 1024
TESTED, QUICK_TESTED = 8192, 512  # bags of each width
ATTENTION, EMBEDDINGS = "bag: attention without mask", "bag: mean of the embeddings"
COUNTS = ("counts of bytes", "counts of pairs of bytes")


def bags_and_next(data, width, count, rng):
    """`count` times `width` bytes and the byte after them: uint8 (count, width), int64 (count,)."""
    starts = rng.integers(0, len(data) - width, count)
    cut = torch.from_numpy(np.asarray(data[starts[:, None] + np.arange(width + 1)]))
    return cut[:, :-1], cut[:, -1].long()


def bag_network():
    """The network of `none`, with attention between all bytes in place of the causal one."""
    model = TinyLM("none", dim=64, n_layer=2, n_head=4)
    for block in model.blocks:
        block.attention.attend = unmasked
    return model


def read_bag(model, ids, average):
    """The next byte from the bag of some bytes, whatever their order: ids (N, w) -> (N, 256).

    The network is read at the mean over its outputs; average: at the mean of the embeddings,
    taken before the first block.
    """
    x = model.embed(ids.long())  # (N, w, C)
    if average:
        x = x.mean(1, keepdim=True)
    for block in model.blocks:
        x = block(x)
    return model.head(model.norm(x.mean(1)))


def trained_bag(setup, name, seed):
    """Train a network on bags of every width in turn."""
    torch.manual_seed(seed)
    model, data = bag_network().to(setup.device), setup.corpus.train

    def loss_at(step):
        width, rng = BAGS[step % len(BAGS)], np.random.default_rng((seed, step))
        ids, target = bags_and_next(data, width, BATCH, rng)
        logits = read_bag(model, ids.to(setup.device), name == EMBEDDINGS)
        return F.cross_entropy(logits, target.to(setup.device))

    steps = QUICK_STEPS if setup.quick else STEPS
    return fit(model, steps, loss_at, progress=progress(f"{name}, seed {seed}"))


@torch.no_grad()
def bag_ppl(setup, model, name, width):
    """Perplexity of the byte after a bag, on held-out text."""
    count = QUICK_TESTED if setup.quick else TESTED
    ids, target = bags_and_next(setup.corpus.val, width, count, np.random.default_rng(0))
    nats = []
    for some, right in zip(ids.split(512), target.split(512)):
        logits = read_bag(model, some.to(setup.device), name == EMBEDDINGS)
        nats.append(F.cross_entropy(logits, right.to(setup.device), reduction="none"))
    return perplexity(torch.cat(nats))


def measure(setup):
    """Perplexity by model and by how many bytes it sees."""
    setup.models_of("none")
    rows, corpus, L = [], setup.corpus, setup.run.train_len
    for seed in setup.seeds:
        for name in (ATTENTION, EMBEDDINGS):
            model = trained_bag(setup, name, seed)
            for width in BAGS:
                ppl = bag_ppl(setup, model, name, width)
                rows.append(dict(model=name, width=width, seed=seed, metric="ppl", value=ppl))
    size = score.SPAN_BYTES // 8 if setup.quick else score.SPAN_BYTES
    length = score.span_length([L], size, len(corpus.val))
    for run, model in setup.models:
        ppl = perplexity(score.span(model, corpus.val, L, length, setup.device))
        rows.append(dict(model=run.scheme, width=L, seed=run.seed, metric="ppl", value=ppl))
    for back, name in enumerate(COUNTS):
        ppl = count_model_ppl(np.asarray(corpus.train), np.asarray(corpus.val), back)
        rows.append(dict(model=name, width=back, seed=0, metric="ppl", value=ppl))
    return rows


def rule(attention, pairs):
    """Refuted if a larger bag is 5 % better than both the bag of one byte and counting pairs;
    confirmed if the bag of one byte is the best; else partly. attention: {width: perplexity}.
    """
    best = min(attention, key=attention.get)
    if attention[best] < 0.95 * min(attention[1], pairs):
        return "refuted"
    return "confirmed" if best == 1 else "partly"


def judge(rows):
    attention = {width: mean_of(rows, model=ATTENTION, width=width) for width in BAGS}
    best = min(attention, key=attention.get)
    singles, pairs = (mean_of(rows, model=name) for name in COUNTS)
    none = mean_of(rows, model="none")
    reached = ", ".join(f"{ppl:.1f}" for ppl in attention.values())
    return Verdict(
        "Neither mask nor positions: the model sees a bag of bytes, and more of them do not help "
        "to guess the next.",
        f"From the bag of the last 1, 4, 16 and 64 bytes attention reaches perplexity {reached}; "
        f"counting pairs has {pairs:.1f}, counting bytes {singles:.1f}, `none` with its causal "
        f"mask {none:.1f}. The best bag is that of {best}.",
        rule(attention, pairs),
    )


def show(rows):
    table = []
    for name, width in distinct(rows, "model", "width"):
        mine = dict(model=name, width=width)
        bits = f"{math.log2(mean_of(rows, **mine)):.2f}"
        table.append([name, width, mean_std_text(values(rows, **mine)), bits])
    lines = {}
    for name in (ATTENTION, EMBEDDINGS):
        ppl = [mean_of(rows, model=name, width=width) for width in BAGS]
        lines[name] = (list(BAGS), ppl)
    for name in (COUNTS[1], "none"):
        lines[name] = (list(BAGS), [mean_of(rows, model=name)] * len(BAGS))
    picture = Picture(
        lines,
        "The next byte from a bag of the bytes before it",
        "bytes in the bag",
        "perplexity per byte",
        log=True,
    )
    header = ["model", "bytes it sees", "perplexity", "bits per byte"]
    return markdown_table(header, table), picture
