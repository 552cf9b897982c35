"""softmax(q·k/√D + bias)·v: the attention that every scheme in this repository runs on.

`attend` takes what F.scaled_dot_product_attention takes, and besides it a sliding window and a
bias that is made strip by strip. It picks the fastest of three ways to compute the same thing:

    fused     torch's own kernel, for plain attention
    strips    64 queries at a time against the keys they may see, forward and backward, when
              training on a CPU: a training step takes 1.4 times as long with the fused kernel
    masked    strips of queries through the fused kernel, for a window or a bias without training:
              memory stays linear in T, since no (T, S) mask or bias is ever made

Needs torch alone. Notation: B batch, H heads, T queries, S keys, D head width. The queries are
the last T of the S tokens, which is how they stand when keys come from a cache.
"""

import torch
import torch.nn.functional as F

STRIP = 64  # queries in a strip
LONGEST_IN_STRIPS = 1024  # longer training sequences go to the fused kernel


def attend(q, k, v, attn_mask=None, is_causal=False, scale=None, window=0, bias=None):
    """Attention of q (B, H, T, D) to k (B, H, S, D) and v (B, H, S, Dv) -> (B, H, T, Dv).

    attn_mask   (T, S) or broadcastable to (B, H, T, S): a bias to add, or True where a key is seen
    is_causal   a query sees its own token and what stands before it, also when T < S
    scale       of q·k (default 1/√D)
    window      a query sees the last so many tokens, its own among them (0: all); implies causal
    bias        a function (start, end, first, last) -> (H, t, s) or (B, H, t, s), the bias of the
                queries start … end − 1 on the keys first … last − 1, rounded to the dtype of q
    """
    T, S = q.shape[-2], k.shape[-2]
    scale = q.shape[-1] ** -0.5 if scale is None else scale
    is_causal, windowed = is_causal or window > 0, 0 < window < S
    strips = is_causal and attn_mask is None and not windowed and _trains_on_cpu(q, k, v)
    if strips and not (bias is not None and torch.compiler.is_compiling()):  # which breaks there
        biases = () if bias is None else bias_of_strips(bias, T, q.dtype)
        return CausalStrips.apply(q, k, v, scale, *biases)
    if windowed or bias is not None or (is_causal and attn_mask is not None):
        causal = is_causal or windowed
        return masked_strips(q, k, v, attn_mask, causal, scale, window if windowed else 0, bias)
    if is_causal and 1 < T < S:
        attn_mask = torch.ones(T, S, dtype=torch.bool, device=q.device).tril(S - T)
    is_causal = is_causal and T == S
    return fused(q, k, v, attn_mask=attn_mask, is_causal=is_causal, scale=scale)


def bias_of_strips(bias, T, dtype):
    """The bias of each strip of T queries on the keys up to its end.

    Contiguous, since all products of a strip would be slower on one with odd strides.
    """
    ends = ((start, min(start + STRIP, T)) for start in range(0, T, STRIP))
    return [bias(start, end, 0, end).to(dtype).contiguous() for start, end in ends]


def _trains_on_cpu(q, k, v):
    """Whether strips are the fastest way: short sequences, gradients wanted, no GPU."""
    wanted = q.device.type == "cpu" and torch.is_grad_enabled() and q.requires_grad
    alike = q.dim() > 2 and q.shape[:-1] == k.shape[:-1] == v.shape[:-1]
    return wanted and alike and q.shape[-2] <= LONGEST_IN_STRIPS


def fused(q, k, v, **options):
    """F.scaled_dot_product_attention, for a v narrower than q and k as well.

    The fused kernels take the three of one width only, so v is padded and the output cut.
    """
    width = v.shape[-1]
    if width < q.shape[-1]:
        v = F.pad(v, (0, q.shape[-1] - width))
    return F.scaled_dot_product_attention(q, k, v, **options)[..., :width]


def masked_strips(q, k, v, attn_mask, causal, scale, window, bias):
    """The fused kernel on strips of queries, each with the mask and the bias of that strip only."""
    T, S = q.shape[-2], k.shape[-2]
    if not T:
        return v.new_zeros(*q.shape[:-1], v.shape[-1])
    size, parts = (max(window, STRIP) if window else 4 * STRIP), []
    for start in range(0, T, size):
        end = min(start + size, T)
        offset = S - T  # query i is token i + offset
        first = max(0, start + offset - window + 1) if window else 0
        last = end + offset if causal else S
        seen = torch.ones(end - start, last - first, dtype=torch.bool, device=q.device)
        if causal:
            seen = seen.tril(start + offset - first)
        if window:
            seen = seen.triu(start + offset - first - window + 1)
        mask = seen
        if attn_mask is not None:
            given = attn_mask.expand(*attn_mask.shape[:-2], T, S)[..., start:end, first:last]
            mask = given & seen if given.dtype == torch.bool else _hide(given, seen)
        if bias is not None:
            added = bias(start, end, first, last).to(q.dtype)  # (H, t, s)
            mask = _hide(added, mask) if mask.dtype == torch.bool else added + mask
        queries, keys, values = q[..., start:end, :], k[..., first:last, :], v[..., first:last, :]
        parts.append(fused(queries, keys, values, attn_mask=mask, scale=scale))
    return torch.cat(parts, dim=-2)


def _hide(bias, seen):
    return bias.masked_fill(~seen, float("-inf"))


class CausalStrips(torch.autograd.Function):
    """Causal softmax(q·kᵀ·scale + bias)·v in strips of 64 queries, forward and backward.

    The strips skip most of the masked triangle, their products run on the matrix units, and what
    follows a product is written over it. `biases`: none, or one tensor (H, t, end) or
    (B, H, t, end) per strip, each with its gradient.
    """

    @staticmethod
    def forward(ctx, q, k, v, scale, *biases):
        shape, T = q.shape, q.shape[-2]
        q = q * scale  # here, because the scores are many more
        q, k, v = (x.flatten(0, -3) for x in (q, k, v))  # each (B·H, T, D)
        hidden = q.new_full((STRIP, STRIP), float("-inf")).triu(1)
        y, strips = torch.empty_like(v, memory_format=torch.contiguous_format), []
        for number, start in enumerate(range(0, T, STRIP)):
            end = min(start + STRIP, T)
            weight = torch.bmm(q[:, start:end], k[:, :end].transpose(1, 2))  # (B·H, t, end)
            if biases:
                weight.unflatten(0, shape[:-2]).add_(biases[number])
            weight[:, :, start:] += hidden[: end - start, : end - start]
            torch.softmax(weight, -1, out=weight)
            torch.bmm(weight, v[:, :end], out=y[:, start:end])
            strips.append(weight)
        ctx.save_for_backward(q, k, v, *strips)
        ctx.scale, ctx.shape, ctx.bias_shapes = scale, shape, [bias.shape for bias in biases]
        return y.unflatten(0, shape[:-2])

    @staticmethod
    def backward(ctx, grad_y):
        if torch.is_grad_enabled():  # only under create_graph=True, with wrong numbers from here
            raise RuntimeError(
                "the strips cannot be differentiated twice; give the attention "
                "attend=F.scaled_dot_product_attention"
            )
        q, k, v, *strips = ctx.saved_tensors
        heads, grad_biases = ctx.shape[:-2], []
        grad_y = grad_y.flatten(0, -3)
        grad_q, grad_k, grad_v = torch.empty_like(q), torch.zeros_like(k), torch.zeros_like(v)
        for number, weight in enumerate(strips):
            start = number * STRIP
            end = start + weight.shape[1]
            grad_v[:, :end].baddbmm_(weight.transpose(1, 2), grad_y[:, start:end])
            grad = torch.bmm(grad_y[:, start:end], v[:, :end].transpose(1, 2))  # of the weights
            softmax_backward = torch.ops.aten._softmax_backward_data.out
            softmax_backward(grad, weight, -1, weight.dtype, grad_input=grad)  # of the scores
            torch.bmm(grad, k[:, :end], out=grad_q[:, start:end])
            grad_k[:, :end].baddbmm_(grad.transpose(1, 2), q[:, start:end])
            if ctx.bias_shapes:
                grad_biases.append(grad.unflatten(0, heads).sum_to_size(ctx.bias_shapes[number]))
        grad_q.mul_(ctx.scale)
        return *(grad.unflatten(0, heads) for grad in (grad_q, grad_k, grad_v)), None, *grad_biases
