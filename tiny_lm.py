"""The one network of every comparison: a small causal language model over bytes. A scheme plugs in at one of two seams.

    logits = TinyLM("rope")(ids)        # ids (B, T) integers 0 … 255 -> logits (B, T, 256)

A scheme is a string:
    learned  sin  rope  alibi  none         the four encodings, and the control without any
    rope:base=10,interleaved=false          … with options of its class
    path/to/my_pos.py:MyAttention:key=1     a class of your own

and its class is one of two kinds, told apart by whether it takes `n_head`:
    embedding   cls(dim, **options), forward(positions) -> (T, dim): added once to the token embeddings
    attention   cls(dim, n_head, **options), forward(x, positions) -> (B, T, dim): the attention of every block. It holds
                two bias-free linear layers, `qkv` (C -> 3C: q, k, v, heads contiguous inside each) and `out` (C -> C).
                positions is None for 0 … T−1.

Notation: B batch, T tokens, C = dim the model width, H = n_head heads, D = C/H the head width.
"""
import functools
import importlib.util
import inspect
import sys
from pathlib import Path

import torch
import torch.nn.functional as F
from torch import nn

from pos_alibi import ALiBiAttention, fused
from pos_learned import LearnedPositionalEmbedding
from pos_rope import RoPEAttention
from pos_sin import SinusoidalPositionalEncoding

VOCABULARY = 256  # a token is a byte


class PlainAttention(nn.Module):
    """Causal multi-head attention that is told nothing of positions: softmax(q·k/√D) over the tokens so far."""

    def __init__(self, dim, n_head, attend=F.scaled_dot_product_attention):
        super().__init__()
        if n_head < 1 or dim < 1 or dim % n_head:
            raise ValueError(f"dim={dim} does not divide into n_head={n_head} heads")
        self.n_head, self.attend = n_head, attend
        self.qkv = nn.Linear(dim, 3 * dim, bias=False)
        self.out = nn.Linear(dim, dim, bias=False)

    def forward(self, x, positions=None):
        B, T, C = x.shape
        q, k, v = self.qkv(x).view(B, T, 3, self.n_head, C // self.n_head).permute(2, 0, 3, 1, 4)  # each (B, H, T, D)
        y = self.attend(q, k, v, is_causal=True)  # (B, H, T, D)
        return self.out(y.transpose(1, 2).reshape(B, T, C))


SCHEMES = {  # in the order of every table and picture
    "learned": LearnedPositionalEmbedding,
    "sin": SinusoidalPositionalEncoding,
    "rope": RoPEAttention,
    "alibi": ALiBiAttention,
    "none": PlainAttention,
}


def parse_scheme(scheme):
    """Scheme string -> (class, options). ValueError names what is unknown and what there is."""
    if ".py:" in scheme:
        path, rest = scheme.split(".py:", 1)
        name, colon, options = rest.partition(":")
        cls = _class_from_file(Path(path + ".py"), name)
    else:
        name, colon, options = scheme.partition(":")
        if name not in SCHEMES:
            raise ValueError(f"unknown scheme '{scheme}': use {', '.join(SCHEMES)}, or path/to/file.py:ClassName")
        cls = SCHEMES[name]
    known = {key: p for key, p in inspect.signature(cls).parameters.items() if key not in ("dim", "n_head", "attend")}
    if "causal" in known and ".py:" not in scheme:
        del known["causal"]  # the language model is causal; an attention that sees what it predicts learns nothing
    chosen = {}
    for option in options.split(",") if colon else ():
        key, equals, text = option.partition("=")
        if key in chosen:
            raise ValueError(f"scheme '{scheme}': {key} is given twice")
        if key not in known or not equals:
            raise ValueError(f"scheme '{scheme}': no option '{option}'; {name} takes "
                             + (", ".join(f"{k}={p.default}" for k, p in known.items()) or "no options"))
        chosen[key] = _option_value(scheme, key, text, known[key].default)
    return cls, chosen


def _option_value(scheme, key, text, default):
    """The text as the type that the option's default has."""
    kind = float if default in (inspect.Parameter.empty, None) else type(default)
    try:
        if kind is bool:
            return {"true": True, "false": False, "1": True, "0": False}[text.lower()]
        return kind(text)
    except (KeyError, ValueError):
        if default in (inspect.Parameter.empty, None):
            return text
        raise ValueError(f"scheme '{scheme}': {key} must be a {kind.__name__}, not '{text}'") from None


def reason(error):
    """An exception in one line."""
    return ": ".join([type(error).__name__, *str(error).splitlines()[:1]])


def _class_from_file(path, name):
    if not path.is_file():
        raise ValueError(f"scheme file {path}: no such file")
    spec = importlib.util.spec_from_file_location(f"scheme file {path}", path)
    module = sys.modules[spec.name] = importlib.util.module_from_spec(spec)
    try:
        spec.loader.exec_module(module)
    except (Exception, SystemExit) as error:  # whatever somebody's file raises, it is the file that is wrong
        raise ValueError(f"scheme file {path} cannot be imported: {reason(error)}") from None
    cls = getattr(module, name, None)
    if not (isinstance(cls, type) and issubclass(cls, nn.Module)):
        found = [k for k, v in vars(module).items()
                 if isinstance(v, type) and issubclass(v, nn.Module) and v.__module__ == spec.name]
        raise ValueError(f"scheme file {path}: no nn.Module class '{name}'; it has {', '.join(found) or 'none'}")
    return cls


class Block(nn.Module):
    """Pre-norm residual block: attention, then a squared-ReLU MLP (So et al. 2021, "Primer")."""

    def __init__(self, dim, attention):
        super().__init__()
        self.norm1 = nn.LayerNorm(dim, bias=False)
        self.attention = attention
        self.norm2 = nn.LayerNorm(dim, bias=False)
        self.up = nn.Linear(dim, 4 * dim, bias=False)
        self.down = nn.Linear(4 * dim, dim, bias=False)

    def forward(self, x, positions):
        x = x + self.attention(self.norm1(x), positions)
        return x + self.down(F.relu(self.up(self.norm2(x))).square())


class TinyLM(nn.Module):
    """Pre-norm causal decoder over bytes, the same for every scheme but for the scheme.

    scheme             see the top of this file
    dim, n_layer, n_head   width C (default 128), blocks (4), heads (4)
    max_len            rows of a learned table, more than the training length so that there is something to fail on (4096)
    trained_len        the training length, for options that start from it: beyond=… of learned, scaling=… of rope (256)
    window             a token sees the last so many tokens, itself among them, in every block (0: all)

    forward(ids, positions=None): ids (B, T) of any integer type -> logits (B, T, 256) in the parameters' dtype.
    After `torch.manual_seed(s)` every scheme starts from the same values in the weights it shares with `none`.
    ValueError: unknown scheme or option, dim not divisible by n_head, an attention without its two layers, or
    without `attend` where there is a window.
    """

    def __init__(self, scheme="rope", dim=128, n_layer=4, n_head=4, max_len=4096, trained_len=256, window=0):
        super().__init__()
        if n_layer < 1:
            raise ValueError(f"n_layer={n_layer}: must be at least 1")
        if window < 0:
            raise ValueError(f"window={window}: must be at least 1, or 0 for none")
        cls, options = parse_scheme(scheme)
        takes = inspect.signature(cls).parameters
        given = {"max_len": max_len, "trained_len": trained_len}  # to each class that takes them
        # Common weights come from a generator of their own, so that no scheme's extra draws can move them.
        common = torch.Generator().manual_seed(int(torch.randint(2**62, ())))
        self.embed = nn.Embedding(VOCABULARY, dim)
        self.position = None
        if "n_head" not in takes:
            self.position = cls(dim, **{key: value for key, value in given.items() if key in takes} | options)
            cls, options, takes = PlainAttention, {}, inspect.signature(PlainAttention).parameters
        if window and "attend" not in takes:
            raise ValueError(f"scheme '{scheme}': a window needs an attention class that takes `attend`")
        given["attend"] = functools.partial(attend, window=window) if window else attend
        options = {key: value for key, value in given.items() if key in takes} | options
        self.blocks = nn.ModuleList(Block(dim, cls(dim, n_head, **options)) for _ in range(n_layer))
        self.norm = nn.LayerNorm(dim, bias=False)
        self.head = nn.Linear(dim, VOCABULARY, bias=False)
        self._start(common, scheme, dim)

    @torch.no_grad()
    def _start(self, generator, scheme, dim):
        """Common weights: N(0, 0.3²) tokens, N(0, 1/C) in, zeros out, so that at step 0 every block is the identity.

        Against tokens of 0.3 per channel stand learned rows of 0.02 that grow in training, and fixed sinusoids of 0.71.
        """
        self.embed.weight.normal_(0, 0.3, generator=generator)
        for block in self.blocks:
            for layer, shape in (("qkv", (3 * dim, dim)), ("out", (dim, dim))):
                weight = getattr(getattr(block.attention, layer, None), "weight", None)
                if weight is None or weight.shape != shape:
                    raise ValueError(f"scheme '{scheme}': its attention must have a bias-free nn.Linear `{layer}` with "
                                     f"weight {shape}")
            block.attention.qkv.weight.normal_(0, dim**-0.5, generator=generator)
            block.up.weight.normal_(0, dim**-0.5, generator=generator)
            block.attention.out.weight.zero_()
            block.down.weight.zero_()
        self.head.weight.zero_()

    def forward(self, ids, positions=None):
        x = self.embed(ids.long())  # (B, T, C)
        if self.position is not None:
            where = torch.arange(ids.shape[1], device=ids.device) if positions is None else positions
            x = x + self.position(where).to(x.dtype)
        for block in self.blocks:
            x = block(x, positions)
        return self.head(self.norm(x))  # (B, T, 256)


def attend(q, k, v, attn_mask=None, is_causal=False, scale=None, window=0):
    """F.scaled_dot_product_attention, and in strips where that is faster: when training on a CPU at up to 1024 tokens.

    window: a query sees no key further back than the last so many (0: all).
    """
    if 0 < window < k.shape[-2]:
        return windowed(q, k, v, attn_mask, scale, window)
    short_training = q.device.type == "cpu" and torch.is_grad_enabled() and q.requires_grad and q.shape[-2] <= 1024
    short_training = short_training and q.dim() > 2 and q.shape[:-1] == k.shape[:-1] == v.shape[:-1]
    if is_causal and attn_mask is None and short_training:
        return BlockCausalAttention.apply(q, k, v, q.shape[-1] ** -0.5 if scale is None else scale)
    return fused(q, k, v, attn_mask=attn_mask, is_causal=is_causal, scale=scale)


def windowed(q, k, v, attn_mask, scale, window):
    """Sliding-window attention: query i sees keys i − window + 1 … i. In strips of queries, so at memory linear in T.

    attn_mask: a bias to add, or True where a key may be seen. ValueError unless there are as many queries as keys.
    """
    T, parts = q.shape[-2], []
    if k.shape[-2] != T:
        raise ValueError(f"a window needs as many queries as keys, not {T} and {k.shape[-2]}")
    for start in range(0, T, max(window, 64)):
        end, first = min(start + max(window, 64), T), max(0, start - window + 1)
        seen = torch.ones(end - start, end - first, dtype=torch.bool, device=q.device)
        seen = seen.tril(start - first).triu(start - first - window + 1)
        if attn_mask is not None:
            part = attn_mask[..., start:end, first:end]
            seen = part & seen if part.dtype == torch.bool else part.masked_fill(~seen, float("-inf"))
        parts.append(fused(q[..., start:end, :], k[..., first:end, :], v[..., first:end, :], attn_mask=seen, scale=scale))
    return torch.cat(parts, dim=-2)


class BlockCausalAttention(torch.autograd.Function):
    """Causal softmax(q·kᵀ·scale)·v in strips of 64 queries, each against the keys it may see; forward and backward.

    A training step takes 1.4 times as long with the fused kernel. The strips skip most of the masked triangle, their
    products run on the matrix units, and what follows a product is written over it.
    """
    STRIP = 64

    @staticmethod
    def forward(ctx, q, k, v, scale):
        shape, T = q.shape, q.shape[-2]
        q = q * scale  # here, because the scores are many more
        q, k, v = (x.flatten(0, -3) for x in (q, k, v))  # (BH, T, D)
        hidden = q.new_full((BlockCausalAttention.STRIP,) * 2, float("-inf")).triu(1)
        y, strips = torch.empty_like(v, memory_format=torch.contiguous_format), []
        for start in range(0, T, BlockCausalAttention.STRIP):
            end = min(start + BlockCausalAttention.STRIP, T)
            weight = torch.bmm(q[:, start:end], k[:, :end].transpose(1, 2))  # (BH, ≤64, end)
            weight[:, :, start:] += hidden[: end - start, : end - start]
            torch.softmax(weight, -1, out=weight)
            torch.bmm(weight, v[:, :end], out=y[:, start:end])
            strips.append(weight)
        ctx.save_for_backward(q, k, v, *strips)
        ctx.scale, ctx.shape = scale, shape
        return y.unflatten(0, shape[:-2])

    @staticmethod
    def backward(ctx, grad_y):
        if torch.is_grad_enabled():  # only under create_graph=True, which would get wrong numbers from here
            raise RuntimeError("the strips cannot be differentiated twice; give the attention attend=F.scaled_dot_product_attention")
        q, k, v, *strips = ctx.saved_tensors
        grad_y = grad_y.flatten(0, -3)
        grad_q, grad_k, grad_v = torch.empty_like(q), torch.zeros_like(k), torch.zeros_like(v)
        for start, weight in zip(range(0, q.shape[1], BlockCausalAttention.STRIP), strips):
            end = start + weight.shape[1]
            grad_v[:, :end].baddbmm_(weight.transpose(1, 2), grad_y[:, start:end])
            grad = torch.bmm(grad_y[:, start:end], v[:, :end].transpose(1, 2))  # of the weights, then of the scores
            torch.ops.aten._softmax_backward_data.out(grad, weight, -1, weight.dtype, grad_input=grad)
            torch.bmm(grad, k[:, :end], out=grad_q[:, start:end])
            grad_k[:, :end].baddbmm_(grad.transpose(1, 2), q[:, start:end])
        return *(g.unflatten(0, ctx.shape[:-2]) for g in (grad_q.mul_(ctx.scale), grad_k, grad_v)), None


def load_model(path):
    """A checkpoint of train_compare.py -> (TinyLM in float32, everything else in the file). ValueError names a bad file."""
    try:
        saved = torch.load(path, map_location="cpu", weights_only=True)
        weights, settings, _ = saved.pop("model"), saved["settings"], saved["row"]["note"]
        scheme, _, _, _ = (settings[key] for key in ("scheme", "seed", "data", "train_len"))
        size = size_of(settings)
    except FileNotFoundError:
        raise
    except OSError as error:
        raise ValueError(f"{path} cannot be read ({error.strerror or error})") from None
    except Exception:  # torch.load raises a dozen types for a file that is cut short or of another kind
        raise ValueError(f"{path} is not a whole checkpoint of train_compare.py; delete it and train again") from None
    try:
        model = TinyLM(scheme, **size)
        model.load_state_dict(weights)
    except Exception as error:
        raise ValueError(f"{path} does not fit this code ({str(error) if isinstance(error, ValueError) else reason(error)}); "
                         "was its scheme moved or changed?") from None
    return model.eval(), saved


def size_of(settings):
    """The arguments of TinyLM among the settings of a checkpoint."""
    return {key: settings[key] for key in ("dim", "n_layer", "n_head", "max_len", "trained_len", "window")}
