"""Errors: a list of errors raised as one, unknown arguments, and failures of other ranks."""

import re
from collections.abc import Callable, Iterable, Sequence
from difflib import get_close_matches
from functools import wraps
from inspect import Parameter, signature
from typing import ParamSpec, TypeVar

import torch.distributed as dist

Arguments = ParamSpec("Arguments")
Returned = TypeVar("Returned")


class ErrorList(ValueError):
    """Several errors of one call: `args` holds them, and the text has one line for each."""

    def __str__(self) -> str:
        if len(self.args) == 1:
            return str(self.args[0])
        return "\n".join((f"{len(self.args)} errors:", *(f"- {error}" for error in self.args)))


def raise_errors(errors: Sequence[str]) -> None:
    """Raise all errors as one `ErrorList`; return if there are none.

    Raises:
        ErrorList: the list is not empty.
    """
    if errors:
        raise ErrorList(*errors)


def first_of(names: Sequence[str]) -> str:
    """Return the first of some names, with the number of the others, for an error."""
    return f"{names[0]} and {len(names) - 1} more" if len(names) > 1 else names[0]


def errors_of(error: Exception) -> tuple[str, ...]:
    """The texts of an `ErrorList`, or the text of any other error."""
    return error.args if isinstance(error, ErrorList) else (str(error),)


def unknown_arguments(
    function: Callable[..., object], names: Iterable[str], others: Iterable[str] = ()
) -> list[str]:
    """Return Python's error for each name that is no argument of a function, with the nearest arguments.

    Args:
        function: the called function.
        names: names of keyword arguments in a call.
        others: further names that it accepts.
    """
    parameters = signature(function).parameters.values()
    known = [
        parameter.name
        for parameter in parameters
        if parameter.kind is not Parameter.VAR_KEYWORD and parameter.name != "self"
    ]
    errors = []
    for name in names:
        if name not in (*known, *others):
            nearest = " or ".join(_nearest(name, known) or get_close_matches(name, [*known, *others], 1))
            error = f"{function.__qualname__}() got an unexpected keyword argument {name!r}"
            errors.append(f"{error}: did you mean {nearest}?" if nearest else error)
    return errors


def did_you_mean(name: str, known: Iterable[str]) -> str:
    """Return the start of an advice: a question with the nearest names and "If not, "; nothing if none is near."""
    close = get_close_matches(name.lower(), [*known])
    return f"did you mean {' or '.join(close)}? If not, " if close else ""


def _nearest(name: str, known: Iterable[str]) -> list[str]:
    """Return at most three names that have all words of `name`, as tp_size of tp, or only words of it."""
    words = set(name.split("_"))
    candidates = [
        argument for argument in known if words <= {*argument.split("_")} or words >= {*argument.split("_")}
    ]
    return get_close_matches(name, candidates, 3, 0)


def naming_arguments(function: Callable[Arguments, Returned]) -> Callable[Arguments, Returned]:
    """Decorate: the TypeError of an unknown keyword argument names the nearest arguments."""

    @wraps(function)
    def called(*args: Arguments.args, **kwargs: Arguments.kwargs) -> Returned:
        if errors := unknown_arguments(function, kwargs):
            raise TypeError(str(ErrorList(*errors)))
        return function(*args, **kwargs)

    return called


# gloo's messages about a lost peer; NCCL and the store have error types of their own.
BROKEN = re.compile(
    r"connection (closed by peer|reset by peer|refused)|broken pipe|socket closed|remote worker crashing"
    r"|connectFullMesh failed",
    re.I,
)
TIMED_OUT = re.compile(r"timed out waiting|(wait|operation|application) timeout|operation timed out", re.I)

SAME_CALLS = (  # advice of an `UnmatchedCall`
    "every rank must make the same calls in the same order, so make this call on all ranks or on none"
)


class RankFailure(RuntimeError):
    """Another rank failed, died or left while this one waited for it. `rank` is the failed rank, if known."""

    def __init__(self, message: str, rank: int | None = None) -> None:
        super().__init__(message, rank)
        self.rank = rank

    def __str__(self) -> str:
        return str(self.args[0])


class UnmatchedCall(RankFailure):
    """This rank waits in a call that `rank` never makes, because `rank` waits in another call."""


def is_broken(error: BaseException) -> bool:
    """Return True if an error reports a lost connection to another rank, or a failure of the backend."""
    if isinstance(error, dist.DistNetworkError | dist.DistBackendError | ConnectionError):
        return True
    return isinstance(error, RuntimeError) and BROKEN.search(str(error)) is not None


def is_timeout(error: BaseException) -> bool:
    """Return True if an error reports a timeout."""
    return isinstance(error, RuntimeError) and TIMED_OUT.search(str(error)) is not None
