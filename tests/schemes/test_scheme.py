import sys

import pytest
import torch

import schemes
from pos_alibi import ALiBiAttention
from pos_learned import LearnedPositionalEmbedding
from pos_sin import SinusoidalPositionalEncoding
from schemes import scheme
from schemes.rope_scaling import ScaledRoPEAttention
from schemes.scheme import SCHEMES, kind_of, parse_scheme, with_options
from tiny_lm import TinyLM

OWN = '''
import torch
from torch import nn


class Row(nn.Module):
    """An embedding."""

    LONGER = ("halved", "flipped")

    @staticmethod
    def longer(way, n, L):
        return dict(scale=L / n) if way == "halved" else dict(flip=True, kind="b")

    def __init__(self, dim, scale=1.0, flip=False, kind="a", count=3, size=None):
        super().__init__()
        self.dim, self.scale, self.size = dim, scale, size

    def forward(self, positions):
        return self.scale * positions.float()[..., None].expand(*positions.shape, self.dim)


class Rotation(nn.Module):
    """A relation."""

    def __init__(self, n_head, head_dim, layer, n_layer, trained_len, max_len):
        super().__init__()
        self.sizes = (n_head, head_dim, layer, n_layer, trained_len, max_len)

    def rotate(self, q, k, q_positions, k_positions):
        return q, k


class Bias(nn.Module):
    """A relation with a trained number of its own."""

    def __init__(self, n_head, head_dim, start=0.5):
        super().__init__()
        self.slope = nn.Parameter(torch.tensor(start))

    def bias(self, q, k, q_positions, k_positions):
        return -self.slope * (q_positions[..., :, None] - k_positions[..., None, :]).abs()[None]


class Layer(nn.Module):
    """An attention layer."""

    def __init__(self, dim, n_head, reach=4, layer=0, attend=None):
        super().__init__()
        self.qkv = nn.Linear(dim, 3 * dim, bias=False)
        self.out = nn.Linear(dim, dim, bias=False)
        self.extra = nn.Parameter(torch.randn(7))
        self.layer, self.reach, self.attend = layer, reach, attend

    def forward(self, x, positions=None):
        return self.out(self.qkv(x)[..., : x.shape[-1]].cumsum(1))


class NoLayers(nn.Module):
    def __init__(self, dim, n_head):
        super().__init__()


def not_a_class():
    pass
'''
SMALL = dict(dim=32, n_layer=2, n_head=4, trained_len=16, max_len=64)


@pytest.fixture
def own(tmp_path):
    """own(rest) -> the scheme string of a class of OWN."""
    (tmp_path / "my_pos.py").write_text(OWN)
    return lambda rest: f"{tmp_path / 'my_pos.py'}:{rest}"


# Strings


def test_the_classic_schemes_and_their_kinds():
    classes = dict(
        learned=(LearnedPositionalEmbedding, "embedding"),
        sin=(SinusoidalPositionalEncoding, "embedding"),
        rope=(ScaledRoPEAttention, "attention"),
        alibi=(ALiBiAttention, "attention"),
        none=(None, "relation"),
    )
    assert SCHEMES == tuple(classes)
    for name, (cls, kind) in classes.items():
        parsed = parse_scheme(name)
        assert (parsed.text, parsed.cls, parsed.options) == (name, cls, {})
        assert parsed.kind == kind_of(cls) == kind


def test_options_have_the_type_of_their_default():
    assert parse_scheme("rope:base=10,interleaved=false").options == dict(
        base=10.0, interleaved=False
    )
    assert parse_scheme("learned:max_len=7").options == dict(max_len=7)
    assert parse_scheme("rope:interleaved=1,scaling=yarn").options == dict(
        interleaved=True, scaling="yarn"
    )
    assert parse_scheme("rope:factor=2").options == dict(factor=2.0)  # the default is None


def test_options_reach_the_modules():
    assert TinyLM("rope:base=10", **SMALL).blocks[1].attention.base == 10
    assert TinyLM("learned:max_len=7", **SMALL).position.max_len == 7
    assert TinyLM("sin:base=50", **SMALL).position.base == 50


def test_with_options_writes_what_parse_scheme_reads(own):
    assert with_options("rope") == "rope"
    assert with_options("rope", base=10) == "rope:base=10"
    assert with_options("rope:base=10", scaling="yarn") == "rope:base=10,scaling=yarn"
    assert with_options("rope", factor=1 / 3) == "rope:factor=0.3333333333"
    assert with_options("rope", interleaved=False) == "rope:interleaved=False"
    assert with_options("a.py:Row", scale=2.0) == "a.py:Row:scale=2"
    assert with_options("a.py:Row:flip=1", scale=2.0) == "a.py:Row:flip=1,scale=2"
    text = with_options(own("Row"), scale=0.25, flip=True, kind="b")
    assert parse_scheme(text).options == dict(scale=0.25, flip=True, kind="b")


WRONG = [
    ("rop", "unknown scheme 'rop': use learned, sin, rope, alibi, none"),
    ("", "unknown scheme ''"),
    ("none:base=1", "no option 'base=1'; none takes no options"),
    ("rope:", "no option ''; rope takes base=10000.0, interleaved=True, scaling=none"),
    ("rope:bas=3", "no option 'bas=3'; rope takes base=10000.0"),
    ("rope:base", "no option 'base'"),
    ("rope:base=1,base=2", "base is given twice"),
    ("rope:base=ten", "base must be a float, not 'ten'"),
    ("rope:base=-3", "base=-3.0: must be a positive number"),
    ("rope:causal=false", "no option 'causal=false'"),
    ("rope:attend=1", "no option 'attend=1'"),
    ("rope:dim=8", "no option 'dim=8'"),
    ("rope:interleaved=maybe", "interleaved must be a bool, not 'maybe'"),
    ("rope:scaling=yarn", "factor=None must be"),
    ("rope:factor=2", "factor=2 without a scaling"),
    ("rope:scaling=yarn,factor=0.5", "factor=0.5"),
    ("rope:scaling=yarn,factor=2,gamma=1", "no option 'gamma=1'"),
    ("learned:max_len=0", "max_len=0"),
    ("learned:max_len=1.5", "max_len must be an int, not '1.5'"),
    ("learned:beyond=grow", "beyond=grow"),
    ("sin:factor=0.1", "factor=0.1"),
    ("alibi:slope=2", "alibi takes no options"),
    ("nowhere.py:Mine", "nowhere.py: no such file"),
]


@pytest.mark.parametrize("text, message", WRONG)
def test_wrong_schemes_are_told_what_there_is(text, message):
    with pytest.raises(ValueError, match=message):
        TinyLM(text, **SMALL)


# Classes of one's own


def test_own_classes_are_of_the_kind_that_their_methods_say(own):
    kinds = dict(Row="embedding", Rotation="relation", Bias="relation", Layer="attention")
    assert {name: parse_scheme(own(name)).kind for name in kinds} == kinds


def test_an_own_embedding(own):
    parsed = parse_scheme(own("Row:scale=0.5,flip=true,kind=b,size=big,count=2"))
    assert parsed.options == dict(scale=0.5, flip=True, kind="b", size="big", count=2)
    position = TinyLM(own("Row:scale=0.5"), **SMALL).position
    assert torch.equal(position(torch.arange(3))[:, 0], torch.tensor([0, 0.5, 1]))


def test_an_own_attention(own):
    model = TinyLM(own("Layer:reach=2"), **SMALL)
    assert [block.attention.reach for block in model.blocks] == [2, 2]
    assert model(torch.zeros(1, 5, dtype=torch.int64)).shape == (1, 5, 256)


def test_common_weights_of_own_classes_are_those_of_none(own):
    torch.manual_seed(0)
    plain = TinyLM("none", **SMALL).state_dict()
    for name, extra in (("Row", 0), ("Rotation", 0), ("Bias", 2), ("Layer", 2)):
        torch.manual_seed(0)
        state = TinyLM(own(name), **SMALL).state_dict()
        assert all(torch.equal(plain[key], state[key]) for key in plain)
        assert len(state) == len(plain) + extra  # one number in each of two blocks


def test_a_class_is_handed_what_it_declares(own):
    for i, block in enumerate(TinyLM(own("Rotation"), **SMALL).blocks):
        assert block.attention.relation.sizes == (4, 8, i, 2, 16, 64)
    model = TinyLM(own("Layer"), **SMALL, window=5)
    assert [block.attention.layer for block in model.blocks] == [0, 1]
    assert model.blocks[0].attention.attend.keywords == dict(window=5)
    with pytest.raises(ValueError, match="no option 'layer=1'"):  # it is no option of a user
        parse_scheme(own("Layer:layer=1"))


def test_the_trained_length_reaches_the_schemes():
    yarn = TinyLM("rope:scaling=yarn,factor=8", **SMALL).blocks[0].attention
    assert (yarn.scaling, yarn.factor, yarn.trained_len) == ("yarn", 8, 16)
    other = TinyLM("rope:scaling=yarn,factor=8,trained_len=32", **SMALL).blocks[0].attention
    assert other.trained_len == 32  # an option goes first
    assert TinyLM("learned:beyond=wrap", **SMALL).position.trained_len == 16
    assert TinyLM("learned", **SMALL).position.max_len == 64


def test_wrong_own_classes_are_told_what_is_wrong(own, tmp_path):
    classes = "Row, Rotation, Bias, Layer, NoLayers"
    with pytest.raises(ValueError, match=f"no nn.Module class 'Ro'; it has {classes}"):
        parse_scheme(own("Ro"))
    with pytest.raises(ValueError, match="no nn.Module class 'not_a_class'"):
        parse_scheme(own("not_a_class"))
    with pytest.raises(ValueError, match=r"bias-free nn.Linear `qkv` with weight \(96, 32\)"):
        TinyLM(own("NoLayers"), **SMALL)
    (tmp_path / "empty.py").write_text("")
    with pytest.raises(ValueError, match="no nn.Module class 'Row'; it has none"):
        parse_scheme(f"{tmp_path / 'empty.py'}:Row")


BROKEN = {
    "def broken(:\n": "SyntaxError",
    "raise SystemExit(3)": "SystemExit: 3",
    "gone": "NameErr",
}


@pytest.mark.parametrize("source", BROKEN)
def test_a_file_that_cannot_be_imported_is_told_in_one_line(tmp_path, source):
    (tmp_path / "my_pos.py").write_text(source)
    with pytest.raises(ValueError) as error:
        parse_scheme(f"{tmp_path / 'my_pos.py'}:Mine")
    message = str(error.value)
    assert f"my_pos.py cannot be imported: {BROKEN[source]}" in message and "\n" not in message


@pytest.fixture
def folder(monkeypatch, tmp_path):
    """A folder of schemes to write into, beside that of the repository."""
    monkeypatch.setattr(scheme, "FOLDER", tmp_path)
    monkeypatch.setattr(schemes, "__path__", [*schemes.__path__, str(tmp_path)])
    yield tmp_path
    for path in tmp_path.glob("*.py"):
        sys.modules.pop(f"schemes.{path.stem}", None)


def test_a_file_in_the_folder_is_a_scheme_by_its_name(folder):
    one = "from torch import nn\nfrom pos_rope import RoPEAttention as Other\n"
    (folder / "halves.py").write_text(one + "class Halves(nn.Module):\n    pass\n")
    (folder / "pair.py").write_text(one + "class A(nn.Module): pass\nclass B(A): pass\n")
    assert scheme.encoding_names() == ["halves", "pair"]
    parsed = parse_scheme("halves")
    assert (parsed.text, parsed.cls.__name__, parsed.options) == ("halves", "Halves", {})
    with pytest.raises(ValueError, match="schemes/pair.py must define one nn.Module class"):
        parse_scheme("pair")
    with pytest.raises(ValueError, match="use learned, sin, rope, alibi, none, halves, pair, or"):
        parse_scheme("thirds")


# Ways to read a scheme past its trained length


def test_longer_ways_are_those_that_fix_nothing_the_scheme_fixes(own):
    every_scaling = ("linear", "ntk", "dynamic", "yarn", "llama3")
    ways = {
        "none": (),
        "alibi": (),
        "sin": ("linear",),
        "sin:base=50": ("linear",),
        "sin:factor=2": (),
        "learned": ("clamp", "wrap", "interpolate"),
        "learned:max_len=300": ("clamp", "wrap", "interpolate"),
        "learned:beyond=wrap": (),
        "rope": every_scaling,
        "rope:base=10": every_scaling,
        "rope:scaling=yarn,factor=2": (),
        own("Row"): ("halved", "flipped"),
        own("Row:scale=3"): ("flipped",),
        own("Row:kind=a"): ("halved",),
        own("Layer"): (),
    }
    assert {text: parse_scheme(text).longer_ways for text in ways} == ways


def test_longer_is_the_scheme_to_read_with(own):
    def longer(text, way):
        return parse_scheme(text).longer(way, 64, 16)

    assert longer("sin", "linear") == "sin:factor=4"
    assert longer("learned:max_len=30", "clamp") == "learned:max_len=30,beyond=clamp,trained_len=16"
    expected = "rope:base=10,scaling=yarn,factor=4,trained_len=16"
    assert longer("rope:base=10", "yarn") == expected
    assert longer(own("Row:kind=a"), "halved") == own("Row:kind=a,scale=0.25")
    ids = torch.randint(0, 256, (1, 64))
    for text in ("sin", "learned", "rope", own("Row")):
        for way in parse_scheme(text).longer_ways:
            assert TinyLM(longer(text, way), **SMALL)(ids).isfinite().all()
