"""Layers on stages and stages on ranks: how many layers a stage gets, and which stages this rank has."""

from collections.abc import Sequence
from functools import cache
from itertools import accumulate

import torch.distributed as dist

from ..cluster.mesh import ParallelMesh
from .plan import StageSize


class PipelineStageManager:
    """The stages of this rank, and their layers.

    Args:
        mesh: the mesh whose axis pp the stages lie along.
        stage_ranks: the rank of every stage; None gives each rank one, in order. A schedule says which it needs.
        num_layers_per_stage: layers of each stage; None deals them out by their sizes, see `deal_layers`.

    Raises:
        ValueError: a rank of `stage_ranks` does not exist, or one has no stage.
    """

    def __init__(
        self,
        mesh: ParallelMesh,
        stage_ranks: Sequence[int] | None = None,
        num_layers_per_stage: Sequence[int] | None = None,
    ) -> None:
        self._mesh = mesh
        self.stage_ranks = tuple(range(self.num_ranks) if stage_ranks is None else stage_ranks)
        if set(self.stage_ranks) != set(range(self.num_ranks)):
            raise ValueError(
                f"stage_ranks={self.stage_ranks} must name each of the {self.num_ranks} pipeline ranks, 0 to "
                f"{self.num_ranks - 1}, at least once and no other: use pp_size={len(set(self.stage_ranks))} or "
                "other stage_ranks"
            )
        self.num_layers_per_stage = None if num_layers_per_stage is None else list(num_layers_per_stage)

    @property
    def rank(self) -> int:
        """This rank's coordinate on the axis pp."""
        return self._mesh.rank("pp")

    @property
    def num_ranks(self) -> int:
        """The number of ranks on the axis pp."""
        return self._mesh.size("pp")

    @property
    def stage(self) -> int:
        """This rank's coordinate on the axis pp, which is its stage where ranks hold one each."""
        return self.rank

    @property
    def num_stages(self) -> int:
        """The number of stages on all ranks together."""
        return len(self.stage_ranks)

    @property
    def stages(self) -> tuple[int, ...]:
        """The stages that this rank holds, ascending."""
        return tuple(stage for stage, rank in enumerate(self.stage_ranks) if rank == self.rank)

    def is_first_stage(self, ignore_chunk: bool = False) -> bool:
        """Return True if this rank embeds. Of the rank, not of a chunk: ColossalAI's `ignore_chunk` changes nothing."""
        return self.stage_ranks[0] == self.rank

    def is_last_stage(self, ignore_chunk: bool = False) -> bool:
        """Return True if this rank has the outputs and the loss; as `is_first_stage`."""
        return self.stage_ranks[-1] == self.rank

    def ranks_of(self, stages: Sequence[int]) -> list[int]:
        """The ranks that hold any of these stages, each once, ascending."""
        return sorted({self.stage_ranks[stage] for stage in stages})

    def distribute_layers(self, num_layers: int, stage_size: StageSize | None = None) -> list[int]:
        """The number of layers of each stage; `stage_size` as in `StagePlan.stage_size`."""
        return self.num_layers_per_stage or deal_layers(num_layers, self.num_stages, stage_size)

    def bounds(self, num_layers: int, stage_size: StageSize | None = None) -> list[int]:
        """The first layer of each stage, and the end of the last one."""
        return layer_bounds(self.distribute_layers(num_layers, stage_size))

    def get_stage_index(self, layers_per_stage: Sequence[int], stage: int | None = None) -> tuple[int, int]:
        """The first layer of a stage (this rank's first by default) and the one after its last; as of ColossalAI."""
        bounds = layer_bounds(layers_per_stage)
        own = self.stages[0] if stage is None else stage
        return bounds[own], bounds[own + 1]

    def tie_group(self, ranks: Sequence[int]) -> dist.ProcessGroup | None:
        """The group of these ranks of the axis, which share a parameter; None where this one is not among them.

        Collective over the world.
        """
        return self._mesh.subgroup("pp", [sorted(ranks)])


def deal_layers(num_layers: int, num_stages: int, stage_size: StageSize | None = None) -> list[int]:
    """Deal layers out to stages: equal where they divide, else so that the largest stage is smallest.

    Among such the most even counts, then fewer layers at both ends, then fewer early: an early stage keeps the
    activations of more microbatches.

    Args:
        num_layers: layers in all, at least one for each stage.
        num_stages: stages in all.
        stage_size: what counts as large; None takes the number of layers.
    """
    if num_layers % num_stages == 0:
        return [num_layers // num_stages] * num_stages
    size = cache(stage_size or (lambda start, stop: stop - start))
    # The size of the largest stage, by where the stages so far stop, when it is as small as can be.
    largest = {0: 0}
    for stage in range(num_stages):
        stops = range(stage + 1, num_layers - (num_stages - stage - 1) + 1)
        largest = {
            stop: min(max(most, size(start, stop)) for start, most in largest.items() if start < stop)
            for stop in stops
        }
    limit = largest[num_layers]
    # For each number of layers, the best way to deal them to the stages so far: what is compared, counts last.
    ways: dict[int, tuple[int, int, tuple[int, ...]]] = {0: (0, 0, ())}
    for stage in range(num_stages):
        is_end = stage in (0, num_stages - 1)
        longer: dict[int, tuple[int, int, tuple[int, ...]]] = {}
        for start, (unevenness, at_ends, counts) in ways.items():
            for stop in range(start + 1, num_layers - (num_stages - stage - 1) + 1):
                if size(start, stop) > limit:
                    break
                count = stop - start
                way = (unevenness + count**2, at_ends + count * is_end, (*counts, count))
                longer[stop] = min(longer.get(stop, way), way)
        ways = longer
    return list(ways[num_layers][-1])


def layer_bounds(counts: Sequence[int]) -> list[int]:
    """The first layer of each stage, and the end of the last one: [2, 3] gives [0, 2, 5]."""
    return [0, *accumulate(counts)]


def layer_errors(
    num_layers: int,
    num_stages: int,
    num_layers_per_stage: Sequence[int] | None,
    stage_size: StageSize | None = None,
) -> list[str]:
    """All that is wrong with dealing out the layers; empty when it works."""
    if num_layers < num_stages:
        return [
            f"the model has {num_layers} layers and the pipeline {num_stages} stages, and each stage needs a layer: "
            f"use at most {num_layers} stages (pp_size times the stages of a rank)"
        ]
    if num_layers_per_stage is None:
        return []
    given = list(num_layers_per_stage)
    if len(given) == num_stages and sum(given) == num_layers and min(given) >= 1:
        return []
    return [
        f"num_layers_per_stage={given} must give each of {num_stages} stages at least one layer and "
        f"{num_layers} in all: {deal_layers(num_layers, num_stages, stage_size)} would"
    ]
