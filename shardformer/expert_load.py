"""Tokens per expert of every mixture layer, counted on the device and read on request (docs/experts.md)."""

from functools import partial
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from ..cluster.collectives import all_reduce
from ..cluster.mesh import ParallelMesh
from .layers.expert_parallel import Interface
from .tables.experts import modules_of_experts


class LayerLoad(NamedTuple):
    """The load of one layer's experts.

    Args:
        tokens: number of tokens that chose each expert with parameters; one that chooses two is counted at both.
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
        self._num_experts = {
            path: getattr(module, interface.counts[0])
            for path, (module, interface) in modules_of_experts(model).items()
        }
        self._mesh = mesh
        self._counts = torch.zeros(sum(self._num_experts.values()), dtype=torch.int64, device=mesh.device)

    def _counts_by_layer(self, counts: Tensor) -> dict[str, Tensor]:
        """Return views of the concatenated counts of all layers, by path of the layer."""
        return dict(zip(self._num_experts, counts.split(list(self._num_experts.values())), strict=True))

    def add_hooks(self, model: nn.Module) -> None:
        """Add the hooks that count, to the layers of a model already cut into stages; before experts are sharded."""
        layers = self._counts_by_layer(self._counts)
        for path, (module, interface) in modules_of_experts(model).items():
            module.register_forward_pre_hook(partial(_count_call, layers[path], interface), with_kwargs=True)

    def read(self) -> dict[str, LayerLoad]:
        """Return the load of all layers by path, and begin anew. All-reduces over data and pp; waits for the device.

        Raises:
            ValueError: the model has no experts with a known interface.
        """
        if not self._num_experts:
            raise ValueError(
                "the model has no experts that expert_load() counts: leave the call out (docs/experts.md lists "
                "the mixtures)"
            )
        total = self._counts
        for axis in ("data", "pp"):
            if self._mesh.size(axis) > 1:
                total = all_reduce(total, self._mesh.group(axis))
        loads = {
            path: LayerLoad(tokens.tolist()) for path, tokens in self._counts_by_layer(total.cpu()).items()
        }
        self._counts.zero_()
        return loads


def _count_call(
    counts_E: Tensor, interface: Interface, module: nn.Module, args: tuple, kwargs: dict[str, Any]
) -> None:
    """Forward pre-hook of a module of experts: count the choices of a call that may be trained, in place.

    Args:
        counts_E: the counts of this layer.
        interface: how the module is called.
        module, args, kwargs: of the hook.
    """
    if torch.is_grad_enabled():
        inputs = {str(index): value for index, value in enumerate((*args, *kwargs.values()))}
        count = _add_counts_in_graph if torch.compiler.is_compiling() else _add_counts
        count(counts_E, interface.call(inputs, len(counts_E)).index_NK)


def _add_counts(counts_E: Tensor, index_NK: Tensor) -> None:
    """Add to each expert's count how many tokens chose it, in place, except in a forward that backward recomputes.

    Indices above those of experts with parameters are not counted.
    """
    if torch._C._current_graph_task_id() == -1:
        index = index_NK.reshape(-1).clamp(max=len(counts_E))
        counts = counts_E.new_zeros(len(counts_E) + 1).scatter_add_(0, index, torch.ones_like(index))
        counts_E += counts[:-1]


# An operation of its own, which a compiled layer calls in each run: a condition in Python would be read once. It takes
# three times as long on the host, so other layers call the function.
_add_counts_in_graph = torch.library.custom_op(
    "echelon::count_tokens", _add_counts, mutates_args=("counts_E",)
)
