"""Reasons that keep a data set, or a user's DataLoader, from being dealt out over the data axis."""

from collections.abc import Mapping, Sized
from typing import Any

from torch.utils.data import BatchSampler, DataLoader, IterableDataset


def dataset_faults(dataset: Any) -> list[str]:
    """Why the samples of a data set cannot be dealt out to replicas."""
    name = type(dataset).__name__
    if isinstance(dataset, IterableDataset) or not isinstance(dataset, Sized):
        return [
            f"a {name} gives its samples in its own order, or has no length, so they cannot be dealt out to replicas: "
            "give a data set with __len__ and __getitem__"
        ]
    if isinstance(dataset, Mapping) and len(dataset) and 0 not in dataset:
        keys = ", ".join(map(repr, list(dataset)[:4]))
        return [f"a {name} of {keys} has no sample 0: give one of the data sets in it"]
    if not hasattr(dataset, "__getitem__"):
        return [f"a {name} has no __getitem__: give a data set with __len__ and __getitem__"]
    return []


_REFUSED = {
    "sampler": "samples are dealt out to replicas: give a class as distributed_sampler_cls instead",
    "batch_sampler": "samples are dealt out to replicas: give batch_size, and a class as distributed_sampler_cls",
    "generator": "random numbers follow from the seed and a batch's place: give seed instead",
}


def argument_faults(batch_size: Any, kwargs: Mapping[str, Any]) -> list[str]:
    """What is wrong with a batch size, and with further arguments for a DataLoader."""
    faults = []
    if not isinstance(batch_size, int) or isinstance(batch_size, bool) or batch_size < 1:
        faults.append(
            f"batch_size={batch_size!r} must be a whole number from 1: the samples of a replica in a batch"
        )
    faults += [
        f"{name} is not taken: {why}" for name, why in _REFUSED.items() if kwargs.get(name) is not None
    ]
    if not kwargs.get("in_order", True):
        faults.append(
            "in_order=False would give the ranks of a replica batches in other orders, and no place to go on from: "
            "leave it out"
        )
    return faults


def loader_faults(loader: Any) -> list[str]:
    """Why a user's dataloader cannot be dealt out as it is."""
    if type(loader) is not DataLoader:
        return [
            f"it is a {type(loader).__name__}, and only a plain torch.utils.data.DataLoader can be rebuilt"
        ]
    if faults := dataset_faults(loader.dataset):
        return faults
    if loader.batch_sampler is None:
        return ["it has batch_size=None, so its batches are the data set's own"]
    if type(loader.batch_sampler) is not BatchSampler:
        return [f"its batch_sampler is a {type(loader.batch_sampler).__name__}, whose batches are its own"]
    return argument_faults(loader.batch_sampler.batch_size, {"in_order": loader.in_order})
