"""The layout: imports go downwards only, and nothing grows too long.

    commands -> experiments -> lab -> tiny_lm -> schemes -> attend, pos_*, data

Everything here is read from the syntax trees of the files; none of them is run for it.
"""

import ast
import functools
import graphlib
import sys
from pathlib import Path

import pytest

from helpers import ROOT
from lab.provenance import git

FOUNDATION = ("attend", "data", "pos_alibi", "pos_learned", "pos_rope", "pos_sin")
FOLDERS = ("bench", "data", "experiments", "lab", "schemes")
PACKAGES = {"torch", "numpy", "matplotlib", "tqdm"}
# Where lab/ may look at how the program was called: to begin an error's line with its name.
READS_ARGV = {("lab/command.py", "run"), ("lab/command.py", "explain_stop")}
LONGEST = {"pos_rope.py": 140}


def python_files():
    """Every Python file of the repository, as a path relative to it.

    Files that git does not know are not of the repository: a user's own schemes, say.
    """
    paths = [Path(name) for name in git("ls-files", "--", "*.py").splitlines()]
    paths = [path for path in paths if (ROOT / path).exists()]
    paths = paths or [path.relative_to(ROOT) for path in ROOT.rglob("*.py")]  # without git
    return sorted(path for path in paths if not is_elsewhere(path.parts[0]))


def is_elsewhere(name):
    """Whether this is the folder of a tool or of a virtual environment."""
    return name.startswith(".") or (ROOT / name / "pyvenv.cfg").exists()


FILES = python_files()
COMMANDS = [path.stem for path in FILES if len(path.parts) == 1]
COMMANDS = [name for name in COMMANDS if name not in (*FOUNDATION, "tiny_lm")]
CODE = [path for path in FILES if path.parts[0] != "tests"]
LEVELS = (FOUNDATION, ("schemes",), ("tiny_lm",), ("lab",), ("experiments",), (*COMMANDS, "bench"))


def level(name):
    """How high a file or folder of the repository stands; the foundation is 0."""
    return next(number for number, names in enumerate(LEVELS) if name in names)


@functools.cache
def tree(path):
    return ast.parse((ROOT / path).read_text("utf-8"))


def lines_of(path):
    return (ROOT / path).read_text("utf-8").splitlines()


def top(path):
    """attend for attend.py, lab for lab/train.py."""
    return path.parts[0].removesuffix(".py")


def imports(path):
    """The modules that a file imports, wherever in it, as (line, dotted name)."""
    found = []
    for node in ast.walk(tree(path)):
        if isinstance(node, ast.Import):
            found += [(node.lineno, name.name) for name in node.names]
        elif isinstance(node, ast.ImportFrom):
            module = "." * node.level + (node.module or "")
            parts = [f"{module}.{name.name}" for name in node.names]
            files = [part for part in parts if is_file(part)]
            found += [(node.lineno, name) for name in (files or [module])]
    return found


def is_file(module):
    return (ROOT / f"{module.replace('.', '/')}.py").is_file()


def is_ours(name):
    return name.partition(".")[0] in {*FOLDERS, *FOUNDATION, "tiny_lm", *COMMANDS}


# Imports


def test_imports_go_downwards_only():
    wrong = []
    for path in CODE:
        for line, name in imports(path):
            other = name.partition(".")[0]
            if is_ours(name) and other != top(path) and level(other) >= level(top(path)):
                wrong.append(f"{path}:{line} imports {name}")
    assert wrong == []


def test_no_command_is_imported():
    wrong = []
    for path in CODE:
        for line, name in imports(path):
            if name in COMMANDS and top(path) != "tests":
                wrong.append(f"{path}:{line} imports {name}")
    assert wrong == [] and "train_compare" in COMMANDS


def test_no_import_goes_in_a_circle():
    names = {".".join(path.with_suffix("").parts): path for path in CODE}
    graph = {name: {other for _, other in imports(path)} for name, path in names.items()}
    graphlib.TopologicalSorter(graph).prepare()  # CycleError names the circle


def test_no_import_is_relative():
    assert [str(path) for path in FILES for _, name in imports(path) if name[0] == "."] == []


def test_only_plots_imports_matplotlib():
    drawing = {str(path) for path in CODE for _, name in imports(path) if "matplotlib" in name}
    assert drawing - {"lab/rotation.py"} == {"lab/plots.py"}


@pytest.mark.parametrize("path", [path for path in CODE if top(path) != "bench"], ids=str)
def test_a_file_needs_only_the_packages_of_requirements(path):
    known = PACKAGES | set(sys.stdlib_module_names)
    found = {name.partition(".")[0] for _, name in imports(path) if not is_ours(name)}
    assert found <= known


@pytest.mark.parametrize("name", [name for name in FOUNDATION if name != "data"])
def test_a_file_that_is_copied_alone_needs_torch_alone(name):
    found = {module.partition(".")[0] for _, module in imports(Path(f"{name}.py"))}
    assert found - set(sys.stdlib_module_names) == {"torch"}


# Only a command reads its arguments and prints


def functions(path):
    """Every function of a file, methods and nested ones as well."""
    kinds = ast.FunctionDef | ast.AsyncFunctionDef
    return [node for node in ast.walk(tree(path)) if isinstance(node, kinds)]


def uses(node, text):
    """The lines below a node where an expression such as sys.argv stands."""
    found = [part for part in ast.walk(node) if isinstance(part, ast.Attribute)]
    return {part.lineno for part in found if ast.unparse(part) == text}


def test_only_commands_read_their_arguments():
    wrong = []
    for path in CODE:
        if top(path) in (*COMMANDS, "bench"):
            continue
        lines = uses(tree(path), "sys.argv")
        for function in functions(path):
            if (path.as_posix(), function.name) in READS_ARGV:
                lines -= uses(function, "sys.argv")
        wrong += [f"{path}:{line}" for line in lines]
    assert wrong == []


def test_lab_prints_only_what_commands_share():
    wrong = []
    for path in CODE:
        if top(path) in ("attend", "data", "experiments", "lab", "schemes", "tiny_lm"):
            calls = [node for node in ast.walk(tree(path)) if isinstance(node, ast.Call)]
            printed = [call.lineno for call in calls if ast.unparse(call.func) == "print"]
            wrong += [f"{path}:{line}" for line in printed if path.name != "command.py"]
    assert wrong == []


# Sizes


def test_no_line_is_longer_than_100_columns():
    long = []
    for path in FILES:
        for number, line in enumerate(lines_of(path), 1):
            if len(line) > 100:
                long.append(f"{path}:{number} has {len(line)} columns")
    assert long == []


def test_no_function_is_longer_than_45_lines():
    long = []
    for path in FILES:
        for function in functions(path):
            length = function.end_lineno - function.lineno + 1
            if length > 45:
                long.append(f"{path}:{function.lineno} {function.name} has {length} lines")
    assert long == []


def test_no_file_is_too_long():
    """At most 320 lines, commands 200, and pos_rope.py, which readers copy, 140."""
    long = []
    for path in FILES:
        most = LONGEST.get(str(path), 200 if top(path) in COMMANDS else 320)
        length = len(lines_of(path))
        if length > most:
            long.append(f"{path} has {length} lines of at most {most}")
    assert long == []


# Lambdas


def test_no_lambda_has_a_name():
    named = []
    for path in FILES:
        for node in ast.walk(tree(path)):
            kinds = ast.Assign | ast.AnnAssign | ast.NamedExpr
            if isinstance(node, kinds) and isinstance(node.value, ast.Lambda):
                named.append(f"{path}:{node.lineno}")
    assert named == []


def test_no_lambda_makes_a_lambda():
    nested = []
    for path in FILES:
        for node in ast.walk(tree(path)):
            if isinstance(node, ast.Lambda):
                inner = [part for part in ast.walk(node.body) if isinstance(part, ast.Lambda)]
                nested += [f"{path}:{part.lineno}" for part in inner]
    assert nested == []
