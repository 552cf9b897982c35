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
