import pytest
import torch

from bench.peers import FUSED, PLAIN, peers
from lab.runs import Run
from schemes.scheme import SCHEMES

L, DIM = 32, 64
RUN = Run(dim=DIM, n_layer=2, n_head=2, train_lens=(L,), trained_len=L, max_len=L)
MODELS = [
    pytest.param(scheme, name, attention, id=f"{scheme}, {name}, {attention}")
    for scheme in SCHEMES
    for name, (_, attentions) in peers(scheme, RUN).items()
    for attention in attentions
]


def new_peer(scheme, name, attention):
    make, _ = peers(scheme, RUN)[name]
    return make(attention).eval()


def count(model):
    return sum(weight.numel() for weight in model.parameters())


@pytest.mark.parametrize("scheme, name, attention", MODELS)
def test_peer_is_causal(scheme, name, attention):
    ids = torch.arange(L).repeat(2, 1)
    ids[1, 20] += 1
    with torch.no_grad():
        logits = new_peer(scheme, name, attention)(ids)
    assert logits.shape == (2, L, 256)
    assert torch.allclose(*logits[:, :20], atol=1e-5)
    assert not torch.allclose(*logits[:, 20], atol=1e-5)


@pytest.mark.parametrize("scheme, name, attention", MODELS)
def test_peer_is_of_our_size(scheme, name, attention):
    ours = count(RUN.new_model(scheme=scheme))
    assert abs(count(new_peer(scheme, name, attention)) - ours) < 0.2 * ours


@pytest.mark.parametrize("scheme, name, attention", MODELS)
def test_only_learned_peers_have_a_row_for_each_position(scheme, name, attention):
    shapes = [weight.shape for weight in new_peer(scheme, name, attention).parameters()]
    assert ((L, DIM) in shapes) == (scheme == "learned")


@pytest.mark.parametrize("scheme", SCHEMES)
def test_fused_and_plain_attention_are_the_same_function(scheme):
    ids = torch.arange(L)[None]
    for make, attentions in peers(scheme, RUN).values():
        logits = []
        for attention in attentions:
            torch.manual_seed(0)
            with torch.no_grad():
                logits.append(make(attention).eval()(ids))
        assert set(attentions) in ({FUSED, PLAIN}, {PLAIN})
        assert all(torch.allclose(logits[0], other, atol=1e-5) for other in logits)
