"""Peak memory of a computation, in a process that does nothing else."""

from collections.abc import Callable
from pathlib import Path

import torch

_STATUS = Path("/proc/self/status")
_CLEAR = Path("/proc/self/clear_refs")
_RESET_PEAK = "5"  # see proc(5)

# For measured processes: freed memory returns to the system at once, so that resident memory is memory in use. This
# costs time.
ENVIRONMENT = {"MALLOC_MMAP_THRESHOLD_": "65536", "MALLOC_TRIM_THRESHOLD_": "65536", "MALLOC_ARENA_MAX": "1"}


class Meter:
    """Memory above the level at the meter's creation: of CUDA's allocator, or resident.

    Args:
        device: the device of the computation.

    Raises:
        OSError: resident memory cannot be measured here; this needs Linux with /proc.
    """

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._base = self._now()

    def peak(self, work: Callable[[], None]) -> int:
        """Return the peak bytes above the base during the work."""
        if self._device.type == "cuda":
            torch.cuda.reset_peak_memory_stats(self._device)
            work()
            torch.cuda.synchronize(self._device)
            return torch.cuda.max_memory_allocated(self._device) - self._base
        _CLEAR.write_text(_RESET_PEAK)
        work()
        return status_bytes(_STATUS.read_text(), "VmHWM") - self._base

    def _now(self) -> int:
        if self._device.type == "cuda":
            return torch.cuda.memory_allocated(self._device)
        return status_bytes(_STATUS.read_text(), "VmRSS")


def status_bytes(status: str, name: str) -> int:
    """Return a field of /proc/PID/status, whose unit is KiB, in bytes."""
    fields = dict(line.split(":", 1) for line in status.splitlines() if ":" in line)
    return int(fields[name].split()[0]) * 1024
