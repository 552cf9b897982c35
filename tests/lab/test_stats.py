import math

import numpy as np
import pytest

from lab.stats import (
    average,
    bootstrap,
    compare_pair,
    holm,
    mean_std,
    measured_ppl,
    paired_t,
    perplexity,
    tied_with_best,
    usable_length,
)

# Perplexity


def test_perplexity_is_the_exponential_of_the_mean_not_the_mean_of_exponentials():
    assert perplexity(np.array([[0.0, 0.0], [2.0, 2.0]])) == pytest.approx(2.718282, abs=1e-6)


@pytest.mark.parametrize("loss, note", [
    (float("nan"), "loss nan nats"),
    (float("inf"), "loss inf nats"),
    (101.5, "loss 101.5 nats"),
])  # fmt: skip
def test_a_loss_that_has_no_perplexity_is_noted(loss, note):
    row = measured_ppl(np.full((4, 3), loss))
    assert row == dict(metric="ppl", value=None, low=None, high=None, count=12, note=note)


def test_a_measured_perplexity_has_its_interval_and_count():
    row = measured_ppl(np.array([[0.0, 0.0], [2.0, 2.0]]))
    assert (row["metric"], row["value"], row["count"], row["note"]) == ("ppl", 2.7183, 4, "")
    assert 1 <= row["low"] < row["high"] <= math.exp(2) + 1e-3


def test_bootstrap_interval_is_about_the_normal_one():
    nats = np.random.default_rng(1).normal(1.0, 0.5, (400, 1))
    low, high = bootstrap(nats)
    assert low < math.e ** nats.mean() < high
    normal = 2 * 1.96 * 0.5 / math.sqrt(400)
    assert math.log(high) - math.log(low) == pytest.approx(normal, rel=0.15)


def test_bootstrap_is_the_same_every_time():
    nats = np.random.default_rng(2).normal(1.0, 0.5, (30, 4))
    assert bootstrap(nats) == bootstrap(nats)


def test_bootstrap_draws_windows_and_not_targets():
    alike = np.tile(np.random.default_rng(3).normal(1, 0.5, 50), (20, 1))  # all windows the same
    low, high = bootstrap(alike)
    assert low == pytest.approx(high)


def test_mean_and_sample_deviation_by_hand():
    assert mean_std([2.0, 3.0, 7.0]) == pytest.approx((4.0, 7**0.5))
    assert mean_std([2.5]) == (2.5, 0.0)


def test_an_average_with_a_missing_perplexity_is_infinite():
    assert average([1.0, 2.0]) == 1.5 and average([1.0, None]) == math.inf


@pytest.mark.parametrize("ppl, usable", [
    ({256: 3.0, 512: 3.1, 1024: 3.15, 2048: 3.2}, 1024),  # 1.05 × 3 = 3.15 still counts
    ({256: 3.0, 512: 3.16}, 256),
    ({256: 3.0, 512: 4.0, 1024: 3.0}, 256),  # what comes after a break does not
    ({64: 9.0, 256: 3.0, 512: 2.9}, 512),  # lengths below the training length do not count
    ({256: 3.0, 512: None, 1024: 3.0}, 256),
    ({256: None, 512: 3.0}, None),
    ({512: 3.0}, None),
])  # fmt: skip
def test_usable_length_ends_where_perplexity_rises_by_5_percent(ppl, usable):
    assert usable_length(ppl, 256) == usable


# Paired tests


@pytest.mark.parametrize("t, count, p", [
    (12.7062, 2, 0.05), (4.302653, 3, 0.05), (2.776445, 5, 0.05), (9.924843, 3, 0.01),
    (4.604095, 5, 0.01), (1.983972, 101, 0.05), (0, 7, 1.0),
])  # fmt: skip
def test_p_value_of_the_paired_t_test_is_that_of_printed_tables(t, count, p):
    noise = np.random.default_rng(0).normal(size=count)
    noise = (noise - noise.mean()) / noise.std(ddof=1)  # mean 0, deviation 1
    for sign in (1, -1):
        differences = sign * (noise + t / math.sqrt(count)) * 3
        assert paired_t(differences) == pytest.approx(p, rel=1e-3)


def test_fewer_than_two_differences_have_no_p_value():
    assert paired_t([0.3]) is None and paired_t([]) is None


def test_differences_that_do_not_vary_are_decided():
    assert paired_t([0.0, 0.0]) == 1 and paired_t([0.25, 0.25]) == 0


def test_holm_by_hand():
    assert holm([0.01, 0.04, 0.03]) == pytest.approx([0.03, 0.06, 0.06])
    assert holm([0.5, 0.9]) == pytest.approx([1, 1]) and holm([]) == []


def by_window(values):
    """{seed: nats of two windows whose mean is the value}."""
    return {seed: np.array([value - 0.1, value + 0.1]) for seed, value in enumerate(values)}


def test_a_pair_is_compared_over_the_seeds_that_both_have():
    a, b = by_window([1.0, 1.1, 1.2]), by_window([1.5, 1.6, 1.71, 9.0])
    found = compare_pair(a, b)
    assert found["over"] == "3 seeds" and found["p"] < 1e-4
    assert found["nats_a_minus_b"] == pytest.approx(-0.50333, abs=1e-5)


def test_a_pair_of_one_seed_is_compared_over_its_windows():
    a, b = {1: np.array([1.0, 1.1, 1.3])}, {0: np.ones(3), 1: np.array([1.1, 1.1, 1.35])}
    found = compare_pair(a, b)
    assert found["over"] == "3 windows" and found["nats_a_minus_b"] == pytest.approx(-0.05)
    assert found["p"] == pytest.approx(paired_t([-0.1, 0, -0.05]), rel=1e-2)


def test_one_window_of_one_seed_has_no_p_value():
    found = compare_pair({0: np.array([1.0])}, {0: np.array([2.0])})
    assert found == dict(nats_a_minus_b=-1.0, p=None, over="1 windows")


def test_a_pair_without_a_common_seed_is_not_compared():
    assert compare_pair(by_window([1.0]), {1: np.ones(2)}) is None


def compared(lines):
    """Every pair of {name: means over seeds}, compared."""
    names, pairs = list(lines), []
    for i, a in enumerate(names):
        for b in names[i + 1 :]:
            pairs.append(dict(a=a, b=b) | compare_pair(by_window(lines[a]), by_window(lines[b])))
    return pairs


def test_what_the_test_cannot_tell_from_the_best_is_tied_with_it():
    lines = {"a": [1.0, 1.1, 1.2], "b": [1.5, 1.6, 1.71], "c": [1.01, 1.08, 1.22]}
    assert tied_with_best(compared(lines)) == {"a", "c"}


def test_without_pairs_there_is_no_best():
    assert tied_with_best([]) == {None}


def test_what_is_much_worse_is_never_tied_with_the_best():
    pairs = compared({"a": [1.0, 1.0, 1.0], "b": [1.1, 1.2, 2.2]})
    assert pairs[0]["p"] > 0.05  # three seeds decide little: b is worse by 0.5 ± 0.6 nats
    assert tied_with_best(pairs) == {"a"}


def test_ties_go_by_holm_and_not_by_each_p_alone():
    lines = {"a": [1.0] * 3, "b": [1.010, 1.012, 1.015], "c": [1.010, 1.012, 1.016]}
    pairs = compared(lines)
    assert [pair["p"] < 0.02 for pair in pairs] == [True, True, False]
    assert tied_with_best(pairs) == {"a"}  # twice 0.014 is below 0.05
    more = {f"d{i}": [1.010, 1.012, 1.016 + i / 1e4] for i in range(4)}
    assert tied_with_best(compared(lines | more)) >= {"a", "b", "c"}  # six times is not


def test_the_best_need_not_come_first():
    lines = {"a": [1.5, 1.6, 1.71], "b": [1.0, 1.1, 1.2], "c": [1.5, 1.61, 1.7]}
    assert tied_with_best(compared(lines)) == {"b"}
