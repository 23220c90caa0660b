"""Tensor files are safetensors whose damage is detected; states are written once, and read under any other sharding."""

import json
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from safetensors.torch import load_file, save_file
from torch import Tensor

from echelon.checkpoint.dcp import StateFiles, save_states
from echelon.checkpoint.local_tensors import LocalTensor, local_piece
from echelon.checkpoint.pretrained import Weights, read_into
from echelon.checkpoint.tensor_file import damage_of_tensors, read_values, write_values
from echelon.cluster.box import Box

from ..pool import Pool
from .handmade import write_tensors

TENSORS: dict[str, Tensor] = {
    "half": torch.randn(3, dtype=torch.bfloat16),
    "flags": torch.tensor([True, False, True]),
    "matrix": torch.randn(4, 6),
    "long": torch.arange(5),
    "scalar": torch.tensor(2.5, dtype=torch.float64),
    "none": torch.empty(0, 3),
}


def test_files_are_exchanged_with_the_safetensors_library(tmp_path: Path) -> None:
    record = write_tensors(tmp_path / "a", TENSORS)
    loaded = load_file(tmp_path / "a")
    assert loaded.keys() == TENSORS.keys() and record.bytes == (tmp_path / "a").stat().st_size
    assert all(torch.equal(loaded[name], TENSORS[name]) for name in TENSORS)
    save_file(TENSORS, tmp_path / "b")
    file = Weights(tmp_path / "b")
    assert set(file.names) == set(TENSORS)
    assert torch.equal(file.read("matrix", Box((1, 2), (2, 3))), TENSORS["matrix"][1:3, 2:5])
    for name, tensor in TENSORS.items():
        assert (file.shape(name), file.dtype(name)) == (tuple(tensor.shape), tensor.dtype)
        assert torch.equal(file.read(name, Box.full(tensor.shape)), tensor)


def test_any_flipped_byte_is_named_and_a_file_that_was_cut_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "f"
    record = write_tensors(path, TENSORS)
    content = path.read_bytes()
    header = int.from_bytes(content[:8], "little") + 8
    assert damage_of_tensors(path, record) == []
    for at in range(len(content)):
        path.write_bytes(content[:at] + bytes([content[at] ^ 16]) + content[at + 1 :])
        damage = damage_of_tensors(path, record)
        assert len(damage) == 1 and (damage == ["the header"]) == (at < header)
    path.write_bytes(content[:-1])
    with pytest.raises(ValueError, match="is damaged"):
        Weights(path)


@pytest.mark.parametrize("content", (b"x", b"", b"PK\x03\x04"))
def test_what_is_no_file_of_values_is_refused_without_advice_to_run_its_code(
    tmp_path: Path, content: bytes
) -> None:
    path = tmp_path / "file"
    write_values(path, {"a": 1})
    assert read_values(path) == {"a": 1}
    path.write_bytes(content)
    with pytest.raises(ValueError) as error:
        read_values(path)
    assert str(error.value).startswith(f"{path} cannot be read, it is damaged or not written by Echelon: ")
    assert "weights_only" not in str(error.value)
    with pytest.raises(IsADirectoryError):
        read_values(tmp_path)


SHAPE = (6, 4, 5)
FULL = torch.arange(120, dtype=torch.float32).view(SHAPE)


def local(flat: Tensor, ends: list[int]) -> dict[str, LocalTensor]:
    start, stop = ([0, *ends, 120])[dist.get_rank()], ([*ends, 120])[dist.get_rank()]
    return {"exp_avg/w": local_piece("w", flat[start:stop], start, SHAPE)}


def save(folder: Path, ends: list[int]) -> None:
    save_states(local(FULL.view(-1), ends), folder, group=dist.group.WORLD)


def save_replicas(folder: Path) -> list[str]:
    """Save from two ranks with the same boxes: each box is in one of their files."""
    states = {"exp_avg/w": local_piece("w", FULL.view(-1), 0, SHAPE)}
    states |= {"exp_avg/v": local_piece("v", FULL.view(-1)[:20], 0, (4, 5))}
    return list(save_states(states, folder, group=dist.group.WORLD))


def load(folder: Path, ends: list[int]) -> None:
    mine = local(torch.full((120,), -1.0), ends)
    read_into(mine, StateFiles(folder))
    for piece in mine["exp_avg/w"].boxes:
        assert torch.equal(piece.local, FULL[piece.box.within(Box.full(SHAPE))])


@pytest.mark.parametrize(("saved", "loaded"), (([7, 83], [61]), ([0, 120], [20]), ([40, 80], [119])), ids=str)
def test_another_number_of_ranks_loads_other_intervals(
    pool: Pool, tmp_path: Path, saved: list[int], loaded: list[int]
) -> None:
    pool.run(3, save, tmp_path, saved)
    pool.run(2, load, tmp_path, loaded)
    box = Box((1, 2, 1), (4, 2, 3))
    assert torch.equal(StateFiles(tmp_path).read("exp_avg/w", box), FULL[box.within(Box.full(SHAPE))])


def test_replicas_are_written_once_and_by_both_ranks(pool: Pool, tmp_path: Path) -> None:
    pool.run(2, save_replicas, tmp_path)
    boxes = json.loads((tmp_path / "index.json").read_text())["tensors"]
    assert [len(entry["boxes"]) for entry in boxes.values()] == [1, 1]
    files = {entry["boxes"][0]["file"] for entry in boxes.values()}
    assert files == {"rank-00000.safetensors", "rank-00001.safetensors"}
