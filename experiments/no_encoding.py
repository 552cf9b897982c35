"""A model without positions cannot learn order; and: the causal mask tells it where it is.

The perplexity of `none` is compared with that of the four encodings and of counting, and a linear
map is fitted that reads the position from the hidden states of each block.
"""

import numpy as np
import torch

from experiments.setup import POSITIONED, Picture, Verdict, mean_of
from lab import score
from lab.probes import count_model_ppl, hidden_states, probe
from lab.rows import distinct, select, values
from lab.stats import perplexity
from lab.tables import markdown_table, mean_std_text

UNTRAINED = "none, untrained"
WINDOWS = 64  # to fit the linear map on, and as many to test it


def untrained(run):
    """The network of `none` with random output projections, which training starts at zero."""
    torch.manual_seed(0)
    model = run.new_model(scheme="none")
    with torch.no_grad():
        for block in model.blocks:
            block.attention.out.weight.normal_(0, run.dim**-0.5)
            block.down.weight.normal_(0, (4 * run.dim) ** -0.5)
    return model


def measure(setup):
    """Perplexity and R² of the position by block of every model; perplexity of counting."""
    setup.models_of("none")
    setup.models_of(*POSITIONED)
    val, L = setup.corpus.val, setup.run.train_len
    size = WINDOWS * L
    parts = [np.array(val[start : start + size].reshape(-1, L)) for start in (0, size)]
    texts = [torch.from_numpy(part).to(setup.device) for part in parts]  # each (WINDOWS, L)
    rows = r2_rows(untrained(setup.run).to(setup.device), texts, dict(scheme=UNTRAINED, seed=0))
    length = score.span_length([L], score.SPAN_BYTES, len(val))
    for run, model in setup.models:
        named = dict(scheme=run.scheme, seed=run.seed)
        ppl = perplexity(score.span(model, val, L, length, setup.device))
        rows.append(named | dict(metric="ppl", n=L, value=ppl))
        rows += r2_rows(model, texts, named)
    for back in (0, 1):
        ppl = count_model_ppl(np.asarray(setup.corpus.train), np.asarray(val), back)
        rows.append(dict(metric="ppl of counts", bytes_back=back, n=L, value=ppl))
    return rows


def r2_rows(model, texts, named):
    """How well the position is read from the states before the first block and after each."""
    train, test = (hidden_states(model, ids) for ids in texts)
    r2 = [round(probe(a.cpu(), b.cpu()), 4) for a, b in zip(train, test)]
    return [named | dict(metric="R2", block=i, value=value) for i, value in enumerate(r2)]


def rule(none, best_of_four, pairs):
    """Refuted if none is within 10 % of the best of the four; confirmed if it is hardly better
    than counting which byte follows which; partly in between.
    """
    if none <= 1.1 * best_of_four:
        return "refuted"
    return "confirmed" if none >= 0.9 * pairs else "partly"


def judge(rows):
    scored = select(rows, metric="ppl")
    present = [scheme for scheme in distinct(scored, "scheme") if scheme in POSITIONED]
    best = min(mean_of(scored, scheme=scheme) for scheme in present)
    none = mean_of(scored, scheme="none")
    singles, pairs = values(rows, metric="ppl of counts")
    r2 = r2_by_block(rows, "none")
    deepest = max(range(len(r2)), key=r2.__getitem__)
    return Verdict(
        "Without an encoding the loss stays high, because the model cannot tell order.",
        f"Perplexity {none:.2f}, against {best:.2f} of the best of the four after the same "
        f"training, {pairs:.1f} of counting which byte follows which, and {singles:.1f} of "
        "counting bytes. From its hidden states a linear map reads the position with R² "
        f"{r2[deepest]:.2f} after block {deepest} (0: not at all, 1: exactly; {r2[0]:.2f} before "
        "the first block): the causal mask is all that can have told it.",
        rule(none, best, pairs),
    )


def r2_by_block(rows, scheme):
    """The mean R² over seeds, before the first block and after each."""
    rows = select(rows, metric="R2", scheme=scheme)
    return [mean_of(rows, block=block) for block in distinct(rows, "block")]


def show(rows):
    names = distinct(select(rows, metric="R2"), "scheme")
    r2 = {name: r2_by_block(rows, name) for name in names}
    blocks = list(range(len(r2[UNTRAINED])))
    L = select(rows, metric="ppl")[0]["n"]
    header = ["scheme", f"perplexity at {L}", "R² at the input"]
    header += [f"after block {block}" for block in blocks[1:]]
    table = []
    for name in names:
        ppl = mean_std_text(values(rows, metric="ppl", scheme=name))
        table.append([name, ppl, *(f"{value:.2f}" for value in r2[name])])
    picture = Picture(
        {name: (blocks, r2[name]) for name in names},
        "How well a linear map reads the position from the hidden states",
        "after block (0: the input)",
        "R² (1: exactly, 0: not at all)",
    )
    return markdown_table(header, table), picture
