"""What all tests share. Distributed tests run on the pool of pool.py."""

from collections.abc import Iterator

import pytest

from .matrix import pytest_runtest_makereport, pytest_sessionfinish
from .pool import Pool

__all__ = ["pool", "pytest_runtest_makereport", "pytest_sessionfinish"]


@pytest.fixture(scope="session")
def pool() -> Iterator[Pool]:
    """Worker processes that live for the whole session: `pool.run(world_size, function, ...)`."""
    with Pool() as workers:
        yield workers
