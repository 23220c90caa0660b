"""Every planted fault is noticed by its check. The rows are in planted/, see mutations.py."""

from contextlib import nullcontext

import pytest

from ..pool import Pool
from .planted import FAULTS


def test_every_target_exists() -> None:
    missing = []
    for name, mutation in FAULTS.items():
        try:
            mutation.resolve()
        except LookupError as error:
            missing.append(f"{name}: {error}")
    assert not missing, "\n".join(missing)


def departure(name: str, is_planted: bool) -> str | None:
    """Return the difference that a check finds, with or without its fault; on one rank of the pool."""
    mutation = FAULTS[name]
    with mutation.planted() if is_planted else nullcontext():
        return mutation.run()


@pytest.mark.parametrize(
    "name",
    [pytest.param(name, marks=[pytest.mark.slow] * (not fault.quick)) for name, fault in FAULTS.items()],
)
def test_a_planted_fault_is_noticed(pool: Pool, name: str) -> None:
    mutation = FAULTS[name]
    try:
        reports = pool.run(mutation.world_size, departure, name, True, timeout=120.0)
    except Exception as error:
        reports = [f"{type(error).__name__}: {error}"]
    differences = [report for report in reports if report is not None]
    assert differences, "the check does not notice the fault"
    assert any(mutation.notices(report) for report in differences), differences


DISTINCT = {mutation.noticing: name for name, mutation in reversed(FAULTS.items())}


@pytest.mark.slow
@pytest.mark.parametrize("name", DISTINCT.values())
def test_the_check_passes_without_the_fault(pool: Pool, name: str) -> None:
    assert set(pool.run(FAULTS[name].world_size, departure, name, False, timeout=120.0)) == {None}
