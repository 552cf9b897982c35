"""Sinusoidal absolute positions: a closed-form row per position, added to the token embedding.

    python pos_sin.py            # a small demonstration

Formula, for position p, width C and i = 0 … C/2 − 1 (sine and cosine interleaved):

    PE[p, 2i]   = sin(p / base^(2i/C))
    PE[p, 2i+1] = cos(p / base^(2i/C))

Pair i turns with wavelength 2π·base^(2i/C), from 2π to nearly 2π·base, and the row of p + k is a
fixed rotation of the row of p. No parameters, no length limit. With factor s the row of p is that
of p/s: position interpolation, for texts s times as long as the training ones.
Source: Vaswani et al. 2017, "Attention Is All You Need", section 3.5, arXiv:1706.03762.
"""

import torch
from torch import nn


class SinusoidalPositionalEncoding(nn.Module):
    """The closed-form row of each position, computed afresh on every call.

    dim     width C of the rows, even
    base    the longest wavelength is nearly 2π·base positions (default 10000)
    factor  s ≥ 1: positions are divided by it (default 1)

    forward(positions): integers of shape (T,) or (B, T) -> (T, dim) or (B, T, dim). Every value has
    magnitude ≤ 1 and every row the length √(C/2). Angles are float64 (float32 on MPS, which has no
    float64) whatever the module's dtype; the rows are rounded once, at the end, to the dtype the
    module was cast to. Nothing is cached, no position is too far.
    ValueError: odd or non-positive dim, base ≤ 0, factor < 1, positions that are not integers.
    """

    LONGER = ("linear",)

    @staticmethod
    def longer(way, n, L):
        """The options that make a model trained at L readable at n."""
        return dict(factor=n / L)

    def __init__(self, dim, base=10000.0, factor=1.0):
        super().__init__()
        if dim < 2 or dim % 2:
            raise ValueError(f"dim={dim}: must be even and at least 2, to pair sines and cosines")
        if not 0 < base < float("inf"):
            raise ValueError(f"base={base}: must be a positive number")
        if not 1 <= factor < float("inf"):
            raise ValueError(
                f"factor={factor}: must be a number of at least 1, wanted over trained length"
            )
        self.dim, self.base, self.factor = dim, base, factor
        # Holds no value: it follows .half() and the like, so that rows come in the module's dtype.
        self.register_buffer("like", torch.empty(0), persistent=False)

    def forward(self, positions):
        if positions.is_floating_point() or positions.is_complex() or positions.dtype == torch.bool:
            raise ValueError(f"positions are {positions.dtype}; they must be integers")
        exact = torch.float32 if positions.device.type == "mps" else torch.float64
        pair = torch.arange(0, self.dim, 2, dtype=exact, device=positions.device)  # 2i, (C/2,)
        frequency = self.base ** (-pair / self.dim)
        angle = positions.to(exact)[..., None] / self.factor * frequency  # (..., T, C/2)
        rows = torch.stack((angle.sin(), angle.cos()), dim=-1).flatten(-2)  # (..., T, C)
        return rows.to(self.like.dtype)


if __name__ == "__main__":
    torch.set_printoptions(precision=4, sci_mode=False)
    encoding = SinusoidalPositionalEncoding(dim=8)
    print("rows of positions 0, 1, 2:")
    print(encoding(torch.arange(3)))
    rows = encoding(torch.tensor([5, 12, 1_000_005, 1_000_012]))
    print("a dot product of two rows depends on their distance only, here 7, near and far:")
    print(f"PE[5]·PE[12] = {rows[0] @ rows[1]:.4f}", end="    ")
    print(f"PE[1000005]·PE[1000012] = {rows[2] @ rows[3]:.4f}")
