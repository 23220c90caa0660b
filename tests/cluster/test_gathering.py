"""Gathers and comparisons of ranks before a step, and the hash of batches."""

import copy
from collections import UserDict
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

from echelon.cluster.gathering import gather_integers
from echelon.cluster.hashes import batch_hash, device_hash
from echelon.cluster.mesh import ParallelMesh

from ..pool import Pool


def batch() -> dict[str, Any]:
    ids = torch.arange(24).view(4, 6)
    return {
        "input_ids": ids,
        "mask": ids > 5,
        "weights": (ids / 7).bfloat16(),
        "scale": torch.tensor(1.5),
        "empty": torch.empty(0, 3),
        "more": [ids[:, ::2], ("text", 3, None)],
    }


CHANGES: dict[str, Callable[[dict[str, Any]], Any]] = {
    "value": lambda batch: batch["input_ids"][3, 5].add_(1),
    "order of values": lambda batch: batch.update(input_ids=batch["input_ids"].flip(0)),
    "one bit": lambda batch: batch["weights"].view(torch.int16)[0, 0].bitwise_xor_(1),
    "shape": lambda batch: batch.update(input_ids=batch["input_ids"].view(6, 4)),
    "dtype": lambda batch: batch.update(mask=batch["mask"].to(torch.uint8)),
    "name": lambda batch: batch.update(labels=batch.pop("more")),
    "order of names": lambda batch: batch.update(input_ids=batch.pop("input_ids")),
    "nesting": lambda batch: batch.update(more=[batch["more"][0], *batch["more"][1]]),
    "text": lambda batch: batch.update(more=[batch["more"][0], ("texts", 3, None)]),
    "empty": lambda batch: batch.update(empty=torch.empty(0, 4)),
}


def gather() -> list[tuple[int, ...]]:
    rank = dist.get_rank()
    return gather_integers((rank, -(2**62) + rank, 2**63 - 1))


def gather_in_axis() -> list[tuple[int, ...]]:
    mesh = ParallelMesh(dp=2, tp=2)
    return gather_integers((mesh.global_rank,), mesh.group("dp"))


def hash_here() -> int:
    return batch_hash(batch())


def test_every_rank_gets_the_integers_of_all(pool: Pool) -> None:
    expected = [(rank, -(2**62) + rank, 2**63 - 1) for rank in range(3)]
    assert pool.run(3, gather) == [expected] * 3
    assert pool.run(1, gather) == [expected[:1]]


def test_integers_are_gathered_within_a_group(pool: Pool) -> None:
    assert pool.run(4, gather_in_axis) == [[(0,), (2,)], [(1,), (3,)]] * 2


@pytest.mark.parametrize("name", CHANGES)
def test_a_batch_that_differs_has_another_hash(name: str) -> None:
    changed = copy.deepcopy(batch())
    CHANGES[name](changed)
    assert batch_hash(changed) != batch_hash(batch())


def test_equal_batches_have_one_hash_in_every_process(pool: Pool) -> None:
    assert pool.run(2, hash_here) == [batch_hash(batch())] * 2
    assert 0 <= batch_hash(batch()) < 2**63


def test_memory_layout_and_kind_of_mapping_do_not_count() -> None:
    ids = torch.arange(12).view(3, 4)
    assert batch_hash({"a": ids.t().contiguous()}) == batch_hash(UserDict({"a": ids.t()}))
    assert batch_hash(ids[:, 0].requires_grad_(False)) == batch_hash(ids[:, 0].clone())


def test_objects_count_by_their_type_and_not_by_their_address() -> None:
    assert batch_hash([object()]) == batch_hash([object()])


@pytest.mark.parametrize("length", [1, 7, 8, 4096])
def test_the_hash_on_a_device_depends_on_every_byte_and_its_place(length: int) -> None:
    data = torch.randint(0, 255, (length,), dtype=torch.uint8, generator=torch.Generator().manual_seed(0))

    def code(data: Tensor) -> int:
        return int(device_hash(data))

    codes = {code(data)}
    for place in {0, length // 2, length - 1}:
        other = data.clone()
        other[place] += 1
        codes.add(code(other))
    assert len(codes) == 1 + len({0, length // 2, length - 1})
    if length > 1:
        assert code(data.roll(1)) != code(data)
        assert code(data.sort().values) != code(data)
    assert code(data.clone()) == code(data)
    assert code(torch.zeros(8, dtype=torch.uint8)) != code(torch.zeros(16, dtype=torch.uint8))


def test_equal_bytes_hash_alike_wherever_they_lie_in_memory() -> None:
    numbers = torch.arange(24, dtype=torch.uint8)
    assert torch.equal(device_hash(numbers[3:19]), device_hash(numbers[3:19].clone()))
