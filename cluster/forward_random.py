"""Random state of forwards: equal for replicated activations, different for sharded ones and other microbatches.

[Note: random numbers of forwards] Training forwards of a boosted model draw from a stream: a seed, and the number of
calls so far. The ranks agree on the seed at boost, and it follows from torch's. Forwards are seeded by it, the number
of the call, the replica, the microbatch and the stage. Afterwards all generators are restored: a script's own random
numbers are those of a script without Echelon. Checkpoints have the stream. Recomputation of a layer restores the state
at the layer's start, as usual.

[Note: repeated calls] torch.utils.checkpoint around a boosted model calls it again in backward, and the masks must be
those of the first call. Nodes of autograd are numbered in the order of creation: the node that needs the recomputation
was created after its call began, and before the next one. The functions of torch's saved-tensor hooks tell which calls
were inside one checkpointed function. With use_reentrant=True a forward creates no nodes but the one of the checkpoint,
just before its calls.
"""

import hashlib
import random
import struct
from collections import deque
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from functools import partial
from itertools import count
from typing import Any, NamedTuple
from weakref import ReferenceType, ref

import numpy as np
import torch
from torch import nn

from .device import generator_of
from .gathering import gather_integers
from .mesh import ParallelMesh

# Odd 64-bit constant of SplitMix64 (Steele, Lea, Flood 2014), which makes seeds of neighbouring ranks far apart.
_SPREAD = 0x9E3779B97F4A7C15
_BOOSTS = count()  # of this process, whose models have different streams though torch was seeded once
_MOST_CALLS = 2**12  # calls of which one may be repeated in backward: more than a graph holds

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
    if (generator := generator_of(device)) is not None:
        generator.manual_seed(seed)


@not_compiled
def torch_state(device: torch.device) -> TorchState:
    """The states of torch's CPU generator and of a device's, if it has one, without waiting for the device."""
    generator = generator_of(device)
    return torch.default_generator.get_state(), None if generator is None else generator.get_state()


@not_compiled
def set_torch_state(state: TorchState, device: torch.device) -> None:
    """Restore the generators to states that `torch_state` returned."""
    on_cpu, on_device = state
    torch.default_generator.set_state(on_cpu)
    if on_device is not None and (generator := generator_of(device)) is not None:
        generator.set_state(on_device)


@contextmanager
def generators_put_back(device: torch.device) -> Iterator[None]:
    """Restore the generators of Python, NumPy, torch's CPU and a device at the end of the block."""
    python_state, numpy_state, torch_states = random.getstate(), np.random.get_state(), torch_state(device)
    try:
        yield
    finally:
        random.setstate(python_state)
        np.random.set_state(numpy_state)
        set_torch_state(torch_states, device)


def split_seed(common: int, rank: int) -> int:
    """Derive a rank's seed from the common seed of its axis."""
    return (common + (rank + 1) * _SPREAD) % 2**63


def common_seed(split: int, rank: int) -> int:
    """The common seed that a rank's seed was derived from."""
    return (split - (rank + 1) * _SPREAD) % 2**63


class _RandomCall(NamedTuple):
    """A training call that may be repeated in backward; see [Note: repeated calls]."""

    stream: tuple[int, int]  # the seed, and the number of the call
    first_node: int  # sequence number of the next node of autograd
    checkpoint_hook: ReferenceType | None  # equal for the calls in one checkpointed function; None outside
    has_graph: bool


class ForwardRandom:
    """Random numbers of a model's forwards in training; see [Note: random numbers of forwards].

    Construction gathers the seed over the world; nothing else communicates. Sharded activations use `SplitRandom`.

    Args:
        mesh: all ranks.
    """

    def __init__(self, mesh: ParallelMesh) -> None:
        self._device = mesh.device
        self._replica, self._num_replicas = mesh.rank("dp"), mesh.size("dp")
        # Not drawn from the generator, whose numbers are the script's.
        seed = _mixed(torch.default_generator.initial_seed() % 2**63, next(_BOOSTS))
        self._seed, self._num_calls = gather_integers((seed,))[0][0], 0
        self._calls = deque[_RandomCall](maxlen=_MOST_CALLS)
        # Graph task and node of a recomputation, and the number of calls repeated in it.
        self._repeated: tuple[tuple[int, int], int] = ((-1, -1), 0)

    def seed(self, seed: int) -> None:
        """Begin the stream of a seed, which must be equal on all ranks."""
        self._seed, self._num_calls = seed % 2**63, 0

    def state(self) -> dict[str, int]:
        """The position in the stream."""
        return {"seed": self._seed, "calls": self._num_calls}

    def load_state(self, state: Mapping[str, int]) -> None:
        """Continue from a position that `state` returned."""
        self._seed, self._num_calls = state["seed"], state["calls"]

    @contextmanager
    def following(self, model: nn.Module) -> Iterator[Callable[[int, int], None] | None]:
        """Yield a function that a call's forwards begin with, by stage and microbatch; None in evaluation mode.

        It seeds all generators. They are restored after the block.
        """
        if not model.training:
            yield None
            return
        stream = self._stream_of_call()

        def begin(stage: int, microbatch: int) -> None:
            # Microbatches are numbered over all replicas in the dataloader's order, so that each keeps its masks.
            self._seed_all(*stream, microbatch * self._num_replicas + self._replica, stage)

        with generators_put_back(self._device):
            yield begin

    @contextmanager
    def call(self, model: nn.Module) -> Iterator[None]:
        """Seed one call of an uncut model."""
        with self.following(model) as begin:
            if begin is not None:
                begin(0, 0)
            yield

    @not_compiled
    def _stream_of_call(self) -> tuple[int, int]:
        """Return the seed and the number of a call: the next one, or in a recomputation those of its forward."""
        node = torch._C._current_autograd_node()
        if node is not None and (calls := self._repeated_calls(node)):
            recomputation = (torch._C._current_graph_task_id(), node._sequence_nr())
            previous, number = self._repeated
            number = number + 1 if recomputation == previous else 0  # it repeats its calls in their order
            self._repeated = recomputation, number
            return calls[number % len(calls)].stream
        stream = self._seed, self._num_calls
        self._num_calls += 1
        hooks = torch._C._autograd._top_saved_tensors_default_hooks(True)
        checkpoint_hook = None if hooks is None else ref(hooks[1])
        self._calls.append(
            _RandomCall(stream, torch.autograd._get_sequence_nr(), checkpoint_hook, torch.is_grad_enabled())
        )
        return stream

    def _repeated_calls(self, node: Any) -> list[_RandomCall]:
        """Return the calls of the checkpointed function that a node of autograd recomputes; none if it does not.

        Raises:
            RuntimeError: the function is inside of one with use_reentrant=True, and its calls are unknown.
        """
        number = node._sequence_nr()
        if node.name() == "CheckpointFunctionBackward":
            calls = [call for call in self._calls if call.first_node == number + 1 and not call.has_graph]
            if calls:
                return calls
            raise RuntimeError(
                "torch.utils.checkpoint with use_reentrant=True repeats a call of the model inside of another "
                "checkpoint, and its random numbers are unknown: give use_reentrant=False"
            )
        last = next((call for call in reversed(self._calls) if call.first_node <= number), None)
        if last is None or last.checkpoint_hook is None or (hook := last.checkpoint_hook()) is None:
            return []
        return [
            call
            for call in self._calls
            if call.checkpoint_hook is not None and call.checkpoint_hook() is hook
        ]

    @not_compiled
    def _seed_all(self, *entropy: int) -> None:
        seed = _mixed(*entropy)
        random.seed(seed)
        np.random.seed(seed >> 31)  # different bits from the 32 of torch's CPU generator
        seed_torch(seed, self._device)


def _mixed(*numbers: int) -> int:
    """Hash numbers below 2**63 to one."""
    digest = hashlib.blake2b(struct.pack(f"={len(numbers)}q", *numbers), digest_size=8).digest()
    return int.from_bytes(digest, "little") >> 1


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
        self._other: TorchState | None = None  # inside a region: the state that is not in use

    @not_compiled
    def enter(self, device: torch.device) -> None:
        """Switch the generators of the CPU and of the region's device to this rank's own state."""
        drawn, self._device = _drawn(), device
        self._other = torch_state(self._device)
        seed_torch(split_seed(drawn, self._rank), self._device)

    @not_compiled
    def leave(self) -> None:
        """Switch back to the common state of the axis."""
        if self._other is None:
            raise AssertionError("a region was left that was not entered")
        common, self._other = self._other, None
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

    def restorer(self) -> Callable[[], None]:
        """Return a function that restores the present state, entered or left, for recomputation inside a region."""
        return partial(setattr, self, "_other", self._other)

    @not_compiled
    def exchange(self) -> None:
        """Inside a region, swap the rank's own state and the common one; outside, do nothing. Called in pairs."""
        if self._other is not None:
            present = torch_state(self._device)
            set_torch_state(self._other, self._device)
            self._other = present


def device_of_call(args: tuple, kwargs: dict[str, Any]) -> torch.device:
    """The device of the first tensor among a module's arguments."""
    return next(value.device for value in (*args, *kwargs.values()) if isinstance(value, torch.Tensor))


@not_compiled
def _drawn() -> int:
    """Draw a number from torch's CPU generator."""
    return int(torch.randint(0, 2**62, (), device="cpu"))
