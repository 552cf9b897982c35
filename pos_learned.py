"""Learned absolute positions: one trained row per position, added to the token embedding.

    python pos_learned.py        # a small demonstration

Formula: x_t = token_embedding[id_t] + P[t], with P a trained (max_len, dim) matrix. A row that no training sequence was
long enough to reach keeps its random initial value, and past max_len there is no row at all.
Source: Gehring et al. 2017, "Convolutional Sequence to Sequence Learning"; GPT-2 and BERT use it in this form.
"""
import torch
from torch import nn


class LearnedPositionalEmbedding(nn.Module):
    """A trained row per position.

    dim      width C of the rows, the width of the token embedding
    max_len  how many rows there are; positions are 0 … max_len − 1 (default 4096)

    forward(positions): integers of shape (T,) or (B, T) -> (T, dim) or (B, T, dim), in the dtype of `weight`.
    Rows start as N(0, 0.02²). Trained parameters: max_len · dim.
    ValueError: dim or max_len below 1, positions that are not integers, negative, or ≥ max_len.
    """

    def __init__(self, dim, max_len=4096):
        super().__init__()
        if dim < 1 or max_len < 1:
            raise ValueError(f"dim={dim} and max_len={max_len}: both must be at least 1")
        self.max_len = max_len
        self.weight = nn.Parameter(torch.empty(max_len, dim).normal_(0, 0.02))

    def forward(self, positions):
        if positions.dtype not in (torch.int64, torch.int32, torch.int16, torch.uint8, torch.int8):
            raise ValueError(f"positions are {positions.dtype}; they must be integers")
        if positions.numel():
            low, high = int(positions.min()), int(positions.max())
            if high >= self.max_len:
                raise ValueError(f"position {high} has no row: max_len is {self.max_len}, so positions end at {self.max_len - 1}")
            if low < 0:
                raise ValueError(f"position {low} is negative; positions start at 0")
        return self.weight[positions.long()]  # (T, dim) or (B, T, dim)


if __name__ == "__main__":
    torch.manual_seed(0)
    embedding = LearnedPositionalEmbedding(dim=8, max_len=16)
    print("rows of positions 0, 1, 2 (random until trained):")
    print(embedding(torch.arange(3)).detach())
    print(f"trained position parameters: {embedding.weight.numel()} = max_len 16 x dim 8")
    try:
        embedding(torch.tensor([3, 16]))
    except ValueError as error:
        print(f"one position too far: {error}")
