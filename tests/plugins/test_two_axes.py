"""Parameters sharded over two axes at once are reduced, counted, updated, gathered, saved and loaded like others."""

from collections.abc import Iterator
from pathlib import Path
from unittest import mock

import pytest
import torch
from torch import Tensor, nn
from torch.nn import Parameter
from torch.testing import assert_close

from echelon.checkpoint.checkpoints import Checkpoints
from echelon.cluster.mesh import ParallelMesh
from echelon.cluster.placement import PartialGrad, Placement, Replicated, Shard

from ..pool import Pool
from ..zero.owners import Family, Run, drawn

SHAPES = {
    "experts": (5, 6, 3),
    "one dim": (24,),
    "keys": (7, 4),
    "norm": (3,),
    "plain": (4, 3),
    "summed": (9,),
    "equal": (10,),
}
TWO = {"dp": 4, "wp": 2, "tp": 2}
HALF = {"dp": 2, "wp": 2, "tp": 2}


def placements(name: str, mesh: ParallelMesh) -> tuple[Placement, ...]:
    """Return the placements of a parameter, outermost first."""
    wp, tp = mesh.size("wp"), mesh.size("tp")
    return {
        "experts": (
            Shard(size=wp, dim=0, blocks=(5,), padded=(-(-5 // wp) * wp,), axis="wp"),
            Shard(size=tp, dim=1, blocks=(4, 2), padded=(4, 4)),
        ),
        "one dim": (
            Shard(size=wp, dim=0, blocks=(15, 9), padded=(16, 16), axis="wp"),
            Shard(size=tp, dim=0, blocks=(32 // wp,)),
        ),
        "keys": (Shard(size=tp, dim=1, blocks=(4,), replicas=tp),),
        "norm": (PartialGrad(size=tp),),
        "plain": (Replicated(size=tp),),
        "summed": (PartialGrad(size=wp, axis="wp"), Replicated(size=tp)),
        "equal": (Replicated(size=wp, axis="wp"), PartialGrad(size=tp)),
    }[name]


def gradients(step: int, replicas: range) -> dict[str, Tensor]:
    """Return the mean gradients of some ranks of the data axis."""
    return {
        name: sum(drawn(name, 10 * step + rank, SHAPES) for rank in replicas) / len(replicas)
        for name in SHAPES
    }


def gradient_of_rank(name: str, step: int, mesh: ParallelMesh) -> Tensor:
    """Return the gradient that backward leaves on this rank: a mean over wp, or a summand of a partial one."""
    data, tp, wp = mesh.rank("data"), mesh.size("tp"), mesh.size("wp")
    size = wp if name in ("experts", "one dim", "equal") else 1
    mean = gradients(step, range(data // size * size, data // size * size + size))[name]
    return mean / {"keys": tp, "norm": tp, "equal": tp, "summed": wp}.get(name, 1)


def sgd(named: dict[str, Parameter]) -> torch.optim.Optimizer:
    return torch.optim.SGD(named.values(), lr=0.5, momentum=0.9)


def expected(steps: int, data: int) -> Iterator[tuple[dict[str, Tensor], float]]:
    """Yield the weights and the norm of one process after every step."""
    parameters = {name: Parameter(drawn(name, 0, SHAPES)) for name in SHAPES}
    optimizer = sgd(parameters)
    for step in range(1, 1 + steps):
        for name, gradient in gradients(step, range(data)).items():
            parameters[name].grad = gradient
        norm = nn.utils.get_total_norm([parameter.grad for parameter in parameters.values()])
        optimizer.step()
        yield {name: parameter.detach().clone() for name, parameter in parameters.items()}, norm.item()


def run_of(sizes: dict[str, int], seed: int, stage: int) -> Run:
    # The layout refuses wp with tp, since layers with gathered weights do; placements do not.
    with mock.patch("echelon.cluster.layout.layout_errors", return_value=[]):
        family = Family(SHAPES, placements, gradient_of_rank)
        return Run(sizes, stage, sgd, family=family, seed=seed, bucket_size=40)


def step(run: Run, number: int) -> float:
    run.step(number)
    return run.optimizer.get_grad_norm()


def train(folder: Path, sizes: list[dict[str, int]], stage: int) -> list[list[int]]:
    """Train under the first layout, save, and go on under every other one."""
    first, *others = sizes
    (after_1, norm_1), (after_2, norm_2) = expected(2, first["dp"])
    run = run_of(first, 0, stage)
    assert step(run, 1) == pytest.approx(norm_1)
    run.require(after_1, assert_close)
    Checkpoints(run.mesh).save_step(folder, 1, **run.parts())
    for number, layout in enumerate(others):
        other = run_of(layout, 5 + number, stage)
        checkpoints = Checkpoints(other.mesh)
        checkpoints.load_step(folder, **other.parts())
        other.require(after_1, assert_close)
        checkpoints.save_step(folder / str(number), 1, **other.parts())
        if layout["dp"] == first["dp"]:  # otherwise the means are of other gradients
            assert step(other, 2) == pytest.approx(norm_2)
            other.require(after_2, assert_close)
    # Back from the last layout.
    again = run_of(first, 9, stage)
    Checkpoints(again.mesh).load_step(folder / str(len(others) - 1), **again.parts())
    assert step(again, 2) == pytest.approx(norm_2)
    again.require(after_2, assert_close)
    return [[bucket.partition.group.size(), bucket.partition.num_slices] for bucket in run.optimizer.buckets]


def test_two_axes_train_and_resume_under_another_layout(pool: Pool, tmp_path: Path) -> None:
    for partitions in pool.run(4, train, tmp_path, [HALF, {"dp": 2, "tp": 2}, {"dp": 4}], 2):
        assert sorted({tuple(partition) for partition in partitions}) == [(1, 1), (2, 2)]


@pytest.mark.slow
@pytest.mark.parametrize("stage", [1, 2])
def test_two_axes_train_and_resume_under_other_layouts(pool: Pool, tmp_path: Path, stage: int) -> None:
    others = [{"dp": 8}, {"dp": 4, "tp": 2}, {"dp": 2, "wp": 2, "tp": 4}]
    for partitions in pool.run(8, train, tmp_path, [TWO, *others], stage):
        assert sorted({tuple(partition) for partition in partitions}) == [(2, 2), (4, 4)]
