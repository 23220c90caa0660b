"""A rank's part of a model: its tensors as boxes of whole ones, and the names of the whole model's tensors."""

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import NamedTuple

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from torch.distributed.tensor._utils import compute_local_shape_and_global_offset

from ..cluster.placement import Placement
from .background import Keep
from .box import Box, cuts_of, flat_boxes, whole_shape

# Parts of names that peft adds to the tensors of a wrapped model, beside adapters.
_WRAPPED = (".base_layer.", ".original_module.")


class Part(NamedTuple):
    """A box of a whole tensor, and this rank's memory of it, as a view of the box's size."""

    box: Box
    local: Tensor


@dataclass(frozen=True, kw_only=True)
class LocalTensor:
    """A rank's part of a tensor, without padding.

    Args:
        name: of the tensor, the same on every rank.
        shape: of the whole.
        dtype: of the memory.
        parts: disjoint boxes; none where the rank has nothing but padding.
        may_save: whether this rank may be the one that saves them. Several ranks with the same boxes may, but none
            whose boxes overlap with another's otherwise.
    """

    name: str
    shape: tuple[int, ...]
    dtype: torch.dtype
    parts: tuple[Part, ...]
    may_save: bool = True

    @property
    def nbytes(self) -> int:
        """Bytes of the whole."""
        return Box.whole(self.shape).numel * self.dtype.itemsize

    def kept(self, keep: Keep) -> "LocalTensor":
        """The same in the memory that a save writes from."""
        return replace(self, parts=tuple(Part(part.box, keep(part.local)) for part in self.parts))


def local_shard(
    name: str, shard: Tensor, placement: Placement | None, rank: int, *, may_save: bool = True
) -> LocalTensor:
    """A tensor of which this rank has a shard, all of it in one tensor.

    Args:
        shard: in the shape that the placement gives it, padding included.
        placement: how the whole is cut, None where it is not.
        rank: of the axis that it is cut over.
    """
    return _local(name, shard, [Box.whole(shard.shape)], tuple(shard.shape), placement, rank, may_save)


def local_piece(
    name: str,
    flat: Tensor,
    start: int,
    shard_shape: Iterable[int],
    placement: Placement | None,
    rank: int,
    *,
    may_save: bool = True,
) -> LocalTensor:
    """A tensor of whose shard this rank has a piece, as ZeRO divides it.

    Args:
        flat: 1-D, the piece.
        start: where it begins in the flattened shard.
        shard_shape: of the whole shard, padding included.
        placement, rank: as of `local_shard`.
    """
    shape = tuple(shard_shape)
    boxes = list(flat_boxes(start, start + flat.numel(), shape))
    return _local(name, flat, boxes, shape, placement, rank, may_save)


def local_dtensor(name: str, tensor: DTensor) -> LocalTensor:
    """A tensor that torch shards in rows. Every rank with a row may save it."""
    local = tensor.to_local()
    size, offset = compute_local_shape_and_global_offset(tensor.shape, tensor.device_mesh, tensor.placements)
    box = Box(tuple(offset), tuple(size))
    if tuple(local.shape) != box.size:
        raise AssertionError(f"{name} has {tuple(local.shape)} here, and torch says {box}")
    parts = (Part(box, local.detach()),) if box.numel else ()
    return LocalTensor(name=name, shape=tuple(tensor.shape), dtype=tensor.dtype, parts=parts)


def _local(
    name: str,
    memory: Tensor,
    boxes: list[Box],
    shard_shape: tuple[int, ...],
    placement: Placement | None,
    rank: int,
    may_save: bool,
) -> LocalTensor:
    """From boxes of a shard that lie end to end in memory."""
    memory, parts, start = memory.detach(), [], 0
    flat = None if len(boxes) == 1 and tuple(memory.shape) == boxes[0].size else memory.view(-1)
    for box in boxes:
        covering = memory if flat is None else flat[start : start + box.numel].view(box.size)
        parts += [Part(cut.whole, covering[cut.shard.within(box)]) for cut in cuts_of(box, placement, rank)]
        start += box.numel
    return LocalTensor(
        name=name,
        shape=whole_shape(shard_shape, placement),
        dtype=memory.dtype,
        parts=tuple(parts),
        may_save=may_save,
    )


class TensorNames(NamedTuple):
    """The names of a whole model's parameters and persistent buffers.

    Args:
        needed: one for each tensor, in the model's order.
        first: for every name the one of these under which its tensor is known. A tied tensor has several names, and so
            has one that peft wrapped: the model's own.
    """

    needed: tuple[str, ...]
    first: Mapping[str, str]

    @staticmethod
    def of(model: nn.Module) -> "TensorNames":
        """The names of a whole model, before it is cut."""
        known: dict[int, str] = {}
        first = {name: known.setdefault(id(tensor), name) for name, tensor in local_tensors(model).items()}
        own = {_unwrapped(name): each for name, each in first.items()}
        return TensorNames(needed=tuple(known.values()), first={**own, **first})

    def of_model(self) -> dict[str, str]:
        """For each needed name the one of the model that peft wrapped; the same where peft did not."""
        own = {name: _unwrapped(name) for name in self.needed}
        return {name: each if self.first[each] == name else name for name, each in own.items()}


def saved_state(model: nn.Module) -> dict[str, Tensor]:
    """The parameters and persistent buffers of a model, or of a rank's part of it, by name.

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
            f"{', '.join(extra)} cannot be saved or loaded: a model's files hold parameters and buffers alone. Make a "
            "buffer of what get_extra_state returns, or keep it in `user` of save_checkpoint"
        )
    return local_tensors(model)


def local_tensors(model: nn.Module) -> dict[str, Tensor]:
    """Local parameters and persistent buffers of a model by name: `state_dict`, also of a part of a model."""
    state: dict[str, Tensor] = {}
    for path, module in model.named_modules(remove_duplicate=False):
        buffers = (
            item for item in module._buffers.items() if item[0] not in module._non_persistent_buffers_set
        )
        own = [*module._parameters.items(), *buffers]
        state |= {f"{path}.{name}".lstrip("."): each for name, each in own if each is not None}
    return state


def _unwrapped(name: str) -> str:
    for wrapped in _WRAPPED:
        name = name.replace(wrapped, ".")
    return name


@dataclass(frozen=True, kw_only=True)
class Adapter:
    """One LoRA adapter of a model, as peft saves it.

    Args:
        folder: where it is saved, seen from the folder that is given; "" is that one.
        names: of its tensors in the model, by those in the file.
        write_config: writes its configuration into a folder.
    """

    folder: str
    names: Mapping[str, str]
    write_config: Callable[[Path], None]

    def local(self, tensors: Mapping[str, LocalTensor]) -> dict[str, LocalTensor]:
        """This rank's tensors of it, by the names in the file."""
        return {key: replace(tensors[name], name=key) for key, name in self.names.items() if name in tensors}


@dataclass(frozen=True, kw_only=True)
class LocalModel:
    """A rank's part of a boosted model, whichever plugin boosted it.

    Args:
        module: the transformers model, whose config is saved with it.
        names: of the whole model.
        tensors: by their first names.
        loaded: called once they were written to.
        adapters: the LoRA adapters among them.
    """

    module: nn.Module
    names: TensorNames
    tensors: Mapping[str, LocalTensor]
    loaded: Callable[[], None]
    adapters: tuple[Adapter, ...] = ()
