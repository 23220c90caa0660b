"""Errors of a user's optimizer for a model."""

from torch import nn
from torch.optim import Optimizer

from ..shardformer.tables.experts import interface_of
from ..zero.kinds import UpdateKind, update_kinds
from ..zero.optimizer import ShardedOptimizer
from .scaled_optimizer import ScaledOptimizer


def optimizer_errors(model: nn.Module, optimizer: Optimizer | None, ep_size: int = 1) -> list[str]:
    """List reasons why this optimizer cannot train this model; none without an optimizer.

    Args:
        model: the full model, before any change.
        optimizer: the user's.
        ep_size: the number of ranks over which experts are distributed.
    """
    if optimizer is None:
        return []
    if isinstance(optimizer, ShardedOptimizer | ScaledOptimizer):
        return ["the optimizer is already boosted: give booster.boost the plain torch optimizer"]
    optimized = {parameter for group in optimizer.param_groups for parameter in group["params"]}
    in_model = set(model.parameters())
    foreign = len(optimized - in_model)
    if foreign:
        return [
            f"{foreign} of the optimizer's {len(optimized)} parameters are not in the model: build it on "
            "model.parameters() of the model given to booster.boost, after any change of its modules"
        ]
    return [] if ep_size == 1 else _owned_expert_errors(model, optimizer)


def _owned_expert_errors(model: nn.Module, optimizer: Optimizer) -> list[str]:
    """List the error of an optimizer such as Muon for experts that `ep_size` places on one rank each.

    Some model types have one module per expert, which only its owner keeps. An optimizer that needs full parameters
    would step these on other ranks.
    """
    experts = [
        module
        for module in model.modules()
        if (interface := interface_of(module)) and interface.has_module_per_expert
    ]
    if not experts:  # spares `update_kinds`, which tries the optimizer
        return []
    kinds = zip(optimizer.param_groups, update_kinds(optimizer), strict=True)
    full = {weight for group, kind in kinds if kind is UpdateKind.PARAMETER for weight in group["params"]}
    if not any(weight in full for module in experts for weight in module.parameters()):
        return []
    return [
        f"ep_size above 1 leaves each expert of a {type(model).__name__} to one rank, where an optimizer of full "
        "parameters (Muon, Adafactor) cannot step it: use ep_size=1, or AdamW for the experts"
    ]
