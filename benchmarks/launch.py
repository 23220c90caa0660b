"""Start of the processes of a benchmark."""

import os
import sys

import torch
import torch.distributed as dist
import transformers
from checkout import refuse_another_checkout
from processes import torchrun

from echelon import launch_from_torch


def enter(num_ranks: int, *, option: str, matmul: str) -> None:
    """Become one of `num_ranks` processes of one thread each, with a process group over all of them.

    A process that torchrun did not start is replaced by a torchrun that runs the script again.

    Args:
        num_ranks: the number of processes of the benchmark.
        option: the argument that sets it, for the error.
        matmul: see `torch.set_float32_matmul_precision`.

    Raises:
        ValueError: torchrun started another number of processes.
    """
    refuse_another_checkout()
    if "RANK" not in os.environ:
        _start_processes(num_ranks)
    torch.set_num_threads(1)
    torch.set_float32_matmul_precision(matmul)
    transformers.logging.set_verbosity_error()
    launch_from_torch()
    if dist.get_world_size() != num_ranks:
        raise ValueError(f"{option} {num_ranks} needs that many processes, not {dist.get_world_size()}")


def _start_processes(count: int) -> None:
    os.environ.setdefault("OMP_NUM_THREADS", "1")
    os.execv(sys.executable, [*torchrun(count), *sys.argv])
