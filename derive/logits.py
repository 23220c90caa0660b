"""Uses of the logits in a forward with labels, from a traced forward of a small copy. No communication."""

from collections.abc import Callable
from dataclasses import dataclass, field
from enum import Enum
from functools import cache
from typing import Any

import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode
from torch.utils._pytree import tree_leaves
from transformers import PreTrainedConfig

from .build import Copy, small_copy
from .plans import isolated
from .tasks import task_of

# Functions that compute each logit alone, if all other tensors are single numbers: also in place, and as operators.
_SCALING = frozenset(
    written.format(name)
    for name in ("mul", "div", "truediv", "true_divide", "tanh", "float", "to", "type", "contiguous")
    for written in ("{}", "{}_", "__{}__", "__r{}__", "__i{}__")
)
_DESCRIBING = ("__get__", "dim")  # unless they return a tensor, or the size, which a shard has another of


class LogitsUse(Enum):
    """Use of the logits in a forward, before `loss_function` and before it returns them."""

    UNCHANGED = "unchanged"
    SCALED = "each alone is multiplied, divided, capped by tanh, or converted"
    OTHER = "other"


def use_of_logits(model: nn.Module, head: str) -> LogitsUse:
    """Return how a transformers model uses the result of its head in training calls with labels.

    Traced on a small copy, so branches that its batch does not take are unknown; those that depend on the size of the
    logits read it, which is OTHER. OTHER too without a copy, or if `model.loss_function` does not get these logits.

    Args:
        model: the model, of which only class and config are used.
        head: path of the head.
    """
    config = getattr(model, "config", None)
    if not isinstance(config, PreTrainedConfig):
        return LogitsUse.OTHER
    kind: Any = type(model)  # mypy takes it for unhashable
    return _use_in(kind, _Settings(config, config.to_json_string(use_diff=False)), head)


@dataclass(frozen=True)
class _Settings:
    """A config as the key of a cache: equal if all settings are."""

    config: PreTrainedConfig = field(compare=False)
    text: str


@cache  # every candidate of a trial asks again
def _use_in(kind: type[nn.Module], settings: _Settings, head: str) -> LogitsUse:
    """Return the use of the logits in the forward of a class with a config."""
    with isolated():
        try:
            return _traced_use(small_copy(kind, settings.config, task_of(kind)), head)
        except Exception:  # of any model class: no copy trains, or it has no such head, loss or outputs
            return LogitsUse.OTHER


def _traced_use(copy: Copy, head: str) -> LogitsUse:
    """Run a forward of a copy, and return its use of the logits."""
    model: Any = copy.model
    loss_function, follower = model.loss_function, _Follower()
    gets_logits: list[bool] = []  # by call of the loss

    def loss(logits: Tensor, *args: Any, **kwargs: Any) -> Tensor:
        gets_logits.append(follower.follows(logits))
        with torch._C.DisableTorchFunction():
            return loss_function(logits, *args, **kwargs)

    model.loss_function = loss
    model.get_submodule(head).register_forward_hook(lambda module, args, output: follower.begin(output))
    with follower:
        outputs = model(**copy.batch)
    returned = outputs[1] if isinstance(outputs, tuple) else outputs.logits
    is_followed = gets_logits == [True] and follower.follows(returned)
    return follower.use if is_followed else LogitsUse.OTHER


class _Follower(TorchFunctionMode):
    """Inside, records what is computed from the logits."""

    def __init__(self) -> None:
        super().__init__()
        self.use = LogitsUse.UNCHANGED
        self._followed: list[Tensor] = []

    def begin(self, logits: Tensor) -> None:
        """Follow the result of the head, which is computed once."""
        if self._followed:
            self.use = LogitsUse.OTHER
        self._followed.append(logits)

    def follows(self, value: Any) -> bool:
        """Return True for the logits, scaled or not."""
        return any(value is tensor for tensor in self._followed)

    def __torch_function__(
        self, func: Callable[..., Any], types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        """Call a function, and record what it does with the logits."""
        result = func(*args, **(kwargs or {}))
        inputs = [leaf for leaf in tree_leaves((args, kwargs)) if isinstance(leaf, Tensor)]
        if any(map(self.follows, inputs)):
            name, others = func.__name__, [tensor for tensor in inputs if not self.follows(tensor)]
            has_scalars = all(tensor.numel() == 1 for tensor in others)
            if name in _SCALING and isinstance(result, Tensor) and has_scalars:
                self._followed.append(result)
                self.use = LogitsUse.SCALED if self.use is LogitsUse.UNCHANGED else self.use
            elif name not in _DESCRIBING or isinstance(result, (Tensor, torch.Size)):
                self.use = LogitsUse.OTHER
        return result
