"""Relations of one's own: rotate only, bias only, and both, the bias following q."""

import copy
import math
import shutil
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F

from lab.provenance import random_network
from tiny_lm import TinyLM

SMALL = dict(dim=32, n_layer=2, n_head=4, trained_len=16, max_len=128)
OWN = Path(__file__).with_name("relations.py")
every_relation = pytest.mark.parametrize("name", ["Rotates", "Biased", "ByContent"])


def layer_by_the_formula(layer, x, positions, window=0):
    """Attention with its relation applied to all positions at once, in plain operations."""
    B, T, C = x.shape
    q, k, v = layer.qkv(x).view(B, T, 3, layer.n_head, -1).permute(2, 0, 3, 1, 4)
    if hasattr(layer.relation, "rotate"):
        q, k = layer.relation.rotate(q, k, positions, positions)
    score = q @ k.transpose(-1, -2) / math.sqrt(q.shape[-1])  # (B, H, T, T)
    if hasattr(layer.relation, "bias"):
        score = score + layer.relation.bias(q, k, positions, positions)
    order = torch.arange(T)[:, None] - torch.arange(T)
    hidden = (order < 0) | (order >= (window or T))
    weights = score.masked_fill(hidden, float("-inf")).softmax(-1)
    return layer.out((weights @ v).transpose(1, 2).reshape(B, T, C))


@every_relation
@pytest.mark.parametrize("window", [0, 5])
@pytest.mark.parametrize("training", [True, False])
def test_a_relation_is_applied_as_the_formula_says(name, window, training):
    """At its own positions, at others, and at those of each sequence; with its gradients."""
    model = random_network(scheme=f"{OWN}:{name}", window=window, **SMALL).double()
    layer, x = model.blocks[1].attention, torch.randn(2, 80, 32, dtype=torch.float64)
    own = torch.arange(80)
    for given in (None, own // 2 + 7, torch.stack((own, own.flip(0)))):
        positions = own if given is None else given
        expected = layer_by_the_formula(layer, x, positions, window)
        with torch.set_grad_enabled(training):
            y = layer(x, given)
        assert torch.allclose(y, expected, atol=1e-12)
        if training:
            weights, upstream = list(layer.parameters()), torch.randn_like(y)
            pairs = zip(*(torch.autograd.grad(z, weights, upstream) for z in (y, expected)))
            assert all(torch.allclose(a, b, atol=1e-10) and a.abs().max() > 0 for a, b in pairs)


@every_relation
def test_a_relation_trains(name):
    """The loss falls and the relation's own numbers move, in every block."""
    torch.manual_seed(0)
    model = TinyLM(f"{OWN}:{name}", **SMALL)
    before = {key: w.clone() for key, w in model.named_parameters() if "relation" in key}
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
    ids = torch.arange(70).remainder(20).repeat(4, 1)
    for _ in range(25):
        optimizer.zero_grad()
        loss = F.cross_entropy(model(ids[:, :-1]).flatten(0, 1), ids[:, 1:].flatten())
        loss.backward()
        optimizer.step()
    assert len(before) == 2 and loss < 1
    assert all(not torch.equal(model.get_parameter(key), w) for key, w in before.items())


def test_a_window_with_positions_that_jump():
    """ALiBi at positions that jump far takes the plain bias, and the window still holds."""
    model = random_network(scheme="alibi", window=3, **SMALL).double()
    layer, x = model.blocks[0].attention, torch.randn(2, 80, 32, dtype=torch.float64)
    positions = torch.arange(80) + 100_000 * (torch.arange(80) >= 40)

    class Plain:
        @staticmethod
        def bias(q, k, q_positions, k_positions):
            distance = (q_positions[:, None] - k_positions).abs()
            return -layer.slopes.double()[:, None, None] * distance

    y = layer(x, positions)
    layer.relation = Plain
    assert torch.allclose(y, layer_by_the_formula(layer, x, positions, 3), atol=1e-10)


@pytest.mark.slow
@pytest.mark.skipif(not shutil.which("gcc"), reason="torch.compile needs a C compiler here")
def test_a_bias_trains_in_a_compiled_network_as_in_a_plain_one():
    ids = torch.randint(0, 256, (2, 200), generator=torch.manual_seed(0))
    model = random_network(scheme=f"{OWN}:Biased", dim=16, n_layer=1, n_head=2, max_len=256)
    compiled = torch.compile(copy.deepcopy(model))
    for network in (model, compiled):
        network(ids).square().mean().backward()
    for plain, other in zip(model.parameters(), compiled.parameters()):
        assert torch.allclose(plain.grad, other.grad, atol=1e-4)
