"""Tables by hand: few rows, every number worked out."""

import math

import numpy as np
import pytest

from helpers import RUN, rows_of, tree
from lab.rows import label, measured
from lab.tables import (
    attention_table,
    compare_all,
    context_tables,
    copy_table,
    finetune_name,
    finetune_table,
    lengths_tables,
    markdown_table,
    mean_std_text,
    summarise,
    training_table,
    usable_cell,
    use_table,
    wide_rows,
    without_empty_last_column,
    write_table,
)


def row(scheme="rope", seed=0, run=RUN, **found):
    return run.replace(scheme=scheme, seed=seed).flat() | measured(**found)


def lines_of(text):
    """The rows of the tables in a text, as lists of cells."""
    lines = [line for line in text.splitlines() if line.startswith("|")]
    cells = [[cell.strip() for cell in line.strip("|").split("|")] for line in lines]
    return [line for line in cells if not set("".join(line)) <= set("-:")]


# Pieces


def test_a_markdown_table_has_numbers_on_the_right():
    text = markdown_table(["a", "b"], [["x", 1], ["y", 2.5]])
    assert text == "| a | b |\n| --- | ---: |\n| x | 1 |\n| y | 2.5 |\n"


def test_an_empty_last_column_is_left_out():
    table = [[1, ""], [2, ""]]
    assert without_empty_last_column(["a", "note"], table) == (["a"], [[1], [2]])
    table[1][1] = "out of memory"
    assert without_empty_last_column(["a", "note"], table) == (["a", "note"], table)


@pytest.mark.parametrize("numbers, text", [
    ([], "–"), ([None], "–"), ([2.345], "2.35"), ([2.0, 3.0, 7.0], "4.00 ± 2.65"),
    ([2.0, None], "2.00"), ([99.0, 101.0], "100.0 ± 1.4"), ([1e6, 3e6], "2e+06 ± 1.41e+06"),
    ([5.0, 5.0], "5.00 ± 0.00"),
])  # fmt: skip
def test_numbers_over_seeds_are_mean_and_sample_deviation(numbers, text):
    assert mean_std_text(numbers) == text


@pytest.mark.parametrize("ppl, cell", [
    ({16: 3.0, 32: 3.1}, "≥ 32"), ({16: 3.0, 32: 3.1, 64: 4.0}, "32"), ({32: 3.0}, "–"),
    ({16: 3.0, 32: None}, "16"),
])  # fmt: skip
def test_a_usable_length_that_is_all_that_was_measured_is_at_least_that(ppl, cell):
    assert usable_cell(ppl, 16) == cell


def test_a_table_is_written_as_rows_and_as_text(tmp_path):
    rows = [row(n=16, value=2.5), row("sin", n=16, value=3.5)]
    write_table(tmp_path, "things", rows, "| a |\n")
    assert tree(tmp_path) == ["things.csv", "things.json", "things.md"]
    assert rows_of(tmp_path, "things") == rows
    assert (tmp_path / "things.md").read_text() == "| a |\n"
    header, *lines = (tmp_path / "things.csv").read_text().splitlines()
    assert header == "scheme,seed,protocol,n,metric,value" and lines[1] == "sin,0,,16,,3.5"


# Training


def trained(scheme, seed, ppl, run=RUN, **numbers):
    """The rows of one trained model, without its curve."""
    numbers = dict(parameters=1000, position_parameters=0, seconds=2.5) | numbers
    found = [
        row(scheme, seed, run, protocol="training", metric="train_ppl", n=16, value=ppl - 1),
        row(scheme, seed, run, protocol="span", metric="ppl", n=16, value=ppl),
    ]
    return found + [row(scheme, seed, run, metric=name, value=v) for name, v in numbers.items()]


def test_a_training_table_has_a_line_per_scheme():
    rows = trained("learned", 0, 5.0, position_parameters=4096, tokens_per_second=1234)
    for seed, ppl in enumerate((2.0, 3.0, 7.0)):
        rows += trained("rope", seed, ppl, seconds=10.0 * seed, tokens_per_second=1000 + seed)
    header, learned, rope = lines_of(training_table(rows))
    assert header[:5] == ["scheme", "seeds", "train ppl", "validation ppl", "position parameters"]
    assert learned == ["learned", "1", "4.00", "5.00", "4,096", "1,000", "2", "1,234"]
    middle = ["0", "1,000", "10", "1,001"]  # medians over seeds
    assert rope == ["rope", "3", "3.00 ± 2.65", "4.00 ± 2.65", *middle]


def test_a_training_table_has_a_note_where_a_run_failed():
    failed = row("sin", protocol="span", metric="ppl", n=16, note="loss nan at step 3")
    header, rope, sin = lines_of(training_table([*trained("rope", 0, 5.0), failed]))
    assert header[-1] == "note" and rope[-1] == ""
    assert sin == ["sin", "1", "–", "–", "–", "–", "–", "–", "loss nan at step 3"]


def test_models_that_were_trained_in_a_special_way_have_lines_of_their_own():
    windowed = RUN.replace(window=8)
    rows = trained("rope", 0, 5.0) + trained("rope", 0, 6.0, windowed)
    names = [line[0] for line in lines_of(training_table(rows))[1:]]
    assert names == ["rope", "rope, trained with window 8"]
    rows = trained("rope", 0, 5.0, windowed) + trained("sin", 0, 6.0, windowed)
    assert [line[0] for line in lines_of(training_table(rows))[1:]] == ["rope", "sin"]


# Fine-tuning

TUNED = RUN.replace(steps=20, train_lens=(64,), start=RUN)


def watched(scheme, ppl, seed=0, **more):
    """The rows of a fine-tuned model, of {step: perplexity}."""
    found = [
        row(scheme, seed, TUNED, protocol="fixed", metric="ppl", n=64, step=step, value=value)
        for step, value in ppl.items()
    ]
    return [line | more for line in found]


def test_a_fine_tuning_table_goes_by_steps_and_says_when_alibi_is_reached():
    rows = watched("alibi", {0: 4.0, 10: 3.9, 20: 3.8})
    rows += watched("rope", {0: 9.0, 10: 4.2, 20: 3.0}) + watched("rope", {0: 7.0, 20: 5.2}, seed=1)
    rows += watched("rope:scaling=linear,factor=4", {0: 5.0, 10: 4.0}, way="linear", factor=4.0)
    text = finetune_table(rows, 64)
    header, alibi, rope, linear = lines_of(text)
    # 20 steps of 2 windows of 64 bytes are 2,560 bytes.
    assert header[:5] == ["scheme; steps (bytes read)", "seeds", "0", "10 (1k)", "20 (3k)"]
    assert header[5] == "steps to ALiBi's start"
    assert alibi == ["alibi", "1", "4.00", "3.90", "3.80", "0"]
    assert rope == ["rope", "2", "8.00 ± 1.41", "4.20", "4.10 ± 1.56", "> 20"]
    assert linear == ["rope, linear × 4", "1", "5.00", "4.00", "–", "10"]
    assert "Fixed-target perplexity at n = 64" in text and "over these 20 steps" in text


# Perplexity by length


def scored(scheme, seed, n, windows, protocol="fixed", **more):
    """A row whose perplexity is that of these mean nats of windows."""
    found = dict(low=1.0, high=9.0, value=math.exp(np.mean(windows)))
    return row(scheme, seed, protocol=protocol, n=n, metric="ppl", **found | more) | dict(
        by_window=np.array(windows)
    )


def test_a_summary_is_mean_and_deviation_over_seeds():
    rows = [row(seed=s, protocol="fixed", n=64, value=v) for s, v in enumerate((2.0, 3.0, 7.0))]
    (cell,) = summarise(rows)
    assert (cell["name"], cell["seeds"], cell["text"]) == ("rope", [0, 1, 2], "4.00 ± 2.65")
    assert (cell["ppl"], cell["std"]) == (4.0, 2.6458)
    assert (cell["low"], cell["high"]) == (1.3542, 6.6458)


def test_a_summary_of_one_seed_has_its_bootstrap_interval():
    (cell,) = summarise([row(protocol="fixed", n=64, value=2.0, low=1.5, high=2.5)])
    assert (cell["std"], cell["low"], cell["high"]) == (0, 1.5, 2.5)


def test_a_summary_leaves_out_seeds_that_failed_and_keeps_their_note():
    done = row(protocol="fixed", n=64, value=2.0, low=1.0, high=9.0)
    failed = row(seed=1, protocol="fixed", n=64, note="out of memory")
    (cell,) = summarise([done, failed])
    assert (cell["ppl"], cell["seeds"], cell["note"]) == (2.0, [0], "out of memory")
    (cell,) = summarise([failed])
    assert (cell["ppl"], cell["text"]) == (None, "out of memory")


def test_lines_are_told_apart_by_how_models_were_read():
    rows = [row(protocol="fixed", n=64, value=2.0, low=1.0, high=3.0, way=w) for w in ("", "yarn")]
    assert [cell["name"] for cell in summarise(rows)] == ["rope", "rope, yarn"]


def test_all_pairs_of_a_column_are_compared_over_the_same_seeds():
    rows = [scored("rope", 0, 64, [1.0, 1.2]), scored("rope", 1, 64, [1.0, 1.1, 1.3])]
    rows += [scored("sin", 0, 64, [1.1, 1.3]), scored("sin", 1, 64, [1.1, 1.1, 1.35])]
    rows += [scored("none", 1, 64, [1.0, 1.3, 1.2])]
    found = compare_all(rows)
    pairs = [(pair["a"], pair["b"]) for pair in found]
    assert pairs == [("rope", "sin"), ("rope", "none"), ("sin", "none")]
    assert {pair["over"] for pair in found} == {"3 windows"}  # of seed 1 alone
    assert found[0]["nats_a_minus_b"] == pytest.approx(-0.05)
    without = [r for r in rows if (r["scheme"], r["seed"]) != ("sin", 1)]
    assert compare_all(without) == []


def test_columns_are_compared_each_for_itself():
    rows = [scored(s, 0, n, [1.0, 1.1]) for n in (64, 128) for s in ("rope", "sin")]
    rows += [row("none", protocol="fixed", n=64, note="out of memory")]
    found = compare_all(rows)
    assert [(pair["n"], pair["a"], pair["b"]) for pair in found] == [
        (64, "rope", "sin"), (128, "rope", "sin"),
    ]  # fmt: skip


def test_a_wide_row_has_its_perplexities_under_the_lengths():
    rows = [
        row(protocol="span", n=n, value=float(n), way=w) for w in ("", "yarn") for n in (64, 16)
    ]
    plain, yarn = wide_rows(rows)
    assert plain == {"scheme": "rope", "variant": "", "seed": 0, "protocol": "span", 16: 16, 64: 64}
    assert yarn["variant"] == "yarn"


def test_tables_by_length_have_the_best_in_bold_and_the_usable_length():
    rows = [scored("rope", 0, 16, [1.0, 1.02]), scored("rope", 0, 64, [2.0, 2.02])]
    rows += [scored("alibi", 0, 16, [1.01, 1.01]), scored("alibi", 0, 64, [1.0, 1.01])]
    text = lengths_tables(rows, summarise(rows), compare_all(rows), 16)
    header, rope, alibi = lines_of(text)
    assert header == ["perplexity at n =", "16", "64", "usable length"]
    assert rope == ["rope", "**2.75**", "7.46", "16"]  # exp(1.01), exp(2.01)
    assert alibi == ["alibi", "**2.75**", "**2.73**", "≥ 64"]  # exp(1.005)
    assert text.startswith("Trained at 16 bytes. Seed 0. Bold: the best")
    assert "paired t-test over windows (5 %" in text and "Fixed-target protocol:" in text


def test_tables_by_length_have_one_part_per_protocol():
    rows = [scored("rope", 0, 64, [1.0, 1.1], protocol=p) for p in ("fixed", "span")]
    text = lengths_tables(rows, summarise(rows), compare_all(rows), 16)
    span, fixed = text.index("Span protocol:"), text.index("Fixed-target protocol:")
    assert span < fixed and text.count("| rope | 2.86 |") == 2
    assert "usable length" not in text[span:fixed]


def test_seeds_that_differ_between_lines_are_named():
    rows = [scored(s, seed, 64, [1.0, 1.1]) for s in ("rope", "sin") for seed in (0, 1)]
    rows += [scored("alibi", 0, 64, [1.0, 1.1])]
    text = lengths_tables(rows, summarise(rows), compare_all(rows), 16)
    assert "Mean ± sample standard deviation over seeds 0, 1; alibi: 0. Bold" in text
    assert "paired t-test over seeds (5 %" in text


# Use of context


def test_a_use_table_says_from_where_on_more_context_gains_little():
    ppl = {16: 4.0, 32: 3.02, 64: 3.0, 128: 3.2}
    rows = [row(protocol="use", metric="ppl", n=n, value=v) for n, v in ppl.items()]
    rows += [row("sin", protocol="use", metric="ppl", n=n, note="out of memory") for n in ppl]
    header, rope, sin = lines_of(use_table(rows, 32))
    assert header == ["n =", "16", "32", "64", "128", "within 1 % of its best at", "usable length"]
    assert rope == ["rope", "4.00", "3.02", "3.00", "3.20", "32", "64"]  # 3.2 > 1.05 × 3.02
    assert sin == ["sin", *["out of memory"] * 4, "–", "–"]


def test_a_copy_table_has_the_share_without_the_first_in_brackets():
    rows = [
        row(seed=seed, protocol="copy", metric=metric, n=64, value=value + seed / 10)
        for metric, value in (("accuracy", 0.5), ("accuracy without the first", 0.02))
        for seed in (0, 1)
    ]
    rows += [row("sin", protocol="copy", metric="accuracy", n=64, note="max_len 16")]
    header, rope, sin = lines_of(copy_table(rows, 32))
    assert header == ["d =", "64"] and rope == ["rope", "0.55 (0.07)"]
    assert sin == ["sin", "max_len 16"]


def test_an_attention_table_has_the_share_within_each_distance():
    shares = {1: 0.25, 8: 0.5, 16: 0.75, 64: 1.0}
    rows = [
        row(protocol="attention", metric="share", n=64, within=d, value=s)
        for d, s in shares.items()
    ]
    header, rope = lines_of(attention_table(rows, 16))
    assert header == ["", "n", "1", "8", "64", "16"]
    assert rope == ["rope", "64", "0.25", "0.50", "1.00", "0.75"]


def test_context_tables_are_those_of_which_there_are_rows():
    rows = [row(protocol="use", metric="ppl", n=16, value=2.0)]
    rows += [row("none", protocol="attention", metric="share", n=16, note="it takes no attend")]
    text = context_tables(rows, 16)
    assert text.startswith("Use: fixed-target perplexity") and "Copy:" not in text
    assert text.endswith("– none, attention at 16: it takes no attend.\n")
    assert label(rows[0]) == "rope"


def test_models_tuned_in_special_ways_have_lines_of_their_own():
    base = dict(start_scheme="rope", scheme="rope", way="", factor=None, random_positions=0)
    base |= dict(train_lens=(64,), window=0, copies=False, start_len=16)
    scaled = dict(scheme="rope:scaling=yarn,factor=4", way="yarn", factor=4.0)
    assert finetune_name(base) == "rope" and finetune_name(base | scaled) == "rope, yarn × 4"
    assert finetune_name(base | dict(window=8)) == "rope, trained with window 8"
