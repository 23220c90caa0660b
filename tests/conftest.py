"""Fixtures and settings of all tests. Distributed tests run on the pool of pool.py."""

import gc
import os
import runpy
from collections.abc import Iterator
from pathlib import Path

# For each TCPStore connection torch looks up the host name of the peer, by IPv6, unless /etc/hosts has its address.
# One query in about 200 gets no answer and then takes 5 s. No test needs a name server, so none is asked.
os.environ.setdefault("RES_OPTIONS", "attempts:0")
os.environ.setdefault("TORCH_CPP_LOG_LEVEL", "ERROR")  # otherwise torch logs each failed lookup

# Before the imports of Echelon, whose errors would not name the checkout.
# ruff: noqa: E402
runpy.run_path(str(Path(__file__).parents[1] / "benchmarks" / "checkout.py"))["refuse_another_checkout"]()

import pytest

from . import foreign_warnings, matrix, releases
from .matrix import pytest_collection_modifyitems, pytest_runtest_makereport
from .pool import Pool

__all__ = [
    "pool",
    "pytest_collection_finish",
    "pytest_collection_modifyitems",
    "pytest_configure",
    "pytest_runtest_makereport",
]
foreign_warnings.install()


def pytest_configure(config: pytest.Config) -> None:
    """Register what other files do in a session."""
    config.pluginmanager.register(foreign_warnings, "warnings of other packages")
    foreign_warnings.pytest_configure(config)
    matrix.pytest_configure(config)
    releases.pytest_configure(config)


def pytest_collection_finish() -> None:
    """Exclude all modules and tests from later garbage collections."""
    gc.freeze()


@pytest.fixture(scope="session")
def pool() -> Iterator[Pool]:
    """Worker processes for the whole session: `pool.run(world_size, function, ...)`."""
    with Pool() as workers:
        yield workers
