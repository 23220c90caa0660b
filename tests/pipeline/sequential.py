"""A small sequential model as pipeline stages and as one process; no tests."""

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any
from unittest.mock import patch

import torch
import torch.distributed as dist
from torch import Tensor, nn

from echelon.cluster.mesh import ParallelMesh
from echelon.pipeline import transport
from echelon.pipeline.action import Action, Schedule
from echelon.pipeline.communicate import with_communication
from echelon.pipeline.microbatch import split
from echelon.pipeline.runner import RunResult, ScheduleRun, StageLike
from echelon.pipeline.schedules import UserSchedule, build_schedule, build_stage_ranks, forward_only
from echelon.pipeline.transport import Transport
from echelon.shardformer.layers.deferred_linear import track_weight_gradients

from ..shardformer.compare import gradients

# B batch, W width
WIDTH = 6
Batch = dict[str, Tensor]
# Schedules with their chunks per rank.
STYLES = [("gpipe", 1), ("gpipe", 2), ("1f1b", 1), ("interleaved", 2), ("zbh1", 1), ("zbv", 2)]


def make_layers(count: int = 6, dtype: torch.dtype = torch.float32, *, num_frozen: int = 0) -> nn.ModuleList:
    torch.manual_seed(0)
    blocks = [nn.Sequential(nn.Linear(WIDTH, 9), nn.Tanh(), nn.Linear(9, WIDTH)) for _ in range(count)]
    return nn.ModuleList(
        block.to(dtype).requires_grad_(index >= num_frozen) for index, block in enumerate(blocks)
    )


def make_batch(samples: int, seed: int = 0, dtype: torch.dtype = torch.float32) -> Batch:
    generator = torch.Generator().manual_seed(seed)
    x_BW, labels_BW = (torch.randn(samples, WIDTH, generator=generator).to(dtype) for _ in range(2))
    return {"x": x_BW, "labels": labels_BW}


def pieces(samples: int, count: int, seed: int = 0, dtype: torch.dtype = torch.float32) -> list[Batch]:
    return split(make_batch(samples, seed, dtype), num_microbatches=count, microbatch_size=None)


def criterion(outputs: Any, microbatch: Batch) -> Tensor:
    return (outputs["out"].float() - microbatch["labels"].float()).square().mean()


class LayerStage:
    """A slice of the layers; only the hidden state is sent."""

    def __init__(self, layers: nn.ModuleList, index: int, num_stages: int) -> None:
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
    """A stage that also sends a skip connection, integers, an empty tensor and a strided one."""

    def forward(self, microbatch: Batch, received: tuple[Tensor, ...]) -> Any:
        if self.is_first:
            x_BW, skip_BW = microbatch["x"], microbatch["x"] * 2
            received = (x_BW, skip_BW, torch.zeros(3, dtype=torch.int64), skip_BW[:, :0], skip_BW.t())
        hidden_BW, skip_BW, count, empty, strided_WB = received
        hidden_BW = super().forward(microbatch, (hidden_BW + skip_BW * count[0],))
        if self.is_last:
            return {"out": hidden_BW["out"] + strided_WB.t() * 0.5 + skip_BW + empty.sum()}
        return hidden_BW[0], skip_BW, count + 1, empty, (strided_WB.t() * 1.5).t()


def identity(loss: Tensor) -> Tensor:
    return loss


def reference(
    layers: nn.ModuleList,
    microbatches: Sequence[Batch],
    *,
    stage_class: type[LayerStage] = LayerStage,
    num_stages: int,
    scale: Callable[[Tensor], Tensor] = identity,
) -> list[Tensor]:
    """Return the losses of one process without pipeline code; gradients are accumulated in the layers."""
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


def run_alone(
    actions: Sequence[Action], num_stages: int, microbatches: Sequence[Batch], **options: Any
) -> RunResult:
    """Run all stages on one rank."""
    layers = options.pop("layers", None) or make_layers()
    stages = {index: LayerStage(layers, index, num_stages) for index in range(num_stages)}
    settings = dict(criterion=criterion, scale=identity, transport=None, stages=stages) | options
    return ScheduleRun(microbatches=microbatches, **settings).run(actions)


class Pipeline:
    """This rank's stages and transport, with a reference.

    Args:
        stage_class: the class of the stages.
        style, num_chunks: the schedule, which places the stages.
        dtype, num_frozen: the dtype of the layers, and the number of frozen ones.
        overlap: see `Transport`.
        pp: pipeline ranks; None for all.
    """

    def __init__(
        self,
        *,
        stage_class: type[LayerStage] = LayerStage,
        style: str | UserSchedule = "1f1b",
        num_chunks: int = 1,
        dtype: torch.dtype = torch.float32,
        num_frozen: int = 0,
        overlap: bool = True,
        pp: int | None = None,
    ) -> None:
        mesh = ParallelMesh(pp=pp or dist.get_world_size())
        self.rank, self.size, self.dtype = mesh.rank("pp"), mesh.size("pp"), dtype
        self.style, self.num_chunks, self.overlap = style, num_chunks, overlap
        stage_ranks = build_stage_ranks(style, self.size, num_chunks)
        self.num_stages = len(stage_ranks)
        self.transport = Transport(mesh, stage_ranks, overlap=overlap)
        self.stage_class = stage_class
        self.layers, self.expected = (
            make_layers(max(6, self.num_stages), dtype, num_frozen=num_frozen) for _ in range(2)
        )
        self.stages: dict[int, StageLike] = {
            stage: stage_class(self.layers, stage, self.num_stages)
            for stage, rank in enumerate(stage_ranks)
            if rank == self.rank
        }
        self.stage = next(iter(self.stages.values()))
        self.has_last = self.num_stages - 1 in self.stages
        self.weight_gradients = track_weight_gradients(self.layers)

    def train(self, microbatches: Sequence[Batch], style: str | None = None, **options: Any) -> RunResult:
        """Run one training step."""
        compute = build_schedule(style or self.style, self.size, len(microbatches), self.num_chunks)
        return self._run(compute, microbatches, **options)

    @torch.no_grad()
    def evaluate(self, microbatches: Sequence[Batch], **options: Any) -> RunResult:
        """Run only the forwards."""
        compute = build_schedule(self.style, self.size, len(microbatches), self.num_chunks)
        return self._run(forward_only(compute), microbatches, **options)

    def _run(self, compute: Schedule, microbatches: Sequence[Batch], **options: Any) -> RunResult:
        settings = dict(criterion=criterion, scale=identity, weight_gradients=self.weight_gradients) | options
        run = ScheduleRun(stages=self.stages, microbatches=microbatches, transport=self.transport, **settings)
        return run.run(with_communication(compute, ahead=self.overlap)[self.rank])

    def check_train(
        self, microbatches: Sequence[Batch], *, scale: Callable[[Tensor], Tensor] = identity
    ) -> None:
        """Run one training step; losses and gradients equal the reference's bit for bit."""
        result = self.train(microbatches, scale=scale)
        losses = reference(
            self.expected, microbatches, stage_class=self.stage_class, num_stages=self.num_stages, scale=scale
        )
        assert result.losses == (losses if self.has_last else [])
        assert not any(loss.requires_grad for loss in result.losses)
        here = {name for stage in self.stages.values() for name in stage.layers}  # type: ignore[attr-defined]
        computed, expected = gradients(self.layers), gradients(self.expected)
        for name, gradient in computed.items():
            if name.split(".")[0] in here and expected[name] is not None:
                assert gradient is not None and torch.equal(gradient, expected[name]), name
            else:
                assert gradient is None


@contextmanager
def as_if_large() -> Iterator[None]:
    """Limit the tensors in flight to the number for large ones."""
    with patch.object(transport, "_MAX_BYTES_IN_FLIGHT", 0):
        yield
