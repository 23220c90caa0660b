"""A pipeline that was asked for, as data. Measuring it is measure.py, drawing it timeline.py."""

from dataclasses import dataclass

from ..pipeline.schedules import build_schedule, stage_placement, style_errors
from ..pipeline.simulate import Costs, Timeline, simulate

LAYERS_PER_STAGE = 2  # of the model that is measured, where nothing is said


@dataclass(frozen=True, kw_only=True)
class Pipeline:
    """A schedule and its sizes.

    Args:
        style: a name of the pipeline's schedules.
        num_ranks: pipeline ranks.
        num_microbatches: of one step.
        num_chunks: stages per rank; 1 also where the style makes another number of its own.
    """

    style: str
    num_ranks: int
    num_microbatches: int
    num_chunks: int = 1

    def faults(self) -> list[str]:
        """All that is wrong with it, each with what would work."""
        sizes = {"pp": self.num_ranks, "microbatches": self.num_microbatches}
        found = [f"{name}={size} must be at least 1" for name, size in sizes.items() if size < 1]
        return found + style_errors(self.style, self.num_chunks, self.num_ranks)

    @property
    def num_stages(self) -> int:
        """Stages of the whole pipeline."""
        return len(stage_placement(self.style, self.num_ranks, self.num_chunks))

    @property
    def stages_per_rank(self) -> int:
        """How many of them each rank holds."""
        return self.num_stages // self.num_ranks

    def simulate(self, stage_costs: Costs) -> Timeline:
        """Its timeline.

        Args:
            stage_costs: of one microbatch through one stage.
        """
        schedule = build_schedule(self.style, self.num_ranks, self.num_microbatches, self.num_chunks)
        return simulate(schedule, stage_costs)

    def __str__(self) -> str:
        chunks = f" × {self.stages_per_rank} chunks" if self.stages_per_rank > 1 else ""
        return f"{self.style}, {self.num_ranks} ranks{chunks}, {self.num_microbatches} microbatches"
