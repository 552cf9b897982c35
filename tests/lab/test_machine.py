import os

import pytest
import torch

from helpers import CPU, RUN
from lab import machine
from lab.machine import out_of_memory, pick_device, pick_dtype, require_memory


@pytest.fixture
def second_of_two(monkeypatch):
    """Be the second of two processes of torchrun."""
    words = dict(TORCHELASTIC_RUN_ID="none", RANK=1, WORLD_SIZE=2)
    for name, value in (words | dict(LOCAL_RANK=1, LOCAL_WORLD_SIZE=2)).items():
        monkeypatch.setenv(name, str(value))


# Processes


def test_one_process_is_rank_0_of_1(monkeypatch):
    monkeypatch.setenv("RANK", "1")  # some job schedulers leave them
    monkeypatch.setenv("WORLD_SIZE", "2")
    assert (machine.rank(), machine.ranks()) == (0, 1)


def test_ranks_are_those_of_torchrun(second_of_two):
    assert (machine.rank(), machine.ranks()) == (1, 2)


def test_one_process_needs_no_connection():
    machine.join_ranks(CPU)
    assert not torch.distributed.is_initialized() and machine.broadcast({"a": 1}) == {"a": 1}


# Devices


def test_the_device_is_found_by_itself(monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    monkeypatch.setattr(torch.backends.mps, "is_available", lambda: False)
    assert pick_device("auto") == pick_device("cpu") == CPU


@pytest.mark.parametrize("name", ["abacus", "meta", "hpu", "cpu:x", "", "mps", "cuda:99"])
def test_a_device_that_is_not_here_is_named(name):
    if name == "mps" and torch.backends.mps.is_available():
        pytest.skip("it is here")
    with pytest.raises(ValueError, match=f"--device {name}: there is no such device here"):
        pick_device(name)


def test_each_process_has_a_cuda_device_of_its_own(second_of_two, monkeypatch):
    asked = []
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    monkeypatch.setattr(torch.cuda, "set_device", asked.append)
    monkeypatch.setattr(torch, "empty", lambda *shape, device: asked.append(device))
    assert pick_device("cuda") == torch.device("cuda:1")
    assert asked == [torch.device("cuda:1")] * 2


def test_fewer_cuda_devices_than_processes_are_an_error(second_of_two, monkeypatch):
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 1)
    told = "2 processes and 1 CUDA devices here; use at most as many processes, or --device cpu"
    with pytest.raises(ValueError, match=told):
        pick_device("cuda")


def test_processes_share_the_cpu_and_nothing_else(second_of_two):
    assert pick_device("cpu") == CPU
    for name in ("mps", "cuda:1"):
        with pytest.raises(ValueError, match=f"--device {name}: under torchrun use auto, cpu or"):
            pick_device(name)


@pytest.mark.parametrize("units, dtype", [
    ({"avx512_bf16": True}, torch.bfloat16),
    ({"amx_bf16": True}, torch.bfloat16),
    ({"amx_bf16": False, "avx512_bf16": False, "avx2": True}, torch.float32),
    ({}, torch.float32),
])  # fmt: skip
def test_a_cpu_trains_in_bfloat16_where_it_has_units_for_it(monkeypatch, units, dtype):
    monkeypatch.setattr(torch.cpu, "get_capabilities", units.copy)
    assert pick_dtype("auto", CPU) == dtype


def test_cuda_says_itself_whether_it_has_units(monkeypatch):
    for units, dtype in ((True, torch.bfloat16), (False, torch.float32)):
        monkeypatch.setattr(torch.cuda, "is_bf16_supported", [units].pop)
        assert pick_dtype("auto", torch.device("cuda")) == dtype
    assert pick_dtype("auto", torch.device("mps")) == torch.float32


def test_a_dtype_that_is_asked_for_is_taken():
    assert pick_dtype("bf16", CPU) == torch.bfloat16 and pick_dtype("fp32", CPU) == torch.float32


# Memory


@pytest.mark.skipif(not hasattr(os, "sysconf"), reason="the size of the memory is not known here")
def test_a_network_that_cannot_fit_in_memory_is_refused():
    require_memory(RUN)
    told = r"--dim 2000000 --n-layer 1: 48,.* weights take .* GB in training, and this machine has"
    with pytest.raises(ValueError, match=told):
        require_memory(RUN.replace(dim=2_000_000))


def test_memory_is_not_judged_where_its_size_is_not_known(monkeypatch):
    monkeypatch.delattr(os, "sysconf", raising=False)  # as on Windows
    require_memory(RUN.replace(dim=2_000_000))


@pytest.mark.parametrize("error, ran_out", [
    (MemoryError(), True),
    (torch.OutOfMemoryError("CUDA out of memory"), True),
    (RuntimeError("DefaultCPUAllocator: can't allocate memory: you tried to"), True),
    (RuntimeError("shapes do not match"), False),
    (ValueError(""), False),
])  # fmt: skip
def test_out_of_memory_is_told_from_other_errors(error, ran_out):
    assert out_of_memory(error) == ran_out


def test_an_allocator_that_is_not_there_is_no_error(monkeypatch):
    def fails(name):
        raise OSError("no C library")

    monkeypatch.setattr(machine.ctypes, "CDLL", fails)
    assert machine.keep_freed_memory() is False
