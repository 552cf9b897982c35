import math

import pytest

from experiments import long
from experiments.long import rule
from lab import score
from lab.probes import first_break
from lab.rows import distinct, values


def test_long_reads_with_yarn_what_a_model_built_by_hand_reads(setup):
    rows = long.measure(setup)
    assert distinct(rows, "way") == ["none", "linear", "ntk", "dynamic", "yarn", "llama3"]
    run, model = setup.models_of("rope")[0]
    yarn = run.new_model(scheme="rope:scaling=yarn,factor=16,trained_len=64")
    yarn.load_state_dict(model.state_dict())
    val = setup.corpus.val
    length = len(val) // 1024 * 1024
    plain = score.span(model, val, 1024, length).mean(0)
    nats = score.span(yarn, val, 1024, length).mean(0)
    expected = {
        "ppl": nats.mean(),
        "ppl of the first": nats[:64].mean(),
        "ppl of the last": nats[-64:].mean(),
    }
    for metric, mean in expected.items():
        assert values(rows, way="yarn", metric=metric) == [pytest.approx(math.exp(mean))]
    breaks = first_break(nats, 64, plain[32:64].mean())
    assert values(rows, way="yarn", metric="breaks at") == ([] if breaks is None else [breaks])
    curve = values(rows, way="yarn", metric="nats")[0]
    assert len(curve) == 64 and curve[1] == pytest.approx(nats[16:32].mean(), abs=1e-5)


def test_rule_of_long():
    assert rule(breaks=True, unscaled=2.0, best=1.05) == "confirmed"
    assert rule(breaks=True, unscaled=2.0, best=1.2) == "partly"
    assert rule(breaks=True, unscaled=1.4, best=1.0) == "refuted"
    assert rule(breaks=False, unscaled=2.0, best=1.0) == "refuted"
    assert rule(breaks=True, unscaled=math.nan, best=1.0) == "refuted"


def test_long_tables_by_hand():
    rows = []
    for way, last, breaks in (("none", 8.0, 70), ("yarn", 4.1, None), ("ntk", 6.0, 100)):
        for seed in (0, 1):
            named = dict(way=way, seed=seed, train_len=64, n=1024)
            rows += [
                named | dict(metric="ppl", value=last - 1),
                named | dict(metric="ppl of the first", value=4.0),
                named | dict(metric="ppl of the last", value=last),
                named | dict(metric="breaks at", value=breaks and breaks + seed),
                named | dict(metric="nats", value=[1.0 + seed] * 64),
            ]
    verdict = long.judge(rows)
    assert verdict.verdict == "confirmed"
    assert "at position 70, 71, and the last 64 of 1,024 bytes have a perplexity 2.0 times" in (
        verdict.measured
    )
    assert verdict.measured.endswith("The best scaling, yarn, leaves a factor of 1.0.")
    table, picture = long.show(rows)
    assert "| none | 4.00 ± 0.00 | 8.00 ± 0.00 | 7.00 ± 0.00 | 70, 71 |" in table
    assert "| yarn | 4.00 ± 0.00 | 4.10 ± 0.00 | 3.10 ± 0.00 | nowhere, nowhere |" in table
    xs, ys = picture.lines["no scaling"]
    assert xs[:2] == [8, 24] and xs[-1] == 1016 and set(ys) == {1.5}


def test_long_needs_rope(setup):
    setup.models = setup.models[:2]
    with pytest.raises(ValueError, match="it needs a checkpoint of rope"):
        long.measure(setup)
