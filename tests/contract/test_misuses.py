"""Bad configurations and misuses: one clear message on every rank, and a suggestion of it that then runs.

The rows are those of misuse_rows.py.
"""

from collections.abc import Collection, Sequence

import pytest

from ..pool import Pool
from ..slow import slow_row
from .misuse_rows import LEFT_OUT, MISUSES, OPTIONS

NUM_RANKS = 2


def results_of_rank(names: Sequence[str], tried: Collection[str]) -> list[tuple[str, str]]:
    """Return the message of each row, and the error of its suggestion if it is tried, on one rank."""
    rows = ((name, MISUSES[name]) for name in names)
    return [(row.message(), row.suggested() if name in tried else "") for name, row in rows]


def errors_of(name: str, *results: tuple[str, str]) -> list[str]:
    """List what is wrong with a row's message and suggestion, by the results of every rank."""
    messages, row = [message for message, _ in results], MISUSES[name]
    message = messages[0]
    errors = [] if messages == [message] * NUM_RANKS else [f"ranks differ: {messages}"]
    errors += [f"{word!r} is not in {message!r}" for word in row.words if word not in message]
    if name in OPTIONS:
        wrong, right = row.wrong["options"], row.right["options"]
        changed = [option for option, value in right.items() if wrong.get(option, LEFT_OUT) is not value]
        if not any(option in message for option in changed):
            errors.append(f"none of {changed}, which the suggestion changes, is in {message!r}")
    failure = next((error for _, error in results if error), "")
    return errors + [f"the suggestion fails: {failure}"] * bool(failure)


def test_there_are_eighty() -> None:
    assert len(MISUSES) >= 80


@pytest.mark.parametrize(
    ("interval", "suggestions"),
    [
        pytest.param(3, 5, id="every third row, and a fifth of their suggestions"),
        slow_row(1, 1, id="all"),
    ],
)
def test_every_misuse_has_one_clear_message_on_every_rank_and_its_suggestion_runs(
    pool: Pool, interval: int, suggestions: int
) -> None:
    names = list(MISUSES)[::interval]
    tried = names[::suggestions]
    # One run: a refusal changes nothing.
    by_rank = pool.run(NUM_RANKS, results_of_rank, names, tried, timeout=200.0)
    errors = {name: errors_of(name, *results) for name, *results in zip(names, *by_rank, strict=True)}
    assert {name: wrong for name, wrong in errors.items() if wrong} == {}
