"""Batches and outputs as trees of tensors: cut into microbatches, merged over them.

A tree is a tensor, or a dict, tuple or list of trees. Mappings of other types (transformers' BatchEncoding)
come back as plain dicts; dataclasses that are mappings (transformers' ModelOutput) and named tuples keep
their class. Whatever else is in a tree, and a tensor without dimensions, belongs to every microbatch alike.
"""

import dataclasses
from collections.abc import Callable, Hashable, Mapping, Sequence
from itertools import accumulate
from typing import Any

import torch
from torch import Tensor


def split(batch: Any, *, num_microbatches: int | None, microbatch_size: int | None) -> list[Any]:
    """Cut a batch along dim 0 into microbatches, which share its memory.

    Args:
        batch: a tree of tensors that are equally long along dim 0.
        num_microbatches: how many; the first ones are one sample longer where they do not divide.
        microbatch_size: samples of each; the last one is shorter where they do not divide. Give one of the
            two, or both where they agree.

    Returns:
        Trees like the batch, in the order of its samples.

    Raises:
        ValueError: more microbatches than samples, tensors of different length, or sizes that do not say how.
    """
    total = batch_size(batch)
    if total == 0:
        raise ValueError("the batch is empty: all its tensors have length 0 along dim 0")
    lengths = microbatch_lengths(total, num_microbatches, microbatch_size)
    starts = [0, *accumulate(lengths)]
    return [_slice(batch, start, length) for start, length in zip(starts, lengths, strict=False)]


def batch_size(batch: Any) -> int:
    """The number of samples: the length that all tensors of a batch have along dim 0.

    Raises:
        ValueError: the lengths differ, or no tensor has any.
    """
    lengths = {path: tensor.shape[0] for path, tensor in _named_tensors(batch) if tensor.dim()}
    if not lengths:
        raise ValueError(
            f"a batch of type {type(batch).__name__} has no tensor with a batch dimension: "
            "give a tensor, or a dict, tuple or list of tensors whose dim 0 counts the samples"
        )
    if len(set(lengths.values())) > 1:
        each = ", ".join(f"{path or 'the batch'} has {length}" for path, length in lengths.items())
        raise ValueError(f"the tensors of a batch must be equally long along dim 0, the samples: {each}")
    return next(iter(lengths.values()))


def merge(outputs: Sequence[Any]) -> Any:
    """Join the outputs of microbatches into the output of their batch.

    Tensors are concatenated along dim 0; those without dimensions (losses) are averaged, each microbatch
    counting the same; None and other values that are equal everywhere stay, other values become a list.

    Args:
        outputs: trees of one structure, in the order of the microbatches.

    Raises:
        ValueError: no outputs, or they differ in structure or in more than the length along dim 0.
    """
    if not outputs:
        raise ValueError("there are no outputs to merge")
    return _joined(outputs, _merge)


def signature(batch: Any) -> Hashable:
    """Names, shapes and dtypes of a batch, which decide the shapes in a forward pass."""
    return tuple((path, tuple(tensor.shape), tensor.dtype) for path, tensor in _named_tensors(batch))


def num_bytes(batch: Any) -> int:
    """The bytes of all tensors of a batch."""
    return sum(tensor.nbytes for _, tensor in _named_tensors(batch))


def map_tensors(tree: Any, function: Callable[[Tensor], Tensor]) -> Any:
    """The same tree with `function(tensor)` in the place of every tensor."""
    return _joined([tree], lambda found, _: function(found[0]) if isinstance(found[0], Tensor) else found[0])


def microbatch_lengths(total: int, num_microbatches: int | None, microbatch_size: int | None) -> list[int]:
    """The samples of each microbatch of a batch of `total`; see `split`."""
    for name, value in (("num_microbatches", num_microbatches), ("microbatch_size", microbatch_size)):
        if value is not None and value < 1:
            raise ValueError(f"{name}={value} must be at least 1")
    if num_microbatches is None and microbatch_size is None:
        raise ValueError("give num_microbatches or microbatch_size: neither says how to cut a batch")
    if microbatch_size is not None:
        full, rest = divmod(total, microbatch_size)
        lengths = [microbatch_size] * full + [rest] * (rest > 0)
        if num_microbatches not in (None, len(lengths)):
            raise ValueError(
                f"microbatch_size={microbatch_size} cuts a batch of {total} samples into {len(lengths)} "
                f"microbatches, and num_microbatches={num_microbatches}: give only one of the two"
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


def _slice(batch: Any, start: int, length: int) -> Any:
    return map_tensors(batch, lambda tensor: tensor.narrow(0, start, length) if tensor.dim() else tensor)


def _named_tensors(tree: Any) -> list[tuple[str, Tensor]]:
    """All tensors of a tree with their paths, such as `labels` or `inputs.0`."""
    found: list[tuple[str, Tensor]] = []

    def note(entries: list[Any], path: str) -> Any:
        if isinstance(entries[0], Tensor):
            found.append((path, entries[0]))
        return entries[0]

    _joined([tree], note)
    return found


def _joined(trees: Sequence[Any], join: Callable[[list[Any], str], Any], path: str = "") -> Any:
    """One tree from some of one structure: at every place `join(entries, path)` of what they have there."""
    first = trees[0]
    if len(trees) > 1 and len(structures := dict.fromkeys(map(_structure, trees))) > 1:
        raise ValueError(f"{_place(path)} differs between microbatches: {'; '.join(structures)}")
    inner = f"{path}." if path else ""
    if isinstance(first, Mapping):
        fields = {key: _joined([tree[key] for tree in trees], join, f"{inner}{key}") for key in first}
        return type(first)(**fields) if dataclasses.is_dataclass(first) else fields
    if isinstance(first, (tuple, list)):
        values = [_joined(each, join, f"{inner}{i}") for i, each in enumerate(zip(*trees, strict=True))]
        if hasattr(first, "_fields"):  # a named tuple
            return type(first)(*values)
        return tuple(values) if isinstance(first, tuple) else values
    return join(list(trees), path)


def _structure(tree: Any) -> str:
    """The type of a tree, and its keys or its length."""
    name = type(tree).__name__
    if isinstance(tree, Mapping):
        return f"{name} of {', '.join(map(str, tree))}"
    return f"{name} of {len(tree)}" if isinstance(tree, (tuple, list)) else name


def _merge(entries: list[Any], path: str) -> Any:
    first = entries[0]
    if isinstance(first, Tensor):
        return _merge_tensors(entries, path)
    return first if all(each is first or bool(each == first) for each in entries) else entries


def _merge_tensors(tensors: list[Tensor], path: str) -> Tensor:
    if len({(tensor.dtype, tuple(tensor.shape[1:]), tensor.dim()) for tensor in tensors}) > 1:
        each = ", ".join(f"{tuple(tensor.shape)} {tensor.dtype}" for tensor in tensors)
        raise ValueError(f"{_place(path)} cannot be concatenated along dim 0 over the microbatches: {each}")
    if tensors[0].dim():
        return torch.cat(tensors)
    stacked = torch.stack(tensors)
    return stacked.mean() if stacked.is_floating_point() or stacked.is_complex() else stacked.float().mean()


def _place(path: str) -> str:
    return f"output {path}" if path else "the output"
