"""Interrupted, misused and starved: what is lost, and what is said. Also several processes, and parts of a batch."""
import contextlib
import functools
import io
import json
import os
import pickle
import signal
import subprocess
import sys
import textwrap
import time
from pathlib import Path

import numpy as np
import pytest
import torch

import break_position
import common
import context_test
import extrapolation_test
import train_compare
from common import only_writer, writable_folder, write_file
from conftest import CPU, SETTINGS, Bar, tree
from tiny_lm import SCHEMES, load_model
from train_compare import forward_backward, train

ROOT = Path(__file__).parent.parent
TINY = "--steps 30 --batch-size 4 --train-len 16 --dim 16 --n-layer 1 --n-head 2 --device cpu --dtype fp32 --save-every 0".split()
RUN = SETTINGS | dict(steps=30, batch_size=4)
DATA = np.tile(np.arange(20, dtype=np.uint8), 100)


def same_weights(a, b):
    return all(torch.equal(x, y) for x, y in zip(a.values(), b.values(), strict=True))


def child(code, *arguments):
    """Run Python code, after which train_compare.main is called with the arguments, in a process of its own."""
    code = f"import sys\nsys.path.insert(0, {str(ROOT)!r})\n" + textwrap.dedent(code) + textwrap.dedent(f"""
        import common, train_compare
        sys.argv = ["train_compare.py"] + {[str(a) for a in arguments]!r}
        common.run(train_compare.main, many=True)
    """)
    return subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=120,
                          env=os.environ | {"OMP_NUM_THREADS": "1"})


@contextlib.contextmanager
def stopped_at(step):
    """Ctrl-C in this step of the training in here, counted from 1."""
    real, calls = torch.optim.Muon.step, []
    def stops(*arguments):
        calls.append(1)
        if len(calls) == step:
            raise KeyboardInterrupt
        return real(*arguments)
    with pytest.MonkeyPatch.context() as patch, pytest.raises(KeyboardInterrupt):
        patch.setattr(torch.optim.Muon, "step", stops)
        yield


# Exact resume

@pytest.mark.parametrize("scheme", SCHEMES)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_resumed_training_is_bit_equal(scheme, dtype):
    """From every saved step, through a file: the same weights and the same losses as without an interruption."""
    settings, files = RUN | {"scheme": scheme}, []
    def save(state):
        files.append(io.BytesIO())
        torch.save(state, files[-1])
    model, curve = train(settings, DATA, CPU, dtype, Bar(), save=save)
    assert curve["step"] == [10, 20, 30] and len(files) == 2
    for file, step in zip(files, (10, 20)):
        file.seek(0)
        saved = torch.load(file, weights_only=True)
        assert saved["step"] == step
        again, curve_again = train(settings, DATA, CPU, dtype, Bar(), saved=saved)
        assert curve_again == curve and same_weights(model.state_dict(), again.state_dict())


DROPOUT = """import torch
from torch import nn
from tiny_lm import PlainAttention
class Drop(PlainAttention):
    def forward(self, x, positions=None):
        return nn.functional.dropout(super().forward(x), 0.2, self.training)
class Odd(PlainAttention):
    def forward(self, x, positions=None):
        if x.shape[1] == 9:
            raise RuntimeError("nine")
        return super().forward(x)
"""


def whole_and_stopped(cli, folder, results, *arguments):
    """The curves of one command, run through and stopped in step 26: (whole, stopped)."""
    assert cli(train_compare, *arguments, "--out", folder / "whole")[0] == 0
    with stopped_at(26):
        cli(train_compare, *arguments, "--out", folder / "stopped")
    code, stdout, _ = cli(train_compare, *arguments, "--out", folder / "stopped")
    assert code == 0 and "goes on from step 20" in stdout
    return [json.loads((folder / name / results).read_text())["rows"][0]["curve"] for name in ("whole", "stopped")]


def test_an_attention_with_dropout_resumes_and_is_causal(cli, text, tmp_path):
    (tmp_path / "own.py").write_text(DROPOUT)
    whole, stopped = whole_and_stopped(cli, tmp_path, "train_compare.json", *TINY, "--data", text, "--schemes", f"{tmp_path / 'own.py'}:Drop")
    assert whole == stopped and whole["step"] == [10, 20, 30]


def test_an_own_scheme_is_tried_at_every_training_length(cli, text, tmp_path):
    (tmp_path / "own.py").write_text(DROPOUT)
    code, _, stderr = cli(train_compare, *TINY, "--train-len", 16, 9, "--data", text, "--schemes", f"{tmp_path / 'own.py'}:Odd", "--out", tmp_path / "out")
    assert code == 2 and "does not work in this network (float32): RuntimeError: nine" in stderr and not (tmp_path / "out").exists()


def test_what_draws_in_training_resumes_too(tmp_path):
    """An own encoding that draws: torch's generator is part of the state."""
    (tmp_path / "own.py").write_text("import torch\nfrom torch import nn\nclass Drop(nn.Module):\n    def __init__(self, dim):\n        super().__init__()\n"
                                     "        self.dim = dim\n    def forward(self, positions):\n        return torch.rand(len(positions), self.dim)\n")
    settings, states = RUN | {"scheme": f"{tmp_path / 'own.py'}:Drop"}, []
    def save(state):
        file = io.BytesIO()
        torch.save(state, file)
        states.append(torch.load(io.BytesIO(file.getvalue()), weights_only=True))
    model, curve = train(settings, DATA, CPU, torch.float32, Bar(), save=save)
    torch.manual_seed(99)
    again, curve_again = train(settings, DATA, CPU, torch.float32, Bar(), saved=states[0])
    assert curve_again == curve and same_weights(model.state_dict(), again.state_dict())


KILL = """
    import os, signal
    from pathlib import Path
    count = 0
    def at(number, call, before=lambda *arguments: None):
        def counted(*arguments):
            global count
            count += 1
            if count == number:
                before(*arguments)
                os.kill(os.getpid(), signal.SIGKILL)
            return call(*arguments)
        return counted
"""


@pytest.mark.parametrize("where, step", [
    ("torch.optim.Muon.step = at(8, torch.optim.Muon.step)", 0),  # before anything was saved
    ("torch.optim.Muon.step = at(26, torch.optim.Muon.step)", 20),
    ("os.fsync = at(1, os.fsync, lambda file: os.ftruncate(file, 999))", 0),  # the first save is half written
    ("os.fsync = at(2, os.fsync)", 10),  # the second is whole, and not yet in its place
    ("os.fsync = at(3, os.fsync, lambda file: os.ftruncate(file, 999))", 20),  # the model itself
    ("os.fsync = at(4, os.fsync)", 30),  # train_compare.json
])
def test_a_killed_run_goes_on_to_the_same_numbers(cli, text, tmp_path, where, step):
    arguments = (*TINY, "--data", text, "--schemes", "rope")
    assert cli(train_compare, *arguments, "--out", tmp_path / "whole")[0] == 0
    out = tmp_path / "out"
    killed = child(f"{KILL}    import torch, train_compare\n    torch.set_num_threads({torch.get_num_threads()})\n    {where}\n", *arguments, "--out", out)
    assert killed.returncode == -signal.SIGKILL, killed.stderr
    for path in out.rglob("*.json"):
        json.loads(path.read_text())
    code, stdout, stderr = cli(train_compare, *arguments, "--out", out)
    assert code == 0
    assert (f"goes on from step {step}" in stdout and f"| {step}/30" in stderr) == (step in (10, 20))  # and so does the bar
    assert ("already trained" in stdout) == (step == 30)
    (a, first), (b, second) = (load_model(folder / "checkpoints" / "rope-seed0.pt") for folder in (tmp_path / "whole", out))
    assert same_weights(a.state_dict(), b.state_dict()) and first["row"]["curve"] == second["row"]["curve"]
    assert first["row"]["val_ppl"] == second["row"]["val_ppl"]
    for partial in out.rglob("*.part"):  # what the kill left is cleared away, once it is old enough to be nobody's
        os.utime(partial, (0, 0))
    assert cli(train_compare, *arguments, "--out", out)[0] == 0
    assert tree(out) == tree(tmp_path / "whole") == ["checkpoints/rope-seed0.pt"] + [f"train_compare{kind}" for kind in (".csv", ".json", ".md", ".png", "_curves.csv")]


def test_finetuning_resumes_with_what_was_watched(cli, text, tmp_path):
    assert cli(train_compare, *TINY, "--data", text, "--schemes", "rope", "--out", tmp_path / "out")[0] == 0
    whole, stopped = whole_and_stopped(cli, tmp_path, "finetune.json", "--finetune-from", "rope", "--from", tmp_path / "out", "--train-len", 64,
                                       "--steps", 30, "--save-every", 0, "--device", "cpu", "--dtype", "fp32")
    assert whole == stopped and whole["watched"]["step"] == [0, 5, 10, 20, 30]


@pytest.fixture
def interrupted(cli, text, tmp_path):
    """--out of a run that was stopped after step 20 of 30."""
    with stopped_at(26):
        cli(train_compare, *TINY, "--data", text, "--schemes", "rope", "--out", tmp_path / "out")
    assert tree(tmp_path / "out") == ["checkpoints/rope-seed0.resume"]
    return tmp_path / "out"


def test_a_state_of_another_run_is_told_of_and_not_used(cli, text, interrupted):
    code, stdout, _ = cli(train_compare, *TINY, "--data", text, "--schemes", "rope", "--out", interrupted, "--lr", "0.01")
    assert code == 0 and "is of a run with lr 0.02, not 0.01; this one starts at the beginning" in stdout and "goes on" not in stdout
    code, stdout, _ = cli(train_compare, *TINY, "--data", text, "--schemes", "rope", "--out", interrupted, "--steps", "20")
    assert code == 0 and "rope-seed0.pt was trained with steps 30, not 20, lr 0.01, not 0.02; it will be replaced" in stdout


class Evil:
    def __init__(self, path): self.path = path
    def __reduce__(self): return os.mkdir, (str(self.path),)


@pytest.mark.parametrize("kind", ["empty", "cut short", "no checkpoint", "other keys", "code"])
def test_foreign_files_in_the_place_of_a_state_or_a_model(cli, text, interrupted, tmp_path, kind):
    state = interrupted / "checkpoints" / "rope-seed0.resume"
    whole, foreign = state.read_bytes(), io.BytesIO()
    if kind == "other keys":
        torch.save({"model": {}, "settings": []}, foreign)
    bad = {"empty": b"", "cut short": whole[:-500], "no checkpoint": b"PK\3\4 or not", "other keys": foreign.getvalue(),
           "code": pickle.dumps(Evil(tmp_path / "owned"))}[kind]
    state.write_bytes(bad)
    state.with_suffix(".pt").write_bytes(bad)
    code, stdout, stderr = cli(train_compare, *TINY, "--data", text, "--schemes", "rope", "--out", interrupted)
    assert code == 0 and f"{state} is not the whole state of an interrupted run; this one starts at the beginning" in stdout
    assert "rope-seed0.pt is not a whole checkpoint of train_compare.py" in stdout and not (tmp_path / "owned").exists()
    assert load_model(state.with_suffix(".pt"))[1]["row"]["steps"] == 30 and not state.exists()


def test_a_diverged_run_keeps_its_last_good_state(cli, text, tmp_path, monkeypatch):
    real, calls = train_compare.F.cross_entropy, []
    def poisoned(*args, **options):
        calls.append(1)
        return real(*args, **options) * (float("inf") if len(calls) == 27 else 1)
    monkeypatch.setattr(train_compare.F, "cross_entropy", poisoned)
    out = tmp_path / "out"
    code, _, stderr = cli(train_compare, *TINY, "--data", text, "--out", out, "--schemes", "rope", "none")
    # 1 − 0.95·(26/30 − 0.4)/0.6 = 0.261 of the peaks 0.02 and 0.015
    assert code == 0 and f"rope, seed 0: loss inf at step 27 of 30 (rates 0.00522 and 0.00392); try a lower --lr and --adam-lr; {out / 'checkpoints' / 'rope-seed0.resume'} keeps the last good state" in stderr
    assert tree(out / "checkpoints") == ["none-seed0.pt", "rope-seed0.resume"]
    assert torch.load(out / "checkpoints" / "rope-seed0.resume", weights_only=True)["step"] == 20
    assert [row["val_ppl"] is None for row in json.loads((out / "train_compare.json").read_text())["rows"]] == [True, False]


def breaks_weights(monkeypatch, step):
    """The update of this step, counted from 1, leaves weights that are infinite."""
    real, calls = torch.optim.Muon.step, []
    def broken(self, *rest):
        calls.append(1)
        real(self, *rest)
        if len(calls) == step:
            with torch.no_grad():
                self.param_groups[0]["params"][0].fill_(float("inf"))
    monkeypatch.setattr(torch.optim.Muon, "step", broken)


def test_a_run_that_breaks_in_its_last_step_is_no_model(cli, text, tmp_path, monkeypatch):
    """Every loss was finite, the weights after the last update are not; an earlier model in its place stays."""
    out = tmp_path / "out"
    assert cli(train_compare, *TINY, "--data", text, "--out", out, "--schemes", "rope")[0] == 0
    before = (out / "checkpoints" / "rope-seed0.pt").read_bytes()
    breaks_weights(monkeypatch, 25)
    code, stdout, stderr = cli(train_compare, *TINY, "--data", text, "--out", out, "--schemes", "rope", "--steps", 25)
    assert code == 0 and "loss nan nats on the held-out text after the last step; try a lower --lr and --adam-lr" in stderr
    assert (out / "checkpoints" / "rope-seed0.pt").read_bytes() == before and "| rope | 1 | – | – |" in stdout
    assert torch.load(out / "checkpoints" / "rope-seed0.resume", weights_only=True)["step"] == 20


def test_weights_that_are_not_finite_are_not_saved(cli, text, tmp_path, monkeypatch):
    breaks_weights(monkeypatch, 20)  # its loss was still finite
    code, _, stderr = cli(train_compare, *TINY, "--data", text, "--out", tmp_path, "--schemes", "rope")
    assert code == 0 and "loss nan at step 21 of 30" in stderr
    assert torch.load(tmp_path / "checkpoints" / "rope-seed0.resume", weights_only=True)["step"] == 10


def test_too_little_memory_in_training_is_a_row_and_the_others_go_on(cli, text, tmp_path, monkeypatch):
    real = train_compare.train
    def starved(settings, *rest):
        if settings["scheme"] == "rope":
            raise np._core._exceptions._ArrayMemoryError((2**50,), np.dtype(float))
        if settings["scheme"] == "sin":
            raise torch.OutOfMemoryError("CUDA out of memory")
        return real(settings, *rest)
    monkeypatch.setattr(train_compare, "train", starved)
    code, stdout, stderr = cli(train_compare, *TINY, "--data", text, "--out", tmp_path / "out", "--schemes", "rope", "sin", "none")
    assert code == 0 and stderr.count("out of memory; try a larger --grad-accum, or a smaller --batch-size") == 2
    assert stdout.count("out of memory") == 2 and tree(tmp_path / "out" / "checkpoints") == ["none-seed0.pt"]


def test_ctrl_c_under_force_names_the_command_that_goes_on(cli, text, tmp_path, capsys):
    with stopped_at(36):
        cli(train_compare, *TINY, "--data", text, "--schemes", "rope", "none", "--out", tmp_path / "out", "--force")
    assert ("1 of 2 runs are finished and kept, the same command without --force goes on with the next from its start, since it was not saved yet"
            in capsys.readouterr().err)
    with stopped_at(26):
        cli(train_compare, *TINY, "--data", text, "--schemes", "sin", "--out", tmp_path / "out")
    assert "0 of 1 runs are finished and kept, the same command goes on with the next where it was last saved\n" in capsys.readouterr().err
    code, stdout, _ = cli(train_compare, *TINY, "--data", text, "--schemes", "rope", "none", "--out", tmp_path / "out")
    assert code == 0 and "rope, seed 0: already trained" in stdout and "none, seed 0: goes on from step" not in stdout  # it was in its first ten


def test_an_error_of_two_lines_is_told_in_one(capsys):
    with pytest.raises(SystemExit):
        common.Parser("what").error("first\r\nsecond")
    assert capsys.readouterr().err.endswith(": first second\n")


def test_a_checkpoint_without_permission(tmp_path, monkeypatch):
    def refuses(*rest, **more):
        raise PermissionError(13, "Permission denied")
    monkeypatch.setattr(torch, "load", refuses)
    with pytest.raises(ValueError, match=r"rope-seed0.pt cannot be read \(Permission denied\)"):
        load_model(tmp_path / "rope-seed0.pt")


def test_an_attention_that_peeks_is_trained_when_told_to(cli, text, tmp_path):
    (tmp_path / "own.py").write_text("from tiny_lm import PlainAttention\nclass Peeks(PlainAttention):\n    def forward(self, x, positions=None):\n"
                                     "        return self.out(self.qkv(x)[..., :x.shape[-1]].mean(1, keepdim=True).expand(x.shape))\n")
    arguments = (*TINY, "--data", text, "--schemes", f"{tmp_path / 'own.py'}:Peeks", "--out", tmp_path / "out")
    code, _, stderr = cli(train_compare, *arguments)
    assert code == 2 and "its attention must be causal (or say --allow-future)" in stderr
    assert cli(train_compare, *arguments, "--allow-future")[0] == 0


# Files

@pytest.mark.parametrize("name", ["rope-seed0.pt", "rope-seed0.resume"])
def test_a_folder_in_the_place_of_a_file_is_told_before_training(cli, text, tmp_path, name):
    (tmp_path / "checkpoints" / name).mkdir(parents=True)
    code, _, stderr = cli(train_compare, *TINY, "--data", text, "--schemes", "rope", "--out", tmp_path)
    assert code == 2 and f"{name} is a folder, where a file must be written" in stderr


def test_every_driver_has_its_folder_to_itself(cli, text, tmp_path):
    out = tmp_path / "out"
    assert cli(train_compare, *TINY, "--train-len", 64, "--data", text, "--out", out, "--schemes", "rope")[0] == 0
    drivers = ((extrapolation_test, "--lengths", 64), (context_test, "--what", "attention", "--windows", 2), (break_position, "order"))
    with only_writer(out):
        for driver, *arguments in drivers:
            code, _, stderr = cli(driver, "--out", out, "--device", "cpu", *arguments)
            assert code == 2 and f"another process is writing to {out}; wait" in stderr
        assert cli(train_compare, *TINY, "--train-len", 64, "--data", text, "--out", out, "--schemes", "rope")[0] == 0  # it writes elsewhere
    assert tree(out) == ["checkpoints/rope-seed0.pt"] + [f"train_compare{kind}" for kind in (".csv", ".json", ".md", ".png", "_curves.csv")]


def test_the_second_writer_is_told_so(cli, text, tmp_path):
    writable_folder(tmp_path / "out")
    with only_writer(writable_folder(tmp_path / "out" / "checkpoints")):
        code, _, stderr = cli(train_compare, *TINY, "--data", text, "--out", tmp_path / "out", "--schemes", "rope")
        assert code == 2 and stderr == f"train_compare.py: another process is writing to {tmp_path / 'out' / 'checkpoints'}; wait until it is done, or use another --out\n"
        assert cli(train_compare, *TINY, "--data", text, "--out", tmp_path / "other", "--schemes", "rope")[0] == 0
    assert cli(train_compare, *TINY, "--data", text, "--out", tmp_path / "out", "--schemes", "rope")[0] == 0


@pytest.mark.parametrize("limit", [2_000, 40_000, 110_000])
def test_a_full_disk_is_one_line_and_earlier_results_stay(cli, text, tmp_path, limit):
    """A limit on the size of files stands in for it: the state (80 kB) does not fit, or the model, or the picture."""
    out = tmp_path / "out"
    assert cli(train_compare, *TINY, "--data", text, "--out", out, "--schemes", "none")[0] == 0
    before = {path: (out / path).read_bytes() for path in tree(out)}
    full = child(f"import resource\nresource.setrlimit(resource.RLIMIT_FSIZE, ({limit}, {limit}))", *TINY, "--data", text, "--out", out,
                 "--schemes", "none", "rope")
    line = full.stderr.strip().splitlines()[-1]
    assert (full.returncode == 1 and "File too large" in line and line.startswith("train_compare.py: ")) or limit == 110_000, full.stderr
    assert "Traceback" not in full.stderr and not list(out.rglob("*.part"))
    assert (out / "checkpoints" / "none-seed0.pt").read_bytes() == before["checkpoints/none-seed0.pt"]
    for path in before:
        assert (out / path).stat().st_size > 0
    json.loads((out / "train_compare.json").read_text())


def test_old_part_files_are_cleared_and_young_ones_not(tmp_path):
    for name in (".a.json.1.part", ".b.json.2.part", "c.part"):
        (tmp_path / name).touch()
    os.utime(tmp_path / ".a.json.1.part", (time.time() - 700,) * 2)
    os.utime(tmp_path / ".b.json.2.part", (time.time() - 300,) * 2)
    os.utime(tmp_path / "c.part", (0, 0))
    writable_folder(tmp_path)
    assert tree(tmp_path) == [".b.json.2.part", "c.part"]


def test_a_write_that_fails_half_way_leaves_the_earlier_file(tmp_path):
    write_file(tmp_path / "state", b"earlier")
    def half(file):
        file.write(b"lat")
        raise OSError(28, "No space left on device")
    with pytest.raises(OSError):
        write_file(tmp_path / "state", half)
    assert (tmp_path / "state").read_bytes() == b"earlier" and tree(tmp_path) == ["state"]


# Parts of a batch, several processes, compiled

def test_parts_of_a_batch_have_its_gradient():
    data = np.random.default_rng(0).integers(0, 256, 5000).astype(np.uint8)
    x, y = train_compare.batch(data, 0, 0, 7, 16)
    found = []
    for parts in (1, 2, 3, 7):
        torch.manual_seed(0)
        model = train_compare.TinyLM("rope", 16, 2, 2).double()
        for weight in model.parameters():
            torch.nn.init.normal_(weight, 0, 0.2)
        loss = forward_backward(model, x, y, None, CPU, parts)
        found.append((loss.item(), torch.cat([weight.grad.flatten() for weight in model.parameters()])))
    expected = torch.nn.functional.cross_entropy(model(x).flatten(0, 1), y.long().flatten())
    for loss, gradient in found:
        assert loss == pytest.approx(expected.item(), rel=1e-6) and torch.allclose(gradient, found[0][1], atol=1e-7)


GRADIENTS = """
    import os, sys
    sys.path.insert(0, {root!r})
    import numpy as np, torch
    from common import join_ranks, rank, ranks
    from tiny_lm import TinyLM
    from train_compare import batch, forward_backward
    torch.set_num_threads(1)
    cpu = torch.device("cpu")
    join_ranks(cpu)
    data = np.random.default_rng(0).integers(0, 256, 5000).astype(np.uint8)
    torch.manual_seed(rank())  # rank 0's start is everybody's
    model = TinyLM({scheme!r}, 16, 2, 2)
    for weight in model.parameters():
        torch.nn.init.normal_(weight, 0, 0.2)
    worker = torch.nn.parallel.DistributedDataParallel(model) if ranks() > 1 else model
    optimizer, gradients, losses = torch.optim.SGD(model.parameters(), 0.1), [], []
    for step in range(20):
        losses.append(forward_backward(worker, *batch(data, 0, step, 9, 16), None, cpu, 1 + step % 2).item())
        gradients.append(torch.cat([weight.grad.flatten() for weight in model.parameters()]))
        optimizer.step()
        optimizer.zero_grad()
    if rank() == 0:
        torch.save((torch.stack(gradients), losses), sys.argv[1])
    if ranks() > 1:  # a process that ends with its connections open may abort
        torch.distributed.destroy_process_group()
"""


def torchrun(processes, *command):
    return subprocess.run([sys.executable, "-m", "torch.distributed.run", "--standalone", f"--nproc_per_node={processes}", *map(str, command)],
                          capture_output=True, text=True, timeout=100, env=os.environ | {"OMP_NUM_THREADS": "1"})


def test_gradients_of_1_2_and_4_processes_are_equal(tmp_path):
    """20 steps in float32 of the same batches: the gradients agree within 1e-5."""
    found = []
    (tmp_path / "gradients.py").write_text(textwrap.dedent(GRADIENTS.format(root=str(ROOT), scheme="learned")))
    for processes in (1, 2, 4):
        done = (torchrun(processes, tmp_path / "gradients.py", tmp_path / f"{processes}.pt") if processes > 1 else
                subprocess.run([sys.executable, tmp_path / "gradients.py", tmp_path / "1.pt"], capture_output=True, text=True, timeout=120))
        assert done.returncode == 0, done.stderr
        found.append(torch.load(tmp_path / f"{processes}.pt"))
    for gradients, losses in found[1:]:
        assert gradients.shape[0] == 20 and (gradients - found[0][0]).abs().max() < 1e-5
        assert losses == pytest.approx(found[0][1], abs=1e-5)


@pytest.mark.parametrize("first, then", [(1, 2), (3, 1)])
def test_a_run_goes_on_with_another_number_of_processes(text, tmp_path, first, then):
    """Stopped after step 20 with so many, finished with so many others: the losses of one process without a stop, nearly."""
    arguments = (*TINY, "--data", text, "--schemes", "sin", "alibi")
    (tmp_path / "stops.py").write_text(textwrap.dedent(f"""
        import sys
        sys.path.insert(0, {str(ROOT)!r})
        import common, train_compare
        import torch
        real, calls = torch.optim.Muon.step, []
        def stops(*arguments):
            calls.append(1)
            if len(calls) == 26:
                sys.exit(7)
            return real(*arguments)
        torch.optim.Muon.step = stops
        common.run(train_compare.main, many=True)
    """))
    stopped = torchrun(first, tmp_path / "stops.py", *arguments, "--out", tmp_path / "out")
    assert stopped.returncode != 0 and tree(tmp_path / "out") == ["checkpoints/sin-seed0.resume"]
    done = torchrun(then, ROOT / "train_compare.py", *arguments, "--out", tmp_path / "out")
    assert done.returncode == 0 and "sin, seed 0: goes on from step 20" in done.stdout, done.stderr
    assert done.stdout.count("bytes to train on") == 1 and done.stdout.count("| alibi | 1 |") == 1  # rank 0 alone speaks
    assert done.stderr.count("alibi, seed 0:   0%|") == 1
    assert torchrun(1, ROOT / "train_compare.py", *arguments, "--out", tmp_path / "one").returncode == 0
    rows, alone = (json.loads((tmp_path / name / "train_compare.json").read_text()) for name in ("out", "one"))
    for row, other in zip(rows["rows"], alone["rows"]):
        assert row["curve"]["loss"] == pytest.approx(other["curve"]["loss"], abs=0.02) and row["val_ppl"] == pytest.approx(other["val_ppl"], rel=0.05)
    assert rows["command"].startswith(f"torchrun --nproc_per_node={then} " if then > 1 else "python ")


def test_a_rank_that_dies_ends_all(text, tmp_path):
    (tmp_path / "dies.py").write_text(textwrap.dedent(f"""
        import os, signal, sys
        sys.path.insert(0, {str(ROOT)!r})
        import common, train_compare
        import torch
        real, calls = torch.optim.Muon.step, []
        def dies(*arguments):
            calls.append(1)
            if len(calls) == 13 and common.rank() == 1:
                os.kill(os.getpid(), signal.SIGKILL)
            return real(*arguments)
        torch.optim.Muon.step = dies
        common.run(train_compare.main, many=True)
    """))
    done = torchrun(2, tmp_path / "dies.py", *TINY, "--data", text, "--schemes", "rope", "--out", tmp_path / "out")
    assert done.returncode != 0
    assert "rank 0 of 2: RuntimeError" in done.stderr and "the same command goes on where it was last saved" in done.stderr or "Signal 9" in done.stderr
    assert tree(tmp_path / "out") == ["checkpoints/rope-seed0.resume"]


def test_ranks_are_those_of_torchrun_only(monkeypatch):
    monkeypatch.setenv("RANK", "1")  # some job schedulers leave them
    monkeypatch.setenv("WORLD_SIZE", "2")
    assert (common.rank(), common.ranks()) == (0, 1)
    monkeypatch.setenv("TORCHELASTIC_RUN_ID", "none")
    assert (common.rank(), common.ranks()) == (1, 2)
    monkeypatch.setenv("LOCAL_RANK", "1")
    monkeypatch.setenv("LOCAL_WORLD_SIZE", "2")
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 1)
    with pytest.raises(ValueError, match="2 processes and 1 CUDA devices here; use at most as many processes"):
        common.pick_device("cuda")
    with pytest.raises(ValueError, match="--device mps: under torchrun use auto, cpu or cuda"):
        common.pick_device("mps")


def test_what_torchrun_cannot_do_is_told(text, tmp_path):
    done = torchrun(3, ROOT / "train_compare.py", *TINY, "--batch-size", 2, "--data", text, "--out", tmp_path / "out")
    assert done.returncode != 0 and done.stderr.count("train_compare.py: --batch-size 2 cannot be split in 3 parts (3 processes × --grad-accum 1)") == 1
    assert not (tmp_path / "out").exists()
    done = torchrun(2, ROOT / "extrapolation_test.py", "--out", tmp_path / "out")
    assert done.returncode != 0 and done.stderr.count("only train_compare.py runs under torchrun") == 1


def test_compiled_and_plain_runs_go_on_from_each_other(cli, text, tmp_path, monkeypatch):
    """Their files are the same: of the network, whatever computed it."""
    monkeypatch.setattr(torch, "compile", functools.partial(torch.compile, backend="eager"))
    for first, then in (((), ("--compile",)), (("--compile",), ())):
        out = tmp_path / f"out{len(first)}"
        with stopped_at(16):
            cli(train_compare, *TINY, "--data", text, "--schemes", "alibi", "--out", out, *first)
        code, stdout, _ = cli(train_compare, *TINY, "--data", text, "--schemes", "alibi", "--out", out, *then)
        assert code == 0 and "goes on from step 10" in stdout
    assert cli(train_compare, *TINY, "--data", text, "--schemes", "alibi", "--out", tmp_path / "plain")[0] == 0
    (a, first), (b, second), (c, plain) = (load_model(tmp_path / name / "checkpoints" / "alibi-seed0.pt") for name in ("out0", "out1", "plain"))
    assert list(a.state_dict()) == list(b.state_dict()) == list(c.state_dict())
    for found in (first, second):
        assert found["row"]["curve"]["loss"] == pytest.approx(plain["row"]["curve"]["loss"], abs=1e-3)


def test_a_compiler_that_is_not_there(cli, text, tmp_path, monkeypatch):
    def fails(model):
        raise RuntimeError("Failed to find C compiler.\nPlease specify one")
    monkeypatch.setattr(torch, "compile", fails)
    code, _, _ = cli(train_compare, *TINY, "--data", text, "--schemes", "none", "--out", tmp_path, "--compile")
    assert code == "train_compare.py: --compile does not work here: RuntimeError: Failed to find C compiler.; leave it out"


@pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device here")
def test_a_run_on_cuda_goes_on_on_the_cpu_and_back(cli, text, tmp_path):
    base = [*TINY, "--data", text, "--schemes", "rope"]
    for first, then in (("cuda", "cpu"), ("cpu", "cuda")):
        with stopped_at(16):
            cli(train_compare, *base, "--device", first, "--out", tmp_path / first)
        code, stdout, _ = cli(train_compare, *base, "--device", then, "--out", tmp_path / first)
        assert code == 0 and "goes on from step 10" in stdout
