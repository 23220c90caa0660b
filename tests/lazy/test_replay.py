"""What is done to tensors of files is replayed to the bit, and the files stay as they are."""

from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file
from torch import Tensor

from echelon import LazyInitContext
from echelon.cluster.placement import Shard
from echelon.lazy import materialize
from echelon.lazy.files import open_tensors
from echelon.lazy.replay import borrow, make
from echelon.lazy.tensor import LazyTensor, content_of, lazily, real


def sources() -> list[Tensor]:
    return [torch.arange(number, number + 48, dtype=torch.float32).view(4, 6, 2) for number in (0, 100, 200)]


CHANGES: dict[str, Callable[[list[Tensor]], Tensor]] = {
    "a slice": lambda given: given[0][1:3, ::1, 1].clone(),
    "a step": lambda given: given[0][:, ::2].clone(),
    "converted": lambda given: given[0].to(torch.bfloat16)[2:, 1:4].clone(),
    "stacked": lambda given: torch.stack(given)[1:, 2, :3].clone(),
    "stacked behind": lambda given: torch.stack(given, dim=-1)[1:, 2, :, 1:2].clone(),
    "concatenated": lambda given: torch.cat(given, dim=1)[:2, 5:9].clone(),
    "concatenated behind": lambda given: torch.cat([given[0], given[1]], -1)[..., 1:3].clone(),
    "experts": lambda given: torch.cat([torch.stack(given), torch.stack(given[::-1])], dim=2)[
        2:, 1:3, 5:8
    ].clone(),
    "turned": lambda given: given[0].transpose(0, 2).contiguous()[1:, :, 1:3].clone(),
    "turned and kept so": lambda given: (
        given[0].transpose(0, 1).clone()[2:4, 1:].transpose(0, 1).contiguous()
    ),
    "chunks": lambda given: torch.cat(given[0].to(torch.float64).chunk(3, dim=1)[1:], dim=0).contiguous(),
    "reshaped": lambda given: given[0].reshape(2, 2, 6, 2).transpose(1, 2).reshape(4, 6, 2)[1:, :3].clone(),
    "padded": lambda given: torch.nn.functional.pad(
        given[0].to(torch.float64)[3:], (0, 0, 0, 0, 0, 3)
    ).clone(),
    "padded on all sides": lambda given: torch.nn.functional.pad(given[0], (1, 2, 0, 3, 2, 1), value=7.0)[
        1:4, 5:8
    ].clone(),
    "nothing but padding": lambda given: torch.nn.functional.pad(given[0], (0, 0, 0, 3), value=7.0)[
        :, 7:
    ].clone(),
    "flat": lambda given: given[0].to(torch.float64).view(-1)[7:19].clone(),
    "expanded": lambda given: given[0][:1].to(torch.float64).expand(3, 6, 2)[:, 1:3].clone(),
    "expanded from a row": lambda given: given[0].to(torch.float64)[1].expand(3, 6, 2)[:, 1:3].clone(),
    "written to": lambda given: given[0].clone()[1:].mul_(2)[:2],
    "written over": lambda given: torch.cat(given[:2])[:5].clone().copy_(given[2][:1].repeat(5, 1, 1)),
    "of two formats": lambda given: torch.cat([given[0], given[1].bfloat16()])[5:].clone(),
    "of none": lambda given: torch.cat(given)[3:3].clone(),
    "its bits": lambda given: given[0].to(torch.float64).view(torch.int64)[1:, 2:4].clone(),
    "of one axis": lambda given: torch.cat([each.view(-1) for each in given])[40:60].clone(),
    "of one entry": lambda given: torch.stack([each[1, 2, 1] for each in given])[1].clone(),
    "shards": lambda given: Shard(size=2, dim=1, blocks=(4, 8), padded=(4, 10)).local(
        torch.cat(given[:2], 1), 1
    ),
    "twice": lambda given: (lambda one: torch.cat([one[1:2], one[3:], one[1:2]]))(given[0].to(torch.float64)),
    "a copy of a copy": lambda given: given[0].clone().clone().add_(1),
}


@pytest.mark.parametrize("name", CHANGES)
def test_what_is_recorded_of_file_tensors_is_replayed_to_the_bit(name: str) -> None:
    kept, before = sources(), sources()
    found = CHANGES[name]([lazily(each) for each in kept])
    assert isinstance(found, LazyTensor)
    expected = CHANGES[name](sources())
    assert torch.equal(real(found), expected) and real(found).dtype == expected.dtype
    assert all(torch.equal(each, other) for each, other in zip(kept, before, strict=True))


def test_memory_that_is_made_is_never_that_of_a_file() -> None:
    kept = torch.randn(4)
    value = content_of(lazily(kept)).value
    assert borrow(value).data_ptr() == kept.data_ptr() != make(value).data_ptr()


def test_files_are_neither_written_to_nor_needed_once_a_tensor_is_real(tmp_path: Path) -> None:
    path = tmp_path / "model.safetensors"
    save_file({"weight": torch.arange(6.0)}, path)
    content = path.read_bytes()
    model = torch.nn.Module()
    model.weight = torch.nn.Parameter(lazily(open_tensors(path)["weight"]))
    model.changed = torch.nn.Parameter(lazily(open_tensors(path)["weight"]))
    with torch.no_grad():
        model.changed.add_(1)
    materialize(model)
    assert path.read_bytes() == content
    path.write_bytes(bytes(len(content)))
    assert model.weight.tolist() == [0, 1, 2, 3, 4, 5] and model.changed.tolist() == [1, 2, 3, 4, 5, 6]


def test_a_model_of_random_numbers_is_not_changed_by_reading_parts() -> None:
    def build() -> Tensor:
        return torch.cat([torch.randn(3, 4), torch.rand(3, 4)]).to(torch.bfloat16)[2:5].clone()

    torch.manual_seed(1)
    eager = build()
    torch.manual_seed(1)
    with LazyInitContext():
        found = build()
    assert isinstance(found, LazyTensor) and torch.equal(real(found), eager)
