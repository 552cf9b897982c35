import pytest
import torch

from pos_learned import LearnedPositionalEmbedding


def test_rows_are_those_of_the_table():
    embedding = LearnedPositionalEmbedding(4, max_len=10)
    positions = torch.tensor([[0, 9, 3], [2, 2, 0]])
    assert torch.equal(embedding(positions), embedding.weight[positions])  # (B, T, dim)
    assert torch.equal(embedding(positions[0]), embedding.weight[[0, 9, 3]])  # (T, dim)
    assert torch.equal(embedding(positions.to(torch.uint8)), embedding.weight[positions])  # not taken for a mask
    assert embedding(torch.empty(0, dtype=torch.int64)).shape == (0, 4)


def test_start_values():
    torch.manual_seed(0)
    weight = LearnedPositionalEmbedding(64, max_len=1000).weight
    assert abs(weight.std().item() - 0.02) < 0.001 and abs(weight.mean().item()) < 0.001
    assert list(LearnedPositionalEmbedding(2).state_dict()) == ["weight"]
    assert LearnedPositionalEmbedding(2).weight.shape == (4096, 2)


def test_only_rows_that_were_used_get_a_gradient():
    embedding = LearnedPositionalEmbedding(3, max_len=6)
    embedding(torch.arange(4)).sum().backward()
    assert embedding.weight.grad.tolist() == [[1.0] * 3] * 4 + [[0.0] * 3] * 2


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float64])
def test_dtype_follows_the_module(dtype):
    assert LearnedPositionalEmbedding(4).to(dtype)(torch.arange(3)).dtype == dtype


def test_errors_name_the_numbers():
    embedding = LearnedPositionalEmbedding(4, max_len=10)
    with pytest.raises(ValueError, match="position 10 has no row: max_len is 10"):
        embedding(torch.tensor([0, 10]))
    with pytest.raises(ValueError, match="position -1 is negative"):
        embedding(torch.tensor([-1, 3]))
    for wrong in (torch.tensor([0.0]), torch.tensor([True])):
        with pytest.raises(ValueError, match="must be integers"):
            embedding(wrong)
    for dim, max_len in ((0, 4), (4, 0), (-1, 4)):
        with pytest.raises(ValueError, match=f"dim={dim} and max_len={max_len}"):
            LearnedPositionalEmbedding(dim, max_len)


def rows_of(beyond, positions):
    embedding = LearnedPositionalEmbedding(1, max_len=10, beyond=beyond, trained_len=4)
    with torch.no_grad():
        embedding.weight[:, 0] = torch.tensor([0.0, 1, 4, 9] + [-100.0] * 6)
    return embedding(torch.tensor(positions)).squeeze(-1).tolist()


def test_policies_beyond_the_trained_rows():
    assert rows_of("clamp", [0, 3, 4, 99]) == [0, 9, 9, 9]
    assert rows_of("wrap", [0, 3, 4, 5, 11]) == [0, 9, 0, 1, 9]
    assert rows_of("interpolate", [0, 1, 2, 3, 4, 5, 6]) == [0, 0.5, 1, 2.5, 4, 6.5, 9]  # 7 positions over rows 0 … 3
    assert rows_of("interpolate", [[0, 6], [3, 1]]) == [[0, 9], [2.5, 0.5]]
    assert rows_of("untrained", [3, 4]) == [9, -100]
    for beyond in ("clamp", "wrap", "interpolate", "error", "untrained"):  # up to the trained length nothing is changed
        assert rows_of(beyond, [0, 1, 2, 3]) == [0, 1, 4, 9]
    with pytest.raises(ValueError, match="position 4 was not trained: trained_len is 4"):
        rows_of("error", [0, 4])
    with pytest.raises(ValueError, match="position -1 is negative"):
        rows_of("wrap", [-1, 5])


@pytest.mark.parametrize("n", [5, 8, 63, 1000])
def test_interpolated_rows_are_those_of_torch(n):
    torch.manual_seed(0)
    embedding = LearnedPositionalEmbedding(6, max_len=9, beyond="interpolate", trained_len=5)
    expected = torch.nn.functional.interpolate(embedding.weight[None, :5].transpose(1, 2), n, mode="linear", align_corners=True)
    assert torch.allclose(embedding(torch.arange(n)), expected[0].T, atol=1e-6)


def test_interpolation_to_the_last_row_there_is():
    """The last position lies on row 4, and there is no row 5 to look at."""
    embedding = LearnedPositionalEmbedding(2, max_len=5, beyond="interpolate", trained_len=5)
    assert torch.equal(embedding(torch.arange(9))[-1], embedding.weight[4])


def test_policies_train_the_rows_they_use():
    for beyond in ("clamp", "wrap", "interpolate"):
        embedding = LearnedPositionalEmbedding(2, max_len=6, beyond=beyond, trained_len=3).bfloat16()
        out = embedding(torch.arange(9))
        out.float().sum().backward()
        assert out.dtype == torch.bfloat16 and (embedding.weight.grad[:3] > 0).all() and (embedding.weight.grad[3:] == 0).all()


@pytest.mark.parametrize("options, message", [
    (dict(beyond="extend"), "beyond=extend: must be one of untrained, error, clamp, wrap, interpolate"),
    (dict(beyond="clamp"), "trained_len=None must be a whole number from 1 to max_len=10"),
    (dict(beyond="wrap", trained_len=11), "trained_len=11 must be"),
    (dict(beyond="error", trained_len=0), "trained_len=0 must be"),
    (dict(beyond="interpolate", trained_len=2.5), "trained_len=2.5 must be"),
])
def test_policy_errors(options, message):
    with pytest.raises(ValueError, match=message):
        LearnedPositionalEmbedding(4, max_len=10, **options)
