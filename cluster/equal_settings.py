"""Settings that must be equal on all ranks, compared by name. What is set so is the callers'."""

import zlib
from collections.abc import Callable, Iterator, Mapping
from dataclasses import fields, is_dataclass
from enum import Enum
from numbers import Real
from typing import Any, NoReturn

import torch
import torch.distributed as dist

from .agreement import begin_gathering_integers
from .faults import meet_all_ranks, naming_failures


def settings_hash(settings: Any) -> int:
    """A number below 2**32 that differs where settings do, as `require_equal_settings` takes them."""
    return zlib.crc32(repr([*_plain(settings)]).encode())


def require_equal_settings(settings: Any, *, of: str, rule: str = "every rank must give the same") -> None:
    """All ranks of the world must have set the same. All-gather of a number, and of the settings where they differ.

    Args:
        settings: a dataclass, or a mapping by name, either of which may hold more such. Of what is no plain value
            the type counts alone.
        of: what is set so, as the message shall say it.
        rule: what the message says about that.

    Raises:
        ValueError: some rank has other settings; names them, on every rank.
    """
    if dist.get_world_size() == 1:
        return
    with naming_failures(of):
        meet_all_ranks()
        begin_comparing_settings(settings, of=of, rule=rule)()


def begin_comparing_settings(
    settings: Any, *, of: str, rule: str, group: dist.ProcessGroup | None = None
) -> Callable[[], None]:
    """`require_equal_settings` of the settings as they now are, by what is returned: no wait before that.

    Args:
        group: all ranks of the world; None is the default group.
    """
    end = begin_gathering_integers((settings_hash(settings),), group)
    plain = dict(_plain(settings))

    def require_equal() -> None:
        if len({code for (code,) in end()}) > 1:
            every: list[dict[str, str]] = [{} for _ in range(dist.get_world_size())]
            dist.all_gather_object(every, plain, group=group)
            _raise_different(every, of=of, rule=rule)

    return require_equal


def _raise_different(every: list[dict[str, str]], *, of: str, rule: str) -> NoReturn:
    told = [
        fault
        for name in dict.fromkeys(name for one in every for name in one)
        if (fault := _told(name, every))
    ]
    raise ValueError(f"the settings of {of} differ between ranks, and {rule}: {'; '.join(told)}")


def _told(name: str, every: list[dict[str, str]]) -> str | None:
    ranks: dict[str, list[int]] = {}
    for rank, settings in enumerate(every):
        ranks.setdefault(settings.get(name, "nothing"), []).append(rank)
    if len(ranks) == 1:
        return None
    return f"{name} is " + " and ".join(f"{value} on rank(s) {which}" for value, which in ranks.items())


def _plain(value: Any, name: str = "") -> Iterator[tuple[str, str]]:
    """Names and values as text that is equal where they are, in all processes."""
    if is_dataclass(value) and not isinstance(value, type):
        value = {field.name: getattr(value, field.name) for field in fields(value)}
    if isinstance(value, Mapping) and all(isinstance(key, str) for key in value):
        for key, inner in value.items():
            yield from _plain(inner, key)
    else:
        yield name, _text(value)


def _text(value: Any) -> str:
    if value is None or isinstance(value, str | int | Enum | torch.dtype):
        return repr(value)
    if isinstance(value, Real):  # those of numpy print their type, too
        return repr(float(value))
    if isinstance(value, torch.Tensor) and value.numel() == 1 and not value.is_meta:
        return repr(value.item())
    if isinstance(value, list | tuple):
        return f"[{', '.join(map(_text, value))}]"
    return f"a {type(value).__qualname__}"
