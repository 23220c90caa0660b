"""Outputs of all replicas for metrics, each sample of the data set once."""

from itertools import chain
from typing import Any

import torch.distributed as dist
from torch import Tensor
from torch.utils._pytree import tree_flatten, tree_unflatten

from ..cluster.collectives import all_gather
from ..cluster.gathering import gather_objects


def gather_samples(values: Any, group: dist.ProcessGroup, num_samples: int | None) -> Any:
    """Return the values of all replicas, in the order of the samples in the data. Collective over `group`.

    Samples are assigned to replicas in turn, so sample i of replica r is number i · replicas + r of the global batch.
    Two messages, and one wait for the device.

    Args:
        values: tensors of (B, …), or structures of them as outputs are; of equal shapes on all replicas. Or a list with
            an object for each sample.
        group: the data axis.
        num_samples: samples of the last global batch of a dataloader that Echelon shards; the replicas have less than
            one more each, repeated to fill their batches. Ignored for values of another number of samples, as of
            another dataloader. None keeps all.

    Raises:
        ValueError: replicas have different structures or shapes, or there are values without a dimension of samples;
            raised on every rank.
    """
    leaves, structure = tree_flatten(values)
    is_objects = bool(leaves) and not any(isinstance(leaf, Tensor) for leaf in leaves)
    if is_objects:
        listed = isinstance(values, list)
        described = [
            f"a list of {len(values)} objects" if listed else f"no samples: a {type(values).__name__}"
        ]
    else:
        described = ["tensors", str(structure), *(_described(leaf) for leaf in leaves)]
    messages = gather_objects((described, values if is_objects else None), group)
    by_replica = [texts for texts, _ in messages]
    errors = [
        f"gather_for_metrics got {_at_first_difference(other, by_replica[0])} of replica {replica}, and of replica 0 "
        f"{_at_first_difference(by_replica[0], other)}: pad to equal lengths first, or give what the metric needs alone"
        for replica, other in enumerate(by_replica)
        if other != by_replica[0]
    ]
    errors += [
        f"gather_for_metrics got {kind}: give tensors whose first dimension is the samples"
        for kind in dict.fromkeys(chain.from_iterable(by_replica))
        if kind.startswith("no samples")
    ]
    if errors:
        raise ValueError(errors[0])

    def once(samples: Any) -> Any:
        """Leave out the repeated samples."""
        is_of_batch = num_samples is not None and 0 <= len(samples) - num_samples < group.size()
        return samples[:num_samples] if is_of_batch else samples

    if is_objects:
        return once([*chain.from_iterable(zip(*(objects for _, objects in messages), strict=True))])
    gathered = [
        once(
            all_gather(leaf.detach().contiguous(), group, 0)
            .unflatten(0, (group.size(), -1))
            .transpose(0, 1)
            .flatten(0, 1)
        )
        for leaf in leaves
    ]
    return tree_unflatten(gathered, structure)


def _described(leaf: Any) -> str:
    """Return what a leaf must have in common on all replicas, as text."""
    if not isinstance(leaf, Tensor):
        return f"no samples: {leaf!r}, a {type(leaf).__name__} beside tensors"
    if not leaf.ndim:
        return "no samples: a number as a tensor, as a loss is"
    return f"a tensor of shape {tuple(leaf.shape)} and {leaf.dtype}"


def _at_first_difference(described: list[str], other: list[str]) -> str:
    """Return the first of these texts that differs from the other replica's, or the number of the texts."""
    pairs = zip(described, other, strict=False)
    return next((mine for mine, theirs in pairs if mine != theirs), f"{len(described) - 2} tensors")
