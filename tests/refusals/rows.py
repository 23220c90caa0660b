"""Rows of the table of refusals: a refused call, and words that its error must hold."""

from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack
from importlib import import_module
from typing import Any

import torch.distributed as dist
from torch.utils.data import IterableDataset

Row = tuple[Any, ...]  # the refused call, and words of its message
OF_RANK = ""  # among the words: every rank has a message of its own


class Stream(IterableDataset):
    """Data of known length without indices."""

    def __iter__(self) -> Iterator[int]:
        return iter(range(3))

    def __len__(self) -> int:
        return 3


def entered(*contexts: Any) -> Callable[[Callable[[], Any]], Callable[[], Any]]:
    """Make a call that runs within contexts."""

    def of(call: Callable[[], Any]) -> Callable[[], Any]:
        def within() -> None:
            with ExitStack() as stack:
                for context in contexts:
                    stack.enter_context(context)
                call()

        return within

    return of


def table(name: str, *rows: Row) -> dict[str, Row]:
    """Number rows of one kind."""
    return {f"{name} {number}": row for number, row in enumerate(rows)}


def message_of(row: Row) -> str:
    """Call what a row refuses, and return the name and text of its error; a process group that it started ends."""
    had_group = dist.is_initialized()
    try:
        row[0]()
    except Exception as error:  # also one of another kind than the row expects, whose words are then missing
        return f"{type(error).__name__}: {error}"
    finally:
        if dist.is_initialized() and not had_group:
            dist.destroy_process_group()
    return "nothing was refused"


def missing(rows: Mapping[str, Row], messages: Mapping[str, str]) -> list[str]:
    """List the words that are not in the messages of their rows."""
    return [
        f"{name}: {word!r} is not in {messages[name]}"
        for name, (_, *words) in rows.items()
        for word in words
        if word not in messages[name]
    ]


def messages_of(module: str, table: str, interval: int) -> dict[str, str]:
    """Return the errors of every `interval`-th row of a module on this rank.

    Rows share its processes: a refusal changes nothing.
    """
    messages, rows = {}, getattr(import_module(module), table)
    for name in [*rows][::interval]:
        messages[name] = message_of(rows[name])
        dist.barrier()
    return messages
