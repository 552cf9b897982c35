"""Scheme files: their names, and the files that they import from beside them."""

import sys

import pytest

from schemes.scheme import parse_scheme, tidy

MINE = """from torch import nn
from amount import AMOUNT
class Mine(nn.Module):
    AMOUNT = AMOUNT
    def __init__(self, dim):
        super().__init__()
    def forward(self, positions):
        return positions
"""


def put(folder, amount):
    folder.mkdir(exist_ok=True)
    (folder / "amount.py").write_text(f"AMOUNT = {amount}\n")
    (folder / "mine.py").write_text(MINE)
    return parse_scheme(f"{folder / 'mine.py'}:Mine").cls.AMOUNT


def test_one_file_has_one_name():
    assert tidy("./own/mine.py:Mine:x=./1") == tidy("own//mine.py:Mine:x=./1")
    assert tidy("./own/mine.py:Mine:x=./1") == "own/mine.py:Mine:x=./1"
    assert tidy("rope:base=10") == "rope:base=10"


def test_files_of_one_name_in_two_folders_do_not_mix(tmp_path):
    assert [put(tmp_path / name, amount) for name, amount in (("a", 1), ("b", 2))] == [1, 2]


def test_a_changed_file_beside_a_scheme_is_read_anew(tmp_path):
    assert put(tmp_path / "a", 1) == 1
    assert put(tmp_path / "a", 22) == 22  # of another length, so that no cached code can serve


def test_the_search_path_is_left_as_it_was(tmp_path):
    before = list(sys.path)
    put(tmp_path / "a", 1)
    (tmp_path / "a" / "mine.py").write_text("import nothing_of_this_name\n")
    with pytest.raises(ValueError, match="cannot be imported: ModuleNotFoundError"):
        parse_scheme(f"{tmp_path / 'a' / 'mine.py'}:Mine")
    assert sys.path == before


KINDS = """from torch import nn
from pos_rope import RoPEAttention
class Helped(RoPEAttention):
    def rotate(self, q, k, q_positions, k_positions):
        return q, k
class Scaled(nn.Module):
    def forward(self, positions, scale=1.0):
        return positions
class Layer(nn.Module):
    def forward(self, x, pos=None):
        return x
class Relation(nn.Module):
    def bias(self, q, k, q_positions, k_positions):
        return q
"""


@pytest.mark.parametrize(
    "name, kind",
    [
        ("Helped", "attention"),
        ("Scaled", "embedding"),
        ("Layer", "attention"),
        ("Relation", "relation"),
    ],
)
def test_the_kind_of_classes_with_more_than_they_need(tmp_path, name, kind):
    (tmp_path / "mine.py").write_text(KINDS)
    assert parse_scheme(f"{tmp_path / 'mine.py'}:{name}").kind == kind
