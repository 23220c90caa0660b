"""The device of this process, and what depends on its kind. Only this file tells CUDA from others.

A process computes on one device, with that one's generator, and in its current stream. `launch.py` chooses it; all else
asks the mesh for it (`ParallelMesh.device`), or a tensor. What a device has not, a CPU for example, costs nothing here.

[Note: pinned memory] torch rounds a buffer with `pin_memory=True` up to a power of two. For a large buffer that stays,
`host_memory` registers exactly its bytes with CUDA. torch records no copies from and to it: it is freed once the device
is done, and only one stream may write while copies are in flight. It is shared, since a fork would copy private pages.
"""

import ctypes
import mmap
from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, suppress
from typing import Any
from weakref import finalize

import torch
import torch.distributed as dist
from torch import Tensor


def default_device() -> torch.device:
    """The current accelerator of this process if the default group has a backend for it, otherwise the CPU."""
    accelerator = torch.accelerator.current_accelerator(check_available=True)
    if accelerator is None or not dist.is_initialized() or backend_of(accelerator.type) is None:
        return torch.device("cpu")
    return torch.device(accelerator.type, torch.accelerator.current_device_index())


def choose_device(
    requested: torch.device | str | int | None,
    *,
    backend: str | None,
    local_rank: int,
    num_local_ranks: int,
    shares_gpus: bool,
) -> torch.device:
    """Make a device the current one of this process, and return it.

    By itself it is the GPU of the local rank among those that this process sees, or the only one that it sees, as
    under Slurm's --gpus-per-task. Where there are more ranks than GPUs, they take them in turn.

    Args:
        requested: what was asked for: a kind, or a kind and a number among those that this process sees. None is a GPU
            where there is one, whatever the backend.
        backend: of the device, if it was given.
        local_rank, num_local_ranks: this process among those of its machine.
        shares_gpus: several ranks may have one GPU, though NCCL refuses that by default.

    Raises:
        ValueError: there is no such device, the backend has no tensors there, or NCCL would find two ranks on one GPU.
    """
    devices = local_devices()
    count, kind = len(devices), devices[0].type if devices else "cpu"
    device = torch.device(kind) if requested is None else _as_device(requested)
    if backend == "nccl" and not is_cuda(device):
        raise ValueError(
            f"backend='nccl' needs a CUDA device and the device is {device}: use backend='gloo' or leave it out"
            + (", or leave out device=" if devices else "")
        )
    if device.type == "cpu":
        return torch.device("cpu")
    if device.type != kind or (device.index or 0) >= count:
        seen = f"{count} of {kind}, numbered from 0" if devices else "no GPU"
        raise ValueError(
            f"device={str(device)!r} is not available, this process sees {seen}: use one of those, device='cpu', or "
            "leave it out; CUDA_VISIBLE_DEVICES limits what each process sees"
        )
    if device.index is None:
        is_shared = 1 < count < num_local_ranks  # a process that sees one may have it for itself
        if is_shared and is_cuda(device) and backend in (None, "nccl") and not shares_gpus:
            raise ValueError(
                f"{num_local_ranks} processes of this machine see {count} GPUs, but NCCL allows one rank per GPU: "
                f"start {count} processes, or use backend='gloo'"
            )
        device = torch.device(device.type, local_rank % count)
    torch.accelerator.set_device_index(device.index)
    return device


def device_errors(requested: object) -> list[str]:
    """List what is wrong with a device as text, number or torch's object, before it is looked for."""
    is_number = isinstance(requested, int) and not isinstance(requested, bool) and requested >= 0
    with suppress(RuntimeError):
        if isinstance(requested, str):
            requested = torch.device(requested)
    if requested is None or is_number or isinstance(requested, torch.device):
        return []
    return [
        f"device={requested!r} is not a device: use 'cpu', 'cuda', a GPU by its number as in 'cuda:1' or 1, or leave "
        "it out"
    ]


def _as_device(requested: torch.device | str | int) -> torch.device:
    return torch.device("cuda", requested) if isinstance(requested, int) else torch.device(requested)


def is_same_device(requested: torch.device | str | int, device: torch.device) -> bool:
    """Return True where a device is the one that was asked for, by its kind or by its number too."""
    wanted = _as_device(requested)
    return wanted.type == device.type and wanted.index in (None, device.index or 0)


def is_cuda_built() -> bool:
    """Return True where torch was built for CUDA, whether or not there is a GPU."""
    return torch.backends.cuda.is_built()


def cuda_has_begun() -> bool:
    """Return True where CUDA has read the environment of this process, so that variables come too late."""
    return torch.cuda.is_initialized()


def orders_launches() -> bool:
    """Return True where NCCL can keep an order of launches without running one kernel after another: CUDA 12.3."""
    version = ctypes.c_int(0)
    with suppress(OSError):  # no driver
        ctypes.CDLL("libcuda.so.1").cuDriverGetVersion(ctypes.byref(version))
    return version.value >= 12030


def backend_of(kind: str, group: dist.ProcessGroup | None = None) -> str | None:
    """The name of the backend that carries tensors of a kind of device in a group; None where there is none."""
    pairs = (pair.partition(":") for pair in str(dist.get_backend_config(group)).split(","))
    return {device: backend for device, _, backend in pairs}.get(kind)


def is_cuda(device: torch.device) -> bool:
    """Return True for a CUDA device."""
    return device.type == "cuda"


def compute_capability(device: torch.device) -> tuple[int, int] | None:
    """The generation of a CUDA device, (8, 0) for Ampere's first; None where there is no such device."""
    return torch.cuda.get_device_capability(device) if is_cuda(device) and torch.cuda.is_available() else None


def cuda_device(device: torch.device | int | str | None = None) -> torch.device:
    """The CUDA device that is meant; None is the current one."""
    return _as_device(torch.cuda.current_device() if device is None else device)


def generator_of(device: torch.device) -> torch.Generator | None:
    """The default generator of a device; None where that has none beside torch's CPU generator."""
    if not is_cuda(device):
        return None
    index = torch.cuda.current_device() if device.index is None else device.index
    return torch.cuda.default_generators[index]


def wait_for_stream(device: torch.device) -> None:
    """Wait until all is done that the device's current stream was given: copies to the CPU, for example."""
    if is_cuda(device):
        torch.cuda.current_stream(device).synchronize()


def numbers_on(device: torch.device, values: Sequence[float], dtype: torch.dtype) -> Tensor:
    """Copy numbers to a device. `torch.tensor(values, device=…)` would wait until all is done that CUDA was given."""
    return torch.tensor(values, dtype=dtype, pin_memory=is_cuda(device)).to(device, non_blocking=True)


def host_memory(nbytes: int, device: torch.device) -> Tensor:
    """Memory of the CPU for large copies from and to a device; of CUDA pinned, see [Note: pinned memory].

    Returns:
        (nbytes,) of uint8, of any value, aligned for every dtype.

    Raises:
        RuntimeError: CUDA could not pin it.
    """
    if nbytes == 0 or not is_cuda(device):
        return torch.empty(nbytes, dtype=torch.uint8, device="cpu")
    mapping = mmap.mmap(-1, nbytes)
    memory = torch.frombuffer(mapping, dtype=torch.uint8)
    cudart = torch.cuda.cudart()
    if error := int(cudart.cudaHostRegister(memory.data_ptr(), nbytes, 0)):
        raise RuntimeError(
            f"CUDA cannot pin {nbytes:,} bytes of host memory (cudaHostRegister: error {error}): free memory of the "
            "node, or do without cpu_offload, activation_offload and asynchronous saves"
        )
    # `mapping` is held until it is unregistered; a process that ends leaves that to the driver.
    finalize(memory.untyped_storage(), _unpin, memory.data_ptr(), device, mapping).atexit = False
    return memory


def _unpin(address: int, device: torch.device, mapping: mmap.mmap) -> None:
    torch.cuda.synchronize(device)
    torch.cuda.cudart().cudaHostUnregister(address)
    del mapping  # only now


def side_stream(device: torch.device) -> AbstractContextManager[Any] | None:
    """A stream to enter, which then waits for communication in the place of the current one; None where the host waits.

    Of NCCL's communication a stream waits, of others' the host.
    """
    return torch.cuda.Stream(device) if backend_of(device.type) == "nccl" else None


class CopyStream:
    """Copies from and to a device, beside its computation; on a CPU they are made at once."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._stream = torch.cuda.Stream(device) if is_cuda(device) else None

    @contextmanager
    def behind(self) -> Iterator[None]:
        """Inside, copies go to this stream, behind all that the device's current one was given."""
        if self._stream is None:
            yield
            return
        self._stream.wait_stream(torch.cuda.current_stream(self._device))
        with torch.cuda.stream(self._stream):
            yield

    def event(self) -> Any:
        """Mark this point of the stream, for `wait`."""
        return None if self._stream is None else self._stream.record_event()

    def wait(self, event: Any) -> None:
        """Let what the device's current stream is given from here on come behind an event; the host goes on."""
        if event is not None:
            torch.cuda.current_stream(self._device).wait_event(event)


def allocated_bytes(device: torch.device) -> int | None:
    """Return the bytes of all tensors on a device; None on a CPU, where nobody counts them."""
    return torch.cuda.memory_allocated(device) if is_cuda(device) else None


def free_cached_memory(device: torch.device) -> None:
    """Give back to the device what torch keeps of freed tensors; it waits for the device."""
    if is_cuda(device):
        torch.cuda.empty_cache()


def peak_memory(device: torch.device) -> int | None:
    """Return the most bytes that torch had allocated on a device at a time; None on a CPU."""
    return torch.cuda.max_memory_allocated(device) if is_cuda(device) else None


def computes_in_bf16(device: torch.device) -> bool:
    """Return True for a device with kernels in bfloat16."""
    return not is_cuda(device) or torch.cuda.is_bf16_supported(including_emulation=False)


def local_devices() -> list[torch.device]:
    """Return the accelerators that this process sees, whatever the process group; none on a machine of CPUs."""
    accelerator = torch.accelerator.current_accelerator(check_available=True)
    if accelerator is None:
        return []
    return [torch.device(accelerator.type, index) for index in range(torch.accelerator.device_count())]


def described(device: torch.device) -> str:
    """Return what a GPU is, in words: its name, memory, compute capability, and the GPUs that it reads directly."""
    if not is_cuda(device):
        return str(device)
    properties = torch.cuda.get_device_properties(device)
    others = [other for other in local_devices() if other != device]
    peers = [str(other.index) for other in others if torch.cuda.can_device_access_peer(device, other)]
    links = f"direct access to {', '.join(peers)}" if peers else "no direct access to others"
    return (
        f"{device}: {properties.name}, {properties.total_memory / 2**30:.0f} GiB, compute capability "
        f"{properties.major}.{properties.minor}, {links}"
    )
