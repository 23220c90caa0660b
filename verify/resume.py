"""A run that is saved and resumed under other layouts, compared with one uninterrupted process.

Tensors are gathered from the ranks without the code of checkpoints, to share none of its bugs.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from ..checkpoint.optimizer_state import saved_options
from ..cluster.gathering import gather_objects
from ..pipeline.microbatch import merge
from ..plugins.hybrid_model import HybridParallelModule
from ..zero.bucket import Bucket
from ..zero.optimizer import ShardedOptimizer
from ..zero.slot import Slot
from .batch import microbatches_of
from .compare import StepComparison, first_departure
from .draws import equal_draws
from .layout_choice import Layout, Training
from .model_choice import ModelChoice
from .parity import (
    AS_USUAL,
    Batches,
    Report,
    boosted_under,
    compare_with_one_process,
    drawn_batches,
    gather_full,
    take_steps,
)
from .reference import StepRecord
from .routing import Routing, RoutingCheck

PARAMETER, MASTER = "parameter/", "master/"


@dataclass(frozen=True, kw_only=True)
class Leg:
    """A leg of a run; it starts from the checkpoint of the previous leg.

    Args:
        layout: its parallel layout.
        num_steps: optimizer steps.
    """

    layout: Layout
    num_steps: int = 3

    def __str__(self) -> str:
        return f"{self.layout}×{self.num_steps}"


@dataclass(frozen=True, kw_only=True)
class Relay:
    """A run in legs, each under its own layout and in new processes.

    Args:
        choice: the model.
        legs: the legs, in order.
        training: the settings of the steps, counted from the start of the first leg.
        seed: the seed of the model's weights and of the batches.
    """

    choice: ModelChoice
    legs: tuple[Leg, ...]
    training: Training = AS_USUAL
    seed: int = 0

    def first_step(self, number: int) -> int:
        """Return the number of steps before a leg."""
        return sum(leg.num_steps for leg in self.legs[:number])

    def batches(self, number: int) -> list[Batches]:
        """Return the batches of each step of a leg, by replica.

        The samples of a step do not depend on the number of replicas: they are drawn for the layout with the most
        microbatches, and distributed over the replicas of the leg.
        """
        layouts = [leg.layout for leg in self.legs]
        largest = max(layouts, key=lambda layout: layout.dp * layout.microbatches)
        first, leg = self.first_step(number), self.legs[number]
        batches = [
            drawn_batches(self.choice, largest, self.training, step, self.seed)
            for step in range(first, first + leg.num_steps)
        ]
        if leg.layout.dp == largest.dp:
            return batches
        config = self.choice.config()
        return [microbatches_of(merge(step_batches), leg.layout.dp, config) for step_batches in batches]


@dataclass(frozen=True, kw_only=True)
class Contents:
    """The state that a run carries from step to step.

    Args:
        tensors: "parameter/NAME" in the computing format, "master/NAME" in the optimizer's, "STATE/NAME" of the
            optimizer's state.
        values: plain values by name: scalar states, options of parameter groups, loss scale, skipped steps.
    """

    tensors: Mapping[str, Tensor]
    values: Mapping[str, Any]


@dataclass(frozen=True, kw_only=True)
class Outcome:
    """The result of a leg.

    Args:
        records: its steps.
        loaded: its contents at the start; None for the first leg.
        saved: its contents at the end; None for the last.
        routing: of its first step, see `Report`.
    """

    records: list[StepRecord]
    loaded: Contents | None
    saved: Contents | None
    routing: Routing | None = None


@dataclass(frozen=True, kw_only=True)
class Handover:
    """The contents that a leg loaded, compared with those that the previous leg saved.

    Args:
        step: the number of steps before it.
        num_tensors: the number of compared tensors.
        differing: names of tensors and values that differ.
    """

    step: int
    num_tensors: int
    differing: tuple[str, ...]

    def __str__(self) -> str:
        if not self.differing:
            return (
                f"after step {self.step}: {self.num_tensors} tensors of weights and states loaded bit for bit"
            )
        more = f" and {len(self.differing) - 3} more" if len(self.differing) > 3 else ""
        return f"after step {self.step}: {', '.join(self.differing[:3])}{more} differ from what was saved"


@dataclass(frozen=True, kw_only=True)
class ResumeReport(Report):
    """A parity report over all legs, with the handovers between them."""

    handovers: tuple[Handover, ...]


def run_leg(relay: Relay, number: int, folder: Path) -> None:
    """Train a leg from the checkpoint of the previous one, save one for the next, and write its outcome.

    Collective over the world, which has the size of the leg's layout.

    Args:
        folder: a folder of this relay only; the legs run in order.
    """
    # Other weights than the run's, so that a failure to load them is found.
    model = relay.choice.build(relay.seed + number)
    relay.training.freeze(model)
    check = RoutingCheck(model, relay.legs[number].layout)
    run = boosted_under(relay.legs[number].layout, model, relay.training)
    first, batches = relay.first_step(number), relay.batches(number)
    loaded = saved = None
    if number:
        resumed = run.booster.load_checkpoint(folder, model=run.model, optimizer=run.optimizer)
        if resumed is None or resumed.step != first:
            raise AssertionError(f"leg {number} should resume from step {first}, but found {resumed}")
        loaded = contents_of(run.model, run.optimizer)
    check.watch(run.model)
    with equal_draws(relay.choice):
        records = take_steps(run, relay.training, batches, first_step=first)
    routing = check.result(run.model, batches[0]) if not number else None  # later legs have trained weights
    if number + 1 < len(relay.legs):
        saved = contents_of(run.model, run.optimizer)
        step = first + len(batches)
        run.booster.save_checkpoint(folder, step, model=run.model, optimizer=run.optimizer).wait()
    if dist.get_rank() == 0:
        outcome = Outcome(records=records, loaded=loaded, saved=saved, routing=routing)
        write_outcome(outcome, number, folder)


def compare_legs(relay: Relay, folder: Path) -> ResumeReport:
    """Compare all completed legs with one uninterrupted process. Runs in one process."""
    outcomes = [read_outcome(number, folder) for number in range(len(relay.legs))]
    handovers = []
    for number in range(1, len(outcomes)):
        saved, loaded = outcomes[number - 1].saved, outcomes[number].loaded
        assert saved is not None and loaded is not None
        handovers.append(
            Handover(
                step=relay.first_step(number),
                num_tensors=len(saved.tensors),
                differing=tuple(differing(saved, loaded)),
            )
        )
    model = relay.choice.build(relay.seed)
    relay.training.freeze(model)
    legs = [(leg.layout, relay.batches(number)) for number, leg in enumerate(relay.legs)]
    records = [record for outcome in outcomes for record in outcome.records]
    with equal_draws(relay.choice):
        steps = compare_with_one_process(relay.choice, model, legs, relay.training, records)
    return ResumeReport(
        steps=tuple(steps),
        departure=_first_departure(steps, handovers),
        handovers=tuple(handovers),
        routing=outcomes[0].routing,
    )


def write_outcome(outcome: Outcome, number: int, folder: Path) -> None:
    """Write a leg's outcome next to its checkpoint."""
    torch.save(outcome, _path(number, folder))


def read_outcome(number: int, folder: Path) -> Outcome:
    """Return the outcome that `write_outcome` wrote."""
    outcome: Outcome = torch.load(_path(number, folder), weights_only=False)  # written by this run
    return outcome


def _path(number: int, folder: Path) -> Path:
    return folder / f"leg-{number}.pt"


def _first_departure(steps: Sequence[StepComparison], handovers: Sequence[Handover]) -> str | None:
    """Return the first departure in the order of the run."""
    for handover in handovers:
        departure = first_departure(steps[: handover.step])
        if departure is not None or handover.differing:
            return departure or str(handover)
    return first_departure(steps)


def contents_of(model: HybridParallelModule, optimizer: ShardedOptimizer) -> Contents:
    """Gather parameters, masters and optimizer states, unsharded, on global rank 0, with all plain values.

    Other ranks return the values without tensors. Collective over the world.
    """
    states, scalars = _states(optimizer)
    shards = {PARAMETER: model.tensors(), MASTER: optimizer.masters(), **states}
    tensors: dict[str, Tensor] = {}
    for prefix, local in shards.items():
        tensors |= _gathered_copies(model, prefix, local)
    tensors |= _owned_states(optimizer)
    # One number for a scalar state, unless the ranks that shard its parameter disagree.
    values: dict[str, Any] = {name: sorted(numbers) for name, numbers in scalars.items()}
    values |= {f"group {index}": saved_options(group) for index, group in enumerate(optimizer.param_groups)}
    values |= {"loss scaler": optimizer.scaler_state(), "skipped steps": optimizer.skipped_steps}
    return Contents(tensors=tensors, values=values)


def differing(saved: Contents, loaded: Contents) -> list[str]:
    """Return the names of contents that are not equal, bit for bit.

    After a change of precision, parameters must be the rounded master weights. A loss scale that only one of the
    precisions has is ignored.
    """
    expected = {name: _expected(name, saved, loaded.tensors.get(name)) for name in saved.tensors}
    tensors = [
        name
        for name in {**expected, **loaded.tensors}
        if name not in expected
        or name not in loaded.tensors
        or not _equal(expected[name], loaded.tensors[name])
    ]
    values = [
        name
        for name in {**saved.values, **loaded.values}
        if saved.values.get(name) != loaded.values.get(name)
    ]
    if None in (saved.values["loss scaler"], loaded.values["loss scaler"]):
        values = [name for name in values if name != "loss scaler"]
    return tensors + values


def _expected(name: str, saved: Contents, loaded: Tensor | None) -> Tensor:
    """Return the expected tensor of a name: the saved one, or in another format its rounded master weight."""
    saved_tensor = saved.tensors[name]
    if loaded is None or loaded.dtype is saved_tensor.dtype:
        return saved_tensor
    master = MASTER + name.removeprefix(PARAMETER) if name.startswith(PARAMETER) else name
    return saved.tensors.get(master, saved_tensor).to(loaded.dtype)


def _equal(one: Tensor, other: Tensor) -> bool:
    """Compare bit for bit, so that a NaN equals itself and zeros of two signs differ."""
    return (
        one.dtype is other.dtype
        and one.shape == other.shape
        and torch.equal(one.reshape(-1).view(torch.uint8), other.reshape(-1).view(torch.uint8))
    )


def _gathered_copies(
    model: HybridParallelModule, prefix: str, local: Mapping[str, Tensor]
) -> dict[str, Tensor]:
    """Gather full tensors on rank 0, as contiguous copies under prefixed names. Collective over the world.

    Args:
        model: the boosted model.
        prefix: the kind of the tensors, put before the names of their parameters.
        local: this rank's shards by parameter name.
    """
    return {
        prefix + name: tensor.cpu().clone(memory_format=torch.contiguous_format)
        for name, tensor in gather_full(local, model.tensors(), model.mesh).items()
    }


def _states(optimizer: ShardedOptimizer) -> tuple[dict[str, dict[str, Tensor]], dict[str, set[float]]]:
    """Return tensor states of this rank's stage by kind and parameter, and scalar states of all ranks.

    Collective over the world. Ranks that shard a parameter each have its scalars; all different values are returned.
    """
    names: dict[str, set[str]] = {}  # names of parameters by kind of state, over all ranks
    numbers: dict[str, set[float]] = {}  # by "STATE/NAME"
    for tensors, scalars in gather_objects(_local_states(optimizer)):
        for kind, name in tensors:
            names.setdefault(kind, set()).add(name)
        for key, number in scalars:
            numbers.setdefault(key, set()).add(number)
    states = {
        f"{kind}/": _gathered(optimizer, kind, names_of_kind) for kind, names_of_kind in sorted(names.items())
    }
    return states, numbers


def _owned_states(optimizer: ShardedOptimizer) -> dict[str, Tensor]:
    """Return on global rank 0 the tensor states of parameters that one rank of the data axis owns (zero/owned.py).

    Collective over the world.
    """
    local = {
        f"{kind}/{slot.managed.name}": value.cpu()
        for bucket in optimizer.buckets
        if bucket.is_full
        for slot in bucket.slots
        for kind, value in _state(optimizer, slot).items()
        if isinstance(value, Tensor) and value.dim()
    }
    by_rank = gather_objects(local)
    if dist.get_rank():
        return {}
    return {name: value for states in by_rank for name, value in states.items()}


def _local_states(optimizer: ShardedOptimizer) -> tuple[list[tuple[str, str]], list[tuple[str, float]]]:
    """Return kind and parameter of this rank's tensor states, and names and values of its scalar states."""
    tensors, scalars = [], []
    for bucket in optimizer.buckets:
        for slot in bucket.slots:
            for kind, value in _state(optimizer, slot).items():
                if isinstance(value, Tensor) and value.dim():
                    if not bucket.is_full:
                        tensors.append((kind, slot.managed.name))
                else:
                    scalars.append((f"{kind}/{slot.managed.name}", float(value)))
    return tensors, scalars


def _gathered(optimizer: ShardedOptimizer, kind: str, names: set[str]) -> dict[str, Tensor]:
    """Gather the states of a kind in the shapes of their parameters. Collective over the data axis."""
    states: dict[str, Tensor] = {}
    for bucket in optimizer.buckets:
        unsharded = bucket.partition.gathered(_flat(optimizer, bucket, kind))
        states |= {name: state for name, state in bucket.unflattened(unsharded).items() if name in names}
    return states


def _flat(optimizer: ShardedOptimizer, bucket: Bucket, kind: str) -> Tensor:
    """Return this rank's states of a kind in one tensor, each at the offset of its master in the bucket's slice."""
    flat = torch.zeros_like(bucket.masters)
    first = bucket.partition.index * bucket.masters.numel()
    for slot in bucket.slots if not bucket.is_full else ():
        if (value := _state(optimizer, slot).get(kind)) is not None:
            start = slot.start + slot.piece_start - first
            flat[start : start + value.numel()] = value
    return flat


def _state(optimizer: ShardedOptimizer, slot: Slot) -> dict[str, Any]:
    """Return the optimizer's state of this rank's slice of a parameter; empty if it has none."""
    return {} if slot.piece is None else optimizer.inner.state.get(slot.piece, {})
