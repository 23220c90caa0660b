"""Small models, boosters and batches of the plugin tests."""

from collections.abc import Callable, Iterable, Iterator
from itertools import chain
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from echelon import (
    Booster,
    HybridParallelPlugin,
    LowLevelZeroPlugin,
    PipelineGradientCheckpointConfig,
    TorchDDPPlugin,
    TorchFSDPPlugin,
)
from echelon.verify.batch import loss_of, make_batch
from echelon.verify.model_choice import ModelChoice
from echelon.verify.parity import make_optimizer

BERT = ModelChoice(model_type="bert", num_layers=2)
LLAMA = ModelChoice(model_type="llama", tied=True, num_layers=2)
SMALL = ModelChoice(model_type="llama", tied=True, num_layers=1)
RECOMPUTED = {"gradient_checkpoint_config": PipelineGradientCheckpointConfig(gradient_checkpointing_ratio=1)}


def sequence(mode: str, **sizes: Any) -> dict[str, Any]:
    """Return the options of sequence parallelism in this mode."""
    return {**sizes, "enable_sequence_parallelism": True, "sequence_parallelism_mode": mode}


RING, ULYSSES = sequence("ring_attn", sp_size=2), sequence("all_to_all", sp_size=2)
REGIONS = sequence("split_gather", tp_size=2)


def hybrid(**kwargs: Any) -> Booster:
    settings = {"precision": "fp32", "num_microbatches": 2} | kwargs
    return Booster(plugin=HybridParallelPlugin(**settings))


def booster_of(kind: str, **settings: Any) -> Booster:
    """Return a booster by the name of its plugin; "zero2" is LowLevelZeroPlugin of stage 2."""
    if kind == "hybrid":
        return hybrid(**settings)
    if kind == "ddp":
        return Booster(plugin=TorchDDPPlugin(), mixed_precision=settings.get("precision"))
    if kind == "fsdp":
        return Booster(plugin=TorchFSDPPlugin(**settings))
    return Booster(plugin=LowLevelZeroPlugin(**{"stage": int(kind[4:] or 1)} | settings))


def sgd(model: nn.Module) -> torch.optim.Optimizer:
    """Return SGD, whose steps show the size of gradients; AdamW's would not."""
    return torch.optim.SGD(model.parameters(), lr=1.0)


def boosted(
    booster: Booster, model: ModelChoice | nn.Module = BERT, make: Callable[[nn.Module], Any] = make_optimizer
) -> tuple[Any, Any]:
    """Return a boosted model and its optimizer; a choice of a model is built first."""
    plain = model if isinstance(model, nn.Module) else model.build()
    wrapped, optimizer, *_ = booster.boost(plain, make(plain), loss_of)
    return wrapped, optimizer


def parts(batch: dict[str, Tensor], number: int) -> list[dict[str, Tensor]]:
    """Return a batch in parts, of which the first ones may have a sample more."""
    return [
        {name: tensor.tensor_split(number)[index] for name, tensor in batch.items()}
        for index in range(number)
    ]


def share(booster: Any, choice: ModelChoice, step: int) -> Iterator[dict[str, Tensor]]:
    """Yield this replica's part of a global batch of 8 samples."""
    rank, size = booster.plugin.data_rank
    return iter([parts(make_batch(choice, num_samples=8, seed=step), size)[rank]])


def forward_and_backward(booster: Any, model: Any, optimizer: Any, choice: ModelChoice, step: int) -> Tensor:
    """Return the loss, by `execute_pipeline` with a pipeline and by calls otherwise."""
    if booster.plugin.pp_size > 1:
        return booster.execute_pipeline(share(booster, choice, step), model, loss_of, optimizer)["loss"]
    loss = model(**next(share(booster, choice, step))).loss
    booster.backward(loss, optimizer)
    return loss


def steps(
    booster: Any,
    model: Any,
    optimizer: Any,
    batches: Iterable[dict[str, Any]],
    criterion: Any = loss_of,
    *,
    by_calls: bool = False,
) -> Iterator[float]:
    """Train a step on each batch, by `execute_pipeline` or by calls of the model, and yield its loss."""
    for batch in batches:
        if by_calls:
            loss = model(**batch).loss
            booster.backward(loss, optimizer)
        else:
            loss = booster.execute_pipeline(iter([batch]), model, criterion, optimizer)["loss"]
        optimizer.step()
        optimizer.zero_grad()
        yield loss.item()


def shares(booster: Any, choice: ModelChoice, num_steps: int) -> Iterator[dict[str, Tensor]]:
    """Yield this replica's part of the global batch of each step."""
    return chain.from_iterable(share(booster, choice, step) for step in range(num_steps))


def train(kind: str, settings: dict[str, Any], choice: ModelChoice, num_steps: int = 3) -> list[float]:
    """Return the losses of a run whose global batch does not depend on the layout."""
    booster = booster_of(kind, **settings)
    model, optimizer = boosted(booster, choice)
    return [*steps(booster, model, optimizer, shares(booster, choice, num_steps))]


def calls_of(ledger: Any) -> dict[tuple[str, str], int]:
    """Return the number of messages by axis and kind."""
    return {key: count.calls for key, count in ledger.traffic.items()}


def norm_of_gradients(model: nn.Module) -> float:
    gradients = [parameter.grad for parameter in model.parameters() if parameter.grad is not None]
    return float(nn.utils.get_total_norm(gradients))


def full(tensor: Tensor) -> Tensor:
    """Return a copy of a tensor, with the shards of all ranks."""
    tensor = tensor.detach()
    return (tensor.full_tensor() if isinstance(tensor, DTensor) else tensor).clone()


def mean_over_replicas(loss: float) -> float:
    total = torch.tensor(loss, dtype=torch.float64)
    dist.all_reduce(total)
    return float(total) / dist.get_world_size()


def refused(make: Callable[[], Any]) -> str:
    """Return the text of the error, and require that nothing was communicated before it."""
    before = dist.distributed_c10d._world.group_count
    try:
        make()
    except (TypeError, ValueError, RuntimeError) as error:
        assert dist.distributed_c10d._world.group_count == before, "a group was made before the refusal"
        return str(error)
    raise AssertionError("nothing was refused")


class Numbers(torch.utils.data.Dataset):
    """Numbers from 0 to 15."""

    def __len__(self) -> int:
        return 16

    def __getitem__(self, index: int) -> int:
        return index
