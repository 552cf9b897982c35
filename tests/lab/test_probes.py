import math

import numpy as np
import pytest
import torch

from lab.probes import attention_by_distance, count_model_ppl, first_break, hidden_states, probe
from lab.provenance import random_network
from tiny_lm import TinyLM

SIZE = dict(dim=16, n_layer=2, n_head=2)
OWN = """
import torch
from torch import nn
import torch.nn.functional as F

class Bias(nn.Module):
    def __init__(self, n_head, head_dim, batched=False):
        super().__init__()
        self.n_head, self.batched = n_head, batched

    def bias(self, q, k, q_positions, k_positions):
        distance = q_positions[:, None] - k_positions
        slopes = 2.0 ** (-4 * (torch.arange(self.n_head) + 1))
        bias = -slopes[:, None, None] * distance
        return bias.expand(len(q), *bias.shape) if self.batched else bias

class Masked(nn.Module):  # causal by a mask of its own, of numbers or of booleans
    def __init__(self, dim, n_head, attend=F.scaled_dot_product_attention, numbers=False):
        super().__init__()
        self.n_head, self.attend, self.numbers = n_head, attend, numbers
        self.qkv = nn.Linear(dim, 3 * dim, bias=False)
        self.out = nn.Linear(dim, dim, bias=False)

    def forward(self, x, positions=None, cache=None):
        B, T, C = x.shape
        q, k, v = self.qkv(x).view(B, T, 3, self.n_head, -1).permute(2, 0, 3, 1, 4)
        seen = torch.ones(T, T, dtype=torch.bool).tril()
        mask = torch.zeros(T, T).masked_fill(~seen, -1e9) if self.numbers else seen
        y = self.attend(q, k, v, attn_mask=mask)
        return self.out(y.transpose(1, 2).reshape(B, T, C))

class Closed(Masked):
    def __init__(self, dim, n_head):
        super().__init__(dim, n_head)
        del self.attend

    def forward(self, x, positions=None):
        self.attend = F.scaled_dot_product_attention
        y = super().forward(x)
        del self.attend
        return y

class Deaf(Masked):  # takes `attend`, and does not call it
    def forward(self, x, positions=None, cache=None):
        return self.out(self.qkv(x)[..., -x.shape[-1]:])
"""


@pytest.fixture(autouse=True)
def without_gradients():
    """As models are read: with gradients another kernel computes the same."""
    with torch.no_grad():
        yield


@pytest.fixture(scope="module")
def own(tmp_path_factory):
    path = tmp_path_factory.mktemp("own") / "own.py"
    path.write_text(OWN)
    return f"{path}:"


def equal(head, distance):
    return 1.0


def falling(head, distance):
    """ALiBi's weights with 2 heads, whose slopes are 1/16 and 1/256."""
    return math.exp(-distance * 2 ** (-4 * (head + 1)))


def expected_weights(weight, n, queries):
    expected = np.zeros(n)
    for position in range(n - queries, n):
        for head in range(2):
            mass = [weight(head, distance) for distance in range(position + 1)]
            expected[: position + 1] += np.array(mass) / sum(mass) / queries / 2
    return expected


def with_equal_tokens(scheme, **size):
    """A model of which q·k is 0."""
    model = TinyLM(scheme, **SIZE, **size)
    for block in model.blocks:
        block.attention.qkv.weight.zero_()
    return model


@pytest.mark.parametrize(
    "scheme, weight",
    [
        ("none", equal),
        ("rope", equal),
        ("alibi", falling),
        ("Bias", falling),
        ("Bias:batched=true", falling),
        ("Masked", equal),
        ("Masked:numbers=true", equal),
    ],
)
def test_attention_by_distance_is_that_of_known_weights(scheme, weight, own):
    scheme = own + scheme if scheme[0].isupper() else scheme
    model, ids = with_equal_tokens(scheme), torch.randint(0, 256, (2, 40))
    kept = [block.attention.attend for block in model.blocks]
    measured = attention_by_distance(model, ids, queries=3)
    assert measured == pytest.approx(expected_weights(weight, 40, 3), abs=1e-6)
    assert measured.sum() == pytest.approx(1, abs=1e-5)
    assert [block.attention.attend for block in model.blocks] == kept


@pytest.mark.parametrize("scheme", ["none", "alibi", "Bias", "Masked"])
def test_nothing_is_attended_to_outside_the_window(scheme, own):
    scheme = own + scheme if scheme[0].isupper() else scheme
    model = TinyLM(scheme, **SIZE, window=5)
    measured = attention_by_distance(model, torch.randint(0, 256, (2, 40)), queries=3)
    assert measured[5:].sum() == 0 and measured.sum() == pytest.approx(1, abs=1e-5)


def test_looking_at_the_weights_does_not_change_the_logits(own):
    ids, logits = torch.randint(0, 256, (2, 40)), []
    for scheme in ("rope", "alibi", own + "Bias", own + "Masked"):
        model = random_network(scheme=scheme, **SIZE)

        def read(ids, model=model):
            logits.append(model(ids))

        attention_by_distance(model, ids, read=read)
        assert torch.equal(logits[-1], model(ids))


def test_weights_that_cannot_be_seen_are_refused(own):
    for name in ("Closed", "Deaf"):
        model = TinyLM(own + name, **SIZE)
        with pytest.raises(ValueError, match=f"{name}': its attention weights cannot be seen"):
            attention_by_distance(model, torch.zeros(1, 8, dtype=torch.uint8))


def test_attend_is_put_back_after_an_error():
    model = TinyLM("learned", **SIZE, max_len=8)
    kept = [block.attention.attend for block in model.blocks]
    with pytest.raises(ValueError, match="max_len is 8"):
        attention_by_distance(model, torch.zeros(1, 9, dtype=torch.uint8))
    assert [block.attention.attend for block in model.blocks] == kept


def test_hidden_states_run_from_the_embedding_to_what_the_head_reads():
    model, ids = random_network(scheme="sin", **SIZE), torch.randint(0, 256, (2, 12))
    states = hidden_states(model, ids)
    assert [state.shape for state in states] == [(2, 12, 16)] * 3
    assert torch.equal(states[0], model.embed(ids) + model.position(torch.arange(12)))
    assert torch.equal(model.head(model.norm(states[-1])), model(ids))
    assert not any(block._forward_hooks or block._forward_pre_hooks for block in model.blocks)


def test_probe_of_states_with_a_known_answer():
    torch.manual_seed(0)
    T, noise = torch.arange(50.0), torch.randn(2, 40, 50, 8)
    marked = noise.clone()
    marked[..., 3] = 0.1 * T + 5
    assert probe(*marked) == pytest.approx(1, abs=1e-3)
    assert abs(probe(*noise)) < 0.05
    half = noise.clone()  # position plus noise of the same variance: half of it can be explained
    half[..., 3] = (T - T.mean()) / T.std() + torch.randn(2, 40, 50)
    assert probe(*half) == pytest.approx(0.5, abs=0.03)


def test_count_models_by_hand():
    train, val = (np.frombuffer(text, np.uint8) for text in (b"abab", b"abb"))
    # after a: b twice of 2 + 256; after b: a once of 1 + 256. The text b, b is scored after a, b.
    assert count_model_ppl(train, val, 1) == pytest.approx(math.sqrt(258 / 3 * 257 / 1))
    # counts of b, a, b, one added: b 3, a 2, of 259
    assert count_model_ppl(train, val, 0) == pytest.approx(259 / 3)


def test_first_break_by_hand():
    nats = np.full(400, 2.0)
    assert first_break(nats, 64, 2.0) is None and first_break(nats, 64, 1.8) == 64
    nats[200:] = 4.0  # a mean over 32 passes 2.2 with the fourth broken position
    assert first_break(nats, 64, 2.0) == 200 - 28
    nats[:] = 2.19
    assert first_break(nats, 64, 2.0) is None
