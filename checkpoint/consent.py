"""Work that every rank does, and that fails on all of them or on none."""

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from typing import TypeVar

import torch.distributed as dist

from ..cluster.agree import gather_objects
from ..cluster.failures import meet_all_ranks, naming_failures

Result = TypeVar("Result")
Report = TypeVar("Report")


class CheckpointError(RuntimeError):
    """Saving or loading failed, on every rank alike, by neither the files nor what was given alone."""


# Kinds of errors that are raised as they are; the first that fits.
_KINDS = (FileNotFoundError, OSError, ValueError)


@dataclass(frozen=True)
class _Failure:
    kind: type[Exception]
    text: str

    @staticmethod
    def of(error: BaseException) -> "_Failure":
        """The kind and text of an error that ranks report."""
        for kind in _KINDS:
            if isinstance(error, kind):
                return _Failure(kind, str(error))
        return _Failure(CheckpointError, f"{type(error).__name__}: {error}")


def on_all_ranks(work: Callable[[], Result], group: dist.ProcessGroup) -> list[Result]:
    """Do it here, and return what every rank of the group got. One all-gather of objects.

    Raises:
        FileNotFoundError, OSError, ValueError, CheckpointError: it failed somewhere; on every rank, with what happened
            on which. The last one where that was no one of the others.
    """
    outcome: Result | _Failure
    cause: Exception | None = None
    try:
        outcome = work()
    except Exception as error:  # whatever it is, the other ranks wait
        cause, outcome = error, _Failure.of(error)
    every = gather_objects(outcome, group)
    if failures := {rank: each for rank, each in enumerate(every) if isinstance(each, _Failure)}:
        raise _together(failures) from cause
    return every


def exchanged(
    work: Callable[[], tuple[Result, Report]], group: dist.ProcessGroup
) -> tuple[Result, list[Report]]:
    """Do it here; return this rank's result and the reports of every rank.

    Failures are as of `on_all_ranks`.
    """
    own: list[Result] = []

    def report() -> Report:
        result, reported = work()
        own.append(result)
        return reported

    every = on_all_ranks(report, group)
    return own[0], every


def alike(work: Callable[[], Result], group: dist.ProcessGroup) -> Result:
    """Do it here, and return what it gave here, unless it failed somewhere; see `on_all_ranks`."""
    result: list[Result] = []
    on_all_ranks(lambda: result.append(work()), group)
    return result[0]


def errors_of_all(find: Callable[[], list[str]], group: dist.ProcessGroup) -> list[str]:
    """The errors that any rank found, each once; failures as of `on_all_ranks`."""
    return list(dict.fromkeys(error for found in on_all_ranks(find, group) for error in found))


@contextmanager
def failing_alike(action: str) -> Iterator[None]:
    """Around work that communicates: what fails on every rank alike leaves all of them able to go on.

    Raises:
        RankFailure: another rank died, left, or is in another call; see `naming_failures`.
    """
    agreed: Exception | None = None
    with naming_failures(action):
        meet_all_ranks()
        try:
            yield
        except (OSError, ValueError, CheckpointError) as error:
            agreed = error
    if agreed is not None:
        raise agreed


def on_first_rank(work: Callable[[], Result], group: dist.ProcessGroup) -> Result:
    """Let the first rank do it, and return on every rank what it got; failures as of `on_all_ranks`."""
    done = on_all_ranks(lambda: work() if group.rank() == 0 else None, group)[0]
    return done  # type: ignore[return-value]  # the first rank's is one


def joined_failures(errors: Mapping[int, BaseException]) -> Exception:
    """The error that says what happened on which ranks; see `on_all_ranks`."""
    return _together({rank: _Failure.of(error) for rank, error in errors.items()})


def _together(failures: Mapping[int, _Failure]) -> Exception:
    """Each failure once, with its ranks."""
    ranks: dict[str, list[int]] = {}
    for rank, failure in failures.items():
        ranks.setdefault(failure.text, []).append(rank)
    kinds = [failure.kind for failure in failures.values()]
    common = next((kind for kind in _KINDS if all(issubclass(each, kind) for each in kinds)), CheckpointError)
    return common(
        "; ".join(
            f"{text} (rank{'s' * (len(where) > 1)} {', '.join(map(str, where))})"
            for text, where in ranks.items()
        )
    )
