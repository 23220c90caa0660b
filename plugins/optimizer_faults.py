"""Why an optimizer cannot train a model under a plugin that takes both apart."""

from torch import nn
from torch.optim import Optimizer

from ..shardformer.whole_gradients import is_split
from ..zero.optimizer import ShardedOptimizer
from .hybrid_module import HybridParallelModule


def split_faults(model: nn.Module) -> list[str]:
    """Why a model cannot be boosted: a plugin or ShardFormer had it before. Empty when it can.

    ShardFormer's hooks sum and average gradients, which an optimizer of ours would do once more.
    """
    if isinstance(model, HybridParallelModule) or is_split(model):
        return [
            "the model is already boosted, or ShardFormer has split it: give booster.boost the plain transformers "
            "model, once"
        ]
    return []


def optimizer_faults(model: nn.Module, optimizer: Optimizer | None) -> list[str]:
    """Why this optimizer cannot train this model; empty when it can."""
    if faults := split_faults(model):
        return faults
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
