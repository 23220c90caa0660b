"""ScaledOptimizer: a torch optimizer behind torch's loss scale. Scaling over pipelines is zero/."""

from typing import Any

import torch
from torch import Tensor
from torch.optim import Optimizer


class ScaledOptimizer(Optimizer):
    """A torch optimizer behind a loss scale; what it does not define is the inner optimizer's.

    A subclass of torch's Optimizer for schedulers that ask; it owns no groups of its own.
    """

    def __init__(self, optimizer: Optimizer, scaler: "torch.amp.GradScaler") -> None:
        self.optim = optimizer
        self.scaler = scaler

    def __getattr__(self, name: str) -> Any:
        return getattr(self.__dict__["optim"], name)

    def backward(self, loss: Tensor) -> None:
        """Compute gradients of the loss, scaled where the precision needs it."""
        self.scaler.scale(loss).backward()

    def step(self, closure: None = None) -> None:  # type: ignore[override]
        """Update the parameters, or skip where a scaled gradient overflowed."""
        self.scaler.step(self.optim)
        self.scaler.update()

    def zero_grad(self, set_to_none: bool = True) -> None:
        """Drop the gradients."""
        self.optim.zero_grad(set_to_none)

    def clip_grad_by_norm(self, max_norm: float, norm_type: float = 2.0) -> Tensor:
        """Clip the true gradients to a norm; returns the norm before."""
        self.scaler.unscale_(self.optim)
        parameters = [parameter for group in self.optim.param_groups for parameter in group["params"]]
        return torch.nn.utils.clip_grad_norm_(parameters, max_norm, norm_type)

    def state_dict(self) -> dict[str, Any]:
        """The inner optimizer's state."""
        return self.optim.state_dict()

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Load the inner optimizer's state."""
        self.optim.load_state_dict(state_dict)
