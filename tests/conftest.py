"""What all tests share. Distributed tests run on the pool of pool.py."""

from collections.abc import Iterator

import pytest

from .pool import Pool


@pytest.fixture(scope="session")
def pool() -> Iterator[Pool]:
    """Worker processes that live for the whole session: `pool.run(world_size, function, ...)`."""
    with Pool() as workers:
        yield workers
