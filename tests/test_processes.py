"""Parts of a batch, several processes under torchrun, and torch.compile."""

import functools
import textwrap

import numpy as np
import pytest
import torch

import train_compare
from data.batches import windows
from helpers import CPU, ROOT, TINY, rows_of, stopped_at, torchrun, tree, without_pictures
from lab.checkpoints import load
from lab.rows import select, values
from lab.train import forward_backward
from tiny_lm import TinyLM

THIRTY = [*TINY, "--steps", "30", "--batch-size", "4", "--save-every", "0"]


@pytest.fixture(autouse=True)
def no_pictures(monkeypatch):
    without_pictures(monkeypatch)


def losses(one):
    return values(one.rows, metric="loss")


# Parts of a batch


def test_parts_of_a_batch_have_its_gradient():
    data = np.random.default_rng(0).integers(0, 256, 5000).astype(np.uint8)
    x, y = windows(data, 0, 0, 7, 16)
    found = []
    for parts in (1, 2, 3, 7):
        torch.manual_seed(0)
        model = TinyLM("rope", 16, 2, 2).double()
        for weight in model.parameters():
            torch.nn.init.normal_(weight, 0, 0.2)
        loss = forward_backward(model, x, y, None, CPU, parts).item()
        found.append((loss, torch.cat([w.grad.flatten() for w in model.parameters()])))
    logits = model(x).flatten(0, 1)
    expected = torch.nn.functional.cross_entropy(logits, y.long().flatten()).item()
    for loss, gradient in found:
        assert loss == pytest.approx(expected, rel=1e-6)
        assert torch.allclose(gradient, found[0][1], atol=1e-7)


# Several processes

GRADIENTS = """
import sys
sys.path.insert(0, {root!r})
import numpy as np
import torch
from data.batches import windows
from lab.machine import join_ranks, rank, ranks
from lab.train import forward_backward
from tiny_lm import TinyLM

torch.set_num_threads(1)
cpu = torch.device("cpu")
join_ranks(cpu)
data = np.random.default_rng(0).integers(0, 256, 5000).astype(np.uint8)
torch.manual_seed(rank())  # rank 0's start is everybody's
model = TinyLM("learned", 16, 2, 2)
for weight in model.parameters():
    torch.nn.init.normal_(weight, 0, 0.2)
worker = torch.nn.parallel.DistributedDataParallel(model) if ranks() > 1 else model
optimizer = torch.optim.SGD(model.parameters(), 0.1)
gradients, losses = [], []
for step in range(20):
    x, y = windows(data, 0, step, 9, 16)
    losses.append(forward_backward(worker, x, y, None, cpu, 1 + step % 2).item())
    gradients.append(torch.cat([weight.grad.flatten() for weight in model.parameters()]))
    optimizer.step()
    optimizer.zero_grad()
if rank() == 0:
    torch.save((torch.stack(gradients), losses), sys.argv[1])
del worker
if ranks() > 1:  # a process that ends with its connections open may abort
    torch.distributed.barrier()
    torch.distributed.destroy_process_group()
"""


@pytest.mark.slow
def test_gradients_of_1_2_and_4_processes_are_equal(tmp_path):
    """20 steps in float32 of the same batches: the gradients agree within 1e-5."""
    script, found = tmp_path / "gradients.py", []
    script.write_text(GRADIENTS.format(root=str(ROOT)))
    for processes in (1, 2, 4):
        done = torchrun(processes, script, tmp_path / f"{processes}.pt")
        assert done.returncode == 0, done.stderr
        found.append(torch.load(tmp_path / f"{processes}.pt"))
    for gradients, losses in found[1:]:
        assert gradients.shape[0] == 20 and (gradients - found[0][0]).abs().max() < 1e-5
        assert losses == pytest.approx(found[0][1], abs=1e-5)


def training_that(folder, hurt):
    """A script that runs train_compare, in which `hurt` happens at a step of Muon."""
    script = folder / "hurt.py"
    start = f"""
        import os, signal, sys
        sys.path.insert(0, {str(ROOT)!r})
        import torch
        import train_compare
        from lab import command
        from lab.machine import rank

        real, calls = torch.optim.Muon.step, []

        def step(*arguments):
            calls.append(1)
            {hurt}
            return real(*arguments)

        torch.optim.Muon.step = step
        command.run(train_compare.main, many=True)
    """
    script.write_text(textwrap.dedent(start))
    return script


@pytest.mark.slow
@pytest.mark.parametrize("first, then", [(1, 2), (3, 1)])
def test_a_run_goes_on_with_another_number_of_processes(cli, text, tmp_path, first, then):
    """Stopped after step 20, finished with others: nearly the losses of one process."""
    flags = (*THIRTY, "--data", text, "--schemes", "sin", "alibi")
    out, alone = tmp_path / "out", tmp_path / "alone"
    script = training_that(tmp_path, "len(calls) == 26 and sys.exit(7)")
    stopped = torchrun(first, script, *flags, "--out", out)
    assert stopped.returncode != 0 and tree(out) == ["checkpoints/sin-seed0.resume"]

    done = torchrun(then, ROOT / "train_compare.py", *flags, "--out", out)
    assert done.returncode == 0 and "sin, seed 0: goes on from step 20" in done.stdout, done.stderr
    assert done.stdout.count("bytes to train on") == 1  # rank 0 alone speaks
    assert done.stdout.count("| alibi | 1 |") == 1
    assert done.stderr.count("alibi, seed 0:   0%|") == 1

    assert cli(train_compare, *flags, "--out", alone)[0] == 0
    for scheme in ("sin", "alibi"):
        name = f"checkpoints/{scheme}-seed0.pt"
        assert losses(load(out / name)) == pytest.approx(losses(load(alone / name)), abs=0.02)
        (one,), (other,) = (
            values(rows_of(folder), scheme=scheme, protocol="span") for folder in (out, alone)
        )
        assert one == pytest.approx(other, rel=0.05)
    start = f"torchrun --nproc_per_node={then} " if then > 1 else "python "
    assert all(row["command"].startswith(start) for row in select(rows_of(out), scheme="alibi"))


@pytest.mark.slow
def test_a_rank_that_dies_ends_all(text, tmp_path):
    dies = "len(calls) == 13 and rank() == 1 and os.kill(os.getpid(), signal.SIGKILL)"
    flags = (*THIRTY, "--data", text, "--schemes", "rope", "--out", tmp_path / "out")
    done = torchrun(2, training_that(tmp_path, dies), *flags)
    assert done.returncode != 0
    told = "rank 0 of 2: RuntimeError" in done.stderr
    told &= "the same command goes on where it was last saved" in done.stderr
    assert told or "Signal 9" in done.stderr
    assert tree(tmp_path / "out") == ["checkpoints/rope-seed0.resume"]


@pytest.mark.slow
def test_fine_tuning_runs_in_several_processes(cli, text, tmp_path):
    flags = (*TINY, "--data", text, "--schemes", "alibi", "--out", tmp_path / "out")
    assert cli(train_compare, *flags)[0] == 0
    tune = "--train-len 64 --batch-size 2 --steps 10 --dtype fp32 --device cpu --schemes alibi"
    place = ("--from", tmp_path / "out", "--out", tmp_path / "tuned")
    done = torchrun(2, ROOT / "finetune.py", *tune.split(), *place)
    assert done.returncode == 0 and done.stdout.count("| alibi | 1 |") == 1, done.stderr
    assert tree(tmp_path / "tuned")[0] == "checkpoints/alibi-seed0.pt"


@pytest.mark.slow
def test_what_torchrun_cannot_do_is_told(text, tmp_path):
    out = tmp_path / "out"
    done = torchrun(3, ROOT / "train_compare.py", *TINY, "--data", text, "--out", out)
    told = "--batch-size 2 cannot be split in 3 parts (3 processes × --grad-accum 1)"
    assert done.returncode != 0 and done.stderr.count(f"train_compare.py: {told}") == 1
    assert not out.exists()
    done = torchrun(2, ROOT / "extrapolation_test.py", "--out", out)
    told = "only train_compare.py and finetune.py run under torchrun"
    assert done.returncode != 0 and done.stderr.count(told) == 1


# torch.compile and devices


@pytest.mark.slow
def test_compiled_and_plain_runs_go_on_from_each_other(cli, text, tmp_path, monkeypatch):
    """Their files are the same: of the network, whatever computed it."""
    monkeypatch.setattr(torch, "compile", functools.partial(torch.compile, backend="eager"))
    flags = (*THIRTY, "--data", text, "--schemes", "alibi", "--out")
    found = []
    for first, then in ([], ["--compile"]), (["--compile"], []):
        out = tmp_path / f"out{len(first)}"
        with stopped_at(16):
            cli(train_compare, *flags, out, *first)
        code, stdout, _ = cli(train_compare, *flags, out, *then)
        assert code == 0 and "goes on from step 10" in stdout
        found.append(load(out / "checkpoints" / "alibi-seed0.pt"))
    assert cli(train_compare, *flags, tmp_path / "plain")[0] == 0
    plain = load(tmp_path / "plain" / "checkpoints" / "alibi-seed0.pt")
    for one in found:
        assert list(one.weights) == list(plain.weights)
        assert losses(one) == pytest.approx(losses(plain), abs=1e-3)


def test_a_compiler_that_is_not_there_is_named(cli, text, tmp_path, monkeypatch):
    def fails(model):
        raise RuntimeError("Failed to find C compiler.\nPlease specify one")

    monkeypatch.setattr(torch, "compile", fails)
    flags = ("--data", text, "--schemes", "none", "--out", tmp_path, "--compile")
    code, _, _ = cli(train_compare, *TINY, *flags)
    told = "--compile does not work here: RuntimeError: Failed to find C compiler.; leave it out"
    assert code == f"train_compare.py: {told}"


@pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device here")
def test_a_run_on_cuda_goes_on_on_the_cpu_and_back(cli, text, tmp_path):
    flags = (*THIRTY, "--data", text, "--schemes", "rope")
    for first, then in (("cuda", "cpu"), ("cpu", "cuda")):
        with stopped_at(16):
            cli(train_compare, *flags, "--device", first, "--out", tmp_path / first)
        code, stdout, _ = cli(train_compare, *flags, "--device", then, "--out", tmp_path / first)
        assert code == 0 and "goes on from step 10" in stdout
