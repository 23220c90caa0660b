"""ColossalAI's `get_accelerator()`: the device of this process, with torch's functions for its kind."""

from functools import cache
from typing import Any

import torch

from .device import default_device


class Accelerator:
    """The kind of device that this process computes on: functions of `torch.cuda` by name, or of `torch.cpu`."""

    @property
    def name(self) -> str:
        """The kind, "cuda" or "cpu"."""
        return default_device().type

    def get_current_device(self) -> torch.device:
        """Return the device of this process."""
        return default_device()

    def current_device(self) -> int:
        """Return its index."""
        return default_device().index or 0

    def is_available(self) -> bool:
        """Return True: every process has a device, perhaps the CPU."""
        return True

    def manual_seed(self, seed: int) -> None:
        """Seed torch on all devices."""
        torch.manual_seed(seed)

    def __getattr__(self, name: str) -> Any:
        """Return a function of the device's module of torch; those of memory return 0 on CPUs, which do not count."""
        if name.startswith("_"):
            raise AttributeError(name)
        functions = torch.get_device_module(default_device())
        if hasattr(functions, name):
            return getattr(functions, name)
        if "memory" in name or name == "empty_cache":
            return lambda *_, **__: 0
        raise AttributeError(f"the accelerator {self.name!r} has no {name!r}")


@cache
def get_accelerator() -> Accelerator:
    """Return the accelerator of this process."""
    return Accelerator()


get_current_device = default_device  # by ColossalAI's name


def set_seed(seed: int) -> None:
    """Seed torch, equal numbers on all ranks."""
    torch.manual_seed(seed)
