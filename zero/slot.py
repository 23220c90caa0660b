"""One parameter's place in a bucket, and the placeholder for its gradient while that is sharded."""

from dataclasses import dataclass
from functools import cached_property
from typing import Any

import torch
from torch import Tensor
from torch.nn import Parameter

from .partition import ManagedParameter


class ShardedGradient(Tensor):
    """Placeholder in `parameter.grad` for a gradient that exists only in the ranks' slices; refuses to be read.

    With None, torch's clipping would silently skip the parameter. The placeholder has a shape and no memory.

    Args:
        like: a tensor of the gradient's shape.
        name: the parameter's name.
    """

    parameter_name: str

    def __new__(cls, like: Tensor, name: str) -> "ShardedGradient":
        """Make a float32 placeholder on the device of `like`."""
        gradient: ShardedGradient = torch.Tensor._make_wrapper_subclass(
            cls, like.shape, dtype=torch.float32, device=like.device
        )
        gradient.parameter_name = name
        return gradient

    @classmethod
    def __torch_dispatch__(cls, *_: Any) -> Any:
        """Refuse every operation."""
        raise RuntimeError(
            "at stage 2 gradients are sharded over the replicas, and parameter.grad cannot be read: call "
            "optimizer.clip_grad_by_norm(max_norm) or optimizer.clip_grad_by_value(clip_value) to clip, or give the "
            "plugin max_norm; optimizer.zero_grad() to drop them; and to read them optimizer.reduce_gradients() and "
            "optimizer.gradients()"
        )

    def __repr__(self) -> str:  # type: ignore[override]
        return f"ShardedGradient({self.parameter_name!r}, shape={tuple(self.shape)})"


@dataclass(kw_only=True, eq=False)
class Slot:
    """One parameter's place in a bucket.

    Args:
        managed: the parameter and how its gradient is reduced.
        start, stop: bounds of its elements in the unsharded buffers.
        weight: the view into the unsharded parameters, in the parameter's shape.
        gradient: the view into the unsharded gradients, in the same shape; None while a stage-2 bucket has no buffer.
        in_slice: the parameter's entries in this rank's slice; empty where they do not overlap.
        piece: the master weights that this rank steps, None if it steps none: the 1-D overlap of the parameter with
            the slice of masters, or the full parameter, see owned.py.
        piece_start: index of the first entry of `in_slice` among the parameter's entries.
        piece_gradient: the gradient of `piece`; None where `piece` is, and outside of a step of a full parameter.
        version: the parameter's version counter when its master was last known to agree with it.
        was_reduced: True if this rank contributed a gradient to a reduction since gradients were last dropped.

    Attributes:
        parameter: the model's parameter.
    """

    managed: ManagedParameter
    start: int
    stop: int
    weight: Tensor
    gradient: Tensor | None
    in_slice: slice
    piece: Parameter | None
    piece_start: int
    piece_gradient: Tensor | None
    version: int
    was_reduced: bool = False

    def __post_init__(self) -> None:
        self.parameter = self.managed.parameter
        self._address, self._dtype = self.weight.data_ptr(), self.weight.dtype

    @property
    def has_gradient(self) -> bool:
        """Return True if a backward computed a gradient of the parameter."""
        return self.unsharded_gradient is not None or self.was_reduced

    @property
    def unsharded_gradient(self) -> Tensor | None:
        """Return `parameter.grad` while it is unsharded on this rank."""
        gradient = self.parameter.grad
        return None if isinstance(gradient, ShardedGradient) else gradient

    @cached_property
    def sharded_gradient(self) -> ShardedGradient:
        """Return the placeholder for `parameter.grad` once it is sharded."""
        return ShardedGradient(self.weight, self.managed.name)

    def view(self, flat: Tensor) -> Tensor:
        """Return the parameter's view into an unsharded buffer, in its shape."""
        return view_like(flat, self.weight, self.start)  # the parameter itself may be in flight

    def set_grad(self, gradient: Tensor | None) -> None:
        """Set `parameter.grad`."""
        if self.parameter.grad is not gradient:
            self.parameter.grad = gradient

    def collect(self) -> None:
        """Copy `parameter.grad` into the view into the bucket, and set it to this view; no gradient stays None.

        Autograd makes a new tensor for the first gradient after `zero_grad`, and adds in place from then on.

        Raises:
            ValueError: the gradient is sparse.
        """
        gradient = self.parameter.grad
        if gradient is None or gradient is self.gradient or isinstance(gradient, ShardedGradient):
            return
        assert self.gradient is not None  # borrowed before accumulation
        if gradient.layout is not torch.strided:
            raise ValueError(
                f"the gradient of {self.managed.name} is {gradient.layout} and only dense ones can be "
                "reduced: build the embedding with sparse=False"
            )
        self.gradient.copy_(gradient.detach())
        self.parameter.grad = self.gradient

    @property
    def is_in_place(self) -> bool:
        """Return True if the parameter is still the view into the bucket."""
        return self.parameter.data_ptr() == self._address and self.parameter.dtype is self._dtype


def view_like(flat: Tensor, like: Tensor, start: int) -> Tensor:
    """Return the view of flat memory from `start` on, in the shape of a tensor."""
    return flat[start : start + like.numel()].view(like.shape)
