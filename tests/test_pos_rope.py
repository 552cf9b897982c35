import math

import pytest
import torch

from pos_rope import RoPEAttention, apply_rope, rope_cos_sin, rope_frequencies
from tiny_lm import Cache


def rotate(x, positions, base=10000.0, interleaved=True):
    tables = rope_cos_sin(positions, rope_frequencies(x.shape[-1], base))
    return apply_rope(x, *tables, interleaved)


def plain_attention(module, x, rotation, causal=True):
    """The formula, with somebody else's rotation of q and k."""
    B, T, C = x.shape
    q, k, v = module.qkv(x).view(B, T, 3, module.n_head, -1).permute(2, 0, 3, 1, 4)
    score = rotation(q) @ rotation(k).transpose(-1, -2) / math.sqrt(q.shape[-1])  # (B, H, T, T)
    if causal:
        score = score.masked_fill(torch.ones(T, T, dtype=torch.bool).triu(1), float("-inf"))
    return module.out((score.softmax(-1) @ v).transpose(1, 2).reshape(B, T, C))


def llama_tables(head_dim, base, positions):
    """cos and sin as Hugging Face Llama makes them, for positions (B, T)."""
    from transformers import LlamaConfig
    from transformers.models.llama.modeling_llama import LlamaRotaryEmbedding

    rope = {"rope_type": "default", "rope_theta": base}
    heads = dict(head_dim=head_dim, hidden_size=2 * head_dim, num_attention_heads=2)
    return LlamaRotaryEmbedding(LlamaConfig(**heads, rope_parameters=rope))(
        torch.ones(1), positions
    )


# Frequencies and rotations


def test_known_frequencies():
    assert rope_frequencies(8).tolist() == pytest.approx([1, 0.1, 0.01, 0.001], rel=1e-12)
    assert rope_frequencies(8).dtype == torch.float64
    cos, sin = rope_cos_sin(torch.tensor([1]), rope_frequencies(8))
    assert torch.atan2(sin, cos)[0].tolist() == pytest.approx([1, 0.1, 0.01, 0.001], rel=1e-5)
    for width, last in ((32, 1.778279e-4), (64, 1.333521e-4)):
        assert rope_frequencies(width)[-1].item() == pytest.approx(last, rel=1e-6)


def test_tables_by_hand():
    """One set of frequencies per sequence, and an amplitude on cos and sin."""
    frequencies = torch.tensor([[1.0, 0.5], [0.25, 0.0]])  # (B, D/2)
    positions = torch.tensor([[0, 2, 4], [8, 6, 4]])  # (B, T)
    angle = torch.tensor([[[0, 0], [2, 1], [4, 2]], [[2, 0], [1.5, 0], [1, 0]]])
    cos, sin = rope_cos_sin(positions, frequencies, amplitude=3.0)
    assert cos.dtype == sin.dtype == torch.float32
    assert torch.allclose(cos, 3 * angle.cos()) and torch.allclose(sin, 3 * angle.sin())


def test_known_rotation():
    """Pairs (1, 0) and (0, 2), rotated by 3 and by 0.03."""
    c, s, c2, s2 = math.cos(3), math.sin(3), math.cos(0.03), math.sin(0.03)
    x, three = torch.tensor([1.0, 0, 0, 2]).view(1, 1, 1, 4), torch.tensor([3])
    paired = rotate(x, three).flatten().tolist()
    assert paired == pytest.approx([c, s, -2 * s2, 2 * c2], abs=1e-6)
    split = rotate(x, three, interleaved=False).flatten().tolist()  # channels (0, 2) and (1, 3)
    assert split == pytest.approx([c, -2 * s2, s, 2 * c2], abs=1e-6)


@pytest.mark.parametrize("T, H, D, offset", [(7, 3, 8, 0), (5, 5, 32, 0), (16, 2, 64, 2031)])
def test_interleaved_equals_two_libraries(T, H, D, offset):
    from rotary_embedding_torch import RotaryEmbedding
    from x_transformers import x_transformers

    x = torch.randn(2, H, T, D, generator=torch.Generator().manual_seed(0))
    ours = rotate(x, torch.arange(offset, offset + T))
    theirs = RotaryEmbedding(dim=D).rotate_queries_or_keys(x, offset=offset)
    # float32 angles: theirs are wrong by 1e-4 at position 2047
    assert torch.allclose(ours, theirs, rtol=0, atol=1e-3 if offset else 1e-5)
    if not offset:
        frequencies, _ = x_transformers.RotaryEmbedding(D).forward_from_seq_len(T)
        theirs = x_transformers.apply_rotary_pos_emb(x, frequencies)
        assert torch.allclose(ours, theirs, rtol=0, atol=1e-5)


@pytest.mark.parametrize("base", [10000.0, 500.0])
def test_half_split_equals_hugging_face_llama(base):
    from transformers.models.llama.modeling_llama import apply_rotary_pos_emb

    positions = torch.tensor([[0, 1, 2, 500], [9, 7, 2047, 3]])
    q, k = torch.randn(2, 2, 3, 4, 32, generator=torch.Generator().manual_seed(0))
    theirs = apply_rotary_pos_emb(q, k, *llama_tables(32, base, positions))
    for x, expected in zip((q, k), theirs):
        ours = rotate(x, positions, base, interleaved=False)
        assert torch.allclose(ours, expected, rtol=0, atol=1e-3)


def test_the_two_layouts_differ_by_a_reordering_of_channels():
    x, positions, p = torch.randn(1, 2, 6, 8), torch.arange(6), [0, 2, 4, 6, 1, 3, 5, 7]
    split = rotate(x[..., p], positions, interleaved=False)
    assert torch.equal(split, rotate(x, positions)[..., p])


@pytest.mark.parametrize("interleaved", [True, False])
def test_a_score_depends_on_the_distance_only(interleaved):
    generator = torch.Generator().manual_seed(0)
    q, k = torch.randn(2, 1, 1, 1, 16, dtype=torch.float64, generator=generator)

    def score(m, n):
        return torch.sum(at(q, m) * at(k, n)).item()

    def at(x, position):
        return rotate(x, torch.tensor([position]), interleaved=interleaved)

    assert score(5, 2) == pytest.approx(score(12, 9), abs=1e-6)
    assert score(5, 2) == pytest.approx(score(1005, 1002), abs=1e-5)
    assert abs(score(5, 2) - score(5, 3)) > 1e-3
    assert at(q, 77).norm().item() == pytest.approx(q.norm().item(), rel=1e-6)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("interleaved", [True, False])
def test_position_0_changes_no_bit(dtype, interleaved):
    x = torch.randn(2, 3, 1, 16).to(dtype)
    assert torch.equal(rotate(x, torch.tensor([0]), interleaved=interleaved), x)


def test_heads_alike_tokens_differ_also_when_there_are_as_many():
    """The same vector for every sequence, head and token, with T = H and even B = H = T."""
    one = torch.randn(1, 1, 1, 8).expand(4, 4, 4, 8)
    rotated = rotate(one, torch.arange(4))
    assert torch.equal(rotated, rotated[:1, :1].expand(4, 4, 4, 8))
    assert not torch.allclose(rotated[0, 0, 0], rotated[0, 0, 1])
    each = rotate(one[:2], torch.tensor([[0, 1, 2, 3], [5, 5, 5, 5]]))
    assert torch.equal(each[0], rotated[0])
    assert torch.equal(each[1], rotate(one, torch.full((4,), 5))[1])
    all_differ = rotate(one, torch.arange(16).view(4, 4))
    assert torch.allclose(all_differ[2, 1, 3], rotate(one, torch.tensor([11] * 4))[0, 0, 0])


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_low_precision_still_tells_neighbours_apart(dtype):
    rotated = rotate(torch.ones(1, 1, 1024, 32, dtype=dtype), torch.arange(1024))
    assert rotated.dtype == dtype
    assert len(torch.unique(rotated[0, 0].float(), dim=0)) == 1024
    module = RoPEAttention(64, 2).to(dtype)
    assert module.frequencies.dtype == torch.float64
    assert module(torch.randn(1, 300, 64).to(dtype)).dtype == dtype
    assert sorted(module.state_dict()) == ["out.weight", "qkv.weight"]


def test_the_gradient_is_the_opposite_rotation():
    x, upstream = torch.randn(1, 2, 6, 8, requires_grad=True), torch.randn(1, 2, 6, 8)
    rotate(x, torch.arange(6)).backward(upstream)
    assert torch.allclose(x.grad, rotate(upstream, -torch.arange(6)), atol=1e-6)


LAYOUTS = ["of qkv", "transposed", "odd offset", "expanded", "overlapping", "reversed axes"]


def laid_out(layout, B=2, H=3, T=5, D=8):
    """Random x (B, H, T, D) that lies in memory in this way."""
    torch.manual_seed(0)
    return {
        "of qkv": torch.randn(B, T, 3, H, D).permute(2, 0, 3, 1, 4)[1],
        "transposed": torch.randn(B, H, D, T).transpose(-1, -2),
        "odd offset": torch.randn(B, H, T, D + 1)[..., 1:],
        "expanded": torch.randn(1, H, 1, D).expand(B, H, T, D),
        "overlapping": torch.randn(2000).as_strided((B, H, T, D), (1, 1, 1, 1)),
        "reversed axes": torch.randn(D, T, H, B).permute(3, 2, 1, 0),
    }[layout]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float64])
@pytest.mark.parametrize("layout", LAYOUTS)
def test_any_memory_layout(layout, dtype):
    """However x lies in memory: the same values, and the same gradient, as of a contiguous copy."""
    x = laid_out(layout).to(dtype).detach().requires_grad_()
    copy = x.detach().clone(memory_format=torch.contiguous_format).requires_grad_()
    upstream = torch.randn(x.shape).to(dtype)
    tables = rope_cos_sin(torch.arange(5), rope_frequencies(8))
    of_x, of_copy = apply_rope(x, *tables), apply_rope(copy, *tables)
    of_x.backward(upstream)
    of_copy.backward(upstream)
    rounding = 1e-2 if dtype == torch.bfloat16 else 1e-6
    assert torch.allclose(of_x, of_copy, atol=rounding)
    assert torch.allclose(x.grad, copy.grad, atol=rounding)


# The attention layer


@pytest.mark.parametrize("length", [1, 7, 65])
@pytest.mark.parametrize("causal", [True, False])
def test_attention_equals_the_formula_with_a_librarys_rotation(length, causal):
    from rotary_embedding_torch import RotaryEmbedding

    torch.manual_seed(0)
    module, x = RoPEAttention(24, 3, causal=causal), torch.randn(2, length, 24)
    rotation = RotaryEmbedding(dim=8).rotate_queries_or_keys
    assert torch.allclose(module(x), plain_attention(module, x, rotation, causal), atol=1e-5)


def test_half_split_attention_equals_the_formula_with_hugging_face_llama():
    from transformers.models.llama.modeling_llama import apply_rotary_pos_emb

    torch.manual_seed(0)
    module, x = RoPEAttention(24, 3, base=77.0, interleaved=False), torch.randn(2, 11, 24)
    tables = llama_tables(8, 77.0, torch.arange(11)[None])

    def rotation(q):
        return apply_rotary_pos_emb(q, q, *tables)[0]

    expected = plain_attention(module, x, rotation)
    assert torch.allclose(module(x), expected, rtol=0, atol=1e-5)
    module.interleaved = True
    assert not torch.allclose(module(x), expected, atol=1e-3)


def test_attention_depends_on_the_distance_only():
    torch.manual_seed(0)
    module, x = RoPEAttention(32, 4).double(), torch.randn(2, 20, 32, dtype=torch.float64)
    y, own = module(x), torch.arange(20)
    assert torch.allclose(module(x, own + 1000), y, atol=1e-6)
    assert torch.allclose(module(x, torch.stack((own, own + 7))), y, atol=1e-6)
    assert not torch.allclose(module(x, 2 * own), y, atol=1e-4)


def test_frequencies_and_amplitude_can_be_handed_in():
    torch.manual_seed(0)
    half, x = rope_frequencies(8) / 2, torch.randn(2, 12, 16)
    module = RoPEAttention(16, 2, frequencies=half, amplitude=1.5)
    tables = rope_cos_sin(torch.arange(12), half, 1.5)

    def rotation(q):
        return apply_rope(q, *tables)

    assert torch.allclose(module(x), plain_attention(module, x, rotation), atol=1e-6)
    seen = []

    def follows(positions):
        seen.append(positions)
        return half

    module.frequencies = follows  # a function is given all positions
    assert torch.allclose(module(x), plain_attention(module, x, rotation), atol=1e-6)
    assert torch.equal(seen[0], torch.arange(12))


def test_one_query_after_nine_cached_keys():
    torch.manual_seed(0)
    module, x, cache = RoPEAttention(16, 2), torch.randn(1, 10, 16), Cache()
    module(x[:, :9], cache=cache)
    last = module(x[:, 9:], cache=cache)
    q, k, v = module.qkv(x).view(1, 10, 3, 2, 8).permute(2, 0, 3, 1, 4)
    keys = torch.cat([rotate(k[:, :, i : i + 1], torch.tensor([i])) for i in range(10)], 2)
    score = rotate(q[:, :, 9:], torch.tensor([9])) @ keys.transpose(-1, -2) / math.sqrt(8)
    expected = module.out((score.softmax(-1) @ v).transpose(1, 2).reshape(1, 1, 16))
    assert torch.allclose(last, expected, atol=1e-6)


@pytest.mark.parametrize("sizes", [(9, 1), (4, 5, 1), (1,) * 10])
@pytest.mark.parametrize("positions", [None, [3, 4, 6, 7, 8, 9, 11, 12, 40, 41], "each"])
def test_attention_with_a_cache_reads_as_in_one_pass(sizes, positions):
    torch.manual_seed(0)
    module, x, cache = RoPEAttention(16, 2).double(), torch.randn(2, 10, 16).double(), Cache()
    if positions == "each":
        positions = [list(range(10)), list(range(90, 70, -2))]
    chunks = [None] * len(sizes)
    if positions is not None:
        positions = torch.tensor(positions)
        chunks = positions.split(sizes, -1)
    parts = [module(part, at, cache) for part, at in zip(x.split(sizes, 1), chunks)]
    assert torch.allclose(torch.cat(parts, 1), module(x, positions), atol=1e-12)


def test_an_attention_handed_in_is_called():
    calls = []

    def attend(q, k, v, attn_mask, is_causal):
        calls.append((tuple(q.shape), attn_mask, is_causal))
        return v

    module, x = RoPEAttention(16, 2, attend=attend), torch.randn(3, 5, 16)
    assert torch.allclose(module(x), module.out(module.qkv(x)[..., 32:]), atol=1e-6)
    assert calls == [((3, 2, 5, 8), None, True)]


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
    module, x = RoPEAttention(16, 2), torch.randn(2, 4, 16)
    with pytest.raises(ValueError, match=r"have shape \(5,\); must be \(4,\) or \(2, 4\)"):
        module(x, torch.arange(5))
    with pytest.raises(ValueError, match="must be integers"):
        module(x, torch.arange(4.0))
    module.causal = False
    with pytest.raises(ValueError, match="a cache needs causal=True"):
        module(x, cache=Cache())
    four = rope_frequencies(8)
    with pytest.raises(ValueError, match="x has 16 channels and cos 4, not half as many"):
        apply_rope(torch.randn(1, 1, 4, 16), *rope_cos_sin(torch.arange(4), four))
    with pytest.raises(ValueError, match=r"cos is \(2, 4, 4\); x needs axes \(B, H, T, D\), has 3"):
        apply_rope(torch.randn(2, 4, 8), *rope_cos_sin(torch.arange(8).view(2, 4), four))
