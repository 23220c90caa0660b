"""States that some ranks share out are loaded by others that share them out otherwise, through torch's planners."""

import json
from pathlib import Path

import pytest
import torch
import torch.distributed as dist

from echelon.checkpoint.box import Box
from echelon.checkpoint.dcp import StateFiles, save_states
from echelon.checkpoint.local import LocalTensor, local_slice
from echelon.checkpoint.pretrained import read_into
from echelon.cluster.agree import AgreedError as CheckpointError
from echelon.cluster.agree import alike, on_all_ranks

from ..pool import Pool

SHAPE = (6, 4, 5)
WHOLE = torch.arange(120, dtype=torch.float32).view(SHAPE)


def held(flat: torch.Tensor, ends: list[int], *, counts: bool = True) -> dict[str, LocalTensor]:
    start, stop = ([0, *ends, 120])[dist.get_rank()], ([*ends, 120])[dist.get_rank()]
    return {"exp_avg/w": local_slice("w", flat[start:stop], start, SHAPE, None, 0, counts=counts)}


def save(folder: Path, ends: list[int]) -> None:
    save_states(held(WHOLE.view(-1), ends), folder, group=dist.group.WORLD)


def save_twice_held(folder: Path) -> list[str]:
    """Two ranks that hold the same: each box is in one of their files."""
    whole = {"exp_avg/w": local_slice("w", WHOLE.view(-1), 0, SHAPE, None, 0)}
    whole |= {"exp_avg/v": local_slice("v", WHOLE.view(-1)[:20], 0, (4, 5), None, 0)}
    return list(save_states(whole, folder, group=dist.group.WORLD))


def load(folder: Path, ends: list[int]) -> None:
    flat = torch.full((120,), -1.0)
    mine = held(flat, ends)
    read_into(mine, StateFiles(folder))
    for part in mine["exp_avg/w"].parts:
        assert torch.equal(part.local, WHOLE[part.box.within(Box.whole(SHAPE))])


@pytest.mark.parametrize(("saved", "loaded"), (([7, 83], [61]), ([0, 120], [20]), ([40, 80], [119])), ids=str)
def test_another_number_of_ranks_loads_other_stretches(
    pool: Pool, tmp_path: Path, saved: list[int], loaded: list[int]
) -> None:
    pool.run(3, save, tmp_path, saved)
    pool.run(2, load, tmp_path, loaded)
    stored = StateFiles(tmp_path)
    box = Box((1, 2, 1), (4, 2, 3))
    assert torch.equal(stored.read("exp_avg/w", box), WHOLE[box.within(Box.whole(SHAPE))])


def test_what_two_ranks_hold_is_written_once(pool: Pool, tmp_path: Path) -> None:
    pool.run(2, save_twice_held, tmp_path)
    boxes = json.loads((tmp_path / "index.json").read_text())["tensors"]
    assert [len(each["boxes"]) for each in boxes.values()] == [1, 1]
    assert {each["boxes"][0]["file"] for each in boxes.values()} == {
        "rank-00000.safetensors",
        "rank-00001.safetensors",
    }, "and both ranks write"


def fail_on_the_last(kind: type[Exception]) -> int:
    def work() -> int:
        if dist.get_rank() == 1:
            raise kind("the disk is full")
        return 3

    return alike(work, dist.group.WORLD)


@pytest.mark.parametrize(
    ("kind", "told"),
    (
        (OSError, OSError),
        (FileNotFoundError, FileNotFoundError),
        (ValueError, ValueError),
        (KeyError, CheckpointError),
    ),
)
def test_what_fails_on_one_rank_fails_on_all(
    pool: Pool, kind: type[Exception], told: type[Exception]
) -> None:
    for error in pool.run_failing(2, fail_on_the_last, kind):
        assert type(error) is told and "the disk is full" in str(error) and "(rank 1)" in str(error)


def gather_ranks() -> list[int]:
    return on_all_ranks(dist.get_rank, dist.group.WORLD)


def test_what_every_rank_got_is_returned(pool: Pool) -> None:
    assert pool.run(2, gather_ranks) == [[0, 1], [0, 1]]
