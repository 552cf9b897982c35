import math

import pytest
import torch
import torch.nn.functional as F

import tiny_lm
from pos_alibi import ALiBiAttention, alibi_bias, alibi_slopes, fused, ride_along

EIGHT = [2.0**-e for e in range(1, 9)]


def plain_attention(module, x, bias):
    """The formula, with somebody else's bias (H, T, T)."""
    B, T, C = x.shape
    q, k, v = module.qkv(x).view(B, T, 3, module.n_head, -1).permute(2, 0, 3, 1, 4)
    score = q @ k.transpose(-1, -2) / math.sqrt(q.shape[-1]) + bias
    return module.out((score.softmax(-1) @ v).transpose(1, 2).reshape(B, T, C))


def causal(bias):
    return bias.masked_fill(torch.ones(bias.shape[-2:], dtype=torch.bool).triu(1), float("-inf"))


@pytest.mark.parametrize("n_head, slopes", [
    (1, [0.00390625]), (2, [0.0625, 0.00390625]), (3, [0.0625, 0.00390625, 0.25]), (4, [0.25, 0.0625, 0.015625, 0.00390625]),
    (6, [0.25, 0.0625, 0.015625, 0.00390625, 0.5, 0.125]), (8, EIGHT), (12, EIGHT + [0.70710678, 0.35355339, 0.1767767, 0.08838835]),
    (16, [2 ** (-(h + 1) / 2) for h in range(16)])])
def test_known_slopes(n_head, slopes):
    assert alibi_slopes(n_head).dtype == torch.float32
    assert alibi_slopes(n_head).tolist() == pytest.approx(slopes, rel=1e-6)


@pytest.mark.parametrize("n_head", [1, 2, 3, 4, 6, 8, 12, 16, 20])
def test_bias_equals_x_transformers(n_head):
    from x_transformers.x_transformers import AlibiPositionalBias
    theirs = AlibiPositionalBias(heads=n_head)(9, 9)
    assert torch.allclose(alibi_bias(alibi_slopes(n_head), torch.arange(9), torch.arange(9)), theirs, rtol=1e-6)


@pytest.mark.parametrize("n_head", [1, 2, 3, 4, 8, 12, 20])
def test_attention_equals_bloom_and_mpt_after_the_softmax(n_head):
    from transformers.models.bloom.modeling_bloom import build_alibi_tensor
    from transformers.models.mpt.modeling_mpt import build_mpt_alibi_tensor
    T = 12
    torch.manual_seed(0)
    module, x = ALiBiAttention(8 * n_head, n_head), torch.randn(1, T, 8 * n_head)
    bloom = build_alibi_tensor(torch.ones(1, T), n_head, torch.float32).view(n_head, 1, T)  # m·j
    assert torch.allclose(module(x), plain_attention(module, x, causal(bloom.expand(n_head, T, T))), rtol=0, atol=1e-5)
    mpt = build_mpt_alibi_tensor(n_head, T).view(-1, 1, T)  # −m·(T − 1 − j)
    assert torch.allclose(module(x), plain_attention(module, x, causal(mpt.expand(n_head, T, T))), rtol=0, atol=1e-5)


def test_known_weights_whatever_the_head_width():
    """q = k = 0 and slope 0.25: the last of four tokens weighs them as softmax(−.75, −.5, −.25, 0)."""
    expected = torch.tensor([-0.75, -0.5, -0.25, 0]).softmax(0)
    for width in (4, 64):
        module = ALiBiAttention(4 * width, 4)
        torch.nn.init.zeros_(module.qkv.weight)
        with torch.no_grad():
            module.out.weight.copy_(torch.eye(4 * width))
            module.qkv.weight[8 * width:, :4] = torch.eye(4).repeat(width, 1)  # v of every head repeats the one-hot token
        y = module(F.pad(torch.eye(4), (0, 4 * width - 4))[None])  # (1, 4, C)
        assert torch.allclose(y[0, -1, :4], expected, atol=1e-6)  # head 0 has slope 0.25


def test_bias_shape_sign_and_cached_query():
    slopes = alibi_slopes(6)
    bias = alibi_bias(slopes, torch.arange(5), torch.arange(5))
    assert bias.shape == (6, 5, 5) and (bias <= 0).all() and (bias.diagonal(dim1=1, dim2=2) == 0).all()
    assert torch.equal(bias, bias.transpose(1, 2))
    one = alibi_bias(slopes, torch.tensor([9]), torch.arange(10))
    assert torch.equal(one[:, 0], -slopes[:, None] * torch.arange(9, -1, -1))
    each = alibi_bias(slopes, torch.tensor([[9], [3]]), torch.arange(20).view(2, 10))
    assert each.shape == (2, 6, 1, 10) and torch.equal(each[0], one)


@pytest.mark.parametrize("T", [1, 7, 128, 129, 300])
@pytest.mark.parametrize("n_head", [1, 3, 4, 12])
@pytest.mark.parametrize("dtype, tolerance", [(torch.float32, 2e-5), (torch.bfloat16, 2e-2)])
def test_the_cheap_path_equals_the_plain_bias(T, n_head, dtype, tolerance):
    """Output and gradients, against the plain formula in double on the same (rounded) numbers."""
    torch.manual_seed(0)
    q, k, v, upstream = (torch.randn(2, n_head, T, 8).to(dtype) for _ in range(4))
    slopes, positions = alibi_slopes(n_head), torch.arange(T)

    cheap = [x.clone().requires_grad_() for x in (q, k, v)]
    y = fused(*ride_along(cheap[0] * 8**-0.5, cheap[1], slopes, positions), cheap[2], is_causal=True, scale=1.0)
    y.backward(upstream)

    plain = [x.double().requires_grad_() for x in (q, k, v)]
    score = plain[0] @ plain[1].transpose(-1, -2) / math.sqrt(8) + causal(-slopes.double()[:, None, None] * (positions[:, None] - positions).abs())
    expected = score.softmax(-1) @ plain[2]
    expected.backward(upstream.double())

    assert y.dtype == dtype
    assert (y.double() - expected).abs().max() < tolerance
    for ours, theirs in zip(cheap, plain):
        assert (ours.grad.double() - theirs.grad).abs().max() < tolerance * max(1, theirs.grad.abs().max().item())


@pytest.mark.parametrize("dtype, tolerance", [(torch.float32, 1e-4), (torch.bfloat16, 2e-2), (torch.float16, 3e-3)])
def test_the_cheap_path_far_out(dtype, tolerance):
    """At positions around 30,000 the bias still tells each token from the next, in every dtype."""
    torch.manual_seed(0)
    q, k, v = (torch.randn(1, 12, 40, 16).to(dtype) for _ in range(3))
    positions = torch.arange(40) + 30_000
    y = fused(*ride_along(q * 0.25, k, alibi_slopes(12), positions), v, is_causal=True, scale=1.0)
    bias = causal(alibi_bias(alibi_slopes(12), positions, positions).double())
    expected = (q.double() @ k.double().transpose(-1, -2) * 0.25 + bias).softmax(-1) @ v.double()
    assert (y.double() - expected).abs().max() < tolerance


@pytest.mark.parametrize("T", [1, 2, 6, 33])
@pytest.mark.parametrize("offset", [10_000, 1_000_000, -1_000_000])
@pytest.mark.parametrize("dtype, tolerance", [(torch.float32, 1e-5), (torch.bfloat16, 3e-2), (torch.float16, 5e-3)])
def test_module_at_far_positions_and_over_wide_gaps(T, offset, dtype, tolerance):
    torch.manual_seed(0)
    module, x = ALiBiAttention(12 * 16, 12).to(dtype), torch.randn(1, T, 12 * 16).to(dtype)
    exact = ALiBiAttention(12 * 16, 12).double()
    exact.load_state_dict(module.state_dict())
    for positions in (torch.arange(T) + offset, torch.arange(T) + offset * (torch.arange(T) >= T // 2)):
        bias = -alibi_slopes(12).double()[:, None, None] * (positions[:, None] - positions).abs()
        assert (module(x, positions).double() - plain_attention(exact, x.double(), causal(bias))).abs().max() < tolerance


def test_small_integer_types_do_not_wrap_around():
    small = torch.tensor([0, 100, 200], dtype=torch.uint8)
    assert torch.equal(alibi_bias(alibi_slopes(2), small, small), alibi_bias(alibi_slopes(2), small.long(), small.long()))
    with pytest.raises(ValueError, match="must be integers"):
        alibi_bias(alibi_slopes(2), torch.arange(3.0), torch.arange(3))


def test_no_square_bias_in_the_causal_case():
    shapes = []
    def attend(q, k, v, attn_mask=None, is_causal=False, scale=None):
        shapes.append((q.shape[-1], v.shape[-1], None if attn_mask is None else tuple(attn_mask.shape), is_causal))
        return v
    x = torch.randn(1, 10, 16)
    module = ALiBiAttention(16, 4, attend=attend)
    module(x)
    module(x, torch.tensor([0, 0, 0, 1, 2, 3, 4, 5, 6, 7]))  # left-padded
    module(x, torch.tensor([0, 1, 2, 3, 4, 0, 1, 2, 3, 4]))  # packed: falls, so the row constant is not one
    ALiBiAttention(16, 4, causal=False, attend=attend)(x)
    assert shapes == [(12, 4, None, True), (12, 4, None, True), (4, 4, (4, 10, 10), False), (4, 4, (4, 10, 10), False)]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_the_same_without_gradients(dtype):
    """There v comes to the attention padded, and qkv is let go."""
    widths = []
    def attend(q, k, v, **options):
        widths.append((q.shape[-1], v.shape[-1], v.untyped_storage().nbytes() // v.element_size()))
        return fused(q, k, v, **options)
    module, x = ALiBiAttention(32, 4, attend=attend).to(dtype), torch.randn(2, 70, 32, dtype=dtype)
    for positions in (None, torch.arange(70) + 1000):
        with torch.no_grad():
            read = module(x, positions)
        assert read.shape == x.shape and (read - module(x, positions)).abs().max() < (1e-6 if dtype == torch.float32 else 0.01)
    assert widths == [(16, 16, 2 * 70 * 4 * 16), (16, 8, 2 * 70 * 3 * 32)] * 2


@pytest.mark.parametrize("positions", [[0, 1, 2, 3, 4, 5], [7, 8, 9, 10, 11, 12], [0, 0, 0, 1, 2, 3], [0, 1, 2, 0, 1, 2],
                                       [[0, 1, 2, 3, 4, 5], [3, 4, 5, 6, 9, 20]], [[0, 1, 2, 3, 4, 5], [5, 4, 3, 2, 1, 0]]])
@pytest.mark.parametrize("is_causal", [True, False])
def test_module_equals_the_formula_for_any_positions(positions, is_causal):
    torch.manual_seed(0)
    module, x, positions = ALiBiAttention(24, 3, causal=is_causal), torch.randn(2, 6, 24), torch.tensor(positions)
    bias = -alibi_slopes(3)[:, None, None] * (positions[..., :, None] - positions[..., None, :]).abs().unsqueeze(-3)
    assert torch.allclose(module(x, positions), plain_attention(module, x, causal(bias) if is_causal else bias), rtol=0, atol=1e-5)


def test_module_depends_on_distance_only():
    torch.manual_seed(0)
    for is_causal in (True, False):
        module, x = ALiBiAttention(32, 4, causal=is_causal), torch.randn(2, 20, 32)
        assert torch.allclose(module(x, torch.arange(20) + 1000), module(x), atol=1e-5)
        assert not torch.allclose(module(x, 2 * torch.arange(20)), module(x), atol=1e-4)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_casts_leave_slopes_and_distances_alone(dtype):
    torch.manual_seed(0)
    module, x = ALiBiAttention(48, 12), torch.randn(1, 64, 48)
    for is_causal in (True, False):
        module.causal = is_causal
        exact = module.float()(x)
        cast = module.to(dtype)(x.to(dtype))
        assert cast.dtype == dtype and (cast.float() - exact).abs().max() < 0.03
    assert module.slopes.dtype == torch.float32
    assert sorted(module.state_dict()) == ["out.weight", "qkv.weight"]
    bias = alibi_bias(alibi_slopes(16), torch.tensor([1004]), torch.arange(5))[0, 0]  # slope 2^-0.5, distances 1004 … 1000
    assert len(bias.unique()) == 5 and len(bias.to(torch.bfloat16).unique()) == 1


def test_bidirectional_bias_is_not_rounded_to_bfloat16():
    """q = k = 0 and slope 2^-8: the weight of one far token, read off the output, to the output's own rounding."""
    module = ALiBiAttention(2, 1, causal=False)
    with torch.no_grad():
        module.qkv.weight.zero_()
        module.qkv.weight[4:] = torch.eye(2)
        module.out.weight.copy_(torch.eye(2))
    x = torch.zeros(1, 1500, 2)
    x[0, 1301, 0] = 512
    exact = 512 * (-torch.arange(1500).double() / 256).softmax(0)[1301].item()
    assert module.bfloat16()(x.bfloat16())[0, 0, 0].item() == pytest.approx(exact, rel=2**-8)


def test_errors_name_the_numbers():
    with pytest.raises(ValueError, match="dim=10 does not divide into n_head=4 heads"):
        ALiBiAttention(10, 4)
    for n_head in (0, -1):
        with pytest.raises(ValueError, match=f"n_head={n_head}"):
            alibi_slopes(n_head)
    module = ALiBiAttention(16, 2)
    with pytest.raises(ValueError, match=r"positions have shape \(2, 5\); must be \(4,\) or \(2, 4\)"):
        module(torch.randn(2, 4, 16), torch.zeros(2, 5, dtype=torch.int64))
    with pytest.raises(ValueError, match="must be integers"):
        module(torch.randn(2, 4, 16), torch.arange(4.0))


def test_the_fused_kernel_gets_one_width(monkeypatch):
    """Of unlike widths torch takes its slow path, with the same numbers."""
    widths = []
    def record(q, k, v, **options):
        widths.append((q.shape[-1], k.shape[-1], v.shape[-1]))
        return v
    monkeypatch.setattr(F, "scaled_dot_product_attention", record)
    q, v = torch.randn(1, 2, 5, 12), torch.randn(1, 2, 5, 4)
    assert torch.equal(fused(q, q, v), v) and fused(q, q, q) is not None
    assert torch.equal(tiny_lm.attend(q, q, v, is_causal=True), v)
    assert widths == [(12, 12, 12)] * 3
