"""Batches and outputs as trees of tensors: split into microbatches, merged over them.

A tree is a tensor, or a dict, tuple or list of trees. Mappings of other types (transformers' BatchEncoding)
are returned as plain dicts; dataclasses that are mappings (transformers' ModelOutput) and named tuples keep
their class. Other values in a tree, and tensors without dimensions, are given to every microbatch. Tensors are split
and joined along their batch dim, which is dim 0 except for the arguments of `_BATCH_DIMS`. Of a batch, lists with an
entry for each sample (the objects of an image, see `_is_sample_list`) are split between entries.
"""

import dataclasses
from collections.abc import Callable, Hashable, Mapping, Sequence
from itertools import accumulate
from math import inf
from numbers import Real
from types import MappingProxyType
from typing import Any

import torch
from torch import Tensor

from .image_rows import Rows, counts_samples

# Argument name -> number of dims of the tensor -> its batch dim, where this is not 0.
_BATCH_DIMS = {"position_ids": {3: 1}}  # (axes, B, S): time, height and width in Qwen2-VL
# Arguments that are lists of tensors with one entry for each sample: the masks and classes of an image's objects.
_SAMPLE_LISTS = ("mask_labels", "class_labels")

IsLeaf = Callable[[str, Any], bool]  # of path and tree


def batch_dim(path: str, tensor: Tensor) -> int:
    """Return the batch dim of a tensor at this path of a batch: `position_ids`, `inputs.position_ids`."""
    return _BATCH_DIMS.get(path.rpartition(".")[2], {}).get(tensor.dim(), 0)


def _is_sample_list(path: str, tree: Any) -> bool:
    """Return True for a list of a batch with one entry for each sample.

    These are lists of dicts below a name, such as DETR's `labels` (`class_labels` and `boxes` of an image), and
    the lists of tensors of `_SAMPLE_LISTS`. Sizes do not decide, which may be equal by chance.
    """
    if not path or not isinstance(tree, list):
        return False
    return path.rpartition(".")[2] in _SAMPLE_LISTS or (
        bool(tree) and all(isinstance(entry, Mapping) for entry in tree)
    )


def split(
    batch: Any,
    *,
    num_microbatches: int | None,
    microbatch_size: int | None,
    rows: Rows = MappingProxyType({}),
) -> list[Any]:
    """Split a batch along its batch dims into microbatches, which share its memory.

    Args:
        batch: a tree of tensors that are equally long along their batch dims, but for those of `rows`; lists of an
            entry for each sample are as long.
        num_microbatches: number of microbatches; the first ones are one sample longer if it does not divide the batch.
        microbatch_size: samples per microbatch; the last one is shorter if it does not divide the batch. Give one
            of the two, or both if they agree.
        rows: see `image_rows`. A microbatch without rows of a tensor has None instead.

    Returns:
        Trees with the structure of the batch, in the order of its samples.

    Raises:
        ValueError: more microbatches than samples, tensors of different length, or sizes missing or contradictory.
    """
    total = batch_size(batch)
    if total == 0:
        raise ValueError("the batch is empty: all its tensors have no samples")
    _require_equal_lengths({**_lengths(batch), **dict.fromkeys(rows, total)})
    lengths = microbatch_lengths(total, num_microbatches, microbatch_size)
    starts = [0, *accumulate(lengths)]
    return [_slice(batch, start, length, rows) for start, length in zip(starts, lengths, strict=False)]


def batch_size(batch: Any) -> int:
    """Return the number of samples: the length of all tensors of a batch along their batch dims.

    Raises:
        ValueError: the lengths differ, or no tensor has dimensions.
    """
    lengths = _lengths(batch)
    if not lengths:
        raise ValueError(
            f"a batch of type {type(batch).__name__} has no tensor with a batch dimension: "
            "give a tensor, or a dict, tuple or list of tensors whose dim 0 counts the samples"
        )
    counting = {path: length for path, length in lengths.items() if counts_samples(batch, path)}
    _require_equal_lengths(counting)
    return next(iter((counting or lengths).values()))


def _lengths(batch: Any) -> dict[str, int]:
    """Return the lengths of tensors along their batch dims, and of lists of an entry for each sample, by path."""
    return {
        path: len(leaf) if isinstance(leaf, list) else leaf.shape[batch_dim(path, leaf)]
        for path, leaf in _named_leaves(batch, is_leaf=_is_sample_list)
        if isinstance(leaf, list) or (isinstance(leaf, Tensor) and leaf.dim())
    }


def _require_equal_lengths(lengths: Mapping[str, int]) -> None:
    if len(set(lengths.values())) > 1:
        described = ", ".join(f"{path or 'the batch'} has {length}" for path, length in lengths.items())
        raise ValueError(
            f"the tensors of a batch must be equally long along their batch dims, the samples: {described}"
        )


def has_num_items(inputs: Any) -> bool:
    """Return True for a batch with the number of labels by which transformers' losses divide a sum."""
    return isinstance(inputs, Mapping) and inputs.get("num_items_in_batch") is not None


def require_num_items(batch: Any) -> None:
    """Raise ValueError for a `num_items_in_batch` that is not a number above 0, or a 0-d tensor of one.

    The value of a tensor on a device is not checked, since reading it would wait.
    """
    if not has_num_items(batch):
        return
    number = batch["num_items_in_batch"]
    if isinstance(number, Tensor) and number.ndim == 0 and not number.is_cpu:
        return
    value = number.item() if isinstance(number, Tensor) and number.ndim == 0 else number
    if isinstance(value, bool) or not isinstance(value, Real) or not 0 < float(value) < inf:
        raise ValueError(
            f"num_items_in_batch={number!r} in the batch must be a number above 0, or a 0-d tensor: give the number "
            "of labels in the global batch, or leave it out"
        )


def paths_with_gradient(batch: Any) -> list[str]:
    """Return the paths of a batch's tensors that require a gradient."""
    return [path for path, tensor in _named_tensors(batch) if tensor.requires_grad]


def merge(outputs: Sequence[Any]) -> Any:
    """Join the outputs of microbatches into the output of their batch.

    Tensors are concatenated along their batch dims. Tensors without dimensions (losses) are averaged, with equal
    weight for each microbatch. None and other values that are equal in all outputs are kept; unequal ones are listed.

    Args:
        outputs: trees of one structure, in the order of the microbatches.

    Raises:
        ValueError: no outputs, or they differ in structure or in more than the number of samples.
    """
    if not outputs:
        raise ValueError("there are no outputs to merge")
    return _joined(outputs, _merge)


def signature(batch: Any) -> Hashable:
    """Return names, shapes and dtypes of a batch, which determine the shapes in a forward pass."""
    return tuple((path, tuple(tensor.shape), tensor.dtype) for path, tensor in _named_tensors(batch))


def num_bytes(batch: Any) -> int:
    """Return the size of all tensors of a batch in bytes."""
    return sum(tensor.nbytes for _, tensor in _named_tensors(batch))


def map_tensors(tree: Any, function: Callable[[Tensor], Tensor]) -> Any:
    """Return the tree with every tensor replaced by `function(tensor)`."""
    return _joined(
        [tree], lambda leaves, _: function(leaves[0]) if isinstance(leaves[0], Tensor) else leaves[0]
    )


def microbatch_lengths(total: int, num_microbatches: int | None, microbatch_size: int | None) -> list[int]:
    """Return the number of samples of each microbatch, for a batch of `total` samples. Errors as in `split`."""
    for name, value in (("num_microbatches", num_microbatches), ("microbatch_size", microbatch_size)):
        if value is not None and value < 1:
            raise ValueError(f"{name}={value} must be at least 1")
    if num_microbatches is None and microbatch_size is None:
        raise ValueError("neither num_microbatches nor microbatch_size is given: give one of them")
    if microbatch_size is not None:
        full, rest = divmod(total, microbatch_size)
        lengths = [microbatch_size] * full + [rest] * (rest > 0)
        if num_microbatches not in (None, len(lengths)):
            raise ValueError(
                f"microbatch_size={microbatch_size} splits a batch of {total} samples into {len(lengths)} "
                f"microbatches, not into num_microbatches={num_microbatches}: give one of them"
            )
        return lengths
    assert num_microbatches is not None
    if num_microbatches > total:
        raise ValueError(
            f"num_microbatches={num_microbatches} is more than the {total} samples of the batch: "
            f"use num_microbatches of at most {total}, or larger batches (drop_last=True in a "
            "dataloader leaves out a short last one)"
        )
    base, extra = divmod(total, num_microbatches)
    return [base + (index < extra) for index in range(num_microbatches)]


def _slice(batch: Any, start: int, length: int, rows: Rows) -> Any:
    """Return `length` samples of a batch from the sample `start`, as views; `rows` as for `split`."""

    def cut(leaves: list[Any], path: str) -> Any:
        (value,) = leaves
        if isinstance(value, list):
            return value[start : start + length]
        if not isinstance(value, Tensor) or not value.dim():
            return value
        if path in rows:
            first, end = rows[path][start], rows[path][start + length]
            return value[first:end] if first < end else None
        view = value.narrow(batch_dim(path, value), start, length)
        # FSMT changes its labels in place, and views have one version: autograd would refuse other microbatches.
        # Only plain tensors: `data` of others is one, without the host copy of a mask.
        return view.data if type(view) is Tensor and not view.requires_grad else view

    return _joined([batch], cut, is_leaf=_is_sample_list)


def _named_tensors(tree: Any) -> list[tuple[str, Tensor]]:
    """Return all tensors of a tree with their paths, such as `labels` or `inputs.0`."""
    return [(path, leaf) for path, leaf in _named_leaves(tree) if isinstance(leaf, Tensor)]


def _named_leaves(tree: Any, is_leaf: IsLeaf | None = None) -> list[tuple[str, Any]]:
    """Return all leaves of a tree with their paths; `is_leaf` as for `_joined`, which walks the tree alone."""
    named: list[tuple[str, Any]] = []

    def collect(leaves: list[Any], path: str) -> Any:
        (leaf,) = leaves
        named.append((path, leaf))
        return leaf

    _joined([tree], collect, is_leaf=is_leaf)
    return named


def _joined(
    trees: Sequence[Any],
    join: Callable[[list[Any], str], Any],
    path: str = "",
    *,
    is_leaf: IsLeaf | None = None,
) -> Any:
    """Map trees of equal structure to one tree, whose leaves are `join(leaves, path)` of their leaves at each path.

    Args:
        trees: at least one.
        join: gets the leaves of all trees at a path, such as "inputs.0".
        path: of the trees in a larger one, for `join` and errors.
        is_leaf: tells by path and tree which mappings, tuples and lists are leaves; None: none is.

    Raises:
        ValueError: the structures differ.
    """
    first = trees[0]
    if is_leaf is not None and is_leaf(path, first):
        return join(list(trees), path)
    if len(trees) > 1 and len(structures := dict.fromkeys(map(_structure, trees))) > 1:
        raise ValueError(f"{_place(path)} differs between microbatches: {'; '.join(structures)}")
    prefix = f"{path}." if path else ""
    if isinstance(first, Mapping):
        fields = {
            key: _joined([tree[key] for tree in trees], join, f"{prefix}{key}", is_leaf=is_leaf)
            for key in first
        }
        return type(first)(**fields) if dataclasses.is_dataclass(first) else fields
    if isinstance(first, (tuple, list)):
        values = [
            _joined(entries, join, f"{prefix}{index}", is_leaf=is_leaf)
            for index, entries in enumerate(zip(*trees, strict=True))
        ]
        if hasattr(first, "_fields"):  # a named tuple
            return type(first)(*values)
        return tuple(values) if isinstance(first, tuple) else values
    return join(list(trees), path)


def _structure(tree: Any) -> str:
    """Return the type of a tree, and its keys or its length."""
    name = type(tree).__name__
    if isinstance(tree, Mapping):
        return f"{name} of {', '.join(map(str, tree))}"
    return f"{name} of {len(tree)}" if isinstance(tree, (tuple, list)) else name


def _merge(entries: list[Any], path: str) -> Any:
    first = entries[0]
    if isinstance(first, Tensor):
        return _merge_tensors(entries, path)
    return first if all(entry is first or bool(entry == first) for entry in entries) else entries


def _merge_tensors(tensors: list[Tensor], path: str) -> Tensor:
    """Concatenate tensors of all microbatches along the batch dim of their path, or average tensors without dims."""
    dim = batch_dim(path, tensors[0])
    if len({(tensor.dtype, _without(tensor.shape, dim), tensor.dim()) for tensor in tensors}) > 1:
        described = ", ".join(f"{tuple(tensor.shape)} {tensor.dtype}" for tensor in tensors)
        raise ValueError(
            f"{_place(path)} cannot be concatenated along dim {dim} over the microbatches: {described}"
        )
    if tensors[0].dim():
        return torch.cat(tensors, dim)
    # Nothing says what a number is a mean of, so microbatches weigh alike; the call's "loss" is not formed here.
    stacked = torch.stack(tensors)
    return stacked.mean() if stacked.is_floating_point() or stacked.is_complex() else stacked.float().mean()


def _without(shape: torch.Size, dim: int) -> tuple[int, ...]:
    return (*shape[:dim], *shape[dim + 1 :])


def _place(path: str) -> str:
    return f"output {path}" if path else "the output"
