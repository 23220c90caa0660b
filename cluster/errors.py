"""One error for all that is wrong with a call."""

from collections.abc import Sequence


def raise_errors(errors: Sequence[str]) -> None:
    """Raise all errors as one, a line each; return where there are none.

    Raises:
        ValueError: there are some.
    """
    if len(errors) == 1:
        raise ValueError(errors[0])
    if errors:
        raise ValueError("\n".join((f"{len(errors)} errors:", *(f"- {error}" for error in errors))))
