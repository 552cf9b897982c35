import pytest

from data.corpus import load_corpus
from helpers import RUN
from lab.checkpoints import checkpoint_path, find, save_failure, save_model
from lab.collect import alike, collect, failures, one_per_line, text_of
from lab.rows import distinct, measured, values

PPL = measured(table="train_compare", metric="ppl", n=16, value=2.5)
NOTE = PPL | {"value": None, "note": "loss nan at step 3"}


def save(out, run, rows):
    save_model(checkpoint_path(out, run.scheme, run.seed), run, run.new_model(), rows)


def fail(out, run, rows):
    save_failure(checkpoint_path(out, run.scheme, run.seed), run, rows)


def of(scheme, **more):
    return RUN.replace(scheme=scheme, **more)


def test_a_table_is_collected_from_all_checkpoints(tmp_path):
    for scheme in ("none", "sin", "rope"):
        save(tmp_path, of(scheme), [PPL, PPL | {"table": "context", "value": 9.0}])
    rows, bad = collect(tmp_path, "train_compare")
    assert bad == [] and distinct(rows, "scheme") == ["sin", "rope", "none"]
    assert values(rows) == [2.5] * 3 and rows[0] == of("sin").flat() | PPL
    assert values(collect(tmp_path, "context")[0]) == [9.0] * 3
    assert collect(tmp_path, "extrapolation") == ([], [])


def test_a_bad_checkpoint_is_a_complaint_and_the_others_are_collected(tmp_path):
    save(tmp_path, RUN, [PPL])
    checkpoint_path(tmp_path, "sin", 0).write_bytes(b"cut short")
    rows, (complaint,) = collect(tmp_path, "train_compare")
    assert len(rows) == 1 and "sin-seed0.pt is not a whole checkpoint" in complaint


def test_a_failed_run_has_its_row_of_its_table(tmp_path):
    save(tmp_path, RUN, [PPL])
    fail(tmp_path, of("sin"), [NOTE, NOTE | {"table": "finetune"}])
    rows, bad = collect(tmp_path, "train_compare")
    assert bad == [] and rows == [RUN.flat() | PPL, of("sin").flat() | NOTE]


def test_a_failed_run_has_no_row_beside_a_model_of_an_equal_run(tmp_path):
    save(tmp_path, RUN, [PPL])
    fail(tmp_path, RUN, [NOTE])
    assert collect(tmp_path, "train_compare")[0] == [RUN.flat() | PPL]


def test_a_failed_run_has_its_row_beside_a_model_of_another_run(tmp_path):
    save(tmp_path, RUN, [PPL])
    fail(tmp_path, RUN.replace(lr=1.0), [NOTE])
    assert len(collect(tmp_path, "train_compare")[0]) == 2


@pytest.mark.parametrize("text", ["", "[]", "{}", '{"run": {"seeds": 1}, "rows": []}', "\0"])
def test_a_damaged_failure_is_left_out(tmp_path, text):
    fail(tmp_path, RUN, [NOTE])
    checkpoint_path(tmp_path, "sin", 0).with_suffix(".failed").write_text(text)
    assert [run for run, _ in failures(tmp_path)] == [RUN]


def test_a_folder_without_checkpoints_has_no_rows(tmp_path):
    assert collect(tmp_path / "nowhere", "train_compare") == ([], [])


@pytest.mark.parametrize("change", [
    dict(steps=13), dict(sha256="x"), dict(held_out="x"), dict(batch_size=3), dict(dim=32),
    dict(lr=0.1), dict(adam_lr=0.1), dict(dtype="bfloat16"), dict(task="copy"),
    dict(train_lens=(8, 32)),
])  # fmt: skip
def test_rows_of_another_recipe_are_set_apart_and_named(change):
    other = of("sin", seed=3, **change).flat() | PPL
    same, others = alike([RUN.flat() | PPL, other, other], RUN)
    assert same == [RUN.flat() | PPL] and others == ["sin seed 3"]


@pytest.mark.parametrize("change", [
    dict(seed=1), dict(scheme="sin"), dict(window=8), dict(random_positions=64),
    dict(data="elsewhere"),
])  # fmt: skip
def test_rows_of_the_same_recipe_stay_together(change):
    rows = [RUN.flat() | PPL, RUN.replace(**change).flat() | PPL]
    assert alike(rows, RUN) == (rows, [])


def test_the_text_of_a_run_is_that_of_its_training_or_another(text, tmp_path):
    run = RUN.replace(data=str(text))
    assert text_of(run).sha256 == load_corpus(str(text)).sha256
    (tmp_path / "other.txt").write_bytes(b"other" * 99)
    assert text_of(run, str(tmp_path / "other.txt")).name == "other.txt"


def test_a_text_that_is_gone_says_how_to_go_on():
    with pytest.raises(ValueError, match="no such file .*; the models were trained on it, say"):
        text_of(RUN.replace(data="gone.txt"))
    with pytest.raises(ValueError, match="shakespeare[)]$"):
        text_of(RUN, "gone.txt")


def test_of_two_models_of_one_line_the_preferred_is_kept(tmp_path):
    first, second = tmp_path / "a", tmp_path / "b"
    for folder, rate in ((first, 0.02), (second, 0.01)):
        save(folder, RUN.replace(lr=rate), [PPL])
    save(second, RUN.replace(seed=1), [PPL])
    found, bad = find([first, second]), []
    path = checkpoint_path(second, RUN.scheme, RUN.seed)
    kept = one_per_line(found, [path], bad)
    assert [(one.run.lr, one.run.seed) for one in kept] == [(0.01, 0), (0.02, 1)]
    assert len(bad) == 1 and f"of the same line and seed as {path}" in bad[0]
