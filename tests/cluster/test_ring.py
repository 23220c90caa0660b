"""Tensors that circulate in rings."""

from collections.abc import Sequence
from unittest.mock import patch

import torch
import torch.distributed as dist
from torch import Tensor

from echelon.cluster import ring
from echelon.cluster.mesh import ParallelMesh
from echelon.cluster.ring import Shift, circulate, round_trip

from ..pool import Pool


def rings_of(mesh: ParallelMesh, sizes: Sequence[int]) -> list[dist.ProcessGroup]:
    """Rings of these sizes within one another, the outermost first."""
    if len(sizes) == 1:
        return [mesh.group("sp")]
    outer, inner = sizes
    rings = [
        mesh.subgroup("sp", [range(first, outer * inner, inner) for first in range(inner)]),
        mesh.subgroup("sp", [range(index * inner, (index + 1) * inner) for index in range(outer)]),
    ]
    return [ring for ring in rings if ring is not None]


def test_every_tensor_comes_by_once_and_brings_home_what_all_found(pool: Pool) -> None:
    for sizes in ((1,), (3,), (4,), (2, 2)):
        pool.run(torch.Size(sizes).numel(), go_round, sizes)


def go_round(sizes: Sequence[int]) -> None:
    mesh = ParallelMesh(sp=torch.Size(sizes).numel())
    rings, size, rank = rings_of(mesh, sizes), mesh.size("sp"), mesh.rank("sp")
    local = torch.full((3,), float(rank))
    seen = list(circulate(local, rings))
    assert seen[0][0] == rank
    assert sorted(place for place, _ in seen) == list(range(size))
    assert all((x == place).all() for place, x in seen)

    def visit(place: int, x: Tensor) -> Tensor:
        assert (x == place).all()
        return torch.tensor([1.0, 10.0**rank, x[0] + 1])

    total = round_trip(local, rings, visit)
    assert total.tolist() == [size, sum(10.0**peer for peer in range(size)), size * (rank + 1)]
    assert (local == rank).all()


def test_the_next_tensor_is_under_way_while_one_is_here(pool: Pool) -> None:
    inner_ring = ["inner begins", "here", "inner ends", "here"]
    expected = ["outer begins", *inner_ring, "outer ends", *inner_ring]
    assert pool.run(4, events) == [expected] * 4


def events() -> list[str]:
    """Return the events, in order, while a tensor circulates in two rings of two."""
    mesh = ParallelMesh(sp=4)
    rings = rings_of(mesh, (2, 2))
    names = dict(zip(rings, ("outer", "inner"), strict=True))
    log = []

    class Told(Shift):
        def __init__(self, x: Tensor, group: dist.ProcessGroup, *, tag: int = 0) -> None:
            super().__init__(x, group, tag=tag)
            self.name = names[group]
            log.append(f"{self.name} begins")

        def wait(self) -> Tensor:
            log.append(f"{self.name} ends")
            return super().wait()

    with patch.object(ring, "Shift", Told):
        for _ in circulate(torch.zeros(1), rings):
            log.append("here")
    return log


def test_messages_of_two_kinds_do_not_meet(pool: Pool) -> None:
    pool.run(2, shift_two)


def shift_two() -> None:
    group, rank = ParallelMesh(sp=2).group("sp"), dist.get_rank()
    shifts = [Shift(torch.full((2,), 10.0 * tag + rank), group, tag=tag) for tag in (0, 1)]
    if rank:
        shifts.reverse()  # whoever is waited for first
    assert sorted(shift.wait()[0].item() for shift in shifts) == [1 - rank, 11 - rank]
