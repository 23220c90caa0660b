"""What the optimizer is told about a parameter. How its memory is laid out is bucket.py."""

from collections.abc import Hashable
from dataclasses import dataclass

from torch.distributed import ProcessGroup
from torch.nn import Parameter


@dataclass(frozen=True, kw_only=True)
class ManagedParameter:
    """A parameter of this rank's part of the model.

    Args:
        name: its Hugging Face name, the same under every layout.
        parameter: the parameter object; it keeps its identity.
        sum_groups: its gradient is partial over each of these groups and is summed there before anything
            else: ties across pipeline stages, copies of key-value heads, norms inside a tensor-parallel
            region. All ranks of a group list the parameters of that group in the same order, and all ranks
            that hold the parameter list its groups in the same order of axes.
        counts: whether this rank counts it in the gradient norm; False on all but one of the ranks that hold
            the same gradient along the tensor, sequence and pipeline axes. Copies along the data axis are
            the optimizer's own matter.
        unit: what it gets its gradients together with, a pipeline stage for example: a backward that gives them
            to some parameters of a unit gives them to all of it. Buckets do not span units.
        stride: every how-manieth rank of the data axis holds the same entries. Above 1 for a weight that so many
            neighbours share out: its gradient comes as the mean over them already.
    """

    name: str
    parameter: Parameter
    sum_groups: tuple[ProcessGroup, ...] = ()
    counts: bool = True
    unit: Hashable = None
    stride: int = 1

    @property
    def needs_sum(self) -> bool:
        """Whether its gradient is summed over other groups before it is averaged over the data axis."""
        return any(group.size() > 1 for group in self.sum_groups)
