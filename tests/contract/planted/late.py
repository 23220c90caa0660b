"""Faults that gloo may hide when it completes early: a missing wait, or a write to a tensor in flight."""

from collections.abc import Callable, Iterable
from functools import partial
from typing import Any

import torch.distributed as dist
from torch import Tensor

from echelon.cluster import ring
from echelon.pipeline.action import Action, Op
from echelon.verify.layout_choice import Layout
from echelon.verify.model_choice import ModelChoice
from echelon.verify.parity import parity

from ...late_completion import late_completion
from ..mutations import Mutation, around, fault

LLAMA = ModelChoice(model_type="llama", num_layers=2)


def departs(layout: Layout) -> str | None:
    """Return the difference under a layout when all communication completes late."""
    with late_completion():
        return parity(LLAMA, layout, num_steps=1).departure


def without_waiting(finish: Callable[[Any], None], self: Any) -> None:
    """Use an average without waiting for it."""
    if self._average is not None:
        self._average = self._average._replace(handle=None)
    finish(self)


def zeroed_behind(send: Callable[..., None], self: Any, action: Action, tensors: Iterable[Tensor]) -> None:
    """Reuse the memory of gradients as soon as their send has begun."""
    send(self, action, tensors)
    if action.op is Op.SEND_BACKWARD:
        for tensor in tensors:
            tensor.zero_()


def zeroed_on_the_way_home(make: Callable[..., None], self: Any, x: Tensor, *args: Any, tag: int) -> None:
    """Overwrite a gradient of a ring while the next rank receives it."""
    make(self, x, *args, tag=tag)
    if tag == ring._HOMEWARD:
        x.zero_()


def late(target: str, change: Any, layout: Layout, notice: str, *, quick: bool = False) -> Mutation:
    """Make a fault that shows under a layout when all communication completes late."""
    check = partial(departs, layout)
    return fault(target, change, check, num_ranks=layout.world_size, notice=notice, quick=quick)


# fmt: off
FAULTS = {
    "the sums of a layer are not waited for": late("cluster.collectives:_all_reduce",
        lambda x, group, **_: dist.all_reduce(x, group=group, async_op=True), Layout(tp=2), "^step 1: loss ",
        quick=True),
    "the average of a bucket is not waited for": late("zero.bucket:Bucket.finish_reduction", around(without_waiting),
        Layout(dp=2, zero=1), "^step 1: "),
    "the second sum of the data axis does not wait for the first": late("zero.partition:Chain._begin_second",
        lambda chain: chain._begin(), Layout(dp=4, zero=1, zero_size=2), "^step 1: |was written to before wait"),
    "gradients are overwritten while they are sent to the previous stage": late(
        "pipeline.transport:Transport.send_gradients", around(zeroed_behind), Layout(pp=2),
        "^AssertionError: an input of send at pipeline/transport.py"),
    "gradients in flight in a ring are overwritten": late("cluster.ring:Shift.__init__", around(zeroed_on_the_way_home),
        Layout(sp=2, sequence="ring_attn"), "^AssertionError: an input of send at cluster/ring.py"),
}
# fmt: on
