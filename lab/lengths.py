"""Perplexity by length: score models in every reading, protocol and length.

for cell in cells(found, plan, ...): a row with its arrays (lab/rows.py)
"""

from dataclasses import dataclass

import numpy as np
import torch

from lab import score
from lab.reading import network_of, reader, why_not
from lab.rows import distinct, label, measured, select
from lab.stats import measured_ppl


@dataclass
class Protocols:
    """What is scored: the held-out text, the lengths, and the places of both protocols."""

    data: np.ndarray  # uint8, held out
    lengths: list
    names: tuple = ("span", "fixed")
    span: int = 0  # how many targets under span
    ends: np.ndarray | None = None  # where windows end under fixed

    @classmethod
    def at(cls, data, lengths, names, span_bytes, windows):
        """Both protocols at these lengths. ValueError if the text is too short for them."""
        here = cls(data, sorted(lengths), tuple(names))
        if "span" in names:
            here.span = score.span_length(here.lengths, span_bytes, len(data))
        if "fixed" in names:
            here.ends = score.fixed_ends(len(data), max(lengths), windows)
        return here

    def nats(self, read, protocol, n, device):
        """Nats of the targets of one protocol at one length: float64 (windows, targets)."""
        if protocol == "span":
            return score.span(read, self.data, n, self.span, device)
        return score.fixed(read, self.data, n, self.ends, device)

    def targets(self, protocol):
        """How many targets there are, and where the first window ends."""
        if protocol == "span":
            return self.span, 0
        return len(self.ends) * score.K, int(self.ends[0])

    def cells(self):
        return [(protocol, n) for protocol in self.names for n in self.lengths]


def score_readings(checkpoint, model, plan, protocols, device, tick=None):
    """Score one model in each Reading of the plan -> rows, with the arrays of tests and pictures.

    Where two readings come to the same network at a length, they are scored once. A cell that
    cannot be computed has a note; whatever a scheme raises at a length, the others go on.
    tick(reading, protocol, n) is called before each cell.
    """
    run, known, rows = checkpoint.run, {}, []
    for reading in plan:
        for protocol, n in protocols.cells():
            if tick:
                tick(reading, protocol, n)
            row = measured(protocol=protocol, n=n, metric="ppl", **reading.fields())
            try:
                network = (network_of(run, reading, n), protocol, n)
                if network not in known:
                    read = reader(model, run, reading, n)
                    nats = protocols.nats(read, protocol, n, device)
                    known[network] = measured_ppl(nats) | _arrays(nats, protocols, protocol, n)
                    known[network]["first_end"] = protocols.targets(protocol)[1]
                row |= known[network]
            except Exception as error:  # somebody's own class may raise anything
                row["note"] = why_not(error, model, run, n)
            rows.append(row)
    return rows


def _arrays(nats, protocols, protocol, n):
    """Mean nats of each window, and of each position where a picture shows them."""
    arrays = dict(by_window=torch.from_numpy(nats.mean(axis=1)))
    if protocol == "span" and n == max(protocols.lengths):
        arrays["by_position"] = torch.from_numpy(nats.mean(axis=0))
    return arrays


def comparable(rows, protocols, stamped):
    """The rows that were scored on the same targets as this command's, in the same precision."""
    kept = select(rows, text=stamped["text"], read_dtype=stamped["read_dtype"])
    return on_targets(kept, {name: protocols.targets(name) for name in protocols.names})


def on_targets(rows, targets):
    """The rows that were scored on these targets, {protocol: (count, first_end)}.

    Of another protocol, those on the targets that most of its rows have. A cell that could not be
    computed is comparable with all.
    """
    scored = [row for row in rows if row["value"] is not None]
    wanted = {}
    for protocol in distinct(scored, "protocol"):
        there = [(row["count"], row["first_end"]) for row in select(scored, protocol=protocol)]
        wanted[protocol] = targets.get(protocol, max(there, key=there.count))
    found = []
    for row in rows:
        its = row["count"], row["first_end"]
        if row["value"] is None or its == wanted[row["protocol"]]:
            found.append(row)
    return found


def by_position(rows):
    """{name: nats by position in the longest window, mean over seeds}."""
    longest, found = max(row["n"] for row in rows), {}
    for row in select(rows, protocol="span", n=longest):
        if row.get("by_position") is not None:
            found.setdefault(label(row), []).append(np.asarray(row["by_position"]))
    return {name: np.mean(nats, axis=0) for name, nats in found.items()}
