"""The axis over which sequences are sharded: positions of each rank, the current length, random numbers per shard.

[Note: gradients over the sequence axis] Each rank of the sequence axis differentiates the same loss, and the optimizer
averages the accumulated gradients. After the last layer all ranks compute the same gradients, so the mean is right.
Before it a rank accumulates only the contribution of its shard. So gradients there are multiplied by the number of
ranks, at the point where the sequence was gathered. Gradients of tensors that enter the model are averaged where they
enter: nothing does so outside. On the tensor axis there is no averaging: replicated parameters have complete gradients
on every rank.
"""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.functional import pad

from ...cluster.collectives import begin_gather, paired
from ...cluster.forward_random import SplitRandom, common_seed, device_of_call, seed_torch, split_seed
from ...cluster.placement import round_up
from ...cluster.ring import Rings

# B batch, S sequence

# Advice if a model cannot be trained under a mode.
INSTEAD = "use another sequence_parallelism_mode, or leave enable_sequence_parallelism out"
_DIM = 1  # the sequence dimension of hidden states (B, S, H)
_ATTRIBUTE = "_echelon_sequence_axis"
# Substrings in the names of attributes and settings with probabilities or widths of random draws.
_RANDOM_SETTINGS = ("drop", "jitter")
# Modules that drop entire samples, whose shards are on all ranks.
SAMPLE_DROPPER = "DropPath"


@dataclass(frozen=True, kw_only=True)
class SequenceOrder:
    """Assignment of positions to ranks: equal shards of a sequence, padded at its end if it does not divide.

    A stretch is a contiguous range of positions.

    Args:
        size: number of ranks of the axis.
        is_zigzag: rank r has the stretches r and 2·size−1−r of 2·size equal ones, so that under a causal mask all
            ranks compute the same amount of attention (the load balancing of Llama 3, arXiv:2407.21783, section
            3.3.2). Otherwise rank r has the r-th of `size` stretches.
    """

    size: int
    is_zigzag: bool = False

    def padded(self, length: int) -> int:
        """Return the length of a sequence with padding."""
        return round_up(length, self._num_stretches)

    def stretches(self, rank: int, length: int) -> tuple[range, ...]:
        """Return the positions of a rank's shard, in order; positions from `length` on are padding."""
        width = self.padded(length) // self._num_stretches
        return tuple(range(width * index, width * (index + 1)) for index in self._stretches_of_rank(rank))

    def shard(self, x: Tensor, dim: int, rank: int, *, padding: int = 0) -> Tensor:
        """Return a rank's shard of a full sequence along `dim`, contiguous; `padding` is the value at its end."""
        dim %= x.ndim
        missing = self.padded(x.shape[dim]) - x.shape[dim]
        padded = pad(x, (0, 0) * (x.ndim - 1 - dim) + (0, missing), value=padding) if missing else x
        stretches = padded.chunk(self._num_stretches, dim)
        return torch.cat([stretches[index] for index in self._stretches_of_rank(rank)], dim).contiguous()

    def join(self, shards: Sequence[Tensor], dim: int, length: int) -> Tensor:
        """Return the full sequence from the shards of all ranks in order of rank, without padding."""
        stretches: list[Tensor] = [shards[0]] * self._num_stretches  # by index; all are replaced below
        for rank, shard in enumerate(shards):
            indices = self._stretches_of_rank(rank)
            for index, stretch in zip(indices, shard.chunk(len(indices), dim), strict=True):
                stretches[index] = stretch
        return torch.cat(stretches, dim).narrow(dim, 0, length)

    @property
    def _num_stretches(self) -> int:
        """Number of equal stretches of a sequence."""
        return 2 * self.size if self.is_zigzag else self.size

    def _stretches_of_rank(self, rank: int) -> tuple[int, ...]:
        """Return the indices of a rank's stretches."""
        return (rank, 2 * self.size - 1 - rank) if self.is_zigzag else (rank,)


class SequenceAxis:
    """The ranks over which the sequences of one stack of layers are sharded.

    Args:
        group: the ranks.
        order: the positions of each rank.
        rings: the same ranks as rings for ring attention, see cluster/ring.py; None is a single ring.

    Attributes:
        length: length of the current sequence, without padding; 0 before the first.
        gathers_after_last_layer: True if the sequence is gathered after the last layer.
    """

    def __init__(self, group: dist.ProcessGroup, order: SequenceOrder, rings: Rings | None = None) -> None:
        if order.size != group.size():
            raise AssertionError(f"the order is for {order.size} ranks, but the group has {group.size()}")
        self.group, self.order, self.length = group, order, 0
        self.rings: Rings = rings or (group,)
        self.gathers_after_last_layer = True

    @property
    def rank(self) -> int:
        """This rank's place in the group."""
        return self.group.rank()

    @property
    def shard_length(self) -> int:
        """Length of a rank's shard of the current sequence, with padding."""
        return self.order.padded(self.length) // self.order.size

    def shard(self, x: Tensor, dim: int, *, padding: int = 0) -> Tensor:
        """Return this rank's shard of a full sequence along `dim`, contiguous; `padding` is the value at its end."""
        return self.order.shard(x, dim, self.rank, padding=padding)

    def gather(self, shard: Tensor, dim: int, length: int) -> Tensor:
        """Return the full sequence of this length, contiguous. One all-gather of the shards; no gradient."""
        shards = begin_gather(shard, self.group).wait()
        return self.order.join(shards.unbind(0), dim, length).contiguous()

    @contextmanager
    def computing(self, length: int) -> Iterator[None]:
        """Inside the block, set `length` to that of an earlier forward, whose layers backward recomputes."""
        previous_length, self.length = self.length, length
        try:
            yield
        finally:
            self.length = previous_length

    def mark(self, module: nn.Module) -> None:
        """Mark a layer, and the modules in it, as computing on a sequence shard; see `axis_of`.

        Not modules without parameters and submodules: an activation may be that of all models of a class (XLM's is).
        """
        for submodule in module.modules():
            if [*submodule.parameters(recurse=False), *submodule.children()]:
                setattr(submodule, _ATTRIBUTE, self)


def axis_of(module: Any) -> SequenceAxis | None:
    """Return the axis over which a module's sequences are sharded; None if it gets full sequences."""
    return getattr(module, _ATTRIBUTE, None)


def shard_sequence(sequence: Tensor, axis: SequenceAxis, *, is_on_sequence_axis: bool) -> Tensor:
    """Return this rank's shard of the current sequence, (B, S, H), padded with its last position.

    No collective in forward. In backward one all-gather, or none on the sequence axis:
    see [Note: gradients over the sequence axis].

    Args:
        sequence: the full sequence, equal on all ranks.
        axis: the axis of the ranks.
        is_on_sequence_axis: False on the tensor axis.
    """
    length = axis.length

    def cut(x: Tensor) -> Tensor:
        """Forward: return this rank's shard."""
        missing = axis.order.padded(length) - length
        # Not zeros: a norm of a constant divides by its epsilon, in 16 bits that is infinite, and times 0 gives NaN.
        padding = x[:, -1:].expand(-1, missing, -1)
        return axis.shard(torch.cat([x, padding], _DIM) if missing else x, _DIM)

    def join(gradient: Tensor) -> Tensor:
        """Backward: gather the gradient; on the sequence axis return the local one beside zeros for other ranks."""
        if not is_on_sequence_axis:
            return axis.gather(gradient, _DIM, length)
        zeros = torch.zeros_like(gradient)
        shards = [gradient if rank == axis.rank else zeros for rank in range(axis.order.size)]
        return axis.order.join(shards, _DIM, length)

    return paired(sequence, cut, join)


def gather_sequence(shard: Tensor, axis: SequenceAxis, length: int, *, is_on_sequence_axis: bool) -> Tensor:
    """Gather the full sequence, (B, S, …), from the shards of all ranks. One all-gather, none in backward.

    Args:
        shard: this rank's shard.
        axis: the axis of the ranks.
        length: length of the full sequence.
        is_on_sequence_axis: False on the tensor axis; see [Note: gradients over the sequence axis].
    """

    def cut(gradient: Tensor) -> Tensor:
        """Backward: return the gradient of this rank's shard."""
        shard_gradient = axis.shard(gradient, _DIM)
        return times_num_ranks(shard_gradient, axis) if is_on_sequence_axis else shard_gradient

    return paired(shard, lambda shard: axis.gather(shard, _DIM, length), cut)


def times_num_ranks(gradient: Tensor, axis: SequenceAxis) -> Tensor:
    """Multiply a gradient by the number of ranks of the sequence axis; see [Note: gradients over the sequence axis]."""
    return gradient * axis.order.size


def draws_random_numbers(layer: nn.Module) -> bool:
    """Return True if a layer may draw random numbers in training.

    It may if one of its attributes, or of its config's, is a positive float named like a dropout or jitter.
    """
    owners: list[Any] = [vars(module) for module in layer.modules()]
    owners += [vars(owner["config"]) for owner in owners if hasattr(owner.get("config"), "__dict__")]
    settings = [setting for owner in owners for setting in (*owner.items(), ("dropout", owner.get("p")))]
    probabilities = [value for name, value in settings if any(word in name for word in _RANDOM_SETTINGS)]
    return any(isinstance(probability, float) and probability > 0 for probability in probabilities)


def sample_droppers(layer: nn.Module) -> list[str]:
    """Return the paths of modules that drop entire samples: all ranks of a sequence must draw the same numbers."""
    return [name for name, module in layer.named_modules() if type(module).__name__.endswith(SAMPLE_DROPPER)]


class ShardRandom:
    """Hooks by which a layer draws random numbers that differ between ranks."""

    @staticmethod
    def from_native_module(module: nn.Module, process_group: dist.ProcessGroup) -> nn.Module:
        """Add hooks that switch to this rank's random state before the layer, and back after it; see `SplitRandom`."""
        SplitRandom(process_group.rank()).around(module)
        return module


class CommonRandom:
    """Hooks by which a module inside a `ShardRandom` layer draws the same random numbers on every rank.

    The common state is derived from the local one, and after the module the local one from the common one. So no state
    is saved, and recomputing the layer draws the same numbers.
    """

    @staticmethod
    def from_native_module(
        module: nn.Module, process_group: dist.ProcessGroup, *, layer: nn.Module
    ) -> nn.Module:
        """Add hooks that switch to the common random state before the module, and back after it.

        Args:
            module: a module inside `layer`.
            process_group: the axis of the sequences.
            layer: the `ShardRandom` layer; the hooks do nothing while it does not train.
        """
        rank = process_group.rank()

        def enter(module: nn.Module, args: tuple, kwargs: dict[str, Any]) -> None:
            if layer.training:
                seed_torch(common_seed(torch.initial_seed(), rank), device_of_call(args, kwargs))

        def leave(module: nn.Module, args: tuple, kwargs: dict[str, Any], output: Any) -> None:
            if layer.training:
                seed = split_seed(int(torch.randint(0, 2**62, (), device="cpu")), rank)
                seed_torch(seed, device_of_call(args, kwargs))

        module.register_forward_pre_hook(enter, with_kwargs=True)
        module.register_forward_hook(leave, with_kwargs=True)
        return module
