"""A small sequential model as pipeline stages and as one process, and schedules to run on it; no tests."""

import random
from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from echelon.cluster.mesh import ParallelMesh
from echelon.pipeline.action import Op, Schedule
from echelon.pipeline.communicate import with_communication
from echelon.pipeline.microbatch import split
from echelon.pipeline.runner import RunResult, StageLike, run_schedule
from echelon.pipeline.schedules import SCHEDULES, forward_only
from echelon.pipeline.transport import Transport
from echelon.pipeline.validate import validate

# B batch, W width
WIDTH = 6
Batch = dict[str, Tensor]


def make_layers(count: int = 6, dtype: torch.dtype = torch.float32) -> list[nn.Module]:
    torch.manual_seed(0)
    blocks = [nn.Sequential(nn.Linear(WIDTH, 9), nn.Tanh(), nn.Linear(9, WIDTH)) for _ in range(count)]
    return [block.to(dtype) for block in blocks]


def make_batch(samples: int, seed: int = 0, dtype: torch.dtype = torch.float32) -> Batch:
    generator = torch.Generator().manual_seed(seed)
    x_BW = torch.randn(samples, WIDTH, generator=generator).to(dtype)
    return {"x": x_BW, "labels": torch.randn(samples, WIDTH, generator=generator).to(dtype)}


def criterion(outputs: Any, microbatch: Batch) -> Tensor:
    return (outputs["out"].float() - microbatch["labels"].float()).square().mean()


class LayerStage:
    """A slice of the layers; what travels is the hidden state alone."""

    def __init__(self, layers: Sequence[nn.Module], index: int, num_stages: int) -> None:
        bounds = [len(layers) * stage // num_stages for stage in range(num_stages + 1)]
        self.layers = nn.ModuleDict({str(i): layers[i] for i in range(bounds[index], bounds[index + 1])})
        self.index = index
        self.is_first = index == 0
        self.is_last = index == num_stages - 1

    def forward(self, microbatch: Batch, received: tuple[Tensor, ...]) -> Any:
        (hidden_BW,) = received or (microbatch["x"],)
        for layer in self.layers.values():
            hidden_BW = layer(hidden_BW)
        return {"out": hidden_BW} if self.is_last else (hidden_BW,)


class CountingStage(LayerStage):
    """Sends besides the hidden state a skip connection, numbers, an empty tensor and a strided one."""

    def forward(self, microbatch: Batch, received: tuple[Tensor, ...]) -> Any:
        if self.is_first:
            skip_BW = microbatch["x"] * 2
            received = (
                microbatch["x"],
                skip_BW,
                torch.zeros(3, dtype=torch.int64),
                skip_BW[:, :0],
                skip_BW.t(),
            )
        hidden_BW, skip_BW, count, empty, strided_WB = received
        hidden_BW = super().forward(microbatch, (hidden_BW + skip_BW * count[0],))
        if self.is_last:
            return {"out": hidden_BW["out"] + strided_WB.t() * 0.5 + skip_BW + empty.sum()}
        return hidden_BW[0], skip_BW, count + 1, empty, (strided_WB.t() * 1.5).t()


StageClass = type[LayerStage]


def identity(loss: Tensor) -> Tensor:
    return loss


def gradients(layers: Sequence[nn.Module]) -> dict[str, Tensor | None]:
    named = (
        (f"{index}.{name}", p) for index, layer in enumerate(layers) for name, p in layer.named_parameters()
    )
    return {name: None if p.grad is None else p.grad.clone() for name, p in named}


def reference(
    layers: Sequence[nn.Module],
    microbatches: Sequence[Batch],
    *,
    stage_class: StageClass = LayerStage,
    num_stages: int,
    scale: Callable[[Tensor], Tensor] = identity,
) -> list[Tensor]:
    """The losses of one process without any of the machinery; gradients are left in the layers."""
    stages = [stage_class(layers, index, num_stages) for index in range(num_stages)]
    losses = []
    for microbatch in microbatches:
        value: Any = ()
        for stage in stages:
            value = stage.forward(microbatch, value)
        loss = criterion(value, microbatch)
        scale(loss).backward()
        losses.append(loss.detach())
    return losses


class Pipeline:
    """This rank's stage and transport, and a reference beside it."""

    def __init__(self, *, stage_class: StageClass = LayerStage, dtype: torch.dtype = torch.float32) -> None:
        self.mesh = ParallelMesh(pp=dist.get_world_size())
        self.num_stages = self.mesh.size("pp")
        self.transport = Transport(self.mesh)
        self.stage_class = stage_class
        self.layers = make_layers(dtype=dtype)
        self.expected = make_layers(dtype=dtype)
        self.stage: StageLike = stage_class(self.layers, self.mesh.rank("pp"), self.num_stages)

    def schedule(self, name: str, num_microbatches: int) -> Schedule:
        return with_communication(SCHEDULES[name](self.num_stages, num_microbatches), self.num_stages)

    def run(self, schedule: Schedule, microbatches: Sequence[Batch], **options: Any) -> RunResult:
        settings: dict[str, Any] = {"criterion": criterion, "scale": identity, **options}
        return run_schedule(
            schedule[self.stage.index],
            stages={self.stage.index: self.stage},
            microbatches=microbatches,
            transport=self.transport,
            **settings,
        )

    def train(self, microbatches: Sequence[Batch], name: str = "1f1b", **options: Any) -> RunResult:
        return self.run(self.schedule(name, len(microbatches)), microbatches, **options)

    def check_train(self, microbatches: Sequence[Batch], name: str = "1f1b", **options: Any) -> None:
        self.check_step(microbatches, self.schedule(name, len(microbatches)), **options)

    @torch.no_grad()
    def evaluate(self, microbatches: Sequence[Batch], **options: Any) -> RunResult:
        return self.run(forward_only(self.schedule("1f1b", len(microbatches))), microbatches, **options)

    def check_step(self, microbatches: Sequence[Batch], schedule: Schedule, **options: Any) -> None:
        """One training step: losses and gradients are those of the reference, to the bit."""
        scale = options.get("scale", identity)
        result = self.run(schedule, microbatches, **options)
        losses = reference(
            self.expected, microbatches, stage_class=self.stage_class, num_stages=self.num_stages, scale=scale
        )
        assert result.losses == (losses if self.stage.is_last else [])
        assert not any(loss.requires_grad for loss in result.losses)
        self.check_gradients()

    def check_gradients(self) -> None:
        expected = gradients(self.expected)
        own = gradients(self.layers)
        for index, layer in enumerate(self.layers):
            is_here = str(index) in self.stage.layers  # type: ignore[attr-defined]
            for name, parameter in layer.named_parameters():
                if is_here:
                    assert torch.equal(own[f"{index}.{name}"], expected[f"{index}.{name}"]), f"{index}.{name}"
                else:
                    assert parameter.grad is None


def pieces(samples: int, count: int, seed: int = 0, dtype: torch.dtype = torch.float32) -> list[Batch]:
    return split(make_batch(samples, seed, dtype), num_microbatches=count, microbatch_size=None)


def shuffled(generator: random.Random, num_ranks: int, num_microbatches: int) -> Schedule:
    """A schedule of any kind with a few neighbours swapped, so perhaps not valid. Backwards keep their order,
    since gradients that are added in another order are not equal to the bit."""
    compute = SCHEDULES[generator.choice(list(SCHEDULES))](num_ranks, num_microbatches)
    schedule = with_communication(compute, num_ranks)
    for _ in range(generator.randint(1, 6)):
        actions = generator.choice(schedule)
        index = generator.randrange(len(actions) - 1)
        if not actions[index].op is actions[index + 1].op is Op.BACKWARD:
            actions[index : index + 2] = reversed(actions[index : index + 2])
    return schedule


def is_valid(schedule: Schedule) -> bool:
    num_microbatches = 1 + max(action.microbatch for actions in schedule for action in actions)
    try:
        validate(schedule, len(schedule), num_microbatches)
    except ValueError:
        return False
    return True
