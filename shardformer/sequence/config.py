"""Settings of sequence parallelism, and the process groups that they need."""

from dataclasses import dataclass
from typing import Any

import torch.distributed as dist

from ...cluster.mesh import ParallelMesh
from ...cluster.ring import Rings

# On the tensor axis: sequences are full inside regions, where heads and features are sharded, and sharded between
# regions. "ring" is ColossalAI's name for "split_gather" with collectives in steps: the same numbers and bytes.
TENSOR_MODES = ("split_gather", "ring")
# On the sequence axis: sharded throughout the layer, with attention over the full sequence.
SEQUENCE_MODES = ("all_to_all", "ring_attn")
MODES = (*TENSOR_MODES, *SEQUENCE_MODES)
_NAMES = ", ".join(map(repr, MODES))
_TURNED_OFF = "without enable_sequence_parallelism=True, which turns it on: give both, or none"


@dataclass(frozen=True, kw_only=True)
class SequenceParallelism:
    """Settings of sequence parallelism.

    Args:
        mode: "split_gather" (arXiv:2205.05198), or "ring", another name of it, on the tensor axis; "all_to_all"
            (arXiv:2309.14509) and "ring_attn" (arXiv:2310.01889) on the sequence axis. None shards nothing.
        regathers: on the tensor axis, save only the local shard for backward and gather it again there.
        overlaps: overlap the gather in backward with computation.
        inner_ring_size: for "ring_attn": ranks of the inner of two rings; None is one ring.
        misuse: error of the switch or the mode, as `from_options` finds it.
    """

    mode: str | None = None
    regathers: bool = False
    overlaps: bool = False
    inner_ring_size: int | None = None
    misuse: str = ""

    @staticmethod
    def from_options(
        *, enable: bool, mode: str | None, sp_size: int | None, **settings: Any
    ) -> "SequenceParallelism":
        """Return the settings for the options of a plugin or ShardConfig; errors are in `misuse`, see `errors`.

        Args:
            enable: enable_sequence_parallelism; False shards nothing.
            mode: sequence_parallelism_mode; None is "all_to_all" if there is a sequence axis, else "split_gather".
            sp_size: size of the sequence axis; None or 1 if there is none.
            settings: further fields.
        """
        if not isinstance(enable, bool):
            misuse = f"enable_sequence_parallelism={enable!r} must be True or False"
            return SequenceParallelism(misuse=misuse, **settings)
        if not enable:
            misuse = "" if mode in (None, *MODES) else f"{_option(mode)} must be one of {_NAMES}"
            return SequenceParallelism(misuse=misuse, **settings)
        default_mode = "split_gather" if sp_size in (None, 1) else "all_to_all"
        return SequenceParallelism(mode=default_mode if mode is None else mode, **settings)

    def sequence_axis_size(self, *, sp_size: int | None, tp_size: int) -> int:
        """Return the size of the sequence axis: 1 for modes of the tensor axis, where `sp_size` may repeat its size."""
        return 1 if sp_size is None or (self.is_on_tensor_axis and sp_size == tp_size) else sp_size

    @property
    def is_on_tensor_axis(self) -> bool:
        """True if sequences are sharded over the tensor axis."""
        return self.mode in TENSOR_MODES

    @property
    def is_on_sequence_axis(self) -> bool:
        """True if sequences are sharded over a separate sequence axis."""
        return self.mode in SEQUENCE_MODES

    def errors(self, *, tp_size: int, sp_size: int) -> list[str]:
        """List errors of the settings for axes of these sizes, each with advice."""
        if self.misuse:
            return [self.misuse]
        switches = {"enable_sequence_overlap": self.overlaps, "enable_sequence_regather": self.regathers}
        inner = self.inner_ring_size
        if self.mode is None:
            options = {"sp_size": sp_size if sp_size != 1 else None, **switches, "inner_ring_size": inner}
            return [
                f"{name}={value!r} {_TURNED_OFF}"
                for name, value in options.items()
                if value not in (None, False)
            ]
        option = _option(self.mode)
        if self.mode not in MODES:
            return [f"{option} must be one of {_NAMES}"]
        is_number = isinstance(inner, int) and not isinstance(inner, bool) and inner >= 1
        is_tensor, is_ring = self.is_on_tensor_axis, self.mode == "ring_attn"
        rows = [
            (
                is_tensor and tp_size == 1,
                f"{option} shards sequences over the tensor axis, and tp_size is 1: use 2 or more, or another mode",
            ),
            (
                is_tensor and sp_size != 1,
                f"sp_size={sp_size} with {option}: leave sp_size out, it is tp_size={tp_size}",
            ),
            (not is_tensor and sp_size == 1, f"{option} shards sequences over sp_size ranks: use 2 or more"),
            (
                inner is not None and not is_ring,
                f"inner_ring_size={inner!r} is for sequence_parallelism_mode='ring_attn', not {self.mode!r}",
            ),
            (
                inner is not None and is_ring and not (is_number and sp_size % inner == 0),
                f"inner_ring_size={inner!r} must be an integer that divides sp_size={sp_size}, for example "
                "the number of ranks of a node",
            ),
        ]
        for name, value in switches.items():
            rows += [
                (not isinstance(value, bool), f"{name}={value!r} must be True or False"),
                (
                    bool(value) and not is_tensor,
                    f"{name}=True with {option}, which gathers no sequences: leave it out",
                ),
            ]
        return [error for holds, error in rows if holds]


def _option(mode: object) -> str:
    return f"sequence_parallelism_mode={mode!r}"


UNSHARDED = SequenceParallelism()


@dataclass(frozen=True, kw_only=True)
class SequenceSplit:
    """Sharding of a model's sequences: the settings and the ranks.

    Args:
        settings: the requested mode and options.
        group: the ranks over which sequences are sharded.
        tp_size: number of ranks over which heads are sharded.
        rings: for "ring_attn": the rings of a double ring.
    """

    settings: SequenceParallelism
    group: dist.ProcessGroup
    tp_size: int = 1
    rings: Rings | None = None


def double_ring(mesh: ParallelMesh, inner_ring_size: int | None) -> Rings | None:
    """Return the sp axis as a double ring (see cluster/ring.py); None for a single ring. Collective over the world.

    Args:
        mesh: the mesh of the axis.
        inner_ring_size: number of neighbouring ranks in an inner ring; divides the axis. None is a single ring.
    """
    size = mesh.size("sp")
    if inner_ring_size in (None, 1, size):
        return None
    assert inner_ring_size is not None
    if size % inner_ring_size:
        raise AssertionError(f"inner_ring_size={inner_ring_size} does not divide {size} ranks")
    neighbours = [range(first, first + inner_ring_size) for first in range(0, size, inner_ring_size)]
    inner = mesh.subgroup("sp", neighbours)
    outer = mesh.subgroup("sp", [range(first, size, inner_ring_size) for first in range(inner_ring_size)])
    assert inner is not None and outer is not None
    return outer, inner
