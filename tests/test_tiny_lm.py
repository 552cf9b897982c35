from pathlib import Path

import pytest
import torch
import torch.nn.functional as F

from pos_alibi import ALiBiAttention
from tiny_lm import SCHEMES, BlockCausalAttention, TinyLM, attend, load_model, parse_scheme

SMALL = dict(dim=32, n_layer=2, n_head=4, max_len=64)

OWN = '''
import torch
from torch import nn
import torch.nn.functional as F

class Row(nn.Module):
    def __init__(self, dim, scale=1.0, flip=False, kind="a"):
        super().__init__()
        self.dim, self.scale = dim, scale
    def forward(self, positions):
        return self.scale * positions.float()[..., None].expand(*positions.shape, self.dim)

class Mine(nn.Module):
    def __init__(self, dim, n_head, window=4):
        super().__init__()
        self.qkv = nn.Linear(dim, 3 * dim, bias=False)
        self.out = nn.Linear(dim, dim, bias=False)
        self.extra = nn.Parameter(torch.randn(7))
    def forward(self, x, positions=None):
        return self.out(self.qkv(x)[..., : x.shape[-1]].cumsum(1))

class NoLayers(nn.Module):
    def __init__(self, dim, n_head):
        super().__init__()

def not_a_class():
    pass
'''


def wake(model, seed=1):
    """Output projections start at zero; give every weight a value so that each block does something."""
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for p in model.parameters():
            p.add_(0.2 * torch.randn(p.shape, generator=generator))
    return model


@pytest.fixture
def own(tmp_path):
    path = tmp_path / "my_pos.py"
    path.write_text(OWN)
    return path


@pytest.mark.parametrize("scheme", SCHEMES)
def test_starts_at_the_uniform_distribution(scheme):
    logits = TinyLM(scheme, **SMALL)(torch.randint(0, 256, (2, 10)))
    assert logits.shape == (2, 10, 256)
    assert torch.equal(logits, torch.zeros_like(logits))


@pytest.mark.parametrize("scheme", SCHEMES)
def test_causal(scheme):
    """A later byte moves no earlier logit, and an earlier byte moves the later ones."""
    model = wake(TinyLM(scheme, **SMALL))
    ids = torch.randint(0, 256, (1, 20), generator=torch.Generator().manual_seed(0))
    for where in (0, 7, 19):
        other = ids.clone()
        other[0, where] = (ids[0, where] + 1) % 256
        moved = (model(other) - model(ids)).abs().amax(-1)[0]
        assert moved[:where].max() < 1e-6 if where else True
        assert moved[where:].min() > 1e-6


@pytest.mark.parametrize("scheme", SCHEMES)
def test_bytes_and_wide_integers_are_read_alike(scheme):
    model = wake(TinyLM(scheme, **SMALL))
    ids = torch.randint(0, 256, (2, 9))
    assert torch.equal(model(ids), model(ids.to(torch.uint8)))


def test_only_none_cannot_tell_where_things_are():
    """With positions given, `none` ignores them and the four do not."""
    ids = torch.randint(0, 256, (1, 12), generator=torch.Generator().manual_seed(0))
    far = torch.arange(12) * 3
    for scheme in SCHEMES:
        model = wake(TinyLM(scheme, **SMALL))
        assert torch.allclose(model(ids, far), model(ids), atol=1e-6) == (scheme == "none")
        assert torch.allclose(model(ids, torch.arange(12)), model(ids), atol=1e-6)


@pytest.mark.parametrize("scheme", [*SCHEMES, "rope:base=10", "learned:max_len=7"])
def test_common_weights_are_those_of_none(scheme):
    torch.manual_seed(3)
    plain = TinyLM("none", **SMALL).state_dict()
    torch.manual_seed(3)
    state = TinyLM(scheme, **SMALL).state_dict()
    assert set(plain) <= set(state)
    assert all(torch.equal(plain[name], state[name]) for name in plain)
    torch.manual_seed(4)
    assert not torch.equal(TinyLM(scheme, **SMALL).state_dict()["embed.weight"], state["embed.weight"])


def test_no_position_table_but_the_learned_one():
    plain = set(TinyLM("none", **SMALL).state_dict())
    for scheme in ("sin", "rope", "alibi"):
        assert set(TinyLM(scheme, **SMALL).state_dict()) == plain
        assert sum(p.numel() for p in TinyLM(scheme).parameters()) == sum(p.numel() for p in TinyLM("none").parameters())
    assert set(TinyLM("learned", **SMALL).state_dict()) - plain == {"position.weight"}
    assert TinyLM("learned", **SMALL).position.max_len == 64


@pytest.mark.parametrize("scheme", SCHEMES)
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_half_precision_copies(scheme, dtype):
    model = wake(TinyLM(scheme, **SMALL))
    ids = torch.randint(0, 256, (2, 40))
    exact = model(ids)
    low = model.to(dtype)(ids)
    assert low.dtype == dtype
    assert (low.float() - exact).abs().max() < 0.08 * exact.abs().max()


def test_read_longer_than_trained():
    for scheme in SCHEMES:
        model = wake(TinyLM(scheme, **SMALL))
        ids = torch.randint(0, 256, (1, 65))
        if scheme == "learned":
            with pytest.raises(ValueError, match="position 64 has no row: max_len is 64"):
                model(ids)
        else:
            assert torch.isfinite(model(ids)).all()


@pytest.mark.parametrize("T", [1, 7, 64, 65, 128, 129, 300])
@pytest.mark.parametrize("dtype, tolerance", [(torch.float64, 1e-12), (torch.float32, 1e-4), (torch.bfloat16, 0.05)])
def test_block_causal_attention_equals_the_formula(T, dtype, tolerance):
    """Output and gradients against softmax(q·k·scale)·v in double; v may be of another width."""
    torch.manual_seed(0)
    q, k, v, upstream = (torch.randn(2, 3, T, width).to(dtype) for width in (8, 8, 5, 5))
    ours = [x.clone().requires_grad_() for x in (q, k, v)]
    y = BlockCausalAttention.apply(*ours, 0.3)
    y.backward(upstream)
    plain = [x.double().requires_grad_() for x in (q, k, v)]
    score = (plain[0] @ plain[1].transpose(-1, -2) * 0.3).masked_fill(torch.ones(T, T, dtype=torch.bool).triu(1), float("-inf"))
    expected = score.softmax(-1) @ plain[2]
    expected.backward(upstream.double())
    assert y.dtype == dtype and (y.double() - expected).abs().max() < tolerance
    for a, b in zip(ours, plain):
        assert (a.grad.double() - b.grad).abs().max() < tolerance * max(1, b.grad.abs().max().item())


def test_a_second_derivative_is_refused():
    """torch.autograd.grad must not go past the strips in silence."""
    model = wake(TinyLM("rope", **SMALL))
    weights = list(model.parameters())
    loss = model(torch.randint(0, 256, (2, 20))).square().sum()
    with pytest.raises(RuntimeError, match="cannot be differentiated twice"):
        torch.autograd.grad(loss, weights, create_graph=True)


def test_attend_is_the_fused_attention_with_and_without_gradients():
    torch.manual_seed(0)
    q, k, v = torch.randn(3, 2, 4, 70, 16)
    bias = torch.randn(4, 70, 70)
    for a, b in ((q[0, 0], k[0, 0]), (q[:, :, :3], k), (q, k[:, :, :66]), (q, k[:1])):  # unlike shapes are left to torch
        expected = F.scaled_dot_product_attention(a, b, b, is_causal=True)
        assert torch.allclose(attend(a.clone().requires_grad_(), b, b, is_causal=True), expected, atol=1e-5)
    for options in (dict(is_causal=True), dict(is_causal=True, scale=0.1), dict(), dict(attn_mask=bias)):
        expected = F.scaled_dot_product_attention(q, k, v, **options)
        assert torch.allclose(attend(q, k, v, **options), expected, atol=1e-5)
        assert torch.allclose(attend(q.clone().requires_grad_(), k, v, **options), expected, atol=1e-5)
        for maybe_training in (q, q.clone().requires_grad_()):  # a v of another width, as ALiBi has it
            narrow, expected_narrow = attend(maybe_training, k, v[..., :5], **options), expected[..., :5]
            assert narrow.shape == (2, 4, 70, 5) and torch.allclose(narrow, expected_narrow, atol=1e-5)


@pytest.mark.parametrize("scheme", SCHEMES)
def test_training_and_evaluation_paths_give_the_same_logits(scheme):
    model = wake(TinyLM(scheme, **SMALL))
    ids = torch.randint(0, 256, (2, 50))
    with torch.no_grad():
        evaluated = model(ids)
    assert torch.allclose(model(ids), evaluated, atol=2e-4)


def test_alibi_trains_in_bf16_as_the_plain_bias_says():
    """The strips get the bias through bfloat16 products; what they give is what float32 gives, but for rounding."""
    torch.manual_seed(0)
    layer, x = ALiBiAttention(48, 12, attend=attend), torch.randn(2, 200, 48)
    with torch.no_grad():
        exact = layer(x)
    low = layer.bfloat16()(x.bfloat16().requires_grad_())
    assert (low.float() - exact).abs().max() < 0.03


def test_options():
    assert parse_scheme("rope:base=10,interleaved=false") == (SCHEMES["rope"], {"base": 10.0, "interleaved": False})
    assert TinyLM("rope:base=10", **SMALL).blocks[1].attention.base == 10
    assert TinyLM("learned:max_len=7", **SMALL).position.max_len == 7
    assert TinyLM("sin:base=50", **SMALL).position.base == 50


def test_own_classes(own):
    cls, options = parse_scheme(f"{own}:Row:scale=0.5,flip=true,kind=b")
    assert options == dict(scale=0.5, flip=True, kind="b")
    model = TinyLM(f"{own}:Row:scale=0.5", **SMALL)
    assert torch.equal(model.position(torch.arange(3))[:, 0], torch.tensor([0, 0.5, 1]))
    torch.manual_seed(0)
    plain = TinyLM("none", **SMALL).state_dict()
    torch.manual_seed(0)
    state = TinyLM(f"{own}:Mine", **SMALL).state_dict()
    assert all(torch.equal(plain[name], state[name]) for name in plain)
    assert len(state) == len(plain) + 2  # one extra parameter in each block
    assert TinyLM(f"{own}:Mine", **SMALL)(torch.zeros(1, 5, dtype=torch.int64)).shape == (1, 5, 256)


@pytest.mark.parametrize("scheme, message", [
    ("rop", "unknown scheme 'rop': use learned, sin, rope, alibi, none"),
    ("", "unknown scheme ''"),
    ("rope:bas=3", "no option 'bas=3'; RoPEAttention takes|no option 'bas=3'; rope takes base=10000.0, interleaved=True"),
    ("rope:base", "no option 'base'"),
    ("rope:base=ten", "base must be a float, not 'ten'"),
    ("rope:base=-3", "base=-3.0: must be a positive number"),
    ("rope:causal=false", "no option 'causal=false'"),
    ("rope:attend=1", "no option 'attend=1'"),
    ("rope:interleaved=maybe", "interleaved must be a bool, not 'maybe'"),
    ("learned:max_len=0", "max_len=0"),
    ("learned:max_len=1.5", "max_len must be a int, not '1.5'|max_len must be an int"),
    ("alibi:slope=2", "alibi takes no options"),
    ("nowhere.py:Mine", "nowhere.py: no such file"),
])
def test_wrong_schemes(scheme, message):
    with pytest.raises(ValueError, match=message):
        TinyLM(scheme, **SMALL)


def test_wrong_own_classes(own):
    with pytest.raises(ValueError, match="no nn.Module class 'Min'; it has Row, Mine, NoLayers"):
        TinyLM(f"{own}:Min", **SMALL)
    with pytest.raises(ValueError, match="no nn.Module class 'not_a_class'"):
        TinyLM(f"{own}:not_a_class", **SMALL)
    with pytest.raises(ValueError, match=r"bias-free nn.Linear `qkv` with weight \(96, 32\)"):
        TinyLM(f"{own}:NoLayers", **SMALL)
    own.write_text("def broken(:\n")
    with pytest.raises(ValueError, match="my_pos.py cannot be imported: SyntaxError"):
        TinyLM(f"{own}:Mine", **SMALL)


def test_wrong_sizes():
    for scheme in SCHEMES:
        with pytest.raises(ValueError, match="dim=30 does not divide into n_head=4 heads"):
            TinyLM(scheme, dim=30, n_head=4)
        with pytest.raises(ValueError, match="n_layer=0"):
            TinyLM(scheme, n_layer=0)
    with pytest.raises(ValueError, match="head width 3: must be even"):
        TinyLM("rope", dim=12, n_head=4)
    with pytest.raises(ValueError, match="dim=9: must be even"):
        TinyLM("sin", dim=9, n_head=3)


def test_load_model_names_a_bad_file(tmp_path):
    for content in (b"", b"not a checkpoint", b"PK\x03\x04 cut short"):
        path = tmp_path / "bad.pt"
        path.write_bytes(content)
        with pytest.raises(ValueError, match="bad.pt is not a whole checkpoint"):
            load_model(path)
    torch.save({"model": {}}, path)
    with pytest.raises(ValueError, match="bad.pt is not a whole checkpoint"):
        load_model(path)
    with pytest.raises(FileNotFoundError):
        load_model(tmp_path / "absent.pt")


def test_the_four_modules_stand_alone(tmp_path):
    """Each imports nothing but torch and the standard library, and works when copied away alone."""
    import subprocess
    import sys
    for name in ("pos_learned", "pos_sin", "pos_rope", "pos_alibi"):
        source = (Path(__file__).parent.parent / f"{name}.py").read_text()
        (tmp_path / f"{name}.py").write_text(source)
        run = subprocess.run([sys.executable, f"{name}.py"], cwd=tmp_path, capture_output=True, text=True)
        assert run.returncode == 0 and run.stdout, run.stderr
        tops = {line.split()[1].split(".")[0] for line in source.splitlines() if line.startswith(("import ", "from "))}
        assert tops <= {"torch", "math"}
        assert len(source.splitlines()) < 260
    assert (tmp_path / "results" / "rope_rotation.png").exists()


# Windows

def full_windowed(q, k, v, scale, window, bias=0):
    T = q.shape[-2]
    distance = torch.arange(T)[:, None] - torch.arange(T)
    scores = (q @ k.transpose(-1, -2) * scale + bias).masked_fill((distance < 0) | (distance >= window), float("-inf"))
    return scores.softmax(-1) @ v


@pytest.mark.parametrize("T, window", [(1, 1), (5, 1), (64, 10), (65, 64), (200, 64), (130, 100), (300, 7), (300, 299), (40, 100)])
def test_a_window_equals_the_masked_formula(T, window):
    torch.manual_seed(0)
    q, k, v = (torch.randn(2, 3, T, 8, dtype=torch.float64, requires_grad=True) for _ in range(3))
    ours = attend(q, k, v, is_causal=True, window=window)
    plain = full_windowed(q, k, v, 8 ** -0.5, window)
    assert torch.allclose(ours, plain, atol=1e-12)
    upstream = torch.randn_like(ours)
    for a, b in zip(torch.autograd.grad(ours, (q, k, v), upstream), torch.autograd.grad(plain, (q, k, v), upstream)):
        assert torch.allclose(a, b, atol=1e-12)


@pytest.mark.parametrize("scheme", SCHEMES)
def test_a_window_hides_what_is_further_back(scheme):
    """Two blocks of window 5 see 2·4 bytes back and no further; a window of everything changes nothing."""
    torch.manual_seed(0)
    model = TinyLM(scheme, 16, 2, 2, window=5).double()
    with torch.no_grad():
        for weight in model.parameters():
            weight.normal_(0, 0.3)
    ids = torch.randint(0, 256, (1, 30))
    moved = ids.clone()
    moved[0, 10] += 1
    changed = (model(ids) - model(moved % 256)).abs().amax(-1)[0] > 1e-9
    assert changed.tolist() == [10 <= i <= 18 for i in range(30)]
    full, all_of_it = TinyLM(scheme, 16, 2, 2).double(), TinyLM(scheme, 16, 2, 2, window=30).double()
    full.load_state_dict(model.state_dict())
    all_of_it.load_state_dict(model.state_dict())
    assert torch.allclose(full(ids), all_of_it(ids), atol=1e-12)


def test_a_window_with_a_bias():
    """ALiBi at positions that jump far takes the plain bias, and the window still holds."""
    torch.manual_seed(0)
    model, plain = TinyLM("alibi", 16, 1, 2, window=3).double(), TinyLM("alibi", 16, 1, 2, window=3).double()
    plain.load_state_dict(model.state_dict())
    ids = torch.randint(0, 256, (2, 80))
    positions = torch.arange(80) + 100_000 * (torch.arange(80) >= 40)
    x = torch.randn(2, 80, 16, dtype=torch.float64)
    attention = model.blocks[0].attention
    q, k, v = attention.qkv(x).view(2, 80, 3, 2, 8).permute(2, 0, 3, 1, 4)
    bias = -attention.slopes.double()[:, None, None] * (positions[:, None] - positions).abs()
    expected = attention.out(full_windowed(q, k, v, 8 ** -0.5, 3, bias).transpose(1, 2).reshape(2, 80, 16))
    assert torch.allclose(attention(x, positions), expected, atol=1e-10) and model(ids, positions).isfinite().all()


def test_a_window_with_a_boolean_mask():
    torch.manual_seed(0)
    q, k, v = torch.randn(3, 2, 3, 90, 8, dtype=torch.float64)
    odd = torch.arange(90)[:, None] - torch.arange(90)  # every key at an even distance, and itself
    mask = (odd >= 0) & (odd % 2 == 0)
    bias = torch.zeros(90, 90, dtype=torch.float64).masked_fill(~mask, float("-inf"))
    assert torch.allclose(attend(q, k, v, attn_mask=mask, window=7), full_windowed(q, k, v, 8 ** -0.5, 7, bias), atol=1e-12)
    everything = torch.ones(90, 90, dtype=torch.bool)  # a window never lets a query see ahead
    assert torch.allclose(attend(q, k, v, attn_mask=everything, window=7), full_windowed(q, k, v, 8 ** -0.5, 7), atol=1e-12)
    with pytest.raises(ValueError, match="as many queries as keys, not 1 and 90"):
        attend(q[..., :1, :], k, v, window=7)


def test_a_window_needs_an_attention_that_can_have_one(tmp_path):
    (tmp_path / "own.py").write_text("from torch import nn\nclass Own(nn.Module):\n    def __init__(self, dim, n_head):\n        super().__init__()\n"
                                     "        self.qkv, self.out = nn.Linear(dim, 3 * dim, bias=False), nn.Linear(dim, dim, bias=False)\n")
    with pytest.raises(ValueError, match="a window needs an attention class that takes `attend`"):
        TinyLM(f"{tmp_path / 'own.py'}:Own", 16, 1, 2, window=4)
    with pytest.raises(ValueError, match="window=-1"):
        TinyLM("rope", 16, 1, 2, window=-1)


def test_the_trained_length_reaches_the_schemes():
    rope = TinyLM("rope:scaling=yarn,factor=8", 16, 1, 2, trained_len=64).blocks[0].attention
    assert rope.scaling == dict(scaling="yarn", factor=8, trained_len=64)
    assert TinyLM("rope:scaling=yarn,factor=8,trained_len=32", 16, 1, 2).blocks[0].attention.scaling["trained_len"] == 32
    assert TinyLM("learned:beyond=wrap", 16, 1, 2, trained_len=64).position.trained_len == 64
    for scheme, message in (("rope:scaling=yarn", "factor=None must be"), ("rope:factor=2", "factor=2 without a scaling"),
                            ("rope:scaling=yarn,factor=0.5", "factor=0.5"), ("rope:scaling=yarn,factor=2,gamma=1", "no option 'gamma=1'"),
                            ("learned:beyond=grow", "beyond=grow"), ("sin:factor=0.1", "factor=0.1")):
        with pytest.raises(ValueError, match=message):
            TinyLM(scheme, 16, 1, 2)
