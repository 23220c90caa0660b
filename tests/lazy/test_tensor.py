"""Recording of lazily built modules and of tensors of files, and their materialization."""

import copy
import json
import struct
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
import torch
from safetensors.torch import save_file
from torch import Tensor, nn
from torch.nn import Parameter, init

from echelon import LazyInitContext
from echelon.cluster.placement import Shard
from echelon.lazy import materialize
from echelon.lazy.files import open_tensors
from echelon.lazy.recorded_calls import borrow, fingerprint, make
from echelon.lazy.tensor import LazyTensor, content_of, lazily, real

from .compare import built_in_both_ways, differences


class Plain(nn.Module):
    """A module with a parameter and a change of it."""

    def __init__(self, change: Callable[[nn.Module], object], *shape: int) -> None:
        super().__init__()
        self.weight = Parameter(torch.empty(*shape).fill_(0.5))
        with torch.no_grad():
            change(self)


def orthogonal_twice(module: nn.Module) -> None:
    init.orthogonal_(module.weight)
    init.orthogonal_(module.weight, gain=3.0)


def read_before_it_is_drawn_anew(module: nn.Module) -> None:
    init.normal_(module.weight)
    module.register_buffer("early", module.weight * 2)
    init.normal_(module.weight)
    module.register_buffer("late", module.weight[:, 1:] + module.early[:, :1])


def read_before_it_is_changed(module: nn.Module) -> None:
    init.normal_(module.weight)
    early = module.weight * 2
    module.weight.add_(1)
    module.register_buffer("both", early + module.weight)
    module.register_buffer("turned", module.weight * 3 + early)


def copied_from_what_changes_later(module: nn.Module) -> None:
    source = np.arange(35, dtype=np.float32).reshape(5, 7)
    module.weight.copy_(torch.from_numpy(source))
    source[:] = -1


def row_by_row(module: nn.Module) -> None:
    for row in range(1, len(module.weight)):
        module.weight[row] = module.weight[row - 1] * 1.01


def decided_by_numbers(module: nn.Module) -> None:
    init.uniform_(module.weight)
    if module.weight.mean() > 0.4 and module.weight[0, 0].item() < 1:
        module.weight[module.weight > 0.5] = 0
    module.register_buffer("chosen", module.weight[module.weight > 0])


def own_generator(module: nn.Module) -> None:
    generator = torch.Generator().manual_seed(5)
    module.weight.normal_(generator=generator)
    module.weight[0].uniform_(generator=generator)
    module.register_buffer("drawn", torch.randn(3, generator=generator))


def through_data(module: nn.Module) -> None:
    module.weight.data.normal_()
    module.weight.data[2:, 1] *= 3
    module.weight.data = torch.randn(4, 2).t()


def two_of_one_memory(module: nn.Module) -> None:
    module.other = Parameter(module.weight.data.view(-1)[:10])
    init.normal_(module.other)
    init.ones_(module.weight[4])


def drawn_here_and_there(module: nn.Module) -> None:
    init.normal_(module.weight[:, :2])  # torch draws fewer than 16 numbers in pairs and may cache one
    init.normal_(module.weight[1, :3])
    module.order = torch.randperm(9)
    module.register_buffer("mask", torch.bernoulli(module.weight.abs().clamp(max=1)))
    init.sparse_(module.weight, 0.5)


def small_formats(module: nn.Module) -> None:
    module.single = Parameter(torch.randn(6, 3, dtype=torch.bfloat16) * 0.02)
    module.precise = Parameter(torch.rand(6, 3, dtype=torch.float64))
    init.trunc_normal_(module.single, std=0.7)
    init.trunc_normal_(module.precise, std=0.01)


def read_by_what_writes(module: nn.Module) -> None:
    init.normal_(module.weight)
    module.weight.mul_(module.weight).add_(module.weight.sum())
    module.weight.copy_(module.weight.flip(0))
    module.weight[:2].copy_(module.weight[3:])
    module.weight.data.copy_(module.weight.data)
    module.weight[2] = 4


def onto_what_is_there(module: nn.Module) -> None:
    init.normal_(module.weight)
    module.table = torch.arange(35.0).view(5, 7)
    module.table[1:3] = module.weight[1:3]
    module.names = {"rows": [module.weight.sum(0), 3], "none": None}


CHANGES = (
    orthogonal_twice,
    read_before_it_is_drawn_anew,
    read_before_it_is_changed,
    copied_from_what_changes_later,
    row_by_row,
    decided_by_numbers,
    own_generator,
    through_data,
    two_of_one_memory,
    drawn_here_and_there,
    small_formats,
    read_by_what_writes,
    onto_what_is_there,
)


@pytest.mark.parametrize("change", CHANGES, ids=lambda change: change.__name__)
def test_calls_during_construction_are_replayed_at_materialization(change: Callable) -> None:
    shape = (1500, 3) if change is row_by_row else (5, 7)
    lazy, eager, *drawn = built_in_both_ways(lambda: Plain(change, *shape))
    before = torch.get_rng_state()
    assert materialize(lazy) is lazy
    assert torch.equal(torch.get_rng_state(), before)
    assert differences(lazy, eager) == []
    assert torch.equal(*drawn)
    if "names" in vars(eager):
        assert torch.equal(lazy.names["rows"][0], eager.names["rows"][0])


def test_two_parameters_of_one_memory_share_it_once_materialized() -> None:
    lazy = materialize(built_in_both_ways(lambda: Plain(two_of_one_memory, 5, 7))[0])
    with torch.no_grad():
        lazy.other.fill_(7)
    assert lazy.weight.view(-1)[:11].tolist()[:10] == [7] * 10


def test_a_parameter_is_the_same_object_and_trains_once_materialized() -> None:
    with LazyInitContext():
        model = nn.Linear(3, 2)
    model.weight.mark = "kept"
    optimizer = torch.optim.AdamW(model.parameters(), fused=True)
    weight, kind = model.weight, type(nn.Linear(1, 1).weight)
    LazyInitContext.materialize(model)
    assert model.weight is weight is optimizer.param_groups[0]["params"][0]
    assert type(weight) is kind and weight.mark == "kept" and weight.is_leaf
    before = weight.detach().clone()
    model(torch.ones(1, 3)).sum().backward()
    optimizer.step()
    assert weight.grad is not None and not torch.equal(weight, before)


def test_calls_after_the_block_are_recorded_too() -> None:
    def change(model: nn.Sequential) -> nn.Sequential:
        model[0].weight.data.normal_()
        init.zeros_(model[0].bias)
        model[1] = copy.deepcopy(model[0])
        model[1].weight.data[0] = 3
        model[2].weight = model[0].weight
        return model.to(torch.bfloat16).to("cpu").requires_grad_(False)

    lazy, eager, *_ = built_in_both_ways(lambda: nn.Sequential(*(nn.Linear(4, 4) for _ in range(3))))
    torch.manual_seed(1)
    change(eager)
    torch.manual_seed(1)
    change(lazy)
    assert isinstance(lazy[1].weight, LazyTensor)
    assert differences(materialize(lazy), eager) == []


def test_a_lazy_tensor_reports_its_future_device() -> None:
    with LazyInitContext():
        weight = nn.Linear(3, 2).weight
        ahead = nn.Linear(3, 2)
    assert weight.device == torch.device("cpu") and weight.is_cpu and not weight.is_meta
    assert weight.to("meta").is_meta and type(weight.to("meta")) is Tensor
    with LazyInitContext(default_device="cpu"):
        assert nn.Linear(3, 2).weight.device.type == "cpu"
    assert ahead.weight.to("cuda:1").device == torch.device("cuda:1")


def test_differences_of_values_show_in_their_fingerprints() -> None:
    def built(seed: int, std: float, *, changed: bool = False) -> int:
        torch.manual_seed(seed)
        with LazyInitContext():
            weight = Parameter(torch.empty(4, 5))
            init.normal_(weight, std=std)
            if changed:
                weight.data[0].copy_(torch.arange(5.0))
        return fingerprint(content_of(weight).value)

    assert built(1, 0.02) == built(1, 0.02)
    assert len({built(1, 0.02), built(2, 0.02), built(1, 0.03), built(1, 0.02, changed=True)}) == 4


def test_overwritten_values_are_dropped() -> None:
    with LazyInitContext():
        linear = nn.Linear(8, 8)
        init.normal_(linear.weight)
    value = content_of(linear.weight).value
    assert value.before is None and value.call is not None and "normal_" in str(value.call.function)


def test_modules_not_built_lazily_are_unchanged() -> None:
    with LazyInitContext():
        positions = torch.arange(4, dtype=torch.float32)
        frequencies = 1.0 / 10000 ** (positions / 4)
    assert type(positions) is type(frequencies) is Tensor and frequencies.tolist()[0] == 1
    model = nn.Linear(2, 2)
    weight, numbers = model.weight, model.weight.tolist()
    assert materialize(model).weight is weight and weight.tolist() == numbers


def test_verbose_reports_the_materialized_tensors(capsys: pytest.CaptureFixture[str]) -> None:
    with LazyInitContext():
        model = nn.Linear(1024, 512, bias=False)
    LazyInitContext.materialize(model, verbose=True)
    assert capsys.readouterr().out == "1 lazily built tensors were materialized: 2.0 MiB\n"


def sources() -> list[Tensor]:
    return [torch.arange(number, number + 48, dtype=torch.float32).view(4, 6, 2) for number in (0, 100, 200)]


OF_FILES: dict[str, Callable[[list[Tensor]], Tensor]] = {
    "a slice": lambda tensors: tensors[0][1:3, ::2, 1].clone(),
    "experts": lambda tensors: torch.cat([torch.stack(tensors), torch.stack(tensors[::-1])], 2)[
        2:, 1:3, 5:8
    ].clone(),
    "turned and kept so": lambda tensors: (
        tensors[0].transpose(0, 1).clone()[2:4, 1:].transpose(0, 1).contiguous()
    ),
    "padded": lambda tensors: torch.nn.functional.pad(tensors[0], (1, 2, 0, 3, 2, 1), value=7.0)[
        1:4, 5:8
    ].clone(),
    "expanded": lambda tensors: tensors[0].to(torch.float64)[1].expand(3, 6, 2)[:, 1:3].clone(),
    "written over": lambda tensors: torch.cat(tensors[:2])[:5].clone().copy_(tensors[2][:1].repeat(5, 1, 1)),
    "of two formats": lambda tensors: torch.cat([tensors[0], tensors[1].bfloat16()])[5:].clone(),
    "of none": lambda tensors: torch.cat(tensors)[3:3].clone(),
    "its bits": lambda tensors: tensors[0].to(torch.float64).view(torch.int64)[1:, 2:4].clone(),
    "shards": lambda tensors: Shard(size=2, dim=1, blocks=(4, 8), padded=(4, 10)).local(
        torch.cat(tensors[:2], 1), 1
    ),
    "twice": lambda tensors: (lambda one: torch.cat([one[1:2], one[3:], one[1:2]]))(tensors[0].exp()),
    "a copy of a copy": lambda tensors: tensors[0].clone().clone().add_(1),
}


@pytest.mark.parametrize("name", OF_FILES)
def test_calls_on_tensors_of_files_are_replayed_to_the_bit(name: str) -> None:
    tensors, before = sources(), sources()
    lazy = OF_FILES[name]([lazily(tensor) for tensor in tensors])
    assert isinstance(lazy, LazyTensor)
    expected = OF_FILES[name](sources())
    assert torch.equal(real(lazy), expected) and real(lazy).dtype == expected.dtype
    assert all(torch.equal(tensor, other) for tensor, other in zip(tensors, before, strict=True))


def test_files_are_neither_written_to_nor_needed_once_a_tensor_is_materialized(tmp_path: Path) -> None:
    path = tmp_path / "model.safetensors"
    save_file({"weight": torch.arange(6.0)}, path)
    content, stored = path.read_bytes(), open_tensors(path)["weight"]
    value = content_of(lazily(stored)).value
    assert borrow(value).data_ptr() == stored.data_ptr() != make(value).data_ptr()
    model = nn.Module()
    model.weight, model.changed = Parameter(lazily(stored)), Parameter(lazily(stored))
    with torch.no_grad():
        model.changed.add_(1)
    materialize(model)
    assert path.read_bytes() == content
    path.write_bytes(bytes(len(content)))
    assert model.weight.tolist() == [0, 1, 2, 3, 4, 5] and model.changed.tolist() == [1, 2, 3, 4, 5, 6]


@pytest.mark.parametrize("start", [b"\x80\0", b"PK"])
def test_a_header_length_that_looks_like_a_torch_file_is_read(tmp_path: Path, start: bytes) -> None:
    header = json.dumps({"weight": {"dtype": "F32", "shape": [1], "data_offsets": [0, 4]}}).encode()
    length = int.from_bytes(start, "little")
    path = tmp_path / "model.safetensors"
    path.write_bytes(length.to_bytes(8, "little") + header.ljust(length) + struct.pack("<f", 2.5))
    assert open_tensors(path)["weight"].tolist() == [2.5]


def test_all_errors_are_raised_at_once_and_nothing_is_materialized() -> None:
    with LazyInitContext():
        model = nn.Sequential(nn.Linear(3, 2), nn.Linear(2, 2))
    model[0].weight.register_hook(print)
    model[1] = nn.Linear(2, 2, device="meta")
    expected = r"(?s)3 errors:.*0.weight has hooks.*1.weight is on the meta device.*1.bias is on"
    with pytest.raises(ValueError, match=expected):
        materialize(model)
    assert isinstance(model[0].bias, LazyTensor)
