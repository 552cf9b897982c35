"""The one network of every comparison: a small causal language model over bytes.

    logits = TinyLM("rope")(ids)        # ids (B, T) integers 0 … 255 -> logits (B, T, 256)

A scheme is a string (schemes/scheme.py says what it can be) and plugs in at one of three seams:
an embedding is added once to the token embeddings, a relation works on q and k inside `Attention`,
an attention layer takes the place of `Attention`.

    caches = model.caches()             # one per block; read a text in any chunks
    logits = torch.cat([model(part, caches=caches) for part in ids.split(7, 1)], 1)

Notation: B batch, T tokens, S tokens so far, C = dim model width, H = n_head heads, D = C/H.
"""

import functools
import inspect

import torch
import torch.nn.functional as F
from torch import nn

from attend import attend
from schemes.scheme import parse_scheme

VOCABULARY = 256  # a token is a byte


class Cache:
    """What one block keeps of the tokens it has read; it knows no scheme.

    seen     how many tokens it was given so far
    window   with a window it keeps only what the tokens to come can still see (0: all)
    """

    def __init__(self, window=0):
        self.window, self.seen, self.kept = window, 0, None

    def extend(self, *tensors):
        """Append (…, T, ·) tensors along the token axis −2 -> each with all that is kept before."""
        T = tensors[0].shape[-2]
        if self.kept is not None:
            tensors = tuple(_append(old, new) for old, new in zip(self.kept, tensors))
        self.seen += T
        self.kept = tensors
        if self.window:
            keep = min(self.window - 1, tensors[0].shape[-2])
            self.kept = tuple(t.narrow(-2, t.shape[-2] - keep, keep).clone() for t in tensors)
        return tensors


def _append(old, new):
    """old and new along the token axis; positions of all sequences may meet those of each."""
    lead = torch.broadcast_shapes(old.shape[:-2], new.shape[:-2])
    return torch.cat([tensor.expand(*lead, *tensor.shape[-2:]) for tensor in (old, new)], dim=-2)


class Attention(nn.Module):
    """Causal multi-head attention: softmax(q·k/√D + bias)·v, told of positions by a relation.

    dim, n_head   model width C and number of heads H
    relation      rotates q and k, or gives a bias, or both; None: nothing is told of positions
    attend        attend.attend, with a window or another one in its place

    forward(x, positions=None, cache=None): x (B, T, C), positions (T,) or (B, T), by default
    0 … T−1 or, with a cache, on from its last token -> (B, T, C).
    """

    def __init__(self, dim, n_head, relation=None, attend=attend):
        super().__init__()
        if n_head < 1 or dim < 1 or dim % n_head:
            raise ValueError(f"dim={dim} does not divide into n_head={n_head} heads")
        self.n_head, self.attend, self.relation = n_head, attend, relation
        self.qkv = nn.Linear(dim, 3 * dim, bias=False)
        self.out = nn.Linear(dim, dim, bias=False)

    def forward(self, x, positions=None, cache=None):
        B, T, C = x.shape
        qkv = self.qkv(x).view(B, T, 3, self.n_head, C // self.n_head)
        q, k, v = qkv.permute(2, 0, 3, 1, 4)  # each (B, H, T, D)
        if self.relation is None:
            if cache is not None:
                k, v = cache.extend(k, v)
            y = self.attend(q, k, v, is_causal=True)  # (B, H, T, D)
        else:
            y = self._related(q, k, v, positions, cache)
        return self.out(y.transpose(1, 2).reshape(B, T, C))

    def _related(self, q, k, v, positions, cache):
        relation = self.relation
        if positions is None:
            first = 0 if cache is None else cache.seen
            positions = torch.arange(first, first + q.shape[-2], device=q.device)
        if _has_method(relation, "rotate"):
            q, k = relation.rotate(q, k, positions, positions)
        k_positions = positions
        if cache is not None:
            k, v, k_positions = cache.extend(k, v, positions[..., None])
            k_positions = k_positions.squeeze(-1)  # (S,) or (B, S)
        if not _has_method(relation, "bias"):
            return self.attend(q, k, v, is_causal=True)

        def bias(start, end, first, last):
            q_rows, k_rows = q[..., start:end, :], k[..., first:last, :]
            return relation.bias(
                q_rows, k_rows, positions[..., start:end], k_positions[..., first:last]
            )

        return self.attend(q, k, v, is_causal=True, bias=bias)


def _has_method(module, name):
    return callable(getattr(type(module), name, None))


class Block(nn.Module):
    """Pre-norm residual block: attention, then a squared-ReLU MLP (So et al. 2021, "Primer")."""

    def __init__(self, dim, attention):
        super().__init__()
        self.norm1 = nn.LayerNorm(dim, bias=False)
        self.attention = attention
        self.norm2 = nn.LayerNorm(dim, bias=False)
        self.up = nn.Linear(dim, 4 * dim, bias=False)
        self.down = nn.Linear(4 * dim, dim, bias=False)

    def forward(self, x, positions=None, cache=None):
        cached = {} if cache is None else {"cache": cache}
        x = x + self.attention(self.norm1(x), positions, **cached)
        return x + self.down(F.relu(self.up(self.norm2(x))).square())


class TinyLM(nn.Module):
    """Pre-norm causal decoder over bytes, the same for every scheme but for the scheme.

    scheme       see schemes/scheme.py
    dim, n_layer, n_head   width C (default 128), blocks (4), heads (4)
    trained_len  the training length, for options that start from it (256)
    max_len      rows of a learned table: more than the training length, so that there is something
                 to fail on (4096)
    window       a token sees the last so many tokens, itself among them, in every block (0: all)

    forward(ids, positions=None, caches=None): ids (B, T) of any integer type -> logits (B, T, 256)
    in the parameters' dtype. positions (T,) or (B, T) go on from what the caches have seen.
    After `torch.manual_seed(s)` every scheme starts from the same values in the weights it shares
    with `none`.
    ValueError: unknown scheme or option, dim not divisible by n_head, an attention layer without
    its two linear layers, or without `attend` where there is a window, or without a cache where
    there are caches.
    """

    def __init__(
        self, scheme="rope", dim=128, n_layer=4, n_head=4, trained_len=256, max_len=4096, window=0
    ):
        super().__init__()
        if n_layer < 1:
            raise ValueError(f"n_layer={n_layer}: must be at least 1")
        if window < 0:
            raise ValueError(f"window={window}: must be at least 1, or 0 for none")
        self.scheme, self.window = parse_scheme(scheme), window
        # Common weights come from a generator of their own: no scheme's draws can move them.
        common = torch.Generator().manual_seed(int(torch.randint(2**62, (), device="cpu")))
        handed = dict(trained_len=trained_len, max_len=max_len, n_layer=n_layer)
        handed["attend"] = functools.partial(attend, window=window) if window else attend
        self.embed = nn.Embedding(VOCABULARY, dim)
        self.position = None
        if self.scheme.kind == "embedding":
            self.position = self.scheme.build(dim, **handed)
        layers = (self._attention(dim, n_head, handed | {"layer": i}) for i in range(n_layer))
        self.blocks = nn.ModuleList(Block(dim, layer) for layer in layers)
        self.norm = nn.LayerNorm(dim, bias=False)
        self.head = nn.Linear(dim, VOCABULARY, bias=False)
        self._start(common, dim)

    def _attention(self, dim, n_head, handed):
        """The attention of one block."""
        scheme = self.scheme
        if scheme.kind == "attention":
            if self.window and "attend" not in scheme.takes:
                raise ValueError(
                    f"scheme '{scheme.text}': a window needs an attention class that takes `attend`"
                )
            return scheme.build(dim, n_head, **handed)
        layer = Attention(dim, n_head, attend=handed["attend"])
        if scheme.kind == "relation" and scheme.cls is not None:
            layer.relation = scheme.build(n_head, dim // n_head, **handed)
        return layer

    @torch.no_grad()
    def _start(self, generator, dim):
        """Common weights: N(0, 0.3²) tokens, N(0, 1/C) in, zeros out: each block the identity.

        Against tokens of 0.3 per channel stand learned rows of 0.02 that grow in training, and
        fixed sinusoids of 0.71.
        """
        self.embed.weight.normal_(0, 0.3, generator=generator)
        for block in self.blocks:
            for layer, shape in (("qkv", (3 * dim, dim)), ("out", (dim, dim))):
                weight = getattr(getattr(block.attention, layer, None), "weight", None)
                if weight is None or weight.shape != shape:
                    raise ValueError(
                        f"scheme '{self.scheme.text}': its attention must have a bias-free "
                        f"nn.Linear `{layer}` with weight {shape}"
                    )
            block.attention.qkv.weight.normal_(0, dim**-0.5, generator=generator)
            block.up.weight.normal_(0, dim**-0.5, generator=generator)
            block.attention.out.weight.zero_()
            block.down.weight.zero_()
        self.head.weight.zero_()

    def caches(self):
        """A fresh cache for each block."""
        layer = self.blocks[0].attention
        if "cache" not in inspect.signature(layer.forward).parameters:
            raise ValueError(f"scheme '{self.scheme.text}': its attention takes no cache")
        return [Cache(self.window) for _ in self.blocks]

    def forward(self, ids, positions=None, caches=None):
        x = self.embed(ids.long())  # (B, T, C)
        if self.position is not None:
            rows = positions
            if rows is None:
                first = 0 if caches is None else caches[0].seen
                rows = torch.arange(first, first + ids.shape[1], device=ids.device)
            x = x + self.position(rows).to(x.dtype)
        for block, cache in zip(self.blocks, caches or [None] * len(self.blocks)):
            x = block(x, positions, cache)
        return self.head(self.norm(x))  # (B, T, 256)

    def matrices(self):
        """The weights that Muon trains: qkv, out, up and down of the blocks, and nothing else."""
        layers = ((b.attention.qkv, b.attention.out, b.up, b.down) for b in self.blocks)
        return [layer.weight for block in layers for layer in block]
