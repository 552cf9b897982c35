"""One run from beginning to end: what it is scored with, and what its clock counts."""

import time

import numpy as np
import pytest
import torch

from helpers import CPU, RUN, TWENTY
from lab import jobs, score
from lab.checkpoints import load
from lab.jobs import How, Job, train_run
from lab.provenance import signature
from lab.rows import values
from lab.stats import measured_ppl

DROP = """import torch
from torch import nn
class Drop(nn.Module):
    SCALE = 1.0
    def __init__(self, dim):
        super().__init__()
        self.rows = nn.Parameter(torch.randn(256, dim))
    def forward(self, positions):
        return self.SCALE * nn.functional.dropout(self.rows[positions], 0.5, self.training)
"""


class Text:
    """Stands in for a corpus."""

    train = val = np.tile(TWENTY, 3)


def quiet(**more):
    return How(say=lambda text: None, **more)


@pytest.fixture
def drop(tmp_path):
    (tmp_path / "own.py").write_text(DROP)
    return RUN.replace(scheme=f"{tmp_path / 'own.py'}:Drop")


def test_a_model_is_scored_without_dropout(drop, tmp_path):
    rows = train_run(drop, Text, tmp_path / "a.pt", CPU, quiet())
    model, length = load(tmp_path / "a.pt").model(), score.span_length([16], 131072, 6000)
    expected = measured_ppl(score.span(model, Text.val, 16, length))["value"]
    assert values(rows, metric="ppl", protocol="span") == [expected]


def test_watching_a_training_changes_nothing_of_it(drop, tmp_path):
    run = drop.replace(train_lens=(64,), max_len=256)
    torch.manual_seed(run.seed)
    weights = run.new_model().state_dict()  # those that the run begins with anyway
    plain = train_run(run, Text, tmp_path / "plain.pt", CPU, quiet())
    watched = train_run(run, Text, tmp_path / "watched.pt", CPU, quiet(), start=weights)
    assert values(plain, metric="loss") == values(watched, metric="loss")
    assert len(values(watched, protocol="fixed")) == 4  # before steps 0, 5 and 10, and at the end


def test_a_scheme_that_is_edited_in_training_keeps_the_signature_it_began_with(drop, tmp_path):
    before, real = signature(drop), jobs.train

    def edits(*arguments):
        (tmp_path / "own.py").write_text(DROP.replace("SCALE = 1.0", "SCALE = 0.1"))
        return real(*arguments)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(jobs, "train", edits)
        train_run(drop, Text, tmp_path / "a.pt", CPU, quiet())
    assert load(tmp_path / "a.pt", check=False).signature == before
    with pytest.raises(ValueError, match="behaves otherwise than when it was trained"):
        load(tmp_path / "a.pt")


def test_the_clock_goes_on_after_an_interruption_and_leaves_scoring_out(monkeypatch):
    now = [100.0]
    monkeypatch.setattr(time, "perf_counter", lambda: now[0])
    state = dict(watched={"step": [], "ppl": []}, seconds=7.0)
    job = Job(RUN.replace(train_lens=(64,)), Text, CPU, quiet(), state, watched=True)

    def slow(*arguments):
        now[0] += 50
        return np.zeros((2, 64))

    now[0] += 3
    monkeypatch.setattr(score, "fixed", slow)
    trained = type("Trained", (), {"model": RUN.new_model()})
    job.watch(0, trained)
    assert job.seconds() == 10.0 and job.watched == {"step": [0], "ppl": [1.0]}


def test_the_training_perplexity_is_that_of_the_last_tenth(monkeypatch):
    job = Job(RUN, Text, CPU, quiet(), None, watched=False)
    curve = dict(step=list(range(20)), loss=[5.0] * 18 + [1.0, 2.0])
    trained = type("Trained", (), {"model": RUN.new_model(), "curve": curve})
    rows, note = job.evaluate(trained)
    assert note == "" and values(rows, metric="train_ppl") == [pytest.approx(np.exp(1.5), abs=1e-4)]
