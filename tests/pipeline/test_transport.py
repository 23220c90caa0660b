"""Tensors between stages: their formats, how long they are kept, and errors that name the peer."""

import os
import re
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor
from torch.multiprocessing.reductions import StorageWeakRef

from echelon.cluster.mesh import ParallelMesh
from echelon.pipeline.communicate import with_communication
from echelon.pipeline.runner import ScheduleRun
from echelon.pipeline.schedules import one_f_one_b, stage_placement
from echelon.pipeline.transport import Transport

from ..pool import Pool
from .sequential import (
    STYLES,
    WIDTH,
    Batch,
    LayerStage,
    Pipeline,
    as_if_large,
    criterion,
    identity,
    make_layers,
    pieces,
    reference,
)


def train_in_other_dtypes() -> None:
    for dtype in (torch.float16, torch.bfloat16, torch.float64):
        pipeline = Pipeline(dtype=dtype)
        for seed in range(2):
            pipeline.check_train(pieces(7, 3, seed, dtype), scale=double)


def double(loss: Tensor) -> Tensor:
    return loss * 2


def test_other_dtypes_arrive_unchanged(pool: Pool) -> None:
    pool.run(2, train_in_other_dtypes)


def train_beside_replicas() -> None:
    """Two replicas of two stages: the transport goes by the pipeline's ranks, not by the world's."""
    mesh = ParallelMesh(pp=2)
    layers, transport, rank = make_layers(), Transport(mesh, (0, 1)), mesh.rank("pp")
    microbatches = pieces(4, 2, seed=mesh.rank("dp"))
    run = ScheduleRun(
        stages={rank: LayerStage(layers, rank, 2)},
        microbatches=microbatches,
        criterion=criterion,
        transport=transport,
        scale=identity,
    )
    result = run.run(with_communication(one_f_one_b(2, 2))[rank])
    if rank == 1:
        assert result.losses == reference(make_layers(), microbatches, num_stages=2)


def test_pipelines_beside_each_other_do_not_mix(pool: Pool) -> None:
    pool.run(4, train_beside_replicas)


class UnsteadyStage(LayerStage):
    """The width of what it sends depends on the values of the microbatch, not on its shapes."""

    def forward(self, microbatch: Batch, received: tuple[Tensor, ...]) -> Any:
        output = super().forward(microbatch, tuple(r[:, :WIDTH] for r in received))
        wide = not self.is_last and bool(microbatch["x"][0, 0] > 100)
        return (torch.cat([output[0], output[0]], 1),) if wide else output


def train_with_changing_shapes() -> None:
    pipeline = Pipeline(stage_class=UnsteadyStage)
    microbatches = pieces(4, 2)
    pipeline.train(microbatches)
    microbatches[1]["x"][0, 0] = 1000
    pipeline.train(microbatches)


def test_a_shape_that_changes_under_a_known_signature_is_refused_by_the_sender(pool: Pool) -> None:
    sender, receiver = pool.run_failing(2, train_with_changing_shapes)
    assert isinstance(sender, ValueError)
    assert re.search(
        r"stage 0 sends float32 \[2, 12\] for microbatch 1, and float32 \[2, 6\] for an", str(sender)
    )
    assert isinstance(receiver, RuntimeError)
    assert "lost rank 0 (pipeline stage 0) while receiving the activations" in str(receiver)


def train_on_different_batches() -> None:
    pipeline = Pipeline()
    pipeline.train(pieces(4 + dist.get_rank(), 2))


def test_different_batches_on_the_ranks_are_refused(pool: Pool) -> None:
    errors = pool.run_failing(2, train_on_different_batches)
    assert any("give every rank of a pipeline the same batch" in str(error) for error in errors)


def die_in_step(dying_rank: int, style: str, num_chunks: int) -> None:
    pipeline = Pipeline(style=style, num_chunks=num_chunks)
    pipeline.train(pieces(6, 3))
    if pipeline.rank == dying_rank:
        forward = pipeline.stage.forward
        calls: list[int] = []

        def forward_twice(*args: Any) -> Any:
            calls.append(1)
            if len(calls) == 2:
                os._exit(3)
            return forward(*args)

        pipeline.stage.forward = forward_twice  # type: ignore[method-assign]
    pipeline.train(pieces(6, 3))


@pytest.mark.parametrize(
    ("style", "num_chunks"),
    # Every one needs a new process.
    [pytest.param(*style, marks=[pytest.mark.slow] * (style != ("1f1b", 1))) for style in STYLES],
)
@pytest.mark.parametrize("dying_rank", [0, 1])
def test_a_rank_that_dies_is_named_by_its_peer(
    pool: Pool, dying_rank: int, style: str, num_chunks: int
) -> None:
    error = pool.run_failing(2, die_in_step, dying_rank, style, num_chunks)[1 - dying_rank]
    assert isinstance(error, RuntimeError)
    placement = stage_placement(style, 2, num_chunks)
    stage = "|".join(str(stage) for stage, rank in enumerate(placement) if rank == dying_rank)
    assert re.search(
        rf"lost rank {dying_rank} \(pipeline stage ({stage})\) while (sending|receiving) the "
        r"(activations|gradients) of microbatch \d at stage \d: .*(connection|broken pipe)",
        str(error),
        re.IGNORECASE,
    )


class WatchedStage(LayerStage):
    """Counts at every call how many of its earlier inputs and outputs are still in memory."""

    def __init__(self, *args: Any) -> None:
        super().__init__(*args)
        self.storages: list[StorageWeakRef] = []
        self.alive: list[int] = []

    def forward(self, microbatch: Batch, received: tuple[Tensor, ...]) -> Any:
        self.alive.append(sum(not storage.expired() for storage in self.storages))
        output = super().forward(microbatch, received)
        kept = output if not self.is_last else received
        self.storages += [StorageWeakRef(tensor.untyped_storage()) for tensor in kept]
        return output


def train_watched(name: str) -> list[int]:
    pipeline = Pipeline(stage_class=WatchedStage)
    stage: Any = pipeline.stage
    with as_if_large():
        for _ in range(2):  # in the first step shapes are described, and sends are not waited for
            stage.storages.clear()
            stage.alive.clear()
            pipeline.train(pieces(12, 12), name)
            assert all(storage.expired() for storage in stage.storages)
    return stage.alive


def test_outputs_are_freed_once_sent_and_inputs_after_their_backward(pool: Pool) -> None:
    # 4 large sends may be in flight, and gloo may still hold the tensor of the last one that was waited for.
    first, last = pool.run(2, train_watched, "gpipe")
    assert max(first) <= 5 < 11
    assert last == list(range(12)), "all inputs live until their backwards"
    first, last = pool.run(2, train_watched, "1f1b")
    assert max(first) <= 5 and max(last) <= 1
