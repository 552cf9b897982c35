from pathlib import Path

import pytest
import torch

from attend import attend
from lab.provenance import random_network
from pos_alibi import ALiBiAttention
from schemes.scheme import SCHEMES
from tiny_lm import TinyLM

SMALL = dict(dim=32, n_layer=2, n_head=4, trained_len=16, max_len=128)
OWN = Path(__file__).with_name("relations.py")
RELATIONS = [f"{OWN}:{name}" for name in ("Rotates", "Biased", "ByContent")]


def name_of(scheme):
    return str(scheme).split(":")[-1]


every_scheme = pytest.mark.parametrize("scheme", [*SCHEMES, *RELATIONS], ids=name_of)


def some_ids(*shape):
    return torch.randint(0, 256, shape, generator=torch.Generator().manual_seed(0))


# The network


@every_scheme
def test_starts_at_the_uniform_distribution(scheme):
    logits = TinyLM(scheme, **SMALL)(some_ids(2, 10))
    assert logits.shape == (2, 10, 256)
    assert torch.equal(logits, torch.zeros_like(logits))


@every_scheme
@pytest.mark.parametrize("training", [True, False])
def test_a_later_byte_moves_no_earlier_logit_and_an_earlier_one_does(scheme, training):
    model, ids = random_network(scheme=scheme, **SMALL).double(), some_ids(1, 80)
    with torch.set_grad_enabled(training):
        before = model(ids)
        for place in (0, 63, 64, 79):
            other = ids.clone()
            other[0, place] = (ids[0, place] + 1) % 256
            moved = (model(other) - before).abs().amax(-1)[0]
            assert (moved[:place] < 1e-12).all() and (moved[place:] > 1e-9).all()


@every_scheme
def test_training_and_reading_give_the_same_logits(scheme):
    model, ids = random_network(scheme=scheme, **SMALL).double(), some_ids(2, 100)
    trained = model(ids)
    with torch.no_grad():
        assert torch.allclose(trained, model(ids), atol=1e-10)


@pytest.mark.parametrize("scheme", SCHEMES)
def test_bytes_and_wide_integers_are_read_alike(scheme):
    model, ids = random_network(scheme=scheme, **SMALL), some_ids(2, 9)
    assert torch.equal(model(ids), model(ids.to(torch.uint8)))


@every_scheme
def test_only_none_cannot_tell_where_things_are(scheme):
    """With positions given, `none` ignores them and the others do not."""
    model, ids = random_network(scheme=scheme, **SMALL).double(), some_ids(2, 12)
    own, far = model(ids), torch.arange(12) * 5
    assert torch.allclose(model(ids, far), own, atol=1e-6) == (scheme == "none")
    assert torch.allclose(model(ids, torch.arange(12)), own, atol=1e-12)
    each = model(ids, torch.stack((torch.arange(12), far)))  # (B, T)
    assert torch.allclose(each[0], own[0], atol=1e-12)
    assert torch.allclose(each[1], model(ids, far)[1], atol=1e-12)


@pytest.mark.parametrize("scheme", [*SCHEMES, "rope:base=10", "learned:max_len=7"])
def test_common_weights_are_those_of_none(scheme):
    torch.manual_seed(3)
    plain = TinyLM("none", **SMALL).state_dict()
    torch.manual_seed(3)
    state = TinyLM(scheme, **SMALL).state_dict()
    assert set(plain) <= set(state)
    assert all(torch.equal(plain[name], state[name]) for name in plain)
    torch.manual_seed(4)
    other = TinyLM(scheme, **SMALL).state_dict()
    assert not torch.equal(other["embed.weight"], state["embed.weight"])


def test_no_position_table_but_the_learned_one():
    plain = TinyLM("none", **SMALL).state_dict()
    for scheme in ("sin", "rope", "alibi"):
        state = TinyLM(scheme, **SMALL).state_dict()
        assert {name: w.shape for name, w in state.items()} == {
            n: w.shape for n, w in plain.items()
        }
    assert set(TinyLM("learned", **SMALL).state_dict()) - set(plain) == {"position.weight"}
    assert TinyLM("learned", **SMALL).position.max_len == 128


@pytest.mark.parametrize("scheme", SCHEMES)
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_half_precision_copies(scheme, dtype):
    model, ids = random_network(scheme=scheme, **SMALL), some_ids(2, 40)
    exact = model(ids)
    low = model.to(dtype)(ids)
    assert low.dtype == dtype
    assert (low.float() - exact).abs().max() < 0.08 * exact.abs().max()


@pytest.mark.parametrize("scheme", SCHEMES)
def test_only_a_learned_table_ends(scheme):
    model, ids = random_network(scheme=scheme, **SMALL), some_ids(1, 129)
    if scheme == "learned":
        with pytest.raises(ValueError, match="position 128 has no row: max_len is 128"):
            model(ids)
    else:
        assert model(ids).isfinite().all()


MATRICES = [*SCHEMES, *RELATIONS, f"{OWN}:Biased:axes=3", f"{OWN}:Biased:axes=4", f"{OWN}:Wide"]


@pytest.mark.parametrize("scheme", MATRICES, ids=name_of)
def test_muon_trains_qkv_out_up_and_down_and_nothing_else(scheme):
    model = TinyLM(scheme, **SMALL)
    names = {id(weight): name for name, weight in model.named_parameters()}
    expected = [
        f"blocks.{i}.{layer}.weight"
        for i in range(2)
        for layer in ("attention.qkv", "attention.out", "up", "down")
    ]
    assert [names[id(weight)] for weight in model.matrices()] == expected


def test_a_second_derivative_is_refused():
    model = random_network(scheme="rope", **SMALL)
    loss = model(some_ids(2, 20)).square().sum()
    with pytest.raises(RuntimeError, match="cannot be differentiated twice"):
        torch.autograd.grad(loss, list(model.parameters()), create_graph=True)


def test_alibi_trains_in_bf16_as_the_plain_bias_says():
    """The strips get the bias through bfloat16 products; only rounding differs from float32."""
    torch.manual_seed(0)
    layer, x = ALiBiAttention(48, 12, attend=attend), torch.randn(2, 200, 48)
    with torch.no_grad():
        exact = layer(x)
    low = layer.bfloat16()(x.bfloat16().requires_grad_())
    assert (low.float() - exact).abs().max() < 0.03


def test_wrong_sizes():
    for scheme in (*SCHEMES, RELATIONS[1]):
        with pytest.raises(ValueError, match="dim=30 does not divide into n_head=4 heads"):
            TinyLM(scheme, dim=30, n_head=4)
        with pytest.raises(ValueError, match="n_layer=0"):
            TinyLM(scheme, n_layer=0)
    with pytest.raises(ValueError, match="head width 3: must be even"):
        TinyLM("rope", dim=12, n_head=4)
    with pytest.raises(ValueError, match="dim=9: must be even"):
        TinyLM("sin", dim=9, n_head=3)
    with pytest.raises(ValueError, match="window=-1"):
        TinyLM("rope", 16, 1, 2, window=-1)


# Windows


@every_scheme
@pytest.mark.parametrize("training", [True, False])
def test_a_window_hides_what_is_further_back(scheme, training):
    """Two blocks of window 5 see 2·4 bytes back and no further."""
    model = random_network(scheme=scheme, window=5, **SMALL).double()
    ids = some_ids(1, 30)
    other = ids.clone()
    other[0, 10] = (ids[0, 10] + 1) % 256
    with torch.set_grad_enabled(training):
        changed = (model(ids) - model(other)).abs().amax(-1)[0] > 1e-9
    assert changed.tolist() == [10 <= i <= 18 for i in range(30)]


@every_scheme
def test_a_window_of_everything_changes_nothing(scheme):
    full, windowed = (random_network(scheme=scheme, window=w, **SMALL).double() for w in (0, 30))
    ids = some_ids(1, 30)
    assert torch.allclose(full(ids), windowed(ids), atol=1e-12)


def test_a_window_needs_an_attention_that_can_have_one():
    with pytest.raises(ValueError, match="a window needs an attention class that takes `attend`"):
        TinyLM(f"{OWN}:Wide", 16, 1, 2, window=4)


@pytest.mark.parametrize("scheme", [*SCHEMES, "rope:scaling=dynamic,factor=2"])
def test_a_network_made_on_the_meta_device_reads_once_its_weights_are_there(scheme):
    model = random_network(scheme=scheme, **SMALL)
    with torch.device("meta"):
        empty = TinyLM(scheme, **SMALL)
    empty.to_empty(device="cpu")
    empty.load_state_dict(model.state_dict())
    ids = torch.randint(0, 256, (1, 9))
    assert torch.equal(empty(ids), model(ids))
