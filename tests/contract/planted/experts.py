"""Faults of experts that are distributed over ranks."""

from collections.abc import Callable
from dataclasses import replace
from typing import Any
from unittest.mock import patch

import torch
import torch.distributed as dist
from torch import nn

from echelon.cluster.placement import Replicated
from echelon.shardformer.layers import expert_parallel
from echelon.shardformer.layers.expert_parallel import ExpertParallel, Interface
from echelon.shardformer.tables.experts import INTERFACES
from echelon.verify.layout_choice import Layout
from echelon.verify.model_choice import ModelChoice

from ...shardformer.test_expert_parallel import HIDDEN, block, compared, output_of, sharded
from ..mutations import around, fault, made_from, returning

EP2 = Layout(dp=2, ep=2)


def departs_where_routers_flip() -> str | None:
    worst = compared("mixtral", "grouped_mm", [5, 9], 0, 2.0)
    return None if max(worst.values()) < 1e-5 else str(worst)


def of_other_experts(exchange: Callable[..., Any], *args: Any) -> Any:
    """Compute rows with the next expert."""
    rows = exchange(*args)
    return rows._replace(counts_PE=rows.counts_PE.roll(1, 1))


def unweighted(combine: Callable[..., Any], self: Any, *args: Any) -> Any:
    """Add the experts' results without their weights."""
    weights_NK = torch.ones_like(self._dispatched.weights_NK)
    self._dispatched = self._dispatched._replace(weights_NK=weights_NK)
    return combine(self, *args)


def sent_elsewhere(
    dispatch: Callable[..., Any], self: Any, module: nn.Module, inputs: dict[str, Any]
) -> None:
    """Send every token to the expert after its own."""
    name = list(inputs)[1]
    inputs[name] = (inputs[name] + 1) % (self._num_local * self._group.size())
    dispatch(self, module, inputs)


def without_second(combine: Callable[..., Any], self: Any, *args: Any) -> Any:
    """Drop the weight of each token's last expert."""
    weights_NK = self._dispatched.weights_NK.clone()
    weights_NK[:, -1] = 0
    self._dispatched = self._dispatched._replace(weights_NK=weights_NK)
    return combine(self, *args)


def left_out(combine: Callable[..., Any], self: Any, module: nn.Module, args: Any, output: Any) -> Any:
    """Cut the graph of a rank whose experts get no rows."""
    is_empty = not sum(self._dispatched.rows.received)
    return combine(self, module, args, output.detach() if is_empty else output)


def exchanges_without_rows() -> str | None:
    """Count the exchanges of a rank without tokens in backward; with fewer than its peers, they would wait forever."""
    group = dist.group.WORLD
    assert group is not None
    mixture, x = sharded(block("mixtral", "grouped_mm"), group), torch.zeros(1, 0, HIDDEN, requires_grad=True)
    with patch.object(expert_parallel, "exchange_rows", wraps=expert_parallel.exchange_rows) as counted:
        output = output_of(mixture, x)
        in_forward = counted.call_count
        output.sum().backward()
    exchanges = counted.call_count - in_forward
    return None if exchanges == 2 else f"{exchanges} exchanges in backward, not 2"


def hooks_not_run() -> str | None:
    """Name the parameters of experts whose hooks do not run in the backward of one token.

    Averages of ZeRO-2 begin in hooks. Without some of them ranks wait for each other, if their buckets end so.
    """
    model: Any = ModelChoice(model_type="switch_transformers").build()
    (mixture, *_) = (module for module in model.modules() if hasattr(module, "experts"))
    assert dist.group.WORLD is not None
    ExpertParallel(mixture.experts, dist.group.WORLD, INTERFACES["SwitchTransformersExperts"])
    ran: set[str] = set()
    for name, parameter in mixture.experts.named_parameters():
        parameter.register_hook(lambda _, name=name: ran.add(name))
    mixture(torch.ones(1, 1, model.config.d_model)).sum().backward()
    return ", ".join({name for name, _ in mixture.experts.named_parameters()} - ran) or None


def without_identity(interfaces: dict[str, Interface]) -> dict[str, Interface]:
    """Add nothing for experts without parameters."""
    return {name: replace(interface, is_identity_above=False) for name, interface in interfaces.items()}


EXPERTS = "shardformer.layers.expert_parallel"
COMBINE = f"{EXPERTS}:ExpertParallel._combine"
# fmt: off
FAULTS = {
    "gradients of experts are divided by the number of their replicas": fault("zero.partition:SUMMED", (), "mixtral",
        EP2),
    "rows are computed by other experts": fault(f"{EXPERTS}:exchange_counts", around(of_other_experts), "mixtral", EP2),
    "tokens are sent to other experts": fault(f"{EXPERTS}:ExpertParallel._dispatch", around(sent_elsewhere), "mixtral",
        EP2),
    "a combine weight is dropped": fault(COMBINE, around(without_second), "mixtral", EP2),
    "a rank without rows is left out of backward": fault(COMBINE, around(left_out), exchanges_without_rows, num_ranks=1,
        quick=True),
    "partial gradients of routers are taken for replicated ones": fault("shardformer.layer_split:PartialGrad",
        Replicated, "mixtral", Layout(dp=2, ep=2, tp=2, sequence="split_gather")),
    "results of experts without parameters are lost": fault("shardformer.tables.experts:INTERFACES",
        made_from(without_identity), "longcat_flash", EP2),
    "results of experts are not weighted": fault(COMBINE, around(unweighted), "mixtral", EP2),
    "experts without tokens are left out of backward": fault(f"{EXPERTS}:_PassParameters.apply",
        lambda x, *parameters: x, hooks_not_run, num_ranks=1, notice="expert_1"),
    "routers' weights are in the precision of the run": fault("plugins.hybrid_model:router_formats", returning({}),
        "switch_transformers", Layout(dp=2, precision="bf16"), notice="is no longer in the memory that boost gave it"),
    "numbers of rows are replayed without the choices": fault(f"{EXPERTS}:_CHOOSING", {}, departs_where_routers_flip,
        num_ranks=2),
}
# fmt: on
