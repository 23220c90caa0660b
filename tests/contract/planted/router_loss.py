"""Faults in the auxiliary loss of mixtures."""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from echelon.cluster.collectives import all_reduce, paired, unchanged
from echelon.verify.layout_choice import Layout

from ..mutations import around, fault
from ..router_loss_rows import MIXTRAL

REPLICAS, STAGES = Layout(dp=2), Layout(pp=2, schedule="zbv")


def by_layer(compute: Callable[..., Any], self: Any, logits: tuple[Tensor, ...], *further: Any) -> Tensor:
    """Multiply fractions and probabilities in every layer, and average the products."""
    return torch.stack([compute(self, (layer_logits,), *further) for layer_logits in logits]).mean()


def without_gradient(total: Tensor, group: Any) -> Tensor:
    """Sum statistics, but not their gradients."""
    return paired(total, lambda x: all_reduce(x, group), unchanged)


def emptied(sent: Callable[[Any], tuple[Tensor, ...]], self: Any) -> Any:
    """Send statistics of no tokens."""
    return tuple(statistic * 0 for statistic in sent(self))


def cut_off(sent: Callable[[Any], tuple[Tensor, ...]], self: Any) -> Any:
    """Send statistics without their graph."""
    return tuple(statistic.detach() for statistic in sent(self))


def unmasked(sum_up: Callable[..., Tensor], logits: Any, num_experts: Any, top_k: Any, mask: Any) -> Any:
    """Count masked tokens."""
    return sum_up(logits, num_experts, top_k, None)


# fmt: off
FAULTS = {
    "statistics are multiplied in every layer": fault("shardformer.router_loss:RouterLoss.__call__", around(by_layer),
        MIXTRAL, REPLICAS),
    "the loss is averaged over ranks": fault("shardformer.router_loss:_over_ranks", lambda total, group: total, MIXTRAL,
        REPLICAS, quick=True),
    "gradients of statistics are not summed over ranks": fault("shardformer.router_loss:_over_ranks", without_gradient,
        MIXTRAL, REPLICAS),
    "statistics of earlier stages are lost": fault("shardformer.router_loss:RouterLoss.sent", around(emptied), MIXTRAL,
        STAGES),
    "no gradient of statistics returns to earlier stages": fault("shardformer.router_loss:RouterLoss.sent",
        around(cut_off), MIXTRAL, STAGES),
    "masked tokens count": fault("shardformer.router_loss:router_statistics", around(unmasked), MIXTRAL, REPLICAS),
}
# fmt: on
