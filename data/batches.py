"""Batches of training text, each a function of (seed, step) alone, and positions drawn at random.

    x, y, positions = text_batch(corpus.train, run, step)

x and y are uint8 (B, T): every position of x predicts its next byte, y. positions is None for
0 … T − 1.
"""

import numpy as np
import torch

LETTERS = 97, 123  # a to z, of which random strings are made


def text_batch(data, run, step):
    """The batch of one step of a run (lab/runs.py) from its training text, uint8 (bytes,).

    Training lengths take turns, step by step, with as many bytes each.
    """
    length = run.train_lens[step % len(run.train_lens)]
    x, y = windows(data, run.seed, step, run.batch_size * run.train_len // length, length)
    if run.copies:
        x, y = with_copies(x, y, run.seed, step)
    positions = None
    if run.random_positions:
        positions = random_positions(run.seed, step, length, run.random_positions)
    return x, y, positions


def windows(data, seed, step, batch_size, length):
    """`batch_size` windows from anywhere in the data -> inputs and targets, uint8 (B, length)."""
    starts = np.random.default_rng((seed, step)).integers(0, len(data) - length, batch_size)
    window = torch.from_numpy(np.asarray(data[starts[:, None] + np.arange(length + 1)]))
    return window[:, :-1], window[:, 1:]


def with_copies(x, y, seed, step):
    """x and y (B, T) whose first half of rows repeat a random string of letters, again and again.

    A string is 16 … ¾·(T + 1) letters long.
    """
    rng, length = np.random.default_rng((seed, step, 1)), x.shape[1] + 1
    window = torch.cat((x, y[:, -1:]), dim=1)
    for row in window[: (len(window) + 1) // 2]:
        longest = max(16, 3 * length // 4)
        string = rng.integers(*LETTERS, rng.integers(min(16, length), longest + 1))
        row[:] = torch.from_numpy(np.resize(string, length))
    return window[:, :-1], window[:, 1:]


def random_positions(seed, step, length, maximum):
    """`length` positions below `maximum`, drawn without replacement, in order: int64 (length,).

    Source: Ruoss et al. 2023, "Randomized Positional Encodings Boost Length Generalization of
    Transformers", arXiv:2305.16843.
    """
    if length > maximum:
        raise ValueError(f"{length} bytes do not fit in {maximum} random positions")
    drawn = np.random.default_rng((seed, step, 2)).choice(maximum, length, replace=False)
    return torch.from_numpy(np.sort(drawn))
