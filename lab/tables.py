"""Rows -> Markdown tables, and the summaries and comparisons that stand in them and in pictures."""

import itertools

import numpy as np

from lab.files import write_atomically, write_csv
from lab.rows import distinct, for_csv, label, read_as, select, trained_as, values, write_rows
from lab.score import K
from lab.stats import compare_pair, mean_std, tied_with_best, usable_length


def markdown_table(header, rows):
    """A header and rows of cells -> a Markdown table; all but the first column right-aligned."""
    lines = [header, ["---"] + ["---:"] * (len(header) - 1), *rows]
    return "\n".join("| " + " | ".join(map(str, line)) + " |" for line in lines) + "\n"


def without_empty_last_column(header, table):
    """The table without its last column, where nothing stands in it."""
    if any(line[-1] for line in table):
        return header, table
    return header[:-1], [line[:-1] for line in table]


def mean_std_text(numbers):
    """mean ± sample standard deviation as text, or the one value, or a dash."""
    numbers = [number for number in numbers if number is not None]
    if not numbers:
        return "–"
    mean, deviation = mean_std(numbers)
    style = ".2f" if mean < 100 else ".1f" if mean < 1e5 else ".3g"
    return f"{mean:{style}}" + (f" ± {deviation:{style}}" if len(numbers) > 1 else "")


def usable_cell(ppl, train_len):
    """The usable length of {n: ppl}: ≥ where it is all that was measured, a dash if none is."""
    usable = usable_length(ppl, train_len)
    if usable is None:
        return "–"
    return f"≥ {usable}" if usable == max(ppl) else str(usable)


def write_table(out, name, rows, text):
    """Write name.json and .csv (the rows) and .md (their table) into the folder `out`."""
    write_rows(out / f"{name}.json", rows)
    write_csv(out / f"{name}.csv", for_csv(rows))
    write_atomically(out / f"{name}.md", text)


def notes_of(rows):
    return "; ".join(sorted({row["note"] for row in rows if row["note"]}))


# Training


def training_table(rows):
    """One line per scheme from the rows of train_compare.py."""
    plain = len({trained_as(row) for row in rows}) == 1  # what all have in common needs no words

    def name_of(row):
        return row["scheme"] if plain else label(row)

    def middle(mine, metric):
        found = values(mine, metric=metric)
        return f"{np.median(found):,.0f}" if found else "–"

    table = []
    for name in dict.fromkeys(map(name_of, rows)):
        mine = [row for row in rows if name_of(row) == name]
        line = [name, seeds_of(mine)]
        line.append(mean_std_text(values(mine, metric="train_ppl")))
        line.append(mean_std_text(values(mine, metric="ppl", protocol="span")))
        numbers = ("position_parameters", "parameters", "seconds", "tokens_per_second")
        line += [middle(mine, metric) for metric in numbers]
        table.append(line + [notes_of(mine)])
    header = ["scheme", "seeds", "train ppl", "validation ppl", "position parameters",
              "all parameters", "seconds", "tokens/s", "note"]  # fmt: skip
    return markdown_table(*without_empty_last_column(header, table))


def finetune_name(row):
    """rope, yarn × 4: a fine-tuned scheme by its scaling, and what else is special about it."""
    scheme = row["start_scheme"] if row["way"] else row["scheme"]
    scaled = f"{row['way']} × {row['factor']:g}" if row["way"] else ""
    return ", ".join(filter(None, (scheme, scaled, trained_as(row | {"start_len": 0}))))


def seeds_of(rows):
    """How many seeds have a perplexity; of all, if none has."""
    with_value = [row for row in rows if row["metric"] == "ppl" and row["value"] is not None]
    return len(distinct(with_value or rows, "seed"))


def finetune_table(rows, train_len):
    """Perplexity by fine-tuning step, one line per scheme, from the rows of finetune.py."""
    watched = [row for row in rows if row["protocol"] == "fixed" and row["step"] is not None]
    steps = sorted(set(distinct(watched, "step")))
    alibi = values(watched, scheme="alibi", step=0)
    tokens = {row["step"]: row["tokens"] * row["step"] // row["steps"] for row in watched}
    header, table = ["scheme; steps (bytes read)", "seeds"], []
    header += [f"{step} ({tokens[step] / 1000:.0f}k)" if step else "0" for step in steps]
    header += ["steps to ALiBi's start"] * bool(alibi) + ["note"]
    for name in dict.fromkeys(map(finetune_name, rows)):
        mine = [row for row in rows if finetune_name(row) == name]
        ppl = {step: values(mine, protocol="fixed", step=step) for step in steps}
        line = [name, seeds_of(mine)] + [mean_std_text(ppl[step]) for step in steps]
        if alibi:
            there = [s for s in steps if ppl[s] and np.mean(ppl[s]) <= np.mean(alibi)]
            later = f"> {steps[-1]}" if any(ppl.values()) else "–"
            line.append(there[0] if there else later)
        table.append(line + [notes_of(mine)])
    return (
        f"Fixed-target perplexity at n = {train_len} while fine-tuning there. The learning rates "
        f"fall to 5 % over these {steps[-1] if steps else 0} steps, so a number on the way is not "
        "where a run of so few steps would end.\n\n"
    ) + markdown_table(*without_empty_last_column(header, table))


# Perplexity by length

TITLES = {
    "span": "Span protocol: windows of n without overlap. A longer window has fewer targets with "
    "little before them, so a sound scheme falls a little.",
    "fixed": f"Fixed-target protocol: the same {K} last targets of each window, with n bytes "
    "before the last. Falling: it uses far context. Flat: it ignores it. Rising: it breaks.",
}


def summarise(rows):
    """Rows -> a dict per line, protocol and length: over seeds mean ± std.

    Of one seed low and high are its bootstrap interval, of several mean − std and mean + std.
    """
    cells = {}
    for row in rows:
        cells.setdefault((label(row), row["protocol"], row["n"]), []).append(row)
    return [_cell(name, seeds) for (name, _, _), seeds in cells.items()]


def _cell(name, seeds):
    row = seeds[0]
    done = [row for row in seeds if row["value"] is not None]
    cell = {key: row[key] for key in ("scheme", "way", "factor", "read_window", "protocol", "n")}
    cell = dict(name=name, trained=trained_as(row), read=read_as(row)) | cell
    cell |= dict(seeds=[row["seed"] for row in done], ppl=None, std=None, low=None, high=None)
    cell["note"] = cell["text"] = notes_of(seeds)
    if done:
        cell["text"] = mean_std_text([row["value"] for row in done])
        mean, std = mean_std([row["value"] for row in done])
        low, high = mean - std, mean + std
        if len(done) == 1:
            low, high = done[0]["low"], done[0]["high"]
        cell |= dict(ppl=round(mean, 4), std=round(std, 4))
        cell |= dict(low=round(low, 4), high=round(high, 4))
    return cell


def compare_all(rows):
    """Every pair of lines in every column (protocol, n) -> dicts, as in stats.compare_pair."""
    columns = {}
    for row in rows:
        if row["value"] is not None:
            column = columns.setdefault((row["protocol"], row["n"]), {})
            column.setdefault(label(row), {})[row["seed"]] = np.asarray(row["by_window"])
    found = []
    for (protocol, n), lines in columns.items():
        # All pairs of a column are compared over the same seeds.
        common = set.intersection(*map(set, lines.values()))
        lines = {a: {s: v for s, v in of.items() if s in common} for a, of in lines.items()}
        for a, b in itertools.combinations(lines, 2):
            difference = compare_pair(lines[a], lines[b])
            if difference:
                found.append(dict(protocol=protocol, n=n, a=a, b=b) | difference)
    return found


def wide_rows(rows):
    """Rows -> one per line, seed and protocol, with its perplexities under the lengths."""
    lengths, lines = sorted(set(distinct(rows, "n"))), {}
    for row in rows:
        variant = ", ".join(filter(None, (trained_as(row), read_as(row))))
        key = dict(scheme=row["scheme"], variant=variant)
        key |= dict(seed=row["seed"], protocol=row["protocol"])
        line = lines.setdefault(tuple(key.values()), key | dict.fromkeys(lengths))
        line[row["n"]] = row["value"]
    return list(lines.values())


def lengths_tables(rows, cells, pairs, train_len):
    """The wide tables of perplexity by length, one per protocol, as one Markdown text."""
    lengths, text = sorted(set(distinct(rows, "n"))), [_lengths_note(rows, train_len)]
    for protocol in [p for p in TITLES if select(rows, protocol=p)]:
        mine = {(cell["name"], cell["n"]): cell for cell in select(cells, protocol=protocol)}
        best = {n: tied_with_best(select(pairs, protocol=protocol, n=n)) for n in lengths}
        table = []
        for name in dict.fromkeys(name for name, _ in mine):
            line, ppl = [name], {n: mine[name, n]["ppl"] for n in lengths if (name, n) in mine}
            for n in lengths:
                cell = mine[name, n]["text"] if (name, n) in mine else "–"
                line.append(f"**{cell}**" if name in best[n] else cell)
            table.append(line + ([usable_cell(ppl, train_len)] if protocol == "fixed" else []))
        header = ["perplexity at n =", *lengths] + ["usable length"] * (protocol == "fixed")
        text.append(TITLES[protocol] + "\n\n" + markdown_table(header, table))
    return text[0] + "\n\n" + "\n".join(text[1:])


def _lengths_note(rows, train_len):
    """What all the tables of a text have in common: length, seeds, what is bold."""
    seeds = {}
    for row in rows:
        seeds.setdefault(label(row), {})[str(row["seed"])] = True  # a dict for its order
    named = {name: ", ".join(each) for name, each in seeds.items()}
    common = max(named.values(), key=list(named.values()).count)
    others = [f"; {name}: {each}" for name, each in named.items() if each != common]
    many = any("," in each for each in named.values())
    kind = "Mean ± sample standard deviation over seeds" if many else "Seed"
    over = "seeds" if many else "windows"
    return (
        f"Trained at {train_len} bytes. {kind} {common}{''.join(others)}. Bold: the best of a "
        "column, and what is within 5 % of it and cannot be told from it by a paired t-test over "
        f"{over} (5 %, Holm's correction)."
    )


# Use of context


def context_tables(rows, train_len):
    """The rows of context_test.py as Markdown tables, one per kind."""
    makers = (use_table, copy_table, attention_table)
    texts = [make(rows, train_len) for make in makers]
    notes = {}
    for row in select(rows, protocol="attention"):
        if row["note"]:
            notes[f"{label(row)}, attention at {row['n']}: {row['note']}"] = True
    if notes:
        texts.append("– " + "; ".join(notes) + ".\n")
    return "\n".join(text for text in texts if text)


def use_table(rows, train_len):
    """Perplexity by window length, where it is within 1 % of its best, and the usable length."""
    rows = select(rows, protocol="use")
    lengths, table = distinct(rows, "n"), []
    for name in dict.fromkeys(map(label, rows)):
        mine = [row for row in rows if label(row) == name]
        line, ppl = [name], {}
        for n in lengths:
            found = values(mine, n=n)
            ppl[n] = np.mean(found) if found else None
            line.append(mean_std_text(found) if found else notes_of(select(mine, n=n)))
        best = min((p for p in ppl.values() if p is not None), default=None)
        near = [n for n in lengths if ppl[n] is not None and ppl[n] <= 1.01 * best]
        table.append([*line, near[0] if near else "–", usable_cell(ppl, train_len)])
    header = ["n =", *lengths, "within 1 % of its best at", "usable length"]
    title = f"Use: fixed-target perplexity with n bytes in all. Trained at {train_len}.\n\n"
    return title + markdown_table(header, table) if table else ""


def copy_table(rows, train_len):
    """The share of a copied string that is predicted right, and in brackets without the first."""
    rows = select(rows, protocol="copy")
    distances, table = distinct(rows, "n"), []
    for name in dict.fromkeys(map(label, rows)):
        mine = [row for row in rows if label(row) == name]
        line = [name]
        for d in distances:
            right = values(mine, n=d, metric="accuracy")
            without = values(mine, n=d, metric="accuracy without the first")
            cell = mean_std_text(right) if right else notes_of(select(mine, n=d))
            if right and without:
                cell = f"{np.mean(right):.2f} ({np.mean(without):.2f})"
            line.append(cell)
        table.append(line)
    title = (
        "Copy: the share of the bytes right in a random string that stood d bytes before as well, "
        f"and in brackets without that. Trained at {train_len}; chance is 0.04.\n\n"
    )
    return title + markdown_table(["d =", *distances], table) if table else ""


def attention_table(rows, train_len):
    """The share of the attention of the last tokens that goes to what is near."""
    rows = select(rows, protocol="attention")
    shown, table = list(dict.fromkeys((1, 8, 64, train_len))), []
    for name in dict.fromkeys(map(label, rows)):
        for n in distinct(rows, "n"):
            mine = [row for row in rows if label(row) == name and row["n"] == n]
            shares = [values(mine, within=distance) for distance in shown]
            if any(shares):
                table.append([name, n, *map(mean_std_text, shares)])
    title = "Attention: the share that goes to the last 1 (the token itself), 8, 64 … tokens.\n\n"
    return title + markdown_table(["", "n", *shown], table) if table else ""
