import math

import pytest
import torch
import torch.distributed as dist
from torch import Tensor
from torch.nn import Parameter

from echelon.cluster.mesh import ParallelMesh
from echelon.zero.clipping import clip_coefficient, norm_over_all_ranks
from echelon.zero.optimizer import ShardedOptimizer
from echelon.zero.partition import ManagedParameter
from echelon.zero.precision import PrecisionConfig

from ..pool import Pool

CPU = torch.device("cpu")


def test_clip_coefficient_is_that_of_torch() -> None:
    parameter = Parameter(torch.zeros(4))
    for norm, max_norm in ((3.0, 1.0), (0.5, 1.0), (0.0, 1.0)):
        parameter.grad = torch.full((4,), norm / 2)
        torch.nn.utils.clip_grad_norm_([parameter], max_norm)
        assert clip_coefficient(norm, max_norm) * norm / 2 == pytest.approx(parameter.grad[0].item())
    assert clip_coefficient(5.0, 0.0) == 1.0


def test_norm_of_many_entries_is_exact(pool: Pool) -> None:
    pool.run(1, check_norm_of_many_entries)


def check_norm_of_many_entries() -> None:
    x = torch.randn(2**22 + 5)
    for norm_type in (1.0, 2.0, 3.0, math.inf):
        norm, _ = norm_over_all_ranks([x, x[:3]], [x], norm_type=norm_type, device=CPU)
        entries = torch.cat([x, x[:3]]).double()
        assert norm.item() == pytest.approx(torch.linalg.vector_norm(entries, norm_type).item(), rel=1e-6)
    nothing, _ = norm_over_all_ranks([], [], norm_type=2.0, device=CPU)
    assert nothing.item() == 0


@pytest.mark.parametrize("norm_type", [2.0, math.inf])
def test_what_is_not_finite_on_one_rank_is_not_finite_on_all(pool: Pool, norm_type: float) -> None:
    pool.run(2, check_not_finite, norm_type)


def check_not_finite(norm_type: float) -> None:
    fine = torch.ones(3)
    for value in (math.inf, -math.inf, math.nan):
        bad = torch.tensor([1.0, value])
        for bad_rank in (0, 1):
            mine = bad if dist.get_rank() == bad_rank else fine
            counted, _ = norm_over_all_ranks([mine], [], norm_type=norm_type, device=CPU)
            watched, _ = norm_over_all_ranks([fine], [mine], norm_type=norm_type, device=CPU)
            assert not counted.isfinite() and not watched.isfinite()


@pytest.mark.parametrize("stage", [0, 1, 2])
@pytest.mark.parametrize("norm_type", [1.0, 2.0, math.inf])
def test_each_gradient_is_summed_averaged_and_counted_once(pool: Pool, stage: int, norm_type: float) -> None:
    pool.run(4, check_counted_once, stage, norm_type)


def gradients_of(dp: int, tp: int) -> dict[str, Tensor]:
    """Split over tp; replicated over tp, with the same gradient; used in a tp region, each rank with a part."""
    of_both = torch.Generator().manual_seed(dp)
    own = torch.Generator().manual_seed(10 + 2 * dp + tp)
    return {
        "replicated": torch.randn(5, 7, generator=of_both),
        "split": torch.randn(9, 3, generator=own),
        "shared": torch.randn(4, generator=own),
    }


def check_counted_once(stage: int, norm_type: float) -> None:
    mesh = ParallelMesh(tp=2)
    tp = mesh.rank("tp")
    parameters = {name: Parameter(torch.zeros_like(x)) for name, x in gradients_of(0, 0).items()}
    sums = {"shared": (mesh.group("tp"),)}
    optimizer = ShardedOptimizer(
        torch.optim.SGD(parameters.values(), lr=1.0),
        [
            ManagedParameter(
                name=name, parameter=each, sum_groups=sums.get(name, ()), counts=name == "split" or tp == 0
            )
            for name, each in parameters.items()
        ],
        mesh=mesh,
        stage=stage,
        precision=PrecisionConfig(),
        norm_type=norm_type,
    )
    for name, gradient in gradients_of(mesh.rank("dp"), tp).items():
        parameters[name].grad = gradient
    optimizer.step()
    every = {(dp, tp): gradients_of(dp, tp) for dp in range(2) for tp in range(2)}
    expected = {
        "replicated": (every[0, 0]["replicated"] + every[1, 0]["replicated"]) / 2,
        "split": (every[0, tp]["split"] + every[1, tp]["split"]) / 2,
        "shared": sum(each["shared"] for each in every.values()) / 2,
    }
    gradients = optimizer.gradients()
    for name, gradient in expected.items():
        torch.testing.assert_close(gradients[name], gradient)
        torch.testing.assert_close(parameters[name].detach(), -gradient)
    other_half = (every[0, 1 - tp]["split"] + every[1, 1 - tp]["split"]) / 2
    whole = torch.cat([x.flatten() for x in (*expected.values(), other_half)])
    norm = torch.linalg.vector_norm(whole, norm_type).item()
    assert optimizer.get_grad_norm() == pytest.approx(norm, rel=1e-5)


def test_overflow_in_an_uncounted_copy_skips_the_step_everywhere(pool: Pool) -> None:
    pool.run(4, check_uncounted_overflow)


def check_uncounted_overflow() -> None:
    mesh = ParallelMesh(tp=2)
    parameter = Parameter(torch.ones(6))
    optimizer = ShardedOptimizer(
        torch.optim.SGD([parameter], lr=1.0),
        [ManagedParameter(name="replicated", parameter=parameter, counts=mesh.rank("tp") == 0)],
        mesh=mesh,
        stage=1,
        precision=PrecisionConfig(),
    )
    parameter.grad = torch.full((6,), math.nan if mesh.global_rank == 3 else 1.0)
    optimizer.step()
    assert optimizer.skipped_steps == 1
    assert torch.equal(parameter, torch.ones(6))
