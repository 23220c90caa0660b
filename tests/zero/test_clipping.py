"""The norm over all ranks, and clipping between backward and step, compared with torch's in one process."""

import math
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn import Parameter

from echelon.cluster.mesh import ParallelMesh
from echelon.zero.clipping import clip_coefficient
from echelon.zero.partition import ManagedParameter
from echelon.zero.reduced_gradients import norm_over_all_ranks

from ..pool import on_ranks
from ..slow import slow_row
from .helpers import (
    Precision,
    assert_equal,
    assert_same_bits,
    loss_of,
    mean_gradients,
    shard,
    small_model,
    weights_of,
)

STAGES = (0, 1, 2)
PRECISIONS: tuple[Precision, ...] = ("fp32", "bf16", "fp16")


def by_norm(clip: Any) -> float:
    return float(clip.clip_grad_by_norm(0.05))


def by_largest(clip: Any) -> float:
    return float(clip.clip_grad_by_norm(0.02, norm_type=math.inf, error_if_nonfinite=True))


def by_value(clip: Any) -> None:
    clip.clip_grad_by_value(0.02)


def by_both(clip: Any) -> float:
    by_value(clip)
    return by_norm(clip)


class Plain:
    """torch's clipping, under the names of the sharded optimizer."""

    def __init__(self, parameters: list[Parameter]) -> None:
        self.parameters = parameters

    def clip_grad_by_norm(self, *arguments: Any, **named: Any) -> Tensor:
        return nn.utils.clip_grad_norm_(self.parameters, *arguments, **named)

    def clip_grad_by_value(self, value: float) -> None:
        nn.utils.clip_grad_value_(self.parameters, value)


CLIPPINGS: tuple[Callable[[Any], float | None], ...] = (by_norm, by_largest, by_value, by_both)


@pytest.mark.parametrize("scaled", [("fp16",), slow_row(("fp32", "bf16"))])
@on_ranks(2)
def test_clipping_equals_torchs_for_the_averaged_gradients(scaled: tuple[Precision, ...]) -> None:
    """Check all clippings in every precision, in some of them also with a factor of the gradients."""
    for precision in PRECISIONS:
        for stage in STAGES:
            for clip in CLIPPINGS:
                for factor in (None, 0.5) if precision in scaled else (None,):
                    check_clipping(clip, stage, precision, factor)


def check_clipping(
    clip: Callable[[Any], float | None], stage: int, precision: Precision, factor: float | None
) -> None:
    model, rank = small_model(), dist.get_rank()
    optimizer = shard(model, stage=stage, precision=precision)
    gradients = mean_gradients(model, [[0], [1]])
    expected = {name: Parameter(master) for name, master in optimizer.masters().items()}
    for name, parameter in expected.items():
        parameter.grad = gradients[name].float() * (factor or 1.0)
    norm = nn.utils.clip_grad_norm_(expected.values(), math.inf).item()
    optimizer.backward(loss_of(model, rank))
    optimizer.gradient_factor = factor
    returned_norm, theirs = clip(optimizer), clip(Plain([*expected.values()]))
    optimizer.step()
    assert optimizer.gradient_factor is None
    # In 16 bits gradients have a relative rounding of at most 2**-8.
    tolerances = {"rtol": 1e-5, "atol": 1e-6} if precision == "fp32" else {"rtol": 5e-2, "atol": 1e-3}
    where = f"{clip.__name__} stage {stage} {precision} {factor}"
    assert returned_norm == (None if theirs is None else pytest.approx(theirs, rel=tolerances["rtol"])), where
    assert optimizer.get_grad_norm() == pytest.approx(norm, rel=tolerances["rtol"]), where
    clipped = {name: parameter.grad for name, parameter in expected.items()}
    assert_equal(optimizer.gradients(), clipped, **tolerances)
    stepped = {name: parameter.detach() - parameter.grad for name, parameter in expected.items()}
    assert_equal(optimizer.masters(), stepped, **tolerances)


@on_ranks(4)
def test_norm_and_value_are_of_the_tensor_and_pipeline_axes_together() -> None:
    for sizes in ({"tp": 2}, {"pp": 2}):
        mesh = ParallelMesh(**sizes)
        (axis,) = sizes
        # Each rank of the axis has another parameter; over data the mean is 3 and 30.
        parameter = Parameter(torch.zeros(5))
        optimizer = shard([ManagedParameter(name="own", parameter=parameter)], mesh=mesh)
        parameter.grad = torch.full((5,), (2.0 + 2.0 * mesh.rank("dp")) * 10.0 ** mesh.rank(axis))
        norm = math.sqrt(5 * (3.0**2 + 30.0**2))
        assert optimizer.clip_grad_by_norm(norm / 2).item() == pytest.approx(norm, rel=1e-6)
        optimizer.clip_grad_by_value(5.0)
        optimizer.step()
        expected = torch.full((5,), -1.5 if mesh.rank(axis) == 0 else -5.0)
        torch.testing.assert_close(parameter.detach(), expected)
        assert optimizer.last_norm == pytest.approx(norm, rel=1e-6)


@on_ranks(2)
def test_clipping_hides_no_overflow() -> None:
    for stage in STAGES:
        for precision in PRECISIONS:
            for clip in (by_norm, by_value, by_both):
                model = small_model()
                optimizer = shard(model, stage=stage, precision=precision)
                before = weights_of(model)
                if dist.get_rank() == 1:  # only infinite: clamping would make it finite, but not a NaN
                    model[0].weight.register_hook(lambda gradient: torch.full_like(gradient, math.inf))
                optimizer.backward(loss_of(model, 0))
                clip(optimizer)
                optimizer.step()
                assert optimizer.skipped_steps == 1, (stage, precision, clip)
                assert not math.isfinite(optimizer.last_norm or 0.0)
                assert_same_bits(weights_of(model), before)
                optimizer.zero_grad()
                optimizer.backward(loss_of(model, 0))
                with pytest.raises(RuntimeError, match="error_if_nonfinite=True"):
                    optimizer.clip_grad_by_norm(1.0, error_if_nonfinite=True)


def test_clip_coefficient_is_that_of_torch() -> None:
    parameter = Parameter(torch.zeros(4))
    for norm, max_norm in ((3.0, 1.0), (0.5, 1.0), (0.0, 1.0)):
        parameter.grad = torch.full((4,), norm / 2)
        torch.nn.utils.clip_grad_norm_([parameter], max_norm)
        assert clip_coefficient(norm, max_norm) * norm / 2 == pytest.approx(parameter.grad[0].item())
    assert clip_coefficient(5.0, 0.0) == 1.0


@on_ranks(1)
def test_norm_of_many_entries_is_exact() -> None:
    x = torch.randn(2**22 + 5)
    for norm_type in (1.0, 2.0, 3.0, math.inf):
        norm, _ = norm_over_all_ranks([x, x[:3]], [x], norm_type=norm_type, device=torch.device("cpu"))
        entries = torch.cat([x, x[:3]]).double()
        assert norm.item() == pytest.approx(torch.linalg.vector_norm(entries, norm_type).item(), rel=1e-6)
    nothing, _ = norm_over_all_ranks([], [], norm_type=2.0, device=torch.device("cpu"))
    assert nothing.item() == 0


@pytest.mark.parametrize("norm_type", [2.0, math.inf])
@on_ranks(2)
def test_a_norm_that_is_not_finite_on_one_rank_is_not_finite_on_all(norm_type: float) -> None:
    fine = torch.ones(3)
    for value in (math.inf, -math.inf, math.nan):
        bad = torch.tensor([1.0, value])
        for bad_rank in (0, 1):
            mine = bad if dist.get_rank() == bad_rank else fine
            counted, _ = norm_over_all_ranks([mine], [], norm_type=norm_type, device=torch.device("cpu"))
            watched, _ = norm_over_all_ranks([fine], [mine], norm_type=norm_type, device=torch.device("cpu"))
            assert not counted.isfinite() and not watched.isfinite()


def gradients_of(dp: int, tp: int) -> dict[str, Tensor]:
    """Return gradients sharded over tp, replicated over tp, and partial in a tp region."""
    of_both = torch.Generator().manual_seed(dp)
    of_rank = torch.Generator().manual_seed(10 + 2 * dp + tp)
    return {
        "replicated": torch.randn(5, 7, generator=of_both),
        "split": torch.randn(9, 3, generator=of_rank),
        "shared": torch.randn(4, generator=of_rank),
    }


@pytest.mark.parametrize("stage", [0, 1, 2])
@pytest.mark.parametrize("norm_type", [1.0, 2.0, math.inf])
@on_ranks(4)
def test_each_gradient_is_summed_averaged_and_counted_once(stage: int, norm_type: float) -> None:
    mesh = ParallelMesh(tp=2)
    tp = mesh.rank("tp")
    parameters = {name: Parameter(torch.zeros_like(x)) for name, x in gradients_of(0, 0).items()}
    sums = {"shared": (mesh.group("tp"),)}
    members = [
        ManagedParameter(
            name=name,
            parameter=parameter,
            sum_groups=sums.get(name, ()),
            is_primary=name == "split" or tp == 0,
        )
        for name, parameter in parameters.items()
    ]
    optimizer = shard(members, mesh=mesh, stage=stage)
    for name, gradient in gradients_of(mesh.rank("dp"), tp).items():
        parameters[name].grad = gradient
    measured = optimizer.clip_grad_by_norm(math.inf, norm_type).item()
    optimizer.step()
    every = {(dp, tp): gradients_of(dp, tp) for dp in range(2) for tp in range(2)}
    expected = {
        "replicated": (every[0, 0]["replicated"] + every[1, 0]["replicated"]) / 2,
        "split": (every[0, tp]["split"] + every[1, tp]["split"]) / 2,
        "shared": sum(gradients["shared"] for gradients in every.values()) / 2,
    }
    gradients = optimizer.gradients()
    for name, gradient in expected.items():
        torch.testing.assert_close(gradients[name], gradient)
        torch.testing.assert_close(parameters[name].detach(), -gradient)
    other_half = (every[0, 1 - tp]["split"] + every[1, 1 - tp]["split"]) / 2
    entries = torch.cat([x.flatten() for x in (*expected.values(), other_half)])
    norm = torch.linalg.vector_norm(entries, norm_type).item()
    assert measured == pytest.approx(norm, rel=1e-5)


@on_ranks(4)
def test_overflow_in_an_uncounted_replica_skips_the_step_everywhere() -> None:
    mesh = ParallelMesh(tp=2)
    parameter = Parameter(torch.ones(6))
    is_primary = mesh.rank("tp") == 0
    optimizer = shard(
        [ManagedParameter(name="replicated", parameter=parameter, is_primary=is_primary)], mesh=mesh
    )
    parameter.grad = torch.full((6,), math.nan if mesh.global_rank == 3 else 1.0)
    optimizer.step()
    assert optimizer.skipped_steps == 1
    assert torch.equal(parameter, torch.ones(6))
