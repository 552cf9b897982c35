"""What the work runs on: device, dtype, memory allocator, and the processes of torchrun."""

import ctypes
import os
from datetime import timedelta

import torch
from torch import distributed


def rank():
    """The number of this process under torchrun; 0 without."""
    return int(os.environ["RANK"]) if "TORCHELASTIC_RUN_ID" in os.environ else 0


def ranks():
    """How many processes torchrun started; 1 without."""
    return int(os.environ["WORLD_SIZE"]) if "TORCHELASTIC_RUN_ID" in os.environ else 1


def join_ranks(device):
    """Connect the processes of torchrun: by nccl on CUDA, else by gloo.

    They may wait for rank 0, which scores, for hours.
    """
    if ranks() > 1:
        backend = "nccl" if device.type == "cuda" else "gloo"
        distributed.init_process_group(backend, timeout=timedelta(hours=6))


def broadcast(value):
    """The value that rank 0 has, in every process."""
    box = [value]
    if ranks() > 1:
        distributed.broadcast_object_list(box)
    return box[0]


def pick_device(name):
    """auto: cuda, then mps, then cpu; under torchrun each process has a CUDA device of its own.

    ValueError for a device that is not here.
    """
    if name == "auto":
        mps = torch.backends.mps.is_available() and ranks() == 1
        name = "cuda" if torch.cuda.is_available() else "mps" if mps else "cpu"
    if ranks() > 1:
        name = _device_of_rank(name)
    try:
        if name.partition(":")[0] not in ("cpu", "cuda", "mps"):
            raise RuntimeError
        device = torch.device(name)
        torch.empty(1, device=device)
        if device.index is not None and device.type == "cuda":
            torch.cuda.set_device(device)  # so that its generator is the one that is saved
    except (RuntimeError, AssertionError, NotImplementedError):
        raise ValueError(
            f"--device {name}: there is no such device here; use auto or cpu"
        ) from None
    return device


def _device_of_rank(name):
    if name not in ("cpu", "cuda"):
        raise ValueError(
            f"--device {name}: under torchrun use auto, cpu or cuda, which gives each process its "
            "own"
        )
    if name == "cpu":
        return name
    here, wanted = torch.cuda.device_count(), int(os.environ["LOCAL_WORLD_SIZE"])
    if here < wanted:
        raise ValueError(
            f"--device cuda: {wanted} processes and {here} CUDA devices here; use at most as many "
            "processes, or --device cpu"
        )
    return f"cuda:{os.environ['LOCAL_RANK']}"


def pick_dtype(name, device):
    """auto: bfloat16 where the products run on bfloat16 units, else float32.

    Those are CUDA devices that say so, and CPUs with AMX or AVX512-BF16.
    """
    if name != "auto":
        return {"bf16": torch.bfloat16, "fp32": torch.float32}[name]
    units = False
    if device.type == "cuda":
        units = torch.cuda.is_bf16_supported()
    elif device.type == "cpu":
        cpu = torch.cpu.get_capabilities()
        units = cpu.get("amx_bf16") or cpu.get("avx512_bf16")
    return torch.bfloat16 if units else torch.float32


def keep_freed_memory():
    """Let glibc keep freed memory for the next step; True if it could.

    By default it gives memory back and fetches it anew; bench/train_step.py measures the gain.
    """
    try:
        mallopt = ctypes.CDLL(None).mallopt
    except (OSError, TypeError, AttributeError):  # another C library
        return False
    M_TRIM_THRESHOLD, M_MMAP_THRESHOLD = -1, -3
    mallopt(M_TRIM_THRESHOLD, 2**31 - 1)
    return bool(mallopt(M_MMAP_THRESHOLD, 32 * 2**20))  # the largest it takes


def require_memory(run):
    """ValueError if the training of a run cannot fit in this machine's memory.

    A weight takes 16 bytes: float32 value and gradient, and the optimizer's two averages.
    """
    if not hasattr(os, "sysconf"):
        return
    memory = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    weights = run.n_layer * 12 * run.dim**2 + (2 * 256 + run.max_len) * run.dim
    if 16 * weights > memory:
        raise ValueError(
            f"--dim {run.dim} --n-layer {run.n_layer}: {weights:,} weights take "
            f"{16 * weights / 1e9:,.0f} GB in training, and this machine has {memory / 1e9:.0f} GB"
        )


def out_of_memory(error):
    """Whether an exception says that memory ran out; the CPU's allocator raises a plain one."""
    return isinstance(error, MemoryError) or "memory" in str(error)
