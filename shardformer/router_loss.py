"""The auxiliary loss of mixtures of experts, over the tokens of all ranks of the data axis.

[Note: router statistics] transformers multiplies, for each expert, the fraction of tokens that chose it by its mean
probability, both over the tokens of all layers. This is no sum over layers, ranks or microbatches. Sums are the factors
before the product: numbers of choices, sums of probabilities and the number of tokens, a tensor (3, E) in float32.
They are added over layers and ranks; the product is formed once. So a microbatch has the loss that one process has for
the tokens of this microbatch of all replicas. Masked tokens do not count.
"""

from collections.abc import Iterable, Sequence
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn

from ..cluster.collectives import all_reduce, paired
from ..cluster.mesh import ParallelMesh
from ..cluster.transformers_api import ROUTER_LOSS, adds_router_loss, router_loss_file
from ..pipeline.stage import Stage

# E experts, K of them chosen for a token, N tokens of a layer


class RouterLoss:
    """A function that computes a model's auxiliary loss over all ranks, in place of transformers' own.

    While the model runs, it has the place of the function in the model's file. It communicates in forwards with
    gradients and in those of a `Stage`, which all ranks run; other calls compute the loss of their tokens.

    Args:
        model: its forward calls the function.
        names: those of its file.
        group: the data axis; None is one rank.
    """

    def __init__(self, model: nn.Module, names: dict[str, Any], group: dist.ProcessGroup | None) -> None:
        self._names, self._native, self._group = names, names[ROUTER_LOSS], group
        self._is_common = False  # all ranks run this forward

        # Functions, which copies of the model share.
        def enter(module: nn.Module, args: tuple) -> None:
            self._names[ROUTER_LOSS] = self

        def leave(module: nn.Module, args: tuple, outputs: Any) -> None:
            self._names[ROUTER_LOSS] = self._native

        model.register_forward_pre_hook(enter)
        model.register_forward_hook(leave, always_call=True)

    def begin(
        self, args: tuple, kwargs: dict[str, Any], received: tuple[Tensor, ...], *, is_last: bool
    ) -> tuple[dict[str, Any], tuple[Tensor, ...]]:
        """Start a stage's forward."""
        self._is_common = True
        return kwargs, received

    def sent(self) -> tuple[Tensor, ...]:
        """Return nothing: there is one stage."""
        return ()

    def finish(self) -> None:
        """End a stage's forward."""
        self._is_common = False

    @torch.compiler.disable
    def __call__(
        self,
        gate_logits: Any,
        num_experts: int | None = None,
        top_k: int = 2,
        attention_mask: Tensor | None = None,
    ) -> Any:
        """Return the loss; arguments as of transformers' function. In forward and backward one all-reduce."""
        if not isinstance(gate_logits, tuple) or num_experts is None:
            return self._native(gate_logits, num_experts, top_k, attention_mask)
        total_3E = router_statistics(gate_logits, num_experts, top_k, attention_mask)
        if self._group is not None and (self._is_common or torch.is_grad_enabled()):
            total_3E = _over_ranks(total_3E, self._group)
        return balance_loss(total_3E)


def router_statistics(
    logits_NE: Sequence[Tensor], num_experts: int, top_k: int, mask: Tensor | None
) -> Tensor:
    """Return (3, E) in float32, summed over layers: choices of each expert, probabilities, and tokens (all equal).

    Args:
        logits_NE: of each layer.
        num_experts: E.
        top_k: the number of experts of a token.
        mask: the weight of each of the N tokens, 1 or 0; None counts all.
    """
    device = logits_NE[0].device
    total_3E = torch.zeros(3, num_experts, device=device)
    for layer_NE in logits_NE:
        probabilities_NE = F.softmax(layer_NE, dim=-1)
        chosen = torch.topk(probabilities_NE, top_k, dim=-1).indices.reshape(-1)
        weight_N = (
            torch.ones(len(layer_NE), device=device)
            if mask is None
            else mask.reshape(-1).to(device, torch.float32)
        )
        counts_E = torch.zeros(num_experts, device=device)
        counts_E.scatter_add_(0, chosen, weight_N.repeat_interleave(top_k))
        sums_E = (probabilities_NE.float() * weight_N.unsqueeze(-1)).sum(0)
        total_3E = total_3E + torch.stack([counts_E, sums_E, weight_N.sum().expand(num_experts)])
    return total_3E


def balance_loss(total_3E: Tensor) -> Tensor:
    """Return the auxiliary loss from the statistics of all its tokens, 0-d."""
    counts_E, sums_E, tokens_E = total_3E.unbind(0)
    return len(counts_E) * (counts_E / tokens_E * (sums_E / tokens_E)).sum()


def _over_ranks(total_3E: Tensor, group: dist.ProcessGroup) -> Tensor:
    """Sum statistics over ranks, and the gradients in backward: every rank's loss has the sum. One all-reduce each."""

    def over_ranks(x: Tensor) -> Tensor:
        return all_reduce(x, group)

    return paired(total_3E, over_ranks, over_ranks)


def share_router_loss(model: nn.Module, stages: Iterable[Stage], mesh: ParallelMesh) -> bool:
    """Compute the auxiliary loss of a model over the data axis, in place.

    Args:
        model: the local model.
        stages: its stages on this rank.
        mesh: the mesh.

    Returns:
        True if the model's config adds such a loss.
    """
    names = router_loss_file(model)
    if names is None or mesh.size("data") == 1:
        return False
    shared = RouterLoss(model, names, mesh.group("data"))
    for stage in stages:
        stage.carried = shared
    return adds_router_loss(model)
