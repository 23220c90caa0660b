"""Random state of forwards: equal where activations are replicated, different where they are split or others'.

[Note: random numbers of forwards] Where there are several replicas or stages, every batch draws one number from torch's
CPU generator, and what the model draws while it trains follows from that number, the replica, the microbatch and the
stage. Afterwards all generators are put back, so a script finds equal ones on all ranks. Whatever restores the CPU
generator reproduces the masks: loading a checkpoint of the run, or activation checkpointing around the whole model.
Recomputation of a layer restores the state in which the layer began, as ever. One replica of one stage draws from the
generators themselves, as a plain loop does.
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

# Odd 64-bit constant of SplitMix64 (Steele, Lea, Flood 2014): spreads neighbouring ranks over the seed space.
_SPREAD = 0x9E3779B97F4A7C15

TorchState = tuple[torch.Tensor, torch.Tensor | None]

# For what a compiled model (torch.compile) calls as it stands; the compiler fails at seeds. Private to torch, whose
# torch.compiler.disable would import the compiler together with this file.
not_compiled = torch._disable_dynamo


@not_compiled
def seed_torch(seed: int, device: torch.device) -> None:
    """Seed torch's CPU generator and that of one device; waits for no device.

    `torch.manual_seed` would reseed all devices, whose generators nobody puts back, and takes 100 times as long.
    """
    torch.default_generator.manual_seed(seed)
    if (own := generator_of(device)) is not None:
        own.manual_seed(seed)


@not_compiled
def torch_state(device: torch.device) -> TorchState:
    """The states of torch's CPU generator and of a device's, if that has one; waits for no device."""
    own = generator_of(device)
    return torch.default_generator.get_state(), None if own is None else own.get_state()


@not_compiled
def set_torch_state(state: TorchState, device: torch.device) -> None:
    """Let these generators go on from states that `torch_state` returned."""
    on_cpu, on_device = state
    torch.default_generator.set_state(on_cpu)
    if on_device is not None and (own := generator_of(device)) is not None:
        own.set_state(on_device)


@contextmanager
def generators_put_back(device: torch.device) -> Iterator[None]:
    """Let the generators of Python, NumPy, torch's CPU and a device go on after the block as before it."""
    python, numpy, own = random.getstate(), np.random.get_state(), torch_state(device)
    try:
        yield
    finally:
        random.setstate(python)
        np.random.set_state(numpy)
        set_torch_state(own, device)


def split_seed(common: int, rank: int) -> int:
    """The seed of a rank of an axis from one that all have in common."""
    return (common + (rank + 1) * _SPREAD) % 2**63


def common_seed(split: int, rank: int) -> int:
    """The seed that a rank's own came from."""
    return (split - (rank + 1) * _SPREAD) % 2**63


class ForwardRandom:
    """Random numbers of a model's forwards in training; see [Note: random numbers of forwards].

    Nothing communicates. Ranks that compute one activation have to use one number: that of one of them.

    Args:
        mesh: all ranks. Those of one replica and stage draw alike; what they split is `SplitRandom`'s.
    """

    def __init__(self, mesh: ParallelMesh) -> None:
        self._device = mesh.device
        self._replica, self._num_replicas = mesh.rank("dp"), mesh.size("dp")
        self._is_needed = mesh.size("pp", "dp") > 1

    def draw(self, model: nn.Module) -> int:
        """The number that a batch's random numbers follow from; 0 leaves the generators as they are."""
        return 1 + _drawn() if self._is_needed and model.training else 0

    @contextmanager
    def following(self, drawn: int) -> Iterator[Callable[[int, int], None] | None]:
        """Give a batch what each of its forwards calls first, with its stage and microbatch; None leaves all as it is.

        The generators are put back after the block. That takes 70 microseconds, and seeding them 7 for each forward.

        Args:
            drawn: returned by `draw`, on one of the ranks that compute the batch together.
        """
        if not drawn:
            yield None
            return

        def begin(stage: int, microbatch: int) -> None:
            # Counted over the replicas as a dataloader deals out samples, so that one in a microbatch keeps its masks.
            self._seed(drawn, microbatch * self._num_replicas + self._replica, stage)

        with generators_put_back(self._device):
            yield begin

    @contextmanager
    def call(self, drawn: int) -> Iterator[None]:
        """Around one call of a whole model."""
        with self.following(drawn) as begin:
            if begin is not None:
                begin(0, 0)
            yield

    @not_compiled
    def _seed(self, *entropy: int) -> None:
        digest = hashlib.blake2b(struct.pack("=3q", *entropy), digest_size=8).digest()
        seed = int.from_bytes(digest, "little") >> 1
        random.seed(seed)
        np.random.seed(seed >> 31)  # other bits than the 32 that torch's CPU generator takes
        seed_torch(seed, self._device)


class SplitRandom:
    """Random state for the inside of a region whose activations are split over an axis.

    `enter` leaves the default generators with a state that differs on every rank of the axis, `leave` puts
    the common state back, one draw further. The split state is derived from the common CPU generator and
    the rank alone, so whatever restores that generator (activation checkpointing does) reproduces the
    region's random numbers too. Nothing communicates. The device is that of each call: a model may move to another.
    """

    def __init__(self, rank: int) -> None:
        self._rank = rank
        self._device = torch.device("cpu")
        # One slot and not a stack: regions do not nest, and recomputation may stop between enter and leave.
        self._common: TorchState | None = None

    @not_compiled
    def enter(self, device: torch.device) -> None:
        """Switch to this rank's own state, of the CPU's generator and that of the device which computes the region."""
        drawn, self._device = _drawn(), device
        self._common = torch_state(self._device)
        seed_torch(split_seed(drawn, self._rank), self._device)

    @not_compiled
    def leave(self) -> None:
        """Switch back to the state that all ranks of the axis have in common."""
        if self._common is None:
            raise AssertionError("a region was left that was not entered")
        common, self._common = self._common, None
        set_torch_state(common, self._device)

    def around(self, module: nn.Module) -> None:
        """Let what a module draws while it trains differ from rank to rank, by hooks."""

        def enter(module: nn.Module, args: tuple, kwargs: dict[str, Any]) -> None:
            if module.training:
                self.enter(device_of_call(args, kwargs))

        def leave(module: nn.Module, args: tuple, output: Any) -> None:
            if module.training:
                self.leave()

        module.register_forward_pre_hook(enter, with_kwargs=True)
        module.register_forward_hook(leave)

    def note(self) -> Callable[[], None]:
        """Return what says again whether the region is entered, as now: for a part of it that is recomputed."""
        return partial(setattr, self, "_common", self._common)

    @not_compiled
    def exchange(self) -> None:
        """Inside of a region, switch to the common state, and the next time back to this rank's own; else nothing."""
        if self._common is not None:
            present = torch_state(self._device)
            set_torch_state(self._common, self._device)
            self._common = present


def device_of_call(args: tuple, kwargs: dict[str, Any]) -> torch.device:
    """The device of the first tensor that a module is called with, where it computes."""
    return next(each.device for each in (*args, *kwargs.values()) if isinstance(each, torch.Tensor))


@not_compiled
def _drawn() -> int:
    """A number from torch's CPU generator."""
    return int(torch.randint(0, 2**62, (), device="cpu"))
