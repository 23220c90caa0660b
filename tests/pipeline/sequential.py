"""A small sequential model as pipeline stages and as one process, and schedules to run on it; no tests."""

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any
from unittest.mock import patch

import torch
import torch.distributed as dist
from torch import Tensor, nn

from echelon.cluster.mesh import ParallelMesh
from echelon.pipeline import transport
from echelon.pipeline.action import Schedule
from echelon.pipeline.communicate import with_communication
from echelon.pipeline.microbatch import split
from echelon.pipeline.runner import RunResult, ScheduleRun, StageLike
from echelon.pipeline.schedules import UserSchedule, build_schedule, forward_only, stage_placement
from echelon.pipeline.transport import Transport
from echelon.shardformer.layers.weight_gradient import defer_weight_gradients

# B batch, W width
WIDTH = 6
Batch = dict[str, Tensor]
# Schedules, each with its chunks per rank.
STYLES = [
    ("gpipe", 1),
    ("gpipe", 2),
    ("1f1b", 1),
    ("interleaved", 2),
    ("interleaved", 3),
    ("zbh1", 1),
    ("zbv", 2),
]


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
    """A slice of the layers; only the hidden state is sent."""

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
    """This rank's stages and transport, and a reference beside it.

    Args:
        stage_class: what the stages are.
        style, num_chunks: the schedule, which places the stages.
        dtype: of the layers.
        overlap: see `Transport`.
    """

    def __init__(
        self,
        *,
        stage_class: StageClass = LayerStage,
        style: str | UserSchedule = "1f1b",
        num_chunks: int = 1,
        dtype: torch.dtype = torch.float32,
        overlap: bool = True,
    ) -> None:
        self.mesh = ParallelMesh(pp=dist.get_world_size())
        self.rank = self.mesh.rank("pp")
        self.style, self.num_chunks, self.overlap = style, num_chunks, overlap
        self.placement = stage_placement(style, self.mesh.size("pp"), num_chunks)
        self.num_stages = len(self.placement)
        self.transport = Transport(self.mesh, self.placement, overlap=overlap)
        self.stage_class = stage_class
        self.layers = make_layers(max(6, self.num_stages), dtype=dtype)
        self.expected = make_layers(max(6, self.num_stages), dtype=dtype)
        self.stages: dict[int, StageLike] = {
            stage: stage_class(self.layers, stage, self.num_stages)
            for stage, rank in enumerate(self.placement)
            if rank == self.rank
        }
        self.weight_gradients = defer_weight_gradients(nn.ModuleList(self.layers))

    @property
    def stage(self) -> StageLike:
        """The first of this rank's stages: the only one of most schedules."""
        return next(iter(self.stages.values()))

    @property
    def has_last(self) -> bool:
        return self.num_stages - 1 in self.stages

    def schedule(self, num_microbatches: int, style: str | None = None) -> Schedule:
        compute = build_schedule(style or self.style, self.mesh.size("pp"), num_microbatches, self.num_chunks)
        return with_communication(compute, ahead=self.overlap)

    def run(self, schedule: Schedule, microbatches: Sequence[Batch], **options: Any) -> RunResult:
        settings: dict[str, Any] = {
            "criterion": criterion,
            "scale": identity,
            "weight_gradients": self.weight_gradients,
            **options,
        }
        run = ScheduleRun(stages=self.stages, microbatches=microbatches, transport=self.transport, **settings)
        return run.run(schedule[self.rank])

    def train(self, microbatches: Sequence[Batch], style: str | None = None, **options: Any) -> RunResult:
        return self.run(self.schedule(len(microbatches), style), microbatches, **options)

    def check_train(self, microbatches: Sequence[Batch], **options: Any) -> None:
        self.check_step(microbatches, self.schedule(len(microbatches)), **options)

    @torch.no_grad()
    def evaluate(self, microbatches: Sequence[Batch], **options: Any) -> RunResult:
        compute = build_schedule(self.style, self.mesh.size("pp"), len(microbatches), self.num_chunks)
        return self.run(
            with_communication(forward_only(compute), ahead=self.overlap), microbatches, **options
        )

    def check_step(self, microbatches: Sequence[Batch], schedule: Schedule, **options: Any) -> None:
        """One training step: losses and gradients are those of the reference, to the bit."""
        scale = options.get("scale", identity)
        result = self.run(schedule, microbatches, **options)
        losses = reference(
            self.expected, microbatches, stage_class=self.stage_class, num_stages=self.num_stages, scale=scale
        )
        assert result.losses == (losses if self.has_last else [])
        assert not any(loss.requires_grad for loss in result.losses)
        self.check_gradients()

    def check_gradients(self) -> None:
        expected = gradients(self.expected)
        own = gradients(self.layers)
        here = {name for stage in self.stages.values() for name in stage.layers}  # type: ignore[attr-defined]
        for index, layer in enumerate(self.layers):
            for name, parameter in layer.named_parameters():
                if str(index) in here:
                    assert torch.equal(own[f"{index}.{name}"], expected[f"{index}.{name}"]), f"{index}.{name}"
                else:
                    assert parameter.grad is None


@contextmanager
def as_if_large() -> Iterator[None]:
    """As few tensors are in flight as where they are large."""
    with patch.object(transport, "_MAX_BYTES_IN_FLIGHT", 0):
        yield


def pieces(samples: int, count: int, seed: int = 0, dtype: torch.dtype = torch.float32) -> list[Batch]:
    return split(make_batch(samples, seed, dtype), num_microbatches=count, microbatch_size=None)
