"""Modules of a layer that compute on whole sequences, between others that compute on parts of them."""

import inspect
from typing import Any

import torch.distributed as dist
from torch import Tensor, nn

from .boundary import put_together, take_apart
from .regions import RegionSequence


class WholeSequence:
    """Marks a module that is given whole sequences, the same on every rank, and of whose output each keeps its part.

    For what regions alone cannot spread: experts, which take tokens without their places, and modules that use their
    input whole besides. Forward gathers at the entry, backward at the end; that is 2·(T−1)/T·B·S·H more than regions.
    """

    @staticmethod
    def from_native_module(
        module: nn.Module, process_group: dist.ProcessGroup, *, sequence: RegionSequence
    ) -> nn.Module:
        """Gather its first tensor, scatter what it returns (of a tuple the first), by hooks.

        Args:
            module: called with parts (B, s, H), by hooks with (B, S, H).
            process_group: the tensor axis.
            sequence: says how it is spread.
        """
        inputs, axis = list(inspect.signature(module.forward).parameters), sequence.axis

        def whole_of(part: Tensor) -> Tensor:
            return put_together(part, axis, sequence.length_of(part), is_data=False)

        def gather(module: nn.Module, args: tuple, kwargs: dict[str, Any]) -> tuple[tuple, dict[str, Any]]:
            if args:
                return (whole_of(args[0]), *args[1:]), kwargs
            name = next(name for name in inputs if isinstance(kwargs.get(name), Tensor))
            return args, {**kwargs, name: whole_of(kwargs[name])}

        def scatter(module: nn.Module, args: tuple, output: Any) -> Any:
            if isinstance(output, tuple):
                return (take_apart(output[0], axis, is_data=False), *output[1:])
            return take_apart(output, axis, is_data=False)

        module.register_forward_pre_hook(gather, with_kwargs=True)
        module.register_forward_hook(scatter)
        return module
