"""Collectives over gloo in either of their ways, and process groups with a short timeout."""

from collections.abc import Callable
from datetime import timedelta
from math import inf
from typing import Any
from unittest.mock import patch

import pytest
import torch.distributed as dist

from echelon.cluster import gloo
from echelon.cluster.failures import start_watch, stop_watch

SLICES = pytest.mark.parametrize("slices", [True, False], ids=["slices", "plain"])


def with_slices(slices: bool, function: Callable, *args: Any) -> Any:
    """Call a function on a rank whose collectives go by slices, or else as over NCCL by torch's own."""
    with patch.object(gloo, "MIN_BYTES", 0 if slices else inf):
        return function(*args)


def with_short_timeout(seconds: float) -> None:
    """Begin a new process group with a short timeout in place of the pool's, and start its watch."""
    rank, size = dist.get_rank(), dist.get_world_size()
    stop_watch()
    store = dist.distributed_c10d._get_default_store()
    dist.destroy_process_group()
    dist.init_process_group(
        "cpu:gloo",
        store=dist.PrefixStore("short", store),
        rank=rank,
        world_size=size,
        timeout=timedelta(seconds=seconds),
    )
    start_watch()
