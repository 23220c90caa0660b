"""Small copies that compute in float64, also where their code converts to float32."""

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode
from torch.utils._pytree import tree_leaves, tree_map_only

from .build import Copy


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


def in_double(copy: Copy) -> Copy:
    """Return the copy in float64, if it computes in it within `StaysDouble`; otherwise the copy itself."""

    def make(seed: int) -> nn.Module:
        model: Any = copy.make(seed).double()
        if hasattr(model, "set_experts_implementation"):
            model.set_experts_implementation("eager")  # grouped products have no kernel for float64
        return model

    try:
        batch = tree_map_only(Tensor, lambda x: x.double() if x.is_floating_point() else x, copy.batch)
        double = replace(copy, make=make, model=make(0), batch=batch)
        with StaysDouble():
            return double if double.loss().dtype is torch.float64 else copy
    except Exception:  # of any model class
        return copy


def _double(given: Any) -> Any:
    return torch.float64 if given is torch.float32 else given
