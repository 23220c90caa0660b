"""The names of a model's parameters, taken before it is cut and split, and what became of each."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch.distributed as dist
from torch import Tensor, nn
from torch.nn import Parameter

from ..checkpoint.names import TensorNames
from ..cluster.mesh import ParallelMesh
from ..cluster.placement import Placement, Shard, Shared, is_counted, placement_of
from ..pipeline.stage_manager import PipelineStageManager
from ..zero.parameter import ManagedParameter


@dataclass(frozen=True)
class ParameterNames:
    """Every parameter of the whole model with its first Hugging Face name; a tied one has one name."""

    first: Mapping[Parameter, str]
    order: tuple[str, ...]
    state: TensorNames

    @staticmethod
    def of(model: nn.Module) -> "ParameterNames":
        """The names of a whole model."""
        first = {parameter: name for name, parameter in model.named_parameters()}
        return ParameterNames(first=first, order=tuple(first.values()), state=TensorNames.of(model))

    def held(self, model: nn.Module) -> dict[str, Parameter]:
        """The parameters that a cut model still holds, by their first name in the whole model, in its order."""
        held = {self.first[parameter]: parameter for parameter in model.parameters()}
        return {name: held[name] for name in self.order if name in held}


def managed_parameters(
    held: Mapping[str, Parameter],
    shared: list[dict[int, Tensor]],
    *,
    mesh: ParallelMesh,
    stage_manager: PipelineStageManager,
    stages: Mapping[int, Sequence[Parameter]],
) -> list[ManagedParameter]:
    """What the optimizer has to know of every parameter of this rank.

    Collective over the world: makes the groups of ranks whose stages share a parameter. Stages of one rank
    need none: their gradients meet in one tensor. Every rank of the world calls with an equal `shared`.

    Args:
        held: this rank's parameters by name.
        shared: the parameters that several stages hold, as `ShardFormer.optimize` returns them.
        mesh: the mesh.
        stage_manager: which rank holds which stage.
        stages: the parameters that one stage of this rank uses alone, by stage.
    """
    units = {parameter: stage for stage, parameters in stages.items() for parameter in parameters}
    ties: dict[Tensor, tuple[list[int], dist.ProcessGroup | None]] = {}
    for tie in shared:
        ranks = stage_manager.ranks_of(sorted(tie))
        tie_group = stage_manager.tie_group(ranks) if len(ranks) > 1 else None
        ties[next(iter(tie.values()))] = (ranks, tie_group)
    managed = []
    for name, parameter in held.items():
        ranks, tie_group = ties.get(parameter, ([stage_manager.rank], None))
        groups = [
            *_partial_groups(placement_of(parameter), mesh),
            *([] if tie_group is None else [tie_group]),
        ]
        counts = stage_manager.rank == ranks[0] and is_counted(parameter, mesh.rank("tp"))
        managed.append(
            ManagedParameter(
                name=name,
                parameter=parameter,
                sum_groups=tuple(groups),
                counts=counts,
                unit=units.get(parameter),
                stride=_stride(placement_of(parameter)),
            )
        )
    return managed


def _stride(placement: Placement | None) -> int:
    """Every how-manieth rank of the data axis holds the same of a parameter."""
    return placement.size if isinstance(placement, Shard) and placement.axis == "weight" else 1


def _partial_groups(placement: Placement | None, mesh: ParallelMesh) -> list[dist.ProcessGroup]:
    """The groups over which a parameter's gradient is in parts. Collective where copies form groups."""
    if isinstance(placement, Shared):
        return [mesh.group("tp")]
    if isinstance(placement, Shard) and placement.copies > 1:
        parts = [
            range(first, first + placement.copies) for first in range(0, placement.size, placement.copies)
        ]
        group = mesh.subgroup("tp", parts)
        assert group is not None
        return [group]
    return []
