"""Why a model cannot be boosted, or an optimizer not train it under a plugin that takes both apart."""

from torch import nn
from torch.optim import Optimizer

from ..shardformer.given import given_faults, is_taken
from ..zero.optimizer import ShardedOptimizer


def model_faults(model: nn.Module) -> list[str]:
    """Why a model cannot be boosted: it is none, has no values, or a plugin or ShardFormer had it before.

    ShardFormer's hooks sum and average gradients, which an optimizer of ours would do once more; so do a plugin's.
    Other checks would stumble over these. Empty when it can.
    """
    if faults := given_faults(model):
        return faults
    if is_taken(model):
        return [
            "the model is already boosted, or ShardFormer has split it: give booster.boost the plain transformers "
            "model, once"
        ]
    return []


def optimizer_faults(model: nn.Module, optimizer: Optimizer | None) -> list[str]:
    """Why this optimizer cannot train this model; empty when it can."""
    if optimizer is None:
        return []
    if isinstance(optimizer, ShardedOptimizer):
        return ["the optimizer is already boosted: give booster.boost the plain torch optimizer"]
    given = {parameter for group in optimizer.param_groups for parameter in group["params"]}
    own = set(model.parameters())
    foreign = len(given - own)
    if foreign:
        return [
            f"the optimizer holds {foreign} of {len(given)} parameters that are not the model's: build it on "
            "model.parameters() of the model that is given to booster.boost, after any change of the model's modules"
        ]
    return []
