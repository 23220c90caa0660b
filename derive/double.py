"""Small copies that compute in float64, also where their code converts to float32."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode
from torch.utils._pytree import tree_leaves, tree_map_only

from .build import Copy
from .inputs import loss_of


class StaysDouble(TorchFunctionMode):
    """Inside, a conversion of float64 to float32 keeps float64. It holds for this thread."""

    def __torch_function__(
        self, func: Callable[..., Any], types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        kwargs = kwargs or {}
        if func is Tensor.float and args[0].dtype is torch.float64:
            return args[0]
        if any(each is torch.float32 for each in (*args, *kwargs.values())) and any(
            isinstance(each, Tensor) and each.dtype is torch.float64 for each in tree_leaves((args, kwargs))
        ):
            args = tuple(_double(each) for each in args)
            kwargs = {name: _double(each) for name, each in kwargs.items()}
        return func(*args, **kwargs)


@dataclass(frozen=True, kw_only=True)
class DoubleCopy:
    """A small model in float64, with its batch.

    Args:
        copy: the small copy in its format.
    """

    copy: Copy

    def make(self) -> nn.Module:
        """Return the model, with the same weights each time."""
        model: Any = self.copy.make(0).double()
        if hasattr(model, "set_experts_implementation"):
            model.set_experts_implementation("eager")  # grouped products have no kernel for float64
        return model

    def run(self, model: nn.Module) -> Tensor:
        """Compute loss and gradients of a model that `make` returned; return the loss."""
        batch = tree_map_only(Tensor, lambda x: x.double() if x.is_floating_point() else x, self.copy.batch)
        with StaysDouble():
            loss = loss_of(model(**batch))
            loss.backward()
        return loss.detach()


def _double(given: Any) -> Any:
    return torch.float64 if given is torch.float32 else given
