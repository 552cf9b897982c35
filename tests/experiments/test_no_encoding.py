import pytest

from experiments import no_encoding
from experiments.no_encoding import UNTRAINED, r2_by_block, rule
from lab.rows import distinct, select, values


def test_position_is_read_from_the_input_only_with_an_embedding_of_it(setup):
    rows = no_encoding.measure(setup)
    names = distinct(select(rows, metric="R2"), "scheme")
    assert names == [UNTRAINED, "learned", "sin", "rope", "alibi", "none"]
    r2 = {name: r2_by_block(rows, name) for name in names}
    assert all(len(blocks) == 3 for blocks in r2.values())
    assert r2["sin"][0] > 0.7 and abs(r2["none"][0]) < 0.05 and abs(r2["rope"][0]) < 0.05
    assert r2[UNTRAINED][2] > 0.1  # from the causal mask alone


def test_rule_of_no_encoding():
    assert rule(none=4.0, best_of_four=3.9, pairs=12) == "refuted"
    assert rule(none=5.0, best_of_four=3.9, pairs=12) == "partly"
    assert rule(none=11.0, best_of_four=3.9, pairs=12) == "confirmed"


def test_the_best_of_the_four_is_judged_and_own_schemes_are_only_shown():
    rows = []
    schemes = dict(rope=[4.0, 5.0], none=[9.0, 9.2], sin=[6.0, 6.0]) | {"my.py:Mine": [1.0, 1.0]}
    for scheme, found in schemes.items():
        for seed, ppl in enumerate(found):
            named = dict(scheme=scheme, seed=seed)
            rows.append(named | dict(metric="ppl", n=64, value=ppl))
            rows += [named | dict(metric="R2", block=i, value=i / 10) for i in range(3)]
    rows += [dict(scheme=UNTRAINED, seed=0, metric="R2", block=i, value=0.0) for i in range(3)]
    rows += [dict(metric="ppl of counts", value=value) for value in (26.2, 12.3)]
    verdict = no_encoding.judge(rows)
    assert verdict.verdict == "partly"
    assert verdict.measured.startswith("Perplexity 9.10, against 4.50 of the best of the four")
    assert "12.3 of counting which byte follows which, and 26.2 of counting" in verdict.measured
    assert "R² 0.20 after block 2" in verdict.measured
    table, picture = no_encoding.show(rows)
    assert "| my.py:Mine | 1.00 ± 0.00 | 0.00 | 0.10 | 0.20 |" in table
    assert f"| {UNTRAINED} | – | 0.00 | 0.00 | 0.00 |" in table
    assert picture.lines["rope"] == ([0, 1, 2], [0.0, 0.1, 0.2])


def test_no_encoding_says_which_scheme_is_missing(setup):
    everything = setup.models
    setup.models = [(run, model) for run, model in everything if run.scheme != "none"]
    with pytest.raises(ValueError, match="it needs a checkpoint of none"):
        no_encoding.measure(setup)
    setup.models = [(run, model) for run, model in everything if run.scheme == "none"]
    with pytest.raises(ValueError, match="it needs a checkpoint of learned or sin or rope or alib"):
        no_encoding.measure(setup)


def test_perplexity_of_counting_is_that_of_bytes_and_of_pairs(setup):
    singles, pairs = values(no_encoding.measure(setup), metric="ppl of counts")
    assert 1 < pairs < singles < 256
