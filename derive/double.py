"""Small copies that compute in float64, also where their code converts to float32, and their comparison."""

from collections.abc import Callable, Sequence
from dataclasses import replace
from math import isfinite
from typing import Any

import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode
from torch.utils._pytree import tree_leaves, tree_map_only

from .build import Copy, copying

# Of the loss, and of the largest gradient of a parameter; products are equal, sums may have another order.
TOLERANCES = {torch.float64: 1e-9, torch.float32: 1e-4}

# Products, which take no tensors of two dtypes.
_PRODUCTS = frozenset((torch.matmul, Tensor.matmul, Tensor.__matmul__, torch.bmm, Tensor.bmm))


class StaysDouble(TorchFunctionMode):
    """Inside, a conversion of float64 to float32 keeps float64, and so does a product of both.

    A rotary embedding multiplies its frequencies by positions that it converts to float32. It holds for this thread.
    """

    def __torch_function__(
        self, func: Callable[..., Any], types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        """Call a function; with a float64 tensor among its arguments, a requested float32 becomes float64.

        The tensors of a product become float64, too.
        """
        kwargs = kwargs or {}
        if func is Tensor.float and args[0].dtype is torch.float64:
            return args[0]
        asks_for_float32 = any(value is torch.float32 for value in (*args, *kwargs.values()))
        if (asks_for_float32 or func in _PRODUCTS) and any(
            isinstance(leaf, Tensor) and leaf.dtype is torch.float64 for leaf in tree_leaves((args, kwargs))
        ):
            convert = _tensor_to_double if func in _PRODUCTS else _dtype_to_double
            args = tuple(map(convert, args))
            kwargs = {name: convert(value) for name, value in kwargs.items()}
        return func(*args, **kwargs)


def in_double(copy: Copy) -> Copy:
    """Return the copy in float64, if it computes in it within `StaysDouble`; otherwise the copy itself."""

    def make(seed: int) -> nn.Module:
        model: Any = copy.make(seed).double()
        if hasattr(model, "set_experts_implementation"):
            model.set_experts_implementation("eager")  # grouped products have no kernel for float64
        return model

    made = copying(make)
    try:
        double = replace(copy, make=made, model=made(0), batch=in_dtype(copy.batch, torch.float64))
        with StaysDouble():
            return double if double.loss().dtype is torch.float64 else copy
    except Exception:  # of any model class
        return copy


def in_dtype(batch: dict[str, Any], dtype: torch.dtype) -> dict[str, Any]:
    """Return a batch with its floating-point tensors in a dtype."""
    converted: dict[str, Any] = tree_map_only(
        Tensor, lambda x: x.to(dtype) if x.is_floating_point() else x, batch
    )
    return converted


def loss_departure(reference: Tensor, other: Tensor, where: str) -> str | None:
    """Return how a loss departs from that of the whole copy, in words; None if it does not."""
    expected, computed = float(reference.detach()), float(other.detach())
    if not isfinite(expected):
        return f"the loss of the whole small copy is {expected}, with which nothing can be compared"
    if abs(expected - computed) <= _tolerance(reference) * max(abs(expected), 1.0):
        return None
    return f"the loss {where} is {computed:.6g}, that of the whole model {expected:.6g}"


def gradient_departure(name: str, reference: Tensor, others: Sequence[Tensor]) -> str | None:
    """Return the largest departure of a parameter's gradients from that of the whole copy, in words; or None.

    Args:
        name: of the parameter; perhaps with where it was computed.
        reference: the gradient of the whole copy.
        others: all of them must equal it.
    """
    largest, *distances = (
        float(values.abs().max()) if values.numel() else 0.0
        for values in (reference, *(other - reference for other in others))
    )
    if all(distance <= _tolerance(reference) * largest + 1e-12 for distance in distances):
        return None
    return (
        f"the gradient of {name} departs by {max(distances):.2g} from that of the whole model, whose largest value is "
        f"{largest:.2g}"
    )


def _tolerance(tensor: Tensor) -> float:
    return TOLERANCES.get(tensor.dtype, TOLERANCES[torch.float32])


def _tensor_to_double(factor: Any) -> Any:
    return factor.double() if isinstance(factor, Tensor) else factor


def _dtype_to_double(value: Any) -> Any:
    return torch.float64 if value is torch.float32 else value
