"""A model read at other positions than it was trained with, or with another scheme."""

import math

import torch

from experiments.setup import Picture, Verdict, mean_of
from lab import score
from lab.reading import why_not
from lab.rows import distinct, select, values
from lab.stats import perplexity
from lab.tables import markdown_table, mean_std_text
from schemes.scheme import SCHEMES

SHIFTS = (1, 10, 100, 1000)
ABSOLUTE, RELATIVE = ("learned", "sin"), ("rope", "alibi", "none")
QUICK_WINDOWS = 64


def positions_to_try(L):
    """Positions at which a text of L bytes is read, by the name of the table's column."""
    own = torch.arange(L)
    shifted = {f"+ {shift}": own + shift for shift in SHIFTS}
    return {"its own": own, **shifted, "reversed": own.flip(0), "all equal": torch.zeros_like(own)}


def read_as(run, model, scheme):
    """The weights that all schemes share, in the network of another; a learned table is new."""
    torch.manual_seed(0)
    other, weights = run.new_model(scheme=scheme), model.state_dict()
    shared = run.new_model(scheme="none").state_dict()
    other.load_state_dict({name: weights[name] for name in shared}, strict=False)
    return other.eval()


def ppl_at(setup, model, length, positions=None):
    """Perplexity of the span of `length` bytes when every window stands at these positions."""

    def read(ids):
        return model(ids, positions)

    L = setup.run.train_len
    return perplexity(score.span(read, setup.corpus.val, L, length, setup.device))


def measure(setup):
    """Perplexity of every model at other positions and with the schemes of the five."""
    L, rows = setup.run.train_len, []
    size = QUICK_WINDOWS * L if setup.quick else score.SPAN_BYTES // 2
    length = score.span_length([L], size, len(setup.corpus.val))
    for run, model in setup.models:
        named = dict(scheme=run.scheme, seed=run.seed, metric="ppl", n=L)
        for name, positions in positions_to_try(L).items():
            value, note = None, ""
            try:
                value = ppl_at(setup, model, length, positions.to(setup.device))
            except Exception as error:  # a learned table ends; somebody's own class may do anything
                note = why_not(error, model, run, int(positions.max()) + 1)
            rows.append(named | dict(column=name, value=value, note=note))
        for scheme in SCHEMES:
            if scheme != run.scheme:
                other = read_as(run, model, scheme).to(setup.device)
                value = ppl_at(setup, other, length)
                rows.append(named | dict(column=f"read as {scheme}", value=value, note=""))
    return rows


def factors(rows, scheme):
    """How many times its own a scheme's perplexity is when positions are shifted: {shift: factor}.

    Without the shifts at which it cannot be read.
    """
    own, found = mean_of(rows, scheme=scheme, column="its own"), {}
    if own == math.inf:
        return {}
    for shift in SHIFTS:
        mine = select(rows, scheme=scheme, column=f"+ {shift}")
        if all(row["value"] is not None for row in mine):
            found[shift] = mean_of(mine) / own
    return found


def rule(still, present):
    """Confirmed if exactly the relative schemes stand still, refuted if all absolute ones do;
    else partly. Without one of either kind there is nothing to compare.
    """
    relative, absolute = (set(kind) & set(present) for kind in (RELATIVE, ABSOLUTE))
    if not relative or not absolute:
        return "not judged"
    if set(still) == relative:
        return "confirmed"
    return "refuted" if absolute <= set(still) else "partly"


def judge(rows):
    schemes = distinct(rows, "scheme")
    moved = {}
    for scheme in schemes:
        logs = [abs(math.log(factor)) for factor in factors(rows, scheme).values()]
        if logs:
            moved[scheme] = max(logs)
    present = [scheme for scheme in schemes if scheme in SCHEMES]
    still = [scheme for scheme in present if moved.get(scheme, math.inf) < 0.01]
    told = []
    for scheme, log in moved.items():
        told.append(f"{math.exp(log):.{3 if log < 0.05 else 1}f} ({scheme})")
    return Verdict(
        "Relative schemes (RoPE, ALiBi) do not notice when all positions are shifted; absolute "
        "ones (learned, sinusoidal) do.",
        "Shifted by up to 1000 (learned: as far as its table reaches), perplexity moves by a "
        f"factor of at most {', '.join(told)}.",
        rule(still, present),
    )


def show(rows):
    schemes, L = distinct(rows, "scheme"), rows[0]["n"]
    columns = [*positions_to_try(L), *(f"read as {scheme}" for scheme in SCHEMES)]
    table, lines = [], {}
    for scheme in schemes:
        cells = (mean_std_text(values(rows, scheme=scheme, column=name)) for name in columns)
        table.append([scheme, *cells])
        moved = factors(rows, scheme)
        if moved:
            lines[scheme] = (list(moved), list(moved.values()))
    text = markdown_table(["trained with; perplexity at positions", *columns], table)
    failed = [row for row in rows if row["note"] and row["scheme"] not in SCHEMES]
    notes = dict.fromkeys(f"{row['scheme']}, {row['column']}: {row['note']}" for row in failed)
    if notes:
        text += f"\n– {'; '.join(notes)}.\n"
    if not lines:
        return text, None
    picture = Picture(
        lines,
        "The same text at positions that begin later",
        "all positions shifted by",
        "perplexity over that at its own positions",
        log=True,
    )
    return text, picture
