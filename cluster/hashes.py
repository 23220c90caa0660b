"""Hashes by which ranks compare batches and settings: equal in all processes for equal values."""

import zlib
from collections.abc import Iterator, Mapping
from dataclasses import fields, is_dataclass
from enum import Enum
from numbers import Real
from typing import Any

import torch
from torch import Tensor

# Multipliers of SplitMix64's mixing function (Steele, Lea, Flood 2014), as signed integers.
_SPREAD = 0x9E3779B97F4A7C15 - 2**64
_MIX = 0xBF58476D1CE4E5B9 - 2**64


def batch_hash(batch: Any) -> int:
    """Hash a batch to a number below 2**63: names, order, shapes, dtypes and all bytes of tensors.

    Equal batches have equal hashes in all processes, if they are on the same kind of device: hashes of a batch on the
    CPU and on a GPU differ. Tensors on a device are hashed there, and one transfer reads the results.

    Args:
        batch: nested mappings, lists and tuples of tensors, numbers, strings and None. Other objects are
            hashed by their type alone.
    """
    return int(batch_code(batch)) % 2**63


def batch_code(batch: Any) -> int | Tensor:
    """Hash a batch as `batch_hash` does, without waiting for a device: 0-d int64 if the batch is on one."""
    on_devices: list[Tensor] = []
    code = _extend(0, batch, on_devices)
    if not on_devices:
        return code
    return device_hash(torch.stack(on_devices).view(torch.uint8)) + code


def describe_batch(batch: Any) -> str:
    """Names, shapes and dtypes of a batch, for messages: "input_ids int64[4, 16], labels int64[4, 16]"."""
    if isinstance(batch, Tensor):
        return f"{str(batch.dtype).removeprefix('torch.')}{list(batch.shape)}"
    if isinstance(batch, Mapping):
        return ", ".join([f"{name} {describe_batch(value)}" for name, value in batch.items()])
    if isinstance(batch, tuple | list):
        return f"({', '.join(map(describe_batch, batch))})"
    return type(batch).__qualname__


def _extend(code: int, tree: Any, on_devices: list[Tensor]) -> int:
    """Extend a hash by `tree`; collect tensors on devices in `on_devices` instead of hashing them."""
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
    """Hash bytes to 64 bits on their device, by integer operations: the sum of mixed (byte, position) pairs.

    Args:
        data: 1-D uint8; if its length is divisible by 8, eight bytes are mixed at a time.

    Returns:
        0-D int64, on the same device.
    """
    if data.numel() % 8 == 0:
        data = (data.clone() if data.storage_offset() % 8 else data).view(torch.int64)
    place = torch.arange(1, data.numel() + 1, device=data.device)
    mixed = data.long() + place * _SPREAD
    mixed = (mixed ^ (mixed >> 30)) * _MIX
    return (mixed ^ (mixed >> 27)).sum()


def settings_hash(settings: Any) -> int:
    """Hash settings, in the form that `require_equal` takes, to a number below 2**32."""
    return zlib.crc32(repr([*plain_settings(settings)]).encode())


def plain_settings(value: Any, name: str = "") -> Iterator[tuple[str, str]]:
    """Yield names and values as text that is the same in all processes if the values are equal.

    Nested entries have their inner name alone.
    """
    if is_dataclass(value) and not isinstance(value, type):
        value = {field.name: getattr(value, field.name) for field in fields(value)}
    if isinstance(value, Mapping) and all(isinstance(key, str) for key in value):
        for key, inner in value.items():
            yield from plain_settings(inner, key)
    else:
        yield name, _text(value)


def _text(value: Any) -> str:
    """Return the text of a setting, equal on all ranks for equal values; of other objects it is their type alone."""
    if value is None or isinstance(value, str | int | Enum | torch.dtype):
        return repr(value)
    if isinstance(value, Real):  # numpy's numbers would print their type too
        return repr(float(value))
    if isinstance(value, torch.Tensor) and value.numel() == 1 and not value.is_meta:
        return repr(value.item())
    if isinstance(value, list | tuple):
        return f"[{', '.join(map(_text, value))}]"
    return f"a {type(value).__qualname__}"
