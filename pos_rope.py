"""RoPE, rotary position embedding: q and k are rotated by an angle proportional to their position.

Formula: the D channels of a head are D/2 pairs, each a complex number z. At position p, pair i is
rotated by the angle p·f_i with the inverse frequency f_i = base^(−2i/D), i = 0 … D/2 − 1:

    z_i  ->  z_i · exp(j · p · f_i)

Rotating q by m steps and k by n steps changes the angle between them by m − n steps, so the score
q·k depends on the distance m − n and on no absolute position; v is left alone. Other frequencies
can be handed in: those of schemes/rope_scaling.py serve texts longer than the training ones.
Source: Su et al. 2021, "RoFormer", arXiv:2104.09864. B batch, H heads, T tokens, D head width.
"""

import torch
from torch import nn
from torch.nn.functional import scaled_dot_product_attention as sdpa


def rope_frequencies(head_dim, base=10000.0):
    """The inverse frequencies f_i = base^(−2i/D): float64 (D/2,), on the CPU."""
    if head_dim < 2 or head_dim % 2:
        raise ValueError(f"head width {head_dim}: must be even and at least 2, to pair channels")
    if not 0 < base < float("inf"):
        raise ValueError(f"base={base}: must be a positive number")
    pair = torch.arange(0, head_dim, 2, dtype=torch.float64, device="cpu")  # 2i, (D/2,)
    return base ** (-pair / head_dim)


def rope_cos_sin(positions, frequencies, amplitude=1.0):
    """cos and sin of the angles p·f_i: integer positions (T,) or (B, T) -> two (…, T, D/2).

    frequencies (D/2,), or (B, D/2) for one set per sequence; amplitude multiplies cos and sin
    (YaRN). Angles are float64 (float32 on MPS, which has no float64), cos and sin float32;
    nothing is cached. ValueError: positions that are not integers.
    """
    if positions.is_floating_point() or positions.is_complex() or positions.dtype == torch.bool:
        raise ValueError(f"positions are {positions.dtype}; they must be integers")
    exact = torch.float32 if positions.device.type == "mps" else torch.float64
    frequencies = frequencies.to(positions.device, exact).unsqueeze(-2)
    angle = positions.to(exact)[..., None] * frequencies  # (…, T, D/2)
    return (angle.cos() * amplitude).float(), (angle.sin() * amplitude).float()


def apply_rope(x, cos, sin, interleaved=True):
    """Rotate every pair of channels of x (B, H, T, D) by its angle; every head alike.

    cos, sin     (T, D/2), or (B, T, D/2) when each sequence has positions of its own
    interleaved  True: pairs are channels (2i, 2i+1), as in the paper; False: (i, i + D/2), the
                 layout of Hugging Face Llama weights, a fixed reordering of the channels
    Computed in float32 or better; cos = 1, sin = 0 returns x unchanged. ValueError: unlike shapes.
    """
    if x.shape[-1] != 2 * cos.shape[-1]:
        raise ValueError(f"x has {x.shape[-1]} channels and cos {cos.shape[-1]}, not half as many")
    if cos.dim() == 3:
        if x.dim() < 4:
            raise ValueError(f"cos is {tuple(cos.shape)}; x needs axes (B, H, T, D), has {x.dim()}")
        cos, sin = cos.unsqueeze(1), sin.unsqueeze(1)  # (B, 1, T, D/2)
    dtype, wide = x.dtype, torch.promote_types(x.dtype, torch.float32)
    rotation = torch.complex(cos.to(wide), sin.to(wide))  # exp(j·angle)
    if not interleaved:
        z = torch.complex(*x.to(wide).chunk(2, dim=-1)) * rotation  # (B, H, T, D/2)
        return torch.cat((z.real, z.imag), dim=-1).to(dtype)
    x = x.to(wide, copy=True)  # in the memory order of x, which spares a reordering
    if x.stride(-1) != 1:
        x = x.contiguous()
    z = torch.view_as_complex(x.unflatten(-1, (-1, 2)))
    return torch.view_as_real(z * rotation).flatten(-2).to(dtype)


class RoPEAttention(nn.Module):
    """Multi-head self-attention whose q and k are rotated by their position.

    dim, n_head   model width C and number of heads H; the head width D = C/H must be even
    base          wavelengths run from 2π to nearly 2π·base tokens (default 10000)
    interleaved   how channels pair up, see apply_rope; causal: a token sees itself and what
                  stands before it, not everything (defaults True)
    attend        called like torch's scaled_dot_product_attention (the default)
    frequencies   (D/2,) in place of base^(−2i/D), or a function of all positions (…, T) so far
                  that gives (…, D/2); amplitude multiplies cos and sin (default 1)

    forward(x, positions=None, cache=None): x (B, T, C) -> (B, T, C) in the dtype of x. positions
    are integers (T,) or (B, T), by default 0 … T−1 or, with a cache, on from its last token. A
    cache has `seen`, how many tokens it was given, and `extend(k, v)`, which appends along axis −2
    and returns all so far. The causal mask goes by order; no parameters, no length limit.
    ValueError for dim, n_head, base or positions that cannot work, or a cache without causal=True.
    """

    def __init__(self, dim, n_head, base=10000.0, interleaved=True, causal=True,
                 attend=sdpa, frequencies=None, amplitude=1.0):  # fmt: skip
        super().__init__()
        if n_head < 1 or dim < 1 or dim % n_head:
            raise ValueError(f"dim={dim} does not divide into n_head={n_head} heads")
        self.n_head, self.head_dim = n_head, dim // n_head
        self.interleaved, self.causal, self.attend = interleaved, causal, attend
        plain = rope_frequencies(self.head_dim, base)  # raises for values that cannot work
        self.frequencies = plain if frequencies is None else frequencies  # casts leave it exact
        self.base, self.amplitude = base, amplitude
        self.qkv = nn.Linear(dim, 3 * dim, bias=False)
        self.out = nn.Linear(dim, dim, bias=False)

    def forward(self, x, positions=None, cache=None):
        B, T, C = x.shape
        if cache is not None and not self.causal:
            raise ValueError("a cache needs causal=True: later tokens would change earlier outputs")
        if positions is None:
            positions = torch.arange(T, device=x.device) + (cache.seen if cache is not None else 0)
        elif (shape := tuple(positions.shape)) not in ((T,), (B, T)):
            raise ValueError(f"positions have shape {shape}; must be ({T},) or ({B}, {T})")
        qkv = self.qkv(x).view(B, T, 3, self.n_head, self.head_dim)
        q, k, v = qkv = qkv.permute(2, 0, 3, 1, 4)  # each (B, H, T, D)
        if not callable(self.frequencies):
            q, k = self._rotate(qkv[:2], positions, self.frequencies)  # one pass rotates both
            if cache is not None:
                k, v = cache.extend(k, v)
        else:  # they follow the length, so a cache keeps keys as they are, to be rotated anew
            so_far = positions[..., None]
            if cache is not None:
                k, v, so_far = cache.extend(k, v, so_far)
            frequencies = self.frequencies(so_far.squeeze(-1))  # of positions (S,) or (B, S)
            q = self._rotate(q, positions, frequencies)
            k = self._rotate(k, so_far.squeeze(-1), frequencies)
        S, mask = k.shape[-2], None
        if self.causal and 1 < T < S:  # these are the last T of S tokens
            mask = torch.ones(T, S, dtype=torch.bool, device=x.device).tril(S - T)
        y = self.attend(q, k, v, attn_mask=mask, is_causal=self.causal and T == S)
        return self.out(y.transpose(1, 2).reshape(B, T, C))

    def _rotate(self, x, positions, frequencies):
        return apply_rope(
            x, *rope_cos_sin(positions, frequencies, self.amplitude), self.interleaved
        )


if __name__ == "__main__":
    q, k = torch.randn(2, 1, 1, 1, 32, generator=torch.manual_seed(0))  # each (B, H, T, D)
    for m, n in ((9, 2), (1009, 1002), (9, 3)):
        tables = (rope_cos_sin(torch.tensor([p]), rope_frequencies(32)) for p in (m, n))
        score = (apply_rope(q, *next(tables)) * apply_rope(k, *next(tables))).sum()
        print(f"q at {m}, k at {n}, distance {m - n}: score {score:.5f}")
