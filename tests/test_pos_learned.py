import pytest
import torch
import torch.nn.functional as F

from pos_learned import LearnedPositionalEmbedding


def test_rows_are_those_of_the_table():
    embedding = LearnedPositionalEmbedding(4, max_len=10)
    positions = torch.tensor([[0, 9, 3], [2, 2, 0]])
    expected = embedding.weight[positions]
    assert torch.equal(embedding(positions), expected)  # (B, T, dim)
    assert torch.equal(embedding(positions[0]), expected[0])  # (T, dim)
    assert torch.equal(embedding(positions.to(torch.uint8)), expected)  # not taken for a mask
    assert embedding(torch.empty(0, dtype=torch.int64)).shape == (0, 4)


def test_rows_start_small_and_are_all_there_is_in_the_state():
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


# Positions beyond the trained rows


def read(beyond, positions):
    """What stands at the positions when four rows of ten were trained, to 0, 1, 4 and 9."""
    embedding = LearnedPositionalEmbedding(1, max_len=10, beyond=beyond, trained_len=4)
    with torch.no_grad():
        embedding.weight[:, 0] = torch.tensor([0.0, 1, 4, 9] + [-100.0] * 6)
    return embedding(torch.tensor(positions)).squeeze(-1).tolist()


def test_policies_beyond_the_trained_rows():
    assert read("clamp", [0, 3, 4, 99]) == [0, 9, 9, 9]
    assert read("wrap", [0, 3, 4, 5, 11]) == [0, 9, 0, 1, 9]
    assert read("interpolate", [0, 1, 2, 3, 4, 5, 6]) == [0, 0.5, 1, 2.5, 4, 6.5, 9]
    assert read("interpolate", [[0, 6], [3, 1]]) == [[0, 9], [2.5, 0.5]]
    assert read("untrained", [3, 4]) == [9, -100]
    with pytest.raises(ValueError, match="position 4 was not trained: trained_len is 4"):
        read("error", [0, 4])
    with pytest.raises(ValueError, match="position -1 is negative"):
        read("wrap", [-1, 5])


@pytest.mark.parametrize("beyond", ["clamp", "wrap", "interpolate", "error", "untrained"])
def test_no_policy_changes_a_text_of_the_trained_length(beyond):
    assert read(beyond, [0, 1, 2, 3]) == [0, 1, 4, 9]
    assert read(beyond, [0, 1, 2]) == [0, 1, 4]


@pytest.mark.parametrize("n", [6, 63, 1000])
def test_interpolated_rows_are_those_of_torch(n):
    torch.manual_seed(0)
    embedding = LearnedPositionalEmbedding(6, max_len=9, beyond="interpolate", trained_len=5)
    rows = embedding.weight[None, :5].transpose(1, 2)  # (1, dim, L)
    expected = F.interpolate(rows, n, mode="linear", align_corners=True)[0].T  # (n, dim)
    assert torch.allclose(embedding(torch.arange(n)), expected, atol=1e-6)


def test_interpolation_ends_at_the_last_row_there_is():
    """The last position lies on row 4, and there is no row 5 to look at."""
    embedding = LearnedPositionalEmbedding(2, max_len=5, beyond="interpolate", trained_len=5)
    assert torch.equal(embedding(torch.arange(9))[-1], embedding.weight[4])


@pytest.mark.parametrize("beyond", ["clamp", "wrap", "interpolate"])
def test_policies_train_the_rows_they_use(beyond):
    embedding = LearnedPositionalEmbedding(2, max_len=6, beyond=beyond, trained_len=3).bfloat16()
    rows = embedding(torch.arange(9))
    rows.float().sum().backward()
    gradient = embedding.weight.grad
    assert rows.dtype == torch.bfloat16
    assert (gradient[:3] > 0).all() and (gradient[3:] == 0).all()


def test_longer_gives_the_options_of_a_policy():
    assert LearnedPositionalEmbedding.LONGER == ("clamp", "wrap", "interpolate")
    options = LearnedPositionalEmbedding.longer("wrap", 64, 16)
    assert options == dict(beyond="wrap", trained_len=16)
    assert LearnedPositionalEmbedding(2, max_len=20, **options)(torch.tensor([63])).shape == (1, 2)


WRONG_POLICIES = [
    (dict(beyond="extend"), "beyond=extend: must be one of untrained, error, clamp, wrap, interp"),
    (dict(beyond="clamp"), "trained_len=None must be a whole number from 1 to max_len=10"),
    (dict(beyond="wrap", trained_len=11), "trained_len=11 must be"),
    (dict(beyond="error", trained_len=0), "trained_len=0 must be"),
    (dict(beyond="interpolate", trained_len=2.5), "trained_len=2.5 must be"),
]


@pytest.mark.parametrize("options, message", WRONG_POLICIES)
def test_errors_of_a_policy_name_the_value(options, message):
    with pytest.raises(ValueError, match=message):
        LearnedPositionalEmbedding(4, max_len=10, **options)
