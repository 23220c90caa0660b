"""A rank's part of a model: its tensors as boxes of global tensors, and the names of the full model's tensors."""

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import NamedTuple

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from torch.distributed.tensor._utils import compute_local_shape_and_global_offset

from ..cluster.box import Box, flat_boxes, global_shape, overlaps
from ..cluster.forward_random import ForwardRandom
from ..cluster.placement import PlacedShard
from .background import Keep

# Name components that peft inserts into the names of a wrapped model's own tensors.
_WRAPPED = (".base_layer.", ".original_module.")


class LocalBox(NamedTuple):
    """A box of a global tensor, and this rank's memory of it: a view of the box's size."""

    box: Box
    local: Tensor


@dataclass(frozen=True, kw_only=True)
class LocalTensor:
    """The local part of a tensor, without padding.

    Args:
        name: the tensor's name, the same on every rank.
        shape: the global shape.
        dtype: the dtype of the memory.
        boxes: disjoint boxes; empty if the rank has only padding.
        may_save: True if this rank may save the boxes. Several ranks with equal boxes may; boxes that overlap
            otherwise must not both be saved.
    """

    name: str
    shape: tuple[int, ...]
    dtype: torch.dtype
    boxes: tuple[LocalBox, ...]
    may_save: bool = True

    @property
    def nbytes(self) -> int:
        """Size of the global tensor in bytes."""
        return Box.full(self.shape).numel * self.dtype.itemsize

    def kept(self, keep: Keep) -> "LocalTensor":
        """Return this tensor with its memory replaced by that of `keep`."""
        return replace(self, boxes=tuple(LocalBox(piece.box, keep(piece.local)) for piece in self.boxes))


def local_shard(name: str, shard: Tensor, shards: Sequence[PlacedShard] = ()) -> LocalTensor:
    """Return the local part of a tensor of which this rank has a full shard.

    Args:
        name: the tensor's name.
        shard: the shard, padding included.
        shards: the shardings of the tensor, outermost first; empty if it is replicated.
    """
    return _local(name, shard, [Box.full(shard.shape)], tuple(shard.shape), shards)


def local_piece(
    name: str,
    flat: Tensor,
    start: int,
    shard_shape: Iterable[int],
    shards: Sequence[PlacedShard] = (),
    *,
    may_save: bool = True,
) -> LocalTensor:
    """Return the local part of a tensor of whose shard this rank has a flat piece, as ZeRO divides it.

    Args:
        name: the tensor's name.
        flat: 1-D, the piece.
        start: offset of the piece in the flattened shard.
        shard_shape: shape of the full shard, padding included.
        shards: see `local_shard`.
        may_save: see `LocalTensor`.
    """
    shape = tuple(shard_shape)
    boxes = list(flat_boxes(start, start + flat.numel(), shape))
    return _local(name, flat, boxes, shape, shards, may_save)


def local_dtensor(name: str, tensor: DTensor) -> LocalTensor:
    """Return the local part of a tensor that torch shards by rows. Every rank with rows may save them."""
    local = tensor.to_local()
    size, offset = compute_local_shape_and_global_offset(tensor.shape, tensor.device_mesh, tensor.placements)
    box = Box(tuple(offset), tuple(size))
    if tuple(local.shape) != box.size:
        raise AssertionError(f"{name} has {tuple(local.shape)} here, and torch says {box}")
    boxes = (LocalBox(box, local.detach()),) if box.numel else ()
    return LocalTensor(name=name, shape=tuple(tensor.shape), dtype=tensor.dtype, boxes=boxes)


def _local(
    name: str,
    memory: Tensor,
    boxes: list[Box],
    shard_shape: tuple[int, ...],
    shards: Sequence[PlacedShard],
    may_save: bool = True,
) -> LocalTensor:
    """Return a `LocalTensor` from boxes of a shard that are consecutive in memory.

    `overlaps` leaves padding out; it returns the place of a box's remaining pieces in the full tensor and in the shard.
    """
    memory = memory.detach()
    is_one_box = len(boxes) == 1 and tuple(memory.shape) == boxes[0].size
    local_boxes: list[LocalBox] = []
    start = 0
    for box in boxes:
        entries = memory if is_one_box else memory.view(-1)[start : start + box.numel].view(box.size)
        local_boxes += [LocalBox(cut.full, entries[cut.shard.within(box)]) for cut in overlaps(box, shards)]
        start += box.numel
    return LocalTensor(
        name=name,
        shape=global_shape(shard_shape, shards),
        dtype=memory.dtype,
        boxes=tuple(local_boxes),
        may_save=may_save,
    )


class TensorNames(NamedTuple):
    """The names of a full model's parameters and persistent buffers.

    Args:
        needed: one name for each tensor (its first name), in the model's order.
        first: the first name of the tensor, by every name. A tied tensor has several names. A tensor that peft wrapped
            has its original name too.
    """

    needed: tuple[str, ...]
    first: Mapping[str, str]

    @staticmethod
    def of(model: nn.Module) -> "TensorNames":
        """Return the names of a full model, before it is cut into stages; also those from before peft wrapped it."""
        name_of: dict[int, str] = {}  # by id of the tensor: the first of its names
        first = {name: name_of.setdefault(id(tensor), name) for name, tensor in local_tensors(model).items()}
        unwrapped = {_unwrapped(name): first_name for name, first_name in first.items()}
        return TensorNames(needed=tuple(name_of.values()), first={**unwrapped, **first})

    def of_model(self) -> dict[str, str]:
        """Return for each needed name the original one, without the components that peft inserts."""
        originals = {name: _unwrapped(name) for name in self.needed}
        # A tensor keeps peft's name where another tensor has its original one.
        return {
            name: name if self.first[original] != name else original for name, original in originals.items()
        }


def saved_state(model: nn.Module) -> dict[str, Tensor]:
    """Return the parameters and persistent buffers of a model, or of a rank's part of it, by name.

    Raises:
        ValueError: modules have an extra state, which would not be restored.
    """
    extra = [
        f"{path}._extra_state"
        for path, module in model.named_modules()
        if type(module).get_extra_state is not nn.Module.get_extra_state
    ]
    if extra:
        raise ValueError(
            f"{', '.join(extra)} cannot be saved or loaded: a model's files contain only parameters and buffers. Make "
            "a buffer of what get_extra_state returns, or keep it in `user` of save_checkpoint"
        )
    return local_tensors(model)


def local_tensors(model: nn.Module) -> dict[str, Tensor]:
    """Return local parameters and persistent buffers by name, as `state_dict` does; also for a part of a model."""
    state: dict[str, Tensor] = {}
    for path, module in model.named_modules(remove_duplicate=False):
        tensors = {**module._parameters, **module._buffers}
        for name, tensor in tensors.items():
            if tensor is not None and name not in module._non_persistent_buffers_set:
                state[f"{path}.{name}".lstrip(".")] = tensor
    return state


def _unwrapped(name: str) -> str:
    for wrapped in _WRAPPED:
        name = name.replace(wrapped, ".")
    return name


@dataclass(frozen=True, kw_only=True)
class Adapter:
    """A LoRA adapter of a model, in the form that peft saves.

    Args:
        folder: its folder, relative to the one that the user gives; "" is that folder itself.
        names: the names of its tensors in the model, by their names in the file.
        write_config: writes its configuration into a folder.
    """

    folder: str
    names: Mapping[str, str]
    write_config: Callable[[Path], None]

    def local(self, tensors: Mapping[str, LocalTensor]) -> dict[str, LocalTensor]:
        """Return this rank's tensors of the adapter, by their names in the file."""
        return {key: replace(tensors[name], name=key) for key, name in self.names.items() if name in tensors}


@dataclass(frozen=True, kw_only=True)
class LocalModel:
    """A rank's part of a boosted model, for every plugin.

    Args:
        module: the transformers model, whose config is saved with it.
        names: the names of the full model's tensors.
        tensors: the local tensors, by their first names.
        loaded: called after the tensors were filled from files.
        adapters: the LoRA adapters of the model.
        random: the random numbers of its forwards; None for a model that `boost` has not made.
    """

    module: nn.Module
    names: TensorNames
    tensors: Mapping[str, LocalTensor]
    loaded: Callable[[], None]
    adapters: tuple[Adapter, ...] = ()
    random: ForwardRandom | None = None
