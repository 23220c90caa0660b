"""Boost and a step of a model whose tensors are fake ones of a device that is neither the CPU nor there.

    python -m tests.pretended_device bert llama t5 vit "a mistake"

A kernel that is given tensors of the CPU and of the device raises, as it does on a GPU. torch makes such a device out
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
from echelon.verify.batch import make_batch
from echelon.verify.models import ModelChoice

NAME = "pretended"


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
    loss = booster.execute_pipeline(iter([batch]), model, optimizer=optimizer)["loss"]
    optimizer.step()
    optimizer.zero_grad()
    tensors: list[Tensor] = [loss, *model.parameters(), *model.buffers()]
    assert {each.device for each in tensors} == {device}, {each.device for each in tensors}


if __name__ == "__main__":
    with pretended() as of_one:
        for given in sys.argv[1:]:
            if given == "a mistake":  # batches stay where dataloaders made them
                with mock.patch("echelon.plugins.engine.PipelineEngine.to_compute", lambda _, batch: batch):
                    try:
                        train(of_one, "bert")
                    except RuntimeError as error:
                        print(str(error).replace("\n", " "))
                continue
            train(of_one, given)
            print(given, "trains on", default_device(), flush=True)
