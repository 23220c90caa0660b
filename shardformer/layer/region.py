"""Regions: stretches of a layer whose activations are split between one entry and one exit.

A region's entry is a hook on the module that takes the replicated input; its exit is the row-split layer
that ends it (linear.py). So q, k and v together cost one reduction in backward.
"""

import inspect
from typing import Any

import torch.distributed as dist
from torch import Tensor, nn

from ...cluster.collectives import copy_to, reduce_from
from ...cluster.placement import Shard, Shared, place
from ...cluster.random import SplitRandom


class Region:
    """Marks a module as the entry of a region, by a hook; the module itself stays as it is."""

    @staticmethod
    def from_native_module(
        module: nn.Module,
        process_group: dist.ProcessGroup,
        *,
        split_random: SplitRandom | None = None,
        second_input: str | None = None,
    ) -> nn.Module:
        """Let the module's first tensor pass `copy_to` (backward all-reduce) before its forward.

        Args:
            module: called with the replicated tensor as its first argument.
            process_group: the tensor axis.
            split_random: random state to switch to until the region's exit, where the region drops at random.
            second_input: the name of another replicated argument that passes `copy_to` too, where it is given.
        """
        inputs = list(inspect.signature(module.forward).parameters)
        second = (second_input, inputs.index(second_input)) if second_input is not None else ()

        def place_of(key: int | str) -> int:
            """Where an argument stands in the signature, however it is given."""
            if isinstance(key, int):
                return key
            return inputs.index(key) if key in inputs else len(inputs)

        def enter(module: nn.Module, args: tuple, kwargs: dict[str, Any]) -> tuple[tuple, dict[str, Any]]:
            if split_random is not None and module.training:
                split_random.enter()
            given: dict[Any, Any] = {**dict(enumerate(args)), **kwargs}
            tensors = (key for key in given if key not in second and isinstance(given[key], Tensor))
            first = min(tensors, key=place_of)
            for key in (first, *second):  # in one order on all ranks: backward all-reduces in that order too
                if isinstance(given.get(key), Tensor):
                    given[key] = copy_to(given[key], process_group)
            return tuple(given[index] for index in range(len(args))), {name: given[name] for name in kwargs}

        module.register_forward_pre_hook(enter, with_kwargs=True)
        return module


class RegionExit:
    """Marks a module whose output is a part of a sum on each rank, by a hook; the module itself stays as it is."""

    @staticmethod
    def from_native_module(module: nn.Module, process_group: dist.ProcessGroup) -> nn.Module:
        """Sum the tensor that the module returns over the group (forward all-reduce)."""
        module.register_forward_hook(lambda module, args, output: reduce_from(output, process_group))
        return module


class PartialGradient:
    """Marks the parameters of a replicated module that works inside a region: their gradients are to be summed."""

    @staticmethod
    def from_native_module(module: nn.Module, process_group: dist.ProcessGroup) -> nn.Module:
        """Place the module's parameters as `Shared`; the module itself stays as it is."""
        for parameter in module.parameters():
            place(parameter, Shared(size=process_group.size()), process_group.rank())
        return module


class SplitParameter:
    """Cuts one parameter of a module inside a region; the module computes with this rank's piece as with the whole."""

    @staticmethod
    def from_native_module(
        module: nn.Module, process_group: dist.ProcessGroup, *, name: str, dim: int, num_blocks: int = 1
    ) -> nn.Module:
        """Place the parameter as a `Shard`; the module itself stays as it is.

        Args:
            module: holds the parameter itself, not in a sub-module.
            process_group: the tensor axis.
            name: of the parameter.
            dim: the dimension that is cut.
            num_blocks: how many blocks of equal length it fuses along that dimension, each cut on its own.
        """
        parameter = module.get_parameter(name)
        blocks = (parameter.shape[dim] // num_blocks,) * num_blocks
        shard = Shard(size=process_group.size(), dim=dim, blocks=blocks)
        place(parameter, shard, process_group.rank())
        return module
