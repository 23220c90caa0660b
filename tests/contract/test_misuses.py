"""Bad configurations and misuses: one clear message on every rank, and a suggestion of it that then runs.

The rows (misuse_rows.py) share one run of the pool, since a refusal changes nothing.
"""

from typing import NamedTuple

import pytest

from ..pool import Pool
from .misuse_rows import LEFT_OUT, MISUSES, OPTIONS

NUM_RANKS = 2


class Result(NamedTuple):
    """The message of a misuse on every rank, and the error of its suggestion, empty if it runs."""

    messages: tuple[str, ...]
    error: str


def results_of_rank() -> list[tuple[str, str]]:
    """Return the message and the error of the suggestion of every row, on one rank."""
    found = []
    for row in MISUSES.values():
        found.append((row.message(), row.suggested()))
    return found


@pytest.fixture(scope="module")
def results(pool: Pool) -> dict[str, Result]:
    by_rank = pool.run(NUM_RANKS, results_of_rank, timeout=200.0)
    return {
        name: Result(tuple(message for message, _ in rows), next((error for _, error in rows if error), ""))
        for name, rows in zip(MISUSES, zip(*by_rank, strict=True), strict=True)
    }


def test_there_are_eighty() -> None:
    assert len(MISUSES) >= 80


@pytest.mark.parametrize("name", MISUSES)
def test_a_misuse_has_one_clear_message_on_every_rank(results: dict[str, Result], name: str) -> None:
    message, *others = results[name].messages
    assert others == [message] * (NUM_RANKS - 1)
    assert all(word in message for word in MISUSES[name].words), message


@pytest.mark.parametrize("name", OPTIONS)
def test_a_message_names_an_option_that_its_suggestion_changes(results: dict[str, Result], name: str) -> None:
    wrong, right = MISUSES[name].wrong["options"], MISUSES[name].right["options"]
    changed = [option for option, value in right.items() if wrong.get(option, LEFT_OUT) is not value]
    assert changed
    assert any(option in results[name].messages[0] for option in changed), (
        changed,
        results[name].messages[0],
    )


@pytest.mark.parametrize("name", MISUSES)
def test_the_suggestion_of_the_message_runs(results: dict[str, Result], name: str) -> None:
    assert results[name].error == ""
