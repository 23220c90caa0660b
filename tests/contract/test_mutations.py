"""Every planted fault is noticed by the check that it names. The rows are in planted/, see mutations.py."""

import pytest

from ..pool import Pool
from .mutations import Mutation, found_with, found_without
from .planted import FAULTS


def test_every_target_exists() -> None:
    missing = []
    for name, mutation in FAULTS.items():
        try:
            mutation.resolve()
        except LookupError as error:
            missing.append(f"{name}: {error}")
    assert not missing, "\n".join(missing)


@pytest.mark.parametrize(
    "mutation",
    [
        pytest.param(mutation, id=name.replace(" ", "_"), marks=() if mutation.quick else pytest.mark.slow)
        for name, mutation in FAULTS.items()
    ],
)
def test_a_planted_fault_is_noticed(pool: Pool, mutation: Mutation) -> None:
    try:
        reports = pool.run(mutation.world_size, found_with, mutation, timeout=120.0)
    except LookupError:
        raise
    except Exception as error:
        reports = [f"{type(error).__name__}: {error}"]
    found = [report for report in reports if report is not None]
    assert found, "the check does not notice the fault"
    assert any(mutation.notices(report) for report in found), found


DISTINCT = {mutation.noticing: (name, mutation) for name, mutation in reversed(FAULTS.items())}


@pytest.mark.slow
@pytest.mark.parametrize(
    "mutation", [pytest.param(mutation, id=name.replace(" ", "_")) for name, mutation in DISTINCT.values()]
)
def test_the_check_passes_without_the_fault(pool: Pool, mutation: Mutation) -> None:
    assert set(pool.run(mutation.world_size, found_without, mutation, timeout=120.0)) == {None}
