import math

import numpy as np
import pytest
import torch

from lab import score
from lab.stats import bootstrap, perplexity

DATA = np.random.default_rng(0).integers(0, 256, 20_000).astype(np.uint8)


def uniform(ids):
    return torch.zeros(*ids.shape, 256)


class LookUp:
    """Knows the previous byte and nothing else: row x of a table predicts what follows x."""

    def __init__(self):
        self.table = torch.randn(256, 256, generator=torch.Generator().manual_seed(0))

    def __call__(self, ids):
        return self.table[ids.long()]

    def nats(self, x, y):
        x, y = torch.from_numpy(x).long(), torch.from_numpy(y).long()
        return -self.table.double().log_softmax(-1)[x, y].numpy()


class Remembers:
    """Sure of the true next byte once it has seen `need` bytes, and knows nothing before."""

    def __init__(self, data, need):
        self.next = {tuple(data[i : i + 8]): data[i + 8] for i in range(len(data) - 8)}
        self.need = need

    def __call__(self, ids):
        logits = torch.zeros(*ids.shape, 256)
        for row in range(ids.shape[0]):
            for at in range(max(self.need, 8) - 1, ids.shape[1]):
                right = self.next[tuple(ids[row, at - 7 : at + 1].tolist())]
                logits[row, at, int(right)] = 1000
        return logits


# Both protocols


@pytest.mark.parametrize("n", [1, 64, 100, 256, 1000])
def test_uniform_logits_have_perplexity_256(n):
    nats = score.span(uniform, DATA, n, score.span_length([n], 10_000, len(DATA)))
    assert nats.mean() == pytest.approx(5.545177, abs=1e-6)
    assert perplexity(nats) == pytest.approx(256, rel=1e-6)
    assert bootstrap(nats) == pytest.approx((256, 256), rel=1e-6)
    if n >= score.K:
        nats = score.fixed(uniform, DATA, n, score.fixed_ends(len(DATA), n, 20))
        assert perplexity(nats) == pytest.approx(256, rel=1e-6)


def test_span_scores_a_model_of_the_previous_byte_alike_at_every_length():
    model, length = LookUp(), score.span_length([64, 128, 1024], 10_000, len(DATA))
    assert length == 9216
    expected = math.exp(model.nats(DATA[:length], DATA[1 : length + 1]).mean())
    for n in (64, 128, 1024):
        assert perplexity(score.span(model, DATA, n, length)) == pytest.approx(expected, rel=1e-6)


def test_fixed_scores_a_model_of_the_previous_byte_alike_at_every_length():
    model, ends = LookUp(), score.fixed_ends(len(DATA), 1024, 50)
    targets = ends[:, None] - np.arange(score.K)  # the last K targets end at the byte `end`
    expected = math.exp(model.nats(DATA[targets - 1], DATA[targets]).mean())
    for n in (64, 65, 128, 1000, 1024):
        nats = score.fixed(model, DATA, n, ends)
        assert nats.shape == (50, 64) and perplexity(nats) == pytest.approx(expected, rel=1e-6)


@pytest.mark.parametrize("n", [10, 50, 500])
def test_span_scores_every_target_once(n):
    data, seen = (np.arange(5000) % 251).astype(np.uint8), []

    def spy(ids):
        seen.append(ids)
        return uniform(ids)

    assert score.span(spy, data, n, 4000).shape == (4000 // n, n)
    assert np.array_equal(torch.cat(seen).flatten().numpy(), data[:4000])


@pytest.mark.parametrize("n", [128, 512])
def test_span_scores_early_targets_with_little_context(n):
    nats = score.span(Remembers(DATA, need=65), DATA, n, 2048)
    early = nats.reshape(-1, n)[:, :64]
    assert np.allclose(early, math.log(256)) and nats.sum() == pytest.approx(early.sum())


def test_fixed_gives_every_target_n_minus_64_bytes_of_context():
    model, ends = Remembers(DATA, need=65), score.fixed_ends(len(DATA), 512, 5)
    for n in (128, 512):
        assert score.fixed(model, DATA, n, ends).sum() == pytest.approx(0, abs=1e-9)
    assert score.fixed(model, DATA, 64, ends).mean() == pytest.approx(math.log(256))


# Places


def test_the_places_of_fixed_targets_do_not_move_with_the_longest_length():
    short, long = (score.fixed_ends(400_000, longest, 128) for longest in (2048, 16384))
    assert np.array_equal(short, long) and len(short) == 128
    assert short[0] == 32768 and short[-1] == 399_999 and np.diff(short).min() >= score.K


def test_fixed_targets_of_a_short_text_do_not_overlap():
    assert len(score.fixed_ends(1000, 700, 128)) == (1000 - 1 - 700) // score.K + 1
    assert list(score.fixed_ends(101, 100, 128)) == [100]


def test_a_span_is_the_largest_multiple_of_all_lengths_that_leaves_a_target():
    assert score.span_length([64, 256], 1024, 5000) == 1024
    assert score.span_length([64, 256], 1300, 5000) == 1280
    assert score.span_length([64], 1024, 1024) == 960  # the last byte is a target


def test_lengths_that_have_no_span_are_an_error():
    with pytest.raises(ValueError, match=r"all lengths \[7, 11, 13\] \(the smallest is 1,001\)"):
        score.span_length([7, 11, 13], 1000, 5000)


def test_fewer_bytes_than_fixed_targets_are_an_error():
    with pytest.raises(ValueError, match="63 < 64 targets"):
        score.fixed(uniform, DATA, 63, np.array([100]))


def test_too_little_text_for_fixed_windows_is_an_error():
    few = r"100 held-out bytes are too few for windows of 100 \(needed: 101\)"
    with pytest.raises(ValueError, match=few):
        score.fixed_ends(100, 100, 10)


# Batches


@pytest.mark.parametrize("tokens", [1, 500, 10**6])
def test_batch_size_changes_nothing(tokens):
    x, y = DATA[:6000].reshape(-1, 100), DATA[1:6001].reshape(-1, 100)
    nats = score.window_nats(LookUp(), x, y, 100, tokens_at_once=tokens)
    assert nats.dtype == np.float64 and nats == pytest.approx(LookUp().nats(x, y), abs=1e-5)


def test_logits_in_bfloat16_are_scored_in_float32():
    class Low(LookUp):
        def __call__(self, ids):
            return super().__call__(ids).bfloat16()

    x, y = DATA[:600].reshape(-1, 100), DATA[1:601].reshape(-1, 100)
    low = Low()
    low.table = low.table.bfloat16().float()
    nats = score.window_nats(low, x, y, 100)
    assert nats == pytest.approx(low.nats(x, y), abs=1e-5)


def test_memory_that_runs_out_is_met_with_a_smaller_batch():
    sizes = []

    def hungry(ids):
        sizes.append(len(ids))
        if len(ids) > 3:
            raise RuntimeError("DefaultCPUAllocator: can't allocate memory: you tried to")
        return uniform(ids)

    assert score.span(hungry, DATA, 100, 2000).shape == (20, 100)
    assert sizes[:4] == [20, 10, 5, 2] and sum(sizes[3:]) == 20


@pytest.mark.parametrize("message", ["CUDA out of memory", "shapes do not match"])
def test_what_no_smaller_batch_mends_is_raised(message):
    def broken(ids):
        raise RuntimeError(message)

    with pytest.raises(RuntimeError, match=message):
        score.span(broken, DATA, 100, 2000)


def test_gradients_are_not_recorded():
    weight = torch.zeros(256, requires_grad=True)

    def model(ids):
        logits = uniform(ids) + weight
        assert not logits.requires_grad
        return logits

    assert score.span(model, DATA, 100, 200).shape == (2, 100)
