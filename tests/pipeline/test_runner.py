"""The runner over real processes against the same computation in one process: equal to the bit."""

import os
import re
from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn

from echelon.cluster.mesh import ParallelMesh
from echelon.pipeline.action import Action, Op, Schedule
from echelon.pipeline.communicate import with_communication
from echelon.pipeline.microbatch import merge, split
from echelon.pipeline.runner import RunResult, StageLike, run_schedule
from echelon.pipeline.schedules import SCHEDULES, forward_only, gpipe, one_f_one_b
from echelon.pipeline.transport import Transport

from ..pool import Pool

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

    @torch.no_grad()
    def evaluate(self, microbatches: Sequence[Batch], **options: Any) -> RunResult:
        return self.run(forward_only(self.schedule("1f1b", len(microbatches))), microbatches, **options)

    def check_step(self, microbatches: Sequence[Batch], name: str, **options: Any) -> None:
        """One training step: losses and gradients are those of the reference, to the bit."""
        scale = options.get("scale", identity)
        result = self.train(microbatches, name, **options)
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


def train_like_one_process(schedule_name: str, stage_class: StageClass) -> None:
    """Steps of different batch sizes and numbers of microbatches, unequal ones too, gradients adding up."""
    pipeline = Pipeline(stage_class=stage_class)
    for seed, (samples, count) in enumerate([(8, 4), (7, 3), (7, 3), (1, 1), (9, 8), (8, 4)]):
        pipeline.check_step(pieces(samples, count, seed), schedule_name)


@pytest.mark.parametrize("stage_class", [LayerStage, CountingStage])
@pytest.mark.parametrize("schedule_name", SCHEDULES)
@pytest.mark.parametrize("world_size", [1, 2, 3])
def test_losses_and_gradients_are_those_of_one_process(
    pool: Pool, world_size: int, schedule_name: str, stage_class: StageClass
) -> None:
    pool.run(world_size, train_like_one_process, schedule_name, stage_class)


def train_in_dtype(dtype: torch.dtype) -> None:
    pipeline = Pipeline(dtype=dtype)
    for seed in range(2):
        pipeline.check_step(pieces(7, 3, seed, dtype), "1f1b", scale=double)


def double(loss: Tensor) -> Tensor:
    return loss * 2


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float64])
def test_other_dtypes_travel_unchanged(pool: Pool, dtype: torch.dtype) -> None:
    pool.run(2, train_in_dtype, dtype)


def evaluate_between_steps() -> None:
    pipeline = Pipeline()
    for seed in range(2):
        pipeline.check_step(pieces(6, 3, seed), "1f1b")
        microbatches = pieces(5, 2, seed=10 + seed)
        before = gradients(pipeline.layers)
        result = pipeline.evaluate(microbatches, keep_outputs=True)
        after = gradients(pipeline.layers)
        assert all(after[name] is None or torch.equal(after[name], before[name]) for name in after)
        assert (result.outputs is not None) == pipeline.stage.is_last
        if pipeline.stage.is_last:
            expected = make_batch(5, seed=10 + seed)["x"]
            for layer in pipeline.expected:
                expected = layer(expected)
            # Rows of a product may be summed in another order when the batch is cut: hence not to the bit.
            torch.testing.assert_close(merge(result.outputs)["out"], expected)
            assert len(result.losses) == 2
    assert pipeline.evaluate(pieces(4, 2), criterion=None).losses == []


@pytest.mark.parametrize("world_size", [2, 3])
def test_evaluation_between_steps_changes_nothing(pool: Pool, world_size: int) -> None:
    pool.run(world_size, evaluate_between_steps)


def weighted(outputs: Any, microbatch: Batch) -> tuple[Tensor, Tensor]:
    error = (outputs["out"] - microbatch["labels"]).square()
    return error.sum(), torch.tensor(error.numel())


def train_with_weights() -> None:
    pipeline = Pipeline()
    microbatches = pieces(7, 3)
    result = pipeline.train(microbatches, criterion=weighted, keep_outputs=True)
    if pipeline.stage.is_last:
        assert [int(weight) for weight in result.weights] == [3 * WIDTH, 2 * WIDTH, 2 * WIDTH]
        assert len(result.losses) == len(result.outputs) == 3
        assert not any(output["out"].requires_grad for output in result.outputs)
    else:
        assert result == RunResult()


def test_a_weighted_criterion_gives_sums_and_weights(pool: Pool) -> None:
    pool.run(2, train_with_weights)


def freeze(layers: Sequence[nn.Module], count: int) -> None:
    for layer in layers[:count]:
        layer.requires_grad_(False)


def train_with_frozen_first_stages() -> None:
    """Nothing that the frozen stages send needs a gradient, and the pipeline neither hangs nor makes any."""
    pipeline = Pipeline()
    count = 2 * (pipeline.num_stages - 1)
    freeze(pipeline.layers, count)
    freeze(pipeline.expected, count)
    for seed in range(2):
        microbatches = pieces(6, 3, seed)
        pipeline.train(microbatches, "gpipe" if seed else "1f1b")
        reference(pipeline.expected, microbatches, num_stages=pipeline.num_stages)
    own, expected = gradients(pipeline.layers), gradients(pipeline.expected)
    here = pipeline.stage.layers  # type: ignore[attr-defined]
    for name, gradient in expected.items():
        if gradient is None or name.split(".")[0] not in here:
            assert own[name] is None
        else:
            assert torch.equal(own[name], gradient)


@pytest.mark.parametrize("world_size", [2, 3])
def test_frozen_first_stages_do_not_hang(pool: Pool, world_size: int) -> None:
    pool.run(world_size, train_with_frozen_first_stages)


class UnusedStage(LayerStage):
    """Sends a second tensor that the last stage does not use: its gradient is nothing, not missing."""

    def forward(self, microbatch: Batch, received: tuple[Tensor, ...]) -> Any:
        output = super().forward(microbatch, received[:1])
        return output if self.is_last else (output[0], output[0] * 3)


def test_a_tensor_nobody_uses_has_a_gradient_of_zero(pool: Pool) -> None:
    pool.run(2, train_like_one_process, "1f1b", UnusedStage)


def train_beside_replicas() -> None:
    """Two replicas of two stages: the transport goes by the pipeline's ranks, not by the world's."""
    mesh = ParallelMesh(pp=2)
    layers, transport, rank = make_layers(), Transport(mesh), mesh.rank("pp")
    microbatches = pieces(4, 2, seed=mesh.rank("dp"))
    result = run_schedule(
        with_communication(one_f_one_b(2, 2), 2)[rank],
        stages={rank: LayerStage(layers, rank, 2)},
        microbatches=microbatches,
        criterion=criterion,
        transport=transport,
        scale=identity,
    )
    if rank == 1:
        assert result.losses == reference(make_layers(), microbatches, num_stages=2)


def test_pipelines_beside_each_other_do_not_mix(pool: Pool) -> None:
    pool.run(4, train_beside_replicas)


class UnsteadyStage(LayerStage):
    """The width of what it sends depends on the values of the microbatch, not on its shapes."""

    def forward(self, microbatch: Batch, received: tuple[Tensor, ...]) -> Any:
        output = super().forward(microbatch, tuple(r[:, :WIDTH] for r in received))
        wide = not self.is_last and bool(microbatch["x"][0, 0] > 100)
        return (torch.cat([output[0], output[0]], 1),) if wide else output


def train_with_changing_shapes() -> None:
    pipeline = Pipeline(stage_class=UnsteadyStage)
    microbatches = pieces(4, 2)
    pipeline.train(microbatches)
    microbatches[1]["x"][0, 0] = 1000
    pipeline.train(microbatches)


def test_a_shape_that_changes_under_a_known_signature_is_refused_by_the_sender(pool: Pool) -> None:
    sender, receiver = pool.run_failing(2, train_with_changing_shapes)
    assert isinstance(sender, ValueError)
    assert re.search(
        r"stage 0 sends float32 \[2, 12\] for microbatch 1.*it sent float32 \[2, 6\]", str(sender)
    )
    assert isinstance(receiver, RuntimeError)
    assert "lost rank 0 (pipeline stage 0) while receiving the activations" in str(receiver)


def train_on_different_batches() -> None:
    pipeline = Pipeline()
    pipeline.train(pieces(4 + dist.get_rank(), 2))


def test_different_batches_on_the_ranks_are_refused(pool: Pool) -> None:
    errors = pool.run_failing(2, train_on_different_batches)
    assert any("must be given the same batch" in str(error) for error in errors)


def die_in_step(dying_rank: int) -> None:
    pipeline = Pipeline()
    pipeline.train(pieces(6, 3))
    if pipeline.stage.index == dying_rank:
        forward = pipeline.stage.forward
        calls: list[int] = []

        def forward_twice(*args: Any) -> Any:
            calls.append(1)
            if len(calls) == 2:
                os._exit(3)
            return forward(*args)

        pipeline.stage.forward = forward_twice  # type: ignore[method-assign]
    pipeline.train(pieces(6, 3))


@pytest.mark.parametrize("dying_rank", [0, 1])
def test_a_rank_that_dies_is_named_by_its_peer(pool: Pool, dying_rank: int) -> None:
    error = pool.run_failing(2, die_in_step, dying_rank)[1 - dying_rank]
    assert isinstance(error, RuntimeError)
    assert re.search(
        rf"lost rank {dying_rank} \(pipeline stage {dying_rank}\) while (sending|receiving) the "
        r"(activations|gradients) of microbatch \d",
        str(error),
    )


def fail_in_criterion() -> None:
    pipeline = Pipeline()
    pipeline.train(pieces(6, 3))
    try:
        pipeline.train(pieces(6, 3), criterion=lambda outputs, microbatch: 1 / 0)
    except ZeroDivisionError:
        with pytest.raises(
            RuntimeError, match="an earlier step of this pipeline broke off \\(ZeroDivisionError"
        ):
            pipeline.train(pieces(6, 3))
        raise


def test_an_error_passes_through_and_closes_the_transport(pool: Pool) -> None:
    errors = pool.run_failing(2, fail_in_criterion)
    assert isinstance(errors[1], ZeroDivisionError)
    assert "lost rank 1 (pipeline stage 1)" in str(errors[0])


# ---- one process: a single stage, or several handed from one to the next


def run_alone(
    actions: Sequence[Action], num_stages: int, microbatches: Sequence[Batch], **options: Any
) -> RunResult:
    layers = options.pop("layers", None) or make_layers()
    settings: dict[str, Any] = {"criterion": criterion, "scale": identity, "transport": None, **options}
    stages = {index: LayerStage(layers, index, num_stages) for index in range(num_stages)}
    return run_schedule(actions, stages=stages, microbatches=microbatches, **settings)


def test_several_stages_on_one_rank_are_handed_on_without_a_transport() -> None:
    forwards = [Action(Op.FORWARD, stage, m) for m in range(3) for stage in range(3)]
    backwards = [Action(Op.BACKWARD, stage, m) for m in range(3) for stage in (2, 1, 0)]
    layers, expected = make_layers(), make_layers()
    result = run_alone(forwards + backwards, 3, pieces(7, 3), layers=layers)
    assert result.losses == reference(expected, pieces(7, 3), num_stages=1)
    assert all(torch.equal(g, gradients(expected)[name]) for name, g in gradients(layers).items())


def test_losses_stand_by_microbatch_whatever_the_order() -> None:
    actions = [Action(op, 0, m) for m in (2, 0, 1) for op in (Op.FORWARD, Op.BACKWARD)]
    result = run_alone(actions, 1, pieces(7, 3), keep_outputs=True)
    assert result.losses == reference(make_layers(), pieces(7, 3), num_stages=1)
    assert [len(output["out"]) for output in result.outputs] == [3, 2, 2]


class ThinStage:
    """Two stages without parameters but one; remembers weakly what it sent."""

    def __init__(self, index: int) -> None:
        self.index, self.is_first, self.is_last = index, index == 0, index == 1
        self.weight = torch.ones((), requires_grad=True)

    def forward(self, microbatch: Tensor, received: tuple[Tensor, ...]) -> Any:
        return received[0].sum() if self.is_last else (microbatch * self.weight,)


def test_a_wrong_return_of_a_stage_is_refused() -> None:
    stage = ThinStage(0)
    stage.forward = lambda microbatch, received: [microbatch]  # type: ignore[method-assign]
    with pytest.raises(
        TypeError, match="stage 0 is not the last and must return a tuple of tensors, not list"
    ):
        run_schedule(
            [Action(Op.FORWARD, 0, 0)],
            stages={0: stage},
            microbatches=[torch.ones(2)],
            criterion=None,
            transport=None,
            scale=identity,
        )


@pytest.mark.parametrize(
    "returned, told",
    [(lambda o, m: o["out"], "shape"), (lambda o, m: 1.0, "float"), (lambda o, m: None, "NoneType")],
)
def test_a_criterion_that_returns_no_scalar_is_refused(returned: Callable, told: str) -> None:
    with pytest.raises(TypeError, match=f"the criterion must return a scalar tensor.*{told}"):
        run_alone(gpipe(1, 1)[0], 1, pieces(2, 1), criterion=returned)


def test_actions_that_do_not_fit_are_refused_before_anything_runs() -> None:
    with pytest.raises(ValueError, match=r"the schedule has \[1F0, 1B0|the schedule has \[1B0, 1F0"):
        run_alone(gpipe(2, 1)[1], 1, pieces(2, 1))
    with pytest.raises(ValueError, match=r"is for microbatches \[0, 1\], and 3 are given"):
        run_alone(gpipe(1, 2)[0], 1, pieces(3, 3))
    with pytest.raises(ValueError, match="the schedule has backwards: give a criterion"):
        run_alone(gpipe(1, 1)[0], 1, pieces(2, 1), criterion=None)
    with pytest.raises(ValueError, match="give a transport"):
        run_alone(with_communication(gpipe(2, 1), 2)[0], 1, pieces(2, 1))
