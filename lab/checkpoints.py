"""Checkpoints: one file per (scheme, seed) with its run, weights, rows and signature.

    results/checkpoints/rope-seed0.pt        a finished model and everything measured of it
    results/checkpoints/rope-seed0.resume    the state of a run in progress
    results/checkpoints/rope-seed0.failed    why a run ended without a model (JSON)

Tables are collected from all checkpoints of a folder, so that a command that trains or reads some
of them takes nothing away from the others.
"""

import contextlib
import errno
import hashlib
import json
import re
import time
from dataclasses import dataclass
from pathlib import Path

import torch

from lab.files import file_lock, folder_lock, writable_folder, write_atomically
from lab.machine import rank
from lab.provenance import same_signature, signature, signature_text
from lab.rows import merged, trained_as
from lab.runs import RECIPE, Run, differences
from schemes.scheme import SCHEMES, reason

FORMAT = 2
KIND = "checkpoint of train_compare.py"
ADVICE = "train it again, or undo what was changed"
NOT_OF_THE_NETWORK = ("seed", "sha256", "held_out", "steps", "start", "start_weights")


@dataclass
class Checkpoint:
    """A finished model: where it lies, its run, what was measured of it, and its weights."""

    path: Path
    run: Run
    rows: list  # flat, each with the fields of the run
    signature: float
    weights: dict | None

    def model(self, **changes):
        """The network, in float32 and ready to be read; `changes` as in Run.new_model."""
        model = self.run.new_model(**changes)
        model.load_state_dict(self.weights)
        return model.eval()


def checkpoint_path(folder, scheme, seed):
    """results/checkpoints/rope-base=10-seed0.pt for rope:base=10, seed 0."""
    name = re.sub(r"[^A-Za-z0-9=.,+_-]+", "-", scheme).strip("-.")
    return Path(folder) / "checkpoints" / f"{name}-seed{seed}.pt"


def save_model(path, run, model, rows, its_signature=None):
    """Put a finished model in its place; the state of its run in progress goes.

    its_signature: how the scheme behaved when the training began (default: how it does now).
    """
    weights = {name: weight.cpu() for name, weight in model.state_dict().items()}
    content = dict(format=FORMAT, run=run.as_dict(), rows=rows, model=weights)
    content["signature"] = its_signature or signature(run)
    path.parent.mkdir(parents=True, exist_ok=True)
    with folder_lock(path.parent):
        write_atomically(path, lambda file: torch.save(content, file))
    for suffix in (".resume", ".failed"):
        path.with_suffix(suffix).unlink(missing_ok=True)


def _read(path, kind, keys):
    """The content of a file of torch.save that has these keys. ValueError for any other file."""
    try:
        content = dict(torch.load(path, map_location="cpu", weights_only=True))
        version = int(content.get("format", 1 if "settings" in content else FORMAT))
    except FileNotFoundError:
        raise
    except Exception as error:  # torch.load raises a dozen types for what is cut short or foreign
        if isinstance(error, OSError) and error.errno != errno.EINVAL:  # which a cut file gives
            raise ValueError(f"{path} cannot be read ({error.strerror or error})") from None
        raise ValueError(f"{path} is not a whole {kind}") from None
    if version != FORMAT:
        when = "an earlier" if version < FORMAT else "a later"
        raise ValueError(
            f"{path} is of {when} version of this repository (format {version}, here {FORMAT})"
        )
    if not set(keys) <= set(content):
        raise ValueError(f"{path} is not a whole {kind}")
    return content


def load(path, check=True, known=None):
    """A file of save_model -> Checkpoint. ValueError names a file that is bad, old or other.

    check: compare how the scheme behaves now with how it behaved when the model was trained.
    known: signatures computed already, by Run; more are added.
    """
    content = _read(path, KIND, ("format", "run", "signature", "rows", "model"))
    try:
        run, rows = Run.from_dict(content["run"]), content["rows"]
        flat = run.flat()
        rows = [flat | row for row in rows]
    except (TypeError, KeyError, AttributeError):
        raise ValueError(f"{path} is not a whole {KIND}") from None
    found = Checkpoint(Path(path), run, rows, content["signature"], content["model"])
    if check:
        _compare(found, {} if known is None else known)
    return found


def _compare(found, known):
    """ValueError if a checkpoint's scheme is not what it was, or its weights do not fit."""
    run, path = found.run, found.path
    network = run.replace(**{name: getattr(Run, name) for name in NOT_OF_THE_NETWORK})
    try:
        if network not in known:
            known[network] = signature(run)
        found.model()
    except Exception as error:  # somebody's own class may raise anything
        why = str(error) if isinstance(error, ValueError) else reason(error)
        raise ValueError(
            f"{path} does not fit this code ({why}); was its scheme moved or changed?"
        ) from None
    if not same_signature(found.signature, known[network]):
        raise ValueError(
            f"{path}: {run.scheme} behaves otherwise than when it was trained (signature "
            f"{signature_text(found.signature)}, now {signature_text(known[network])})"
        )


def add_rows(one, rows):
    """Put rows into a Checkpoint's file, in the place of the same measurements made before.

    Nothing happens where the file was replaced by that of another model meanwhile.
    """
    with folder_lock(one.path.parent), contextlib.suppress(FileNotFoundError):
        content = _read(one.path, KIND, ("run", "rows", "model"))
        if weights_hash(content["model"]) == weights_hash(one.weights):
            content["rows"] = merged(content["rows"], rows)
            write_atomically(one.path, lambda file: torch.save(content, file))


def finished(path, run):
    """The rows of the checkpoint of an equal run -> (rows, ""), or (None, why there are none)."""
    try:
        found = load(path)
    except FileNotFoundError:
        return None, ""
    except ValueError as error:
        return None, f"{error}; it is trained again"
    if found.run != run:
        other = differences(found.run, run)
        return None, f"{path} was trained with {other}; it will be replaced"
    return found.rows, ""


def unfinished(path, run):
    """The saved state of an interrupted equal run -> (state, ""), or (None, why there is none)."""
    path = path.with_suffix(".resume")
    keys = ("run", "step", "model", "optimizers", "curve", "generators", "watched", "seconds",
            "signature")  # fmt: skip
    start = "this one starts at the beginning"
    try:
        state = _read(path, "state of an interrupted run", keys)
        old = Run.from_dict(state["run"])
    except FileNotFoundError:
        return None, ""
    except ValueError as error:
        return None, f"{error}; {start}"
    except (TypeError, KeyError, AttributeError):
        return None, f"{path} is not a whole state of an interrupted run; {start}"
    if old != run:
        other = differences(old, run)
        return None, f"{path} is of a run with {other}; {start} and replaces it"
    if not same_signature(state["signature"], signature(run)):
        return None, f"{path}: {run.scheme} behaves otherwise than when it was saved; {start}"
    return state, ""


class Saver:
    """A hook that saves the state of a run in progress every so many seconds."""

    def __init__(self, path, every, extra):
        """extra() gives what else goes into the state: signature, watched, seconds so far."""
        self.path, self.every, self.extra = path.with_suffix(".resume"), every, extra
        self.saved = time.perf_counter()

    def __call__(self, done, trained):
        due = time.perf_counter() - self.saved >= self.every
        if rank() or not done or done == trained.run.steps or not trained.recorded or not due:
            return
        state = trained.state()
        if not all(weight.isfinite().all() for weight in state["model"].values()):
            return
        state |= dict(run=trained.run.as_dict(), **self.extra())
        write_atomically(self.path, lambda file: torch.save(state, file))
        self.saved = time.perf_counter()


def save_failure(path, run, rows):
    """Keep why a run ended without a model; a model that is there stays."""
    content = dict(run=run.as_dict(), rows=rows)
    write_atomically(path.with_suffix(".failed"), json.dumps(content))


def find(folders, schemes=None, seeds=None, bad=None):
    """The checkpoints in folders/checkpoints -> [Checkpoint], in the order of SCHEMES.

    The same run in two folders is taken once. bad: a list to which the reason is added for each
    file that cannot be used; without it that is a ValueError.
    """
    found, known = [], {}
    for folder in folders:
        for path in sorted((Path(folder) / "checkpoints").glob("*-seed*.pt")):
            if not _wanted(path, schemes, seeds):
                continue
            try:
                one = load(path, known=known)
            except ValueError as error:
                if bad is None:
                    raise ValueError(f"{error}; {ADVICE}") from None
                bad.append(str(error))
                continue
            fits = schemes is None or one.run.scheme in schemes
            if fits and one.run not in [other.run for other in found]:
                found.append(one)
    place = {scheme: i for i, scheme in enumerate(schemes or SCHEMES)}

    def order(one):
        scheme = one.run.scheme
        base = place.get(scheme.partition(":")[0], len(place))
        return place.get(scheme, base), scheme, trained_as(one.run.flat()), one.run.seed

    return sorted(found, key=order)


def _wanted(path, schemes, seeds):
    """Whether a file's name is that of a wanted scheme and seed; others are not opened."""
    names = [checkpoint_path("", scheme, "").stem for scheme in schemes or ()]
    name, _, seed = path.stem.rpartition("-seed")
    return (schemes is None or f"{name}-seed" in names) and (
        seeds is None or seed in map(str, seeds)
    )


def require_alike(found, names=RECIPE):
    """ValueError if the models were not all trained alike in the fields `names` of their runs.

    Of several training lengths the largest counts. ValueError also if two models would have the
    same line in a table.
    """
    first, lines = found[0].run, {}
    choose = "choose with --schemes and --seeds, or train again"
    for one in found:
        run = one.run
        for name in names:
            mine, its = largest(getattr(run, name)), largest(getattr(first, name))
            if mine != its:
                raise ValueError(
                    f"{run.scheme} seed {run.seed} was trained with {name} {mine}, "
                    f"{first.scheme} seed {first.seed} with {its}; {choose}"
                )
        other = lines.setdefault((run.scheme, run.seed, trained_as(run.flat())), one)
        if other is not one:
            raise ValueError(
                f"{run.scheme} seed {run.seed} is there twice: {one.path} was trained with "
                f"{differences(run, other.run)}, {other.path}; {choose}"
            )


def largest(value):
    """The largest of a tuple, which training lengths are; any other value as it is."""
    return max(value) if isinstance(value, tuple) else value


def claim(out, runs):
    """Make the folder of checkpoints and lock a file in it for each run -> (paths, locks).

    locks is a context manager that lets them go. ValueError if two runs would share a file, if
    another process is at work on one, or if a file cannot be written.
    """
    paths, locks = {}, contextlib.ExitStack()
    for run in runs:
        path = checkpoint_path(out, run.scheme, run.seed)
        if path in paths:
            raise ValueError(
                f"schemes '{paths[path]}' and '{run.scheme}' would share the checkpoint {path}; "
                "rename one of their files"
            )
        for taken in (path, path.with_suffix(".resume")):
            if taken.is_dir():
                raise ValueError(f"{taken} is a folder, where a file must be written; move it away")
        paths[path] = run.scheme
    if not rank():
        writable_folder(out)
        writable_folder(Path(out) / "checkpoints")
        with contextlib.ExitStack() as held:
            for path in paths:
                held.enter_context(file_lock(path))
            locks = held.pop_all()
    return list(paths), locks


def weights_hash(weights):
    """One short hash of a state dict."""
    found = hashlib.sha256()
    for name, weight in weights.items():
        found.update(f"{name} {weight.dtype} {tuple(weight.shape)}".encode())
        found.update(weight.contiguous().view(-1).view(torch.uint8).numpy().tobytes())
    return found.hexdigest()[:16]
