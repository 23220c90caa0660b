"""Faults in ZeRO, data parallelism and mixed precision."""

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import torch.distributed as dist

from echelon.cluster.collectives import InFlight
from echelon.verify.layout_choice import Layout, Training
from echelon.verify.model_choice import ModelChoice

from ..models import UNUSED, Occasional
from ..mutations import around, fault, returning

LLAMA = ModelChoice(model_type="llama", num_layers=2)
OCCASIONAL = Occasional(model_type="llama", num_layers=1)
OVERFLOW = Training(overflow_step=1)


def last_gradient_scaled(reduce: Callable[[Any], None], self: Any) -> None:
    reduce(self)
    self.buckets[-1].gradient_slice.data[-1] *= 1.001  # by `data`, so it does not count as a write


def every_gradient_present(update: Callable[[Any], None], self: Any) -> None:
    """Step parameters without a gradient with zeros, so weight decay changes them."""
    self._gradients.has_gradients = [True] * len(self._gradients.has_gradients)
    update(self)


def one_rank_departing(step: Callable[[Any], None], self: Any) -> None:
    """Change bits of the last rank's norm, too few to show in the loss."""
    step(self)
    if dist.get_rank() == dist.get_world_size() - 1:
        norm = next(slot for slot in self.reducer.slots if slot.managed.name == "model.norm.weight")
        norm.parameter.data.mul_(1 + 1e-6)


def launched_at_the_first(note: Callable[[Any, Any, Any], None], self: Any, slot: Any, bucket: Any) -> None:
    """Average a bucket as soon as one of its parameters has its gradient."""
    if bucket in self._slots_awaited:
        self._slots_awaited[bucket].clear()
    note(self, slot, bucket)


def summed_over_the_weight_axis(begin: Callable[..., Any], self: Any, gradient: Any) -> Any:
    """Sum the gradient of a sharded weight over the weight axis instead of averaging it."""
    return InFlight(None, begin(self, gradient).wait() * self.group.size())


def kept_after_the_step(drop: Callable[..., None], self: Any, *, to_zeros: bool) -> None:
    """Keep the gradients of slices, so the next backward adds to them."""
    before = self.gradient_slice.clone()
    drop(self, to_zeros=to_zeros)
    self.gradient_slice.copy_(before)


def only_the_slice(gather: Callable[..., Any], self: Any, flat: Any) -> Any:
    """Skip the gather of updated parameters: their users get the old values."""
    work = gather(self, flat.clone())
    if work is not None:
        work.wait()
    return InFlight(None, None)


OPTIMIZER = "zero.optimizer:ShardedOptimizer"
BUCKET = "zero.bucket:Bucket"
ZERO1, ZERO2 = Layout(dp=2, zero=1), Layout(dp=2, zero=2)


def stale(collect: Callable[[Any], None], self: Any) -> None:
    """Leave the gradient of the previous step in one piece of a parameter, a row."""
    collect(self)
    slot = self.slots[0]
    fresh = slot.piece_gradient[0].clone()
    slot.piece_gradient[0] = getattr(self, "previous", fresh)
    self.previous = fresh


# fmt: off
FAULTS = {
    "one gradient is scaled": fault(f"{OPTIMIZER}._reduce", around(last_gradient_scaled),
        ModelChoice(model_type="bert", head="classification"), Layout(pp=2)),
    "replicas are not averaged": fault("zero.partition:Partition.average_", returning(None), LLAMA, ZERO1, quick=True),
    "an overflow is not noticed": fault("zero.optimizer:isfinite", returning(True), OCCASIONAL, ZERO1,
        training=OVERFLOW, num_steps=3, notice=r"^step 2: weight of "),
    "the loss scale does not shrink": fault("zero.precision:DynamicScaler._shrink", returning(None), OCCASIONAL,
        Layout(dp=2, zero=1, precision="fp16"), training=OVERFLOW, num_steps=3,
        notice=r"^step 3: loss scale is off by 128"),
    "parameters without a gradient are stepped": fault(f"{OPTIMIZER}._step_slices", around(every_gradient_present),
        OCCASIONAL, ZERO2, num_steps=3, notice=rf"^step 2: weight of {UNUSED} "),
    "a replicated weight differs on one rank": fault(f"{OPTIMIZER}.step", around(one_rank_departing),
        replace(OCCASIONAL), Layout(tp=2), notice=r"^step 1: copy of model.norm.weight "),
    "a bucket is averaged before its last gradient": fault("zero.reducer:Reducer._record_last_gradient",
        around(launched_at_the_first), LLAMA, ZERO1,
        notice="adds to gradients that are being averaged|^step 1: gradient of "),
    "tied gradients are summed twice": fault("zero.reducer:_sum_over_groups",
        around(lambda call, *args: (call(*args), call(*args))), ModelChoice(model_type="gpt2", tied=True),
        Layout(pp=2)),
    "replicated parameters count on every rank in the norm": fault("plugins.hybrid_model:managed_parameters",
        around(lambda manage, *args, **kwargs: [replace(one, is_primary=True) for one in manage(*args, **kwargs)]),
        LLAMA, Layout(tp=2, max_norm=0.1)),
    "masters are not copied to the parameters": fault("zero.parameter_gather:round_masters", returning(None), LLAMA,
        Layout(dp=2, zero=1, precision="bf16"), num_steps=2),
    "offloaded masters are not copied back": fault("zero.parameter_gather:round_masters", returning(None), LLAMA,
        Layout(dp=2, zero=1, options=("cpu_offload",)), num_steps=2),
    "offloaded gradients are those of the previous step": fault(f"{BUCKET}.offload_gradients", returning(None), LLAMA,
        Layout(dp=2, zero=1, options=("cpu_offload",))),
    "an owner steps a stale piece": fault("zero.owned:OwnedParameters.collect_gradients", around(stale), LLAMA, ZERO1,
        training=Training(optimizer="adafactor"), num_steps=2, notice="^step 2: weight"),
    "updated pieces do not return from their owners": fault("zero.owned:OwnedParameters.scatter_masters",
        returning(None), LLAMA, ZERO1, training=Training(optimizer="adafactor"), num_steps=2),
    "updated parameters are not gathered": fault("zero.partition:Partition.gather_", around(only_the_slice), LLAMA,
        ZERO1, num_steps=2),
    "parameters in flight are not waited for": fault("zero.parameter_gather:Arrival.wait", returning(None), LLAMA,
        Layout(dp=2, zero=1, overlap_allgather=True), num_steps=2, notice="^step|'weight' must be 2-D"),
    "gradients are kept after zero_grad": fault(f"{BUCKET}.drop", around(kept_after_the_step), LLAMA, ZERO2,
        num_steps=2, notice=r"^step 2: gradient of "),
    "gradients of a skipped step are kept": fault(f"{BUCKET}.drop", around(kept_after_the_step), OCCASIONAL, ZERO2,
        training=OVERFLOW, num_steps=3),
    "parameters over the weight axis are averaged over all ranks": fault("zero.partition:ManagedParameter.sharded_over",
        None, LLAMA, Layout(dp=2, zero=1, wp=2)),
    "gradients of sharded weights are not averaged over the weight axis": fault(
        "shardformer.layers.gathered_linear:WeightPool.begin_mean", around(summed_over_the_weight_axis), LLAMA,
        Layout(dp=2, zero=1, wp=2)),
    "gradients are not clipped": fault("zero.reduced_gradients:clip_coefficient", returning(1.0), LLAMA,
        Layout(dp=2, zero=1, max_norm=0.1)),
}
# fmt: on
