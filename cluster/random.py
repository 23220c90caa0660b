"""Random state of forwards: equal for replicated activations, different for sharded ones and other microbatches.

[Note: random numbers of forwards] With several replicas or stages, each batch draws one number from torch's CPU
generator. The forwards of a batch are seeded by that number, the replica, the microbatch and the stage. Afterwards all
generators are restored, so a script finds them equal on all ranks. Restoring the CPU generator therefore reproduces
dropout masks: by loading a checkpoint of the run, or by activation checkpointing around the model. Recomputation of
a layer restores the state at the layer's start, as usual. A single replica with a single stage draws from the global
generators, as a plain loop does.
"""

import hashlib
import random
import struct
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from typing import Any

import numpy as np
import torch
from torch import nn

from .device import generator_of
from .mesh import ParallelMesh

# Odd 64-bit constant of SplitMix64 (Steele, Lea, Flood 2014), which makes seeds of neighbouring ranks far apart.
_SPREAD = 0x9E3779B97F4A7C15

TorchState = tuple[torch.Tensor, torch.Tensor | None]

# For functions that a compiled model calls uncompiled, since the compiler fails at seeds. Private torch API, because
# torch.compiler.disable would import the compiler with this file.
not_compiled = torch._disable_dynamo


@not_compiled
def seed_torch(seed: int, device: torch.device) -> None:
    """Seed torch's CPU generator and that of one device, without waiting for the device.

    `torch.manual_seed` would reseed all devices, whose generators would not be restored, and takes 100 times as long.
    """
    torch.default_generator.manual_seed(seed)
    if (own := generator_of(device)) is not None:
        own.manual_seed(seed)


@not_compiled
def torch_state(device: torch.device) -> TorchState:
    """The states of torch's CPU generator and of a device's, if it has one, without waiting for the device."""
    own = generator_of(device)
    return torch.default_generator.get_state(), None if own is None else own.get_state()


@not_compiled
def set_torch_state(state: TorchState, device: torch.device) -> None:
    """Restore the generators to states that `torch_state` returned."""
    on_cpu, on_device = state
    torch.default_generator.set_state(on_cpu)
    if on_device is not None and (own := generator_of(device)) is not None:
        own.set_state(on_device)


@contextmanager
def generators_put_back(device: torch.device) -> Iterator[None]:
    """Restore the generators of Python, NumPy, torch's CPU and a device at the end of the block."""
    python, numpy, own = random.getstate(), np.random.get_state(), torch_state(device)
    try:
        yield
    finally:
        random.setstate(python)
        np.random.set_state(numpy)
        set_torch_state(own, device)


def split_seed(common: int, rank: int) -> int:
    """Derive a rank's seed from the common seed of its axis."""
    return (common + (rank + 1) * _SPREAD) % 2**63


def common_seed(split: int, rank: int) -> int:
    """The common seed that a rank's seed was derived from."""
    return (split - (rank + 1) * _SPREAD) % 2**63


class ForwardRandom:
    """Random numbers of a model's forwards in training; see [Note: random numbers of forwards].

    No communication. Ranks that compute the same activation must use the same number, drawn by one of them.

    Args:
        mesh: all ranks. Ranks of one replica and stage draw equal numbers; sharded activations use `SplitRandom`.
    """

    def __init__(self, mesh: ParallelMesh) -> None:
        self._device = mesh.device
        self._replica, self._num_replicas = mesh.rank("dp"), mesh.size("dp")
        self._is_needed = mesh.size("pp", "dp") > 1

    def draw(self, model: nn.Module) -> int:
        """Draw the number that seeds a batch's forwards; 0 leaves the generators unchanged."""
        return 1 + _drawn() if self._is_needed and model.training else 0

    @contextmanager
    def following(self, drawn: int) -> Iterator[Callable[[int, int], None] | None]:
        """Yield a function that each forward of a batch calls first, with its stage and microbatch; None seeds nothing.

        The generators are restored after the block. That takes 70 microseconds, and seeding takes 7 for each forward.

        Args:
            drawn: the number from `draw`, of one of the ranks that compute the batch.
        """
        if not drawn:
            yield None
            return

        def begin(stage: int, microbatch: int) -> None:
            # Microbatches are numbered over all replicas in the dataloader's order, so that each keeps its masks.
            self._seed(drawn, microbatch * self._num_replicas + self._replica, stage)

        with generators_put_back(self._device):
            yield begin

    @contextmanager
    def call(self, drawn: int) -> Iterator[None]:
        """Seed one call of an uncut model."""
        with self.following(drawn) as begin:
            if begin is not None:
                begin(0, 0)
            yield

    @not_compiled
    def _seed(self, *entropy: int) -> None:
        digest = hashlib.blake2b(struct.pack("=3q", *entropy), digest_size=8).digest()
        seed = int.from_bytes(digest, "little") >> 1
        random.seed(seed)
        np.random.seed(seed >> 31)  # different bits from the 32 of torch's CPU generator
        seed_torch(seed, self._device)


class SplitRandom:
    """Random state for a region whose activations are sharded over an axis.

    `enter` sets the default generators to a state that differs on every rank of the axis; `leave` restores the common
    state, advanced by one draw. The rank's state is derived from the common CPU generator and the rank only, so
    restoring that generator (as activation checkpointing does) reproduces the region's random numbers. No
    communication. The device is passed with each call, since a model may move to another.
    """

    def __init__(self, rank: int) -> None:
        self._rank = rank
        self._device = torch.device("cpu")
        # One slot, not a stack: regions do not nest, and recomputation may stop between enter and leave.
        self._common: TorchState | None = None

    @not_compiled
    def enter(self, device: torch.device) -> None:
        """Switch the generators of the CPU and of the region's device to this rank's own state."""
        drawn, self._device = _drawn(), device
        self._common = torch_state(self._device)
        seed_torch(split_seed(drawn, self._rank), self._device)

    @not_compiled
    def leave(self) -> None:
        """Switch back to the common state of the axis."""
        if self._common is None:
            raise AssertionError("a region was left that was not entered")
        common, self._common = self._common, None
        set_torch_state(common, self._device)

    def around(self, module: nn.Module) -> None:
        """Add hooks that enter and leave this random state around a module's training forwards."""

        def enter(module: nn.Module, args: tuple, kwargs: dict[str, Any]) -> None:
            if module.training:
                self.enter(device_of_call(args, kwargs))

        def leave(module: nn.Module, args: tuple, output: Any) -> None:
            if module.training:
                self.leave()

        module.register_forward_pre_hook(enter, with_kwargs=True)
        module.register_forward_hook(leave)

    def note(self) -> Callable[[], None]:
        """Return a function that restores the present state, entered or left, for recomputation inside a region."""
        return partial(setattr, self, "_common", self._common)

    @not_compiled
    def exchange(self) -> None:
        """Inside a region, swap the rank's own state and the common one; outside, do nothing."""
        if self._common is not None:
            present = torch_state(self._device)
            set_torch_state(self._common, self._device)
            self._common = present


def device_of_call(args: tuple, kwargs: dict[str, Any]) -> torch.device:
    """The device of the first tensor among a module's arguments."""
    return next(each.device for each in (*args, *kwargs.values()) if isinstance(each, torch.Tensor))


@not_compiled
def _drawn() -> int:
    """Draw a number from torch's CPU generator."""
    return int(torch.randint(0, 2**62, (), device="cpu"))
