"""Time the training steps of this repository, for the benchmarks of this folder."""

import time

import torch

from data.batches import text_batch
from lab.train import train

CPU = torch.device("cpu")
STEPS = 3  # of one turn of a benchmark; the first is not timed


def our_steps(run, data):
    """Seconds of each step of a run's training on the CPU, after a first one."""
    ends = []

    def note(done, trained):
        if done:  # a hook is called before the first step as well
            ends.append(time.perf_counter())

    train(run, lambda step: text_batch(data, run, step), CPU, hooks=[note])
    return durations(ends)


def durations(times):
    """Points in time -> the seconds from each to the next."""
    return [after - before for before, after in zip(times, times[1:])]
