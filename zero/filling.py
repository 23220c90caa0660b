"""Which parameters share a bucket. What a bucket is, is bucket.py."""

from collections.abc import Hashable, Iterator, Mapping, Sequence

import torch

from .bucket import Bucket
from .loan import Loans
from .parameter import ManagedParameter
from .partition import Partition


def fill_buckets(
    groups: Sequence[Sequence[ManagedParameter]],
    *,
    dtype: torch.dtype,
    partitions: Mapping[int, Partition],
    bucket_size: int,
    loans: Loans | None = None,
    communication_dtype: torch.dtype = torch.float32,
    is_offloaded: bool = False,
) -> list[Bucket]:
    """Buckets of at most `bucket_size` elements, or of one larger parameter. One broadcast per bucket.

    None spans two parameter groups, devices, units or partitions, and parameters that are summed over other groups
    have their own. Arguments as of `Bucket`, and `partitions` by the stride of their parameters.
    """
    buckets = []
    for index, group in enumerate(groups):
        alike: dict[Hashable, list[ManagedParameter]] = {}
        for managed in group:
            key = (managed.parameter.device, managed.unit, managed.needs_sum, managed.stride)
            alike.setdefault(key, []).append(managed)
        for members in alike.values():
            for part in _portions(members, bucket_size):
                buckets.append(
                    Bucket(
                        part,
                        group_index=index,
                        dtype=dtype,
                        partition=partitions[part[0].stride],
                        loans=loans,
                        communication_dtype=communication_dtype,
                        is_offloaded=is_offloaded,
                    )
                )
    return buckets


def _portions(members: list[ManagedParameter], bucket_size: int) -> Iterator[list[ManagedParameter]]:
    portion: list[ManagedParameter] = []
    filled = 0
    for managed in members:
        if portion and filled + managed.parameter.numel() > bucket_size:
            yield portion
            portion, filled = [], 0
        portion.append(managed)
        filled += managed.parameter.numel()
    if portion:
        yield portion
