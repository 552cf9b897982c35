import dataclasses

import pytest
import torch

from experiments import theta
from experiments.theta import BASES, full_turns, rule
from lab import score
from lab.checkpoints import load
from lab.rows import select, values
from lab.stats import perplexity


def test_full_turns_by_hand():
    """Head width 32, 256 tokens: pair i turns in 2π·base^(i/16) tokens, so base^(i/16) ≤ 40.7."""
    turns = [full_turns(base, 32, 256) for base in (10, 100, 10_000, 1_000_000)]
    assert turns == [16, 13, 7, 5]
    assert full_turns(10_000, 2, 6) == 0 and full_turns(10_000, 2, 7) == 1


@pytest.mark.slow
def test_theta_trains_the_other_bases_once(setup):
    """…with the settings of the checkpoint it starts from; 10,000 is that checkpoint."""
    said, (run, rope) = [], setup.models_of("rope")[0]
    setup.how = dataclasses.replace(setup.how, say=said.append)
    rows = theta.measure(setup)
    assert not said
    assert theta.measure(setup) == rows
    assert len(said) == 5 and all("already trained" in line for line in said)
    near = load(setup.out / "theta" / "checkpoints" / "rope-base=10-seed0.pt")
    assert near.run == run.replace(scheme="rope:base=10")
    val = setup.corpus.val
    ends = score.fixed_ends(len(val), 1024, 8)
    for base, model in ((10, near.model()), (10_000, rope)):
        ppl = perplexity(score.fixed(model, val, 128, ends))
        found = values(rows, base=base, protocol="fixed", n=128)
        assert found == [pytest.approx(ppl, rel=1e-5)]
    plain = run.new_model()
    plain.load_state_dict(near.weights)  # the base is no weight, and it matters
    ids = torch.arange(64)[None]
    assert (plain(ids) - near.model()(ids)).abs().max() > 1e-4


def test_theta_wants_models_of_the_same_text(setup):
    setup.corpus = dataclasses.replace(setup.corpus, sha256="0123")
    with pytest.raises(ValueError, match="rope, seed 0, was trained on other text"):
        theta.measure(setup)


def test_theta_says_which_base_could_not_be_trained(setup):
    run, model = setup.models_of("rope")[0]
    setup.models = [(run.replace(lr=1e30, adam_lr=1e30), model)]
    with pytest.raises(ValueError, match="base 10, seed 0: loss "):
        theta.measure(setup)


def test_theta_needs_rope_and_long_enough_windows(setup):
    run, model = setup.models_of("rope")[0]
    setup.models = [(run.replace(train_lens=(32,), trained_len=32), model)]
    with pytest.raises(ValueError, match="the training length 32 is below 64"):
        theta.measure(setup)
    setup.models = [(run.replace(scheme="none"), model)]
    with pytest.raises(ValueError, match="it needs a checkpoint of rope"):
        theta.measure(setup)
    assert not (setup.out / "theta").exists()


def test_rule_of_theta():
    assert rule(near_sees_close=1.3, near_worse=1.1, far_worse=1.1) == "confirmed"
    assert rule(near_sees_close=1.3, near_worse=1.0, far_worse=1.1) == "partly"
    assert rule(near_sees_close=1.2, near_worse=1.0, far_worse=1.0) == "refuted"


def test_theta_tables_by_hand():
    rows = []
    for base in BASES:
        for seed in (0, 1):
            named = dict(base=base, seed=seed, train_len=64, pairs=8)
            rows.append(named | dict(metric="full turns", value=8 if base == 10 else 3))
            close = 0.9 if base == 10 else 0.5
            rows.append(named | dict(metric="attention", within=32, value=close))
            for n in (64, 1024):
                ppl = (4.0 if base == 10_000 else 5.0) + seed + (n == 1024) * 20
                for protocol in ("fixed", "span"):
                    rows.append(named | dict(metric="ppl", protocol=protocol, n=n, value=ppl))
    verdict = theta.judge(rows)
    assert verdict.verdict == "confirmed"
    assert "At 64, perplexity with base 10, 10,000 and 1,000,000 is 5.50, 4.50 and 5.50; the last "
    assert "get 90%, 50% and 50% of the attention. At 1,024 it is 25.5, 24.5" in verdict.measured
    assert "with base 10 all 8 pairs make a whole turn within 64 tokens" in verdict.measured
    table, picture = theta.show(rows)
    cells = "| 10 | 8 of 8 | 0.90 ± 0.00 | 5.50 ± 0.71 | 25.50 ± 0.71 | 64 | 5.50 ± 0.71 |"
    assert cells in table
    assert picture.lines["base 10,000"] == ([64, 1024], [4.5, 24.5])
    for row in select(rows, base=10, protocol="fixed", n=1024):
        row["value"] = None  # a loss too large to be given
    assert "At 1,024 it is inf, 24.5 and 25.5" in theta.judge(rows).measured
