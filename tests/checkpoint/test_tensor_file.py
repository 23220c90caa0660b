"""Tensor files are safetensors, are read by boxes, and know their damage."""

from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from echelon.checkpoint.box import Box
from echelon.checkpoint.pretrained import Weights
from echelon.checkpoint.tensor_file import Entry, FileRecord, TensorFileWriter, damage_of_tensors


def some() -> dict[str, Tensor]:
    return {
        "half": torch.randn(3, dtype=torch.bfloat16),
        "flags": torch.tensor([True, False, True]),
        "matrix": torch.randn(4, 6),
        "long": torch.arange(5),
        "scalar": torch.tensor(2.5, dtype=torch.float64),
        "none": torch.empty(0, 3),
    }


def written(path: Path, tensors: dict[str, Tensor]) -> FileRecord:
    writer = TensorFileWriter(path, [Entry(name, tuple(x.shape), x.dtype) for name, x in tensors.items()])
    for entry in writer.order:
        writer.write(tensors[entry.name])
    return writer.finish()


def test_the_library_reads_what_was_written(tmp_path: Path) -> None:
    tensors = some()
    record = written(tmp_path / "f", tensors)
    found = load_file(tmp_path / "f")
    assert found.keys() == tensors.keys()
    assert all(torch.equal(found[name], tensors[name]) for name in tensors)
    assert record.bytes == (tmp_path / "f").stat().st_size


def test_what_the_library_wrote_is_read_by_boxes(tmp_path: Path) -> None:
    tensors = some()
    save_file(tensors, tmp_path / "f")
    file = Weights(tmp_path / "f")
    assert set(file.names) == set(tensors)
    assert torch.equal(file.read("matrix", Box((1, 2), (2, 3))), tensors["matrix"][1:3, 2:5])
    for name, tensor in tensors.items():
        assert (file.shape(name), file.dtype(name)) == (tuple(tensor.shape), tensor.dtype)
        assert torch.equal(file.read(name, Box.whole(tensor.shape)), tensor)


def test_any_flipped_byte_is_named(tmp_path: Path) -> None:
    path = tmp_path / "f"
    record = written(path, some())
    content = path.read_bytes()
    header = int.from_bytes(content[:8], "little") + 8
    assert damage_of_tensors(path, record) == []
    for at in range(len(content)):
        path.write_bytes(content[:at] + bytes([content[at] ^ 16]) + content[at + 1 :])
        damage = damage_of_tensors(path, record)
        assert len(damage) == 1 and (damage == ["the header"]) == (at < header)


def test_a_file_that_was_cut_short_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "f"
    written(path, some())
    path.write_bytes(path.read_bytes()[:-1])
    with pytest.raises(ValueError, match="is damaged"):
        Weights(path)
