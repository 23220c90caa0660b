"""A tensor of a whole sequence of which this rank has its part alone. Who makes one is before_layers.py."""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.utils._pytree import tree_map_only

DIM = -2  # of the sequence

# What can be told of the whole without computing it.
_TOLD = frozenset(
    (
        Tensor.shape.__get__,  # type: ignore[attr-defined]
        Tensor.ndim.__get__,  # type: ignore[attr-defined]
        Tensor.dtype.__get__,  # type: ignore[attr-defined]
        Tensor.device.__get__,
        Tensor.is_cuda.__get__,  # type: ignore[attr-defined]
        Tensor.requires_grad.__get__,  # type: ignore[attr-defined]
        Tensor.size,
        Tensor.dim,
        Tensor.is_floating_point,
        Tensor.__hash__,
        Tensor.__len__,
    )
)


class PartTensor(Tensor):
    """Stands for a whole sequence, (…, S, W), until something other than its shape and kind is asked for.

    Then the whole is computed, once, and takes its place: slower, and never another number. What goes round this (an
    autograd function that is given it) fails.

    Args:
        part: this rank's, (…, S/P, W), with padding.
        length: of the whole, S.
        make_whole: computes it, on every rank alike; with gradients if they were enabled here, whoever asks first.
    """

    _part: Tensor
    _make_whole: Callable[[], Tensor]
    _whole: Tensor | None
    _has_graph: bool

    @staticmethod
    def __new__(cls, part: Tensor, *, length: int, make_whole: Callable[[], Tensor]) -> "PartTensor":
        shape = (*part.shape[:DIM], length, part.shape[-1])
        made: PartTensor = torch.Tensor._make_wrapper_subclass(
            cls, shape, dtype=part.dtype, device=part.device, requires_grad=part.requires_grad
        )
        made._part, made._make_whole, made._whole = part, make_whole, None
        made._has_graph = torch.is_grad_enabled()
        if part.requires_grad:
            with torch._C.DisableTorchFunctionSubclass():
                made.register_hook(_refuse_gradient)
        return made

    @property
    def part(self) -> Tensor | None:
        """This rank's part, with padding; None where the whole was computed, of which parts are to be taken."""
        return self._part if self._whole is None else None

    def whole(self) -> Tensor:
        """All of it; computed the first time."""
        if self._whole is None:
            with torch.set_grad_enabled(self._has_graph):
                self._whole = self._make_whole()
        return self._whole

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """What is told of the whole without numbers; all else is done with the whole itself."""
        if func in _TOLD:
            with torch._C.DisableTorchFunctionSubclass():
                return func(*args, **(kwargs or {}))
        args, kwargs = tree_map_only(PartTensor, PartTensor.whole, (args, kwargs or {}))
        return func(*args, **kwargs)

    @classmethod
    def __torch_dispatch__(  # type: ignore[override]
        cls, func: Any, types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        """Never: there are no numbers."""
        raise AssertionError(f"{func} was given a part for the whole of a sequence")


def _refuse_gradient(gradient: Tensor) -> None:
    raise AssertionError("a gradient of a whole sequence came to what stands for it, and would be lost")
