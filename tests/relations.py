"""Schemes of one's own, which tests hand to the network by the path of this file."""

import torch
from torch import nn

from tiny_lm import Attention


class Rotates(nn.Module):
    """Rotates q and k by trained angles: rates (H, D/2)."""

    def __init__(self, n_head, head_dim):
        super().__init__()
        self.rates = nn.Parameter(torch.rand(n_head, head_dim // 2))

    def rotate(self, q, k, q_positions, k_positions):
        return self._rotated(q, q_positions), self._rotated(k, k_positions)

    def _rotated(self, x, positions):
        angle = positions[..., None, :, None] * self.rates[:, None]  # ([B,] H, T, D/2)
        real, imaginary = x.chunk(2, -1)
        cos, sin = angle.cos(), angle.sin()
        return torch.cat((real * cos - imaginary * sin, real * sin + imaginary * cos), -1)


class Biased(nn.Module):
    """A trained bias per distance and head, the last for all that is further: table (40, H)."""

    def __init__(self, n_head, head_dim, axes=2):
        super().__init__()
        self.table = nn.Parameter(torch.randn(40, n_head).view(*(1,) * (axes - 2), 40, n_head))

    def bias(self, q, k, q_positions, k_positions):
        distance = q_positions[..., :, None] - k_positions[..., None, :]  # ([B,] T, S)
        rows = self.table.flatten(0, -2)[distance.clamp(0, 39)]  # ([B,] T, S, H)
        return rows.movedim(-1, -3)


class ByContent(Biased):
    """Rotates, and has a bias (B, H, T, S) that depends on q."""

    def rotate(self, q, k, q_positions, k_positions):
        return q * (1 + q_positions[..., None, :, None] % 3), k

    def bias(self, q, k, q_positions, k_positions):
        return super().bias(q, k, q_positions, k_positions) * q[..., :1]


class Wide(Attention):
    """An attention with a matrix of its own, as large as `qkv`."""

    def __init__(self, dim, n_head):
        super().__init__(dim, n_head)
        self.gate = nn.Linear(dim, 3 * dim, bias=False)

    def forward(self, x, positions=None):
        gate = self.gate(x)[..., : x.shape[-1]].sigmoid()
        return super().forward(x * gate, positions)
