"""ALiBi, attention with linear biases: every score is lowered in proportion to the distance.

    python pos_alibi.py          # a small demonstration

Formula, for head h with its fixed slope m_h, query position i and key position j:

    attention = softmax( q·k/√D − m_h·|i − j| ),        m_h = 2^(−8(h+1)/H),  h = 0 … H − 1

    distance |i − j|     3     2     1     0        i
    steep head, m = ¼   −¾    −½    −¼     0   ←  query       sees its neighbours
    flat head, m = 2⁻⁸  −.012 −.008 −.004  0   ←  query       sees the whole text

The bias is not divided by √D, the slopes are not trained, and nothing is added to x.
Source: Press, Smith and Lewis 2022, "Train Short, Test Long: Attention with Linear Biases Enables
Input Length Extrapolation", arXiv:2108.12409. For H not a power of two the slopes are those of the
authors' published code. Notation: B batch, H heads, T tokens, C = dim model width, D = C/H.
"""

import math

import torch
import torch.nn.functional as F
from torch import nn

CHANNELS = 8  # how many more q and k have; fused kernels want a width that is a multiple of 8
UNIT = 32  # stands in the channels where the drawing has 1, so that float16 does not overflow


def alibi_slopes(n_head):
    """The H fixed slopes, float32 (H,): 2^(−8/H), 2^(−16/H), … 2^(−8).

    For H not a power of two: the slopes of the next lower power of two P, then every second slope
    of 2P until there are H.
    """
    if n_head < 1:
        raise ValueError(f"n_head={n_head}: must be at least 1")
    power = 2 ** int(math.log2(n_head))
    exponents = [8 * (h + 1) / power for h in range(power)]
    exponents += [8 * (h + 1) / (2 * power) for h in range(0, 2 * power, 2)]
    slopes = [2.0**-e for e in exponents[:n_head]]
    return torch.tensor(slopes, dtype=torch.float32, device="cpu")


def alibi_bias(slopes, q_positions, k_positions):
    """The plain bias −m_h·|i − j|: (H,), (T,) and (S,) -> (H, T, S), float32, to add to q·k/√D.

    Positions are integers; with a batch axis, (B, T) and (B, S), the result is (B, H, T, S).
    ValueError: positions that are not integers.
    """
    q_positions, k_positions = _integers(q_positions), _integers(k_positions)
    minus_distance = -(q_positions[..., :, None] - k_positions[..., None, :]).abs()  # exact
    return slopes.float()[:, None, None] * minus_distance.unsqueeze(-3)


def _integers(positions):
    if positions.is_floating_point() or positions.is_complex() or positions.dtype == torch.bool:
        raise ValueError(f"positions are {positions.dtype}; they must be integers")
    return positions.long()  # differences of uint8 would wrap around


def alibi_channels(q, k, slopes, q_positions, k_positions):
    """Causal ALiBi as eight more channels of q and k: no (H, T, S) bias, memory linear in T.

    For j ≤ i the bias is −m·(i − j) = m·j − m·i, the dot product of two short vectors:

        (q_i, 1, −m·i) · (k_j, m·j, 1) = q_i·k_j − m·(i − j)

    bfloat16 keeps 8 bits of m·i and 24 are needed, so m·i is split into a + b + c, each exact:

        channel    0     1     2     3     4     5     6  7   8 …
        q_i'       1   −a_i    1   −b_i    1   −c_i    0  0   q_i/√D
        k_j'      a_j    1    b_j    1    c_j    1     0  0   k_j

    They come first, so that near the diagonal large numbers cancel before q·k is added. q must have
    been divided by √D. Positions (T,) or (B, T) must not fall, and count from the first key, since
    only differences matter. q (B, H, T, D), k (B, H, S, D) -> the same with D + 8 channels.
    """
    origin = k_positions[..., :1]
    q_extra = _parts(q, slopes, q_positions - origin)  # (…, H, T, 8): a, UNIT, b, UNIT, c, UNIT
    k_extra = _parts(k, slopes, k_positions - origin)
    q_extra = torch.stack((q_extra[..., 1::2], -q_extra[..., 0::2]), dim=-1).flatten(-2)
    return (
        torch.cat((extra.expand(*x.shape[:3], CHANNELS), x), dim=-1)
        for x, extra in ((q, q_extra), (k, k_extra))
    )


def _parts(x, slopes, positions):
    """m·p/UNIT as three numbers exact in the dtype of x, UNIT beside each: ([B,] H, T, 8)."""
    exact = torch.float32 if x.device.type == "mps" else torch.float64
    rest = slopes.to(exact)[:, None] * positions.to(exact).unsqueeze(-2) / UNIT  # ([B,] H, T)
    extra = x.new_zeros(*rest.shape, CHANNELS)
    for part in range(3):
        extra[..., 2 * part] = rest.to(x.dtype)
        extra[..., 2 * part + 1] = UNIT
        rest = rest - extra[..., 2 * part].to(exact)
    return extra


def fused(q, k, v, **options):
    """F.scaled_dot_product_attention for a v narrower than q and k: its kernels want one width."""
    width = v.shape[-1]
    if width < q.shape[-1]:
        v = F.pad(v, (0, q.shape[-1] - width))
    return F.scaled_dot_product_attention(q, k, v, **options)[..., :width]


class ALiBiAttention(nn.Module):
    """Multi-head self-attention whose scores are lowered by slope times distance.

    dim, n_head   model width C and number of heads H
    causal        True: a token sees itself and what stands before it; False: everything
    attend        called like F.scaled_dot_product_attention, with is_causal=True, scale=1.0 and a
                  q and k wider than v (padded where gradients are off), or with an attn_mask;
                  default: torch's fused attention

    forward(x, positions=None, cache=None): x (B, T, C) -> (B, T, C) in the dtype of x. positions
    are integers (T,) or (B, T), by default 0 … T−1 or, with a cache, on from its last token. A
    cache has `seen`, how many tokens it was given, and `extend(k, v, positions)`, which appends
    along axis −2 and returns all so far. Distances are between positions; the causal mask goes by
    order. No parameters beyond those of plain attention, no length limit.
    Causal, with positions that never fall and have no huge gaps (the usual case): memory linear in
    T, see alibi_channels. Otherwise the plain (H, T, S) bias, and in float32, because bfloat16
    cannot tell distance 1000 from 1004.
    ValueError: dim not divisible by n_head, positions of another shape or not integers, a cache
    without causal=True.
    """

    def __init__(self, dim, n_head, causal=True, attend=fused):
        super().__init__()
        if n_head < 1 or dim < 1 or dim % n_head:
            raise ValueError(f"dim={dim} does not divide into n_head={n_head} heads")
        self.n_head, self.head_dim = n_head, dim // n_head
        self.causal, self.attend = causal, attend
        self.slopes = alibi_slopes(n_head)  # a plain attribute: casts of the module leave it exact
        self.qkv = nn.Linear(dim, 3 * dim, bias=False)
        self.out = nn.Linear(dim, dim, bias=False)

    def forward(self, x, positions=None, cache=None):
        B, T, C = x.shape
        if cache is not None and not self.causal:
            raise ValueError("a cache needs causal=True: later tokens would change earlier outputs")
        consecutive = positions is None
        if consecutive:
            positions = torch.arange(T, device=x.device) + (0 if cache is None else cache.seen)
        elif positions.shape not in ((T,), (B, T)):
            shape = tuple(positions.shape)
            raise ValueError(f"positions have shape {shape}; must be ({T},) or ({B}, {T})")
        positions = k_positions = _integers(positions)
        qkv = self.qkv(x).view(B, T, 3, self.n_head, self.head_dim)
        q, k, v = qkv.permute(2, 0, 3, 1, 4)  # each (B, H, T, D)
        if cache is not None:
            k, v, k_positions = cache.extend(k, v, positions[..., None])
            k_positions = k_positions.squeeze(-1)  # (S,) or (B, S)
            consecutive = False  # the cache may have been begun at other positions
        if self.causal and (consecutive or _rise_slowly(k_positions)):
            q, k, v, options = self._with_channels(q, k, v, positions, k_positions)
        else:
            q, k, v, options = self._with_bias(q, k, v, positions, k_positions)
        del qkv  # where v is a copy now, all of it is let go before the attention
        y = self.attend(q, k, v, **options).to(x.dtype)  # (B, H, T, D), or as wide as the channels
        del q, k, v
        if y.shape[-1] > self.head_dim:  # v was padded; slicing in training would cost time
            y = y[..., : self.head_dim]
        return self.out(y.transpose(1, 2).reshape(B, T, C))

    def _with_channels(self, q, k, v, positions, k_positions):
        """q, k, v and the options of `attend` for attention that has the bias in its channels."""
        T, S = q.shape[-2], k.shape[-2]
        q = q * self.head_dim**-0.5
        q, k = alibi_channels(q, k, self.slopes.to(q.device), positions, k_positions)
        if not torch.is_grad_enabled():  # a copy: q, k and v of one projection can then be let go
            v = F.pad(v, (0, CHANNELS))
        if T == S:
            return q, k, v, dict(is_causal=True, scale=1.0)
        return q, k, v, dict(attn_mask=_causal_mask(T, S, q.device), scale=1.0)

    def _with_bias(self, q, k, v, positions, k_positions):
        """q, k, v and the options of `attend` for attention with the bias as a matrix."""
        bias = alibi_bias(self.slopes.to(q.device), positions, k_positions)  # ([B,] H, T, S)
        if self.causal:
            bias = bias.masked_fill(~_causal_mask(*bias.shape[-2:], q.device), float("-inf"))
        wide = torch.promote_types(q.dtype, torch.float32)
        q, k, v, bias = (tensor.to(wide) for tensor in (q, k, v, bias))
        return q, k, v, dict(attn_mask=bias, scale=self.head_dim**-0.5)


def _rise_slowly(positions):
    """Whether positions never fall and span so little that the channels' sums stay exact."""
    steps = positions.diff()
    return bool((steps >= 0).all() and (steps.sum(-1) <= 4096 + 2 * positions.shape[-1]).all())


def _causal_mask(T, S, device):
    """True where the last T of S tokens may look: at themselves and at what stands before."""
    return torch.ones(T, S, dtype=torch.bool, device=device).tril(S - T)


if __name__ == "__main__":
    print("slopes of 4 heads:", *alibi_slopes(4).tolist())
    bias = alibi_bias(alibi_slopes(4), torch.arange(6), torch.arange(6))  # (4, 6, 6)
    print("bias of head 0 (rows: queries, columns: keys):")
    print(bias[0])
    print("attention of the last of 6 equal tokens, head by head:")
    for slope, weights in zip(alibi_slopes(4), bias[:, -1].softmax(-1)):
        print(f"  slope {slope:<10.4g}", "  ".join(f"{w:.3f}" for w in weights))
