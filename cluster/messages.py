"""A few numbers from each rank of a group to each other one, on CPUs. slices.py and read_sums.py say what they mean."""

from collections.abc import Iterable, Mapping, Sequence

import torch
import torch.distributed as dist
from torch import Tensor

Heard = tuple[dist.Work, Tensor]


def tell(group: dist.ProcessGroup, numbers: Mapping[int, Sequence[int]], tag: int) -> list[dist.Work]:
    """Begin to send each of these ranks its 64-bit integers."""
    return [group.send([torch.tensor(own)], rank, tag) for rank, own in numbers.items()]


def hear(group: dist.ProcessGroup, ranks: Iterable[int], tag: int, *, count: int = 1) -> dict[int, Heard]:
    """Begin to receive so many integers from each of these ranks."""
    numbers = {rank: torch.zeros(count, dtype=torch.int64) for rank in ranks}
    return {rank: (group.recv([into], rank, tag), into) for rank, into in numbers.items()}


def numbers_of(heard: Heard) -> list[int]:
    """What was heard, once it has come; called once."""
    work, numbers = heard
    work.wait()
    return numbers.tolist()
