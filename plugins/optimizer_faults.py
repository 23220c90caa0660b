"""Why an optimizer cannot train a model under a plugin that takes both apart."""

from torch import nn
from torch.optim import Optimizer

from ..cluster.placement import placement_of
from ..zero.optimizer import ShardedOptimizer
from .hybrid_module import HybridParallelModule


def optimizer_faults(model: nn.Module, optimizer: Optimizer | None) -> list[str]:
    """Why this optimizer cannot train this model; empty when it can."""
    if isinstance(model, HybridParallelModule) or any(
        placement_of(parameter) is not None for parameter in model.parameters()
    ):
        return ["the model is already boosted: give booster.boost the plain transformers model, once"]
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
