"""Modules of a layer that compute on whole sequences, between others that compute on parts of them."""

import inspect
from typing import Any

import torch.distributed as dist
from torch import Tensor, nn
from torch.autograd import Function
from torch.autograd.function import once_differentiable

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
        inputs = list(inspect.signature(module.forward).parameters)

        def gather(module: nn.Module, args: tuple, kwargs: dict[str, Any]) -> tuple[tuple, dict[str, Any]]:
            if args:
                return (_Gather.apply(args[0], sequence), *args[1:]), kwargs
            name = next(name for name in inputs if isinstance(kwargs.get(name), Tensor))
            return args, {**kwargs, name: _Gather.apply(kwargs[name], sequence)}

        def scatter(module: nn.Module, args: tuple, output: Any) -> Any:
            if isinstance(output, tuple):
                return (_Scatter.apply(output[0], sequence), *output[1:])
            return _Scatter.apply(output, sequence)

        module.register_forward_pre_hook(gather, with_kwargs=True)
        module.register_forward_hook(scatter)
        return module


class _Gather(Function):
    """Parts in, whole out; backward this rank's part of the gradient, which is whole and equal on every rank."""

    @staticmethod
    def forward(ctx: Any, part: Tensor, sequence: RegionSequence) -> Tensor:
        ctx.axis = sequence.axis
        return sequence.begin_whole(part, sequence.length_of(part))()

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None]:
        return ctx.axis.own(gradient, 1), None


class _Scatter(Function):
    """The adjoint of `_Gather`."""

    @staticmethod
    def forward(ctx: Any, whole: Tensor, sequence: RegionSequence) -> Tensor:
        ctx.sequence, ctx.length = sequence, whole.shape[1]
        return sequence.axis.own(whole, 1)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None]:
        return ctx.sequence.begin_whole(gradient, ctx.length)(), None
