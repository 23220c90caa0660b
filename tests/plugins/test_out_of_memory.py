"""A rank without memory says what holds it and what to change, and the others are told."""

import itertools
from typing import Any
from unittest.mock import patch

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

from echelon import Booster, HybridParallelPlugin
from echelon.cluster.errors import RankFailure
from echelon.verify.model_choice import ModelChoice
from echelon.zero.memory import Sharding, described_bytes, memory_of

from ..pool import Pool

NUMBERS = torch.arange(4 * 6).view(4, 6) % 20
BATCH = {"input_ids": NUMBERS, "labels": NUMBERS}


def run_out_of_memory(*_: Any) -> Tensor:
    raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB. GPU 0 is full")


def train(where: str, rank: int, **options: Any) -> None:
    """Train two steps; one rank runs out of memory in a forward, or in the step of the user's optimizer."""
    plugin = HybridParallelPlugin(precision="bf16", num_microbatches=2, **options)
    booster = Booster(plugin=plugin)
    model: Any = ModelChoice(model_type="llama").build()
    optimizer: Any = torch.optim.AdamW(model.parameters())
    if where == "layer" and dist.get_rank() == rank:
        calls: list[int] = []
        layer = model.model.layers[-1]
        layer.register_forward_hook(lambda *_: run_out_of_memory() if calls else calls.append(1))
    if where == "step" and dist.get_rank() == rank:
        optimizer.step = run_out_of_memory
    model, optimizer, *_ = booster.boost(model, optimizer)
    for _ in range(2):
        booster.execute_pipeline(iter([BATCH]), model, optimizer=optimizer)
        optimizer.step()


def test_a_pipeline_stage_says_what_holds_its_memory_and_the_other_rank_is_told(pool: Pool) -> None:
    first, second = pool.run_failing(2, train, "layer", 1, pp_size=2, pp_style="gpipe")
    assert isinstance(second, torch.OutOfMemoryError)
    text = str(second)
    assert text.startswith("CUDA out of memory. Tried to allocate 2.00 GiB. GPU 0 is full\nThis rank holds ")
    assert "activations: stage 1 of 1 microbatch in flight; " in text
    assert "masters " in text and "gradients " in text and "parameters " in text and "; states " not in text
    assert "in this order: num_microbatches=4 halves each microbatch" in text
    assert (
        text.index("recomputes layers in backward") < text.index("cpu_offload=True") < text.index("pp_size")
    )
    assert "zero_stage" not in text  # there are no replicas
    assert isinstance(first, RankFailure)
    assert "rank 1 failed: OutOfMemoryError: CUDA out of memory" in str(first)
    assert "num_microbatches=4" in str(first)


def train_counting(where: str, rank: int, **options: Any) -> None:
    """Train likewise, on a device that counts bytes: each look at them finds a MiB more."""
    counted = itertools.count(2**20, 2**20)
    with patch("echelon.plugins.engine.allocated_bytes", lambda device: next(counted)):
        train(where, rank, **options)


def test_the_activations_of_every_stage_have_bytes_where_the_device_counts_them(pool: Pool) -> None:
    options = dict(pp_size=2, pp_style="interleaved", num_model_chunks=2)
    _, second = pool.run_failing(2, train_counting, "layer", 1, **options)
    assert "stage 1 of 2 microbatches in flight (its first one kept 1 MiB)" in str(second)


def test_a_step_without_memory_names_zero(pool: Pool) -> None:
    first, second = pool.run_failing(2, train, "step", 0)
    assert isinstance(first, torch.OutOfMemoryError)
    assert "zero_stage=1 for masters and states, shards it over the 2 replicas" in str(first)
    assert "activations" not in str(first)
    assert "RankTracebacks" in repr(first.__cause__) and "Tried to allocate" in str(first.__cause__)
    assert isinstance(second, RankFailure)


class Optimizer:
    """An optimizer that holds some memory."""

    def __init__(self, sharding: Sharding, **held: int) -> None:
        self.sharding, self._held = sharding, held

    def held_bytes(self) -> dict[str, int]:
        return self._held


@pytest.mark.parametrize(
    ("sharding", "held", "advice"),
    [
        (Sharding(0, 4, False), {"masters": 2, "gradients": 3}, ["zero_stage=2", "zero_stage=1"]),
        (Sharding(1, 4, False), {"states": 3, "gradients": 2}, ["cpu_offload=True", "zero_stage=2"]),
        (Sharding(2, 4, True), {"gradients": 3, "offloaded_states": 2}, []),
        (Sharding(0, 1, False), {"parameters": 3, "states": 2, "masters": 1}, ["cpu_offload=True"]),
    ],
)
def test_the_advice_is_about_what_holds_most(
    sharding: Sharding, held: dict[str, int], advice: list[str]
) -> None:
    kinds, texts = memory_of(Optimizer(sharding, **held))
    assert kinds[0] == f"{max(held, key=held.__getitem__)} 3 bytes"
    assert [text.split()[0] for text in texts[:-1]] == advice
    assert "tp_size or pp_size" in texts[-1]


def test_bytes_have_a_unit() -> None:
    assert [described_bytes(count) for count in (0, 1536, 2**30, 5 * 2**40)] == [
        "0 bytes",
        "1.5 KiB",
        "1.0 GiB",
        "5120.0 GiB",
    ]
