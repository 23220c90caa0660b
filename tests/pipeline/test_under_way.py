"""Tensors on their way between stages: how many may be, how long they are kept, and who waits for whom."""

import time
from typing import Any

import pytest
import torch.distributed as dist
from torch import Tensor
from torch.multiprocessing.reductions import StorageWeakRef

from echelon.cluster.faults import _default_store

from ..pool import Pool
from .sequential import STYLES, Batch, LayerStage, Pipeline, as_if_large, pieces


def train_with_large_tensors(style: str, num_chunks: int, reads: bool) -> None:
    pipeline = Pipeline(style=style, num_chunks=num_chunks, reads=reads)
    with as_if_large():
        for seed in range(2):  # in the first step shapes are told, and sends are not held back
            pipeline.check_train(pieces(12, 12, seed))
            pipeline.evaluate(pieces(12, 12, seed))


@pytest.mark.parametrize("style, num_chunks", STYLES)
def test_ranks_that_hold_back_large_tensors_do_not_wait_for_each_other(
    pool: Pool, style: str, num_chunks: int
) -> None:
    """Both may be about to send when neither has come to what it will do with the other's tensors."""
    pool.run(2, train_with_large_tensors, style, num_chunks, True, timeout=30)


def test_ranks_that_must_send_large_tensors_do_not_wait_for_each_other(pool: Pool) -> None:
    pool.run(2, train_with_large_tensors, "gpipe", 2, False, timeout=30)


def evaluate_and_meet() -> None:
    """The last rank keeps up with the first one, and is done before anybody hears that it has read all."""
    pipeline = Pipeline()
    forward = pipeline.stage.forward

    def slow(microbatch: Batch, received: tuple[Tensor, ...]) -> Any:
        time.sleep(0.002)
        return forward(microbatch, received)

    if pipeline.rank == 0:
        pipeline.stage.forward = slow  # type: ignore[method-assign]
    pipeline.evaluate(pieces(400, 400))
    dist.barrier()


def test_more_microbatches_than_the_kernel_has_room_for_messages_end(pool: Pool) -> None:
    pool.run(2, evaluate_and_meet, timeout=30)


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


def train_watched(name: str, reads: bool) -> list[int]:
    pipeline = Pipeline(stage_class=WatchedStage, reads=reads)
    stage: Any = pipeline.stage
    with as_if_large():
        for _ in range(2):  # in the first step shapes are told, and sends are not waited for
            stage.storages.clear()
            stage.alive.clear()
            pipeline.train(pieces(12, 12), name)
            assert all(storage.expired() for storage in stage.storages)
    return stage.alive


@pytest.mark.parametrize("reads", [True, False], ids=["read", "sent"])
def test_outputs_are_freed_once_sent_and_inputs_after_their_backward(pool: Pool, reads: bool) -> None:
    # 4 large sends may be under way, and gloo may still hold the tensor of the last one that was waited for. What the
    # receiver expects, and has not read, is two or three further ones.
    most = 8 if reads else 5
    first, last = pool.run(2, train_watched, "gpipe", reads)
    assert max(first) <= most < 11
    assert last == list(range(12)), "all inputs live until their backwards"
    first, last = pool.run(2, train_watched, "1f1b", reads)
    assert max(first) <= most and max(last) <= 1


def fail_and_live_on() -> None:
    pipeline, store = Pipeline(), _default_store()
    assert store is not None
    pipeline.train(pieces(6, 3))
    if pipeline.rank == 1:
        with pytest.raises(ZeroDivisionError):
            pipeline.train(pieces(6, 3), criterion=lambda outputs, microbatch: 1 / 0)
        store.get("the other rank has noticed")
        return
    with pytest.raises(RuntimeError, match=r"lost rank 1 \(pipeline stage 1\)"):
        pipeline.train(pieces(6, 3))
    store.set("the other rank has noticed", "")


def test_a_rank_whose_step_broke_off_is_not_waited_for_though_it_lives(pool: Pool) -> None:
    pool.run(2, fail_and_live_on, timeout=15)
