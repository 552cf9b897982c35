import math

import pytest
import torch
import torch.nn.functional as F

from pos_alibi import ALiBiAttention, alibi_bias, alibi_channels, alibi_slopes, fused
from tiny_lm import Cache

EIGHT = [2.0**-e for e in range(1, 9)]
SLOPES = {
    1: [0.00390625],
    2: [0.0625, 0.00390625],
    3: [0.0625, 0.00390625, 0.25],
    4: [0.25, 0.0625, 0.015625, 0.00390625],
    6: [0.25, 0.0625, 0.015625, 0.00390625, 0.5, 0.125],
    8: EIGHT,
    12: EIGHT + [0.70710678, 0.35355339, 0.1767767, 0.08838835],
    16: [2 ** (-(h + 1) / 2) for h in range(16)],
}


def plain_bias(n_head, positions):
    """−m·|i − j| in double for positions (T,) or (B, T)."""
    distance = (positions[..., :, None] - positions[..., None, :]).abs().unsqueeze(-3)
    return -alibi_slopes(n_head).double()[:, None, None] * distance  # ([B,] H, T, T)


def plain_attention(module, x, bias):
    """The formula with somebody else's bias (H, T, T), computed in the dtype of x."""
    B, T, C = x.shape
    q, k, v = module.qkv(x).view(B, T, 3, module.n_head, -1).permute(2, 0, 3, 1, 4)
    score = q @ k.transpose(-1, -2) / math.sqrt(q.shape[-1]) + bias.to(x.dtype)
    return module.out((score.softmax(-1) @ v).transpose(1, 2).reshape(B, T, C))


def causal(bias):
    return bias.masked_fill(torch.ones(bias.shape[-2:], dtype=torch.bool).triu(1), float("-inf"))


# Slopes and the plain bias


@pytest.mark.parametrize("n_head", SLOPES)
def test_known_slopes(n_head):
    assert alibi_slopes(n_head).dtype == torch.float32
    assert alibi_slopes(n_head).tolist() == pytest.approx(SLOPES[n_head], rel=1e-6)


@pytest.mark.parametrize("n_head", [1, 2, 3, 4, 6, 8, 12, 16, 20])
def test_bias_equals_x_transformers(n_head):
    from x_transformers.x_transformers import AlibiPositionalBias

    theirs = AlibiPositionalBias(heads=n_head)(9, 9)
    ours = alibi_bias(alibi_slopes(n_head), torch.arange(9), torch.arange(9))
    assert torch.allclose(ours, theirs, rtol=1e-6)


@pytest.mark.parametrize("n_head", [1, 3, 4, 12])
def test_attention_equals_bloom_and_mpt_after_the_softmax(n_head):
    from transformers.models.bloom.modeling_bloom import build_alibi_tensor
    from transformers.models.mpt.modeling_mpt import build_mpt_alibi_tensor

    torch.manual_seed(0)
    module, x = ALiBiAttention(8 * n_head, n_head), torch.randn(1, 12, 8 * n_head)
    bloom = build_alibi_tensor(torch.ones(1, 12), n_head, torch.float32)  # m·j
    mpt = build_mpt_alibi_tensor(n_head, 12)  # −m·(T − 1 − j)
    for theirs in (bloom, mpt):
        bias = causal(theirs.view(n_head, 1, 12).expand(n_head, 12, 12))
        assert torch.allclose(module(x), plain_attention(module, x, bias), rtol=0, atol=1e-5)


@pytest.mark.parametrize("width", [4, 64])
def test_known_weights_whatever_the_head_width(width):
    """q = k = 0, slope 0.25: the last of four tokens weighs them softmax(−.75, −.5, −.25, 0)."""
    module = ALiBiAttention(4 * width, 4)
    torch.nn.init.zeros_(module.qkv.weight)
    with torch.no_grad():
        module.out.weight.copy_(torch.eye(4 * width))
        module.qkv.weight[8 * width :, :4] = torch.eye(4).repeat(width, 1)  # v: the one-hot token
    y = module(F.pad(torch.eye(4), (0, 4 * width - 4))[None])  # (1, 4, C)
    expected = torch.tensor([-0.75, -0.5, -0.25, 0]).softmax(0)
    assert torch.allclose(y[0, -1, :4], expected, atol=1e-6)  # head 0 has slope 0.25


def test_bias_shape_sign_and_one_late_query():
    slopes, five = alibi_slopes(6), torch.arange(5)
    bias = alibi_bias(slopes, five, five)
    assert bias.shape == (6, 5, 5) and (bias <= 0).all()
    assert (bias.diagonal(dim1=1, dim2=2) == 0).all()
    assert torch.equal(bias, bias.transpose(1, 2))
    one = alibi_bias(slopes, torch.tensor([9]), torch.arange(10))
    assert torch.equal(one[:, 0], -slopes[:, None] * torch.arange(9, -1, -1))
    each = alibi_bias(slopes, torch.tensor([[9], [3]]), torch.arange(20).view(2, 10))
    assert each.shape == (2, 6, 1, 10) and torch.equal(each[0], one)


def test_small_integer_types_do_not_wrap_around():
    slopes, small = alibi_slopes(2), torch.tensor([0, 100, 200], dtype=torch.uint8)
    expected = alibi_bias(slopes, small.long(), small.long())
    assert torch.equal(alibi_bias(slopes, small, small), expected)
    with pytest.raises(ValueError, match="must be integers"):
        alibi_bias(slopes, torch.arange(3.0), torch.arange(3))


# The bias as channels


@pytest.mark.parametrize("T, n_head", [(1, 4), (7, 3), (128, 1), (129, 12), (300, 4)])
@pytest.mark.parametrize("dtype, tolerance", [(torch.float32, 2e-5), (torch.bfloat16, 2e-2)])
def test_channels_equal_the_plain_bias(T, n_head, dtype, tolerance):
    """Output and gradients, against the plain formula in double on the same (rounded) numbers."""
    torch.manual_seed(0)
    q, k, v, upstream = (torch.randn(2, n_head, T, 8).to(dtype) for _ in range(4))
    positions, ours = torch.arange(T), [x.clone().requires_grad_() for x in (q, k, v)]
    channels = alibi_channels(
        ours[0] * 8**-0.5, ours[1], alibi_slopes(n_head), positions, positions
    )
    y = fused(*channels, ours[2], is_causal=True, scale=1.0)
    y.backward(upstream)

    plain = [x.double().requires_grad_() for x in (q, k, v)]
    score = plain[0] @ plain[1].transpose(-1, -2) / math.sqrt(8)
    expected = (score + causal(plain_bias(n_head, positions))).softmax(-1) @ plain[2]
    expected.backward(upstream.double())

    assert y.dtype == dtype
    assert (y.double() - expected).abs().max() < tolerance
    for mine, theirs in zip(ours, plain):
        bound = tolerance * max(1, theirs.grad.abs().max().item())
        assert (mine.grad.double() - theirs.grad).abs().max() < bound


FAR = [(torch.float32, 1e-4), (torch.bfloat16, 2e-2), (torch.float16, 3e-3)]


@pytest.mark.parametrize("dtype, tolerance", FAR)
def test_channels_tell_neighbours_apart_30000_tokens_out(dtype, tolerance):
    """Queries stand there, and the first key at 0, so that all of m·i goes through the dtype."""
    torch.manual_seed(0)
    q, k, v = (torch.randn(1, 12, 41, 16).to(dtype) for _ in range(3))
    positions = torch.cat((torch.zeros(1, dtype=torch.int64), torch.arange(40) + 30_000))
    channels = alibi_channels(q * 0.25, k, alibi_slopes(12), positions, positions)
    y = fused(*channels, v, is_causal=True, scale=1.0)
    score = q.double() @ k.double().transpose(-1, -2) * 0.25
    expected = (score + causal(plain_bias(12, positions))).softmax(-1) @ v.double()
    assert (y.double() - expected).abs().max() < tolerance


FAR_AND_WIDE = [(torch.float32, 1e-5), (torch.bfloat16, 3e-2), (torch.float16, 5e-3)]


@pytest.mark.parametrize("T", [1, 6, 33])
@pytest.mark.parametrize("offset", [10_000, 1_000_000, -1_000_000])
@pytest.mark.parametrize("dtype, tolerance", FAR_AND_WIDE)
def test_attention_at_far_positions_and_over_wide_gaps(T, offset, dtype, tolerance):
    torch.manual_seed(0)
    module, x = ALiBiAttention(12 * 16, 12).to(dtype), torch.randn(1, T, 12 * 16).to(dtype)
    exact = ALiBiAttention(12 * 16, 12).double()
    exact.load_state_dict(module.state_dict())
    own = torch.arange(T)
    for positions in (own + offset, own + offset * (own >= T // 2)):
        expected = plain_attention(exact, x.double(), causal(plain_bias(12, positions)))
        assert (module(x, positions).double() - expected).abs().max() < tolerance


def test_no_square_bias_in_the_causal_case():
    calls = []

    def record(q, k, v, attn_mask=None, is_causal=False, scale=None):
        mask = None if attn_mask is None else tuple(attn_mask.shape)
        calls.append((q.shape[-1], v.shape[-1], mask, is_causal))
        return v

    module, x = ALiBiAttention(16, 4, attend=record), torch.randn(1, 10, 16)
    module(x)
    module(x, torch.tensor([0, 0, 0, 1, 2, 3, 4, 5, 6, 7]))  # left-padded
    module(x, torch.tensor([0, 1, 2, 3, 4, 0, 1, 2, 3, 4]))  # packed: falls, so it needs the bias
    ALiBiAttention(16, 4, causal=False, attend=record)(x)
    cheap, plain = (12, 4, None, True), (4, 4, (4, 10, 10), False)
    assert calls == [cheap, cheap, plain, plain]


@pytest.mark.parametrize("dtype, tolerance", [(torch.float32, 1e-6), (torch.bfloat16, 0.01)])
def test_without_gradients_v_is_a_padded_copy_and_qkv_is_let_go(dtype, tolerance):
    widths = []

    def record(q, k, v, **options):
        held = v.untyped_storage().nbytes() // v.element_size()
        widths.append((q.shape[-1], v.shape[-1], held))
        return fused(q, k, v, **options)

    module = ALiBiAttention(32, 4, attend=record).to(dtype)
    x = torch.randn(2, 70, 32, dtype=dtype)
    for positions in (None, torch.arange(70) + 1000):
        with torch.no_grad():
            read = module(x, positions)
        assert read.shape == x.shape
        assert (read - module(x, positions)).abs().max() < tolerance
    assert widths == [(16, 16, 2 * 70 * 4 * 16), (16, 8, 2 * 70 * 3 * 32)] * 2


# The attention layer

POSITIONS = [
    [0, 1, 2, 3, 4, 5],
    [7, 8, 9, 10, 11, 12],
    [0, 0, 0, 1, 2, 3],
    [0, 1, 2, 0, 1, 2],
    [[0, 1, 2, 3, 4, 5], [3, 4, 5, 6, 9, 20]],
    [[0, 1, 2, 3, 4, 5], [5, 4, 3, 2, 1, 0]],
]


@pytest.mark.parametrize("positions", POSITIONS)
@pytest.mark.parametrize("is_causal", [True, False])
def test_attention_equals_the_formula_for_any_positions(positions, is_causal):
    torch.manual_seed(0)
    module, x = ALiBiAttention(24, 3, causal=is_causal), torch.randn(2, 6, 24)
    bias = plain_bias(3, torch.tensor(positions))
    expected = plain_attention(module, x, causal(bias) if is_causal else bias)
    assert torch.allclose(module(x, torch.tensor(positions)), expected, rtol=0, atol=1e-5)


@pytest.mark.parametrize("positions", [None, *POSITIONS])
@pytest.mark.parametrize("sizes", [(1,) * 6, (4, 2)])
def test_attention_with_a_cache_reads_as_in_one_pass(sizes, positions):
    torch.manual_seed(0)
    module, x, cache = ALiBiAttention(24, 3).double(), torch.randn(2, 6, 24).double(), Cache()
    chunks = [None] * len(sizes)
    if positions is not None:
        positions = torch.tensor(positions)
        chunks = positions.split(sizes, -1)
    parts = [module(part, at, cache) for part, at in zip(x.split(sizes, 1), chunks)]
    assert torch.allclose(torch.cat(parts, 1), module(x, positions), atol=1e-10)


def test_default_positions_go_on_after_cached_ones_of_any_order():
    """They go on from `seen`, and distances are to the positions the cache holds, later or not."""
    torch.manual_seed(0)
    module, x, cache = ALiBiAttention(24, 3).double(), torch.randn(1, 8, 24).double(), Cache()
    module(x[:, :5], torch.tensor([0, 1, 30, 3, 2]), cache)
    rest = module(x[:, 5:], cache=cache)
    expected = module(x, torch.tensor([0, 1, 30, 3, 2, 5, 6, 7]))[:, 5:]
    assert torch.allclose(rest, expected, atol=1e-10)


@pytest.mark.parametrize("is_causal", [True, False])
def test_attention_depends_on_the_distance_only(is_causal):
    torch.manual_seed(0)
    module, x = ALiBiAttention(32, 4, causal=is_causal), torch.randn(2, 20, 32)
    assert torch.allclose(module(x, torch.arange(20) + 1000), module(x), atol=1e-5)
    assert not torch.allclose(module(x, 2 * torch.arange(20)), module(x), atol=1e-4)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_casts_leave_slopes_and_distances_alone(dtype):
    torch.manual_seed(0)
    module, x = ALiBiAttention(48, 12), torch.randn(1, 64, 48)
    for is_causal in (True, False):
        module.causal = is_causal
        exact, cast = module.float()(x), module.to(dtype)(x.to(dtype))
        assert cast.dtype == dtype and (cast.float() - exact).abs().max() < 0.03
    assert module.slopes.dtype == torch.float32
    assert sorted(module.state_dict()) == ["out.weight", "qkv.weight"]
    # slope 2^-0.5 at distances 1004 … 1000, which bfloat16 cannot tell apart
    bias = alibi_bias(alibi_slopes(16), torch.tensor([1004]), torch.arange(5))[0, 0]
    assert len(bias.unique()) == 5 and len(bias.to(torch.bfloat16).unique()) == 1


def test_bidirectional_bias_is_not_rounded_to_bfloat16():
    """q = k = 0 and slope 2^-8: the weight of one far token, read off the output, is exact."""
    module = ALiBiAttention(2, 1, causal=False)
    with torch.no_grad():
        module.qkv.weight.zero_()
        module.qkv.weight[4:] = torch.eye(2)
        module.out.weight.copy_(torch.eye(2))
    x = torch.zeros(1, 1500, 2)
    x[0, 1301, 0] = 512
    weights = (-torch.arange(1500).double() / 256).softmax(0)
    y = module.bfloat16()(x.bfloat16())[0, 0, 0].item()
    assert y == pytest.approx(512 * weights[1301].item(), rel=2**-8)


def test_errors_name_the_numbers():
    with pytest.raises(ValueError, match="dim=10 does not divide into n_head=4 heads"):
        ALiBiAttention(10, 4)
    for n_head in (0, -1):
        with pytest.raises(ValueError, match=f"n_head={n_head}"):
            alibi_slopes(n_head)
    module, x = ALiBiAttention(16, 2), torch.randn(2, 4, 16)
    with pytest.raises(ValueError, match=r"have shape \(2, 5\); must be \(4,\) or \(2, 4\)"):
        module(x, torch.zeros(2, 5, dtype=torch.int64))
    with pytest.raises(ValueError, match="must be integers"):
        module(x, torch.arange(4.0))
    module.causal = False
    with pytest.raises(ValueError, match="a cache needs causal=True"):
        module(x, cache=Cache())


def test_the_fused_kernel_gets_one_width(monkeypatch):
    """Of unlike widths torch takes its slow path, with the same numbers."""
    widths = []

    def record(q, k, v, **options):
        widths.append((q.shape[-1], k.shape[-1], v.shape[-1]))
        return v

    monkeypatch.setattr(F, "scaled_dot_product_attention", record)
    q, v = torch.randn(1, 2, 5, 12), torch.randn(1, 2, 5, 4)
    assert torch.equal(fused(q, q, v), v)
    assert torch.equal(fused(q, q, q), q)
    assert widths == [(12, 12, 12)] * 2
