"""Write what README.md shows of the results, anew: results/summary.md and the tables of the page.

python report.py                  # results/summary.md and the tables of README.md
python report.py --fingerprints   # results/fingerprints.json, which says how the code behaves
                                  # that the results are of: after a change that moves them on
                                  # purpose, when everything in results/ has been made again
"""

import json
import re
import sys
import tokenize

from data.corpus import load_corpus
from lab import command, plots
from lab.command import ROOT, switch
from lab.files import write_atomically, write_json
from lab.provenance import fingerprint
from lab.rows import read_rows, select, values
from lab.tables import markdown_table, mean_std_text, summarise, usable_cell
from schemes.scheme import SCHEMES

RESULTS = ROOT / "results"
USE_WHEN = {
    "learned": "a model that has it must be matched",
    "sin": "the fewest lines count, and no text is longer than in training",
    "rope": "you can fine-tune at the longer length, or slide a window",
    "alibi": "longer texts will come, and no weight may change",
    "none": "a control is wanted",
}
OURS = "this repository"


def code_lines(path):
    """How many lines of a Python file have code on them: not comments, docstrings or nothing."""
    lines, start = set(), True  # start: of a statement
    with open(path, encoding="utf-8") as file:
        for token in tokenize.generate_tokens(file.readline):
            if token.type in (tokenize.NEWLINE, tokenize.INDENT, tokenize.DEDENT):
                start = True
            elif token.type not in (tokenize.COMMENT, tokenize.NL, tokenize.ENDMARKER):
                if not (start and token.type == tokenize.STRING):
                    lines |= set(range(token.start[0], token.end[0] + 1))
                start = False
    return len(lines)


def summary(results):
    """One row per scheme out of all that was measured, as Markdown.

    From train_compare.json, extrapolation.json, bench_train.json and bench_long.json. A scheme
    without a layer of its own is `none` in its layers, and has that one's memory.
    """
    trained = read_rows(results / "train_compare.json")
    fixed = select(read_rows(results / "extrapolation.json"), protocol="fixed", way="")
    cells = summarise(select(fixed, read_window=0))
    steps = json.loads((results / "bench_train.json").read_text("utf-8"))["rows"]
    long = json.loads((results / "bench_long.json").read_text("utf-8"))["rows"]
    layers = select(long, what="layer", who=OURS, T=8192)
    memory = {row["scheme"]: row["extra_mb"] for row in layers}
    lengths, table = sorted({cell["n"] for cell in cells}), []
    L = max(fixed[0]["train_lens"])
    for scheme in SCHEMES:
        mine = select(trained, scheme=scheme)
        ppl = {cell["n"]: cell["ppl"] for cell in select(cells, scheme=scheme)}
        (step,) = (row["times_none"] for row in select(steps, scheme=scheme, who=OURS))
        parameters = values(mine, metric="position_parameters")[0]
        lines = code_lines(ROOT / f"pos_{scheme}.py") if scheme != "none" else "–"
        share = memory.get(scheme, memory["none"]) / memory["none"]
        line = [scheme, mean_std_text(values(mine, metric="train_ppl"))]
        line += [f"{ppl[n]:.2f}" for n in lengths]
        line += [usable_cell(ppl, L), f"{parameters:,}", lines, f"{step:.2f}", f"{share:.1f}"]
        table.append(line + [USE_WHEN[scheme]])
    header = ["scheme", "train ppl", *(f"ppl at {n}" for n in lengths), "usable length"]
    header += ["position parameters", "lines of code", "time of a step ¹"]
    header += ["layer's memory at 8k ¹", "use it when"]
    return markdown_table(header, table).replace("---: |\n", "--- |\n", 1)


def fill_readme(readme, results):
    """README text with each block between `<!-- NAME.md -->` and `<!-- end -->` from results/.

    NAME may have a folder before it. `<!-- NAME.md: Word -->` takes only the table after the
    paragraph of the file that begins with that word, and `<!-- NAME.md: Word: a|b -->` only its
    rows whose first cell is a or b.
    """

    def block(match):
        text = (results / match[2]).read_text("utf-8").strip()
        if match[3]:
            parts = text.split("\n\n")
            (start,) = (i for i, part in enumerate(parts) if part.startswith(match[3]))
            text = parts[start + 1]
        if match[4]:
            head, line, *rows = text.splitlines()
            wanted = tuple(f"| {name} |" for name in match[4].split("|"))
            text = "\n".join([head, line] + [row for row in rows if row.startswith(wanted)])
        return f"{match[1]}\n{text}\n\n<!-- end -->"

    marker = r"(<!-- ([\w/]+\.md)(?:: ([\w-]+))?(?:: ([^>\n]+?))? -->\n)"
    return re.sub(marker + r".*?<!-- end -->", block, readme, flags=re.S)


def write_fingerprints():
    """Write results/fingerprints.json from the code of the tree."""
    corpus = load_corpus("numpy")
    found = {scheme: fingerprint(scheme, corpus) for scheme in SCHEMES}
    write_json(RESULTS / "fingerprints.json", found)


def main():
    parser = command.Parser(__doc__)
    switch(parser, "--fingerprints", "write results/fingerprints.json from the code of the tree")
    args = parser.read(sys.argv[1:])
    if args.fingerprints:
        write_fingerprints()
        print("wrote results/fingerprints.json")
        return
    try:
        plots.draw_rotation(RESULTS / "rope_rotation.png")
        write_atomically(RESULTS / "summary.md", summary(RESULTS))
        readme = ROOT / "README.md"
        write_atomically(readme, fill_readme(readme.read_text("utf-8"), RESULTS))
    except (KeyError, ValueError, IndexError, FileNotFoundError) as error:
        parser.error(
            f"results/ lacks what README.md shows of it ({error!r}); the commands are in README.md"
        )
    print("wrote results/summary.md, rope_rotation.png and the tables of README.md")


if __name__ == "__main__":
    command.run(main)
