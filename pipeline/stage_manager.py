"""This rank's place in the pipeline. What runs there is cut.py and runner.py."""

from collections.abc import Sequence

import torch.distributed as dist

from ..cluster.mesh import ParallelMesh
from .plan import layer_bounds, spread_layers


class PipelineStageManager:
    """Which stage this rank holds, of how many, and which layers.

    Args:
        mesh: the mesh whose axis pp the stages lie along.
        num_layers_per_stage: how many layers each stage gets; None spreads them evenly.
    """

    def __init__(self, mesh: ParallelMesh, num_layers_per_stage: Sequence[int] | None = None) -> None:
        self._mesh = mesh
        self.num_layers_per_stage = None if num_layers_per_stage is None else list(num_layers_per_stage)

    @property
    def stage(self) -> int:
        """This rank's stage, from 0."""
        return self._mesh.rank("pp")

    @property
    def num_stages(self) -> int:
        """How many stages there are."""
        return self._mesh.size("pp")

    def is_first_stage(self, ignore_chunk: bool = False) -> bool:
        """Whether this rank embeds. A rank holds one chunk, so `ignore_chunk` changes nothing."""
        return self.stage == 0

    def is_last_stage(self, ignore_chunk: bool = False) -> bool:
        """Whether this rank has the outputs and the loss. A rank holds one chunk, so `ignore_chunk` changes nothing."""
        return self.stage == self.num_stages - 1

    def distribute_layers(self, num_layers: int) -> list[int]:
        """How many layers each stage gets."""
        return self.num_layers_per_stage or spread_layers(num_layers, self.num_stages)

    def bounds(self, num_layers: int) -> list[int]:
        """Where each stage's layers begin and the last one's stop."""
        return layer_bounds(self.distribute_layers(num_layers))

    def get_stage_index(self, layers_per_stage: Sequence[int], stage: int | None = None) -> tuple[int, int]:
        """The first layer of a stage (this rank's by default) and the one after its last."""
        bounds = layer_bounds(layers_per_stage)
        own = self.stage if stage is None else stage
        return bounds[own], bounds[own + 1]

    def tie_group(self, stages: Sequence[int]) -> dist.ProcessGroup | None:
        """The group of the stages that share a parameter, None where this rank is not one. Collective."""
        return self._mesh.subgroup("pp", [sorted(stages)])
