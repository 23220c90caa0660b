"""Every refused call raises an error with the words of its row; under processes it is one error on every rank.

Misuses of a whole script, with suggestions that run, are in tests/contract/misuse_rows.py.
"""

from types import ModuleType

import pytest

from ..pool import Pool
from ..slow import slow_row
from . import model_rows, plain_rows, plugin_rows, sharding_rows, split_rows, training_rows, zero_rows
from .rows import OF_RANK, Row, message_of, messages_of, missing

# Rows without processes.
PLAIN: dict[str, Row] = {
    **plain_rows.PIPELINES,
    **plain_rows.DATA,
    **plain_rows.LAYOUTS,
    **plain_rows.OPTIMIZERS,
    **plain_rows.CONFIGURATIONS,
    **model_rows.LAYERS,
    **model_rows.POLICIES,
    **split_rows.SPLITS,
}
# The number of ranks, and the module and name of their rows: a rank imports no others.
RANKS: dict[str, tuple[int, ModuleType, str]] = {
    "zero": (2, zero_rows, "ZERO"),
    "plugins": (2, plugin_rows, "PLUGINS_ROWS"),
    "training": (2, training_rows, "TRAINING"),
    "sharding": (2, sharding_rows, "TWO"),
    "four ranks": (4, sharding_rows, "FOUR"),
}


@pytest.mark.parametrize("name", PLAIN)
def test_a_call_is_refused_with_the_words_of_its_row(name: str) -> None:
    row = PLAIN[name]
    assert missing({name: row}, {name: message_of(row)}) == []


@pytest.mark.parametrize("interval", [pytest.param(3, id="every third row"), slow_row(1, id="all")])
@pytest.mark.parametrize("name", RANKS)
def test_a_call_of_several_ranks_is_refused_on_all(pool: Pool, name: str, interval: int) -> None:
    num_ranks, module, table = RANKS[name]
    first, *others = pool.run(num_ranks, messages_of, module.__name__, table, interval, timeout=200.0)
    rows: dict[str, Row] = {row: getattr(module, table)[row] for row in first}
    assert len(rows) > 2 and missing(rows, first) == []
    for other in others:
        assert missing(rows, other) == []
        equal = [row for row, (_, *words) in rows.items() if OF_RANK not in words]
        assert {row: other[row] for row in equal if other[row] != first[row]} == {}
