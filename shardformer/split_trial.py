"""Trial of tensor parallelism: a small copy, sharded over the threads of one process, beside the whole copy.

[Note: tried splits] A plan says how weights are sharded, and nothing in it says that the forward between them allows
it. So the layers that boost would make are executed: every rank is a thread with its shards of the small copy, and
collectives exchange tensors in memory (cluster/threads.py). In float64, loss and gradients equal those of the whole
copy but for rounding; a plan with which they depart is not used, and a mode of sequence parallelism is refused.
"""

from collections.abc import Callable, Sequence
from copy import copy as shallow_copy
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import Parameter

from ..cluster.placement import PartialGrad, Shard, placement_on
from ..cluster.threads import run_threads, thread_groups
from ..derive.build import Copy, described
from ..derive.double import StaysDouble, gradient_departure, in_double, loss_departure
from ..derive.inputs import loss_of
from ..derive.plans import copy_of, isolated
from .layers.sequence_axis import INSTEAD, SAMPLE_DROPPER
from .policy import Policy
from .refusals import mark_all_parallelized
from .sequence.config import SEQUENCE_MODES
from .shard_config import ShardConfig
from .sharder import ModelSharder

# Modules that compute each position independently, which a script may put into layers.
_HARMLESS = (nn.Linear, nn.Dropout, nn.Identity, nn.ModuleList, nn.ModuleDict, nn.Sequential)


def sequence_errors(model: nn.Module, policy: Policy, config: ShardConfig) -> list[str]:
    """List how sequence parallelism would change the numbers of a model: by trial on a small copy, on two ranks.

    What alone departs stays unsharded: the sequences of an encoder (`policy.shards_encoder`), or those between the last
    layer and the loss (`policy.keeps_sequences`).

    Args:
        model: the full model; may be on the meta device.
        policy: the policy of the model, with its config.
        config: axes and options.
    """
    mode = config.sequence.mode
    if mode is None or policy.sequence_plan() is None:  # which is an error of the policy
        return []
    option, kind = f"sequence_parallelism_mode={mode!r}", type(model).__name__
    try:
        with isolated():
            copies = _copies(model)
            if unseen := _unseen_classes(model, policy, copies[0]):
                raise ValueError(f"a {kind} of transformers has no {', '.join(unseen)}")
            departure = _sequence_departure(copies, policy, mode)
    except ValueError as error:
        return [f"{option} is first tried on a small copy of the model: {error}: {INSTEAD}"]
    if departure is None:
        return []
    return [f"{option}: a small copy of this {kind} departs from one process: {departure}: {INSTEAD}"]


def _copies(model: nn.Module) -> list[Copy]:
    """Return a small copy with two samples, and one with three, of which one is padded if the model takes a mask."""
    copy = copy_of(model)
    batch = copy.inputs.make(3)
    mask = batch.get("attention_mask")
    if isinstance(mask, Tensor) and mask.ndim == 2:
        mask[0, -3:] = 0
    return [in_double(copy), in_double(replace(copy, batch=batch))]


def _sequence_departure(copies: Sequence[Copy], policy: Policy, mode: str) -> str | None:
    """Return how copies depart under a mode; None if they agree with what `policy` then shards."""
    departures: list[str] = []
    has_encoder = getattr(policy.stage_plan(), "encoder", None) is not None
    for policy.shards_encoder in (True, False) if has_encoder else (True,):
        for policy.keeps_sequences in (True, False):
            tried = (split_departure(copy, lambda _: shallow_copy(policy), 2, mode=mode) for copy in copies)
            if (departure := next(filter(None, tried), None)) is None:
                return None
            departures.append(departure)
    return departures[0]


def _unseen_classes(model: nn.Module, policy: Policy, copy: Copy) -> list[str]:
    """Return the names of classes of modules that are in a model's layers and not in its small copy; peft's may be."""
    plan: Any = policy.sequence_plan()
    layers = map(model.get_submodule, plan.layer_paths(model))
    classes = {type(module): None for layer in layers for module in layer.modules()}
    seen = {*map(type, copy.model.modules()), *_HARMLESS}
    return [
        kind.__name__
        for kind in classes
        if kind not in seen
        and not kind.__module__.startswith("peft.")
        and not kind.__name__.endswith(SAMPLE_DROPPER)
    ]


def split_departure(
    copy: Copy, policy: Callable[[nn.Module], Policy], size: int, *, mode: str | None = None
) -> str | None:
    """Return how loss or gradients of a small copy on `size` ranks differ from the unsharded copy; None if they agree.

    Args:
        copy: the small copy; `in_double` gives exact comparisons.
        policy: returns a policy for a model that the copy makes.
        size: number of ranks.
        mode: of sequence parallelism; None shards tensors alone.

    Raises:
        ValueError: the policy refuses the model, or its sizes.
    """
    groups = thread_groups(size)
    sharded = [
        _shard_over(copy.make(0), policy, group, mode) for group in groups
    ]  # by rank, with equal weights
    unsharded = copy.make(0)
    try:
        loss = _loss(copy, unsharded)
        losses = run_threads(groups, lambda group: _loss(copy, sharded[group.rank()]))
    except Exception as error:  # the code of any model, given tensors of another width, may raise anything
        return described(error)
    for sharded_loss in losses:
        if departure := loss_departure(loss, sharded_loss, f"on {size} ranks"):
            return departure
    parameters_by_rank = [dict(model.named_parameters()) for model in sharded]
    for name, parameter in unsharded.named_parameters():
        local = [parameters[name] for parameters in parameters_by_rank]
        if departure := _gradient_departure(name, parameter, local, is_averaged=mode in SEQUENCE_MODES):
            return departure
    return None


def _loss(copy: Copy, model: nn.Module) -> Tensor:
    """Compute loss and gradients of a model, with random numbers that are the same for all; return the loss."""
    torch.manual_seed(1)
    with StaysDouble():
        loss = loss_of(model(**copy.batch))
        loss.backward()
    return loss.detach()


def _shard_over(
    model: nn.Module, policy: Callable[[nn.Module], Policy], group: Any, mode: str | None
) -> nn.Module:
    """Shard a model, in place, as one rank of a group of threads would."""
    axis = "sequence" if mode in SEQUENCE_MODES else "tensor"
    config = ShardConfig(
        **{f"{axis}_parallel_process_group": group},
        enable_sequence_parallelism=mode is not None,
        sequence_parallelism_mode=mode,
    )
    sharder = ModelSharder(model, policy(model), config)
    mark_all_parallelized(model)
    sharder.shard()
    return sharder.model


def _gradient_departure(
    name: str, unsharded: Parameter, local: Sequence[Parameter], *, is_averaged: bool
) -> str | None:
    """Return how the gradients of a parameter's shards on all ranks differ from that of the unsharded one.

    Args:
        name: name of the parameter.
        unsharded: the unsharded parameter.
        local: the parameter of each rank, in order.
        is_averaged: the optimizer averages gradients over the ranks, as those of a sequence axis.
    """
    placement = placement_on(local[0], "tp")
    gradients = [_gradient_or_zeros(shard) for shard in local]
    if isinstance(placement, Shard):
        num_replicas = placement.replicas  # of each shard, on neighbouring ranks that add their gradients
        gradients = [
            sum(gradients[rank - rank % num_replicas :][:num_replicas], start=torch.zeros(()))
            for rank in range(len(gradients))
        ]
        totals = [placement.full(gradients)]
    elif is_averaged:
        totals = [sum(gradients, start=torch.zeros(())) / len(gradients)]
    else:
        totals = [sum(gradients, start=torch.zeros(()))] if isinstance(placement, PartialGrad) else gradients
    return gradient_departure(f"{name} on {len(local)} ranks", _gradient_or_zeros(unsharded), totals)


def _gradient_or_zeros(parameter: Parameter) -> Tensor:
    """Return the gradient of a parameter; zeros if it has none."""
    return torch.zeros_like(parameter) if parameter.grad is None else parameter.grad
