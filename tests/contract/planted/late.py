"""Faults that gloo may hide when it completes early: a missing wait, or a write to a tensor in flight."""

from collections.abc import Callable, Iterable
from typing import Any

import torch.distributed as dist
from torch import Tensor

from echelon.cluster import ring
from echelon.pipeline.action import Action, Op
from echelon.verify.layout_choice import Layout
from echelon.verify.model_choice import ModelChoice
from echelon.verify.parity import parity

from ...late_completion import late_completion
from ..mutations import around, fault

LLAMA = ModelChoice(model_type="llama", num_layers=2)


def departs(layout: Layout) -> str | None:
    """Return the difference under a layout when all communication completes late."""
    with late_completion():
        return parity(LLAMA, layout, num_steps=1).departure


def without_waiting(finish: Callable[[Any], None]) -> Callable[[Any], None]:
    """Use an average without waiting for it."""

    def finished(self: Any) -> None:
        if self._average is not None:
            self._average = self._average._replace(handle=None)
        finish(self)

    return finished


def zeroed_behind(send: Callable[..., None]) -> Callable[..., None]:
    """Reuse the memory of gradients as soon as their send has begun."""

    def sent(self: Any, action: Action, tensors: Iterable[Tensor]) -> None:
        send(self, action, tensors)
        if action.op is Op.SEND_BACKWARD:
            for tensor in tensors:
                tensor.zero_()

    return sent


def zeroed_on_the_way_home(make: Callable[..., None]) -> Callable[..., None]:
    """Overwrite a gradient of a ring while the next rank receives it."""

    def made(self: Any, x: Tensor, *args: Any, tag: int) -> None:
        make(self, x, *args, tag=tag)
        if tag == ring._HOMEWARD:
            x.zero_()

    return made


FAULTS = {
    "the sums of a layer are not waited for": fault(
        "cluster.collectives:_all_reduce",
        lambda x, group, **_: dist.all_reduce(x, group=group, async_op=True),
        check=departs,
        args=(Layout(tp=2),),
        notice="^step 1: loss ",
        quick=True,
    ),
    "the average of a bucket is not waited for": fault(
        "zero.bucket:Bucket.finish_reduction",
        around(without_waiting),
        check=departs,
        args=(Layout(dp=2, zero=1),),
        notice="^step 1: ",
    ),
    "the second sum of the data axis does not wait for the first": fault(
        "zero.partition:Chain._begin_second",
        lambda chain: chain._begin(),
        check=departs,
        args=(Layout(dp=4, zero=1, zero_size=2),),
        num_ranks=4,
        notice="^step 1: |was written to before wait",
    ),
    "gradients are overwritten while they are sent to the previous stage": fault(
        "pipeline.transport:Transport.send_gradients",
        around(zeroed_behind),
        check=departs,
        args=(Layout(pp=2),),
        notice="^AssertionError: an input of send at pipeline/transport.py",
    ),
    "gradients in flight in a ring are overwritten": fault(
        "cluster.ring:Shift.__init__",
        around(zeroed_on_the_way_home),
        check=departs,
        args=(Layout(sp=2, sequence="ring_attn"),),
        notice="^AssertionError: an input of send at cluster/ring.py",
    ),
}
