import pytest
import torch

from experiments import order
from experiments.order import bidirectional, permutation
from lab.rows import distinct, values

A, B = (torch.tensor(list(text.encode())) for text in ("我打你", "你打我"))


def test_permutation_by_hand():
    assert permutation([5, 6, 5, 7], [7, 5, 6, 5]).tolist() == [3, 0, 1, 2]
    assert torch.equal(A[permutation(A.tolist(), B.tolist())], B)
    with pytest.raises(ValueError, match="'ab' is not 'aa' in another order"):
        permutation(list(b"aa"), list(b"ab"))
    for same in ([], list(b"ab")):
        with pytest.raises(ValueError, match="twice; give two sentences that differ in order"):
            permutation(same, same)


@pytest.mark.parametrize("scheme", ["none", "learned", "sin", "rope", "alibi"])
def test_outputs_are_permuted_only_without_positions(scheme):
    """Exact in float64 for `none`, but for the order of sums; gone with positions."""
    torch.set_default_dtype(torch.float64)
    try:
        with torch.no_grad():
            read = bidirectional(scheme)
            x, y = read(A), read(B)
    finally:
        torch.set_default_dtype(torch.float32)
    moved = x[permutation(A.tolist(), B.tolist())]
    outputs = (y - moved).abs().max() / x.abs().max()
    pooled = (y.mean(0) - x.mean(0)).norm() / x.mean(0).norm()
    if scheme == "none":
        assert outputs < 1e-13 and pooled < 1e-13
    else:
        assert outputs > 1e-2 and pooled > 1e-3


def test_order_is_confirmed_for_every_pair_of_sentences(setup):
    setup.sentences = [("abc", "bca")]
    rows = order.measure(setup)
    assert len(distinct(rows, "sentences")) == len(order.PAIRS) + 1
    assert order.judge(rows).verdict == "confirmed"
    table, picture = order.show(rows)
    assert "| abc / bca | " in table and picture is None
    for row in rows:
        if row["metric"] == "last token" and row["layers"] == 1:
            row["value"] = 0.1
    assert order.judge(rows).verdict == "refuted"


def test_rule_of_order():
    assert order.rule(blind=1e-6, told=0.1, depth=0.1) == "confirmed"
    assert order.rule(blind=1e-4, told=0.1, depth=0.1) == "refuted"
    assert order.rule(blind=1e-6, told=1e-4, depth=0.1) == "refuted"
    assert order.rule(blind=1e-6, told=0.1, depth=1e-4) == "refuted"


def test_order_has_a_difference_for_every_scheme(setup):
    rows = order.measure(setup)
    for scheme in ("none", "learned", "sin", "rope", "alibi"):
        assert len(values(rows, scheme=scheme, metric="pooled")) == len(order.PAIRS)
