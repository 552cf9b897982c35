import math
import pickle

import pytest
import torch

from pos_rope import RoPEAttention, apply_rope, rope_cos_sin, rope_frequencies
from schemes import rope_scaling
from schemes.rope_scaling import ScaledRoPEAttention, scaled_frequencies
from schemes.scheme import parse_scheme
from tiny_lm import TinyLM


def ratios(new, head_dim, base=1e4):
    """New over old inverse frequencies."""
    return (new / rope_frequencies(head_dim, base)).tolist()


# Each scaling against numbers by hand


def test_linear_is_position_interpolation():
    plain = rope_frequencies(32)
    scaled = rope_cos_sin(torch.tensor([4, 8]), rope_scaling.linear(plain, 4))
    for ours, expected in zip(scaled, rope_cos_sin(torch.tensor([1, 2]), plain)):
        assert torch.allclose(ours, expected, atol=1e-7)


LARGER_BASES = [
    (32, 2, 20945.88),
    (32, 4, 43873.00),
    (32, 8, 91895.87),
    (32, 16, 192484.01),
    (64, 2, 20452.23),
    (64, 4, 41829.37),
    (64, 8, 85550.38),
]


@pytest.mark.parametrize("head_dim, factor, base", LARGER_BASES)
def test_ntk_is_a_larger_base(head_dim, factor, base):
    frequencies = rope_scaling.ntk(head_dim, 1e4, factor)
    assert torch.allclose(frequencies, rope_frequencies(head_dim, base), rtol=1e-6)
    new_over_old = ratios(frequencies, head_dim)
    assert new_over_old[0] == 1 and new_over_old[-1] == pytest.approx(1 / factor)


BASES_BY_LENGTH = {1: 10000, 128: 10000, 129: 10166.75, 256: 32279.69, 512: 79696.25}


@pytest.mark.parametrize("length", BASES_BY_LENGTH)
def test_dynamic_follows_the_length(length):
    frequencies = rope_scaling.dynamic(32, 1e4, factor=2, trained_len=128)(torch.arange(length))
    expected = rope_frequencies(32, BASES_BY_LENGTH[length])
    assert frequencies.shape == (16,) and torch.allclose(frequencies, expected, rtol=1e-6)


def test_dynamic_gives_each_sequence_its_own_length():
    """The largest position + 1 of each, wherever in the sequence it stands."""
    lengths = list(BASES_BY_LENGTH)
    positions = torch.zeros(len(lengths), 3, dtype=torch.int64)
    positions[:, 1] = torch.tensor(lengths) - 1
    each = rope_scaling.dynamic(32, 1e4, 2, 128)(positions)  # (B, D/2)
    expected = torch.stack([rope_frequencies(32, BASES_BY_LENGTH[n]) for n in lengths])
    assert torch.allclose(each, expected, rtol=1e-6)


def test_dynamic_of_factor_1_is_ntk_for_the_current_length():
    frequencies = rope_scaling.dynamic(16, 1e4, factor=1, trained_len=64)(torch.arange(256))
    assert torch.allclose(frequencies, rope_scaling.ntk(16, 1e4, 4), rtol=1e-12)


RAMPS = [
    (32, 256, [1, 0.892857, 0.785714, 0.678571, 0.571429, 0.464286, 0.357143] + [0.25] * 9),
    (16, 64, [1, 0.75, 0.5] + [0.25] * 5),
]


@pytest.mark.parametrize("head_dim, trained_len, expected", RAMPS)
def test_yarn_ramp_by_hand(head_dim, trained_len, expected):
    frequencies = rope_scaling.yarn(rope_frequencies(head_dim), 1e4, 4, trained_len)
    assert ratios(frequencies, head_dim) == pytest.approx(expected, abs=1e-6)


AMPLITUDES = {1: 1, 2: 1.069315, 4: 1.138629, 8: 1.207944, 16: 1.277259}


@pytest.mark.parametrize("factor", AMPLITUDES)
def test_yarn_amplitude_is_on_cos_and_sin_once(factor):
    assert rope_scaling.yarn_amplitude(factor) == pytest.approx(AMPLITUDES[factor], abs=1e-6)
    scaled = scaled_frequencies(32, 1e4, "yarn", factor, 256)
    cos, sin = rope_cos_sin(torch.tensor([0, 3]), *scaled)
    length = torch.full((2, 16), float(AMPLITUDES[factor]))
    assert torch.allclose(cos[0], length[0]) and torch.allclose((cos**2 + sin**2).sqrt(), length)
    _, given = scaled_frequencies(32, 1e4, "yarn", factor, 256, attention_factor=0.5)
    assert given == 0.5


def test_llama3_bands_by_hand():
    frequencies = rope_scaling.llama3(rope_frequencies(32), 8, 128)
    expected = [1, 1, 1, 0.8899, 0.4275, 0.1675] + [0.125] * 10
    assert ratios(frequencies, 32) == pytest.approx(expected, abs=1e-4)


# Against Hugging Face


def llama_config(kind, head_dim, trained_len, factor, base):
    from transformers import LlamaConfig

    rope = dict(rope_type=kind, rope_theta=base, factor=factor)
    rope["original_max_position_embeddings"] = trained_len
    if kind == "llama3":
        rope |= dict(low_freq_factor=1.0, high_freq_factor=4.0)
    size = dict(head_dim=head_dim, hidden_size=2 * head_dim, num_attention_heads=2)
    return LlamaConfig(**size, max_position_embeddings=trained_len, rope_parameters=rope)


LENGTHS = [(4, 2.0, 1e4), (64, 4.0, 1e4), (256, 8.0, 5e5), (8192, 3.7, 10.0), (256, 1.0, 1e4)]
WIDTHS = [(kind, D) for kind in ("linear", "dynamic", "yarn", "llama3") for D in (2, 8, 32, 128)]
WIDTHS.remove(("dynamic", 2))  # one pair cannot be scaled and stay as it is


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("kind, head_dim", WIDTHS)
@pytest.mark.parametrize("trained_len, factor, base", LENGTHS)
def test_frequencies_equal_transformers(kind, head_dim, trained_len, factor, base):
    from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

    config = llama_config(kind, head_dim, trained_len, factor, base)
    ours, amplitude = scaled_frequencies(head_dim, base, kind, factor, trained_len)
    for length in (max(1, trained_len // 2), trained_len, 3 * trained_len + 1):
        theirs, their_amplitude = ROPE_INIT_FUNCTIONS[kind](config, "cpu", seq_len=length)
        values = ours(torch.tensor([0, length - 1])) if callable(ours) else ours
        assert torch.allclose(values, theirs.double(), rtol=2e-6, atol=0)
        assert amplitude == pytest.approx(their_amplitude)


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("kind", ["linear", "dynamic", "yarn", "llama3"])
@pytest.mark.parametrize("trained_len, factor, base", LENGTHS[1:3])
def test_rotated_queries_equal_transformers(kind, trained_len, factor, base):
    from transformers.models.llama import modeling_llama as llama

    torch.manual_seed(0)
    x, positions = torch.randn(1, 2, 9, 32), torch.arange(9) + 3 * trained_len - 8
    config = llama_config(kind, 32, trained_len, factor, base)
    cos, sin = llama.LlamaRotaryEmbedding(config)(x, positions[None])
    expected, _ = llama.apply_rotary_pos_emb(x, x, cos, sin)
    frequencies, amplitude = scaled_frequencies(32, base, kind, factor, trained_len)
    if callable(frequencies):
        frequencies = frequencies(positions)
    ours = apply_rope(x, *rope_cos_sin(positions, frequencies, amplitude), interleaved=False)
    tolerance = 1e-5 + 5e-7 * 3 * trained_len  # their angles are float32
    assert torch.allclose(ours, expected, atol=tolerance)


# In the attention layer


@pytest.mark.parametrize("scaling", ["linear", "ntk", "dynamic", "yarn", "llama3"])
def test_attention_rotates_q_and_k_alike(scaling):
    torch.manual_seed(0)
    module = ScaledRoPEAttention(16, 2, scaling=scaling, factor=4, trained_len=16)
    x, positions = torch.randn(2, 40, 16), torch.arange(40)
    frequencies, amplitude = scaled_frequencies(8, 1e4, scaling, 4, 16)
    if callable(frequencies):
        frequencies = frequencies(positions)
    tables = rope_cos_sin(positions, frequencies, amplitude)
    q, k, v = module.qkv(x).view(2, 40, 3, 2, 8).permute(2, 0, 3, 1, 4)
    score = apply_rope(q, *tables) @ apply_rope(k, *tables).transpose(-1, -2) / math.sqrt(8)
    seen = torch.ones(40, 40, dtype=torch.bool).tril()
    weights = score.masked_fill(~seen, float("-inf")).softmax(-1)
    expected = module.out((weights @ v).transpose(1, 2).reshape(2, 40, 16))
    assert torch.allclose(module(x), expected, atol=1e-5)


def test_dynamic_depends_on_the_current_length_only():
    torch.manual_seed(0)
    module = ScaledRoPEAttention(32, 2, scaling="dynamic", factor=2, trained_len=8)
    plain, x = RoPEAttention(32, 2), torch.randn(1, 40, 32)
    plain.load_state_dict(module.state_dict())
    short = module(x[:, :8])
    assert not torch.allclose(module(x), plain(x))
    assert torch.equal(short, module(x[:, :8])) and torch.equal(short, plain(x[:, :8]))


def test_no_sequence_of_a_batch_moves_another():
    torch.manual_seed(0)
    module = ScaledRoPEAttention(32, 2, scaling="dynamic", factor=2, trained_len=8)
    x, positions = torch.randn(2, 12, 32), torch.stack((torch.arange(12), 9 * torch.arange(12)))
    alone = [module(x[i : i + 1], positions[i]) for i in range(2)]
    assert torch.allclose(module(x, positions), torch.cat(alone), atol=1e-6)


def test_longer_gives_the_options_that_a_scheme_string_can_hold():
    assert ScaledRoPEAttention.LONGER == ("linear", "ntk", "dynamic", "yarn", "llama3")
    for way in ScaledRoPEAttention.LONGER:
        options = ScaledRoPEAttention.longer(way, 64, 16)
        assert options == dict(scaling=way, factor=4, trained_len=16)
        layer = TinyLM(parse_scheme("rope").longer(way, 64, 16), 16, 1, 2).blocks[0].attention
        assert (layer.scaling, layer.factor, layer.trained_len) == (way, 4, 16)


WRONG = [
    (dict(scaling="cubic", factor=2), "scaling=cubic: must be one of none, linear, ntk, dynamic, "),
    (dict(scaling="linear"), "scaling=linear: factor=None must be a number of at least 1"),
    (dict(scaling="linear", factor=0.5), "factor=0.5 must be a number of at least 1"),
    (dict(scaling="ntk", factor=math.nan), "factor=nan must be"),
    (dict(scaling="ntk", factor=math.inf), "factor=inf must be"),
    (dict(scaling="none", factor=2), "factor=2 without a scaling"),
    (dict(scaling="none", beta_fast=2), "scaling=none has no option beta_fast; it has none"),
    (dict(scaling="yarn", factor=2), "scaling=yarn: trained_len=None must be a whole number"),
    (dict(scaling="dynamic", factor=2, trained_len=0), "trained_len=0 must be"),
    (dict(scaling="llama3", factor=2, trained_len=2.5), "trained_len=2.5 must be"),
    (dict(scaling="yarn", factor=2, trained_len=math.inf), "trained_len=inf must be a whole numb"),
    (dict(scaling="linear", factor=2, beta_fast=8), "linear has no option beta_fast; it has none"),
    (
        dict(scaling="llama3", factor=2, trained_len=8, beta_slow=8),
        "it has low_freq_factor, high_freq_factor",
    ),
    (
        dict(scaling="yarn", factor=2, trained_len=8, beta_fast=1),
        "beta_slow=1 must be positive and below beta_fast=1",
    ),
    (
        dict(scaling="llama3", factor=2, trained_len=8, low_freq_factor=9),
        "low_freq_factor=9 must be positive and below",
    ),
    (
        dict(scaling="yarn", factor=2, trained_len=8, attention_factor=0),
        "attention_factor=0 must be a positive number",
    ),
    (dict(scaling="yarn", factor=2, trained_len=8, base=1.0), "base=1.0 must be above 1"),
]


@pytest.mark.parametrize("options, message", WRONG)
def test_errors_name_the_value(options, message):
    with pytest.raises(ValueError, match=message):
        scaled_frequencies(8, **dict(base=1e4) | options)
    with pytest.raises(ValueError, match=message):
        ScaledRoPEAttention(16, 2, **options)


@pytest.mark.parametrize("scaling", ["ntk", "dynamic"])
def test_one_pair_has_no_ntk(scaling):
    with pytest.raises(ValueError, match="head width 2 has one pair"):
        ScaledRoPEAttention(4, 2, scaling=scaling, factor=2, trained_len=8)


def test_a_layer_that_follows_the_length_can_be_pickled():
    layer = ScaledRoPEAttention(16, 2, scaling="dynamic", factor=2, trained_len=8)
    again, x = pickle.loads(pickle.dumps(layer)), torch.randn(1, 20, 16)
    assert torch.equal(again(x), layer(x))


def test_a_factor_that_is_no_number_is_refused():
    with pytest.raises(ValueError, match="factor=four must be a number of at least 1"):
        ScaledRoPEAttention(16, 2, scaling="linear", factor="four")
