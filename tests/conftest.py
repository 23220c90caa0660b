"""Fixtures and settings of all tests. Distributed tests run on the pool of pool.py."""

import gc
import os
import runpy
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING

# For each TCPStore connection torch looks up the host name of the peer, by IPv6, unless /etc/hosts has its address.
# One query in about 200 gets no answer and then takes 5 s. No test needs a name server, so none is asked.
os.environ.setdefault("RES_OPTIONS", "attempts:0")
os.environ.setdefault("TORCH_FR_BUFFER_SIZE", "100")  # of collectives; hang reports read all of them
os.environ.setdefault("TORCH_CPP_LOG_LEVEL", "ERROR")  # otherwise torch logs each failed lookup

# Before the imports of Echelon, whose errors would not name the checkout.
# ruff: noqa: E402
runpy.run_path(str(Path(__file__).parents[1] / "benchmarks" / "checkout.py"))["refuse_another_checkout"]()

import pytest

from . import foreign_warnings, releases

if TYPE_CHECKING:
    from .pool import Pool

foreign_warnings.install()


def pytest_configure(config: pytest.Config) -> None:
    """Register what other files do in a session."""
    config.pluginmanager.register(foreign_warnings, "warnings of other packages")
    foreign_warnings.pytest_configure(config)
    releases.pytest_configure(config)
    distributes = bool(getattr(config.option, "numprocesses", None)) and not hasattr(config, "workerinput")
    # The process that distributes tests needs torch and transformers, which take seconds to import, for results alone.
    if "KEEP_RESULTS" in os.environ or not distributes:
        from . import matrix

        config.pluginmanager.register(matrix, "rows of results")


def pytest_collection_finish() -> None:
    """Exclude all modules and tests from later garbage collections."""
    gc.freeze()


@pytest.fixture(scope="session")
def pool() -> Iterator["Pool"]:
    """Worker processes for the whole session: `pool.run(world_size, function, ...)`."""
    from .pool import Pool

    with Pool() as workers:
        yield workers
