"""Trial of tensor parallelism: a small copy, sharded over the threads of one process, beside the whole copy.

[Note: tried splits] A plan says how weights are sharded, and nothing in it says that the forward between them allows
it. So the layers that boost would make are executed: every rank is a thread with its shards of the small copy, and
collectives exchange tensors in memory (cluster/threads.py). In float64, loss and gradients equal those of the whole
copy but for rounding; a plan with which they depart is not used.
"""

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import Parameter

from ..cluster.placement import PartialGrad, Shard, placement_on
from ..cluster.threads import run_threads, thread_groups
from ..derive.build import Copy, described
from ..derive.double import StaysDouble, gradient_departure, loss_departure
from ..derive.inputs import loss_of
from .policy import Policy
from .refusals import mark_all_parallelized
from .shard_config import ShardConfig
from .sharder import ModelSharder


def split_departure(copy: Copy, policy: Callable[[nn.Module], Policy], size: int) -> str | None:
    """Return how loss or gradients of a small copy on `size` ranks differ from the unsharded copy; None if they agree.

    Args:
        copy: the small copy; `in_double` gives exact comparisons.
        policy: returns a policy for a model that the copy makes.
        size: number of ranks.

    Raises:
        ValueError: the policy refuses the model, or its sizes.
    """
    groups = thread_groups(size)
    sharded = [_shard_over(copy.make(0), policy, group) for group in groups]  # by rank, with equal weights
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
        if departure := _gradient_departure(name, parameter, local):
            return departure
    return None


def _loss(copy: Copy, model: nn.Module) -> Tensor:
    """Compute loss and gradients of a model, with random numbers that are the same for all; return the loss."""
    torch.manual_seed(1)
    with StaysDouble():
        loss = loss_of(model(**copy.batch))
        loss.backward()
    return loss.detach()


def _shard_over(model: nn.Module, policy: Callable[[nn.Module], Policy], group: Any) -> nn.Module:
    """Shard a model, in place, as one rank of a group of threads would."""
    sharder = ModelSharder(model, policy(model), ShardConfig(tensor_parallel_process_group=group))
    mark_all_parallelized(model)
    sharder.shard()
    return sharder.model


def _gradient_departure(name: str, unsharded: Parameter, local: Sequence[Parameter]) -> str | None:
    """Return how the gradients of a parameter's shards on all ranks differ from that of the unsharded one.

    Args:
        name: name of the parameter.
        unsharded: the unsharded parameter.
        local: the parameter of each rank, in order.
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
    else:
        totals = [sum(gradients, start=torch.zeros(()))] if isinstance(placement, PartialGrad) else gradients
    return gradient_departure(f"{name} on {len(local)} ranks", _gradient_or_zeros(unsharded), totals)


def _gradient_or_zeros(parameter: Parameter) -> Tensor:
    """Return the gradient of a parameter; zeros if it has none."""
    return torch.zeros_like(parameter) if parameter.grad is None else parameter.grad
