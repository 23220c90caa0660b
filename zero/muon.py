"""Muon for stacks of matrices and for fused projections."""

from collections.abc import Iterable, MutableMapping, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.nn import Parameter


class Muon(torch.optim.Muon):
    """torch's Muon, which takes matrices alone, also for experts' parameters: a stack is one matrix per expert.

    A parameter of more than two dimensions is updated as separate matrices over its last two. A fused projection (q, k
    and v in one) is one matrix, unless `blocks` gives the lengths of the matrices in it. Both also hold in one process.

    Args:
        params: parameters or groups of at least two dimensions. A group may set `blocks`, too.
        blocks: the lengths of the separate matrices in every parameter, along the dimension before the last one.
        transposed: True if these lengths are along the last dimension (GPT-2's projections).
        options: options of torch's Muon.
    """

    def __init__(
        self,
        params: Iterable[Any],
        *,
        blocks: Sequence[int] | None = None,
        transposed: bool = False,
        **options: Any,
    ) -> None:
        super().__init__([Parameter(torch.zeros(1, 1))], **options)  # checks the options
        self.param_groups.clear()
        self.defaults |= {"blocks": blocks, "transposed": transposed}
        groups = list(params)
        if not groups:
            raise ValueError("Muon got an empty list of parameters: give matrices, or stacks of them")
        if not isinstance(groups[0], dict):
            groups = [{"params": groups}]
        for group in groups:
            self.add_param_group(group)

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """Add a group of matrices, or stacks of matrices.

        Raises:
            ValueError: a parameter has fewer dimensions, or other lengths than those of `blocks`.
        """
        super().add_param_group(param_group)
        try:
            self._require_matrices(param_group)
        except ValueError:
            self.param_groups.pop()
            raise

    @staticmethod
    def _require_matrices(param_group: dict[str, Any]) -> None:
        """Raise ValueError for a group with a parameter that is no matrix, or has other lengths than `blocks`."""
        blocks, dim = param_group.get("blocks"), -1 if param_group.get("transposed") else -2
        for parameter in param_group["params"]:
            if parameter.dim() < 2:
                raise ValueError(
                    f"Muon got a parameter of shape {tuple(parameter.shape)}, which is no matrix: give it to AdamW, by "
                    "CombinedOptimizer([Muon(matrices), AdamW(others)])"
                )
            if blocks is not None and sum(blocks) != parameter.shape[dim]:
                raise ValueError(
                    f"blocks={tuple(blocks)} of Muon do not add up to dim {dim} of shape {tuple(parameter.shape)}: "
                    "give the lengths of all its matrices, and other parameters in another group"
                )

    def _init_group(
        self,
        group: MutableMapping[str, Any],
        params_with_grad: list[Tensor],
        grads: list[Tensor],
        muon_momentum_bufs: list[Tensor],
    ) -> bool:
        """Override torch's method, which fills the lists for a step; replace each tensor in them by its matrices."""
        has_complex = super()._init_group(group, params_with_grad, grads, muon_momentum_bufs)
        for tensors in (params_with_grad, grads, muon_momentum_bufs):
            tensors[:] = [matrix for tensor in tensors for matrix in _matrices(tensor, group)]
        return has_complex


def _matrices(stack: Tensor, group: MutableMapping[str, Any]) -> Iterable[Tensor]:
    """Return views of the separate matrices of a parameter."""
    matrices = stack.detach().flatten(0, -3).unbind() if stack.dim() > 2 else [stack.detach()]
    if group["blocks"] is None:
        return matrices
    dim = 1 if group["transposed"] else 0
    return [block for matrix in matrices for block in matrix.split(list(group["blocks"]), dim)]
