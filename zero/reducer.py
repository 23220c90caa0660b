"""Reduction of gradients: from backward to the slice of the mean that this rank owns.

Collected into buckets while backward runs, they are summed over groups beside the data axis and averaged over it. A
backward that follows a reduction is reduced on its own and added to what was reduced before.

[Note: reducing while backward runs] Who knows that a backward is the last to add to some parameters says so by
`Reducer.last_backward`. A bucket whose parameters have all got their last gradient is averaged from then on, while
backward goes on. Buckets start in one order, which is that of a backward and the same on every rank, as NCCL
needs it: one that is complete early waits for those before it. What has to be summed over other groups first
(tied parameters) is left to `Reducer.reduce`. At stage 2 every backward is the last in this sense: buckets start
in each.
"""

from collections import deque
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from enum import Enum, auto
from typing import Any
from weakref import ref

import torch
import torch.distributed as dist
from torch import Tensor
from torch.autograd.graph import get_gradient_edge
from torch.distributed import ProcessGroup
from torch.nn import Parameter

from ..cluster.agree import gather_integers
from ..cluster.device import numbers_on
from ..cluster.hooks import has_foreign_last_hooks, mark_internal
from ..cluster.step_agreement import CHECK_EVERY, is_compared
from .bucket import Bucket, GradientState, Slot
from .partition import ManagedParameter
from .precision import DynamicScaler
from .writes import WriteWatch

_CALLS = ("backward()", "reduce_gradients()", "step()")  # that communicate


class _Backward(Enum):
    """Backwards that may run now."""

    OUTSIDE = auto()  # none of the optimizer's own; a plain loss.backward() or autograd.grad's may
    ACCUMULATING = auto()  # one that adds to gradients
    LAUNCHING = auto()  # one that starts averages


class Reducer:
    """Brings gradients from backward to the means in this rank's slices, and knows which state they are in.

    Hooks collect them into buckets. Within `last_backward` each complete bucket begins its average over the data axis.
    `reduce` sums the others over their `sum_groups`, averages what is left, and exchanges which parameters have a
    gradient: one all-reduce over the data axis.

    Args:
        buckets: memory of the gradients.
        parameters: of the buckets, in the order of the model.
        group: all ranks of the data axis.
        device: where flags are exchanged.
        overlap: begin averages while backward runs.
        scaler: of the losses of the optimizer's own backwards.
        check_every: ranks compare their calls in every `check_every`-th step.

    Attributes:
        slots: the places of all parameters, in the order of the model: ranks that share some in other buckets go
            through them in one order.
        is_reduced: True from a reduction until the next backward or drop.
        has_gradients: (len(slots),) float32, above 0 where any rank has a gradient, as of the last reduction.
        unscale_factor: makes reduced gradients the true ones, which carry no loss scale; `unscale_` multiplies it in.
        shards_gradients: whether every backward averages its gradients into the ranks' slices (stage 2).
        writes: detects who else wrote to gradients since the last backward or reduction.
    """

    def __init__(
        self,
        buckets: Sequence[Bucket],
        parameters: Sequence[ManagedParameter],
        *,
        group: ProcessGroup,
        device: torch.device,
        overlap: bool = True,
        scaler: DynamicScaler | None = None,
        check_every: int = CHECK_EVERY,
    ) -> None:
        position = {managed.parameter: index for index, managed in enumerate(parameters)}
        self.slots = sorted(
            (slot for bucket in buckets for slot in bucket.slots), key=lambda slot: position[slot.parameter]
        )
        self.is_reduced = False
        self.has_gradients = torch.empty(0)
        self.unscale_factor = 1.0
        self.shards_gradients = any(bucket.shards_gradients for bucket in buckets)
        self.writes = WriteWatch(buckets, has_loss_scale=scaler is not None)
        self._group, self._device, self._scaler = group, device, scaler
        # A bucket is complete with its parameter that stands first in the model: it comes last in a backward.
        self._buckets = sorted(
            buckets,
            key=lambda bucket: (
                bool(bucket.sum_groups),
                -min(position[slot.parameter] for slot in bucket.slots),
            ),
        )
        self._places = [(slot, bucket) for bucket in buckets for slot in bucket.slots]
        self._launches = group.size() > 1 and (overlap or self.shards_gradients)
        self._max_in_flight = 1 if overlap else 0  # at stage 2, while another bucket gets its gradients
        self._backward = _Backward.OUTSIDE
        self._is_held_back = False
        self._check_every, self._num_steps = check_every, 0
        # Of the backward that is running: buckets to be launched, and their slots whose gradients are to come.
        self._awaited: dict[Bucket, set[Slot]] = {}
        self._in_flight: deque[Bucket] = deque()
        # Weakly: the garbage collector does not see through the hooks of a tensor that lives elsewhere too, and
        # a cycle through one would keep all this memory and its process groups for ever.
        for place, (slot, _) in enumerate(self._places):
            before = _weakly(Reducer._before_accumulation, ref(self), place)
            after = _weakly(Reducer._after_accumulation, ref(self), place)
            slot.parameter.register_hook(before)
            slot.parameter.register_post_accumulate_grad_hook(after)

    # Contexts of backwards

    def accumulating(self) -> AbstractContextManager[None]:
        """Let backwards inside add to the gradients, all of them; elsewhere one may be autograd.grad's."""
        is_launching = self._backward is _Backward.LAUNCHING
        return self._running(_Backward.LAUNCHING if is_launching else _Backward.ACCUMULATING)

    @contextmanager
    def last_backward(self, parameters: Sequence[Parameter] | None = None) -> Iterator[None]:
        """Let what runs inside give these parameters, or all, their last gradients before the next reduction.

        Starts averages, see [Note: reducing while backward runs]; inside `held_back` none. Every rank of the data axis
        calls for the same parameters in the same order. Within another such context it does nothing.
        """
        if not self.may_launch:
            with self.accumulating():
                yield
            return
        if self.is_reduced:
            self.open()
        expected = None if parameters is None else set(parameters)
        for bucket in self._buckets:
            is_expected = expected is None or all(slot.parameter in expected for slot in bucket.slots)
            if not bucket.sum_groups and is_expected:
                bucket.open()
                self._awaited[bucket] = set(bucket.slots)
        with self.accumulating():
            with self._running(_Backward.LAUNCHING):
                yield
            for bucket in [*self._awaited]:  # what got no gradient will get none
                self._launch(bucket)
            if self.shards_gradients and any(bucket.partition.ends_together for bucket in self._buckets):
                self._finish(0)  # or a backward that only one rank calls would wait for the others

    def every_backward(self, parameters: Sequence[Parameter] | None = None) -> AbstractContextManager[None]:
        """The context of a backward that may not be the last for these parameters; None is all.

        At stage 2 their gradients are averaged nevertheless, so that no rank holds them whole.
        """
        return self.last_backward(parameters) if self.shards_gradients else self.accumulating()

    @contextmanager
    def held_back(self) -> Iterator[None]:
        """Let backwards inside start no average. Every rank of the data axis enters it alike."""
        before, self._is_held_back = self._is_held_back, True
        try:
            self.open()
            yield
        finally:
            self._is_held_back = before

    @property
    def may_launch(self) -> bool:
        """Return True if a backward that begins now starts averages."""
        return self._launches and self._backward is not _Backward.LAUNCHING and not self._is_held_back

    @contextmanager
    def _running(self, backward: _Backward) -> Iterator[None]:
        before, self._backward = self._backward, backward
        try:
            yield
        finally:
            self._backward = before
            if before is _Backward.OUTSIDE:
                self.writes.note()

    # Reduction

    @property
    def loss_scale(self) -> float:
        """The factor of the losses of the optimizer's own backwards."""
        return 1.0 if self._scaler is None else self._scaler.scale

    def open(self) -> None:
        """Expect gradients of further backwards; reduced ones are kept, and added again.

        Those that the model's own `zero_grad` dropped after a step are forgotten. Every rank calls it alike.

        Raises:
            RuntimeError: something else than a backward wrote to gradients.
        """
        self.require_untouched()
        if self.is_reduced and self.writes.were_dropped:
            self.drop(to_zeros=False)
        factor = self.loss_scale * self.unscale_factor if self.is_reduced else 1.0
        self.is_reduced = False
        for bucket in self._buckets:
            bucket.open(factor)
        self._in_flight.clear()
        self.writes.note_again()

    @torch.no_grad()
    def reduce(self) -> None:
        """Reduce what is not reduced yet. Collective over the sum groups and the data axis.

        Raises:
            RuntimeError: gradients were written to since the backward, see [Note: writes to unreduced gradients].
        """
        self.writes.require_scaled()
        self.require_untouched()
        self.writes.forget()
        not_reduced = (GradientState.NONE, GradientState.LOCAL)
        waiting = [bucket for bucket in self._buckets if bucket.state in not_reduced]
        for bucket in waiting:
            if bucket.sum_groups:
                bucket.collect()
        flags = [float(slot.has_gradient) for slot in self.slots]
        has_gradients = numbers_on(self._device, flags, torch.float32)
        _sum_over_groups(self.slots, waiting, has_gradients)
        for bucket in waiting:
            self._launch(bucket)
        self._finish(0)
        if self.slots and self._group.size() > 1:
            dist.all_reduce(has_gradients, op=dist.ReduceOp.MAX, group=self._group)
        self.is_reduced, self.has_gradients = True, has_gradients
        self.unscale_factor = 1 / self.loss_scale
        self.writes.note()

    def multiply(self, factor: float) -> None:
        """Let the true gradients be multiplied by a factor, which the slices get with the next `unscale_`."""
        self.unscale_factor *= factor

    def unscale_(self, coefficient: float = 1.0) -> None:
        """Make this rank's slices the true gradients times a coefficient. They are reduced."""
        if self.unscale_factor * coefficient != 1.0 and self._buckets:
            slices = [bucket.own_gradients for bucket in self._buckets]
            torch._foreach_mul_(slices, self.unscale_factor * coefficient)
            self.writes.note()
        self.unscale_factor = 1.0

    def drop(self, *, to_zeros: bool) -> None:
        """Forget all gradients; with `to_zeros`, parameters that have one get one of zeros."""
        self._awaited.clear()
        self._finish(0)
        self.writes.forget()
        self.is_reduced = False
        for bucket in self._buckets:
            bucket.drop(to_zeros=to_zeros)

    def require_untouched(self) -> None:
        """Raise RuntimeError where something else than a backward changed gradients that more are added to."""
        self.writes.require_no_writes()
        if not self.is_reduced:  # after a step the model's own zero_grad drops them
            self.writes.require_kept(reduced=False)

    def require_unchanged(self) -> None:
        """Raise RuntimeError where something changed reduced gradients and the step would not see it."""
        self.writes.require_scaled()
        self.writes.require_no_writes()
        self.writes.require_kept(reduced=True)

    def require_same_call(self, call: str) -> None:
        """Compare the calls of all ranks of the data axis, in the first steps and every `check_every`-th.

        All-gather between CPUs.

        Raises:
            RuntimeError: ranks are in different calls, or some forgot what others hold; on every rank.
        """
        is_step = call == "step()"
        is_due = is_compared(self._num_steps, self._check_every)
        self._num_steps += is_step
        if self._group.size() == 1 or not is_due:
            return
        own_state = _CALLS.index(call), int(self.is_reduced)
        states = gather_integers(own_state, self._group, "optimizer.step or backward")
        found = dict(zip(dist.get_process_group_ranks(self._group), states, strict=True))
        if len({code for code, _ in states}) > 1:
            where = ", ".join(f"rank {rank} in {_CALLS[code]}" for rank, (code, _) in found.items())
            raise RuntimeError(
                f"every backward averages its gradients, and the ranks are not in the same call: {where}. Every rank "
                "must call backward equally often between two steps; inside no_sync it averages nothing"
            )
        if len(set(states)) > 1:
            without = [rank for rank, (_, is_reduced) in found.items() if not is_reduced]
            raise RuntimeError(
                f"rank(s) {without} hold no reduced gradients and other ranks do: call zero_grad and backward on "
                "every rank alike"
            )

    def _complete(self, slot: Slot, bucket: Bucket) -> None:
        """Launch the buckets that waited for this slot's last gradient of a backward."""
        if bucket in self._awaited:
            self._awaited[bucket].discard(slot)
            while self._awaited and not self._awaited[following := next(iter(self._awaited))]:
                self._launch(following)

    def _launch(self, bucket: Bucket) -> None:
        """Begin to average a bucket. Every rank of the data axis launches the same buckets in the same order."""
        self._awaited.pop(bucket, None)
        if not bucket.sum_groups:  # they are collected before they are summed
            bucket.collect()
        bucket.start_reduction()
        self._in_flight.append(bucket)
        if self.shards_gradients:
            self._finish(self._max_in_flight)

    def _finish(self, num_left: int) -> None:
        """Have the averages of the buckets that were launched first, but for so many."""
        while len(self._in_flight) > num_left:
            self._in_flight.popleft().finish_reduction()

    def _make_room(self, bucket: Bucket) -> None:
        """Expect a gradient in a bucket."""
        if bucket.state is GradientState.REDUCING and not bucket.shards_gradients:
            raise RuntimeError(
                "a backward adds to gradients that are being averaged: call booster.backward instead of "
                "loss.backward(), accumulate over several calls of it or of execute_pipeline inside "
                "booster.no_sync(model, optimizer), all but the last, and checkpoint with use_reentrant=False"
            )
        if self.is_reduced:
            self.open()
        bucket.open()
        bucket.borrow()

    def _before_accumulation(self, place: int, gradient: Tensor | None) -> None:
        """Hook of a parameter's gradient once all its uses are differentiated; None where it is deferred."""
        slot, bucket = self._places[place]
        if self._backward is _Backward.OUTSIDE:
            if not _accumulates(slot.parameter):
                return
            if self.writes.begin_plain_backward():
                self.open()
        if gradient is None:
            self._complete(slot, bucket)
            return
        if self.is_reduced or not bucket.has_room:
            self._make_room(bucket)
        if self.shards_gradients:
            slot.show(slot.local_gradient)  # autograd is about to add to it

    def _after_accumulation(self, place: int, parameter: Parameter) -> None:
        """Hook of an accumulated gradient. Where a foreign hook may change it yet, the end of backward completes it."""
        slot, bucket = self._places[place]
        if self._backward is _Backward.OUTSIDE:
            self.writes.note_unscaled()
        slot.collect()
        if self._awaited and not has_foreign_last_hooks(parameter):
            self._complete(slot, bucket)


def sums_in_order(parameters: Sequence[ManagedParameter]) -> list[tuple[int, ProcessGroup, list[int]]]:
    """The sums to be made, in order: as which of its parameters' groups, over which, and their indices.

    First come the first groups of all parameters, then the second ones: a rank must not pass on a gradient over
    its second group before it is complete over its first. Among those, groups stand in the order of their ranks
    in the world, the same on all ranks: two ranks that share two groups cannot wait for each other.
    """
    members: dict[tuple[int, ProcessGroup], list[int]] = {}
    for index, managed in enumerate(parameters):
        for position, group in enumerate(managed.sum_groups):
            if group.size() > 1:
                members.setdefault((position, group), []).append(index)
    ordered = sorted(members.items(), key=lambda item: (item[0][0], dist.get_process_group_ranks(item[0][1])))
    return [(position, group, indices) for (position, group), indices in ordered]


def _sum_over_groups(slots: Sequence[Slot], buckets: Sequence[Bucket], has_gradients: Tensor) -> None:
    """Sum gradients over the `sum_groups` of their parameters, in place.

    One all-reduce per bucket and group, and one of flags per group.

    Args:
        slots: the parameters of this rank.
        buckets: those to be reduced, in the order of backward.
        has_gradients: (len(slots),) float32, 1 where this rank has a gradient; made 1 where any rank of a sum has.
    """
    for position, group, indices in sums_in_order([slot.managed for slot in slots]):
        places = numbers_on(has_gradients.device, indices, torch.long)  # of a list torch makes one, and waits
        own_flags = has_gradients[places]
        dist.all_reduce(own_flags, op=dist.ReduceOp.MAX, group=group)
        has_gradients[places] = own_flags
        for bucket in buckets:
            if bucket.sum_groups[position : position + 1] == (group,):
                assert bucket.gradients is not None  # collected
                dist.all_reduce(bucket.gradients, group=group)


def _accumulates(parameter: Parameter) -> bool:
    """Return True if the backward that is running adds to the parameter's gradient; autograd.grad's does not."""
    try:
        return bool(torch._C._will_engine_execute_node(get_gradient_edge(parameter).node))
    except RuntimeError:  # refused for leaves under autograd.grad
        return False


def _weakly(method: Callable[..., None], reference: ref, place: int) -> Callable[[Any], None]:
    """A hook that calls an object's method with a place and its argument, as long as the object lives."""

    def call(argument: Any) -> None:
        if (owner := reference()) is not None:
            method(owner, place, argument)

    return mark_internal(call)
