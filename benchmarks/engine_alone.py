"""The overhead of a pipeline engine: with stages of one tiny linear layer, hardly any time is arithmetic."""

from collections.abc import Callable, Mapping
from statistics import median
from typing import Any, Protocol

import torch
import torch.nn.functional as F
from pipeline_peers import make_schedule, stages_of
from rounds import Clock
from torch import Tensor, nn
from torch.distributed import pipelining

from echelon.cluster.mesh import ParallelMesh
from echelon.pipeline.action import stage_ranks
from echelon.pipeline.communicate import with_communication
from echelon.pipeline.microbatch import split
from echelon.pipeline.runner import ScheduleRun
from echelon.pipeline.schedules import build_schedule
from echelon.pipeline.transport import Transport

_WIDTH = 8
# Schedules with their stages per rank; only those with undivided backwards, so that both engines run the same actions.
STYLES = {"gpipe": 1, "1f1b": 1, "interleaved": 2}


class Engine(Protocol):
    """A schedule with tiny stages."""

    def step(self) -> None:
        """Run all forwards and backwards of a batch."""

    def gradients(self) -> list[Tensor]:
        """Return the gradients of this rank's layers."""

    def forget(self) -> None:
        """Drop the gradients."""


class _TinyStage:
    """A stage with the interface of Echelon's runner."""

    def __init__(self, layer: nn.Module, index: int, num_stages: int) -> None:
        self.index = index
        self.is_first = index == 0
        self.is_last = index == num_stages - 1
        self._layer = layer

    def forward(self, microbatch: Tensor, received: tuple[Tensor, ...]) -> Any:
        """Apply one linear layer to the received tensor or the microbatch."""
        output = self._layer(microbatch if self.is_first else received[0])
        return output if self.is_last else (output,)


class EchelonEngine:
    """Echelon's runner and transport; the batch is split as by the plugin."""

    def __init__(self, style: str, mesh: ParallelMesh, num_microbatches: int) -> None:
        rank, size = mesh.rank("pp"), mesh.size("pp")
        computations = build_schedule(style, size, num_microbatches, STYLES[style])
        holders = stage_ranks(computations)
        held = [stage for stage, holder in enumerate(holders) if holder == rank]
        self._layers = _layers(len(held), mesh.device)
        self._actions = with_communication(computations)[rank]
        self._stages = {
            stage: _TinyStage(layer, stage, len(holders))
            for stage, layer in zip(held, self._layers, strict=True)
        }
        self._transport = Transport(mesh, holders)
        self._batch = torch.ones(num_microbatches, _WIDTH, device=mesh.device)
        self._num_microbatches = num_microbatches

    def step(self) -> None:
        """Run all forwards and backwards of a batch."""
        microbatches = split(self._batch, num_microbatches=self._num_microbatches, microbatch_size=None)
        run = ScheduleRun(
            stages=self._stages,
            microbatches=microbatches,
            criterion=lambda output, microbatch: F.mse_loss(output, microbatch),
            transport=self._transport,
            scale=lambda loss: loss / self._num_microbatches,
        )
        run.run(self._actions)

    def gradients(self) -> list[Tensor]:
        """Return the gradients of this rank's layers."""
        return _gradients(self._layers)

    def forget(self) -> None:
        """Drop the gradients."""
        self._layers.zero_grad()


class TorchEngine:
    """A schedule of torch.distributed.pipelining."""

    def __init__(self, style: str, mesh: ParallelMesh, num_microbatches: int) -> None:
        rank, size = mesh.rank("pp"), mesh.size("pp")
        held = stages_of(style, rank, size)
        self._layers = _layers(len(held), mesh.device)
        # Given shapes, so that stages do not exchange them.
        first_input, passed = (
            torch.ones(1, _WIDTH, device=mesh.device, requires_grad=needed) for needed in (False, True)
        )
        stages = [
            pipelining.PipelineStage(
                layer,
                stage,
                len(held) * size,
                mesh.device,
                input_args=passed if stage else first_input,
                output_args=passed,
            )
            for stage, layer in zip(held, self._layers, strict=True)
        ]
        self._schedule = make_schedule(
            style,
            stages,
            num_microbatches,
            lambda output, target: F.mse_loss(output, target) / num_microbatches,
        )
        batch = torch.ones(num_microbatches, _WIDTH, device=mesh.device)
        self._inputs = (batch,) if rank == 0 else ()
        self._target = batch if rank == size - 1 else None

    def step(self) -> None:
        """Run all forwards and backwards of a batch."""
        self._schedule.step(*self._inputs, target=self._target, return_outputs=False)

    def gradients(self) -> list[Tensor]:
        """Return the gradients of this rank's layers."""
        return _gradients(self._layers)

    def forget(self) -> None:
        """Drop the gradients."""
        self._layers.zero_grad()


ENGINES: Mapping[str, Callable[[str, ParallelMesh, int], Engine]] = {
    "echelon": EchelonEngine,
    "torch": TorchEngine,
}


def time_engines(
    mesh: ParallelMesh, *, num_microbatches: int, rounds: int, warmup: int
) -> list[dict[str, Any]]:
    """Time both engines under each of `STYLES`, alternately. Communicates over the world, which is the pipeline.

    Returns:
        By style: the microseconds per forward or backward of a rank by engine (medians, of the slowest rank),
        the median of the rounds' ratios, and the seconds of each step.

    Raises:
        AssertionError: the engines computed different gradients.
    """
    clock = Clock(mesh.device)
    rows = []
    for style, chunks in STYLES.items():
        engines = {name: build(style, mesh, num_microbatches) for name, build in ENGINES.items()}
        _require_equal(style, engines)
        local_seconds = [
            [_timed(clock, engine) for engine in engines.values()] for _ in range(-warmup, rounds)
        ]
        steps = clock.slowest(local_seconds)[warmup:]
        rows.append(
            {
                "style": style,
                "microbatches": num_microbatches,
                "microseconds": {
                    name: median(column) * 1e6 / (2 * num_microbatches * chunks)
                    for name, column in zip(engines, zip(*steps, strict=True), strict=True)
                },
                "engine_ratio": median(ours / theirs for ours, theirs in steps),
                "seconds": {
                    name: list(column) for name, column in zip(engines, zip(*steps, strict=True), strict=True)
                },
            }
        )
    return rows


def _timed(clock: Clock, engine: Engine) -> float:
    seconds = clock.time(engine.step)
    engine.forget()
    return seconds


def _require_equal(style: str, engines: Mapping[str, Engine]) -> None:
    results = []
    for engine in engines.values():
        engine.step()
        results.append(engine.gradients())
        engine.forget()
    for ours, theirs in zip(*results, strict=True):
        if not torch.allclose(ours, theirs):
            raise AssertionError(f"the engines' gradients differ under {style}: {ours} and {theirs}")


def _layers(count: int, device: torch.device) -> nn.ModuleList:
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        return nn.ModuleList(nn.Linear(_WIDTH, _WIDTH) for _ in range(count)).to(device)


def _gradients(layers: nn.Module) -> list[Tensor]:
    gradients = [parameter.grad for parameter in layers.parameters()]
    assert all(gradient is not None for gradient in gradients)
    return gradients  # type: ignore[return-value]
