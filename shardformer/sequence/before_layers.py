"""Sequence sharding before the layers: the embedding and rotary tables compute only this rank's shard.

The embedding must be the model's only entry. It returns a `ShardTensor` with the shape of the full sequence, from which
the first layer takes the shard: no rank materializes hidden states of a full sequence, nor their gradient. If a model
computes with the embedding's output, the full tensor is materialized, and later calls compute it directly.

Gradients follow [Note: gradients over the sequence axis] in layers/sequence_axis.py: each rank accumulates the
embedding's gradient of its own shard, as if the first layer had sharded a full sequence.
"""

from collections.abc import Callable, Mapping
from functools import cache, partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_flatten, tree_map_only, tree_unflatten

from ...cluster.transformers_api import checkpoint_function, is_recomputed
from ...pipeline.stage_plan import StagePlan, is_within
from ..layers.embedding import VocabParallelEmbedding1D, is_scaled, needs_all_uses
from ..layers.parallel_module import require_all
from ..layers.sequence_axis import SequenceAxis, axis_of

DIM = -2  # the sequence dimension

# Properties of the full tensor that are known without materializing it.
_METADATA = frozenset(
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


class ShardTensor(Tensor):
    """Placeholder of a full sequence, (…, S, W), that contains only this rank's shard.

    Any use of it except for shape, dtype and device materializes the full tensor, once: slower, with the same result.
    An autograd function that gets the placeholder itself raises.

    Args:
        shard: this rank's shard, (…, S/P, W), with padding.
        length: length of the full sequence, S.
        make_full: computes the full tensor, equal on every rank; with gradients if they were enabled here.
    """

    _local: Tensor
    _make_full: Callable[[], Tensor]
    _full: Tensor | None
    _has_graph: bool

    @staticmethod
    def __new__(cls, shard: Tensor, *, length: int, make_full: Callable[[], Tensor]) -> "ShardTensor":
        """Make a tensor of the full sequence's shape that has only a shard; `make_full` computes it if it is read."""
        shape = (*shard.shape[:DIM], length, shard.shape[-1])
        shard_tensor: ShardTensor = torch.Tensor._make_wrapper_subclass(
            cls, shape, dtype=shard.dtype, device=shard.device, requires_grad=shard.requires_grad
        )
        shard_tensor._local, shard_tensor._make_full, shard_tensor._full = shard, make_full, None
        shard_tensor._has_graph = torch.is_grad_enabled()
        if shard.requires_grad:
            with torch._C.DisableTorchFunctionSubclass():
                # The first layer takes `shard`: a gradient of this one would be lost.
                shard_tensor.register_hook(_refuse_gradient)
        return shard_tensor

    @property
    def shard(self) -> Tensor | None:
        """This rank's shard, with padding; None if the full tensor was materialized, which must be sharded then."""
        return self._local if self._full is None else None

    def full(self) -> Tensor:
        """Return the full tensor, materialized by the first call."""
        if self._full is None:
            with torch.set_grad_enabled(self._has_graph):
                self._full = self._make_full()
        return self._full

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Answer queries that need no values; call all other functions with the full tensor."""
        if func in _METADATA:
            with torch._C.DisableTorchFunctionSubclass():
                return func(*args, **(kwargs or {}))
        args, kwargs = tree_map_only(ShardTensor, ShardTensor.full, (args, kwargs or {}))
        return func(*args, **kwargs)

    @classmethod
    def __torch_dispatch__(  # type: ignore[override]
        cls, func: Any, types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        """Raise AssertionError: the placeholder has no values."""
        raise AssertionError(f"{func} was given a placeholder of a full sequence")


def _refuse_gradient(gradient: Tensor) -> None:
    """Hook of a placeholder: raise AssertionError for a gradient, which would be lost."""
    raise AssertionError("the placeholder of a full sequence received a gradient, which would be lost")


# Rotary types whose frequencies do not depend on the largest position of a call.
_FIXED_ROTARY = {"default", "linear", "yarn", "llama3", "proportional"}


def shard_modules_before_layers(model: nn.Module, plan: StagePlan) -> None:
    """Add hooks to the embedding and rotary tables so that they compute shards, where possible.

    Called after all replacements of modules.

    Args:
        model: a sharded model, with sequences sharded over the sequence axis.
        plan: the paths of its layers and entries.
    """
    paths = plan.layer_paths(model)
    layers = [model.get_submodule(path) for path in paths]
    axis = next((axis for layer in layers if (axis := axis_of(layer)) is not None), None)
    if axis is None:  # no layer of this rank's stage has sharded sequences
        return
    for name, module in model.named_modules():
        is_entry = plan.entry == (name,) and _is_lookup(module)
        if is_entry or (_is_rotary(module) and not any(is_within(name, path) for path in paths)):
            ShardedCalls(axis, layers[0]).around(module)


class ShardedCalls:
    """Hooks by which a module computes only this rank's positions, and returns placeholders of full sequences.

    The module computes each position independently, from one integer tensor (B, S).

    Args:
        axis: sequence axis of the layers.
        first: the first layer. Where a reentrant checkpoint recomputes it, modules compute full sequences, since what
            they return passes through the checkpoint.
    """

    def __init__(self, axis: SequenceAxis, first: nn.Module) -> None:
        self._axis, self._first = axis, first
        # Arguments of the running call, and the length of its sequences.
        self._full_call: tuple[tuple, dict[str, Any], int] | None = None
        self._needs_full = False  # True once the full tensor was needed: later calls compute it at once

    def around(self, module: nn.Module) -> None:
        """Add the hooks to a module."""
        module.register_forward_pre_hook(self._shard_input, with_kwargs=True)
        module.register_forward_hook(self._return_placeholders)

    def _shard_input(
        self, module: nn.Module, args: tuple, kwargs: Mapping[str, Any]
    ) -> tuple[tuple, dict[str, Any]] | None:
        """Forward pre-hook: replace the integers (B, S) among the inputs by this rank's shard.

        None leaves the call as it is: it has no or several such inputs, or the full tensor is needed anyway.
        """
        self._full_call = None
        leaves, structure = tree_flatten((args, dict(kwargs)))
        indices = [index for index, leaf in enumerate(leaves) if _is_by_position(leaf)]
        is_watched = bool(module._backward_hooks or module._backward_pre_hooks)  # they need the full tensor
        if self._needs_full or is_watched or len(indices) != 1 or _uses_reentrant_checkpoint(self._first):
            return None
        (index,) = indices
        _require_rows(module, leaves[index])
        self._full_call = args, dict(kwargs), leaves[index].shape[-1]
        leaves[index] = self._shard(leaves[index])
        sharded: tuple[tuple, dict[str, Any]] = tree_unflatten(leaves, structure)
        return sharded

    def _return_placeholders(self, module: nn.Module, args: tuple, output: Any) -> Any:
        """Forward hook: replace the outputs by ShardTensors, which compute the full outputs if they are read."""
        if self._full_call is None:
            return output
        (full_args, full_kwargs, length), self._full_call = self._full_call, None

        @cache
        def make_all() -> list[Any]:
            """Call the module with the full input, once for all outputs."""
            self._needs_full = True
            return tree_flatten(module(*full_args, **full_kwargs))[0]

        def placeholder_of(index: int, shard: Tensor) -> ShardTensor:
            """Return the placeholder of an output, by its index among all outputs and this rank's shard of it."""
            if shard.shape[DIM] * self._axis.order.size != self._axis.order.padded(length):
                raise AssertionError(
                    f"{type(module).__name__} returned {tuple(shard.shape)} for a shard of length {length}"
                )
            return ShardTensor(
                self._without_padding(shard, length), length=length, make_full=lambda: make_all()[index]
            )

        leaves, structure = tree_flatten(output)
        return tree_unflatten([placeholder_of(index, shard) for index, shard in enumerate(leaves)], structure)

    def _shard(self, full: Tensor) -> Tensor:
        """Return this rank's shard along the last dimension, padded with the last position as by `shard_sequence`."""
        missing = self._axis.order.padded(full.shape[-1]) - full.shape[-1]
        padding = full[..., -1:].expand(*full.shape[:-1], missing)
        return self._axis.shard(torch.cat([full, padding], -1) if missing else full, -1)

    def _without_padding(self, shard: Tensor, length: int) -> Tensor:
        """Return a shard whose padding, at its end, is detached, so that it adds nothing to gradients."""
        stretches = self._axis.order.stretches(self._axis.rank, length)
        num_real = sum(max(0, min(stretch.stop, length) - stretch.start) for stretch in stretches)
        num_padded = shard.shape[DIM] - num_real
        if not shard.requires_grad or not num_padded:
            return shard
        return torch.cat(
            [shard.narrow(DIM, 0, num_real), shard.narrow(DIM, num_real, num_padded).detach()], DIM
        )


def _require_rows(module: nn.Module, full: Tensor) -> None:
    """Raise ValueError on all ranks for an index outside of an embedding, not only on the rank with that token."""
    if isinstance(count := getattr(module, "num_embeddings", None), int):
        is_row = (full >= 0) & (full < count)
        require_all(is_row, lambda: f"entry {full[~is_row][0].item()} is outside the vocabulary of {count}")


def _is_lookup(module: nn.Module) -> bool:
    """Return True for an embedding that looks up one row per position."""
    if isinstance(module, VocabParallelEmbedding1D):
        return True
    is_plain = type(module) is nn.Embedding or is_scaled(module)
    return is_plain and isinstance(module, nn.Embedding) and not needs_all_uses(module)


def _is_rotary(module: nn.Module) -> bool:
    """Return True for a rotary embedding of transformers whose frequencies are the same for all lengths."""
    kind = type(module)
    if not (kind.__module__.startswith("transformers.") and kind.__name__.endswith("RotaryEmbedding")):
        return False
    types: Any = getattr(module, "rope_type", None)
    return bool(types) and set(types.values() if isinstance(types, Mapping) else [types]) <= _FIXED_ROTARY


def _is_by_position(value: Any) -> bool:
    """Return True for integers of shape (B, S), such as token ids."""
    return (
        isinstance(value, Tensor)
        and value.ndim == 2
        and value.shape[-1] > 0
        and not value.is_floating_point()
    )


def _uses_reentrant_checkpoint(layer: nn.Module) -> bool:
    """Return True if a layer is recomputed by a reentrant checkpoint, whose autograd function needs full tensors."""
    if not is_recomputed(layer):
        return False
    checkpoint = checkpoint_function(layer)
    checkpoint = getattr(checkpoint, "checkpoint", checkpoint)  # unwrap a CheckpointWithLength
    is_partial = isinstance(checkpoint, partial)
    return not (is_partial and checkpoint.keywords.get("use_reentrant") is False)
