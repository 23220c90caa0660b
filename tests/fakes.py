"""Fake tensors without numbers, and a fake process group with one real rank.

Used together, boost and a step compute nothing, allocate nothing and wait for nobody.
"""

from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from datetime import timedelta
from typing import Any
from unittest.mock import patch

import numpy as np
import torch
import torch.distributed as dist
from torch import nn
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode
from torch.testing._internal.distributed.fake_pg import FakeStore
from torch.utils._python_dispatch import TorchDispatchMode

from echelon.cluster.collectives import InFlight
from echelon.cluster.device import default_device
from echelon.zero import reduced_gradients

Specs = tuple[tuple[torch.Size, torch.dtype], ...]  # shapes and dtypes of the tensors of one transfer


@contextmanager
def one_rank(backends: str, rank: int, world_size: int, *, arrives: Specs = ()) -> Iterator[None]:
    """Simulate one rank of a process group without the other ranks.

    Collectives return at once, with this rank's inputs as the inputs of all ranks.

    Args:
        backends: backends of the group; torch's `fake` for every kind of device.
        rank, world_size: rank and size of the group.
        arrives: tensors of a microbatch that the previous stage sends; their values are random.
    """
    dist.init_process_group(backends, store=FakeStore(), rank=rank, world_size=world_size)
    channel = "echelon.pipeline.transport._Channel."
    with ExitStack() as stack:
        for target, other in (
            ("echelon.cluster.mesh.start_watch", lambda: None),
            ("echelon.cluster.failures.start_watch", lambda: None),
            ("echelon.cluster.mesh.default_timeout", lambda: timedelta(minutes=10)),
            ("echelon.cluster.gathering.begin_gather_integers", _local_row),
            ("echelon.cluster.gathering.gather_objects", lambda value: [value] * dist.get_world_size()),
            ("echelon.zero.reduced_gradients.norm_over_all_ranks", _agreed_norm),
            # In this group no transfer ever completes, so sent tensors would be kept.
            ("echelon.pipeline.transport.PendingTransfer.is_completed", True),
            (f"{channel}_receive_description", lambda *_: arrives),
            (f"{channel}_empty", _drawn),
        ):
            stack.enter_context(patch(target, other))
        try:
            yield
        finally:
            dist.destroy_process_group()


def _local_row(
    values: Sequence[int], group: dist.ProcessGroup | None = None, call: str | None = None
) -> InFlight[list[tuple[int, ...]]]:
    """Return what `begin_gather_integers` would if all ranks had this rank's values."""
    rows = [tuple(values)] * dist.get_world_size(group)
    return InFlight(None, torch.empty(0), lambda _: rows)


_norm_over_all_ranks = reduced_gradients.norm_over_all_ranks


def _agreed_norm(*arguments: Any, **named: Any) -> tuple[torch.Tensor, torch.Tensor]:
    """Call `norm_over_all_ranks` with the checksums of one rank only: absent ranks would seem to differ."""
    norm, is_agreed = _norm_over_all_ranks(*arguments, **named)
    return norm, torch.ones_like(is_agreed)


def _drawn(channel: Any, specs: Specs) -> tuple[torch.Tensor, ...]:
    return tuple([torch.randn(shape, dtype=dtype, device=default_device()) for shape, dtype in specs])


@contextmanager
def fake_tensors(*, flag: bool) -> Iterator[None]:
    """Run boost and steps on fake tensors, which have no numbers.

    Args:
        flag: value of every bool that is read on the host. Other numbers are 1, bytes 0, and all tensors are equal.
    """
    with ExitStack() as stack:
        stack.enter_context(FakeTensorMode(allow_non_fake_inputs=True))
        stack.enter_context(_Read(flag))
        stack.enter_context(patch.object(nn.Module, "_apply", _applied))
        for target, other in (
            ("echelon.plugins.engine.PipelineLoss", FakeTensor),
            # It reads a number of replicas, which would be 1.
            ("echelon.plugins.engine.PipelineEngine._require_one_kind", lambda *_, **__: None),
            ("echelon.shardformer.layers.parallel_module.LazyTensor", FakeTensor),
        ):
            stack.enter_context(patch(target, other))
        stack.enter_context(
            patch.object(FakeTensor, "numpy", lambda tensor: np.zeros(tuple(tensor.shape), np.uint8))
        )
        yield


class _Read(TorchDispatchMode):
    """Return 1 for numbers of fake tensors that are read on the host, and True for comparisons of tensors."""

    def __init__(self, flag: bool) -> None:
        super().__init__()
        self._flag = flag

    def __torch_dispatch__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if any(isinstance(argument, FakeTensor) for argument in args):
            if function is torch.ops.aten._local_scalar_dense.default:
                kind = args[0].dtype
                return self._flag if kind is torch.bool else 1.0 if kind.is_floating_point else 1
            if function is torch.ops.aten.equal.default:
                return True
        return function(*args, **(kwargs or {}))


def _applied(module: nn.Module, function: Callable[..., Any], recurse: bool = True) -> nn.Module:
    """Replace `Module._apply`, which would swap tensors: fake tensors do not allow it."""
    for child in module.children() if recurse else ():
        child._apply(function)
    for name, parameter in module._parameters.items():
        made = parameter if parameter is None else function(parameter.detach())
        if made is not None and made.is_meta:  # a layer of another stage
            module._parameters[name] = nn.Parameter(made, parameter.requires_grad)
        elif made is not None and parameter is not None:
            parameter.data = made  # on the same device: torch cannot move a fake parameter to another one
    for name, buffer in module._buffers.items():
        module._buffers[name] = None if buffer is None else function(buffer)
    return module
