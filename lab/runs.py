"""Run: everything that decides what a model becomes. Equal runs give equal weights, bit for bit."""

import dataclasses
from dataclasses import dataclass, field

from data.batches import random_positions
from tiny_lm import TinyLM

# What must be the same for all models of one table; seeds and schemes differ.
RECIPE = (
    "task", "sha256", "held_out", "steps", "batch_size", "train_lens", "dim", "n_layer", "n_head",
    "lr", "adam_lr", "dtype", "start_recipe",
)  # fmt: skip


@dataclass(frozen=True)
class Run:
    """One training run. A new field needs a default, so that old checkpoints stay what they are.

    Two runs are the same if all fields but `data` are: a text is known by its bytes, not its path.
    """

    scheme: str = "rope"  # see schemes/scheme.py
    seed: int = 0
    task: str = "text"
    data: str = field(default="numpy", compare=False)  # as the user wrote it
    sha256: str = ""  # of all bytes of the text
    held_out: str = ""  # the rule by which a part of the text is held out
    dim: int = 128
    n_layer: int = 4
    n_head: int = 4
    max_len: int = 4096  # rows of a learned table
    trained_len: int = 256  # what a scheme's options take for the trained length
    window: int = 0  # a token sees the last so many only (0: all)
    steps: int = 500
    batch_size: int = 32  # windows per step, of the largest training length
    train_lens: tuple = (256,)  # they take turns, step by step
    random_positions: int = 0  # train at ordered random positions below this (0: at 0 … T − 1)
    copies: bool = False  # half of the windows repeat a random string
    lr: float = 0.02  # peak learning rate of Muon
    adam_lr: float = 0.015  # peak learning rate of AdamW
    dtype: str = "bfloat16"  # of the products in training; weights and updates are float32
    start: "Run | None" = None  # what this run goes on from (fine-tuning)
    start_weights: str = ""  # a hash of the weights it goes on from

    @property
    def train_len(self):
        """L, the training length: the largest."""
        return max(self.train_lens)

    @property
    def tokens(self):
        """How many bytes the whole training reads."""
        total, lengths = 0, self.train_lens
        for i, length in enumerate(lengths):
            steps = len(range(i, self.steps, len(lengths)))
            total += steps * length * (self.batch_size * self.train_len // length)
        return total

    @property
    def start_recipe(self):
        """What must be alike in what several runs go on from; empty for a run from the start."""
        start = self.start
        if start is None:
            return ""
        recipe = (getattr(start, name) for name in ("steps", "batch_size", "train_len", "lr"))
        return " ".join(map(str, (*recipe, start.adam_lr)))

    def replace(self, **changes):
        return dataclasses.replace(self, **changes)

    def as_dict(self):
        """Plain values for a file; a start is a dict of its own."""
        return dataclasses.asdict(self)

    @classmethod
    def from_dict(cls, saved):
        """The Run of as_dict, also of one that lacks newer fields. TypeError for unknown fields."""
        saved = dict(saved)
        start = cls.from_dict(saved["start"]) if saved.get("start") else None
        lengths = tuple(saved.get("train_lens", cls.train_lens))
        return cls(**saved | {"start": start, "train_lens": lengths})

    def flat(self):
        """The fields as one row of a table; of a start only its scheme and training length."""
        row = self.as_dict() | {"tokens": self.tokens}
        del row["start"]
        start_scheme, start_len = "", 0
        if self.start:
            start_scheme, start_len = self.start.scheme, self.start.train_len
        start = dict(start_scheme=start_scheme, start_len=start_len)
        return row | start | {"start_recipe": self.start_recipe}

    def new_model(self, **changes):
        """A network of this run's size and scheme; `changes` to TinyLM's arguments."""
        names = ("scheme", "dim", "n_layer", "n_head", "trained_len", "max_len", "window")
        return TinyLM(**{name: getattr(self, name) for name in names} | changes)

    def read_by(self, model):
        """The model as ids -> logits, at positions like those of the training.

        Random positions are drawn once per length.
        """
        maximum = self.random_positions
        if not maximum:
            return model

        def read(ids):
            positions = random_positions(0, 0, ids.shape[1], maximum)
            return model(ids, positions.to(ids.device))

        return read


def differences(old, new):
    """Describe how two runs differ, for a line that a user reads."""
    words = {"sha256": "other text", "held_out": "another part held out", "start": "another start"}
    words["start_weights"] = "another start"
    found = []
    for name in (f.name for f in dataclasses.fields(Run) if f.compare):
        before, after = getattr(old, name), getattr(new, name)
        if before != after:
            found.append(words.get(name, f"{name} {_text(before)}, not {_text(after)}"))
    return ", ".join(dict.fromkeys(found))


def _text(value):
    return " ".join(map(str, value)) if isinstance(value, tuple) else str(value)
