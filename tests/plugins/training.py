"""Small models, boosters and batches of the plugin tests."""

from collections.abc import Callable, Iterable, Iterator
from itertools import chain
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from echelon import Booster, HybridParallelPlugin, LowLevelZeroPlugin, TorchDDPPlugin, TorchFSDPPlugin
from echelon.verify.batch import loss_of, make_batch
from echelon.verify.model_choice import ModelChoice
from echelon.verify.parity import make_optimizer

BERT = ModelChoice(model_type="bert", num_layers=2)
LLAMA = ModelChoice(model_type="llama", tied=True, num_layers=2)
SMALL = ModelChoice(model_type="llama", tied=True, num_layers=1)


def hybrid(**kwargs: Any) -> Booster:
    settings = {"precision": "fp32", "num_microbatches": 2} | kwargs
    return Booster(plugin=HybridParallelPlugin(**settings))


def booster_of(kind: str, **settings: Any) -> Booster:
    """Return a booster by the name of its plugin; "zero2" is LowLevelZeroPlugin of stage 2."""
    if kind == "ddp":
        return Booster(plugin=TorchDDPPlugin(), mixed_precision=settings.get("precision"))
    if kind.startswith("zero"):
        return Booster(plugin=LowLevelZeroPlugin(**{"stage": int(kind[4:] or 1)} | settings))
    return Booster(plugin={"fsdp": TorchFSDPPlugin, "hybrid": HybridParallelPlugin}[kind](**settings))


def sgd(model: nn.Module) -> torch.optim.Optimizer:
    """Return SGD, whose steps show the size of gradients; AdamW's would not."""
    return torch.optim.SGD(model.parameters(), lr=1.0)


def boosted(
    booster: Booster, choice: ModelChoice = BERT, make: Callable[[nn.Module], Any] = make_optimizer
) -> tuple[Any, Any]:
    model = choice.build()
    wrapped, optimizer, *_ = booster.boost(model, make(model), loss_of)
    return wrapped, optimizer


def share(booster: Any, choice: ModelChoice, step: int) -> Iterator[dict[str, Tensor]]:
    """Yield this replica's part of a global batch of 8 samples."""
    rank, size = booster.plugin.data_rank
    batch = make_batch(choice, num_samples=8, seed=step)
    return iter([{name: tensor.chunk(size)[rank] for name, tensor in batch.items()}])


def forward_and_backward(booster: Any, model: Any, optimizer: Any, choice: ModelChoice, step: int) -> Tensor:
    """Return the loss, by `execute_pipeline` with a pipeline and by calls otherwise."""
    if booster.plugin.pp_size > 1:
        loss: Tensor = booster.execute_pipeline(share(booster, choice, step), model, loss_of, optimizer)[
            "loss"
        ]
        return loss
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
    booster = hybrid(**settings) if kind == "hybrid" else booster_of("zero", **settings)
    model, optimizer = boosted(booster, choice)
    return [*steps(booster, model, optimizer, shares(booster, choice, num_steps))]


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
