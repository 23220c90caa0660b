"""The optimizer of a model under fully_shard: the user's own, on this rank's pieces."""

from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor
from torch.nn import Parameter
from torch.optim import Optimizer

from ..shardformer.partial_state import is_partial
from ..zero.state import PARTIAL_STATE
from .fsdp_module import TorchFSDPModel
from .scaled_optimizer import ScaledOptimizer


class FSDPOptimizer(ScaledOptimizer):
    """The user's optimizer behind a loss scale, its groups re-pointed at the shared-out parameters.

    Groups keep their order and all their settings. With DTensors an overflow on any rank of a shard group is
    found by all of them, and replicas have equal gradients: all ranks skip the same steps.

    Args:
        optimizer: the user's, on the parameters of the plain model, without states.
        scaler: the loss scale, turned off where the precision needs none.
        model: the model, shared out.
        names: the name of each parameter that the plain model had.
    """

    def __init__(
        self,
        optimizer: Optimizer,
        scaler: "torch.amp.GradScaler",
        model: TorchFSDPModel,
        names: Mapping[Parameter, str],
    ) -> None:
        pieces = dict(model.module.named_parameters())
        super().__init__(optimizer, scaler, {piece: name for name, piece in pieces.items()})
        self.model = model
        for group in optimizer.param_groups:
            group["params"] = [pieces[names[parameter]] for parameter in group["params"]]

    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        """Update this rank's pieces, or skip on all ranks where a scaled gradient overflowed; see `ScaledOptimizer`.

        Raises:
            RuntimeError: gradients of a `no_sync` block were never reduced.
        """

        def prepare() -> Any:
            loss = None if closure is None else closure()
            self._require_reduced("step()")
            self.model.free_whole_parameters()
            return loss

        return super().step(prepare)

    def state_dict(self) -> dict[str, Any]:
        """The inner optimizer's state, where this rank has all of it.

        Raises:
            RuntimeError: this rank has a part; names `booster.save_optimizer`.
        """
        if any(is_partial(each) for each in self._parameters()):
            raise RuntimeError(PARTIAL_STATE)
        return super().state_dict()

    def zero_grad(self, set_to_none: bool = True) -> None:
        """Drop the gradients, those that a `no_sync` block added up too."""
        self.model.drop_unreduced_gradients()
        super().zero_grad(set_to_none)

    def clip_grad_by_norm(
        self, max_norm: float, norm_type: float = 2.0, error_if_nonfinite: bool = False
    ) -> Tensor:
        """Clip the true gradients to a norm over all pieces; see `ScaledOptimizer`. Every rank calls."""
        self._require_reduced("clip_grad_by_norm()")
        return super().clip_grad_by_norm(max_norm, norm_type, error_if_nonfinite)

    def clip_grad_by_value(self, clip_value: float) -> None:
        """Clip every entry of the true gradients; see `ScaledOptimizer`. Every rank calls."""
        self._require_reduced("clip_grad_by_value()")
        super().clip_grad_by_value(clip_value)

    def _has_gradients(self) -> bool:
        return super()._has_gradients() or self.model.has_unreduced_gradients()

    def _norms(self) -> Tensor:
        """Of each gradient, and one of all that a `no_sync` block added up, which torch keeps elsewhere."""
        reduced = super()._norms()
        unreduced = torch.stack([reduced.new_zeros(()), *map(self._norm, self.model.unreduced_gradients())])
        return torch.cat([reduced, unreduced.norm().unsqueeze(0)])

    @staticmethod
    def _norm(gradient: Tensor) -> Tensor:
        return gradient.detach().float().norm()

    def _require_reduced(self, call: str) -> None:
        if self.model.has_unreduced_gradients():
            raise RuntimeError(
                f"{call} after booster.no_sync alone: its gradients are reduced by a backward outside of the block. "
                "Leave the last microbatch of a step out of no_sync, or drop them by zero_grad()"
            )
