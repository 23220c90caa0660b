"""What is used after what, learnt from how it was. What is done with it is weight_pool.py."""

from dataclasses import dataclass
from typing import Generic, TypeVar

Thing = TypeVar("Thing")


@dataclass(frozen=True)
class Use(Generic[Thing]):
    """One use of a thing.

    Args:
        kind: of the use; the same thing may be used in several ways.
        thing: what is used.
    """

    kind: str
    thing: Thing


class UseOrder(Generic[Thing]):
    """Foretells the use that follows another: the one that has followed it always, in the same pass.

    A pass is a stretch of uses that are all of a forward or all of a backward, none of them twice; nothing is foretold
    beyond its end. What was foretold wrongly once never is again, so that a model whose path changes costs no
    more than that. Equal uses in an equal order foretell the same on every rank.
    """

    def __init__(self) -> None:
        self._after: dict[Use[Thing], Use[Thing] | None] = {}
        self._seen: set[Use[Thing]] = set()
        self._last: Use[Thing] | None = None
        self._was_in_backward = False

    def after(self, use: Use[Thing]) -> Use[Thing] | None:
        """What will follow a use; None where that is not known."""
        return self._after.get(use)

    def note(self, use: Use[Thing], *, in_backward: bool) -> None:
        """It is used now, in a forward or in a backward."""
        goes_on = in_backward == self._was_in_backward and use not in self._seen
        if self._last is not None:
            follows = use if goes_on else None
            if self._after.setdefault(self._last, follows) != follows:
                self._after[self._last] = None
        if not goes_on:
            self._seen.clear()
        self._seen.add(use)
        self._last, self._was_in_backward = use, in_backward
