"""How much longer a training step takes for a scheme that adds a trained bias to the scores.

    python bench/bias_step.py              # 2 minutes on two CPU cores

The bias is one number per head and distance, as in T5, and comes strip by strip (see attend.py).
At the default size it takes turns with `none` in one process, on one thread and then on as many as
torch takes. Each round gives one ratio, of the medians of its steps; what is printed is the median
of the ratios. The goal is at most 1.25. Writes nothing.
"""

import statistics
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parent.parent))
import torch
from torch import nn

from bench.clock import CPU, STEPS, our_steps
from data.corpus import load_corpus
from lab import command
from lab.command import int_in_range, option
from lab.machine import pick_dtype
from lab.runs import Run

GOAL = 1.25
DISTANCES = 128
NONE, BIASED = "none", f"{Path(__file__).resolve()}:ClampedDistance"


class ClampedDistance(nn.Module):
    """A trained bias for each head and each distance up to 127; what is further shares the last."""

    def __init__(self, n_head, head_dim):
        super().__init__()
        self.table = nn.Parameter(torch.zeros(n_head, DISTANCES))

    def bias(self, q, k, q_positions, k_positions):
        distance = q_positions[..., :, None] - k_positions[..., None, :]  # (T, S)
        return self.table[:, distance.clamp(0, DISTANCES - 1)]  # (H, T, S)


def measure(run, rounds, data):
    """Both in turn -> {scheme: [median seconds of a step in each round]}."""
    seconds = {NONE: [], BIASED: []}
    for number in range(rounds):
        schemes = list(seconds)
        for scheme in schemes if number % 2 else reversed(schemes):
            steps = our_steps(run.replace(scheme=scheme), data)
            seconds[scheme].append(statistics.median(steps))
    return seconds


def summary(seconds, threads):
    """A sentence with the ratio, its range over rounds, and the times behind it."""
    ratios = [biased / none for biased, none in zip(seconds[BIASED], seconds[NONE])]
    ratio = statistics.median(ratios)
    biased, none = (1000 * statistics.median(seconds[scheme]) for scheme in (BIASED, NONE))
    return (
        f"{threads} thread{'s' * (threads > 1)}: {ratio:.2f} times as long as `none` "
        f"({biased:.0f} and {none:.0f} ms; {min(ratios):.2f} to {max(ratios):.2f} in "
        f"{len(ratios)} rounds), {'within' if ratio <= GOAL else 'beyond'} the goal of {GOAL}"
    )


def arguments(words):
    parser = command.Parser(__doc__)
    option(parser, "--rounds", int_in_range(1), 30, "turns of each, of two steps")
    return parser, parser.read(words)


def main():
    parser, args = arguments(sys.argv[1:])
    try:
        corpus = load_corpus("numpy")
    except ValueError as error:
        parser.error(error)
    dtype = str(pick_dtype("auto", CPU)).removeprefix("torch.")
    run, threads = Run(steps=STEPS, dtype=dtype), torch.get_num_threads()
    for count in sorted({1, threads}):
        torch.set_num_threads(count)
        print(summary(measure(run, args.rounds, corpus.train), count), flush=True)


if __name__ == "__main__":
    command.run(main)
