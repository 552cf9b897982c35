import errno
import io
import os
import pickle

import pytest
import torch

import pos_alibi
from helpers import CPU, RUN, same_weights, tree
from lab import provenance
from lab.checkpoints import (
    Saver,
    add_rows,
    checkpoint_path,
    claim,
    find,
    finished,
    load,
    require_alike,
    save_failure,
    save_model,
    unfinished,
    weights_hash,
)
from lab.rows import measured
from lab.train import Trained
from schemes.scheme import SCHEMES

ROW = measured(table="train_compare", metric="ppl", n=16, value=2.5)
TABLE = """
import torch
from torch import nn

class Table(nn.Module):
    def __init__(self, dim, scale=1.0):
        super().__init__()
        self.scale, self.rows = scale, nn.Parameter(torch.zeros(16, dim))

    def forward(self, positions):
        return self.scale * self.rows[positions]
"""


def saved(folder, run=RUN, rows=(ROW,)):
    """A checkpoint of an untrained model of this run -> its path."""
    path = checkpoint_path(folder, run.scheme, run.seed)
    torch.manual_seed(run.seed)
    save_model(path, run, run.new_model(), list(rows))
    return path


# A round trip


@pytest.mark.parametrize("scheme", SCHEMES)
def test_a_checkpoint_comes_back_as_it_was_saved(tmp_path, scheme):
    run = RUN.replace(scheme=scheme)
    found = load(saved(tmp_path, run))
    torch.manual_seed(0)
    assert found.run == run and same_weights(found.weights, run.new_model().state_dict())
    assert found.rows == [run.flat() | ROW] and found.signature == provenance.signature(run)
    assert found.path == tmp_path / "checkpoints" / f"{scheme}-seed0.pt"


def test_a_checkpoint_makes_its_model_and_that_with_changes(tmp_path):
    found = load(saved(tmp_path))
    model, ids = found.model(), torch.arange(64)[None]
    assert not model.training and same_weights(model.state_dict(), found.weights)
    assert found.model(window=8).window == 8
    assert found.model(scheme="rope:base=10")(ids).shape == (1, 64, 256)


def test_a_finished_model_takes_away_what_was_unfinished(tmp_path):
    path = checkpoint_path(tmp_path, "rope", 0)
    save_failure(path, RUN, [])
    path.with_suffix(".resume").touch()
    saved(tmp_path)
    assert tree(tmp_path) == ["checkpoints/rope-seed0.pt"]


@pytest.mark.parametrize("scheme, name", [
    ("rope", "rope-seed3.pt"), ("rope:base=10", "rope-base=10-seed3.pt"),
    ("rope:scaling=yarn,factor=4", "rope-scaling=yarn,factor=4-seed3.pt"),
    ("../my pos.py:Mine:a=1", "my-pos.py-Mine-a=1-seed3.pt"),
])  # fmt: skip
def test_a_checkpoint_is_named_after_scheme_and_seed(tmp_path, scheme, name):
    assert checkpoint_path(tmp_path, scheme, 3) == tmp_path / "checkpoints" / name


def test_a_scheme_that_reads_no_further_than_its_training_can_be_saved(tmp_path):
    (tmp_path / "own.py").write_text(TABLE)
    for scheme in (f"{tmp_path / 'own.py'}:Table", "learned:max_len=16"):
        run = RUN.replace(scheme=scheme)
        assert load(saved(tmp_path, run)).run == run


# Changes that are noticed


def test_a_changed_scheme_is_refused(tmp_path, monkeypatch):
    path, slopes = saved(tmp_path, RUN.replace(scheme="alibi")), pos_alibi.alibi_slopes
    monkeypatch.setattr(pos_alibi, "alibi_slopes", lambda n_head: 1.001 * slopes(n_head))
    with pytest.raises(ValueError, match="alibi-seed0.pt: alibi behaves otherwise than when it"):
        load(path)
    assert load(path, check=False).run.scheme == "alibi"


def test_a_scheme_that_is_gone_or_has_other_weights_is_refused(tmp_path):
    (tmp_path / "own.py").write_text(TABLE)
    path = saved(tmp_path, RUN.replace(scheme=f"{tmp_path / 'own.py'}:Table"))
    for text in (TABLE.replace("16, dim", "17, dim"), "import torch\n", None):
        (tmp_path / "own.py").unlink()
        if text:
            (tmp_path / "own.py").write_text(text)
        with pytest.raises(ValueError, match=r"does not fit this code \(.*\); was its scheme"):
            load(path)


# Files that are no checkpoint


class Evil:
    def __init__(self, path):
        self.path = path

    def __reduce__(self):
        return os.mkdir, (str(self.path),)


@pytest.mark.parametrize("kind", ["empty", "cut short", "no zip", "other keys", "list", "code"])
def test_a_foreign_file_is_refused_and_no_code_in_it_runs(tmp_path, kind):
    path, foreign = saved(tmp_path), io.BytesIO()
    torch.save({"model": {}, "run": {}} if kind == "other keys" else [1, 2], foreign)
    whole = path.read_bytes()
    path.write_bytes({
        "empty": b"", "cut short": whole[:-500], "no zip": b"PK\3\4 or not",
        "other keys": foreign.getvalue(), "list": foreign.getvalue(),
        "code": pickle.dumps(Evil(tmp_path / "owned"), 2),
    }[kind])  # fmt: skip
    with pytest.raises(
        ValueError, match="rope-seed0.pt (is not a whole checkpoint|cannot be read)"
    ):
        load(path)
    assert finished(path, RUN)[0] is None and not (tmp_path / "owned").exists()


def test_a_checkpoint_of_an_earlier_version_is_named(tmp_path):
    path = saved(tmp_path)
    torch.save({"settings": {"scheme": "rope"}, "model": {}, "row": {}}, path)
    with pytest.raises(ValueError, match="rope-seed0.pt is of an earlier version of this repo"):
        load(path)


def test_a_file_that_cannot_be_read_says_why(tmp_path, monkeypatch):
    def refuses(*arguments, **options):
        raise PermissionError(errno.EACCES, "Permission denied")

    path = saved(tmp_path)
    monkeypatch.setattr(torch, "load", refuses)
    with pytest.raises(ValueError, match=r"rope-seed0.pt cannot be read \(Permission denied\)"):
        load(path)


# Rows that come later


def test_added_rows_take_the_place_of_the_same_measurements(tmp_path):
    path, later = saved(tmp_path), ROW | {"table": "extrapolation"}
    add_rows(load(path), [later, later | {"n": 32}])
    add_rows(load(path), [later | {"value": 3.5}])
    found = load(path)
    assert [(r["table"], r["n"], r["value"]) for r in found.rows] == [
        ("train_compare", 16, 2.5), ("extrapolation", 16, 3.5), ("extrapolation", 32, 2.5),
    ]  # fmt: skip
    assert same_weights(found.weights, load(path).weights)


def test_rows_of_a_model_that_was_replaced_or_is_gone_are_dropped(tmp_path):
    path = saved(tmp_path)
    before = load(path)
    before.weights["norm.weight"] = before.weights["norm.weight"] + 1  # an equal run, trained anew
    add_rows(before, [ROW | {"n": 32}])
    assert len(load(path).rows) == 1
    before = load(path)
    path.unlink()
    add_rows(before, [ROW])
    assert not path.exists()


def test_a_value_that_is_no_number_becomes_a_note(tmp_path):
    path = saved(tmp_path)
    add_rows(load(path), [ROW | {"n": 32, "value": float("nan")}])
    row = load(path).rows[-1]
    assert (row["n"], row["value"], row["note"]) == (32, None, "ppl is nan")


def test_a_model_keeps_the_signature_of_the_scheme_that_was_trained(tmp_path):
    path = checkpoint_path(tmp_path, "rope", 0)
    save_model(path, RUN, RUN.new_model(), [ROW], [1.0, 2.0, 3.0])
    with pytest.raises(ValueError, match=r"behaves otherwise .* \(signature 1 2 3, now "):
        load(path)


# Runs that are finished, and runs that are not


def test_an_equal_run_is_finished_and_another_is_told(tmp_path):
    path = saved(tmp_path)
    assert finished(path, RUN) == ([RUN.flat() | ROW], "")
    rows, why = finished(path, RUN.replace(lr=0.01))
    assert rows is None and why.endswith("was trained with lr 0.02, not 0.01; it will be replaced")
    assert finished(tmp_path / "none.pt", RUN) == (None, "")


def test_a_state_is_saved_when_it_is_due_and_used_by_an_equal_run(tmp_path):
    path, trained = tmp_path / "rope-seed0.pt", Trained(RUN, CPU)
    extra = dict(watched={"step": []}, seconds=1.5, signature=provenance.signature(RUN))
    saver = Saver(path, 0, lambda: extra)
    for done, due in ((0, False), (7, False), (10, True), (12, False)):  # 12 is the last step
        trained.step = done
        saver(done, trained)
        assert path.with_suffix(".resume").exists() == due
        path.with_suffix(".resume").unlink(missing_ok=done != 10)
    trained.step = 10
    saver(10, trained)
    state, why = unfinished(path, RUN)
    assert why == "" and (state["step"], state["seconds"]) == (10, 1.5)
    state, why = unfinished(path, RUN.replace(steps=20))
    assert state is None and "is of a run with steps 12, not 20; this one starts at the" in why
    Saver(path, 1000, dict)(10, trained)  # not due
    assert unfinished(tmp_path / "none.pt", RUN) == (None, "")


# Finding, comparing, claiming


def test_checkpoints_come_in_the_order_of_the_schemes(tmp_path):
    for scheme, seed in (("none", 0), ("rope:base=10", 0), ("rope", 10), ("rope", 2), ("sin", 0)):
        saved(tmp_path, RUN.replace(scheme=scheme, seed=seed))
    names = [(one.run.scheme, one.run.seed) for one in find([tmp_path])]
    assert names == [("sin", 0), ("rope", 2), ("rope", 10), ("rope:base=10", 0), ("none", 0)]
    assert [one.run.scheme for one in find([tmp_path], ["none", "sin"])] == ["none", "sin"]
    assert [one.run.seed for one in find([tmp_path], ["rope"], [2])] == [2]


def test_a_bad_file_is_an_error_unless_it_is_noted_or_not_asked_for(tmp_path):
    saved(tmp_path)
    checkpoint_path(tmp_path, "sin", 0).write_bytes(b"cut short")
    with pytest.raises(ValueError, match="sin-seed0.pt is not a whole checkpoint"):
        find([tmp_path])
    bad = []
    assert len(find([tmp_path], bad=bad)) == len(bad) == len(find([tmp_path], ["rope"])) == 1


def test_the_same_run_in_two_folders_is_taken_once(tmp_path):
    for folder, run in (("a", RUN), ("b", RUN), ("c", RUN.replace(lr=0.1))):
        saved(tmp_path / folder, run)
    assert len(find([tmp_path / "a", tmp_path / "b", tmp_path / "c"])) == 2


def test_models_trained_otherwise_are_not_compared(tmp_path):
    for scheme, lr in (("learned", 0.02), ("rope", 0.01)):
        saved(tmp_path, RUN.replace(scheme=scheme, lr=lr))
    told = "rope seed 0 was trained with lr 0.01, learned seed 0 with 0.02; choose with --schemes"
    with pytest.raises(ValueError, match=told):
        require_alike(find([tmp_path]))
    require_alike(find([tmp_path]), names=["steps"])


def test_claimed_checkpoints_are_locked_until_they_are_let_go(tmp_path):
    runs = [RUN, RUN.replace(seed=1)]
    paths, locks = claim(tmp_path / "out", runs)
    assert paths == [checkpoint_path(tmp_path / "out", "rope", seed) for seed in (0, 1)]
    with locks, pytest.raises(ValueError, match="another process is at work on .*rope-seed1.pt"):
        claim(tmp_path / "out", runs[::-1])
    claim(tmp_path / "out", runs)[1].close()


def test_what_cannot_be_claimed_is_named(tmp_path):
    clash = [RUN.replace(scheme=scheme) for scheme in ("a b.py:Mine", "a-b.py:Mine")]
    with pytest.raises(ValueError, match="would share the checkpoint .*a-b.py-Mine-seed0.pt"):
        claim(tmp_path, clash)
    (tmp_path / "checkpoints" / "rope-seed0.resume").mkdir(parents=True)
    with pytest.raises(ValueError, match="rope-seed0.resume is a folder, where a file must be"):
        claim(tmp_path, [RUN])


def test_a_hash_of_weights_moves_with_each_of_them():
    weights = RUN.new_model().state_dict()
    before = weights_hash(weights)
    assert before == weights_hash(weights) and len(before) == 16
    weights["head.weight"][0, 0] += 1e-6
    assert weights_hash(weights) != before
