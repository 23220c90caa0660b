"""Start the process group of a run."""

import faulthandler
import logging
import os
import random
import shlex
import sys
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from datetime import timedelta
from numbers import Integral
from pathlib import Path

import numpy as np
import torch
import torch.distributed as dist

from .attempt import attempt_store, may_restart, shares_store
from .device import backend_of, choose_device, default_device, device_errors, is_cuda, is_same_device
from .environment import prepare_environment
from .errors import raise_errors
from .failures import naming_failures, start_watch

_LOG = logging.getLogger(__name__)
TORCHRUN_VARIABLES = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "MASTER_ADDR", "MASTER_PORT")
NUMBERS = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE", "MASTER_PORT")
_LONGEST = 1e9  # seconds


def launch_from_torch(
    *,
    backend: str | None = None,
    device: torch.device | str | int | None = None,
    seed: int | None = 1024,
    timeout_seconds: float = 600.0,
) -> None:
    """Start the default process group from torchrun's variables, or alone under a plain `python script.py`.

    Each process computes on the GPU of its LOCAL_RANK, or on the only visible one, whatever the backend; without a GPU
    on the CPU. NCCL carries CUDA tensors, and gloo carries CPU tensors. Environment variables are set or warned of, see
    `environment.py`. A second call only seeds.

    Args:
        backend: backend for the device's tensors: "nccl", "gloo", or one registered with torch. None takes NCCL on
            CUDA, else gloo.
        device: "cpu", "cuda", or the number of a visible GPU; None takes a GPU if there is one.
        seed: seeds Python, NumPy and torch equally on every rank; None leaves their states as they are.
        timeout_seconds: time after which a collective raises if a peer does not join it.

    Raises:
        ValueError: arguments or variables have invalid values, all reported at once; only some of torchrun's
            variables are set, the device does not exist, or the backend has no tensors there.
    """
    raise_errors(_value_errors(backend=backend, device=device, seed=seed, timeout_seconds=timeout_seconds))
    had_group = dist.is_initialized()
    if had_group:
        if device is not None and not is_same_device(device, default_device()):
            raise ValueError(
                f"device={str(device)!r} is not {default_device()}, the device of the existing process group: give it "
                "to the call that starts the group"
            )
    else:
        is_alone = not _has_launcher()
        prepare_environment(os.environ)
        timeout = timedelta(seconds=timeout_seconds)
        backends = _backends(backend, _chosen_device(device, backend))
        if is_alone:
            _start_group(backends, dist.HashStore(), 0, 1, timeout)
        else:
            _start_group(backends, *_joined_store(timeout), timeout)
            wait_until_all_have_connected()
    if start_watch() and had_group and may_restart(os.environ) and dist.get_rank() == 0:
        _LOG.warning(
            "the script started its process group on a store that torchrun keeps, and a restart would read stale "
            "addresses: let launch_from_torch start it, or see TORCH_DISABLE_SHARE_RDZV_TCP_STORE in docs/cuda.md"
        )
    if not faulthandler.is_enabled():  # gloo aborts without an exception if message sizes differ
        with suppress(OSError, ValueError):  # standard error is no file
            faulthandler.enable()
    if seed is not None:
        seed_everything(seed)


def _has_launcher() -> bool:
    """Return True if the environment has torchrun's variables, False without a rank or a world size among them.

    Raises:
        ValueError: it has only some of them.
    """
    present = [name for name in TORCHRUN_VARIABLES if name in os.environ]
    missing = [name for name in TORCHRUN_VARIABLES if name not in os.environ]
    # Clusters often set an address alone; only a rank or a world size implies other processes.
    if missing and any(name in present for name in ("RANK", "WORLD_SIZE", "LOCAL_RANK")):
        raise ValueError(
            f"the environment sets {', '.join(present)} but not {', '.join(missing)}: start the script with "
            "`torchrun --nproc_per_node N script.py`, or with none of these set to run alone"
        )
    return not missing


def seed_everything(seed: int) -> None:
    """Seed Python, NumPy and torch (every device) equally."""
    random.seed(seed)
    np.random.seed(seed % 2**32)
    torch.manual_seed(seed)


def _value_errors(*, backend: object, device: object, seed: object, timeout_seconds: object) -> list[str]:
    """List arguments of `launch_from_torch`, and variables, that no machine could run with."""
    numbers = {name: os.environ[name] for name in NUMBERS if name in os.environ}
    known = {*dist.Backend.backend_list} - {dist.Backend.UNDEFINED}
    is_seed = isinstance(seed, Integral) and -(2**63) <= int(seed) < 2**64
    is_time = isinstance(timeout_seconds, int | float) and not isinstance(timeout_seconds, bool)
    rows = (
        *(
            (not value.isdecimal(), f"{name}={value!r} in the environment must be an integer")
            for name, value in numbers.items()
        ),
        (
            backend is not None and not (isinstance(backend, str) and backend.lower() in known),
            f"backend={backend!r} is unknown: use 'nccl', 'gloo', one that was registered with torch, or leave it out",
        ),
        (
            seed is not None and not is_seed,
            f"seed={seed!r} must be an integer from -2**63 to below 2**64, or None",
        ),
        (
            not (is_time and 0 < timeout_seconds <= _LONGEST),  # type: ignore[operator]
            f"timeout_seconds={timeout_seconds!r} must be a number of seconds above 0, at most {_LONGEST:g}",
        ),
    )
    return device_errors(device) + [message for is_wrong, message in rows if is_wrong]


def _chosen_device(requested: torch.device | str | int | None, backend: str | None) -> torch.device:
    """Return the result of `choose_device` for the place that the environment gives this process."""
    local_rank = int(os.environ.get("LOCAL_RANK", "0"))
    return choose_device(
        requested,
        backend=backend,
        local_rank=local_rank,
        num_local_ranks=int(os.environ.get("LOCAL_WORLD_SIZE", local_rank + 1)),
        shares_gpus=os.environ.get("NCCL_MULTI_RANK_GPU_ENABLE", "0") == "1",
    )


def _backends(backend: str | None, device: torch.device) -> str:
    """Backends by device type, in torch's format. Devices that are not listed have none."""
    if device.type == "cpu":
        return f"cpu:{backend or 'gloo'}"
    return f"cpu:gloo,{device.type}:{backend or ('nccl' if is_cuda(device) else 'gloo')}"


def _joined_store(timeout: timedelta) -> tuple[dist.Store, int, int]:
    """Connect to the store as torch's env:// does, and join this attempt; return it, the rank and the world size."""
    store, rank, world_size = next(dist.rendezvous("env://", timeout=timeout))
    store.set_timeout(timeout)
    if shares_store(os.environ):
        store = attempt_store(store, rank, world_size, timeout_seconds=timeout.total_seconds())
    return store, rank, world_size


def _start_group(backends: str, store: dist.Store, rank: int, world_size: int, timeout: timedelta) -> None:
    """Start the default process group; its default backend is the last of `backends`."""
    dist.init_process_group(backends, store=store, rank=rank, world_size=world_size, timeout=timeout)
    # torch leaves the default backend of "cpu:gloo" undefined where another backend was registered, as transformers'
    # models do with "fake", and warns of it when the group ends. There is no public way to set it.
    backend = dist.Backend.backend_type_map[backends.rpartition(":")[2].lower()]
    dist.group.WORLD._set_default_backend(backend)  # type: ignore[union-attr]


def torchrun_command(num_processes: int) -> str:
    """The command line that starts this script with `num_processes` processes on this machine."""
    script = sys.argv if Path(sys.argv[0]).is_file() else ["script.py"]
    return f"torchrun --standalone --nproc_per_node {num_processes} {shlex.join(script)}"


def local_store() -> dist.TCPStore:
    """A store for processes that this one starts on its machine; they join by its `port` with `join_local_group`."""
    return dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)


@contextmanager
def join_local_group(
    rank: int, world_size: int, *, port: int, timeout_seconds: float = 600.0
) -> Iterator[None]:
    """Run the block in a gloo group of manually started processes of this machine, which compute on the CPU.

    Args:
        rank, world_size: rank of this process, and number of processes.
        port: port of the `local_store` that the starting process keeps open.
        timeout_seconds: time after which a collective raises if a peer does not join it.
    """
    timeout = timedelta(seconds=timeout_seconds)
    store = dist.TCPStore("127.0.0.1", port, is_master=False, timeout=timeout)
    _start_group("cpu:gloo", store, rank, world_size, timeout)
    try:
        wait_until_all_have_connected()
        yield
    finally:
        dist.destroy_process_group()


def wait_until_all_have_connected() -> None:
    """Wait until all gloo connections of every rank are open. Collective over the world.

    A rank that fails early would close connections that others are still opening, and they would report only that.
    """
    if backend_of("cpu") == "gloo":
        with naming_failures("connecting the ranks"):
            dist.all_reduce(torch.zeros(1, device="cpu"))
