import math

import numpy as np
import pytest
import torch

import score

DATA = np.random.default_rng(0).integers(0, 256, 20_000).astype(np.uint8)


def uniform(ids):
    return torch.zeros(*ids.shape, 256)


class LookUp:
    """Knows the previous byte and nothing else: row x of a fixed table predicts what follows x."""

    def __init__(self):
        self.table = torch.randn(256, 256, generator=torch.Generator().manual_seed(0))

    def __call__(self, ids):
        return self.table[ids.long()]

    def nats(self, x, y):
        return -self.table.double().log_softmax(-1)[torch.from_numpy(x).long(), torch.from_numpy(y).long()].numpy()


class Remembers:
    """Puts all weight on the true next byte once it has seen `need` bytes, else none: shows how much context a target had."""

    def __init__(self, data, need):
        self.next = {tuple(data[i:i + 8]): data[i + 8] for i in range(len(data) - 8)}
        self.need = need

    def __call__(self, ids):
        logits = torch.zeros(*ids.shape, 256)
        for row in range(ids.shape[0]):
            for at in range(max(self.need, 8) - 1, ids.shape[1]):
                logits[row, at, int(self.next[tuple(ids[row, at - 7:at + 1].tolist())])] = 1000
        return logits


@pytest.mark.parametrize("n", [1, 64, 100, 256, 1000])
def test_uniform_logits_give_256_everywhere(n):
    nats = score.span(uniform, DATA, n, score.span_length([n], 10_000, len(DATA)))
    assert nats.mean() == pytest.approx(5.545177, abs=1e-6) and score.perplexity(nats) == pytest.approx(256, rel=1e-6)
    assert nats.mean() / math.log(2) == pytest.approx(8, rel=1e-6)
    assert score.bootstrap(nats) == pytest.approx((256, 256), rel=1e-6)
    if n >= score.K:
        assert score.perplexity(score.fixed(uniform, DATA, n, score.fixed_ends(len(DATA), n, 20))) == pytest.approx(256, rel=1e-6)


@pytest.mark.parametrize("batch", [1, 500, 10**6])
def test_batch_size_changes_nothing(batch):
    x, y = DATA[:6000].reshape(-1, 100), DATA[1:6001].reshape(-1, 100)
    nats = score.window_nats(LookUp(), x, y, 100, tokens_at_once=batch)
    assert nats.dtype == np.float64 and nats == pytest.approx(LookUp().nats(x, y), abs=1e-5)


def test_a_model_of_the_previous_byte_scores_the_same_at_every_length():
    model, length = LookUp(), score.span_length([64, 128, 1024], 10_000, len(DATA))
    assert length == 9216
    expected = math.exp(model.nats(DATA[:length], DATA[1:length + 1]).mean())
    for n in (64, 128, 1024):
        assert score.perplexity(score.span(model, DATA, n, length)) == pytest.approx(expected, rel=1e-6)
    ends = score.fixed_ends(len(DATA), 1024, 50)
    targets = ends[:, None] - np.arange(score.K)  # the last K targets end at the byte `end`
    expected = math.exp(model.nats(DATA[targets - 1], DATA[targets]).mean())
    for n in (64, 65, 128, 1000, 1024):
        assert score.perplexity(score.fixed(model, DATA, n, ends)) == pytest.approx(expected, rel=1e-6)


def test_every_target_of_the_span_is_scored_once_whatever_the_length():
    data = (np.arange(5000) % 251).astype(np.uint8)
    seen = []
    def spy(ids):
        seen.append(ids)
        return torch.zeros(*ids.shape, 256)
    for n in (10, 50, 500):
        seen.clear()
        nats = score.span(spy, data, n, 4000)
        assert nats.shape == (4000 // n, n)
        assert np.array_equal(torch.cat(seen).flatten().numpy(), data[:4000])


def test_span_scores_early_targets_with_little_context_and_fixed_does_not():
    """A model that needs 65 bytes of context: under span, 64 of every n targets come too early; under fixed, none from n = 128 on."""
    model = Remembers(DATA, need=65)
    for n in (128, 512):
        nats = score.span(model, DATA, n, 2048)
        early = nats.reshape(-1, n)[:, :64]
        assert np.allclose(early, math.log(256)) and nats.sum() == pytest.approx(early.sum())
        assert score.fixed(model, DATA, n, score.fixed_ends(len(DATA), 512, 5)).sum() == pytest.approx(0, abs=1e-9)
    assert score.fixed(model, DATA, 64, score.fixed_ends(len(DATA), 512, 5)).mean() == pytest.approx(math.log(256))


def test_perplexity_is_the_exponential_of_the_mean_not_the_mean_of_exponentials():
    assert score.perplexity(np.array([[0.0, 0.0], [2.0, 2.0]])) == pytest.approx(2.718282, abs=1e-6)


def test_a_loss_that_has_no_perplexity_is_noted_and_stays_out_of_json():
    for value, nll, note in ((float("nan"), None, "loss nan nats"), (float("inf"), None, "loss inf nats"), (101.5, 101.5, "loss 101.5 nats")):
        row = score.scores(np.full((4, 3), value))
        assert (row["nll"], row["ppl"], row["low"], row["high"], row["note"]) == (nll, None, None, None, note)
    row = score.scores(np.array([[0.0, 0.0], [2.0, 2.0]]))
    assert (row["nll"], row["ppl"], row["targets"], row["note"]) == (1.0, 2.7183, 4, "") and 1 <= row["low"] < row["high"] <= math.exp(2) + 1e-3


def test_the_places_of_fixed_targets_do_not_move_with_the_longest_length():
    short, long = score.fixed_ends(400_000, 2048, 128), score.fixed_ends(400_000, 16384, 128)
    assert np.array_equal(short, long) and len(short) == 128
    assert short[0] == 32768 and short[-1] == 399_999 and np.diff(short).min() >= score.K
    assert len(score.fixed_ends(1000, 700, 128)) == (1000 - 1 - 700) // score.K + 1  # never overlapping targets
    assert list(score.fixed_ends(101, 100, 128)) == [100]


def test_bootstrap_interval_covers_and_narrows():
    generator = np.random.default_rng(1)
    nats = generator.normal(1.0, 0.5, (400, 1))
    low, high = score.bootstrap(nats)
    assert low < math.e ** nats.mean() < high
    assert math.log(high) - math.log(low) == pytest.approx(2 * 1.96 * 0.5 / math.sqrt(400), rel=0.15)  # the normal interval
    assert score.bootstrap(nats) == (low, high)  # the same every time


@pytest.mark.parametrize("ppl, usable", [
    ({256: 3.0, 512: 3.1, 1024: 3.15, 2048: 3.2}, 1024),  # 1.05 × 3 = 3.15 still counts
    ({256: 3.0, 512: 3.16}, 256),
    ({256: 3.0, 512: 4.0, 1024: 3.0}, 256),  # what comes after a break does not
    ({64: 9.0, 256: 3.0, 512: 2.9}, 512),  # lengths below the training length do not count
    ({256: 3.0, 512: None, 1024: 3.0}, 256),
    ({512: 3.0}, None)])
def test_usable_length(ppl, usable):
    assert score.usable_length(ppl, 256) == usable


def test_memory_that_runs_out_is_met_with_a_smaller_batch_first():
    sizes = []
    def hungry(ids):
        sizes.append(len(ids))
        if len(ids) > 3:
            raise RuntimeError("DefaultCPUAllocator: can't allocate memory: you tried to allocate 99 bytes")
        return torch.zeros(*ids.shape, 256)
    nats = score.span(hungry, DATA, 100, 2000)
    assert nats.shape == (20, 100) and sizes[:4] == [20, 10, 5, 2]
    def starved(ids):
        raise RuntimeError("CUDA out of memory")
    with pytest.raises(RuntimeError, match="out of memory"):
        score.span(starved, DATA, 100, 2000)
    def broken(ids):
        raise RuntimeError("shapes do not match")
    with pytest.raises(RuntimeError, match="shapes"):
        score.span(broken, DATA, 100, 2000)


def test_errors_name_the_numbers():
    with pytest.raises(ValueError, match=r"all lengths \[7, 11, 13\] \(the smallest is 1,001\)"):
        score.span_length([7, 11, 13], 1000, 5000)
    with pytest.raises(ValueError, match="63 < 64 targets"):
        score.fixed(uniform, DATA, 63, np.array([100]))
    with pytest.raises(ValueError, match=r"100 held-out bytes are too few for windows of 100 \(needed: 101\)"):
        score.fixed_ends(100, 100, 10)


@pytest.mark.parametrize("t, count, p", [(12.7062, 2, 0.05), (4.302653, 3, 0.05), (2.776445, 5, 0.05), (9.924843, 3, 0.01),
                                        (4.604095, 5, 0.01), (1.983972, 101, 0.05), (0, 7, 1.0)])
def test_p_value_of_the_paired_t_test(t, count, p):
    """Quantiles of Student's t from printed tables, for count − 1 degrees of freedom."""
    noise = np.random.default_rng(0).normal(size=count)
    noise = (noise - noise.mean()) / noise.std(ddof=1)  # mean 0, deviation 1
    for sign in (1, -1):
        assert score.paired_p(sign * (noise + t / math.sqrt(count)) * 3) == pytest.approx(p, rel=1e-3)


def test_p_value_of_differences_that_do_not_vary():
    assert score.paired_p([0.3]) is None and score.paired_p([]) is None
    assert score.paired_p([0.0, 0.0]) == 1 and score.paired_p([0.25, 0.25]) == 0


def test_holm_by_hand():
    assert score.holm([0.01, 0.04, 0.03]) == pytest.approx([0.03, 0.06, 0.06])
    assert score.holm([0.5, 0.9]) == pytest.approx([1, 1]) and score.holm([]) == []
