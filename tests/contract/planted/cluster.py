"""Faults in collectives: slices over gloo, and torch's own as over NCCL."""

from collections.abc import Callable
from functools import partial
from typing import Any

from torch import Tensor

from echelon.cluster.collectives import InFlight
from echelon.verify.layout_choice import Layout
from echelon.verify.model_choice import ModelChoice
from echelon.verify.parity import parity

from ...cluster.helpers import with_slices
from ..mutations import around, fault

LLAMA = ModelChoice(model_type="llama", num_layers=2)


def departs(slices: bool, **layout: Any) -> str | None:
    """Compare ZeRO over two replicas, by slices or by torch's collectives."""
    compared = partial(parity, LLAMA, Layout(dp=2, **layout), num_steps=2)
    return with_slices(slices, compared).departure


def local_slice_alone(self: Any) -> None:
    """Receive the slices of other ranks without adding them."""
    for receives in self._receives:
        for work, _ in receives:
            work.wait()
    self._receives.clear()
    self._local_slice = None


def losing(make: Callable[..., None], self: Any, buffer: Tensor, local_slice: Tensor, group: Any) -> None:
    """Discard the slices of the other rank after they have arrived."""
    make(self, buffer, local_slice, group)
    for work in self._works:
        work.wait()
    self._works.clear()
    buffer.chunk(group.size())[1 - group.rank()].zero_()


def not_summed(local_slice: Tensor, buffer: Tensor, group: Any) -> InFlight[Tensor]:
    """Return the local slice of the local buffer."""
    local_slice.copy_(buffer.chunk(group.size())[group.rank()])
    return InFlight(None, local_slice)


def not_gathered(buffer: Tensor, local_slice: Tensor, group: Any) -> InFlight[Tensor]:
    """Return the buffer unchanged."""
    return InFlight(None, buffer)


PLAIN = partial(departs, False, zero=1)
# fmt: off
FAULTS = {
    "slices of other ranks are not added": fault("cluster.gloo:ReduceScatter.add_up", local_slice_alone,
        partial(departs, True, zero=2), notice="^step 1: gradient of "),
    "slices of other ranks are not kept": fault("cluster.gloo:AllGather.__init__", around(losing),
        partial(departs, True, zero=1, overlap_allgather=True), notice="^step [12]: "),
    "a plain reduce-scatter sums nothing": fault("zero.partition:begin_reduce_scatter", not_summed, PLAIN,
        notice="^step 1: gradient of "),
    "a plain all-gather gathers nothing": fault("zero.partition:begin_all_gather", not_gathered, PLAIN,
        notice="^step [12]: ", quick=True),
}
# fmt: on
