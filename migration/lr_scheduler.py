"""ColossalAI's learning rates by step, as torch's LambdaLR. Warm-up begins at step 1 of its steps, not at 0."""

from math import cos, pi
from typing import Any

from torch.optim import Optimizer
from torch.optim.lr_scheduler import ExponentialLR as ExponentialLR  # ColossalAI has torch's there, too
from torch.optim.lr_scheduler import LambdaLR as LambdaLR
from torch.optim.lr_scheduler import MultiplicativeLR as MultiplicativeLR
from torch.optim.lr_scheduler import StepLR as StepLR


class CosineAnnealingWarmupLR(LambdaLR):
    """Linear warm-up, at step i to (i + 1) / `warmup_steps`, then a half cosine down to `eta_min` at `total_steps`."""

    def __init__(
        self,
        optimizer: Optimizer,
        total_steps: int,
        warmup_steps: int = 0,
        eta_min: float = 0.0,
        last_epoch: int = -1,
    ) -> None:
        initial = [group.get("initial_lr", group["lr"]) for group in optimizer.param_groups]

        def factor(step: int, lr: float) -> float:
            if step < warmup_steps:
                return (step + 1) / warmup_steps
            angle = pi * (step - warmup_steps) / max(total_steps - warmup_steps, 1)
            return (eta_min + (lr - eta_min) * (1 + cos(angle)) / 2) / lr if lr else 0.0

        super().__init__(optimizer, [_by_step(factor, lr) for lr in initial], last_epoch)


class CosineAnnealingLR(CosineAnnealingWarmupLR):
    """A half cosine down to `eta_min` at `total_steps`."""

    def __init__(
        self, optimizer: Optimizer, total_steps: int, eta_min: float = 0.0, last_epoch: int = -1
    ) -> None:
        super().__init__(optimizer, total_steps, 0, eta_min, last_epoch)


class LinearWarmupLR(LambdaLR):
    """Linear warm-up, at step i to (i + 1) / (`warmup_steps` + 1), then linear down to 0 at `total_steps`."""

    def __init__(
        self, optimizer: Optimizer, total_steps: int, warmup_steps: int = 0, last_epoch: int = -1, **_: Any
    ) -> None:
        def factor(step: int) -> float:
            if step < warmup_steps:
                return (step + 1) / (warmup_steps + 1)
            return max(total_steps - step, 0) / max(total_steps - warmup_steps, 1)

        super().__init__(optimizer, factor, last_epoch)


def _by_step(factor: Any, lr: float) -> Any:
    return lambda step: factor(step, lr)
