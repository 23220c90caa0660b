"""Assign layers to stages and stages to ranks."""

from collections.abc import Sequence
from functools import cache
from itertools import accumulate

import torch.distributed as dist

from ..cluster.mesh import ParallelMesh
from .stage_plan import StageSize


class PipelineStageManager:
    """The stages of this rank, and their layers.

    Args:
        mesh: the mesh; its axis pp has the stages.
        stage_ranks: the rank of every stage, as the schedule needs it; None assigns one stage to each rank, in order.
        num_layers_per_stage: layers of each stage; None assigns them by size, see `assign_layers`.

    Raises:
        ValueError: a rank of `stage_ranks` does not exist, or a rank has no stage.
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
        """This rank's coordinate on the axis pp, which is its stage if every rank has one stage."""
        return self.rank

    @property
    def num_stages(self) -> int:
        """The number of stages on all ranks."""
        return len(self.stage_ranks)

    @property
    def stages(self) -> tuple[int, ...]:
        """The stages of this rank, ascending."""
        return tuple(stage for stage, rank in enumerate(self.stage_ranks) if rank == self.rank)

    def is_first_stage(self, ignore_chunk: bool = False) -> bool:
        """Return True if this rank has the first stage, in any chunk: ColossalAI's `ignore_chunk` changes nothing."""
        return self.stage_ranks[0] == self.rank

    def is_last_stage(self, ignore_chunk: bool = False) -> bool:
        """Return True if this rank has the last stage, in any chunk; see `is_first_stage`."""
        return self.stage_ranks[-1] == self.rank

    def ranks_of(self, stages: Sequence[int]) -> list[int]:
        """Return the ranks that have any of these stages, each once, ascending."""
        return sorted({self.stage_ranks[stage] for stage in stages})

    def distribute_layers(
        self, num_layers: int, stage_size: StageSize | None = None, *, are_alike: bool = True
    ) -> list[int]:
        """Return the number of layers of each stage; arguments as of `assign_layers`."""
        return self.num_layers_per_stage or assign_layers(
            num_layers, self.num_stages, stage_size, are_alike=are_alike
        )

    def bounds(
        self, num_layers: int, stage_size: StageSize | None = None, *, are_alike: bool = True
    ) -> list[int]:
        """Return the first layer of each stage, and the end of the last one; arguments as of `assign_layers`."""
        return layer_bounds(self.distribute_layers(num_layers, stage_size, are_alike=are_alike))

    def get_stage_index(self, layers_per_stage: Sequence[int], stage: int | None = None) -> tuple[int, int]:
        """Return the layers (first, stop) of a stage, by default of this rank's first stage; ColossalAI's name."""
        bounds = layer_bounds(layers_per_stage)
        index = self.stages[0] if stage is None else stage
        return bounds[index], bounds[index + 1]

    def tie_group(self, ranks: Sequence[int]) -> dist.ProcessGroup | None:
        """Return the group of these pipeline ranks, which share a parameter; None if this rank is not one of them.

        Collective over the world.
        """
        return self._mesh.subgroup("pp", [sorted(ranks)])


def assign_layers(
    num_layers: int, num_stages: int, stage_size: StageSize | None = None, *, are_alike: bool = True
) -> list[int]:
    """Assign layers to stages: equal counts if they divide, else so that the largest stage is as small as possible.

    Of several solutions it takes the most even counts, then fewer layers on the first and last stage, then fewer on
    early stages: an early stage keeps the activations of more microbatches.

    Args:
        num_layers: total number of layers, at least one for each stage.
        num_stages: total number of stages.
        stage_size: size of a stage by its layers; None counts layers.
        are_alike: False for layers of different sizes, whose counts are not equal even if they divide.

    Returns:
        The number of layers of each stage.
    """
    if are_alike and num_layers % num_stages == 0:
        return [num_layers // num_stages] * num_stages
    size = cache(stage_size or (lambda start, stop: stop - start))
    limit = _least_largest_stage(num_layers, num_stages, size)
    # By the number of layers of the previous stages: the best assignment, as (unevenness, layers at the ends, counts).
    best: dict[int, tuple[int, int, tuple[int, ...]]] = {0: (0, 0, ())}
    for stage in range(num_stages):
        is_end = stage in (0, num_stages - 1)
        extended: dict[int, tuple[int, int, tuple[int, ...]]] = {}
        for start, (unevenness, at_ends, counts) in best.items():
            for stop in range(start + 1, num_layers - (num_stages - stage - 1) + 1):
                if size(start, stop) > limit:
                    break
                count = stop - start
                assignment = (unevenness + count**2, at_ends + count * is_end, (*counts, count))
                extended[stop] = min(extended.get(stop, assignment), assignment)
        best = extended
    return list(best[num_layers][-1])


def _least_largest_stage(num_layers: int, num_stages: int, size: StageSize) -> int:
    """Return the size of the largest stage in an assignment of layers that makes it as small as possible."""
    # By the number of layers that are assigned so far: the smallest possible size of the largest stage.
    best_by_stop = {0: 0}
    for stage in range(num_stages):
        stops = range(stage + 1, num_layers - (num_stages - stage - 1) + 1)
        best_by_stop = {
            stop: min(max(best, size(start, stop)) for start, best in best_by_stop.items() if start < stop)
            for stop in stops
        }
    return best_by_stop[num_layers]


def layer_bounds(counts: Sequence[int]) -> list[int]:
    """Return the first layer of each stage, and the end of the last one: [2, 3] gives [0, 2, 5]."""
    return [0, *accumulate(counts)]


def layer_errors(
    num_layers: int,
    num_stages: int,
    num_layers_per_stage: Sequence[int] | None,
    stage_size: StageSize | None = None,
) -> list[str]:
    """Return the errors of an assignment of layers to stages; empty if there are none.

    Args:
        num_layers: of the model.
        num_stages: on all ranks.
        num_layers_per_stage: the user's assignment; None for none.
        stage_size: to suggest another one, see `assign_layers`.
    """
    if num_layers < num_stages:
        return [
            f"the model has {num_layers} layers and the pipeline {num_stages} stages, and each stage needs a layer: "
            f"use at most {num_layers} stages (pp_size times the stages of a rank)"
        ]
    if num_layers_per_stage is None:
        return []
    counts = list(num_layers_per_stage)
    if len(counts) == num_stages and sum(counts) == num_layers and min(counts) >= 1:
        return []
    return [
        f"num_layers_per_stage={counts} must give each of {num_stages} stages at least one layer and {num_layers} in "
        f"all: use {assign_layers(num_layers, num_stages, stage_size)}, for example"
    ]
