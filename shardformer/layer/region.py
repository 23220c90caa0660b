"""Regions: stretches of a layer whose activations are split between one entry and one exit.

A region's entry is a hook on the module that takes the replicated input; its exit is the row-split layer
that ends it (linear.py). So q, k and v together cost one reduction in backward.
"""

from typing import Any

import torch.distributed as dist
from torch import Tensor, nn

from ...cluster.collectives import copy_to
from ...cluster.placement import Shared, place
from ...cluster.random import SplitRandom


class Region:
    """Marks a module as the entry of a region, by a hook; the module itself stays as it is."""

    @staticmethod
    def from_native_module(
        module: nn.Module, process_group: dist.ProcessGroup, *, split_random: SplitRandom | None = None
    ) -> nn.Module:
        """Let the module's first tensor pass `copy_to` (backward all-reduce) before its forward.

        Args:
            module: called with the replicated tensor as its first argument.
            process_group: the tensor axis.
            split_random: random state to switch to until the region's exit, where the region drops at random.
        """

        def enter(module: nn.Module, args: tuple, kwargs: dict[str, Any]) -> tuple[tuple, dict[str, Any]]:
            if split_random is not None and module.training:
                split_random.enter()
            if args:
                return (copy_to(args[0], process_group), *args[1:]), kwargs
            name = next(key for key, value in kwargs.items() if isinstance(value, Tensor))
            return args, {**kwargs, name: copy_to(kwargs[name], process_group)}

        module.register_forward_pre_hook(enter, with_kwargs=True)
        return module


class PartialGradient:
    """Marks the parameters of a replicated module that works inside a region: their gradients are to be summed."""

    @staticmethod
    def from_native_module(module: nn.Module, process_group: dist.ProcessGroup) -> nn.Module:
        """Place the module's parameters as `Shared`; the module itself stays as it is."""
        for parameter in module.parameters():
            place(parameter, Shared(size=process_group.size()), process_group.rank())
        return module
