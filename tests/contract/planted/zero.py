"""Faults in ZeRO, data parallelism and mixed precision."""

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import torch.distributed as dist

from echelon.cluster.collectives import InFlight
from echelon.verify.layout import Layout, Training
from echelon.verify.models import ModelChoice

from ..models import UNUSED, Occasional
from ..mutations import Mutation

LLAMA = ModelChoice(model_type="llama", num_layers=2)
OCCASIONAL = Occasional(model_type="llama", num_layers=1)
OVERFLOW = Training(overflow_step=1)


def last_gradient_scaled(reduce: Callable[[Any], None]) -> Callable[[Any], None]:
    def scaled(self: Any) -> None:
        reduce(self)
        self.buckets[-1].own_gradients.data[-1] *= 1.001  # so that it is not noticed as a write

    return scaled


def do_nothing(self: object, *args: object) -> None:
    return None


def always(number: object) -> bool:
    return True


def every_gradient_present(update: Callable[[Any], None]) -> Callable[[Any], None]:
    """Parameters without a gradient are stepped with zeros, so weight decay moves them."""

    def updated(self: Any) -> None:
        self._gradients.present = [True] * len(self._gradients.present)
        update(self)

    return updated


def one_rank_departing(step: Callable[[Any], None]) -> Callable[[Any], None]:
    """The last rank's bits of a norm are others, too few for the loss to show."""

    def stepped(self: Any) -> None:
        step(self)
        if dist.get_rank() == dist.get_world_size() - 1:
            norm = next(slot for slot in self.reducer.slots if slot.managed.name == "model.norm.weight")
            norm.parameter.data.mul_(1 + 1e-6)

    return stepped


def launched_at_the_first(note: Callable[[Any, Any], None]) -> Callable[[Any, Any], None]:
    """A bucket is averaged once one of its parameters has its gradient."""

    def noted(self: Any, parameter: Any) -> None:
        awaited = self._awaited.get(self._places[parameter][1])
        if awaited is not None:
            awaited.clear()
        note(self, parameter)

    return noted


def summed_over_the_weight_axis(begin: Callable[..., Any]) -> Callable[..., Any]:
    """The gradient of a sharded weight is the sum over the weight axis, and not the mean."""

    def begun(self: Any, gradient: Any) -> Any:
        return InFlight(None, begin(self, gradient).wait() * self.group.size())

    return begun


def twice(call: Callable[..., None]) -> Callable[..., None]:
    def called(*args: Any) -> None:
        call(*args)
        call(*args)

    return called


def counted_on_every_rank(manage: Callable[..., list[Any]]) -> Callable[..., list[Any]]:
    def managed(*args: Any, **kwargs: Any) -> list[Any]:
        return [replace(each, counts=True) for each in manage(*args, **kwargs)]

    return managed


def kept_after_the_step(drop: Callable[..., None]) -> Callable[..., None]:
    """Slices keep their gradients, to which the next backward adds."""

    def dropped(self: Any, *, to_zeros: bool) -> None:
        before = self.own_gradients.clone()
        drop(self, to_zeros=to_zeros)
        self.own_gradients.copy_(before)

    return dropped


def only_the_slice(gather: Callable[..., Any]) -> Callable[..., Any]:
    """Parameters are not gathered: whoever waits for them has what was there before."""

    class Nothing:
        def wait(self) -> None:
            return None

    def gathered(self: Any, flat: Any) -> Any:
        work = gather(self, flat.clone())
        if work is not None:
            work.wait()
        return Nothing()

    return gathered


def unclipped(norm: float, max_norm: float) -> float:
    return 1.0


OPTIMIZER = "echelon.zero.optimizer:ShardedOptimizer"
BUCKET = "echelon.zero.bucket:Bucket"

FAULTS = {
    "one gradient is scaled": Mutation(
        target=f"{OPTIMIZER}._reduce",
        wrapper=last_gradient_scaled,
        row=(ModelChoice(model_type="bert", head="classification"), Layout(pp=2)),
        notice=r"^step 1: gradient of ",
    ),
    "replicas are not averaged": Mutation(
        target="echelon.zero.partition:Partition.average_",
        replacement=do_nothing,
        row=(LLAMA, Layout(dp=2, zero=1)),
        notice=r"^step 1: gradient of ",
        quick=True,
    ),
    "an overflow is not noticed": Mutation(
        target="echelon.zero.optimizer:isfinite",
        replacement=always,
        row=(OCCASIONAL, Layout(dp=2, zero=1)),
        training=OVERFLOW,
        num_steps=3,
        notice=r"^step 2: weight of ",
    ),
    "the loss scale does not shrink": Mutation(
        target="echelon.zero.precision:DynamicScaler._shrink",
        replacement=do_nothing,
        row=(OCCASIONAL, Layout(dp=2, zero=1, precision="fp16")),
        training=OVERFLOW,
        num_steps=3,
        notice=r"^step 3: loss scale is off by 128",
    ),
    "parameters without a gradient are stepped": Mutation(
        target=f"{OPTIMIZER}._update_own_slices",
        wrapper=every_gradient_present,
        row=(OCCASIONAL, Layout(dp=2, zero=2)),
        num_steps=3,
        notice=rf"^step 2: weight of {UNUSED} ",
    ),
    "a replicated weight departs on one rank": Mutation(
        target=f"{OPTIMIZER}.step",
        wrapper=one_rank_departing,
        row=(replace(OCCASIONAL), Layout(tp=2)),
        notice=r"^step 1: copy of model.norm.weight ",
    ),
    "a bucket is averaged before its last gradient": Mutation(
        target="echelon.zero.reducer:Reducer.note",
        wrapper=launched_at_the_first,
        row=(LLAMA, Layout(dp=2, zero=1)),
        notice="adds to gradients that are being averaged|^step 1: gradient of ",
    ),
    "tied gradients are summed twice": Mutation(
        target="echelon.zero.reducer:_sum_over_groups",
        wrapper=twice,
        row=(ModelChoice(model_type="gpt2", tied=True), Layout(pp=2)),
        notice=r"^step 1: gradient of ",
    ),
    "replicated parameters count on every rank in the norm": Mutation(
        target="echelon.plugins.hybrid_model:managed_parameters",
        wrapper=counted_on_every_rank,
        row=(LLAMA, Layout(tp=2, max_norm=0.1)),
        notice=r"^step 1: (norm|weight of )",
    ),
    "masters do not reach the parameters": Mutation(
        target=f"{BUCKET}.round_masters",
        replacement=do_nothing,
        row=(LLAMA, Layout(dp=2, zero=1, precision="bf16")),
        num_steps=2,
        notice=r"^step [12]: ",
    ),
    "offloaded masters do not come back": Mutation(
        target=f"{BUCKET}.round_masters",
        replacement=do_nothing,
        row=(LLAMA, Layout(dp=2, zero=1, options=("cpu_offload",))),
        num_steps=2,
        notice=r"^step [12]: ",
    ),
    "offloaded gradients are those of the step before": Mutation(
        target=f"{BUCKET}.send_gradients",
        replacement=do_nothing,
        row=(LLAMA, Layout(dp=2, zero=1, options=("cpu_offload",))),
        notice=r"^step 1: weight of ",
    ),
    "updated parameters are not gathered": Mutation(
        target="echelon.zero.partition:Partition.gather_",
        wrapper=only_the_slice,
        row=(LLAMA, Layout(dp=2, zero=1)),
        num_steps=2,
        notice=r"^step [12]: ",
    ),
    "nobody waits for parameters in flight": Mutation(
        target="echelon.zero.publish:Arrival.wait",
        replacement=do_nothing,
        row=(LLAMA, Layout(dp=2, zero=1, overlap_allgather=True)),
        num_steps=2,
    ),
    "gradients stay after zero_grad": Mutation(
        target=f"{BUCKET}.drop",
        wrapper=kept_after_the_step,
        row=(LLAMA, Layout(dp=2, zero=2)),
        num_steps=2,
        notice=r"^step 2: gradient of ",
    ),
    "gradients of a skipped step stay": Mutation(
        target=f"{BUCKET}.drop",
        wrapper=kept_after_the_step,
        row=(OCCASIONAL, Layout(dp=2, zero=2)),
        training=OVERFLOW,
        num_steps=3,
        notice=r"^step [23]: ",
    ),
    "parameters over the weight axis are averaged over all ranks": Mutation(
        target="echelon.zero.partition:ManagedParameter.sharded_over",
        replacement=None,
        row=(LLAMA, Layout(dp=2, zero=1, wp=2)),
    ),
    "gradients of sharded weights are not averaged over the weight axis": Mutation(
        target="echelon.shardformer.layers.weight_sharding:WeightPool.begin_mean",
        wrapper=summed_over_the_weight_axis,
        row=(LLAMA, Layout(dp=2, zero=1, wp=2)),
        notice=r"^step 1: gradient of ",
    ),
    "gradients are not clipped": Mutation(
        target="echelon.zero.clipping:clip_coefficient",
        replacement=unclipped,
        row=(LLAMA, Layout(dp=2, zero=1, max_norm=0.1)),
        notice=r"^step 1: weight of ",
    ),
}
