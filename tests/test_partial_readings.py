"""A command that reads some models, lengths or protocols takes nothing away from the others."""

import shutil

import pytest

import extrapolation_test
import train_compare
from helpers import TINY, rows_of, song, train_tiny, without_pictures
from lab.checkpoints import find
from lab.rows import distinct, select

FLAGS = ("--lengths", 64, 128, "--span-bytes", 1024, "--windows", 4)


@pytest.fixture(autouse=True)
def no_pictures(monkeypatch):
    without_pictures(monkeypatch)


@pytest.fixture(scope="module")
def trained(tmp_path_factory):
    """Three tiny models, read at 64 and 128 under both protocols."""
    folder = tmp_path_factory.mktemp("trained")
    with pytest.MonkeyPatch.context() as patch:
        without_pictures(patch)
        out = train_tiny(folder, " ".join(TINY + ["--schemes", "sin", "rope", "none"]), 1000)
        words = ["extrapolation_test.py", "--out", out, "--device", "cpu", *FLAGS]
        patch.setattr("sys.argv", list(map(str, words)))
        extrapolation_test.main()
    return out


@pytest.fixture
def out(trained, tmp_path):
    return shutil.copytree(trained, tmp_path / "out")


@pytest.fixture
def read(cli, out):
    def call(*flags):
        return cli(extrapolation_test, "--out", out, "--device", "cpu", *FLAGS, *flags)

    return call


def measurements(rows):
    """{what was measured of which model: its value}."""
    names = ("scheme", "seed", "way", "read_window", "protocol", "n")
    return {tuple(row[name] for name in names): row["value"] for row in rows}


@pytest.mark.parametrize(
    "flags", ["--schemes none", "--lengths 64", "--protocol span", "--protocol fixed --lengths 128"]
)
def test_a_partial_reading_removes_no_rows(read, out, flags):
    before = rows_of(out, "extrapolation")
    assert len(before) == 3 * 2 * 2
    code, stdout, _ = read(*flags.split())
    assert code == 0 and "notice" not in stdout
    assert measurements(rows_of(out, "extrapolation")) == measurements(before)
    assert all(f"| {scheme} |" in stdout for scheme in ("sin", "rope", "none"))


def test_another_way_is_added_to_the_table(read, out):
    before = measurements(rows_of(out, "extrapolation"))
    assert read("--schemes", "rope", "--window", 5, "--lengths", 64)[0] == 0
    after = measurements(rows_of(out, "extrapolation"))
    assert before.items() < after.items() and len(after) == len(before) + 2


def test_longer_lengths_are_added_to_the_table(read, out):
    assert read("--lengths", 256, "--protocol", "span")[0] == 0
    rows = rows_of(out, "extrapolation")
    assert sorted(distinct(select(rows, protocol="span"), "n")) == [64, 128, 256]


def test_rows_keep_the_command_that_measured_them(read, out):
    assert read("--schemes", "none", "--protocol", "span")[0] == 0
    for row in rows_of(out, "extrapolation"):
        again = row["scheme"] == "none" and row["protocol"] == "span"
        assert ("--schemes none" in row["command"]) == again


@pytest.mark.parametrize("flags", ["--windows 3", "--span-bytes 512"])
def test_rows_on_other_targets_are_kept_and_left_out(read, out, flags):
    code, stdout, _ = read("--schemes", "none", *flags.split())
    assert code == 0
    assert "notice: rows measured on other targets are kept, and not in the tables: 6" in stdout
    protocol = "fixed" if "windows" in flags else "span"
    shown = select(rows_of(out, "extrapolation"), protocol=protocol)
    assert distinct(shown, "scheme") == ["none"]
    kept = [row for one in find([out], ["sin"]) for row in select(one.rows, protocol=protocol)]
    assert len(select(kept, table="extrapolation")) == 2
    assert read()[0] == 0  # all of them on the same targets
    assert len(rows_of(out, "extrapolation")) == 3 * 2 * 2


def test_another_text_has_a_table_of_its_own(read, out, tmp_path):
    before = measurements(rows_of(out, "extrapolation"))
    other = tmp_path / "other.txt"
    other.write_bytes(b"something else " * 2000)
    code, stdout, _ = read("--schemes", "none", "--data", other)
    assert code == 0 and "kept, and not in the tables: 12" in stdout
    rows = rows_of(out, "extrapolation")
    assert distinct(rows, "scheme") == ["none"] and distinct(rows, "text_name") == ["other.txt"]
    code, stdout, _ = read("--schemes", "none")
    assert code == 0 and "kept, and not in the tables: 4" in stdout
    assert measurements(rows_of(out, "extrapolation")) == before


def test_the_other_protocol_keeps_the_targets_that_most_rows_have(read, out):
    assert read("--schemes", "none", "--windows", 3, "--protocol", "fixed")[0] == 0
    code, stdout, _ = read("--protocol", "span")
    assert code == 0 and "kept, and not in the tables: 2" in stdout
    fixed = select(rows_of(out, "extrapolation"), protocol="fixed")
    assert distinct(fixed, "scheme") == ["sin", "rope", "none"]
    assert set(distinct(fixed, "count")) == {fixed[0]["count"]}


def test_ctrl_c_keeps_what_is_scored(read, out, monkeypatch, capsys):
    real, calls = extrapolation_test.score_readings, []

    def stops(*arguments):
        calls.append(1)
        if len(calls) == 2:
            raise KeyboardInterrupt
        return real(*arguments)

    monkeypatch.setattr(extrapolation_test, "score_readings", stops)
    with pytest.raises(KeyboardInterrupt):
        read("--name", "new")
    told = "stopped; 1 of 3 models are scored and kept in their checkpoints, tables are as they"
    assert told in capsys.readouterr().err and not (out / "new.json").exists()
    assert [len(select(one.rows, table="new")) for one in find([out])] == [4, 0, 0]


def test_names_have_tables_of_their_own(read, out):
    before = rows_of(out, "extrapolation")
    assert read("--schemes", "none", "--name", "other")[0] == 0
    assert distinct(rows_of(out, "other"), "scheme") == ["none"]
    assert rows_of(out, "extrapolation") == before


def test_a_model_that_is_trained_again_loses_what_was_measured_of_it(cli, read, out, trained):
    flags = ("--data", trained.parent / "words.txt", "--out", out, "--schemes", "none")
    assert cli(train_compare, *TINY, *flags, "--force")[0] == 0
    assert [one.run.scheme for one in find([out])] == ["sin", "rope", "none"]
    assert read("--schemes", "sin")[0] == 0
    assert distinct(rows_of(out, "extrapolation"), "scheme") == ["sin", "rope"]


def test_models_trained_otherwise_are_left_out_with_a_notice(cli, read, out, trained):
    flags = ("--data", trained.parent / "words.txt", "--out", out, "--schemes", "alibi")
    assert cli(train_compare, *TINY, *flags, "--steps", 7)[0] == 0
    code, _, stderr = read()
    assert code == 2 and "choose with --schemes and --seeds, or train again" in stderr
    assert read("--schemes", "alibi")[0] == 0
    code, stdout, _ = read("--schemes", "sin")
    assert code == 0
    assert "notice: trained otherwise, and not in the tables: alibi seed 0" in stdout
    assert distinct(rows_of(out, "extrapolation"), "scheme") == ["sin", "rope", "none"]


def test_a_copied_text_is_the_same_text(read, out, tmp_path):
    (tmp_path / "copy.txt").write_bytes(song(1000))
    code, stdout, _ = read("--schemes", "none", "--data", tmp_path / "copy.txt")
    assert code == 0 and "notice" not in stdout and len(rows_of(out, "extrapolation")) == 12
