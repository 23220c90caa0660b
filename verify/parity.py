"""Parity check: a model trained under a layout and in one process, compared step by step.

The one process is in reference.py.
"""

import copy
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import chain
from math import inf, isfinite, nan
from typing import NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _BatchNorm

from ..booster.booster import Booster
from ..cluster.collectives import begin_gather
from ..cluster.device import default_device, is_cuda
from ..cluster.gathering import gather_objects
from ..cluster.hashes import batch_hash
from ..cluster.mesh import ParallelMesh
from ..cluster.objects import broadcast_object
from ..cluster.placement import shards_of
from ..lazy import materialize
from ..pipeline.microbatch import batch_size
from ..plugins.hybrid_model import HybridParallelModule
from ..plugins.hybrid_parallel import HybridParallelPlugin
from ..shardformer import policy_for
from ..zero.optimizer import ShardedOptimizer
from ..zero.precision import DTYPES
from . import reference
from .batch import make_batch, microbatches_of
from .compare import Reference, StepComparison, compare_16_bit, compare_float32, first_departure
from .draws import equal_draws
from .layout_choice import EPSILON, Layout, Training
from .model_choice import ModelChoice
from .optimizers import combined, largest_rate, optimizers_of, rounding_of
from .reference import Criterion, StepRecord, Weigh, is_one_mean
from .routing import Routing, RoutingCheck

LOSS_SCALE = 2.0**8  # the initial scale of fp16 runs: large enough that a missing division is found
# Seeds of references with moved weights, which measure how much rounding is amplified: in 16 bits all tensors are
# compared together; in float32 each by itself, and the effect on one of few entries is small by chance in some of them.
ROUNDINGS_16_BIT, ROUNDINGS_FLOAT32 = range(1, 4), range(1, 9)
# Size of the change of weights in 16 bits, in units in the last place. Every eighth weight is then rounded to the other
# side. This is enough to change all later roundings, and no more than rounding itself changes the weights.
MOVED_16_BIT = 1 / 8
# Scale of these references in float32: moved weights change the roundings of forward, this one those of backward. (In
# one process without parallelism, it changes a gradient of Qwen3-Next's decays by more than moved weights do.)
OTHER_SCALE = 3.0
AS_USUAL = Training()

Batches = list[dict[str, Tensor]]  # the batches of a step, by replica
_Train = Callable[..., list[StepRecord]]  # formats of steps, model, scale in float32


@dataclass(frozen=True, kw_only=True)
class Report:
    """The result of a parity check; equal on every rank.

    Args:
        steps: by step, the comparison of each quantity with its reference.
        departure: a description of the first quantity that departs; None if all agree.
        routing: tokens that were routed to other experts; None in float32, and for models without experts.
    """

    steps: tuple[StepComparison, ...]
    departure: str | None
    routing: Routing | None = None

    @property
    def agrees(self) -> bool:
        """True if every quantity was within tolerance."""
        return self.departure is None


def parity(
    choice: ModelChoice,
    layout: Layout,
    *,
    training: Training = AS_USUAL,
    num_steps: int = 3,
    seed: int = 0,
) -> Report:
    """Train a model under a layout and in one process, and compare the numbers of every step.

    Collective over the world, which must have `layout.world_size` ranks. The reference runs on rank 0 and its device.

    Args:
        choice: the model.
        layout: the parallel layout.
        training: the settings of its steps.
        num_steps: optimizer steps.
        seed: the seed of the model's weights and of the batches.

    Raises:
        ValueError: model and layout do not fit; all reasons at once.
    """
    model = choice.build(seed)
    training.freeze(model)
    batches = [drawn_batches(choice, layout, training, step, seed) for step in range(num_steps)]
    untouched = materialize(copy.deepcopy(model)) if dist.get_rank() == 0 else None
    check = RoutingCheck(model, layout)
    run = boosted_under(layout, model, training)
    check.watch(run.model)
    with equal_draws(choice):
        records = take_steps(run, training, batches)
        routing = check.result(run.model, batches[0])
        compared: list[StepComparison] = []
        if untouched is not None:
            compared = compare_with_one_process(choice, untouched, [(layout, batches)], training, records)
    steps = tuple(broadcast_object(compared, 0, None))
    return Report(steps=steps, departure=first_departure(steps), routing=routing)


def drawn_batches(choice: ModelChoice, layout: Layout, training: Training, step: int, seed: int) -> Batches:
    """Return the batch of each replica in a step, counted from 0."""
    if training.num_batches is not None:
        step %= training.num_batches
    return [
        make_batch(
            choice,
            num_samples=training.num_samples(step=step, replica=replica, microbatches=layout.microbatches),
            seed=seed + 100 * step + replica,
        )
        for replica in range(layout.dp)
    ]


def compare_with_one_process(
    choice: ModelChoice,
    model: nn.Module,
    legs: Sequence[tuple[Layout, Sequence[Batches]]],
    training: Training,
    records: Sequence[StepRecord],
) -> list[StepComparison]:
    """Train the model in one process, and compare it with a run whose parts had these layouts and batches.

    Float32 steps before the first 16-bit step are compared in float32; all others as 16-bit steps. If a comparison
    departs, references with moved weights are added, which measure the effect of rounding; in float32 also one that
    computes the microbatches in turn, as the run does.

    One process computes a global batch at once. It computes microbatch by microbatch if these have weights, if batch
    normalization makes a sample's output depend on its microbatch, or if even the order of sums must be equal.

    Args:
        choice, model: the model, and it as it was built before the run.
        legs: the layout of a part of the run, and by step the batches of its replicas.
        training: the settings of the steps.
        records: the steps of the run, over all parts.
    """
    config = getattr(model, "config", None)
    steps = [
        [microbatches_of(batch, layout.microbatches, config) for batch in replicas]
        for layout, batches in legs
        for replicas in batches
    ]
    dtypes = [DTYPES[layout.precision] for layout, batches in legs for _ in batches]
    first_layout = legs[0][0]
    model = model.to(default_device())
    by_weight: Weigh = _samples if choice.weighed_by == "samples" else _counted
    can_weigh = choice.weighed_by == "samples" or is_one_mean(model, steps[0][0][0], training.criterion)
    bitwise = can_weigh and _gives_equal_bits(choice, model, first_layout)
    has_batch_norm = any(isinstance(module, _BatchNorm) for module in model.modules())
    weigh = by_weight if choice.weighed_by is not None or bitwise or has_batch_norm else None

    def train(
        dtypes: Sequence[torch.dtype], model: nn.Module, float32_scale: float = 1.0, *, apart: bool = False
    ) -> list[StepRecord]:
        """Train in one process, in the given format of each step; `apart`: by microbatches, if these can be weighed."""
        return reference.train(
            model,
            steps[: len(dtypes)],
            # The kernel that boosted optimizers choose: another rounding can change the sign of a number near zero.
            make_optimizers=partial(
                optimizers_of, kind=training.optimizer, vector_rate=training.vector_rate, fused=True
            ),
            criterion=training.criterion,
            dtypes=dtypes,
            max_norm=first_layout.max_norm,
            loss_scale=LOSS_SCALE,
            float32_scale=float32_scale,
            overflow_step=training.overflow_step,
            weigh=by_weight if apart and can_weigh else weigh,
        )

    first_16_bit = next((step for step, dtype in enumerate(dtypes) if dtype is not torch.float32), len(steps))
    compared: list[StepComparison] = []
    if first_16_bit:
        compared = _compare_float32(model, records[:first_16_bit], train, training, bitwise=bitwise)
    if first_16_bit < len(steps):
        rate = largest_rate(training.optimizer, training.vector_rate)
        compared += _compare_16_bit(model, records, dtypes, train, rate)[first_16_bit:]
    return compared


def _compare_float32(
    model: nn.Module,
    records: Sequence[StepRecord],
    train: _Train,
    training: Training,
    *,
    bitwise: bool,
) -> list[StepComparison]:
    """Compare steps in float32 with one process."""
    dtypes = [torch.float32] * len(records)
    compare = partial(
        compare_float32,
        records,
        train(dtypes, model),
        learning_rate=largest_rate(training.optimizer, training.vector_rate),
        epsilon=None if training.optimizer == "sgd" else EPSILON,
        bitwise=bitwise,
        rounding=rounding_of(model, training.optimizer),
    )
    compared = compare()
    if first_departure(compared) is not None:
        near = _moved(model, torch.finfo(torch.float32).eps, ROUNDINGS_FLOAT32)
        rounded = (train(dtypes, moved, OTHER_SCALE) for moved in near)
        compared = compare(rounded=chain([train(dtypes, model, apart=True)], rounded))
    return compared


def _compare_16_bit(
    model: nn.Module,
    records: Sequence[StepRecord],
    dtypes: Sequence[torch.dtype],
    train: _Train,
    rate: float,
) -> list[StepComparison]:
    """Compare all steps, some of them in 16 bits, with one process in both formats."""

    def references(model: nn.Module) -> list[Reference]:
        rounded, exact = train(dtypes, model), train([torch.float32] * len(dtypes), model)
        return [Reference(*step) for step in zip(rounded, exact, strict=True)]

    coarsest = max(dtypes, key=lambda dtype: torch.finfo(dtype).eps)
    compare = partial(compare_16_bit, records, references(model), dtype=coarsest, learning_rate=rate)
    compared = compare()
    if first_departure(compared) is not None:
        near = _moved(model, MOVED_16_BIT * torch.finfo(coarsest).eps, ROUNDINGS_16_BIT)
        compared = compare(nearby=[references(moved) for moved in near])
    return compared


def _counted(microbatch: Mapping[str, Tensor], divisors: Sequence[int]) -> float:
    """Return the number of labels or entries of a loss of means over equally many, else that of samples."""
    return float(divisors[0]) if len(set(divisors)) == 1 else _samples(microbatch, divisors)


def _samples(microbatch: Mapping[str, Tensor], divisors: Sequence[int]) -> float:
    return batch_size(microbatch)


def _gives_equal_bits(choice: ModelChoice, model: nn.Module, layout: Layout) -> bool:
    """Return True if the first step in float32 surely sums all numbers in the order of one process."""
    if is_cuda(default_device()):  # CUDA's atomic sums have no fixed order
        return False
    # Of any model: hidden states with channels last in memory (ConvNeXt) travel in another order, a loss may have a
    # factor of its own (ViLT).
    if choice.is_generic:
        return False
    # The gradients of an encoder's output are summed in another order if the decoder has several stages.
    is_one_stack = not getattr(getattr(model, "config", None), "is_encoder_decoder", False)
    is_pipeline_alone = layout.tp == layout.dp == layout.sp == 1 and not layout.options
    return is_pipeline_alone and is_one_stack and (layout.pp == 1 or not _is_shared(model))


def _moved(model: nn.Module, unit: float, seeds: Sequence[int]) -> Iterator[nn.Module]:
    """Yield copies of a model, one per seed, with weights moved up or down by at most this fraction."""
    for seed in seeds:
        moved = copy.deepcopy(model)
        generator = torch.Generator().manual_seed(seed)
        for parameter in moved.parameters():
            share = torch.empty_like(parameter, device="cpu").uniform_(-1, 1, generator=generator)
            parameter.data.mul_((1 + unit * share).to(parameter.device))
        yield moved


class Run(NamedTuple):
    """A model trained under a layout, on this rank."""

    layout: Layout
    booster: Booster
    model: HybridParallelModule
    optimizer: ShardedOptimizer


def boosted_under(layout: Layout, model: nn.Module, training: Training) -> Run:
    """Parallelize a model under a layout. Collective over the world."""
    plugin = HybridParallelPlugin(
        **layout.arguments,
        initial_scale=LOSS_SCALE,
        hysteresis=1,
        zero_bucket_size_in_m=0.005,  # several buckets even for a small model
    )
    booster = Booster(plugin=plugin)
    optimizers = optimizers_of(model, training.optimizer, vector_rate=training.vector_rate)
    boosted, optimizer, *_ = booster.boost(model, combined(optimizers))
    booster.seed(boosted, 0)  # two runs of one process would drop different entries
    assert isinstance(boosted, HybridParallelModule) and isinstance(optimizer, ShardedOptimizer)
    return Run(layout, booster, boosted, optimizer)


def take_steps(
    run: Run, training: Training, batches: Sequence[Batches], *, first_step: int = 0
) -> list[StepRecord]:
    """Train on the batches of each step and record it: unsharded on rank 0, without tensors on the others.

    Collective over the world.

    Args:
        first_step: the number of the first step, counted over the full run.
    """
    _, booster, boosted, optimizer = run
    mesh = boosted.mesh
    records: list[StepRecord] = []
    for step, replicas in enumerate(batches, start=first_step):
        batch = replicas[mesh.rank("dp")]
        is_last = all(mesh.rank(axis) == mesh.size(axis) - 1 for axis in ("dp", "sp", "tp"))
        # One rank's loss: only ranks of the last stage compute one.
        overflows = step == training.overflow_step and is_last
        criterion = partial(_overflowing, training.criterion) if overflows else training.criterion
        loss_scale = optimizer.loss_scale
        output = booster.execute_pipeline(iter([batch]), boosted, criterion, optimizer)
        optimizer.reduce_gradients()
        gradients = _gathered_floats(boosted, optimizer.gradients())
        optimizer.step()
        norm = optimizer.get_grad_norm()
        assert norm is not None
        optimizer.zero_grad()
        loss, norm, loss_scale, skipped = _equal_everywhere(
            output["loss"].item(), norm, loss_scale, optimizer.skipped_steps
        )
        records.append(
            StepRecord(
                loss=loss,
                norm=norm,
                gradients=gradients,
                weights=_gathered_floats(boosted, _weights(boosted, optimizer)),
                loss_scale=loss_scale,
                skipped=skipped,
                unequal_copies=_unequal_copies(boosted, optimizer),
            )
        )
    return records


def make_optimizer(model: nn.Module) -> torch.optim.Optimizer:
    """Return AdamW with weight decay on matrices only, as in fine-tuning scripts."""
    return optimizers_of(model, "adamw")[0]


def gather_full(
    local: Mapping[str, Tensor], like: Mapping[str, Tensor], mesh: ParallelMesh
) -> dict[str, Tensor]:
    """Gather the full tensors of the model on global rank 0; an empty dict elsewhere.

    Collective over the world: all-gather over every axis that shards a tensor, then over pp; tensors of other stages
    are on the CPU. Only one replica (over dp and sp, and of tied tensors on several stages) is gathered.

    Args:
        local: this rank's shard of every tensor of its stage, by name, in the same order on all ranks of an axis.
        like: by the same names, parameters with the same placements.
        mesh: the mesh.
    """
    of_stage = {name: _over_axes(tensor.detach(), like[name], mesh) for name, tensor in local.items()}
    if any(mesh.rank(axis) for axis in ("dp", "sp", "tp")):
        return {}
    if mesh.size("pp") == 1:
        return of_stage
    full: dict[str, Tensor] = {}
    for stage in gather_objects({name: tensor.cpu() for name, tensor in of_stage.items()}, mesh.group("pp")):
        full = {**stage, **full}  # of a tied tensor, that of the first stage
    return full if mesh.rank("pp") == 0 else {}


def _over_axes(local: Tensor, like: Tensor, mesh: ParallelMesh) -> Tensor:
    """All-gather the shards of a tensor over its axes; return the full tensor."""
    for shard, _ in reversed(shards_of(like, mesh.layout)):
        pieces: Sequence[Tensor] = [local]
        if shard.owner is not None:  # shards of unequal length
            pieces = gather_objects(local, mesh.group(shard.axis))
        elif shard.size > 1:
            pieces = begin_gather(local, mesh.group(shard.axis)).wait().unbind(0)
        local = shard.full(pieces)
    return local


def _gathered_floats(boosted: HybridParallelModule, tensors: dict[str, Tensor]) -> dict[str, Tensor]:
    """Gather full float32 tensors on rank 0, by parameter name. Collective over the world."""
    full = gather_full(tensors, boosted.local_parameters, boosted.mesh)
    return {name: tensor.float().cpu().clone() for name, tensor in full.items()}


def _weights(boosted: HybridParallelModule, optimizer: ShardedOptimizer) -> dict[str, Tensor]:
    """Return this rank's float32 weights by name: master weights, and frozen ones in their own format."""
    masters = optimizer.masters()
    return {
        name: masters.get(name, parameter.detach()) for name, parameter in boosted.local_parameters.items()
    }


def _unequal_copies(boosted: HybridParallelModule, optimizer: ShardedOptimizer) -> tuple[str, ...]:
    """Return the names of weights whose replicas differ between ranks. Collective over the world.

    Compares parameters and their master weights, over data ranks, tensor ranks and stages.
    """
    mesh, masters = boosted.mesh, optimizer.masters()
    local_hashes = {}  # by name and index of the shard, which replicas have in common
    for name, parameter in boosted.local_parameters.items():
        shard_index = tuple(rank // shard.replicas for shard, rank in shards_of(parameter, mesh.layout))
        local_hashes[name, shard_index] = batch_hash([parameter.detach(), masters.get(name)])
    hashes: dict[tuple[str, tuple[int, ...]], set[int]] = {}
    for hashes_of_rank in gather_objects(local_hashes):
        for key, code in hashes_of_rank.items():
            hashes.setdefault(key, set()).add(code)
    return tuple(dict.fromkeys(name for (name, _), codes in hashes.items() if len(codes) > 1))


def _overflowing(criterion: Criterion, outputs: object, inputs: object) -> Tensor | tuple[Tensor, Tensor]:
    """Return the result of a criterion with infinite gradients, as after an overflow of a 16-bit format."""
    returned = criterion(outputs, inputs)
    loss = returned[0] if isinstance(returned, tuple) else returned
    loss.register_hook(lambda gradient: gradient * inf)
    return returned


def _equal_everywhere(*values: float) -> list[float]:
    """Compare numbers over all ranks; return `nan` for those that differ, and `inf` for those that are not finite."""
    finite = [value if isfinite(value) else inf for value in values]
    return [
        numbers[0] if len(set(numbers)) == 1 else nan for numbers in zip(*gather_objects(finite), strict=True)
    ]


def _is_shared(model: nn.Module) -> bool:
    """Return True if parameters have several uses, so that a pipeline sums their gradients in another order."""
    with_duplicates = [parameter for _, parameter in model.named_parameters(remove_duplicate=False)]
    policy = policy_for(model)
    policy.set_model(model)
    plan = policy.stage_plan()
    is_tied = len(with_duplicates) > len(set(with_duplicates))
    if is_tied or plan is None:
        return is_tied
    layers_share = any(len(plan.layers_of(model, name)) > 1 for name, _ in model.named_parameters())
    return layers_share or plan.collects(model)  # then outputs of layers have several uses
