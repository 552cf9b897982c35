"""Learned absolute positions: one trained row per position, added to the token embedding.

    python pos_learned.py        # a small demonstration

Formula: x_t = token_embedding[id_t] + P[t], with P a trained (max_len, dim) matrix. A row that no
training sequence was long enough to reach keeps its random initial value, and past max_len there
is no row at all. What to do with positions p ≥ L, the trained length, in a text of n:

    untrained     P[p] as it is
    error         refuse
    clamp         P[L − 1]
    wrap          P[p mod L]
    interpolate   all n positions are spread evenly over the L trained rows, p·(L−1)/(n−1), and each
                  takes a blend of the two rows it lies between

Source: Gehring et al. 2017, "Convolutional Sequence to Sequence Learning", arXiv:1705.03122;
GPT-2 and BERT use it in this form.
"""

import torch
from torch import nn

BEYOND = ("untrained", "error", "clamp", "wrap", "interpolate")
INTEGERS = (torch.int64, torch.int32, torch.int16, torch.uint8, torch.int8)


class LearnedPositionalEmbedding(nn.Module):
    """A trained row per position.

    dim          width C of the rows, the width of the token embedding
    max_len      how many rows there are; positions are 0 … max_len − 1 (default 4096)
    beyond       what becomes of positions ≥ trained_len, see the top of this file (default
                 "untrained": nothing)
    trained_len  L, how many rows were trained; every other `beyond` needs it

    forward(positions): integers of shape (T,) or (B, T) -> (T, dim) or (B, T, dim), in the dtype of
    `weight`. Rows start as N(0, 0.02²). Trained parameters: max_len · dim. n, for interpolate, is
    the largest position + 1; up to L nothing is changed.
    ValueError: dim or max_len below 1, unknown `beyond`, trained_len missing or not within
    1 … max_len; positions that are not integers, negative, ≥ max_len (untrained) or
    ≥ trained_len (error).
    """

    LONGER = ("clamp", "wrap", "interpolate")

    @staticmethod
    def longer(way, n, L):
        """The options that make a model trained at L readable at n."""
        return dict(beyond=way, trained_len=L)

    def __init__(self, dim, max_len=4096, beyond="untrained", trained_len=None):
        super().__init__()
        if dim < 1 or max_len < 1:
            raise ValueError(f"dim={dim} and max_len={max_len}: both must be at least 1")
        if beyond not in BEYOND:
            raise ValueError(f"beyond={beyond}: must be one of {', '.join(BEYOND)}")
        if beyond != "untrained":
            is_length = trained_len and trained_len == int(trained_len)
            if not is_length or not 1 <= trained_len <= max_len:
                raise ValueError(
                    f"beyond={beyond}: trained_len={trained_len} must be a whole number from 1 to "
                    f"max_len={max_len}"
                )
        self.max_len, self.beyond = max_len, beyond
        self.trained_len = trained_len and int(trained_len)
        self.weight = nn.Parameter(torch.empty(max_len, dim).normal_(0, 0.02))

    def forward(self, positions):
        if positions.dtype not in INTEGERS:
            raise ValueError(f"positions are {positions.dtype}; they must be integers")
        positions = positions.long()
        low, high = 0, 0
        if positions.numel():
            low, high = int(positions.min()), int(positions.max())
        if low < 0:
            raise ValueError(f"position {low} is negative; positions start at 0")
        last = self.max_len - 1 if self.beyond == "untrained" else self.trained_len - 1
        if high > last:
            return self._beyond(positions, high, last)
        return self.weight[positions]  # (T, dim) or (B, T, dim)

    def _beyond(self, positions, high, last):
        """Rows for positions of which the largest, `high`, is past the last row that serves."""
        if self.beyond == "untrained":
            raise ValueError(
                f"position {high} has no row: max_len is {self.max_len}, so positions end at {last}"
            )
        if self.beyond == "error":
            raise ValueError(
                f"position {high} was not trained: trained_len is {self.trained_len}, so positions "
                f"end at {last}"
            )
        if self.beyond == "clamp":
            return self.weight[positions.clamp(max=last)]
        if self.beyond == "wrap":
            return self.weight[positions % self.trained_len]
        lower = positions * last // high
        upper = (lower + 1).clamp(max=last)
        share = (positions * last % high / high).to(self.weight.dtype)  # of the upper row
        return torch.lerp(self.weight[lower], self.weight[upper], share[..., None])


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
