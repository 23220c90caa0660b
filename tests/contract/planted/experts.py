"""Faults of experts that are distributed over ranks."""

from collections.abc import Callable
from typing import Any

import torch

from echelon.verify.layout import Layout

from ...shardformer.test_expert_parallel import compared
from ..mutations import around, fault

EP2 = Layout(dp=2, ep=2)


def departs_where_routers_flip() -> str | None:
    worst = compared("mixtral", "grouped_mm", [5, 9], 0, 2.0)
    return None if max(worst.values()) < 1e-5 else str(worst)


def of_other_experts(exchange: Callable[..., Any]) -> Callable[..., Any]:
    """Compute rows with the next expert."""

    def rolled(*args: Any) -> Any:
        rows = exchange(*args)
        return rows._replace(counts_PE=rows.counts_PE.roll(1, 1))

    return rolled


def unweighted(combine: Callable[..., Any]) -> Callable[..., Any]:
    """Add the experts' results without their weights."""

    def added(self: Any, *args: Any) -> Any:
        weights_NK = torch.ones_like(self._dispatched.weights_NK)
        self._dispatched = self._dispatched._replace(weights_NK=weights_NK)
        return combine(self, *args)

    return added


FAULTS = {
    "gradients of experts are divided by the number of their replicas": fault(
        "zero.partition:SUMMED", (), "mixtral", EP2, quick=True
    ),
    "rows are computed by other experts": fault(
        "shardformer.layers.expert_parallel:exchange_counts", around(of_other_experts), "mixtral", EP2
    ),
    "results of experts are not weighted": fault(
        "shardformer.layers.expert_parallel:ExpertParallel._combine", around(unweighted), "mixtral", EP2
    ),
    "numbers of rows are replayed without the choices": fault(
        "shardformer.layers.expert_parallel:_CHOOSING", {}, check=departs_where_routers_flip, num_ranks=2
    ),
}
