import math

import pytest
import torch

from pos_sin import SinusoidalPositionalEncoding


def test_known_rows():
    rows = SinusoidalPositionalEncoding(8)(torch.arange(2))
    one = [0.841471, 0.5403023, 0.0998334, 0.9950042, 0.0099998, 0.99995, 0.001, 0.9999995]
    assert rows[0].tolist() == [0, 1] * 4
    assert rows[1].tolist() == pytest.approx(one, abs=5e-8)


def test_equals_transformers_xlm():
    from transformers.models.xlm.modeling_xlm import create_sinusoidal_embeddings

    reference = torch.empty(2048, 32)
    create_sinusoidal_embeddings(2048, 32, reference)
    rows = SinusoidalPositionalEncoding(32)(torch.arange(2048))
    assert torch.allclose(rows, reference, rtol=0, atol=1e-6)


@pytest.mark.parametrize("position", [3, 255, 4097, 10_000_019])
def test_far_positions_against_the_formula_in_double(position):
    row = SinusoidalPositionalEncoding(6, base=500.0)(torch.tensor([position]))[0]
    for i in range(3):
        angle = position / 500.0 ** (2 * i / 6)
        assert row[2 * i].item() == pytest.approx(math.sin(angle), abs=1e-6)
        assert row[2 * i + 1].item() == pytest.approx(math.cos(angle), abs=1e-6)


def test_nothing_depends_on_earlier_calls():
    encoding = SinusoidalPositionalEncoding(8)
    before = encoding(torch.arange(5))
    encoding(torch.arange(50_000))
    assert torch.equal(encoding(torch.arange(5)), before)
    batch = torch.tensor([[4, 0], [2, 2]])
    assert torch.equal(encoding(batch), before[batch])  # (B, T, dim)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float64])
def test_casts_round_the_rows_and_not_the_angles(dtype):
    encoding = SinusoidalPositionalEncoding(8)
    exact = encoding(torch.arange(2000))
    cast = encoding.to(dtype)(torch.arange(2000))
    assert cast.dtype == dtype
    assert torch.allclose(cast.float(), exact, rtol=0, atol=2**-8)
    assert not torch.equal(cast[256], cast[257])  # bfloat16 cannot hold 257
    assert dict(encoding.state_dict()) == {} and not list(encoding.parameters())


def test_interpolation_divides_positions():
    plain, scaled = SinusoidalPositionalEncoding(8), SinusoidalPositionalEncoding(8, factor=4)
    expected = plain(torch.tensor([0, 1, 2]))
    assert torch.allclose(scaled(torch.tensor([0, 4, 8])), expected, atol=1e-7)
    row = scaled(torch.tensor([1]))[0]  # position 1/4
    angles = [0.25 * 10**-i for i in range(4)]
    assert row[0::2].tolist() == pytest.approx([math.sin(a) for a in angles], abs=1e-7)
    assert row[1::2].tolist() == pytest.approx([math.cos(a) for a in angles], abs=1e-7)


def test_longer_gives_the_factor():
    assert SinusoidalPositionalEncoding.LONGER == ("linear",)
    assert SinusoidalPositionalEncoding.longer("linear", 64, 16) == dict(factor=4)


def test_errors_name_the_numbers():
    for dim in (7, 0, -2):
        with pytest.raises(ValueError, match=f"dim={dim}: must be even"):
            SinusoidalPositionalEncoding(dim)
    for base in (0, -1.0, float("nan"), float("inf")):
        with pytest.raises(ValueError, match="base=.*positive"):
            SinusoidalPositionalEncoding(8, base=base)
    for factor in (0.5, 0, float("nan"), float("inf")):
        with pytest.raises(ValueError, match="factor=.* must be a number of at least 1"):
            SinusoidalPositionalEncoding(8, factor=factor)
    for wrong in (torch.tensor([0.5]), torch.tensor([True])):
        with pytest.raises(ValueError, match="must be integers"):
            SinusoidalPositionalEncoding(8)(wrong)
