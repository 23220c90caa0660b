"""Exchange between ranks: integers, objects, the errors of all, and a check of equal settings."""

import zlib
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from datetime import timedelta
from functools import partial
from itertools import chain
from typing import Any, ClassVar, NoReturn, TypeVar

import torch
import torch.distributed as dist
from torch import Tensor

from .collectives import InFlight, all_gather_single
from .device import backend_of, default_device
from .errors import SAME_CALLS, UnmatchedCall
from .failures import all_ranks_in, current_call, raise_if_stuck
from .hashes import plain_settings, settings_hash
from .whereabouts import DescribedCollective

_MOST_NAMED = 8  # the most settings that an error lists
_FEW = 16  # the most integers that are gathered in one message of fixed length
_SLICE = timedelta(seconds=1)  # time between two checks of a waiting rank for failures of the others
_CALLS: dict[int, str] = {}  # names of the calls of this process, by their codes in messages
# Error types that all ranks raise unchanged; the first that matches is taken.
_KINDS = (FileNotFoundError, ImportError, OSError, ValueError)

Result = TypeVar("Result")


class AgreedError(RuntimeError):
    """Work failed on a rank with an error of a type that other ranks cannot raise; raised on all ranks instead."""


def gather_integers(
    values: Sequence[int], group: dist.ProcessGroup | None = None, call: str | None = None
) -> list[tuple[int, ...]]:
    """Gather the same number of integers from every rank, in the order of ranks.

    An all-gather between CPUs. It does not wait for a device, unless the group has no backend for CPUs.

    Args:
        values: 64-bit integers.
        group: the ranks; None is the world.
        call: name of the calling operation, for errors; None takes the watched call.

    Raises:
        UnmatchedCall: another rank is in another call; on every rank of the group.
    """
    return begin_gather_integers(values, group, call).wait()


def begin_gather_integers(
    values: Sequence[int], group: dist.ProcessGroup | None = None, call: str | None = None
) -> InFlight[list[tuple[int, ...]]]:
    """Start `gather_integers` asynchronously."""
    size = dist.get_world_size(group)
    if size == 1:
        return InFlight(None, torch.empty(0), lambda _: [tuple(values)])
    call = call or current_call() or "no call of Echelon"
    code = zlib.crc32(call.encode())
    _CALLS[code] = call
    # Few integers are sent with a fixed length: gloo aborts the process if ranks in different calls send
    # other lengths.
    padding = (0,) * (_FEW - len(values))
    message = (code, len(values), *values, *padding)
    device = default_device() if backend_of("cpu", group) is None else torch.device("cpu")
    sent = torch.tensor(message, dtype=torch.int64, device=device)
    received = sent.new_empty(size * len(message))
    work = all_gather_single(received, sent, group=group, async_op=True)
    return InFlight(
        _Watched(work, group) if device.type == "cpu" else work, received, partial(_received, group=group)
    )


@dataclass(frozen=True)
class _Watched(DescribedCollective):
    """A collective between CPUs whose `wait` raises if other ranks never join it.

    See [Note: a call that others do not make].
    """

    work: dist.Work
    group: dist.ProcessGroup | None
    activity: ClassVar[str] = "gathering integers"

    def wait(self) -> None:
        """Wait for the collective."""
        while not self.work.is_completed():
            try:
                self.work.wait(_SLICE)
            except RuntimeError:  # not done yet, or failed; a failure is raised below
                raise_if_stuck()
        self.work.wait()


def _received(received: Tensor, *, group: dist.ProcessGroup | None) -> list[tuple[int, ...]]:
    """Return the integers of all ranks; raise UnmatchedCall if one sent another call's code or number of them."""
    rows = [tuple(row) for row in received.view(dist.get_world_size(group), -1).tolist()]
    if len({row[:2] for row in rows}) == 1:
        return [row[2 : 2 + row[1]] for row in rows]
    row, rank = rows[dist.get_rank(group)], dist.get_rank()
    by_rank = zip(dist.get_process_group_ranks(group), rows, strict=True)
    other, row_of_other = next((other, other_row) for other, other_row in by_rank if other_row[:2] != row[:2])
    call, call_of_other = (_CALLS.get(code, "another call") for code in (row[0], row_of_other[0]))
    raise UnmatchedCall(f"rank {rank} is in {call} and rank {other} in {call_of_other}: {SAME_CALLS}", other)


def gather_objects(value: Any, group: dist.ProcessGroup | None = None) -> list[Any]:
    """Gather an object from every rank by pickle, in the order of ranks. Two all-gathers; a single rank gets its own.

    Args:
        value: this rank's object, without tensors on a device.
        group: every rank of it must call; None is the world.
    """
    gathered: list[Any] = [value] * dist.get_world_size(group)
    if len(gathered) > 1:
        dist.all_gather_object(gathered, value, group=group)
    return gathered


def gather_objects_on_first(value: Any, group: dist.ProcessGroup) -> list[Any] | None:
    """Gather an object from every rank by pickle on the group's first rank; return None on the others.

    Args:
        value: this rank's object, without tensors on a device.
        group: between CPUs; every rank of it must call.
    """
    objects = [value] * group.size() if group.rank() == 0 else None
    dist.gather_object(value, objects, group=group, group_dst=0)
    return objects


def on_all_ranks(work: Callable[[], Result], *groups: dist.ProcessGroup) -> list[Result]:
    """Run `work` on every rank; return all results in the order of ranks. One all-gather of objects over each group.

    Args:
        work: the function to run.
        groups: one group, or the groups of several mesh axes; every rank of their product must call.

    Raises:
        FileNotFoundError, OSError, ValueError, AgreedError: `work` failed on some rank. Raised on every rank, with
            each rank's error in the text. `AgreedError` stands for all other types.
    """
    outcome: Result | Exception
    cause: Exception | None = None
    try:
        outcome = work()
    except Exception as error:  # of any type: the other ranks are waiting
        cause, outcome = error, _plain_error(error)
    outcomes = {dist.get_rank(): outcome}
    for group in groups:
        gathered = gather_objects(outcomes, group)
        outcomes = {rank: outcome for of_rank in gathered for rank, outcome in of_rank.items()}
    if failures := {rank: error for rank, error in outcomes.items() if isinstance(error, Exception)}:
        raise joined_errors(failures, len(outcomes)) from cause
    return list(outcomes.values())  # type: ignore[arg-type]  # no element is an error here


def run_or_raise_together(work: Callable[[], Result], *groups: dist.ProcessGroup) -> Result:
    """Run `work` on every rank and return this rank's result; raise on all ranks if it failed on one.

    One all-gather of objects over each group. Arguments and errors are those of `on_all_ranks`.
    """
    result: list[Result] = []
    on_all_ranks(lambda: result.append(work()), *groups)
    return result[0]


def checked_together(what: str, check: Callable[[], Result]) -> Result:
    """Run a check on every rank of the world before a collective call, and return this rank's result.

    A barrier through the store and all-gathers of the errors' texts. Errors of other types than ValueError are
    reported as by `naming_failures`.

    Args:
        what: name of the call.
        check: raises ValueError for what is wrong on this rank.

    Raises:
        ValueError: the check failed on some rank. Raised on every rank; if errors differ, with each rank's error.
    """
    if dist.get_world_size() == 1:
        return check()
    with all_ranks_in(what, raised_alike=(ValueError,)):
        local_error: ValueError | None = None
        try:
            result = check()
        except ValueError as error:
            local_error = error
        raise_together(local_error)
        return result


def raise_together(local_error: ValueError | None) -> None:
    """Raise on every rank of the world if some rank has an error. One all-gather of the errors' texts.

    Raises:
        ValueError: this rank's error if all ranks have the same, otherwise one with each rank's error.
    """
    texts = gather_objects(None if local_error is None else str(local_error))
    if local_error is not None and len(set(texts)) == 1:
        raise local_error
    if errors := {rank: ValueError(text) for rank, text in enumerate(texts) if text is not None}:
        raise joined_errors(errors, len(texts)) from local_error


def on_first_rank(work: Callable[[], Result], group: dist.ProcessGroup) -> Result:
    """Run `work` on the first rank and return its result on all ranks. Errors are raised as by `on_all_ranks`."""
    result = on_all_ranks(lambda: work() if group.rank() == 0 else None, group)[0]
    return result  # type: ignore[return-value]  # the first rank's result is set


def joined_errors(errors: Mapping[int, BaseException], num_ranks: int | None = None) -> Exception:
    """Join the errors of several ranks in one; see `on_all_ranks`.

    Each distinct text appears once, followed by its ranks unless all of several ranks raised it.

    Args:
        errors: errors by rank.
        num_ranks: number of ranks that ran the work; None if unknown.
    """
    plain = {rank: _plain_error(error) for rank, error in errors.items()}
    ranks_by_text: dict[str, list[int]] = {}
    for rank, error in plain.items():
        ranks_by_text.setdefault(str(error), []).append(rank)
    if len(ranks_by_text) == 1 and num_ranks != 1 and len(errors) == num_ranks:
        texts = list(ranks_by_text)
    else:
        texts = [
            f"{text} (rank{'s' * (len(ranks) > 1)} {', '.join(map(str, ranks))})"
            for text, ranks in ranks_by_text.items()
        ]
    kinds = (kind for kind in _KINDS if all(isinstance(error, kind) for error in plain.values()))
    kind = next(kinds, AgreedError)
    return kind("; ".join(texts))


def _plain_error(error: BaseException) -> Exception:
    """Convert an error to a type that every rank can unpickle."""
    kind = next((kind for kind in (*_KINDS, AgreedError) if isinstance(error, kind)), None)
    return AgreedError(f"{type(error).__name__}: {error}") if kind is None else kind(str(error))


def differing_ranks(by_rank: Sequence[Sequence[int]], place: int = 0) -> list[int]:
    """Return the ranks in the group whose integer at this position differs from that of the first rank."""
    return [rank for rank, integers in enumerate(by_rank) if integers[place] != by_rank[0][place]]


def require_equal(
    value: Any,
    group: dist.ProcessGroup | None = None,
    *,
    what: str,
    rule: str = "every rank must give the same",
) -> None:
    """Raise unless all ranks have equal settings. All-gather of a hash, and of the settings if hashes differ.

    Args:
        value: a dataclass or a mapping by name; both may be nested. Objects that are no plain values are compared by
            their type alone.
        group: the ranks; None is the world, where a barrier through the store comes first, so that messages of other
            calls cannot be mixed up with this one.
        what: what has these settings, for the error message.
        rule: the rule that the error message states.

    Raises:
        ValueError: settings differ; names them and the ranks. Raised on every rank.
    """
    if dist.get_world_size(group) == 1:
        return
    if group is not None:
        return begin_require_equal(value, group, what=what, rule=rule).wait()
    with all_ranks_in(what):
        begin_require_equal(value, what=what, rule=rule).wait()


def begin_require_equal(
    value: Any, group: dist.ProcessGroup | None = None, *, what: str, rule: str
) -> InFlight[None]:
    """Start `require_equal` asynchronously, for the present value and without the barrier."""
    gathering, plain = begin_gather_integers((settings_hash(value),), group), dict(plain_settings(value))

    def finish(codes: Tensor) -> None:
        if len(set(gathering.finish(codes))) > 1:
            all_settings: list[dict[str, str]] = gather_objects(plain, group)
            raise_different(all_settings, dist.get_process_group_ranks(group), what=what, rule=rule)

    return InFlight(gathering.handle, gathering.tensor, finish)


def raise_different(
    all_settings: Sequence[Mapping[str, str]], ranks: Sequence[int], *, what: str, rule: str
) -> NoReturn:
    """Raise for settings that differ between ranks, see `require_equal`.

    Args:
        all_settings: the settings of each rank, as text by name.
    """
    errors = []
    for name in dict.fromkeys(chain.from_iterable(all_settings)):
        holders: dict[str, list[int]] = {}
        for rank, settings in zip(ranks, all_settings, strict=True):
            holders.setdefault(settings.get(name, "nothing"), []).append(rank)
        if len(holders) > 1:
            values = (f"{value} on rank(s) {where}" for value, where in holders.items())
            errors.append(f"{name} is {' and '.join(values)}")
    more = [f"and {len(errors) - _MOST_NAMED} more"] if len(errors) > _MOST_NAMED else []
    raise ValueError(
        f"the settings of {what} differ between ranks, and {rule}: {'; '.join(errors[:_MOST_NAMED] + more)}"
    )
