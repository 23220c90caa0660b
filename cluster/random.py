"""Random state per mesh axis: equal where activations are replicated, different where they are split."""

import random
from typing import Any

import numpy as np
import torch
from torch import nn

# Odd 64-bit constant of SplitMix64 (Steele, Lea, Flood 2014): spreads neighbouring ranks over the seed space.
_SPREAD = 0x9E3779B97F4A7C15


def seed_everything(seed: int) -> None:
    """Seed Python, NumPy and torch (every device) equally."""
    random.seed(seed)
    np.random.seed(seed % 2**32)
    torch.manual_seed(seed)


def split_seed(common: int, rank: int) -> int:
    """The seed of a rank of an axis from one that all have in common."""
    return (common + (rank + 1) * _SPREAD) % 2**63


def common_seed(split: int, rank: int) -> int:
    """The seed that a rank's own came from."""
    return (split - (rank + 1) * _SPREAD) % 2**63


class SplitRandom:
    """Random state for the inside of a region whose activations are split over an axis.

    `enter` leaves the default generators with a state that differs on every rank of the axis, `leave` puts
    the common state back, one draw further. The split state is derived from the common CPU generator and
    the rank alone, so whatever restores that generator (activation checkpointing does) reproduces the
    region's random numbers too. Nothing communicates.
    """

    def __init__(self, rank: int, device: torch.device) -> None:
        self._rank = rank
        self._device = device
        # One slot and not a stack: regions do not nest, and recomputation may stop between enter and leave.
        self._common: tuple[torch.Tensor, torch.Tensor | None] | None = None

    def enter(self) -> None:
        """Switch to this rank's own state."""
        drawn = int(torch.randint(0, 2**62, ()).item())
        self._common = self._present()
        torch.manual_seed(split_seed(drawn, self._rank))

    def leave(self) -> None:
        """Switch back to the state that all ranks of the axis have in common."""
        if self._common is None:
            raise AssertionError("a region was left that was not entered")
        common, self._common = self._common, None
        self._set(common)

    def around(self, module: nn.Module) -> None:
        """Let what a module draws while it trains differ from rank to rank, by hooks."""

        def enter(module: nn.Module, args: tuple) -> None:
            if module.training:
                self.enter()

        def leave(module: nn.Module, args: tuple, output: Any) -> None:
            if module.training:
                self.leave()

        module.register_forward_pre_hook(enter)
        module.register_forward_hook(leave)

    def exchange(self) -> None:
        """Inside of a region, switch to the common state, and the next time back to this rank's own; else nothing."""
        if self._common is not None:
            present = self._present()
            self._set(self._common)
            self._common = present

    def _present(self) -> tuple[torch.Tensor, torch.Tensor | None]:
        """The states of the CPU's generator and the device's."""
        on_device = torch.cuda.get_rng_state(self._device) if self._device.type == "cuda" else None
        return torch.get_rng_state(), on_device

    def _set(self, state: tuple[torch.Tensor, torch.Tensor | None]) -> None:
        on_cpu, on_device = state
        torch.set_rng_state(on_cpu)
        if on_device is not None:
            torch.cuda.set_rng_state(on_device, self._device)
