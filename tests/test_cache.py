"""Read in any chunks with a cache, the outputs are those of one full pass."""

from pathlib import Path

import pytest
import torch

from attend import attend
from lab.provenance import random_network
from pos_alibi import ALiBiAttention
from schemes.rope_scaling import ScaledRoPEAttention
from schemes.scheme import SCHEMES
from tiny_lm import Attention, Cache, TinyLM

SMALL = dict(dim=32, n_layer=2, n_head=4, trained_len=16, max_len=300)
OWN = Path(__file__).with_name("relations.py")
RELATIONS = [f"{OWN}:{name}" for name in ("Rotates", "Biased", "ByContent")]
SCALINGS = [f"rope:scaling={name},factor=3" for name in ("linear", "ntk", "yarn", "llama3")]
EVERY = [*SCHEMES, "rope:interleaved=false", *SCALINGS, *RELATIONS]
T = 90  # more than a strip of 64, and than the trained length
IDS = torch.randint(0, 256, (2, T), generator=torch.Generator().manual_seed(0))
SIZES = {"one by one": [1] * T, "seven": [7] * 12 + [6], "uneven": [2, 70, 1, 1, 16]}
every_scheme = pytest.mark.parametrize(
    "scheme", EVERY, ids=lambda scheme: scheme.split("/")[-1].split(".py:")[-1]
)


def read(model, sizes, positions=None):
    """Logits of IDS read in chunks of these sizes."""
    caches = model.caches()
    chunks = [None] * len(sizes)
    if positions is not None:
        chunks = positions.split(sizes, -1)
    parts = zip(IDS.split(sizes, 1), chunks)
    return torch.cat([model(ids, at, caches) for ids, at in parts], 1)


@every_scheme
@pytest.mark.parametrize("sizes", SIZES)
def test_chunks_read_as_one_pass(scheme, sizes):
    model = random_network(scheme=scheme, **SMALL)
    with torch.no_grad():
        expected, logits = model(IDS), read(model, SIZES[sizes])
    assert logits.dtype == torch.float32 and (logits - expected).abs().max() < 1e-5


@every_scheme
@pytest.mark.parametrize("window", [1, 2, 10, 75, T, 200])
def test_chunks_read_as_one_pass_with_a_window(scheme, window):
    model = random_network(scheme=scheme, window=window, **SMALL)
    with torch.no_grad():
        expected = model(IDS)
        for sizes in ("one by one", "uneven"):
            assert (read(model, SIZES[sizes]) - expected).abs().max() < 1e-5


GIVEN = {
    "shifted": torch.arange(T) + 100,
    "with gaps": torch.arange(T) * 2 + 50 * (torch.arange(T) > 60),
    "packed": torch.arange(T) % 40,
    "of each sequence": torch.stack((torch.arange(T), torch.arange(T) * 3)),
    "padded on the left": torch.stack((torch.arange(T), (torch.arange(T) - 20).clamp(min=0))),
}


@every_scheme
@pytest.mark.parametrize("given", GIVEN)
@pytest.mark.parametrize("window", [0, 10])
def test_chunks_read_as_one_pass_at_given_positions(scheme, given, window):
    model = random_network(scheme=scheme, window=window, **SMALL)
    with torch.no_grad():
        expected = model(IDS, GIVEN[given])
        for sizes in ("seven", "uneven"):
            logits = read(model, SIZES[sizes], GIVEN[given])
            assert (logits - expected).abs().max() < 1e-5


@every_scheme
def test_positions_go_on_from_the_last_token(scheme):
    """Without positions a chunk is read at `seen` and on, whatever the cache keeps of it."""
    model = random_network(scheme=scheme, window=5, **SMALL)
    with torch.no_grad():
        caches = model.caches()
        model(IDS[:, :50], caches=caches)
        assert [cache.seen for cache in caches] == [50, 50]
        rest = model(IDS[:, 50:], caches=caches)
        caches = model.caches()
        model(IDS[:, :50], torch.arange(50), caches)
        assert (rest - model(IDS[:, 50:], torch.arange(50, T), caches)).abs().max() < 1e-5


@pytest.mark.parametrize("scheme", ["rope", "alibi", RELATIONS[2]], ids=["rope", "alibi", "own"])
def test_gradients_go_through_a_cache(scheme):
    model = random_network(scheme=scheme, **SMALL).double()
    weights = list(model.parameters())
    ours = torch.autograd.grad(read(model, SIZES["uneven"]).square().sum(), weights)
    expected = torch.autograd.grad(model(IDS).square().sum(), weights)
    assert all(torch.allclose(a, b, rtol=1e-8, atol=1e-8) for a, b in zip(ours, expected))


# Dynamic scaling follows the length, so it has the equality of one layer over the text so far


@pytest.mark.parametrize("window", [0, 10])
@pytest.mark.parametrize("positions", [None, "shifted", "of each sequence"])
def test_a_layer_with_dynamic_scaling_reads_each_chunk_as_the_text_so_far(window, positions):
    torch.manual_seed(0)

    def attend_in_window(q, k, v, **options):
        return attend(q, k, v, window=window, **options)

    options = dict(scaling="dynamic", factor=2, trained_len=16, attend=attend_in_window)
    layer, x = ScaledRoPEAttention(32, 4, **options), torch.randn(2, T, 32)
    given, cache, start = GIVEN.get(positions), Cache(window), 0
    with torch.no_grad():
        for size in SIZES["uneven"]:
            end = start + size
            at, so_far = (None if given is None else given[..., i:end] for i in (start, 0))
            y = layer(x[:, start:end], at, cache)
            assert (y - layer(x[:, :end], so_far)[:, start:]).abs().max() < 1e-5
            start = end
    assert cache.seen == T


def test_a_network_of_one_block_reads_with_dynamic_scaling_as_the_text_so_far():
    model = random_network(scheme="rope:scaling=dynamic,factor=2", **SMALL | dict(n_layer=1))
    caches = model.caches()
    with torch.no_grad():
        for start, end in ((0, 50), (50, 51), (51, 58)):
            logits = model(IDS[:, start:end], caches=caches)
            assert (logits - model(IDS[:, :end])[:, start:]).abs().max() < 1e-5


# What a cache keeps


@pytest.mark.parametrize("window", [1, 2, 5, 100])
def test_a_cache_keeps_what_the_tokens_to_come_can_see(window):
    cache, text = Cache(window), torch.arange(40.0).view(1, 40, 1)
    start = 0
    for size in (1, 1, 7, 20, 11):
        end = start + size
        k, at = cache.extend(text[:, start:end], torch.arange(start, end)[:, None])
        before = min(start, window - 1)
        assert torch.equal(k, text[:, start - before : end])  # all that was kept, and the new
        assert at.squeeze(-1).tolist() == list(range(start - before, end))
        keep = min(end, window - 1)
        assert [kept.shape[-2] for kept in cache.kept] == [keep, keep]
        for kept in cache.kept:  # and what was let go takes no memory
            assert kept.untyped_storage().nbytes() == kept.numel() * kept.element_size()
        assert cache.seen == end
        start = end


def test_a_cache_without_a_window_keeps_everything():
    cache, text = Cache(), torch.randn(2, 3, 12, 4)
    for part in text.split(5, 2):
        (k,) = cache.extend(part)
    assert torch.equal(k, text) and cache.seen == 12 and torch.equal(cache.kept[0], text)


@every_scheme
def test_caches_of_a_window_stay_small(scheme):
    model = random_network(scheme=scheme, window=10, **SMALL)
    caches = model.caches()
    assert len(caches) == 2 and all(cache.window == 10 for cache in caches)
    with torch.no_grad():
        for part in IDS.split(SIZES["uneven"], 1):
            model(part, caches=caches)
            assert all(kept.shape[-2] <= 9 for cache in caches for kept in cache.kept)


def test_caches_are_fresh():
    model = random_network(scheme="rope", **SMALL)
    with torch.no_grad():
        first = read(model, SIZES["seven"])
        assert torch.equal(first, read(model, SIZES["seven"]))
    assert model.caches()[0].kept is None


def test_an_attention_that_takes_no_cache_is_told():
    model = TinyLM(f"{OWN}:Wide", **SMALL)
    with pytest.raises(ValueError, match="Wide': its attention takes no cache"):
        model.caches()


@pytest.mark.parametrize("cls", [Attention, ScaledRoPEAttention, ALiBiAttention])
def test_half_precision_layers_keep_half_precision(cls):
    torch.manual_seed(0)
    layer, x, cache = cls(32, 4).bfloat16(), torch.randn(2, 40, 32).bfloat16(), Cache()
    with torch.no_grad():
        parts = [layer(part, cache=cache) for part in x.split(7, 1)]
        expected = layer.float()(x.float())
    assert all(kept.dtype == torch.bfloat16 for kept in cache.kept[:2])
    assert (torch.cat(parts, 1).float() - expected).abs().max() < 0.03


@pytest.mark.parametrize("scheme", ["rope", "alibi", "rope:scaling=dynamic,factor=2", "sin"])
def test_positions_of_all_sequences_may_meet_those_of_each(scheme):
    size = dict(dim=16, n_layer=1, n_head=2, trained_len=8, max_len=64)
    model, ids = random_network(scheme=scheme, **size), torch.randint(0, 256, (2, 9))
    whole, caches = model(ids), model.caches()
    first, rest = torch.arange(4), torch.arange(4, 9).repeat(2, 1)
    model(ids[:, :4], first, caches)
    assert torch.allclose(model(ids[:, 4:], rest, caches), whole[:, 4:], atol=1e-5)
