"""Small numbers that ranks tell each other, to agree before they compute. What follows from them is the caller's."""

import zlib
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from .launch import default_device
from .renamed import all_gather_single

# The multipliers of SplitMix64's mixing (Steele, Lea, Flood 2014), as signed integers.
_SPREAD = 0x9E3779B97F4A7C15 - 2**64
_MIX = 0xBF58476D1CE4E5B9 - 2**64


def gather_integers(values: Sequence[int], group: dist.ProcessGroup | None = None) -> list[tuple[int, ...]]:
    """Every rank's integers, equally many on each, in the order of ranks.

    An all-gather between CPUs: it waits for no device, unless the group has no backend for CPUs.

    Args:
        values: 64-bit integers.
        group: None is the world.
    """
    return begin_gathering_integers(values, group)()


def begin_gathering_integers(
    values: Sequence[int], group: dist.ProcessGroup | None = None
) -> Callable[[], list[tuple[int, ...]]]:
    """`gather_integers` begun; calling what is returned ends it, once."""
    size = dist.get_world_size(group)
    if size == 1:
        return lambda: [tuple(values)]
    device = "cpu" if "cpu" in str(dist.get_backend_config(group)) else default_device()
    own = torch.tensor(values, dtype=torch.int64, device=device)
    found = own.new_empty(size * len(values))
    work = all_gather_single(found, own, group=group, async_op=True)

    def end() -> list[tuple[int, ...]]:
        work.wait()
        return [tuple(row) for row in found.view(size, -1).tolist()]

    return end


def broadcast_object(value: Any, root: int, group: dist.ProcessGroup) -> Any:
    """Any object of one rank, on all ranks of the group, by pickle. Two broadcasts.

    Args:
        value: of the root, without tensors on a device; unused on the others.
        root: the rank in the group.
        group: the ranks, which all call.
    """
    box = [value]
    dist.broadcast_object_list(box, group=group, group_src=root)
    return box[0]


def differing_ranks(found: Sequence[Sequence[int]], place: int = 0) -> list[int]:
    """The ranks whose integer at this place, of what was gathered, is not that of the first one."""
    return [rank for rank, own in enumerate(found) if own[place] != found[0][place]]


def batch_hash(batch: Any) -> int:
    """A number below 2**63 that differs where a batch does: names, order, shapes, dtypes, or any byte of a tensor.

    Equal batches have one hash on all processes, on the CPU as well as on a device; but not a hash across the
    two. Tensors on a device are hashed there, and one transfer waits for the results.

    Args:
        batch: nested mappings, lists and tuples of tensors, numbers, strings and None. Of other objects, only
            the type counts.
    """
    on_devices: list[Tensor] = []
    code = _extend(0, batch, on_devices)
    if not on_devices:
        return code
    hashes = torch.stack(on_devices).tolist()
    return zlib.crc32(repr(hashes).encode(), code)


def _extend(code: int, tree: Any, on_devices: list[Tensor]) -> int:
    """The hash of what came before and of `tree`, the tensors on devices left out."""
    if isinstance(tree, Tensor):
        code = zlib.crc32(f"{tuple(tree.shape)} {tree.dtype}".encode(), code)
        data = tree.detach().contiguous().view(-1).view(torch.uint8)
        if data.device.type == "cpu":
            return zlib.crc32(data.numpy().data, code)
        on_devices.append(device_hash(data))
        return code
    if isinstance(tree, Mapping):
        code = zlib.crc32(b"{", code)
        for key, value in tree.items():
            code = _extend(zlib.crc32(repr(key).encode(), code), value, on_devices)
        return zlib.crc32(b"}", code)
    if isinstance(tree, tuple | list):
        code = zlib.crc32(b"[", code)
        for value in tree:
            code = _extend(code, value, on_devices)
        return zlib.crc32(b"]", code)
    is_plain = tree is None or isinstance(tree, str | bytes | int | float | complex)
    return zlib.crc32((repr(tree) if is_plain else type(tree).__qualname__).encode(), code)


def device_hash(data: Tensor) -> Tensor:
    """A 64-bit hash of bytes, computed by integer operations where they are: the sum of mixed (byte, place) pairs.

    Args:
        data: 1-D uint8; where the length divides by 8, eight bytes are mixed at a time.

    Returns:
        0-D int64, on the same device.
    """
    if data.numel() % 8 == 0 and data.storage_offset() % 8 == 0:
        data = data.view(torch.int64)
    place = torch.arange(1, data.numel() + 1, device=data.device)
    mixed = data.long() + place * _SPREAD
    mixed = (mixed ^ (mixed >> 30)) * _MIX
    return (mixed ^ (mixed >> 27)).sum()
