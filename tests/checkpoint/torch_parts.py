"""Parts of a run under torch's data parallelism: DDP unsharded, FSDP by rows. verify/resume.py has the other parts."""

from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.tensor import DTensor

from echelon import Booster, TorchDDPPlugin, TorchFSDPPlugin
from echelon.checkpoint.optimizer_state import saved_options
from echelon.verify.parity import LOSS_SCALE, Batches, make_optimizer
from echelon.verify.reference import StepRecord
from echelon.verify.resume import MASTER, PARAMETER, Contents, Outcome, Relay, write_outcome


def run_torch_leg(relay: Relay, number: int, folder: Path, *, kind: str) -> None:
    """Do the work of `run_leg` under a plugin of torch's: a replica on each rank, and batches of one microbatch."""
    leg = relay.legs[number]
    # Another scale than a hybrid part has; loading must replace it.
    fsdp = dict(precision=leg.layout.precision, initial_scale=LOSS_SCALE * 2**number)
    booster = Booster(plugin=TorchDDPPlugin() if kind == "ddp" else TorchFSDPPlugin(**fsdp))
    model = relay.choice.build(relay.seed + number)
    boosted, optimizer, *_ = booster.boost(model, make_optimizer(model))
    first = relay.first_step(number)
    everything = {"model": boosted, "optimizer": optimizer}
    loaded = saved = None
    if number:
        resumed = booster.load_checkpoint(folder, **everything)
        assert resumed is not None and resumed.step == first
        loaded = contents(boosted, optimizer)
    records = [
        step(booster, boosted, optimizer, batches, overflows=index == relay.training.overflow_step)
        for index, batches in enumerate(relay.batches(number), start=first)
    ]
    if number + 1 < len(relay.legs):
        saved = contents(boosted, optimizer)
        booster.save_checkpoint(folder, first + len(records), **everything).wait()
    if dist.get_rank() == 0:
        write_outcome(Outcome(records=records, loaded=loaded, saved=saved), number, folder)


def step(booster: Booster, boosted: Any, optimizer: Any, batches: Batches, *, overflows: bool) -> StepRecord:
    rank, replicas = booster.plugin.data_rank
    scale = optimizer.scaler.get_scale() if optimizer.scaler.is_enabled() else 1.0
    count = (batches[rank]["labels"][:, 1:] != -100).sum()
    total = count.clone()
    dist.all_reduce(total)
    loss = boosted(**batches[rank]).loss * count * replicas / total  # these plugins average over replicas
    if overflows and rank == replicas - 1:
        loss.register_hook(lambda gradient: gradient * torch.inf)
    booster.backward(loss, optimizer)
    norm = float(optimizer.clip_grad_by_norm(torch.inf))
    named = dict(boosted.unwrap().named_parameters())
    with_gradients = {name: parameter for name, parameter in named.items() if parameter.grad is not None}
    gradients = {name: unsharded(parameter.grad) for name, parameter in with_gradients.items()}
    optimizer.step()
    optimizer.zero_grad()
    mean = loss.detach().clone()
    dist.all_reduce(mean)
    return StepRecord(
        loss=float(mean) / replicas,
        norm=norm if norm < torch.inf else torch.inf,
        gradients=gradients,
        weights={name: unsharded(parameter) for name, parameter in named.items()},
        loss_scale=scale,
        skipped=optimizer.skipped_steps,
    )


def contents(boosted: Any, optimizer: Any) -> Contents:
    """Return the contents as `contents_of` does: the optimizer steps the parameters themselves."""
    named = dict(boosted.unwrap().named_parameters())
    weights = {name: unsharded(parameter) for name, parameter in named.items()}
    tensors = {prefix + name: weight for name, weight in weights.items() for prefix in (PARAMETER, MASTER)}
    values: dict[str, Any] = {}
    for name, parameter in named.items():
        for kind, value in optimizer.optim.state.get(parameter, {}).items():
            if kind == "step":
                values[f"step/{name}"] = [float(value)]
            else:
                tensors[f"{kind}/{name}"] = unsharded(value)
    values |= {f"group {index}": saved_options(group) for index, group in enumerate(optimizer.param_groups)}
    values |= {"loss scaler": optimizer.scaler_state(), "skipped steps": optimizer.skipped_steps}
    return Contents(tensors=tensors, values=values)


def unsharded(tensor: Tensor) -> Tensor:
    """Return a copy with the rows of all ranks. Collective over the world."""
    tensor = tensor.detach()
    return (tensor.full_tensor() if isinstance(tensor, DTensor) else tensor).clone()
