"""The layout of ranks: the sizes of all axes and one rank's place, a value that needs no process group.

A new axis is a field of `MeshLayout` and a name in one of the tables below.
"""

from collections.abc import Iterator
from dataclasses import dataclass, fields, replace
from itertools import product
from math import prod

from .errors import raise_errors
from .launch import torchrun_command

# The primary axes, outermost first: their sizes multiply to the number of ranks.
AXES = ("pp", "dp", "sp", "tp")
# Several primary axes taken as one. Over "data", gradients of the same parameters are reduced. The ranks
# of "stage" have all parameters of a pipeline stage together.
JOINED = {"data": ("dp", "sp"), "stage": ("dp", "sp", "tp")}
# Sub-axes: neighboring ranks of "data". A parameter placed on one is replicated over the rest of "data".
SUB_AXES = ("wp", "ep")
# Those over which backward leaves the sum of a parameter's gradients; over the others it leaves their mean.
SUMMED = ("ep",)
# Axes whose ranks compute the same samples together. Over them every parameter of a sharded model has a placement.
LAYER_AXES = ("tp",)


@dataclass(frozen=True, kw_only=True)
class MeshLayout:
    """All ranks arranged as pp × dp × sp × tp, tp innermost, as one of them sees it.

    Equal on all ranks but for `rank`. An axis is named by its field, by "data" for dp and sp together, or by several
    names, of which the last is innermost. A sub-axis is named alone.

    Args:
        pp, dp, sp, tp: sizes of the pipeline, data, sequence and tensor axes.
        wp: number of neighbors on "data" over which the weights of linear layers are sharded.
        ep: number of neighbors on "data" over which experts are distributed.
        zero: number of neighbors on "data" over which ZeRO shards; -1 or 0 is all of them.
        rank: a global rank.
    """

    pp: int = 1
    dp: int = 1
    sp: int = 1
    tp: int = 1
    wp: int = 1
    ep: int = 1
    zero: int = -1
    rank: int = 0

    @staticmethod
    def of(world_size: int, rank: int = 0, *, dp: int | None = None, **sizes: int) -> "MeshLayout":
        """Return the layout of `world_size` ranks; `dp` None takes all ranks that the other axes leave.

        Raises:
            ValueError: the sizes do not fit, with all errors.
        """
        raise_errors(layout_errors(world_size, dp=dp, **sizes))
        layout = MeshLayout(**sizes, rank=rank)  # dp=1: its world_size is the product of the other axes
        return replace(layout, dp=world_size // layout.world_size)

    @property
    def sizes(self) -> dict[str, int]:
        """The size of every axis, as the arguments of `MeshLayout`."""
        return {field.name: getattr(self, field.name) for field in fields(self) if field.name != "rank"}

    @property
    def world_size(self) -> int:
        """The number of ranks."""
        return self.size(*AXES)

    def at(self, rank: int) -> "MeshLayout":
        """Return the same layout as another rank sees it."""
        return replace(self, rank=rank)

    def all_ranks(self) -> Iterator["MeshLayout"]:
        """Yield the layout as every rank sees it, in their order."""
        return map(self.at, range(self.world_size))

    def size(self, *axes: str) -> int:
        """Return the number of ranks along these axes together."""
        return prod(getattr(self, axis) for axis in _primary(axes))

    def coordinate(self, *axes: str) -> int:
        """Return the rank's place along these axes together, from 0."""
        if axes[0] in SUB_AXES:  # it is named alone
            return self.coordinate("data") % self.size(*axes)
        place = 0
        for axis in _primary(axes):
            place = place * self.size(axis) + self.rank // self._stride(axis) % self.size(axis)
        return place

    def line(self, *axes: str) -> tuple[int, ...]:
        """Return the global ranks that differ from this one along these axes only, by their coordinates."""
        if axes[0] in SUB_AXES:
            first = self.coordinate("data") - self.coordinate(*axes)
            return self.line("data")[first : first + self.size(*axes)]
        names = _primary(axes)
        start = self.rank - sum(self.coordinate(axis) * self._stride(axis) for axis in names)
        offsets = ([place * self._stride(axis) for place in range(self.size(axis))] for axis in names)
        return tuple(start + sum(offset_by_axis) for offset_by_axis in product(*offsets))

    def lines(self, *axes: str) -> list[tuple[int, ...]]:
        """Return the lines of all ranks, every line once, by their first ranks."""
        return [layout.line(*axes) for layout in self.all_ranks() if layout.coordinate(*axes) == 0]

    def _stride(self, axis: str) -> int:
        """Return the difference between the ranks of neighbors along a primary axis."""
        return self.size(*AXES[AXES.index(axis) + 1 :])


def layout_errors(world_size: int, *, dp: int | None = None, **sizes: int) -> list[str]:
    """List errors of the sizes of a layout, each with sizes that would work; empty if they fit."""
    layout = MeshLayout(**sizes, dp=1 if dp is None else dp)
    if errors := [
        f"{axis}_size={size} must be at least 1"
        for axis, size in layout.sizes.items()
        if size < 1 and axis != "zero"
    ]:
        return errors
    tp, pp, sp = layout.tp, layout.pp, layout.sp
    replica_size, wanted = layout.size("pp", "sp", "tp"), layout.world_size
    if world_size == 1 and wanted > 1:
        return [
            f"tp_size={tp} * pp_size={pp} * sp_size={sp} * dp_size={layout.dp} = {wanted} needs {wanted} processes, "
            f"and this is the only one: start it by `{torchrun_command(wanted)}`"
        ]
    if dp is None and world_size % replica_size:
        return [
            f"tp_size={tp} * pp_size={pp} * sp_size={sp} = {replica_size} does not divide the world size "
            f"{world_size}: start a multiple of {replica_size} processes, or use sizes whose product is one of "
            f"{divisors(world_size)}"
        ]
    if dp is not None and wanted != world_size:
        divides = world_size % replica_size == 0
        fitting = (
            f"dp_size={world_size // replica_size}" if divides else f"sizes whose product is {world_size}"
        )
        return [
            f"tp_size={tp} * pp_size={pp} * sp_size={sp} * dp_size={dp} = {wanted} is not the world size "
            f"{world_size}: start {wanted} processes, or use {fitting}"
        ]
    data_size = world_size // layout.size("pp", "tp")
    errors = [
        f"{axis}_size={size} does not divide the {data_size} ranks whose gradients are averaged (dp_size * sp_size): "
        f"use one of {axis}_size={divisors(data_size)}"
        for axis in SUB_AXES
        if data_size % (size := layout.size(axis))
    ]
    if layout.zero < -1 or (layout.zero > 0 and data_size % layout.zero):
        errors.append(
            f"zero_size={layout.zero} must divide the {data_size} data-parallel ranks: use one of "
            f"{', '.join(map(str, divisors(data_size)))}, or -1 for all of them"
        )
    if layout.wp > 1 and tp > 1:
        errors.append(
            f"wp_size={layout.wp} does not combine with tp_size={tp}: use tp_size=1, and sp_size with "
            "sequence_parallelism_mode='all_to_all' where activations are too large"
        )
    return errors


def divisors(number: int) -> list[int]:
    """All divisors of `number`, ascending, for error messages."""
    return [candidate for candidate in range(1, number + 1) if number % candidate == 0]


def _primary(axes: tuple[str, ...]) -> list[str]:
    """Return the axes, each joined axis replaced by its primary axes (`JOINED`)."""
    return [primary for axis in axes for primary in JOINED.get(axis, (axis,))]
