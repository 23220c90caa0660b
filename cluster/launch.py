"""Starting the process group of a run. The mesh over it is mesh.py; the watch over its ranks is failures.py."""

import faulthandler
import os
import shlex
import sys
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from datetime import timedelta
from pathlib import Path
from typing import Literal

import torch
import torch.distributed as dist

from .failures import naming_failures, start_watch
from .random import seed_everything

TORCHRUN_VARIABLES = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "MASTER_ADDR", "MASTER_PORT")


def launch_from_torch(
    *,
    backend: Literal["gloo", "nccl"] | None = None,
    seed: int = 1024,
    timeout_seconds: float = 600.0,
) -> None:
    """Start the default process group from torchrun's variables, or alone under a plain `python script.py`.

    With CUDA, NCCL carries tensors on the device and gloo those on the CPU; without it, gloo carries all.
    Each process takes the device of its LOCAL_RANK. Calling it again does nothing but seed.

    Args:
        backend: forces one backend; None chooses by the devices found.
        seed: seeds Python, NumPy and torch equally on every rank.
        timeout_seconds: after how long a collective that a peer does not join raises.

    Raises:
        ValueError: only some of torchrun's variables are set, or NCCL is asked for without CUDA.
    """
    given = [name for name in TORCHRUN_VARIABLES if name in os.environ]
    missing = [name for name in TORCHRUN_VARIABLES if name not in os.environ]
    # An address alone is common on clusters and says nothing about other processes; a rank or a size does.
    if missing and any(name in given for name in ("RANK", "WORLD_SIZE", "LOCAL_RANK")):
        raise ValueError(
            f"the environment sets {', '.join(given)} but not {', '.join(missing)}: start the script with "
            "`torchrun --nproc_per_node N script.py`, or with none of these set to run alone"
        )
    if backend == "nccl" and not torch.cuda.is_available():
        raise ValueError(
            "backend='nccl' needs a CUDA device and none is available: use backend='gloo' or leave it out"
        )
    if torch.cuda.is_available() and backend != "gloo":
        torch.cuda.set_device(int(os.environ.get("LOCAL_RANK", "0")))
        backends = "cpu:gloo,cuda:nccl"
    else:
        backends = "gloo"
    if not dist.is_initialized():
        timeout = timedelta(seconds=timeout_seconds)
        if not missing:
            dist.init_process_group(backends, timeout=timeout)
            wait_until_all_have_connected()
        else:
            dist.init_process_group(backends, store=dist.HashStore(), rank=0, world_size=1, timeout=timeout)
    start_watch()
    if not faulthandler.is_enabled():  # gloo ends a process without an exception where messages do not fit
        with suppress(OSError, ValueError):  # a standard error that is no file
            faulthandler.enable()
    seed_everything(seed)


def torchrun_command(num_processes: int) -> str:
    """The command line that starts this script on so many processes of this machine."""
    script = sys.argv if Path(sys.argv[0]).is_file() else ["script.py"]
    return f"torchrun --standalone --nproc_per_node {num_processes} {shlex.join(script)}"


def default_device() -> torch.device:
    """The device that this process computes on: its CUDA device under an NCCL group, else the CPU."""
    if torch.cuda.is_available() and dist.is_initialized() and "nccl" in str(dist.get_backend_config()):
        return torch.device("cuda", torch.cuda.current_device())
    return torch.device("cpu")


def local_store() -> dist.TCPStore:
    """A store for the processes that this one starts on its machine: they join by its `port`, see below."""
    return dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)


@contextmanager
def join_local_group(
    rank: int, world_size: int, *, port: int, timeout_seconds: float = 600.0
) -> Iterator[None]:
    """For the block, a gloo group of processes on this machine that were started by hand.

    Args:
        rank, world_size: this process among them.
        port: that of the store which the process that started them keeps open (`local_store`).
        timeout_seconds: after how long a collective that a peer does not join raises.
    """
    timeout = timedelta(seconds=timeout_seconds)
    store = dist.TCPStore("127.0.0.1", port, is_master=False, timeout=timeout)
    dist.init_process_group("gloo", store=store, rank=rank, world_size=world_size, timeout=timeout)
    try:
        wait_until_all_have_connected()
        yield
    finally:
        dist.destroy_process_group()


def wait_until_all_have_connected() -> None:
    """Wait until every rank has the connections of its groups over gloo. Collective over the world.

    A rank that failed at once would close connections that others still open, and they would report only that.
    """
    if "gloo" in str(dist.get_backend_config()):
        with naming_failures("connecting the ranks"):
            dist.all_reduce(torch.zeros(1))
