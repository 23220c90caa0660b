"""The `grad` of a parameter whose gradient is sharded: a tensor that refuses to be read."""

from typing import Any

import torch
from torch import Tensor


class ShardedGradient(Tensor):
    """Stands in `parameter.grad` at stage 2, once the gradient was averaged into the ranks' slices.

    None would tell torch's clipping that there is nothing to measure. It has a shape and no memory.

    Args:
        like: a tensor of the gradient's shape.
        name: the parameter's.
    """

    parameter_name: str

    def __new__(cls, like: Tensor, name: str) -> "ShardedGradient":
        """Make one; on the device of `like`, in float32."""
        made: ShardedGradient = torch.Tensor._make_wrapper_subclass(
            cls, like.shape, dtype=torch.float32, device=like.device
        )
        made.parameter_name = name
        return made

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
