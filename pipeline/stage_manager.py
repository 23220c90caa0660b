"""This rank's place in the pipeline. What runs there is cut.py and runner.py."""

from collections.abc import Sequence

import torch.distributed as dist

from ..cluster.mesh import ParallelMesh
from .plan import layer_bounds, spread_layers


class PipelineStageManager:
    """Which stages this rank holds, of how many, and which layers.

    Args:
        mesh: the mesh whose axis pp the stages lie along.
        placement: the rank of every stage; None gives each rank one, in order. A schedule says which it needs.
        num_layers_per_stage: how many layers each stage gets; None deals them out.

    Raises:
        ValueError: a rank of the placement does not exist, or one has no stage.
    """

    def __init__(
        self,
        mesh: ParallelMesh,
        placement: Sequence[int] | None = None,
        num_layers_per_stage: Sequence[int] | None = None,
    ) -> None:
        self._mesh = mesh
        self.placement = tuple(range(self.num_ranks) if placement is None else placement)
        if set(self.placement) != set(range(self.num_ranks)):
            raise ValueError(
                f"placement={self.placement} must name each of the {self.num_ranks} pipeline ranks, 0 to "
                f"{self.num_ranks - 1}, at least once and no other: use pp_size={len(set(self.placement))} or another "
                "placement"
            )
        self.num_layers_per_stage = None if num_layers_per_stage is None else list(num_layers_per_stage)

    @property
    def rank(self) -> int:
        """This rank's coordinate on the axis pp."""
        return self._mesh.rank("pp")

    @property
    def num_ranks(self) -> int:
        """How many ranks the axis pp has."""
        return self._mesh.size("pp")

    @property
    def stage(self) -> int:
        """This rank's coordinate on the axis pp, which is its stage where ranks hold one each."""
        return self.rank

    @property
    def num_stages(self) -> int:
        """How many stages there are on all ranks together."""
        return len(self.placement)

    @property
    def stages(self) -> tuple[int, ...]:
        """The stages that this rank holds, ascending."""
        return tuple(stage for stage, rank in enumerate(self.placement) if rank == self.rank)

    def is_first_stage(self, ignore_chunk: bool = False) -> bool:
        """Whether this rank embeds. It is asked of the rank and not of a chunk, so `ignore_chunk` changes nothing."""
        return self.placement[0] == self.rank

    def is_last_stage(self, ignore_chunk: bool = False) -> bool:
        """Whether this rank has the outputs and the loss; `ignore_chunk` changes nothing."""
        return self.placement[-1] == self.rank

    def ranks_of(self, stages: Sequence[int]) -> list[int]:
        """The ranks that hold any of these stages, each once, ascending."""
        return sorted({self.placement[stage] for stage in stages})

    def distribute_layers(self, num_layers: int) -> list[int]:
        """How many layers each stage gets."""
        return self.num_layers_per_stage or spread_layers(num_layers, self.num_stages)

    def bounds(self, num_layers: int) -> list[int]:
        """Where each stage's layers begin and the last one's stop."""
        return layer_bounds(self.distribute_layers(num_layers))

    def get_stage_index(self, layers_per_stage: Sequence[int], stage: int | None = None) -> tuple[int, int]:
        """The first layer of a stage (this rank's first by default) and the one after its last."""
        bounds = layer_bounds(layers_per_stage)
        own = self.stages[0] if stage is None else stage
        return bounds[own], bounds[own + 1]

    def tie_group(self, ranks: Sequence[int]) -> dist.ProcessGroup | None:
        """The group of these ranks of the axis, which share a parameter; None where this one is not among them.

        Collective over the world.
        """
        return self._mesh.subgroup("pp", [sorted(ranks)])
