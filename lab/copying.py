"""A test of copying: a random string stands in a text, and again some bytes later."""

import numpy as np
import torch

from data.batches import LETTERS

STRING, SHOWN = 32, 8  # bytes of the copied string, and how many of the second one are given


def texts_with_copies(data, distance, count, first):
    """`count` texts of the data that end with a random string: uint8 (count, distance + STRING).

    If `first`, the string also stands `distance` before. The texts and strings are the same for
    every model, and with and without the first.
    """
    rng = np.random.default_rng(distance)
    length = distance + STRING
    starts = rng.integers(0, len(data) - length, count)
    texts = np.array(data[starts[:, None] + np.arange(length)])
    strings = rng.integers(*LETTERS, (count, STRING), dtype=np.uint8)
    texts[:, -STRING:] = strings
    if first:
        texts[:, :STRING] = strings
    return texts


def copy_accuracy(model, data, distance, count, first, device="cpu"):
    """The share of the second string's bytes, after the first SHOWN, that get the largest logit."""
    texts, right = torch.from_numpy(texts_with_copies(data, distance, count, first)), 0
    with torch.no_grad():
        for text in texts.split(max(1, 8192 // texts.shape[1])):
            logits = model(text[:, :-1].to(device))[:, SHOWN - STRING :]  # (B, STRING − SHOWN, 256)
            right += (logits.argmax(-1).cpu() == text[:, SHOWN - STRING :]).sum().item()
    return right / (count * (STRING - SHOWN))
