"""Inputs of recomputed layers on the host, with copies that end as late as possible.

tests/contract compares losses and gradients.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from copy import deepcopy
from typing import Any
from weakref import ref

import pytest
import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode

from echelon.shardformer import offload
from echelon.shardformer.offload import ActivationOffload
from echelon.shardformer.recompute import (
    PipelineGradientCheckpointConfig,
    checkpoint_layers,
    recomputable_layers,
)

from ..registered_memory import registered_memory
from .compare import require_equal
from .test_checkpoint_config import small_llama

CPU = torch.device("cpu")
EVERY_LAYER = PipelineGradientCheckpointConfig(gradient_checkpointing_ratio=1.0)


class LateStream:
    """A `CopyStream` that copies only when something waits for it; the source must then still be alive."""

    def __init__(self, device: torch.device) -> None:
        self.copies: list[tuple[Tensor, Any]] = []
        self.num_done = 0
        self.most_in_flight = 0

    @contextmanager
    def behind(self) -> Iterator[None]:
        with _Later(self):
            yield

    def event(self) -> int:
        return len(self.copies)

    def wait(self, event: int) -> None:
        for copy, source in self.copies[self.num_done : event]:
            tensor = source()
            assert tensor is not None, "memory was freed while it was copied"
            copy.copy_(tensor)
        self.num_done = max(self.num_done, event)


class _Later(TorchFunctionMode):
    def __init__(self, stream: LateStream) -> None:
        super().__init__()
        self._stream = stream

    def __torch_function__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if function is not Tensor.copy_:
            return function(*args, **(kwargs or {}))
        copy, tensor = args
        stream = self._stream
        stream.copies.append((copy.fill_(torch.nan), ref(tensor)))
        stream.most_in_flight = max(stream.most_in_flight, len(stream.copies) - stream.num_done)
        return copy


def gradients(model: Any, *, microbatches: int = 1) -> list[Tensor]:
    """Return the gradients of all forwards before all backwards, as in a pipeline stage."""
    ids = torch.arange(6).view(1, 6)
    losses = [
        model(input_ids=ids + microbatch, labels=ids + microbatch, use_cache=False).loss
        for microbatch in range(microbatches)
    ]
    for loss in losses:
        loss.backward()
    return [parameter.grad for parameter in model.parameters()]


@pytest.mark.parametrize("modules", [None, ("self_attn", "mlp")])
@pytest.mark.parametrize("microbatches", [1, 3])
def test_copies_are_waited_for_and_their_memory_is_held(
    monkeypatch: pytest.MonkeyPatch, modules: tuple[str, ...] | None, microbatches: int
) -> None:
    streams: list[LateStream] = []

    def make(device: torch.device) -> LateStream:
        streams.append(LateStream(device))
        return streams[-1]

    monkeypatch.setattr(offload, "CopyStream", make)
    model = small_llama(4)
    expected = gradients(deepcopy(model), microbatches=microbatches)
    config = PipelineGradientCheckpointConfig(gradient_checkpointing_ratio=1.0, recompute_modules=modules)
    checkpoint_layers({0: recomputable_layers(model)}, config, ActivationOffload(CPU).checkpoint)
    offloaded = gradients(model, microbatches=microbatches)
    require_equal(offloaded, expected)
    (stream,) = streams
    num_inputs = microbatches * 4 * (2 if modules else 1)
    # One copy to the host and one back for each input, and one wrong prefetch at the end of a microbatch.
    assert 2 * num_inputs <= len(stream.copies) <= 2 * num_inputs + microbatches
    assert stream.most_in_flight <= 2, "what is held on the device grows"


def test_an_input_is_prefetched_during_the_backward_of_the_next_layer(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    store = ActivationOffload(CPU)
    begun: list[int] = []
    begin = store._begin_fetch
    monkeypatch.setattr(store, "_begin_fetch", lambda waiting: (begun.append(id(waiting)), begin(waiting))[1])
    x = torch.ones(2, 3, requires_grad=True)
    at: list[int] = []

    def layer(x: Tensor) -> Tensor:
        at.append(len(begun))
        return x.sin()

    for _ in range(3):
        x = store.checkpoint(layer, x)
    x.sum().backward()
    assert at == [0, 0, 0, 2, 3, 3], "each but the last is begun before it is needed"
    assert len(set(begun)) == 3


def test_no_memory_is_kept_after_a_step(monkeypatch: pytest.MonkeyPatch) -> None:
    store = ActivationOffload(CPU)
    model = small_llama(2)
    checkpoint_layers({0: recomputable_layers(model)}, EVERY_LAYER, store.checkpoint)
    gradients(model, microbatches=2)
    assert not store._being_offloaded and store._prefetch is None and store._last() is None


def test_host_buffers_have_the_size_of_the_inputs_and_are_reused() -> None:
    with registered_memory(offload) as registered:
        store = ActivationOffload(CPU)
        model = small_llama(3)
        checkpoint_layers({0: recomputable_layers(model)}, EVERY_LAYER, store.checkpoint)
        for _ in range(3):
            gradients(model, microbatches=2)
        num_bytes = 4 * 6 * model.config.hidden_size
        assert registered.done == [("register", num_bytes)] * (2 * 3)
        del store, model


def test_longer_inputs_replace_shorter_buffers() -> None:
    with registered_memory(offload) as registered:
        store = ActivationOffload(CPU)
        for length in (5, 3, 7, 9, 4, 9):
            y = torch.ones(length, 3, requires_grad=True)
            for _ in range(4):
                y = store.checkpoint(torch.sin, y)
            y.sum().backward()
            assert len(registered.sizes) == 4
        assert list(registered.sizes.values()) == [4 * 3 * 9] * 4
        del store, y


def test_inputs_come_back_with_their_strides() -> None:
    store = ActivationOffload(CPU)
    x = torch.randn(3, 5).t().requires_grad_()
    seen: list[tuple[int, ...]] = []

    def layer(x: Tensor) -> Tensor:
        seen.append(x.stride())
        return x.sin()

    store.checkpoint(layer, x).sum().backward()
    assert seen == [(1, 5), (1, 5)] and x.grad is not None and torch.equal(x.grad, x.detach().cos())


def test_a_buffer_that_is_too_small_is_released_only_when_none_is_in_use() -> None:
    buffers = offload._HostBuffers(CPU)
    used, small = buffers.take(16), buffers.take(8)
    kept = ref(small)
    buffers.give_back(small)
    del small
    larger = buffers.take(32)
    buffers.give_back(used)
    assert kept() is not None  # unpinning waits for the device
    buffers.give_back(larger)
    assert kept() is None
