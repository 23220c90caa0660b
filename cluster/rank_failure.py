"""Errors that another rank causes: ours, and how to tell those of the backends."""

import re

import torch.distributed as dist

# What gloo says of a peer that is gone; NCCL and the store have error types of their own.
BROKEN = re.compile(
    r"connection (closed by peer|reset by peer|refused)|broken pipe|socket closed|remote worker crashing"
    r"|connectFullMesh failed",
    re.I,
)
TIMED_OUT = re.compile(r"timed out waiting|(wait|operation|application) timeout|operation timed out", re.I)

SAME_CALLS = (  # what to do about an `UnmatchedCall`
    "every rank has to make the same calls in the same order, so make this one on all ranks or on none"
)


class RankFailure(RuntimeError):
    """Another rank failed, died or left while this one waited for it. `rank` is the one to blame, if known."""

    def __init__(self, message: str, rank: int | None = None) -> None:
        super().__init__(message, rank)
        self.rank = rank

    def __str__(self) -> str:
        return str(self.args[0])


class UnmatchedCall(RankFailure):
    """This rank is in a call that another one, `rank`, never makes: it is in another call instead."""


def is_broken(error: BaseException) -> bool:
    """Whether an error says that another rank went away, or that the backend failed."""
    if isinstance(error, dist.DistNetworkError | dist.DistBackendError | ConnectionError):
        return True
    return isinstance(error, RuntimeError) and BROKEN.search(str(error)) is not None


def is_timeout(error: BaseException) -> bool:
    """Whether an error says that another rank did not come."""
    return isinstance(error, RuntimeError) and TIMED_OUT.search(str(error)) is not None
