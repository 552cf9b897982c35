import math

import pytest
import torch

from pos_rope import RoPEAttention, apply_rope, rope_cos_sin, rope_frequencies


def turn(x, positions, base=10000.0, interleaved=True):
    return apply_rope(x, *rope_cos_sin(positions, x.shape[-1], base), interleaved)


def plain_attention(module, x, rotate, causal=True):
    """The formula, with somebody else's rotation of q and k."""
    B, T, C = x.shape
    q, k, v = module.qkv(x).view(B, T, 3, module.n_head, -1).permute(2, 0, 3, 1, 4)
    score = rotate(q) @ rotate(k).transpose(-1, -2) / math.sqrt(q.shape[-1])
    if causal:
        score = score.masked_fill(torch.ones(T, T, dtype=torch.bool).triu(1), float("-inf"))
    return module.out((score.softmax(-1) @ v).transpose(1, 2).reshape(B, T, C))


def test_known_frequencies():
    cos, sin = rope_cos_sin(torch.tensor([1]), 8)
    assert torch.atan2(sin, cos)[0].tolist() == pytest.approx([1, 0.1, 0.01, 0.001], rel=1e-5)
    for width, last in ((32, 1.778279e-4), (64, 1.333521e-4)):
        cos, sin = rope_cos_sin(torch.tensor([1000]), width)
        assert math.atan2(sin[0, -1], cos[0, -1]) / 1000 == pytest.approx(last, rel=1e-5)


def test_known_rotation():
    x = torch.tensor([1.0, 0, 0, 2]).view(1, 1, 1, 4)  # pairs (1, 0) and (0, 2), angles 3 and 0.03
    c, s, c2, s2 = math.cos(3), math.sin(3), math.cos(0.03), math.sin(0.03)
    assert turn(x, torch.tensor([3])).flatten().tolist() == pytest.approx([c, s, -2 * s2, 2 * c2], abs=1e-6)
    x = torch.tensor([1.0, 0, 0, 2]).view(1, 1, 1, 4)  # half-split: pairs (1, 0) and (0, 2) are channels (0, 2), (1, 3)
    assert turn(x, torch.tensor([3]), interleaved=False).flatten().tolist() == pytest.approx([c, -2 * s2, s, 2 * c2], abs=1e-6)


@pytest.mark.parametrize("T, H, D, offset", [(7, 3, 8, 0), (5, 5, 32, 0), (16, 2, 64, 2031)])
def test_interleaved_equals_two_libraries(T, H, D, offset):
    from rotary_embedding_torch import RotaryEmbedding
    from x_transformers.x_transformers import RotaryEmbedding as XRotary, apply_rotary_pos_emb
    x = torch.randn(2, H, T, D, generator=torch.Generator().manual_seed(0))
    ours = turn(x, torch.arange(offset, offset + T))
    assert torch.allclose(ours, RotaryEmbedding(dim=D).rotate_queries_or_keys(x, offset=offset), rtol=0, atol=1e-3 if offset else 1e-5)
    if not offset:
        frequencies, _ = XRotary(D).forward_from_seq_len(T)
        assert torch.allclose(ours, apply_rotary_pos_emb(x, frequencies), rtol=0, atol=1e-5)


@pytest.mark.parametrize("base", [10000.0, 500.0])
def test_half_split_equals_hugging_face_llama(base):
    from transformers import LlamaConfig
    from transformers.models.llama.modeling_llama import LlamaRotaryEmbedding, apply_rotary_pos_emb
    D, positions = 32, torch.tensor([[0, 1, 2, 500], [9, 7, 2047, 3]])
    config = LlamaConfig(head_dim=D, hidden_size=64, num_attention_heads=2, rope_parameters={"rope_type": "default", "rope_theta": base})
    q, k = torch.randn(2, 2, 3, 4, D, generator=torch.Generator().manual_seed(0))
    cos, sin = LlamaRotaryEmbedding(config)(q, positions)
    for ours, theirs in zip((q, k), apply_rotary_pos_emb(q, k, cos, sin)):
        assert torch.allclose(turn(ours, positions, base, interleaved=False), theirs, rtol=0, atol=1e-3)


def test_the_two_layouts_differ_by_a_reordering_of_channels():
    x = torch.randn(1, 2, 6, 8)
    p = [0, 2, 4, 6, 1, 3, 5, 7]
    assert torch.equal(turn(x[..., p], torch.arange(6), interleaved=False), turn(x, torch.arange(6))[..., p])


@pytest.mark.parametrize("interleaved", [True, False])
def test_rotation_properties(interleaved):
    q, k = torch.randn(2, 1, 1, 1, 16, dtype=torch.float64, generator=torch.Generator().manual_seed(0))
    score = lambda m, n: (turn(q, torch.tensor([m]), interleaved=interleaved) * turn(k, torch.tensor([n]), interleaved=interleaved)).sum().item()
    assert score(5, 2) == pytest.approx(score(12, 9), abs=1e-6) == pytest.approx(score(1005, 1002), abs=1e-5)
    assert abs(score(5, 2) - score(5, 3)) > 1e-3
    assert turn(q, torch.tensor([77]), interleaved=interleaved).norm().item() == pytest.approx(q.norm().item(), rel=1e-6)
    for dtype in (torch.float32, torch.bfloat16, torch.float16):
        x = torch.randn(2, 3, 1, 16).to(dtype)
        assert torch.equal(turn(x, torch.tensor([0]), interleaved=interleaved), x)  # position 0: not a bit changes


def test_heads_alike_tokens_differ_also_when_there_are_as_many():
    one = torch.randn(1, 1, 1, 8).expand(2, 4, 4, 8)  # the same vector for every sequence, head and token; T = H
    turned = turn(one, torch.arange(4))
    assert torch.equal(turned, turned[:1, :1].expand(2, 4, 4, 8))
    assert not torch.allclose(turned[0, 0, 0], turned[0, 0, 1])
    each = turn(one, torch.tensor([[0, 1, 2, 3], [5, 5, 5, 5]]))
    assert torch.equal(each[0], turned[0]) and torch.equal(each[1], turn(one, torch.full((4,), 5))[1])
    assert torch.allclose(turn(one[:1].expand(4, 4, 4, 8), torch.arange(16).view(4, 4))[2, 1, 3], turn(one, torch.tensor([11] * 4))[0, 0, 0])


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_low_precision_modules_still_tell_neighbours_apart(dtype):
    ones = torch.ones(1, 1, 1024, 32, dtype=dtype)
    turned = turn(ones, torch.arange(1024))
    assert turned.dtype == dtype
    assert len(torch.unique(turned[0, 0].float(), dim=0)) == 1024
    module = RoPEAttention(64, 2).to(dtype)
    assert module(torch.randn(1, 300, 64).to(dtype)).dtype == dtype
    assert sorted(module.state_dict()) == ["out.weight", "qkv.weight"]


def test_strided_and_transposed_inputs():
    x = torch.randn(2, 5, 3, 8)
    assert torch.allclose(turn(x.transpose(1, 2), torch.arange(5)), turn(x.transpose(1, 2).contiguous(), torch.arange(5)), atol=1e-6)
    y = torch.randn(2, 3, 8, 5).transpose(-1, -2)  # channels are not next to each other in memory
    assert torch.allclose(turn(y, torch.arange(5)), turn(y.contiguous(), torch.arange(5)), atol=1e-6)


def test_gradient_is_the_opposite_rotation():
    x = torch.randn(1, 2, 6, 8, requires_grad=True)
    upstream = torch.randn(1, 2, 6, 8)
    turn(x, torch.arange(6)).backward(upstream)
    assert torch.allclose(x.grad, turn(upstream, -torch.arange(6)), atol=1e-6)


@pytest.mark.parametrize("T", [1, 7, 65])
@pytest.mark.parametrize("causal", [True, False])
def test_module_equals_the_formula_with_a_librarys_rotation(T, causal):
    from rotary_embedding_torch import RotaryEmbedding
    torch.manual_seed(0)
    module, x = RoPEAttention(24, 3, causal=causal), torch.randn(2, T, 24)
    reference = plain_attention(module, x, RotaryEmbedding(dim=8).rotate_queries_or_keys, causal)
    assert torch.allclose(module(x), reference, rtol=0, atol=1e-5)


def test_half_split_module_equals_the_formula_with_hugging_face_llama():
    from transformers import LlamaConfig
    from transformers.models.llama.modeling_llama import LlamaRotaryEmbedding, apply_rotary_pos_emb
    config = LlamaConfig(head_dim=8, hidden_size=24, num_attention_heads=3, rope_parameters={"rope_type": "default", "rope_theta": 77.0})
    torch.manual_seed(0)
    module, x = RoPEAttention(24, 3, base=77.0, interleaved=False), torch.randn(2, 11, 24)
    cos, sin = LlamaRotaryEmbedding(config)(x, torch.arange(11)[None])
    reference = plain_attention(module, x, lambda q: apply_rotary_pos_emb(q, q, cos, sin)[0])
    assert torch.allclose(module(x), reference, rtol=0, atol=1e-5)
    assert not torch.allclose(RoPEAttention(24, 3, base=77.0)(x), reference, atol=1e-3)


def test_module_depends_on_distance_only():
    torch.manual_seed(0)
    module, x = RoPEAttention(32, 4).double(), torch.randn(2, 20, 32, dtype=torch.float64)
    y = module(x)
    assert torch.allclose(module(x, torch.arange(20) + 1000), y, atol=1e-6)
    assert torch.allclose(module(x, torch.stack((torch.arange(20), torch.arange(20) + 7))), y, atol=1e-6)
    assert not torch.allclose(module(x, 2 * torch.arange(20)), y, atol=1e-4)


def test_cached_decoding_one_query_after_nine_keys():
    torch.manual_seed(0)
    module, x = RoPEAttention(16, 2), torch.randn(1, 10, 16)
    q, k, v = module.qkv(x).view(1, 10, 3, 2, 8).permute(2, 0, 3, 1, 4)
    cached = turn(k[:, :, :9], torch.arange(9))
    keys = torch.cat((cached, turn(k[:, :, 9:], torch.tensor([9]))), dim=2)
    weights = (turn(q[:, :, 9:], torch.tensor([9])) @ keys.transpose(-1, -2) / math.sqrt(8)).softmax(-1)
    last = module.out((weights @ v).transpose(1, 2).reshape(1, 1, 16))
    assert torch.allclose(last, module(x)[:, 9:], atol=1e-6)


def test_an_attention_handed_in_is_called():
    seen = []
    def attend(q, k, v, is_causal):
        seen.append((tuple(q.shape), is_causal))
        return v
    module = RoPEAttention(16, 2, attend=attend)
    x = torch.randn(3, 5, 16)
    assert torch.allclose(module(x), module.out(module.qkv(x)[..., 32:]), atol=1e-6)
    assert seen == [((3, 2, 5, 8), True)]


def test_errors_name_the_numbers():
    with pytest.raises(ValueError, match="dim=10 does not divide into n_head=4 heads"):
        RoPEAttention(10, 4)
    with pytest.raises(ValueError, match="dim=8 does not divide into n_head=0 heads"):
        RoPEAttention(8, 0)
    with pytest.raises(ValueError, match="head width 3: must be even"):
        RoPEAttention(12, 4)
    for base in (0, -10, float("nan")):
        with pytest.raises(ValueError, match="base=.*positive"):
            RoPEAttention(16, 2, base=base)
    module = RoPEAttention(16, 2)
    with pytest.raises(ValueError, match=r"positions have shape \(5,\); must be \(4,\) or \(2, 4\)"):
        module(torch.randn(2, 4, 16), torch.arange(5))
    with pytest.raises(ValueError, match="must be integers"):
        module(torch.randn(2, 4, 16), torch.arange(4.0))
    with pytest.raises(ValueError, match="half as wide"):
        apply_rope(torch.randn(1, 1, 4, 16), *rope_cos_sin(torch.arange(4), 8))
    with pytest.raises(ValueError, match="one table per sequence"):
        apply_rope(torch.randn(2, 4, 8), *rope_cos_sin(torch.arange(8).view(2, 4), 8))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float64])
@pytest.mark.parametrize("layout", ["of qkv", "transposed", "odd offset", "expanded", "overlapping", "reversed axes"])
def test_any_memory_layout(layout, dtype):
    """However x lies in memory: the same values, and the same gradient, as of a contiguous copy."""
    torch.manual_seed(0)
    B, H, T, D = 2, 3, 5, 8
    x = {"of qkv": lambda: torch.randn(B, T, 3, H, D).permute(2, 0, 3, 1, 4)[1],
         "transposed": lambda: torch.randn(B, H, D, T).transpose(-1, -2),
         "odd offset": lambda: torch.randn(B, H, T, D + 1)[..., 1:],
         "expanded": lambda: torch.randn(1, H, 1, D).expand(B, H, T, D),
         "overlapping": lambda: torch.randn(2000).as_strided((B, H, T, D), (1, 1, 1, 1)),
         "reversed axes": lambda: torch.randn(D, T, H, B).permute(3, 2, 1, 0)}[layout]().to(dtype)
    copy, upstream = x.clone(memory_format=torch.contiguous_format).requires_grad_(), torch.randn(B, H, T, D).to(dtype)
    x = x.detach().requires_grad_()
    cos, sin = rope_cos_sin(torch.arange(T), D)
    for each in (x, copy):
        apply_rope(each, cos, sin).backward(upstream)
    rounding = dict(atol=1e-6 if dtype != torch.bfloat16 else 1e-2)
    assert torch.allclose(apply_rope(x, cos, sin), apply_rope(copy, cos, sin), **rounding)
    assert torch.allclose(x.grad, copy.grad, **rounding)


# Scaling

def ratios(head_dim, base=1e4, **scaling):
    """New over old inverse frequencies, and the factor on cos and sin."""
    inverse, factor = rope_frequencies(head_dim, base, **scaling)
    return (inverse / rope_frequencies(head_dim, base)[0]).tolist(), factor


def test_linear_is_position_interpolation():
    scaled = rope_cos_sin(torch.tensor([4, 8]), 32, scaling="linear", factor=4)
    plain = rope_cos_sin(torch.tensor([1, 2]), 32)
    assert all(torch.allclose(a, b, atol=1e-7) for a, b in zip(scaled, plain))


@pytest.mark.parametrize("head_dim, factor, base", [(32, 2, 20945.88), (32, 4, 43873.00), (32, 8, 91895.87), (32, 16, 192484.01),
                                                   (64, 2, 20452.23), (64, 4, 41829.37), (64, 8, 85550.38)])
def test_ntk_is_a_larger_base(head_dim, factor, base):
    inverse, one = rope_frequencies(head_dim, scaling="ntk", factor=factor)
    assert torch.allclose(inverse, rope_frequencies(head_dim, base)[0], rtol=1e-6) and one == 1
    new_over_old, _ = ratios(head_dim, scaling="ntk", factor=factor)
    assert new_over_old[0] == 1 and new_over_old[-1] == pytest.approx(1 / factor)  # the fastest pair kept, the slowest /s exactly


@pytest.mark.parametrize("length, base", [(1, 10000), (128, 10000), (129, 10166.75), (256, 32279.69), (512, 79696.25)])
def test_dynamic_follows_the_length(length, base):
    options = dict(scaling="dynamic", factor=2, trained_len=128)
    inverse, _ = rope_frequencies(32, length=length, **options)
    assert torch.allclose(inverse, rope_frequencies(32, base)[0], rtol=1e-6)
    cos, sin = rope_cos_sin(torch.arange(length), 32, **options)
    expected = rope_cos_sin(torch.arange(length), 32, base)
    assert torch.allclose(cos, expected[0], atol=1e-4) and torch.allclose(sin, expected[1], atol=1e-4)


def test_dynamic_depends_on_the_current_length_only():
    torch.manual_seed(0)
    module, x = RoPEAttention(32, 2, scaling="dynamic", factor=2, trained_len=8), torch.randn(1, 40, 32)
    short = module(x[:, :8])
    module(x)
    assert torch.equal(short, module(x[:, :8]))
    plain = RoPEAttention(32, 2)
    plain.load_state_dict(module.state_dict())
    assert torch.equal(short, plain(x[:, :8])) and not torch.allclose(module(x), plain(x))


def test_dynamic_of_factor_1_is_ntk_for_the_current_length():
    inverse, _ = rope_frequencies(16, scaling="dynamic", factor=1, trained_len=64, length=256)
    assert torch.allclose(inverse, rope_frequencies(16, scaling="ntk", factor=4)[0], rtol=1e-12)


@pytest.mark.parametrize("head_dim, trained_len, expected", [
    (32, 256, [1, .892857, .785714, .678571, .571429, .464286, .357143] + [.25] * 9),
    (16, 64, [1, .75, .5] + [.25] * 5)])
def test_yarn_ramp_by_hand(head_dim, trained_len, expected):
    new_over_old, factor = ratios(head_dim, scaling="yarn", factor=4, trained_len=trained_len)
    assert new_over_old == pytest.approx(expected, abs=1e-6) and factor == pytest.approx(1.138629, abs=1e-6)


@pytest.mark.parametrize("factor, expected", [(1, 1), (2, 1.069315), (4, 1.138629), (8, 1.207944), (16, 1.277259)])
def test_yarn_attention_factor_is_on_cos_and_sin_once(factor, expected):
    cos, sin = rope_cos_sin(torch.tensor([0, 3]), 32, scaling="yarn", factor=factor, trained_len=256)
    assert torch.allclose(cos[0], torch.full((16,), float(expected))) and torch.allclose((cos**2 + sin**2).sqrt(), torch.full((2, 16), float(expected)))
    cos, _ = rope_cos_sin(torch.tensor([0]), 32, scaling="yarn", factor=factor, trained_len=256, attention_factor=0.5)
    assert torch.allclose(cos, torch.full((1, 16), 0.5))


def test_llama3_bands_by_hand():
    new_over_old, factor = ratios(32, scaling="llama3", factor=8, trained_len=128)
    assert new_over_old == pytest.approx([1, 1, 1, .8899, .4275, .1675] + [.125] * 10, abs=1e-4) and factor == 1


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("kind", ["linear", "dynamic", "yarn", "llama3"])
@pytest.mark.parametrize("head_dim", [2, 4, 8, 32, 64, 128])
@pytest.mark.parametrize("trained_len, factor, base", [(4, 2.0, 1e4), (64, 4.0, 1e4), (256, 8.0, 5e5), (8192, 3.7, 10.0), (256, 1.0, 1e4)])
def test_scaling_equals_transformers(kind, head_dim, trained_len, factor, base):
    """The frequencies, and q and k as turned, against Hugging Face's Llama."""
    if kind == "dynamic" and head_dim == 2:
        pytest.skip("one pair cannot be scaled and stay as it is")
    from transformers import LlamaConfig
    from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS
    from transformers.models.llama.modeling_llama import LlamaRotaryEmbedding, apply_rotary_pos_emb
    bands = dict(low_freq_factor=1.0, high_freq_factor=4.0) if kind == "llama3" else {}
    config = LlamaConfig(head_dim=head_dim, hidden_size=2 * head_dim, num_attention_heads=2, max_position_embeddings=trained_len,
                         rope_parameters=dict(rope_type=kind, rope_theta=base, factor=factor, original_max_position_embeddings=trained_len) | bands)
    for length in (max(1, trained_len // 2), trained_len, 3 * trained_len + 1):
        inverse, attention_factor = ROPE_INIT_FUNCTIONS[kind](config, "cpu", seq_len=length)
        ours, our_factor = rope_frequencies(head_dim, base, scaling=kind, factor=factor, trained_len=trained_len, length=length)
        assert torch.allclose(ours, inverse.double(), rtol=2e-6, atol=0) and our_factor == pytest.approx(attention_factor)
    torch.manual_seed(0)
    q, k, positions = torch.randn(1, 2, 9, head_dim), torch.randn(1, 2, 9, head_dim), torch.arange(3 * trained_len - 8, 3 * trained_len + 1)
    cos, sin = LlamaRotaryEmbedding(config)(q, positions[None])
    table = rope_cos_sin(positions, head_dim, base, scaling=kind, factor=factor, trained_len=trained_len)
    for ours, theirs in zip((apply_rope(x, *table, interleaved=False) for x in (q, k)), apply_rotary_pos_emb(q, k, cos, sin)):
        assert torch.allclose(ours, theirs, atol=1e-5 + 5e-7 * 3 * trained_len)  # their angles are float32


def test_scaling_in_the_attention_turns_q_and_k_alike():
    torch.manual_seed(0)
    module, x = RoPEAttention(16, 2, scaling="yarn", factor=4, trained_len=16), torch.randn(2, 40, 16)
    q, k, v = module.qkv(x).view(2, 40, 3, 2, 8).permute(2, 0, 3, 1, 4)
    table = rope_cos_sin(torch.arange(40), 8, scaling="yarn", factor=4, trained_len=16)
    scores = apply_rope(q, *table) @ apply_rope(k, *table).transpose(-1, -2) / 8 ** 0.5
    weights = scores.masked_fill(torch.ones(40, 40, dtype=torch.bool).triu(1), float("-inf")).softmax(-1)
    assert torch.allclose(module(x), module.out((weights @ v).transpose(1, 2).reshape(2, 40, 16)), atol=1e-5)


@pytest.mark.parametrize("options, message", [
    (dict(scaling="cubic", factor=2), "scaling=cubic: must be one of none, linear, ntk, dynamic, yarn, llama3"),
    (dict(scaling="linear"), "scaling=linear: factor=None must be a number of at least 1"),
    (dict(scaling="linear", factor=0.5), "factor=0.5 must be a number of at least 1"),
    (dict(scaling="ntk", factor=float("nan")), "factor=nan must be"),
    (dict(scaling="ntk", factor=float("inf")), "factor=inf must be"),
    (dict(factor=2), "factor=2 without a scaling"),
    (dict(scaling="yarn", factor=2), "scaling=yarn: trained_len=None must be a whole number"),
    (dict(scaling="dynamic", factor=2, trained_len=0), "trained_len=0 must be"),
    (dict(scaling="llama3", factor=2, trained_len=2.5), "trained_len=2.5 must be"),
    (dict(scaling="linear", factor=2, beta_fast=8), "scaling=linear has no option beta_fast; it has none"),
    (dict(scaling="llama3", factor=2, trained_len=8, beta_slow=8), "it has low_freq_factor, high_freq_factor"),
    (dict(scaling="yarn", factor=2, trained_len=8, beta_fast=1), "beta_slow=1 must be positive and below beta_fast=1"),
    (dict(scaling="llama3", factor=2, trained_len=8, low_freq_factor=9), "low_freq_factor=9 must be positive and below"),
    (dict(scaling="yarn", factor=2, trained_len=8, attention_factor=0), "attention_factor=0 must be a positive number"),
    (dict(scaling="yarn", factor=2, trained_len=8, base=1.0), "scaling=yarn: base=1.0 must be above 1"),
])
def test_scaling_errors_name_the_value(options, message):
    with pytest.raises(ValueError, match=message):
        rope_cos_sin(torch.arange(4), 8, **options)
    with pytest.raises(ValueError, match=message):
        RoPEAttention(16, 2, **options)


@pytest.mark.parametrize("kind", ["ntk", "dynamic"])
def test_one_pair_has_no_ntk(kind):
    with pytest.raises(ValueError, match="head width 2 has one pair"):
        RoPEAttention(4, 2, scaling=kind, factor=2, trained_len=8)


@pytest.mark.parametrize("options, message", [
    (dict(scaling="dynamic", factor=2, trained_len=64), "length=None must be the current length"),
    (dict(scaling="dynamic", factor=2, trained_len=64, length=math.inf), "length=inf must be"),
    (dict(scaling="yarn", factor=2, trained_len=math.inf), "trained_len=inf must be a whole number"),
])
def test_lengths_that_are_missing_or_infinite(options, message):
    with pytest.raises(ValueError, match=message):
        rope_frequencies(16, **options)
