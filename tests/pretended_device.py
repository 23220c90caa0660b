"""Boost and a step of a model whose tensors are fake ones of a device that is neither the CPU nor there.

    python -m tests.pretended_device bert llama t5 vit "a mistake" "a blocking copy"

A kernel that is given tensors of the CPU and of the device raises, as it does on a GPU. So does, in a step, a copy from
the CPU that the host waits for, which on a GPU is until all that was launched has run. torch makes such a device out
of its `privateuseone`; fake tensors of "cuda" end the process at the first backward of a CPU build. Nothing is
computed: numbers that are read on the host are ones.
"""

import sys
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from typing import Any
from unittest import mock

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode, unset_fake_temporarily
from torch.overrides import TorchFunctionMode
from torch.testing._internal.distributed import fake_pg
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.backend_registration import _setup_privateuseone_for_python_backend

from echelon import Booster, HybridParallelPlugin
from echelon.cluster import mesh
from echelon.cluster.device import default_device
from echelon.cluster.step_agreement import COMPARED_CALLS
from echelon.pipeline.microbatch import map_tensors
from echelon.plugins.engine import PipelineEngine
from echelon.verify.batch import make_batch
from echelon.verify.models import ModelChoice

from .host_reads import place_outside_torch

NAME = "pretended"
# Where a step copies to the device and waits, by file and function, with the reason.
MAY_BLOCK: dict[tuple[str, str], str] = {}


class ReadOnes(TorchDispatchMode):
    """Numbers of fake tensors that are read on the host are 1, and equal."""

    def __torch_dispatch__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if any(isinstance(each, FakeTensor) for each in args):
            if function is torch.ops.aten._local_scalar_dense.default:
                return {torch.bool: False}.get(args[0].dtype, 1.0 if args[0].is_floating_point() else 1)
            if function is torch.ops.aten.equal.default:
                return True
        return function(*args, **(kwargs or {}))


class MadeOnTheDevice(TorchFunctionMode):
    """`torch.tensor(…, device=…)` by way of the CPU: torch cannot make a fake one there at once."""

    def __torch_function__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if function not in (torch.tensor, torch.as_tensor) or kwargs.get("device") is None:
            return function(*args, **kwargs)
        device = kwargs.pop("device")
        made = function(*args, **kwargs)
        if isinstance(made, FakeTensor):
            made.constant = None
        return made.to(device)


class NoBlockingCopies(TorchDispatchMode):
    """Copies from the CPU to the device that the host waits for raise, but in the places of `MAY_BLOCK`."""

    def __torch_dispatch__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if _blocks(function, args, kwargs) and (place := place_outside_torch(__file__)) not in MAY_BLOCK:
            raise RuntimeError(f"{function} copies to the device and blocks the host at {place}")
        return function(*args, **kwargs)


def _blocks(function: Any, args: Any, kwargs: Any) -> bool:
    """Tell whether an operator copies a tensor of the CPU to the device, other than by non_blocking=True."""
    aten, found = torch.ops.aten, (False, None, [])
    if function is aten._to_copy.default:
        found = kwargs.get("non_blocking", False), kwargs.get("device"), args[:1]
    elif function is aten.copy_.default:
        found = kwargs.get("non_blocking", args[2:] == (True,)), args[0].device, args[1:2]
    elif function in (aten.index.Tensor, aten.index_put.default, aten.index_put_.default):
        found = False, args[0].device, args[1]  # places that are on the CPU are copied
    goes_on, device, sources = found
    is_there = device is not None and device.type == NAME
    return (
        is_there and not goes_on and any(each is not None and each.device.type == "cpu" for each in sources)
    )


def really(function: Callable[..., Any]) -> Callable[..., Any]:
    """A function whose tensors are real ones."""

    def computed(*args: Any) -> Any:
        with unset_fake_temporarily():
            return function(*args)

    return computed


@contextmanager
def pretended() -> Iterator[Booster]:
    """A booster of one rank on the device."""
    _setup_privateuseone_for_python_backend(NAME)
    name = f"fake on {NAME}"
    dist.Backend.register_backend(name, fake_pg._create_fake_pg, extended_api=True, devices=["cpu", NAME])
    store = dist.HashStore()
    dist.init_process_group(f"cpu:fake,{NAME}:{name}", store=store, rank=0, world_size=1)
    assert default_device() == torch.device(NAME, 0)
    plugin = HybridParallelPlugin(precision="fp32", num_microbatches=2, max_norm=1.0)
    with ExitStack() as stack:
        for context in (FakeTensorMode(allow_non_fake_inputs=True), ReadOnes(), MadeOnTheDevice()):
            stack.enter_context(context)
        # The model is made there, in float32: torch cannot swap fake parameters.
        stack.enter_context(mock.patch.object(nn.Module, "_apply", lambda module, *_, **__: module))
        for owner, name in ((mesh, "_line_of"), (mesh.ParallelMesh, "_along")):  # numbers of ranks are real
            stack.enter_context(mock.patch.object(owner, name, really(getattr(owner, name))))
        stack.enter_context(mock.patch("echelon.plugins.engine.PipelineLoss", FakeTensor))
        stack.enter_context(
            mock.patch.object(FakeTensor, "numpy", lambda tensor: np.zeros(tuple(tensor.shape), np.uint8))
        )
        yield Booster(plugin=plugin)


def train(booster: Booster, model_type: str) -> None:
    """Boost a model and make a step of it."""
    choice, device = ModelChoice(model_type=model_type), default_device()
    with device:
        model: Any = choice.build()
    optimizer: Any = torch.optim.AdamW(model.parameters())
    model, optimizer, *_ = booster.boost(model, optimizer)
    batch = make_batch(choice, num_samples=4, seed=0)  # on the CPU, as a dataloader gives it
    with NoBlockingCopies():
        for _ in range(COMPARED_CALLS + 1):  # those that compare by messages, and a warm one
            loss = booster.execute_pipeline(iter([batch]), model, optimizer=optimizer)["loss"]
            optimizer.step()
            optimizer.zero_grad()
    tensors: list[Tensor] = [loss, *model.parameters(), *model.buffers()]
    assert {each.device for each in tensors} == {device}, {each.device for each in tensors}


def left_where_it_was(engine: PipelineEngine, batch: Any) -> Any:
    """Batches stay where dataloaders made them."""
    return batch


def copied_while_the_host_waits(engine: PipelineEngine, batch: Any) -> Any:
    """Batches are copied before the host goes on."""
    return map_tensors(batch, lambda tensor: tensor.to(engine.mesh.device))


MISTAKES = {"a mistake": left_where_it_was, "a blocking copy": copied_while_the_host_waits}


if __name__ == "__main__":
    with pretended() as of_one:
        for given in sys.argv[1:]:
            if given not in MISTAKES:
                train(of_one, given)
                print(given, "trains on", default_device(), flush=True)
                continue
            with mock.patch.object(PipelineEngine, "to_compute", MISTAKES[given]):
                try:
                    train(of_one, "bert")
                except RuntimeError as error:
                    print(str(error).replace("\n", " "), flush=True)
