import pytest
import torch

from experiments import swap
from experiments.swap import positions_to_try, read_as, rule
from lab import score
from lab.rows import select, values
from lab.stats import perplexity
from schemes.scheme import SCHEMES


def by_column(rows, scheme):
    return {row["column"]: row["value"] for row in select(rows, scheme=scheme)}


def test_positions_to_try_by_hand():
    tried = {name: positions.tolist() for name, positions in positions_to_try(3).items()}
    assert tried == {
        "its own": [0, 1, 2],
        "+ 1": [1, 2, 3],
        "+ 10": [10, 11, 12],
        "+ 100": [100, 101, 102],
        "+ 1000": [1000, 1001, 1002],
        "reversed": [2, 1, 0],
        "all equal": [0, 0, 0],
    }


def test_relative_schemes_stand_still_and_absolute_ones_move(setup):
    rows = swap.measure(setup)
    ppl = {scheme: by_column(rows, scheme) for scheme in SCHEMES}

    def close(scheme, *columns):
        own = pytest.approx(ppl[scheme]["its own"], rel=1e-3)
        return [ppl[scheme][column] == own for column in columns]

    shifts = [f"+ {shift}" for shift in swap.SHIFTS]
    assert all(close("none", *shifts, "reversed", "all equal"))
    assert all(close("rope", *shifts)) and all(close("alibi", *shifts))
    # |i − j| is the same read backwards
    assert close("alibi", "reversed") == [True] and close("rope", "reversed") == [False]
    assert not any(close("learned", "+ 10")) and not any(close("sin", "+ 10"))
    assert ppl["learned"]["+ 1000"] is None  # its table ends at 16 × 64
    assert select(rows, scheme="learned", column="+ 1000")[0]["note"] == "max_len 1024"
    assert ppl["rope"]["read as none"] == pytest.approx(ppl["rope"]["all equal"], rel=1e-4)
    assert swap.judge(rows).verdict == "confirmed"
    table, picture = swap.show(rows)
    assert "max_len" not in table and " – | " in table
    assert picture.lines["learned"][0] == [1, 10, 100] and len(picture.lines["rope"][0]) == 4


def test_swap_reads_with_another_scheme_what_a_model_built_by_hand_reads(setup):
    rows = swap.measure(setup)
    run, model = setup.models_of("rope")[0]
    alibi = run.new_model(scheme="alibi")
    alibi.load_state_dict(model.state_dict())
    ppl = perplexity(score.span(alibi, setup.corpus.val, 64, 64 * 64))
    assert by_column(rows, "rope")["read as alibi"] == pytest.approx(ppl)
    for scheme in SCHEMES:
        columns = by_column(rows, scheme)
        assert [f"read as {other}" in columns for other in SCHEMES] == [
            other != scheme for other in SCHEMES
        ]


def test_a_learned_table_is_not_read_as_another(setup, tmp_path):
    """…even where an own scheme's table has its name and size."""
    path = tmp_path / "own.py"
    path.write_text(
        "import torch\nclass Mine(torch.nn.Module):\n"
        "    def __init__(self, dim, max_len):\n"
        "        super().__init__()\n"
        "        self.weight = torch.nn.Parameter(torch.ones(max_len, dim))\n"
        "    def forward(self, positions): return self.weight[positions]\n"
    )
    run = setup.run.replace(scheme=f"{path}:Mine")
    other = read_as(run, run.new_model(), "learned")
    assert other.position.weight.detach().std() == pytest.approx(0.02, rel=0.05)


def test_own_schemes_have_rows_and_no_part_in_the_verdict(setup, tmp_path):
    path = tmp_path / "own.py"
    path.write_text(
        "import torch\nclass Short(torch.nn.Embedding):\n"
        "    def __init__(self, dim):\n        super().__init__(128, dim)\n"
    )
    run = setup.run.replace(scheme=f"{path}:Short")
    setup.models.append((run, run.new_model().eval()))
    rows = swap.measure(setup)
    mine = by_column(rows, run.scheme)
    assert mine["+ 10"] and mine["+ 100"] is None
    assert all(mine[f"read as {scheme}"] for scheme in SCHEMES)
    verdict, (table, picture) = swap.judge(rows), swap.show(rows)
    assert verdict.verdict == "confirmed" and f"({run.scheme})" in verdict.measured
    assert f"– {run.scheme}, + 100: IndexError: index out of range" in table
    assert picture.lines[run.scheme][0] == [1, 10]
    alone = swap.judge(select(rows, scheme=run.scheme))
    assert alone.verdict == "not judged"


@pytest.mark.parametrize(
    "still, present, verdict",
    [
        ("rope alibi none", "learned sin rope alibi none", "confirmed"),
        ("rope alibi", "learned sin rope alibi none", "partly"),
        ("rope alibi none learned", "learned sin rope alibi none", "partly"),
        ("rope alibi none learned sin", "learned sin rope alibi none", "refuted"),
        ("rope", "sin rope", "confirmed"),
        ("rope", "rope none", "not judged"),
        ("", "", "not judged"),
    ],
)
def test_rule_of_swap(still, present, verdict):
    assert rule(still.split(), present.split()) == verdict


def test_a_model_whose_loss_is_broken_has_dashes(setup):
    run, model = setup.models_of("rope")[0]
    with torch.no_grad():
        model.head.weight.fill_(float("nan"))
    setup.models = [(run, model)]
    rows = swap.measure(setup)
    table, picture = swap.show(rows)
    assert values(rows) == [] and picture is None and "| rope | – | – |" in table
