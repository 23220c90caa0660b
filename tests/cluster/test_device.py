"""The device that a process takes of those that it sees. There is no GPU here: torch is made to see some."""

from types import SimpleNamespace
from typing import Any
from unittest.mock import MagicMock, Mock

import pytest
import torch
import torch.distributed as dist

from echelon.cluster import device as devices
from echelon.cluster import launch
from echelon.cluster.device import (
    CopyStream,
    choose_device,
    default_device,
    host_memory,
    numbers_on,
    side_stream,
)
from echelon.cluster.gpus import GPUS, gpu_of
from echelon.cluster.heartbeats import default_timeout
from echelon.cluster.launch import TORCHRUN_VARIABLES, launch_from_torch

from ..registered_memory import registered_memory


@pytest.fixture
def gpus(monkeypatch: pytest.MonkeyPatch) -> dict[str, int]:
    """Replace the GPUs that torch reports: their number, and the current one."""
    state = {"count": 4, "current": 0}

    def current(check_available: bool = False) -> torch.device | None:
        return torch.device("cuda") if state["count"] else None

    monkeypatch.setattr(torch.accelerator, "current_accelerator", current)
    monkeypatch.setattr(torch.accelerator, "device_count", lambda: state["count"])
    monkeypatch.setattr(torch.accelerator, "current_device_index", lambda: state["current"])
    monkeypatch.setattr(torch.accelerator, "set_device_index", lambda index: state.update(current=index))
    return state


def chosen(
    requested: str | int | None = None, backend: str | None = None, local: tuple[int, int] = (0, 1)
) -> str:
    rank, count = local
    return str(
        choose_device(requested, backend=backend, local_rank=rank, num_local_ranks=count, shares_gpus=False)
    )


@pytest.mark.parametrize(
    ("count", "local", "requested", "backend", "device"),
    [
        (4, (2, 4), None, None, "cuda:2"),
        (4, (2, 4), None, "nccl", "cuda:2"),
        (4, (2, 4), None, "gloo", "cuda:2"),
        (4, (2, 4), "cuda", "fake", "cuda:2"),
        (1, (3, 4), None, "nccl", "cuda:0"),  # one GPU for each process, as under Slurm
        (2, (3, 4), None, "gloo", "cuda:1"),
        (4, (2, 4), "cuda:3", None, "cuda:3"),
        (4, (2, 4), 1, None, "cuda:1"),
        (4, (2, 4), "cpu", None, "cpu"),
        (4, (2, 4), "cpu", "gloo", "cpu"),
        (0, (2, 4), None, None, "cpu"),
    ],
)
def test_a_process_takes_a_device_that_it_sees(
    gpus: dict[str, int],
    count: int,
    local: tuple[int, int],
    requested: str | int | None,
    backend: str | None,
    device: str,
) -> None:
    gpus["count"] = count
    assert chosen(requested, backend, local) == device
    assert device == "cpu" or gpus["current"] == torch.device(device).index


def test_several_ranks_take_one_gpu_where_nccl_was_told_to(gpus: dict[str, int]) -> None:
    gpus["count"] = 2
    device = choose_device(None, backend="nccl", local_rank=3, num_local_ranks=4, shares_gpus=True)
    assert str(device) == "cuda:1"


@pytest.mark.parametrize(
    ("arguments", "backends", "device"),
    [
        ({}, "cpu:gloo,cuda:nccl", "cuda:0"),
        ({"backend": "nccl", "device": 3}, "cpu:gloo,cuda:nccl", "cuda:3"),
        ({"backend": "gloo"}, "cpu:gloo,cuda:gloo", "cuda:0"),
        ({"backend": "staged", "device": "cuda:1"}, "cpu:gloo,cuda:staged", "cuda:1"),
        ({"device": "cpu"}, "cpu:gloo", "cpu"),
    ],
)
def test_what_is_launched_computes_on_the_device_whatever_the_backend(
    gpus: dict[str, int],
    monkeypatch: pytest.MonkeyPatch,
    arguments: dict[str, str | int],
    backends: str,
    device: str,
) -> None:
    for name in TORCHRUN_VARIABLES:
        monkeypatch.delenv(name, raising=False)
    started: list[str] = []

    def start(backends: str, *_: object) -> None:
        started.append(backends)

    with monkeypatch.context() as patch:
        patch.setattr(launch, "_start_group", start)
        patch.setattr(dist.Backend, "backend_list", [*dist.Backend.backend_list, "staged"])
        patch.setattr(launch, "seed_everything", lambda seed: None)
        launch_from_torch(**arguments)  # type: ignore[arg-type]
        assert started == [backends]
        patch.setattr(dist, "is_initialized", lambda: True)
        patch.setattr(dist, "get_backend_config", lambda group=None: backends)
        assert str(default_device()) == device
        if device != "cpu":
            with pytest.raises(
                ValueError,
                match=f"device='cpu' is not {device}, the device of the existing process group: give it to",
            ):
                launch_from_torch(device="cpu")


def test_a_backend_without_a_timeout_has_that_of_torch() -> None:
    from torch.testing._internal.distributed import fake_pg  # registers the backend "fake"

    assert fake_pg
    dist.init_process_group("fake", store=dist.HashStore(), rank=0, world_size=1)
    try:
        assert default_timeout() == dist.distributed_c10d.default_pg_timeout
    finally:
        dist.destroy_process_group()


def test_numbers_reach_a_gpu_from_pinned_memory_without_a_wait(monkeypatch: pytest.MonkeyPatch) -> None:
    assert torch.equal(
        numbers_on(torch.device("cpu"), [1, 0.5], torch.float64), torch.tensor([1, 0.5]).double()
    )
    made = MagicMock()
    monkeypatch.setattr(torch, "tensor", made)
    numbers_on(torch.device("cuda"), [1.0], torch.float32)
    made.assert_called_once_with([1.0], dtype=torch.float32, pin_memory=True)
    made.return_value.to.assert_called_once_with(torch.device("cuda"), non_blocking=True)


@pytest.mark.parametrize("nbytes", [1, 4097, 3 * 2**20 + 5])
def test_memory_is_pinned_for_exactly_its_bytes_until_no_tensor_has_it(nbytes: int) -> None:
    with registered_memory() as registered:
        memory = host_memory(nbytes, torch.device("cuda", 0))
        assert memory.nbytes == nbytes and registered.sizes == {memory.data_ptr(): nbytes}
        assert memory.data_ptr() % 4096 == 0, "pages are shared with other memory"
        memory.fill_(7)
        tail = torch.nn.Parameter(memory[-1:], requires_grad=False).data
        del memory
        assert registered.done == [("register", nbytes)] and tail.item() == 7
        del tail
        assert registered.done == [("register", nbytes), ("wait", 0), ("unregister", nbytes)]


def test_memory_that_cannot_be_pinned_is_an_error_with_its_size() -> None:
    with registered_memory() as registered:
        torch.cuda.cudart().cudaHostRegister = lambda *_: 2  # type: ignore[attr-defined]
        with pytest.raises(RuntimeError, match=r"cannot pin 5,000 bytes .* error 2\).*without cpu_offload"):
            host_memory(5000, torch.device("cuda", 0))
        assert not registered.done, "what was not registered is unregistered"


def test_memory_of_no_bytes_and_of_other_devices_is_torch_s_own() -> None:
    with registered_memory() as registered:
        assert host_memory(0, torch.device("cuda", 0)).nbytes == 0
        assert host_memory(9, torch.device("cpu")).shape == (9,)
        assert not registered.done


def test_a_stream_waits_where_nccl_communicates_and_else_the_host(monkeypatch: pytest.MonkeyPatch) -> None:
    stream = MagicMock()
    monkeypatch.setattr(torch.cuda, "Stream", stream)
    for backend, expected in (("nccl", stream.return_value), ("gloo", None), (None, None)):
        monkeypatch.setattr(devices, "backend_of", lambda kind, backend=backend: backend)
        assert side_stream(torch.device("cuda")) is expected


def test_copies_run_beside_the_computation_and_are_waited_for_by_it_alone(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    torch_cuda, device = MagicMock(), torch.device("cuda", 0)
    monkeypatch.setattr(torch, "cuda", torch_cuda)
    stream, current = torch_cuda.Stream.return_value, torch_cuda.current_stream.return_value
    copies = CopyStream(device)
    with copies.behind():
        torch_cuda.stream.assert_called_once_with(stream)
        stream.wait_stream.assert_called_once_with(current)
        event = copies.event()
    copies.wait(event)
    current.wait_event.assert_called_once_with(stream.record_event.return_value)
    assert not [call for call in torch_cuda.mock_calls if "synchronize" in call[0]]
    on_cpu = CopyStream(torch.device("cpu"))
    with on_cpu.behind():
        on_cpu.wait(on_cpu.event())
    assert torch_cuda.Stream.call_count == 1


def test_an_order_of_launches_is_a_question_to_the_driver(monkeypatch: pytest.MonkeyPatch) -> None:
    def answer(version: int) -> Any:
        def set_version(place: Any) -> None:
            place._obj.value = version

        return lambda name: SimpleNamespace(cuDriverGetVersion=set_version)

    for version, is_new in ((12020, False), (12030, True), (13000, True)):
        monkeypatch.setattr(devices.ctypes, "CDLL", answer(version))
        assert devices.orders_launches() is is_new
    monkeypatch.setattr(devices.ctypes, "CDLL", Mock(side_effect=OSError))
    assert not devices.orders_launches()


def test_a_name_of_a_gpu_is_matched_by_its_words() -> None:
    for name, short in (
        ("NVIDIA A100-PCIE-40GB", "a100-40-pcie"),
        ("NVIDIA A100-SXM4-40GB", "a100-40"),
        ("NVIDIA A100 80GB PCIe", "a100"),
        ("NVIDIA H100 80GB HBM3", "h100"),
    ):
        assert gpu_of(name) is GPUS[short]
    assert gpu_of("NVIDIA RTX A1000 Laptop GPU") is None
