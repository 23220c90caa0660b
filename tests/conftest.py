"""Fixtures and settings of all tests. Distributed tests run on the pool of pool.py."""

import os
from collections.abc import Iterator

# Torch looks up the name of every TCPStore connection's other end, by IPv6, where /etc/hosts does not know
# 127.0.0.1. One query in about 200 gets no answer and then costs 5 s. No test needs a name server: none is asked.
os.environ.setdefault("RES_OPTIONS", "attempts:0")
os.environ.setdefault("TORCH_CPP_LOG_LEVEL", "ERROR")  # or torch reports each name that it did not find

import pytest

from .matrix import pytest_collection_modifyitems, pytest_configure, pytest_runtest_makereport
from .pool import Pool

__all__ = ["pool", "pytest_collection_modifyitems", "pytest_configure", "pytest_runtest_makereport"]


@pytest.fixture(scope="session")
def pool() -> Iterator[Pool]:
    """Worker processes that live for the whole session: `pool.run(world_size, function, ...)`."""
    with Pool() as workers:
        yield workers
