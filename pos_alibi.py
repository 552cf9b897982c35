"""ALiBi, attention with linear biases: every score is lowered in proportion to the distance; nothing is added to x.

    python pos_alibi.py          # a small demonstration

Formula, for head h with its fixed slope m_h, query position i and key position j:

    attention = softmax( q·k/√D − m_h·|i − j| ),        m_h = 2^(−8(h+1)/H),  h = 0 … H − 1

Steep heads see only neighbours, flat heads the whole text. The bias is not divided by √D and the slopes are not trained.
Source: Press, Smith and Lewis 2022, "Train Short, Test Long: Attention with Linear Biases Enables Input Length
Extrapolation". For H not a power of two the slopes are those of the authors' published code.

Notation: B batch, H heads, T tokens, C = dim the model width, D = C/H the head width.
"""
import math

import torch
import torch.nn.functional as F
from torch import nn


def alibi_slopes(n_head):
    """The H fixed slopes, float32 (H,): 2^(−8/H), 2^(−16/H), … 2^(−8).

    For H not a power of two: the slopes of the next lower power of two P, then every second slope of 2P until H are full.
    """
    if n_head < 1:
        raise ValueError(f"n_head={n_head}: must be at least 1")
    power = 2 ** int(math.log2(n_head))
    exponents = [8 * (h + 1) / power for h in range(power)] + [8 * (h + 1) / (2 * power) for h in range(0, 2 * power, 2)]
    return torch.tensor([2.0 ** -e for e in exponents[:n_head]])


def alibi_bias(slopes, q_positions, k_positions):
    """The plain bias −m_h·|i − j|: (H,), (Tq,) and (Tk,) -> (H, Tq, Tk), float32, ready to be added to q·k/√D.

    Positions are integers; with a batch axis, (B, Tq) and (B, Tk), the result is (B, H, Tq, Tk).
    ValueError: positions that are not integers.
    """
    q_positions, k_positions = _integers(q_positions), _integers(k_positions)
    minus_distance = -(q_positions[..., :, None] - k_positions[..., None, :]).abs()  # exact: integers
    return slopes.float()[:, None, None] * minus_distance.unsqueeze(-3)


def _integers(positions):
    if positions.dtype.is_floating_point or positions.dtype.is_complex or positions.dtype == torch.bool:
        raise ValueError(f"positions are {positions.dtype}; they must be integers")
    return positions.long()  # differences of uint8 would wrap around


def ride_along(q, k, slopes, positions):
    """Causal ALiBi without an H×T×T bias: eight more channels carry it through the dot product, at memory linear in T.

    Three channel pairs hold q: (32, −r_i), k: (r_j, 32), with r the parts of m·p/32, largest first, each exact in the
    dtype of q. A pair adds 32·(r_j − r_i), so that the dot product has gained m·j − m·i = −m·|i − j| for j ≤ i; q must
    have been divided by √D before. Positions count from the first one, since only differences matter; the pairs come
    first, so near the diagonal large numbers cancel before q·k is added; 32 in place of 1 keeps float16 from
    overflowing; two zero channels make the width a multiple of 8, as fused kernels want.
    q, k (B, H, T, D), positions (T,) or (B, T), not falling -> q, k (B, H, T, D + 8).
    """
    positions = positions - positions[..., :1]
    exact = torch.float32 if q.device.type == "mps" else torch.float64
    rest = slopes.to(exact)[:, None] * positions.to(exact).unsqueeze(-2) / 32  # ([B,] H, T)
    q_rider, k_rider = (q.new_zeros(*rest.shape, 8) for _ in range(2))
    q_rider[..., 0:6:2] = k_rider[..., 1:6:2] = 32
    for part in range(3):
        rounded = rest.to(q.dtype)
        rest = rest - rounded.to(exact)
        k_rider[..., 2 * part], q_rider[..., 2 * part + 1] = rounded, -rounded
    return (torch.cat((rider.expand(*x.shape[:3], 8), x), dim=-1) for x, rider in ((q, q_rider), (k, k_rider)))


def fused(q, k, v, **options):
    """F.scaled_dot_product_attention for a v narrower than q and k: the fused kernels take the three of one width only."""
    width = v.shape[-1]
    if width < q.shape[-1]:
        v = F.pad(v, (0, q.shape[-1] - width))
    return F.scaled_dot_product_attention(q, k, v, **options)[..., :width]


class ALiBiAttention(nn.Module):
    """Multi-head self-attention whose scores are lowered by slope times distance.

    dim, n_head   model width C and number of heads H
    causal        True: a token sees itself and what stands before it in the sequence; False: everything
    attend        called as attend(q, k, v, is_causal=True, scale=1.0) or attend(q, k, v, attn_mask=…, scale=…); in the first, q and k
                  are wider than v where gradients are on, and v is as wide, padded, where they are off; torch's fused attention
                  unless you hand in another

    forward(x, positions=None): x (B, T, C), integer positions (T,) or (B, T), default 0 … T−1 -> (B, T, C), dtype of x.
    Distances are between positions; the causal mask goes by order in the sequence. No parameters beyond those of plain
    attention, no length limit. Causal with positions that never fall and have no huge gaps (the usual case): memory
    linear in T, see ride_along. Otherwise the plain (H, T, T) bias, and in float32, because bfloat16 cannot tell
    distance 1000 from 1004.
    ValueError: dim not divisible by n_head, positions of another shape or not integers.
    """

    def __init__(self, dim, n_head, causal=True, attend=fused):
        super().__init__()
        if n_head < 1 or dim < 1 or dim % n_head:
            raise ValueError(f"dim={dim} does not divide into n_head={n_head} heads")
        self.n_head, self.head_dim, self.causal, self.attend = n_head, dim // n_head, causal, attend
        self.slopes = alibi_slopes(n_head)  # a plain attribute, so that casts of the module leave it float32
        self.qkv = nn.Linear(dim, 3 * dim, bias=False)
        self.out = nn.Linear(dim, dim, bias=False)

    def forward(self, x, positions=None):
        B, T, C = x.shape
        ride = self.causal
        if positions is None:
            positions = torch.arange(T, device=x.device)
        elif positions.shape not in ((T,), (B, T)):
            raise ValueError(f"positions have shape {tuple(positions.shape)}; must be ({T},) or ({B}, {T})")
        else:
            positions = _integers(positions)
            steps = positions.diff()  # far beyond the number of tokens, rounding would show in the riders' sums
            ride = ride and bool((steps >= 0).all() and (steps.sum(-1) <= 4096 + 2 * T).all())
        q, k, v = self.qkv(x).view(B, T, 3, self.n_head, self.head_dim).permute(2, 0, 3, 1, 4)  # each (B, H, T, D)
        slopes, scale = self.slopes.to(x.device), self.head_dim ** -0.5
        if ride:
            q, k = ride_along(q * scale, k, slopes, positions)
            if torch.is_grad_enabled():
                y = self.attend(q, k, v, is_causal=True, scale=1.0)
            else:  # let go of qkv, of which v is a part, and then of the wide copies: see the memory in bench/long_context.py
                v = F.pad(v, (0, q.shape[-1] - self.head_dim))
                y = self.attend(q, k, v, is_causal=True, scale=1.0)[..., :self.head_dim]
                del q, k, v
        else:
            bias = alibi_bias(slopes, positions, positions)  # (H, T, T) or (B, H, T, T)
            if self.causal:
                bias = bias.masked_fill(torch.ones(T, T, dtype=torch.bool, device=x.device).triu(1), float("-inf"))
            wide = torch.promote_types(x.dtype, torch.float32)
            y = self.attend(q.to(wide), k.to(wide), v.to(wide), attn_mask=bias.to(wide), scale=scale).to(x.dtype)
        return self.out(y.transpose(1, 2).reshape(B, T, C))


if __name__ == "__main__":
    print("slopes of 4 heads:", *alibi_slopes(4).tolist())
    bias = alibi_bias(alibi_slopes(4), torch.arange(6), torch.arange(6))  # (4, 6, 6)
    print("bias of head 0 (rows: queries, columns: keys):")
    print(bias[0])
    print("attention of the last of 6 equal tokens, head by head: what is near weighs more, least so in the last head")
    for slope, weights in zip(alibi_slopes(4), bias[:, -1].softmax(-1)):
        print(f"  slope {slope:<10.4g}", "  ".join(f"{w:.3f}" for w in weights))
