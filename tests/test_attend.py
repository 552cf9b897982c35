"""attend.attend against softmax(q·k·scale + bias)·v in double, on each of its paths."""

import pytest
import torch
import torch.nn.functional as F

import attend as module
from attend import CausalStrips, attend, bias_of_strips


def formula(q, k, v, scale=None, window=0, bias=0, causal=True, seen=True):
    """Every score and every mask at once; the queries are the last T of S tokens."""
    T, S = q.shape[-2], k.shape[-2]
    distance = torch.arange(S - T, S)[:, None] - torch.arange(S)  # (T, S)
    hidden = (distance < 0) & torch.tensor(causal)
    if window:
        hidden = hidden | (distance >= window)
    scale = q.shape[-1] ** -0.5 if scale is None else scale
    scores = (q @ k.transpose(-1, -2) * scale + bias).masked_fill(hidden, float("-inf"))
    if seen is not True:
        scores = scores.masked_fill(~seen, float("-inf"))
    return scores.softmax(-1) @ v


def heads(T, S=None, B=2, H=3, D=8, Dv=8, dtype=torch.float64, grad=False):
    """Random q (B, H, T, D), k (B, H, S, D) and v (B, H, S, Dv)."""
    torch.manual_seed(0)
    S = S or T
    shapes = ((B, H, T, D), (B, H, S, D), (B, H, S, Dv))
    return [torch.randn(shape).to(dtype).requires_grad_(grad) for shape in shapes]


def same_gradients(ours, expected, inputs, tolerance=1e-11):
    upstream = torch.randn_like(ours)
    pairs = (torch.autograd.grad(y, inputs, upstream) for y in (ours, expected))
    for a, b in zip(*pairs):
        assert torch.allclose(a, b, atol=tolerance)


class Table:
    """A bias with parameters of its own: a row per head, indexed by the distance.

    With q, every query multiplies its bias by its first channel, so that it is (B, H, t, s).
    """

    def __init__(self, H, T, S, q=None):
        generator = torch.Generator().manual_seed(7)
        rows = torch.randn(H, S, dtype=torch.float64, generator=generator)
        self.rows, self.T, self.S, self.q = rows.requires_grad_(), T, S, q

    def __call__(self, start, end, first, last):
        queries = torch.arange(start, end)[:, None] + self.S - self.T
        distance = (queries - torch.arange(first, last)).clamp(min=0)
        bias = self.rows[:, distance]  # (H, t, s)
        if self.q is None:
            return bias
        return bias * self.q[..., start:end, :1]  # (B, H, t, s)

    def whole(self):
        return self(0, self.T, 0, self.S)


# The strips of training


ROUNDING = [(torch.float64, 1e-12), (torch.float32, 1e-4), (torch.bfloat16, 0.05)]


@pytest.mark.parametrize("T", [1, 7, 64, 65, 128, 300])
@pytest.mark.parametrize("dtype, tolerance", ROUNDING)
def test_strips_equal_the_formula(T, dtype, tolerance):
    """Output and gradients of the rounded numbers; v may be of another width."""
    ours = heads(T, Dv=5, dtype=dtype, grad=True)
    plain = [x.detach().double().requires_grad_() for x in ours]
    y, expected = CausalStrips.apply(*ours, 0.3), formula(*plain, scale=0.3)
    upstream = torch.randn(y.shape).to(dtype)
    y.backward(upstream)
    expected.backward(upstream.double())
    assert y.dtype == dtype and (y.double() - expected).abs().max() < tolerance
    for a, b in zip(ours, plain):
        bound = tolerance * max(1, b.grad.abs().max().item())
        assert a.grad.dtype == dtype and (a.grad.double() - b.grad).abs().max() < bound


@pytest.mark.parametrize("T", [1, 64, 130])
@pytest.mark.parametrize("per_sequence", [False, True])
def test_strips_with_a_bias_equal_the_formula(T, per_sequence):
    """Gradients reach q, k, v and what the bias is made of."""
    q, k, v = heads(T, grad=True)
    table = Table(3, T, T, q if per_sequence else None)
    strips = bias_of_strips(table, T, q.dtype)
    assert [strip.shape[-1] for strip in strips] == [min(end, T) for end in range(64, T + 64, 64)]
    ours = attend(q, k, v, is_causal=True, bias=table)
    assert type(ours.grad_fn).__name__ == "CausalStripsBackward"
    expected = formula(q, k, v, bias=table.whole())
    assert torch.allclose(ours, expected, atol=1e-12)
    same_gradients(ours, expected, (q, k, v, table.rows))


@pytest.mark.parametrize("shape", [(1, 1, 1), (3, 1, 1), (3, 1, 70), (2, 1, 1, 70), (2, 3, 1, 1)])
def test_strips_add_a_bias_of_any_shape_that_broadcasts(shape):
    """And its gradient comes back in that shape."""
    q, k, v = heads(70, grad=True)
    given = torch.randn(shape, dtype=torch.float64, requires_grad=True)

    def bias(start, end, first, last):
        return given[..., first:last]  # which leaves an axis of length 1 as it is

    ours, expected = attend(q, k, v, is_causal=True, bias=bias), formula(q, k, v, bias=given)
    assert torch.allclose(ours, expected, atol=1e-12)
    same_gradients(ours, expected, (q, k, v, given))


def test_strips_refuse_a_second_derivative():
    """torch.autograd.grad must not go past the strips in silence."""
    q, k, v = heads(20, grad=True)
    loss = attend(q, k, v, is_causal=True).square().sum()
    with pytest.raises(RuntimeError, match="cannot be differentiated twice"):
        torch.autograd.grad(loss, (q, k, v), create_graph=True)


# Windows, masks and biases


WINDOWS = [
    (1, 1, 1),
    (5, 5, 1),
    (64, 64, 10),
    (65, 65, 64),
    (200, 200, 64),
    (130, 130, 100),
    (300, 300, 7),
    (300, 300, 299),
    (40, 40, 100),  # wider than the text
    (1, 30, 4),  # one query after cached keys
    (7, 20, 5),
    (70, 200, 90),
    (70, 200, 1),
    (150, 151, 65),
]


@pytest.mark.parametrize("T, S, window", WINDOWS)
@pytest.mark.parametrize("biased", [False, True])
def test_a_window_equals_the_formula(T, S, window, biased):
    q, k, v = heads(T, S, grad=True)
    table, inputs = None, (q, k, v)
    if biased:
        table = Table(3, T, S)
        inputs = (*inputs, table.rows)
    expected = formula(q, k, v, window=window, bias=table.whole() if biased else 0)
    ours = attend(q, k, v, is_causal=True, window=window, bias=table)
    assert torch.allclose(ours, expected, atol=1e-12)
    same_gradients(ours, expected, inputs)
    with torch.no_grad():
        read = attend(q, k, v, is_causal=True, window=window, bias=table)
    assert torch.allclose(read, expected, atol=1e-12)


@pytest.mark.parametrize("T, S", [(1, 9), (2, 9), (300, 300), (257, 600), (600, 600)])
@pytest.mark.parametrize("per_sequence", [False, True])
@pytest.mark.parametrize("window", [0, 70])
def test_a_bias_without_gradients_equals_the_formula(T, S, per_sequence, window):
    q, k, v = heads(T, S, D=4, Dv=4)
    table = Table(3, T, S, q if per_sequence else None)
    with torch.no_grad():
        ours = attend(q, k, v, is_causal=True, bias=table, window=window)
        expected = formula(q, k, v, bias=table.whole(), window=window)
    assert torch.allclose(ours, expected, atol=1e-12)


def test_no_bias_or_mask_of_all_queries_is_ever_made():
    """Strips, of 64 queries or as wide as the window, on the keys they may see and no others."""
    calls = []

    def bias(start, end, first, last):
        calls.append((start, end, first, last))
        return torch.zeros(1, end - start, last - first)

    q, k, v = heads(600, dtype=torch.float32)
    with torch.no_grad():
        attend(q, k, v, is_causal=True, bias=bias)
        attend(q, k, v, is_causal=True, bias=bias, window=300)
        attend(q[..., -5:, :], k, v, is_causal=True, bias=bias, window=100)
    assert calls[:3] == [(0, 256, 0, 256), (256, 512, 0, 512), (512, 600, 0, 600)]
    assert calls[3:5] == [(0, 300, 0, 300), (300, 600, 1, 600)]
    assert calls[5:] == [(0, 5, 496, 600)]


@pytest.mark.parametrize("T, S", [(90, 90), (30, 90)])
@pytest.mark.parametrize("rank", [2, 4])
def test_a_window_with_a_mask(T, S, rank):
    """A boolean mask shows every second key; a bias hides them by −∞. No window sees ahead."""
    q, k, v = heads(T, S)
    distance = torch.arange(S - T, S)[:, None] - torch.arange(S)
    mask = (distance % 2 == 0).view(*(1,) * (rank - 2), T, S)
    bias = torch.randn(T, S, dtype=torch.float64).masked_fill(~mask, float("-inf"))
    for with_mask, options in ((mask, dict(seen=mask)), (bias, dict(bias=bias))):
        ours = attend(q, k, v, attn_mask=with_mask, window=7)
        assert torch.allclose(ours, formula(q, k, v, window=7, **options), atol=1e-12)


@pytest.mark.parametrize("kind", [torch.bool, torch.float64])
@pytest.mark.parametrize("causal", [True, False])
def test_a_mask_beside_a_bias(kind, causal):
    """attn_mask, of each sequence and for all queries, is added to what the function says."""
    q, k, v = heads(80)
    table, mask = Table(3, 80, 80), torch.ones(2, 1, 1, 80, dtype=kind)
    mask[1, ..., 20:60] = 0
    expected = dict(bias=table.whole() + mask)
    if kind == torch.bool:
        expected = dict(bias=table.whole(), seen=mask)
    with torch.no_grad():
        ours = attend(q, k, v, attn_mask=mask, is_causal=causal, bias=table)
        assert torch.allclose(ours, formula(q, k, v, causal=causal, **expected), atol=1e-12)


@pytest.mark.parametrize("T", [1, 30, 90])
@pytest.mark.parametrize("kind", [torch.bool, torch.float64])
def test_a_mask_beside_the_causal_one(T, kind):
    q, k, v = heads(T, 90)
    mask = torch.ones(T, 90, dtype=kind)
    mask[:, 0:90:3] = 0
    mask[:, 0] = 1  # so that every query sees a key
    expected = formula(q, k, v, **(dict(seen=mask) if kind == torch.bool else dict(bias=mask)))
    assert torch.allclose(attend(q, k, v, attn_mask=mask, is_causal=True), expected, atol=1e-12)


# The fused kernel


@pytest.mark.parametrize("T, S", [(70, 70), (1, 70), (9, 70)])
@pytest.mark.parametrize("training", [True, False])
def test_causal_queries_are_the_last_tokens(T, S, training):
    q, k, v = heads(T, S, grad=training)
    ours, expected = attend(q, k, v, is_causal=True), formula(q, k, v)
    assert torch.allclose(ours, expected, atol=1e-12)
    if training:
        same_gradients(ours, expected, (q, k, v))


PLAIN = [dict(is_causal=True), dict(is_causal=True, scale=0.1), dict(), dict(attn_mask=True)]


@pytest.mark.parametrize("options", PLAIN)
@pytest.mark.parametrize("training", [True, False])
def test_attend_is_torchs_attention(options, training):
    """With a v of another width as well, as ALiBi has it."""
    q, k, v = heads(70, H=4, D=16, Dv=16, dtype=torch.float32)
    if "attn_mask" in options:
        options = dict(attn_mask=torch.randn(4, 70, 70))
    expected = F.scaled_dot_product_attention(q, k, v, **options)
    q.requires_grad_(training)
    assert torch.allclose(attend(q, k, v, **options), expected, atol=1e-5)
    narrow = attend(q, k, v[..., :5], **options)
    assert narrow.shape == (2, 4, 70, 5)
    assert torch.allclose(narrow, expected[..., :5], atol=1e-5)


def test_unlike_shapes_in_training_are_left_to_torch():
    q, k, v = heads(70, H=4, dtype=torch.float32)
    for a, b in ((q[0, 0], k[0, 0]), (q, k[:1]), (q[:, :3], k[:, :1])):
        expected = F.scaled_dot_product_attention(a, b, b, is_causal=True)
        ours = attend(a.clone().requires_grad_(), b, b, is_causal=True)
        assert torch.allclose(ours, expected, atol=1e-5)


@pytest.mark.parametrize("T, in_strips", [(1024, True), (1025, False)])
def test_only_short_training_sequences_go_in_strips(T, in_strips):
    q, k, v = heads(T, B=1, H=1, D=2, Dv=2, dtype=torch.float32, grad=True)
    y = attend(q, k, v, is_causal=True)
    assert (type(y.grad_fn).__name__ == "CausalStripsBackward") == in_strips
    assert torch.allclose(y, formula(q, k, v), atol=1e-5)


def test_a_long_training_sequence_with_a_bias_gives_gradients():
    q, k, v = heads(1100, B=1, H=1, D=2, Dv=2, grad=True)
    table = Table(1, 1100, 1100)
    ours = attend(q, k, v, is_causal=True, bias=table)
    expected = formula(q, k, v, bias=table.whole())
    assert torch.allclose(ours, expected, atol=1e-12)
    same_gradients(ours, expected, (q, k, v, table.rows))


@pytest.mark.parametrize("function", [module.fused, attend])
def test_the_fused_kernel_gets_one_width(monkeypatch, function):
    """Of unlike widths torch takes its slow path, with the same numbers."""
    widths = []

    def record(q, k, v, **options):
        widths.append((q.shape[-1], k.shape[-1], v.shape[-1]))
        return v

    monkeypatch.setattr(F, "scaled_dot_product_attention", record)
    q, _, v = heads(5, D=12, Dv=4)
    assert torch.equal(function(q, q, v, is_causal=True), v)
    assert torch.equal(function(q, q, q, is_causal=True), q)
    assert widths == [(12, 12, 12)] * 2


def test_a_window_longer_than_the_text_is_causal_too():
    q, k, v = torch.randn(3, 1, 2, 5, 8, generator=torch.manual_seed(0))
    expected = attend(q, k, v, is_causal=True)
    assert torch.allclose(attend(q, k, v, window=64), expected, atol=1e-6)


@pytest.mark.parametrize("options", [dict(window=3), dict(is_causal=True), dict()])
def test_no_queries_give_no_outputs(options):
    q, k, v = torch.randn(1, 2, 0, 8), torch.randn(1, 2, 4, 8), torch.randn(1, 2, 4, 5)
    assert attend(q, k, v, **options).shape == (1, 2, 0, 5)
