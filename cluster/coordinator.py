"""`DistCoordinator`, under ColossalAI's name: the master rank, printing, and order of execution."""

import os
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import wraps
from typing import Any

import torch.distributed as dist

from .failures import stop_watch


class DistCoordinator:
    """The master rank, printing, and order of execution of a run's processes.

    Raises:
        RuntimeError: no process group has been started.
    """

    def __init__(self) -> None:
        if not dist.is_initialized():
            raise RuntimeError("no process group is started: call echelon.launch_from_torch() first")

    @property
    def rank(self) -> int:
        """The rank of this process in the world."""
        return dist.get_rank()

    @property
    def world_size(self) -> int:
        """The number of processes."""
        return dist.get_world_size()

    @property
    def local_rank(self) -> int:
        """The rank of this process on its node."""
        return int(os.environ.get("LOCAL_RANK", "0"))

    def is_master(self, process_group: dist.ProcessGroup | None = None) -> bool:
        """Return True if this is the first rank of the group; None is the world."""
        return dist.get_rank(process_group) == 0

    def is_node_master(self) -> bool:
        """Return True if this is the first process of its node."""
        return self.local_rank == 0

    def is_last_process(self, process_group: dist.ProcessGroup | None = None) -> bool:
        """Return True if this is the last rank of the group; None is the world."""
        return dist.get_rank(process_group) == dist.get_world_size(process_group) - 1

    def print_on_master(self, msg: str, process_group: dist.ProcessGroup | None = None) -> None:
        """Print a line on the first rank of the group only."""
        if self.is_master(process_group):
            print(msg, flush=True)

    def print_on_node_master(self, msg: str) -> None:
        """Print a line on the first process of every node."""
        if self.is_node_master():
            print(msg, flush=True)

    @contextmanager
    def priority_execution(
        self, executor_rank: int = 0, process_group: dist.ProcessGroup | None = None
    ) -> Iterator[None]:
        """Run the block on one rank first, then on the others, which may read what it prepared. Two barriers.

        If the block raises on a rank, the exception leaves it on that rank only, after all ranks have ended the block.

        Args:
            executor_rank: the first one, a rank in the group.
            process_group: all ranks that run the block; None is the world.

        Raises:
            ValueError: the group has no such rank.
        """
        if not 0 <= executor_rank < (size := dist.get_world_size(process_group)):
            raise ValueError(
                f"executor_rank={executor_rank} must be from 0 to {size - 1}, the ranks of the group"
            )
        is_executor = dist.get_rank(process_group) == executor_rank
        if not is_executor:
            dist.barrier(process_group)
        try:
            yield
        finally:  # of failed ranks too, for which the others would wait
            if is_executor:
                dist.barrier(process_group)
            dist.barrier(process_group)

    def on_master_only(self, process_group: dist.ProcessGroup | None = None) -> Callable:
        """Decorate a function so that only the first rank of the group runs it; the others get None."""

        def decorate(function: Callable) -> Callable:
            @wraps(function)
            def run(*args: Any, **kwargs: Any) -> Any:
                return function(*args, **kwargs) if self.is_master(process_group) else None

            return run

        return decorate

    def block_all(self, process_group: dist.ProcessGroup | None = None) -> None:
        """Wait for every rank of the group."""
        dist.barrier(process_group)

    def destroy(self) -> None:
        """Destroy the process group. Every rank calls it, at the end of the script."""
        stop_watch()
        if dist.is_initialized():
            dist.destroy_process_group()
