"""The first module whose output, or whose output's gradient, is not finite: by rank and microbatch.

[Note: without waiting] Hooks note on the device whether a tensor is the first of its rank with a NaN or an infinity.
The host reads one number at the end of the block. Recomputed forwards are not looked at again.
"""

from collections import Counter
from collections.abc import Iterator, Mapping
from contextlib import ExitStack, contextmanager
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_leaves

from ..cluster.failures import naming_failures
from ..cluster.gathering import gather_objects
from ..cluster.hooks import mark_internal
from ..pipeline.stage import Stage, local_stages
from ..pipeline.stand_ins import StandIn

_IN_FORWARD, _IN_BACKWARD = "the output", "the gradient of the output"


class Look(NamedTuple):
    """One tensor that was looked at.

    Args:
        what: _IN_FORWARD or _IN_BACKWARD.
        stage: the pipeline stage that computes.
        path: the module.
        microbatch: its call of the module in this block, from 0: the microbatch of a single call of the model.
    """

    what: str
    stage: int
    path: str
    microbatch: int


@contextmanager
def naming_nonfinite(model: nn.Module, device: torch.device) -> Iterator[None]:
    """Raise at the end of the block if a module computed a NaN or an infinity in it, and name the first one.

    Of the ranks that have any the one of the earliest stage in forward is named, or in backward of the latest one.
    Collective over the world at the end: one wait for the device and one gather. For a few steps; it takes memory
    bandwidth. Masks are no tensors that modules return, so their infinities are none. Modules inside of compiled layers
    are not looked at, only the layers.

    Args:
        model: this rank's modules.
        device: of the model.

    Raises:
        FloatingPointError: some rank has one; raised on every rank.
    """
    watch = _Watch(device, local_stages(model))
    with ExitStack() as stack:
        for path, module in model.named_modules():
            if isinstance(module, StandIn):  # returns a tensor of no values, or another stage's
                continue
            handle = module.register_forward_hook(mark_internal(partial(watch.look_at_outputs, path)))
            stack.callback(handle.remove)
        yield
    with naming_failures("naming_nonfinite"):
        looks = gather_objects(watch.first())
    forward = [
        (look.stage, rank, look) for rank, look in enumerate(looks) if look and look.what == _IN_FORWARD
    ]
    backward = [
        (-look.stage, rank, look) for rank, look in enumerate(looks) if look and look.what == _IN_BACKWARD
    ]
    if first := min(forward or backward, default=None):
        _, rank, look = first
        others = len(forward) + len(backward) - 1
        raise FloatingPointError(
            f"{look.what} of {look.path or 'the model'} is the first that is not finite, on rank {rank} in microbatch "
            f"{look.microbatch}{f'; {others} other ranks have some too' if others else ''}: look at its inputs and "
            "weights, at the learning rate, and under fp16 at the loss scale (optimizer.skipped_steps)"
        )


class _Watch:
    """The tensors that were looked at, and on the device the number of the first that is not finite.

    Args:
        device: of the model.
        stages: this rank's stages by index.
    """

    def __init__(self, device: torch.device, stages: Mapping[int, Stage]) -> None:
        self._stages = stages
        self._looks: list[Look] = []
        self._calls: Counter[str] = Counter()
        self._none = torch.iinfo(torch.int64).max
        self._first = torch.full((), self._none, dtype=torch.int64, device=device)

    def first(self) -> Look | None:
        """Return the first look at a tensor that is not finite. Waits for the device."""
        number = int(self._first)
        return None if number == self._none else self._looks[number]

    def look_at_outputs(self, path: str, module: nn.Module, args: Any, outputs: Any) -> None:
        """Forward hook: look at the module's outputs, and later at their gradients."""
        if torch._C._current_graph_task_id() != -1:  # recomputed in a backward
            return
        microbatch = self._calls[path]
        self._calls[path] += 1
        computing = (index for index, stage in self._stages.items() if stage.is_computing)
        stage = next(computing, min(self._stages))  # outside of a schedule there is one stage
        for tensor in tree_leaves(outputs):
            if isinstance(tensor, Tensor) and tensor.is_floating_point() and not tensor.is_meta:
                self._look(tensor, Look(_IN_FORWARD, stage, path, microbatch))
                if tensor.requires_grad:
                    look = Look(_IN_BACKWARD, stage, path, microbatch)
                    tensor.register_hook(partial(self._look_at_gradient, look))

    def _look_at_gradient(self, look: Look, gradient: Tensor) -> None:
        self._look(gradient, look)

    def _look(self, tensor: Tensor, look: Look) -> None:
        with torch.no_grad():
            number = torch.full_like(self._first, len(self._looks))
            is_first = ~torch.isfinite(tensor.detach()).all() & (self._first == self._none)
            self._first = torch.where(is_first, number, self._first)
        self._looks.append(look)
