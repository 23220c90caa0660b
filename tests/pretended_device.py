"""Boost and training steps of models on fake tensors of a pretended device, which is not the CPU and does not exist.

    python -m tests.pretended_device llama mixtral "tp2·pp2, rank 3" "a mistake"

An operator that gets tensors of both the CPU and the device raises, as on a GPU. In a step, a copy between them also
raises if the host waits for it: on a GPU it waits for all kernels launched before. In a warm step, so does a number
that is read on the host. The device is torch's `privateuseone`; fake tensors of "cuda" would end the process at the
first backward of a CPU build. Nothing is computed.
"""

import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import Any
from unittest import mock

import torch
import torch.distributed as dist
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensor
from torch.overrides import TorchFunctionMode
from torch.testing._internal.distributed import fake_pg
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.backend_registration import _setup_privateuseone_for_python_backend

from echelon import Booster, HybridParallelPlugin
from echelon.cluster.agreement import COMPARED_CALLS
from echelon.cluster.device import default_device
from echelon.pipeline.microbatch import map_tensors
from echelon.plugins.engine import PipelineEngine
from echelon.verify.batch import loss_of, make_batch
from echelon.verify.layout_choice import Layout
from echelon.verify.model_choice import LENGTH, ModelChoice

from .booster.adapters import Adapted
from .fakes import fake_tensors, one_rank
from .host_reads import place_outside_torch
from .models.chatglm import register_chatglm

NAME = "pretended"
BACKEND = f"fake on {NAME}"
# Places where a step copies and waits, or reads a number, by file and function, with the reason.
MAY_WAIT: dict[tuple[str, str], str] = {
    ("zero/reduced_gradients.py", "measure"): "the one read of a step",
    ("sequence/block_mask.py", "__init__"): "under ring attention, whether a mask hides anything",
    ("sequence/block_mask.py", "classify"): "tiles of a mask under ring attention: not on CUDA",
    ("beit/modeling_beit.py", "forward"): "transformers' own: places of position biases",
    ("gpt_neo/modeling_gpt_neo.py", "_attn"): "transformers' own: the least number",
    ("sam/modeling_sam.py", "get_rel_pos"): "transformers' own: places of position biases",
}
HIDDEN = 32  # hidden size of the small models


class MadeOnTheDevice(TorchFunctionMode):
    """Make `torch.tensor(…, device=…)` by way of the CPU: a fake tensor loses its numbers, and torch cannot move it."""

    def __torch_function__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if function not in (torch.tensor, torch.as_tensor):
            return function(*args, **kwargs)
        device = kwargs.pop("device", None)
        made = function(*args, **kwargs)
        if isinstance(made, FakeTensor):
            made.constant = None
        return made if device is None else made.to(device)


class NoWaits(TorchDispatchMode):
    """Raise for copies that the host waits for, except in `MAY_WAIT`; in a warm step also for reads on the host."""

    def __init__(self, *, is_warm: bool) -> None:
        super().__init__()
        self._is_warm = is_warm
        self._waits: list[str] = []  # raised at the end: an error in a backward thread would end the process

    def __exit__(self, *raised: Any) -> None:
        super().__exit__(*raised)
        if self._waits and raised[0] is None:
            raise RuntimeError("; ".join(dict.fromkeys(self._waits)))

    def __torch_dispatch__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        what = _wait(function, args, kwargs)
        if what and (self._is_warm or "copies" in what):
            place = place_outside_torch(__file__)
            if place is not None and place not in MAY_WAIT:
                self._waits.append(f"{function} {what} the device and blocks the host at {place}")
        return function(*args, **kwargs)


def _wait(function: Any, args: Any, kwargs: Any) -> str:
    """Name the copy between CPU and device, or the read of a number, that the host waits for in an operator, or ""."""
    aten, sources = torch.ops.aten, ()
    goes_on, device = False, None
    if function is aten._to_copy.default:
        goes_on, device, sources = kwargs.get("non_blocking", False), kwargs.get("device"), args[:1]
    elif function is aten.copy_.default:
        goes_on = kwargs.get("non_blocking", args[2:] == (True,))
        device, sources = args[0].device, args[1:2]
    elif function is aten._foreach_copy_.default:
        goes_on = kwargs.get("non_blocking", args[2:] == (True,))
        device, sources = args[0][0].device, args[1]
    elif function in (aten.index.Tensor, aten.index_put.default, aten.index_put_.default):
        device, sources = args[0].device, args[1]  # indices on the CPU are copied
    elif function in READS:
        return "reads a number from" * (args[0].device.type == NAME)
    kinds = {source.device.type for source in sources if source is not None and source.numel()}
    if device is None or goes_on:
        return ""
    from_cpu, to_cpu = (device.type == NAME and "cpu" in kinds), (device.type == "cpu" and NAME in kinds)
    return "copies to" * from_cpu or "copies from" * to_cpu


READS = (
    torch.ops.aten._local_scalar_dense.default,
    torch.ops.aten.equal.default,
    torch.ops.aten.nonzero.default,
    torch.ops.aten.masked_select.default,
)


@dataclass(frozen=True, kw_only=True)
class Case:
    """Model, layout, and the rank that trains it."""

    choice: ModelChoice
    layout: Layout
    rank: int = 0


# Precisions of model types whose fake kernels do not support 16 bits.
PRECISIONS = {"swinv2": "fp32", "chatglm": "fp32"}
ZERO = Layout(dp=2, zero=1)
LAYOUTS = (
    Layout(tp=2),
    Layout(tp=2, precision="bf16"),
    Layout(tp=2, precision="fp16"),
    Layout(tp=2, recompute=1.0),
    Layout(tp=2, recompute=1.0, options=("activation_offload",)),
    Layout(tp=2, options=("enable_fused_loss",)),
    Layout(tp=2, sequence="split_gather"),
    Layout(tp=2, pp=2, dp=2, zero=1, schedule="zbh1"),
    Layout(pp=2),
    Layout(sp=2, sequence="ring_attn"),
    Layout(sp=2, sequence="all_to_all"),
    Layout(dp=2, wp=2),
    ZERO,
    replace(ZERO, zero=2),
    replace(ZERO, options=("cpu_offload",)),
    replace(ZERO, overlap_allgather=True),
)
ADAPTED = (Layout(tp=2), ZERO)


def layouts() -> dict[str, Case]:
    """Return the cases of a Llama under every layout, on the first and the last rank, and with LoRA."""

    def case(choice: ModelChoice, layout: Layout, rank: int = 0) -> Case:
        return Case(choice=choice, layout=replace(layout, microbatches=2, max_norm=1.0), rank=rank)

    plain, adapted = ModelChoice(model_type="llama"), Adapted(model_type="llama")
    cases = [case(plain, layout, rank) for layout in LAYOUTS for rank in sorted({0, layout.world_size - 1})]
    names = {f"{row.layout}, rank {row.rank}": row for row in cases}
    return names | {f"{layout}, LoRA": case(adapted, layout) for layout in ADAPTED}


@contextmanager
def pretended(case: Case) -> Iterator[Booster]:
    """Simulate the rank of a case on the device, and yield a booster for its layout."""
    layout = case.layout
    hidden = torch.Size((2, LENGTH, HIDDEN)), layout.config.dtype  # sent for a microbatch
    with one_rank(f"cpu:fake,{NAME}:{BACKEND}", case.rank, layout.world_size, arrives=(hidden,)):
        assert default_device() == torch.device(NAME, 0)
        plugin = HybridParallelPlugin(**layout.arguments)  # its mesh has real tensors
        with fake_tensors(flag=False), MadeOnTheDevice():
            yield Booster(plugin=plugin)


def train(booster: Booster, case: Case) -> None:
    """Boost a model, made on the device if it is fake, and run steps."""
    device, layout = default_device(), case.layout
    with device:
        model: Any = case.choice.build()
    optimizer: Any = torch.optim.AdamW(
        parameter for parameter in model.parameters() if parameter.requires_grad
    )
    model, optimizer, *_ = booster.boost(model, optimizer)
    batch = make_batch(case.choice, num_samples=4, seed=0)  # on the CPU, as from a dataloader
    for step in range(2 if layout.world_size == 1 else COMPARED_CALLS + 1):  # with one warm step
        with NoWaits(is_warm=step == COMPARED_CALLS or layout.world_size == step == 1):
            loss = booster.execute_pipeline(iter([batch]), model, loss_of, optimizer)["loss"]
            optimizer.step()
            optimizer.zero_grad()
    tensors: list[Tensor] = [loss, *model.parameters(), *model.buffers()]
    assert {tensor.device for tensor in tensors} == {device}, {tensor.device for tensor in tensors}


def left_where_it_was(engine: PipelineEngine, batch: Any) -> Any:
    """Leave batches on the device where the dataloader made them."""
    return batch


def copied_while_the_host_waits(engine: PipelineEngine, batch: Any) -> Any:
    """Copy batches while the host waits."""
    return map_tensors(batch, lambda tensor: tensor.to(engine.mesh.device))


def read_on_the_host(engine: PipelineEngine, batch: Any, to_compute: Any = PipelineEngine.to_compute) -> Any:
    """Read a number of every batch on the host."""
    moved = to_compute(engine, batch)
    int(moved["input_ids"].sum())
    return moved


MISTAKES: dict[str, Callable[..., Any]] = {
    "a mistake": left_where_it_was,
    "a blocking copy": copied_while_the_host_waits,
    "a read": read_on_the_host,
}


def outcome(name: str) -> str:
    """Train a layout of `LAYOUTS`, BERT with a mistake, or the named model type; return "trains" or the error."""
    mistake = MISTAKES.get(name, PipelineEngine.to_compute)
    alone = Layout(microbatches=2, max_norm=1.0, precision=PRECISIONS.get(name, "bf16"))
    choice = ModelChoice(model_type="bert" if name in MISTAKES else name)
    case = layouts().get(name) or Case(choice=choice, layout=alone)
    with pretended(case) as booster, mock.patch.object(PipelineEngine, "to_compute", mistake):
        try:
            train(booster, case)
        except Exception as error:
            return f"{type(error).__name__}: {error}".replace("\n", " ")
    return "trains"


if __name__ == "__main__":
    _setup_privateuseone_for_python_backend(NAME)
    getattr(torch, NAME).get_amp_supported_dtype = lambda: [torch.bfloat16, torch.float16]
    dist.Backend.register_backend(BACKEND, fake_pg._create_fake_pg, extended_api=True, devices=["cpu", NAME])
    register_chatglm()
    for name in sys.argv[1:]:
        print(f"{name}: {outcome(name)}", flush=True)
