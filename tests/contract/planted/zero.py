"""Faults in ZeRO, data parallelism and mixed precision."""

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import torch.distributed as dist

from echelon.verify.layout import Layout
from echelon.verify.models import ModelChoice
from echelon.verify.training import Training

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


OPTIMIZER = "echelon.zero.optimizer:ShardedOptimizer"

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
}
