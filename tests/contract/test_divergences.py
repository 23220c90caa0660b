"""Eight ways in which one rank departs from the others in a warm step, each diagnosed by its name before a timeout.

One table: what the second rank does, the layout, and what the errors of both ranks must say.
"""

import os
import signal
from collections.abc import Callable
from contextlib import nullcontext
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

from echelon import Booster
from echelon.cluster.collectives import all_gather_single
from echelon.verify.batch import loss_of, make_batch

from ..cluster.helpers import with_short_timeout
from ..plugins.training import LLAMA, boosted, hybrid
from ..pool import Pool, RankDied

TIMEOUT = 5.0  # of the process groups
WARM, DEPARTS = 4, 1  # number of the step, and the rank


class Run:
    """A training script on one rank."""

    def __init__(self, sizes: dict[str, Any]) -> None:
        self.booster: Booster = hybrid(**sizes)
        self.model, self.optimizer = boosted(self.booster, LLAMA)
        replica, _ = self.booster.plugin.data_rank
        self.batches = [make_batch(LLAMA, num_samples=4, seed=10 * step + replica) for step in range(8)]

    def steps(self, first: int, last: int, missing: int = 0) -> None:
        data = iter(self.batches[first : last - missing])
        for _ in range(first, last):
            self.booster.execute_pipeline(data, self.model, loss_of, self.optimizer)
            self.optimizer.step()
            self.optimizer.zero_grad()

    def in_forward(self, act: Callable[[Tensor], None]) -> None:
        """Act after the last layer that this rank has, in the next forward."""
        layer = [layer for layer in self.model.module.modules() if type(layer).__name__ == "LlamaMLP"][-1]
        layer.register_forward_hook(lambda module, inputs, output: act(output))


def die(_: Any = None) -> None:
    os.kill(os.getpid(), signal.SIGKILL)


def run_out_of_memory(_: Any = None) -> None:
    raise torch.OutOfMemoryError("out of memory. Tried to allocate 2.00 GiB")


def diverge(what: str, sizes: dict[str, Any]) -> None:
    """Train to a warm step, in which the second rank departs."""
    with_short_timeout(TIMEOUT)
    run = Run(sizes)
    run.steps(0, WARM)
    is_other = dist.get_rank() == DEPARTS
    if what == "collective":
        run.in_forward(gather if is_other else add_up)
    elif is_other:
        depart(run, what)
    with run.booster.naming_nonfinite(run.model) if what == "nan" else nullcontext():
        run.steps(WARM, 8, missing=int(what == "skip" and is_other and "zero_stage" in sizes))


def add_up(x: Tensor) -> None:
    dist.all_reduce(x.detach().clone())


def gather(x: Tensor) -> None:
    all_gather_single(x.new_empty(2 * len(x), *x.shape[1:]), x.detach())


def depart(run: Run, what: str) -> None:
    batch = run.batches[WARM]
    if what == "shape":
        run.batches[WARM] = {name: tensor[:, :-2].contiguous() for name, tensor in batch.items()}
    if what == "dtype":
        run.batches[WARM] = {**batch, "input_ids": batch["input_ids"].int()}
    if what == "skip" and run.booster.plugin.tp_size > 1:
        del run.batches[WARM]
    if what == "die":
        run.in_forward(die)
    if what == "memory":
        run.in_forward(run_out_of_memory)
    if what == "branch":
        run.booster.save_model(run.model, "/tmp/never")
    if what == "nan":
        with torch.no_grad():
            next(iter(run.model.parameters())).fill_(float("nan"))


SHAPES = "with a batch of input_ids int64[4, 11]"
TP2, PP2, DP2 = {"tp_size": 2}, {"pp_size": 2}, {"zero_stage": 1}


# The divergence of the second rank, the layout, and words of the errors of both ranks.
ROWS: tuple[tuple[Any, ...], ...] = (
    ("skip", TP2, "the batches differ between ranks of one replica", "rank(s) [1]"),
    ("skip", DP2, "execute_pipeline at the end of its data", "rank 1 ran out of batches"),
    ("die", TP2, "rank 1 died: its process is gone", "in execute_pipeline, F stage 0 microbatch 0"),
    ("branch", TP2, "rank 1 is in save_model", "rank 0 in execute_pipeline", "in the store for other ranks"),
    ("shape", TP2, "rank 1 is in execute_pipeline", SHAPES, "rank 0 of the same replica with one of"),
    ("shape", PP2, "rank 1 is in execute_pipeline", SHAPES, "rank 0 of the same replica with one of"),
    ("dtype", TP2, "rank 1 is in execute_pipeline", "input_ids int32[4, 13]", "give every rank of a replica"),
    (
        "collective",
        TP2,
        "rank 0 is in all_reduce",
        "rank 1 in another collective, all_gather",
        "layers.1.mlp",
    ),
    ("memory", DP2, "OutOfMemoryError: out of memory. Tried to allocate 2.00 GiB", "num_microbatches=4"),
    ("nan", PP2, "is the first that is not finite, on rank 1 in microbatch 0"),
)


@pytest.mark.parametrize("row", ROWS, ids=lambda row: f"{row[0]}-{next(iter(row[1]))}")
def test_a_rank_that_departs_is_diagnosed_on_both_ranks(pool: Pool, row: tuple[Any, ...]) -> None:
    what, sizes, *words = row
    errors = pool.run_failing(2, diverge, what, sizes, timeout=60.0)
    if what == "die":
        assert isinstance(errors.pop(DEPARTS), RankDied)
    for error in errors:
        text = f"{type(error).__name__}: {error}"
        assert all(word in text for word in words), text
