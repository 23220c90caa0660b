"""What a data set, or a dataloader of a script, says about batches. Dealing them out is cluster/dataloader.py."""

from collections.abc import Sized
from typing import Any

from torch.utils.data import (
    BatchSampler,
    DataLoader,
    Dataset,
    RandomSampler,
    SequentialSampler,
    default_collate,
)

# Of a DataLoader, besides what is told apart below.
_KEPT = (
    "num_workers",
    "pin_memory",
    "timeout",
    "worker_init_fn",
    "prefetch_factor",
    "persistent_workers",
    "multiprocessing_context",
    "in_order",
)


def loader_settings(source: Dataset | DataLoader) -> dict[str, Any]:
    """The arguments of a dataloader that reads the same in the same way.

    Raises:
        ValueError: it has no length, or an order of its own that nobody could deal out.
    """
    plain = {"batch_size": 1, "shuffle": False, "drop_last": False, "collate_fn": default_collate}
    if not isinstance(source, DataLoader):
        _require_length(source)
        return {"dataset": source, **plain}
    _require_length(source.dataset)
    kinds = (SequentialSampler, RandomSampler)
    sampler = source.sampler
    is_plain = getattr(sampler, "data_source", None) is source.dataset and not getattr(
        sampler, "replacement", False
    )
    is_whole = getattr(sampler, "_num_samples", None) is None
    if (
        type(source.batch_sampler) is not BatchSampler
        or type(sampler) not in kinds
        or not (is_plain and is_whole)
    ):
        raise ValueError(
            f"this DataLoader has a {type(source.batch_sampler).__name__} over a {type(source.sampler).__name__}, "
            "whose choice or order cannot be dealt out: give one with shuffle=True or False and a batch_size, or the "
            "data set itself"
        )
    return {
        **{name: getattr(source, name) for name in _KEPT},
        "dataset": source.dataset,
        "batch_size": source.batch_size,
        "shuffle": isinstance(source.sampler, RandomSampler),
        "drop_last": source.drop_last,
        "collate_fn": source.collate_fn,
    }


def _require_length(dataset: Dataset) -> None:
    if not isinstance(dataset, Sized):
        raise ValueError(
            f"a {type(dataset).__name__} has no length, so its samples cannot be dealt out: give a data set with "
            "__len__ and __getitem__"
        )
