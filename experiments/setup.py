"""What the experiments are given, and what they hand back.

An experiment is a file with three functions:

    measure(setup) -> rows         flat dicts with `metric` and `value`; ValueError if it cannot be
    judge(rows) -> Verdict         by a rule that stands in a function of its own
    show(rows) -> text, Picture    a Markdown table, and lines to draw, or None
"""

import functools
from dataclasses import dataclass, field
from pathlib import Path

import torch
import torch.nn.functional as F
from tqdm import tqdm

from data.corpus import Corpus
from lab.command import quiet_interval
from lab.jobs import How
from lab.rows import select
from lab.stats import average

POSITIONED = ("learned", "sin", "rope", "alibi")


@dataclass
class Setup:
    """What an experiment works with."""

    corpus: Corpus
    device: torch.device
    out: Path = Path("results")
    models: list = field(default_factory=list)  # (Run, TinyLM), the trained models on the device
    seeds: list = field(default_factory=lambda: [0])  # of the models that it trains itself
    own_schemes: list = field(default_factory=list)  # to train besides the five
    sentences: list = field(default_factory=list)  # more pairs for `order`
    quick: bool = False
    how: How = field(default_factory=How)  # how runs are trained

    @property
    def run(self):
        """The first run; the others have its size, text and recipe."""
        return self.models[0][0]

    def models_of(self, *schemes):
        """The models of these schemes. ValueError if there is none."""
        found = [(run, model) for run, model in self.models if run.scheme in schemes]
        if not found:
            names = " or ".join(schemes)
            raise ValueError(
                f"it needs a checkpoint of {names}; train it with train_compare.py, and let "
                "--schemes, if given, name it"
            )
        return found


@dataclass
class Verdict:
    expectation: str
    measured: str
    verdict: str  # confirmed, partly or refuted


@dataclass
class Picture:
    """What lab.plots.plot_lines draws: {name: (xs, ys)}; mark: the training length."""

    lines: dict
    title: str
    x_name: str
    y_name: str
    mark: int | None = None
    log: bool = False


def mean_of(rows, **wanted):
    """The mean value of the rows whose fields are as wanted; infinite if one has no value."""
    return average([row["value"] for row in select(rows, **wanted)])


def progress(description):
    """A progress bar for lab.train.fit."""
    return functools.partial(tqdm, desc=description, unit="step", mininterval=quiet_interval())


def unmasked(q, k, v, **_causal):
    """Attention between all tokens, in place of the causal one."""
    return F.scaled_dot_product_attention(q, k, v)
