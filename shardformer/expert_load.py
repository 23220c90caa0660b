"""Tokens per expert of every mixture layer, counted on the device and read on request (docs/experts.md)."""

from functools import partial
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from ..cluster.collectives import all_reduce
from ..cluster.mesh import ParallelMesh
from ..cluster.transformers_api import is_experts


class LayerLoad(NamedTuple):
    """The load of one layer's experts.

    Args:
        tokens: number of tokens that chose each expert; a token that chooses two is counted at both.
    """

    tokens: list[int]

    @property
    def imbalance(self) -> float:
        """Tokens of the fullest expert over the mean of all: 1 is even, the number of experts is the worst."""
        return max(self.tokens) * len(self.tokens) / max(sum(self.tokens), 1)


class ExpertLoad:
    """Counts of the tokens that chose each expert in forwards of training, since they were read.

    All tokens count that reach the experts, padding too. A recomputed forward does not count again.

    Args:
        model: the full model, of which every rank knows the layers.
        mesh: the mesh.
    """

    def __init__(self, model: nn.Module, mesh: ParallelMesh) -> None:
        self._sizes = {path: int(each.num_experts) for path, each in _experts(model).items()}
        self._mesh = mesh
        self._counts = torch.zeros(sum(self._sizes.values()), dtype=torch.int64, device=mesh.device)

    def _layers(self, counts: Tensor) -> dict[str, Tensor]:
        return dict(zip(self._sizes, counts.split(list(self._sizes.values())), strict=True))

    def count_in(self, model: nn.Module) -> None:
        """Count in the layers of a cut model, before its experts are distributed."""
        layers = self._layers(self._counts)
        for path, module in _experts(model).items():
            module.register_forward_pre_hook(partial(_count_inputs, layers[path]), with_kwargs=True)

    def read(self) -> dict[str, LayerLoad]:
        """Return the load of all layers by path, and begin anew. All-reduces over data and pp; waits for the device.

        Raises:
            ValueError: the model has no experts with the interface of transformers' experts.
        """
        if not self._sizes:
            raise ValueError(
                "the model has no experts with the interface of transformers' experts, so there is no load to read: "
                "leave the call out"
            )
        total = self._counts
        for axis in ("data", "pp"):
            if self._mesh.size(axis) > 1:
                total = all_reduce(total, self._mesh.group(axis))
        loads = {path: LayerLoad(tokens.tolist()) for path, tokens in self._layers(total.cpu()).items()}
        self._counts.zero_()
        return loads


def _experts(model: nn.Module) -> dict[str, Any]:
    return {path: module for path, module in model.named_modules() if is_experts(module)}


def _count_inputs(counts_E: Tensor, module: nn.Module, args: tuple, kwargs: dict[str, Any]) -> None:
    """Count in a call of experts: tokens, indices of experts, weights."""
    if torch.is_grad_enabled():
        _, index_NK, _ = (*args, *kwargs.values())
        (_count_in_graph if torch.compiler.is_compiling() else _count)(counts_E, index_NK)


def _count(counts_E: Tensor, index_NK: Tensor) -> None:
    """Add the numbers of choices in place, except in a forward that backward recomputes."""
    if torch._C._current_graph_task_id() == -1:
        index = index_NK.reshape(-1)
        counts_E.scatter_add_(0, index, torch.ones_like(index))


# An operation of its own, which a compiled layer calls in each run: a condition in Python would be read once. It takes
# three times as long on the host, so other layers call the function.
_count_in_graph = torch.library.custom_op("echelon::count_tokens", _count, mutates_args=("counts_E",))
