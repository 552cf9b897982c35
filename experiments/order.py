"""Without positions attention cannot tell 我打你 from 你打我.

Random weights are enough to see it: the outputs of one attention layer for two sentences that are
reorderings of each other are compared, without a mask and with the causal one.
"""

import torch
from torch import nn

from experiments.setup import POSITIONED, Verdict, unmasked
from lab.rows import distinct, select, values
from lab.tables import markdown_table
from pos_alibi import ALiBiAttention
from pos_learned import LearnedPositionalEmbedding
from pos_rope import RoPEAttention
from pos_sin import SinusoidalPositionalEncoding
from tiny_lm import Attention, TinyLM

DIM, HEADS = 64, 4
PAIRS = [
    ("我打你", "你打我"),
    ("the dog bit the man", "the man bit the dog"),
    ("only he said he loved her", "he said he loved only her"),
]


def permutation(a, b):
    """Where each byte of b stands in a: b[i] = a[permutation[i]].

    ValueError if b is not a reordering of a.
    """
    first, second = (bytes(text).decode(errors="replace") for text in (a, b))
    if not a or a == b:
        raise ValueError(f"--sentences: '{first}' twice; give two sentences that differ in order")
    places = {}
    for i, byte in enumerate(a):
        places.setdefault(byte, []).append(i)
    if sorted(a) != sorted(b):
        raise ValueError(f"--sentences: '{second}' is not '{first}' in another order")
    return torch.tensor([places[byte].pop(0) for byte in b])


def bidirectional(scheme):
    """One attention layer without a mask over byte embeddings: ids (T,) -> outputs (T, DIM).

    The weights are random, and the same for every scheme.
    """
    torch.manual_seed(0)
    embed, table = nn.Embedding(256, DIM), None
    if scheme == "rope":
        layer = RoPEAttention(DIM, HEADS, causal=False)
    elif scheme == "alibi":
        layer = ALiBiAttention(DIM, HEADS, causal=False)
    else:
        layer = Attention(DIM, HEADS, attend=unmasked)
    if scheme == "learned":
        table = LearnedPositionalEmbedding(DIM)
        nn.init.normal_(table.weight, 0, 1)  # as large as the tokens, as training makes them
    elif scheme == "sin":
        table = SinusoidalPositionalEncoding(DIM)

    def read(ids):
        x = embed(ids)
        if table is not None:
            x = x + table(torch.arange(len(ids)))
        return layer(x[None])[0]

    return read


def last_tokens(a, b, layers):
    """The logits of a full stop after each of two texts, in a causal network without positions."""
    torch.manual_seed(0)
    model = TinyLM("none", dim=DIM, n_layer=layers, n_head=HEADS)
    for weight in model.parameters():
        weight.normal_(0, 0.2)
    stop = torch.tensor([46])
    return (model(torch.cat((ids, stop))[None])[0, -1] for ids in (a, b))


@torch.no_grad()
def measure(setup):
    """Relative differences between what is read in the one order and in the other.

    outputs      largest difference of an output from that of the same byte in the other order
    pooled       difference of the mean over tokens
    last token   difference at a full stop after both, which is the same byte in the same place
    """
    rows = []
    for first, second in [*PAIRS, *setup.sentences]:
        a, b = (torch.tensor(list(text.encode())) for text in (first, second))
        moved = permutation(a.tolist(), b.tolist())
        pair = dict(sentences=f"{first} / {second}", seed=0)
        for scheme in ("none", *POSITIONED):
            read = bidirectional(scheme)
            x, y = read(a), read(b)  # each (T, DIM)
            outputs = float((y - x[moved]).abs().max() / x.abs().max())
            pooled = float((y.mean(0) - x.mean(0)).norm() / x.mean(0).norm())
            rows.append(pair | dict(scheme=scheme, metric="outputs", value=outputs))
            rows.append(pair | dict(scheme=scheme, metric="pooled", value=pooled))
        for layers in (1, 2):
            x, y = last_tokens(a, b, layers)
            row = dict(scheme="none", metric="last token", layers=layers)
            rows.append(pair | row | dict(value=float((y - x).norm() / x.norm())))
    return rows


def rule(blind, told, depth):
    """Confirmed if what should be blind to order is, to rounding, and what should not be is not."""
    return "confirmed" if blind < 1e-5 and told > 1e-3 and depth > 1e-3 else "refuted"


def judge(rows):
    none = select(rows, scheme="none")
    blind = values(none, metric="outputs") + values(none, metric="pooled")
    blind = max(blind + values(none, metric="last token", layers=1))
    told = min(min(values(rows, scheme=s, metric="pooled")) for s in POSITIONED)
    depth = min(values(none, metric="last token", layers=2))
    return Verdict(
        "Attention without positions is blind to order: 我打你 and 你打我 read the same.",
        "Without mask and positions the outputs are the permuted outputs, and the mean over tokens "
        f"is the same, to rounding (at most {blind:.0e} of its size); with any of the four the "
        f"mean differs by at least {told:.1%}. A causal mask alone: one layer's last token still "
        f"cannot tell; the second layer's can (by at least {depth:.1%}), since the tokens before "
        "it have seen different beginnings.",
        rule(blind, told, depth),
    )


def show(rows):
    header = ["relative difference", "no mask, none"]
    header += [f"no mask, {scheme}" for scheme in POSITIONED]
    header += ["causal, none, 1 layer", "causal, none, 2 layers"]
    table = []
    for sentences in distinct(rows, "sentences"):
        mine = select(rows, sentences=sentences)
        pooled = {row["scheme"]: row["value"] for row in select(mine, metric="pooled")}
        last = {row["layers"]: row["value"] for row in select(mine, metric="last token")}
        line = [sentences, f"{pooled['none']:.1e}", *(f"{pooled[s]:.2g}" for s in POSITIONED)]
        table.append([*line, f"{last[1]:.1e}", f"{last[2]:.2g}"])
    return markdown_table(header, table), None
