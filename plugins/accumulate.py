"""Loops in Accelerate's form, which step in every call and expect that only the last call's step counts."""

from collections.abc import Callable, Iterable, Iterator
from contextlib import ExitStack, contextmanager
from typing import Any

from torch import nn
from torch.optim.lr_scheduler import LRScheduler

from ..zero.optimizer import ShardedOptimizer


@contextmanager
def accumulating(models: Iterable[nn.Module], schedulers: Iterable[LRScheduler]) -> Iterator[None]:
    """Let `step` and `zero_grad` do nothing inside this block before all calls of a step were made.

    Those of the models' optimizers, and `step` of the learning rate schedulers on them.

    Args:
        models: boosted.
        schedulers: of any optimizers; others than those of the models are left alone.
    """
    optimizers = [getattr(model, "optimizer", None) for model in models]
    with ExitStack() as stack:
        for optimizer in optimizers:
            if not isinstance(optimizer, ShardedOptimizer):
                continue
            on_it = [
                scheduler for scheduler in schedulers if scheduler.optimizer in (optimizer, optimizer.inner)
            ]
            methods = (
                (optimizer, "step"),
                (optimizer, "zero_grad"),
                *((scheduler, "step") for scheduler in on_it),
            )
            for owner, name in methods:
                stack.callback(_restore, owner, name, vars(owner).get(name))
                setattr(owner, name, _unless_incomplete(optimizer, getattr(owner, name)))
        yield


def _unless_incomplete(optimizer: ShardedOptimizer, method: Callable[..., Any]) -> Callable[..., Any]:
    def call(*args: Any, **kwargs: Any) -> Any:
        return None if optimizer.calls.is_incomplete else method(*args, **kwargs)

    return call


def _restore(owner: Any, name: str, method: Callable[..., Any] | None) -> None:
    """Give an object the method back that it had as an attribute, or that of its class for None."""
    if method is None:
        delattr(owner, name)
    else:
        setattr(owner, name, method)
