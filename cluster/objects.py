"""Broadcast of objects: their structure is pickled, and their tensors are sent as tensors."""

import io
import pickle
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from .device import backend_of, default_device

_CPU = torch.device("cpu")
# The first message has this fixed length, and begins with the length of the description. That of a model's outputs
# fits; the rest of a longer one (a cache of many layers) is a second message.
_FIRST = 2048
_LENGTH = 8


def broadcast_object(
    value: Any, root: int, group: dist.ProcessGroup | None, device: torch.device = _CPU
) -> Any:
    """Broadcast an object and return it on all ranks of the group; the root returns its own.

    One message describes it, or two if the description is long. Then each of its tensors is one message, also those in
    attributes of its objects, such as a cache. Descriptions are sent between CPUs and wait for no device, unless the
    group has no backend for CPUs.

    Args:
        value: the object on the root; ignored on the other ranks. All but its tensors is pickled.
        root: rank within the group.
        group: every rank of it must call; None is the world.
        device: where the tensors arrive.
    """
    if dist.get_world_size(group) == 1:
        return value
    if dist.get_rank(group) != root:
        specs, structure = pickle.loads(_broadcast_bytes(b"", root, group))
        tensors = [torch.empty(shape, dtype=dtype, device=device) for shape, dtype in specs]
        arrived = _broadcast_tensors(tensors, root, group)
        return _Unpickler(structure, [tensor.to(device) for tensor in arrived]).load()
    pickler = _Pickler()
    structure = pickler.structure(value)
    specs = [(tensor.shape, tensor.dtype) for tensor in pickler.tensors]
    _broadcast_bytes(pickle.dumps((specs, structure)), root, group)
    _broadcast_tensors([tensor.detach().to(device) for tensor in pickler.tensors], root, group)
    return value


class _Pickler(pickle.Pickler):
    """Pickles an object, with numbers in the place of its tensors."""

    def __init__(self) -> None:
        self._file = io.BytesIO()
        super().__init__(self._file)
        self._numbers: dict[int, int] = {}  # by the `id` of a tensor
        self.tensors: list[Tensor] = []

    def persistent_id(self, value: Any) -> int | None:
        """Return the number of a tensor; None for other objects."""
        if not isinstance(value, Tensor):
            return None
        number = self._numbers.setdefault(id(value), len(self.tensors))
        if number == len(self.tensors):
            self.tensors.append(value)
        return number

    def structure(self, value: Any) -> bytes:
        """Return the pickle of an object, and collect its tensors."""
        self.dump(value)
        return self._file.getvalue()


class _Unpickler(pickle.Unpickler):
    """Reads what `_Pickler` wrote, with these tensors by their numbers."""

    def __init__(self, structure: bytes, tensors: list[Tensor]) -> None:
        super().__init__(io.BytesIO(structure))
        self._tensors = tensors

    def persistent_load(self, number: int) -> Tensor:
        """Return the tensor of a number."""
        return self._tensors[number]


def _broadcast_tensors(tensors: list[Tensor], root: int, group: dist.ProcessGroup | None) -> list[Tensor]:
    """Broadcast tensors, of known shapes and dtypes on all ranks, as bytes: backends lack some dtypes.

    A CUDA stream waits, not the host. Return the tensors that arrived, on a device that the group has a backend for.
    """
    on_wire = [_on_wire(tensor, group).contiguous() for tensor in tensors]
    works = [
        dist.broadcast(tensor.reshape(-1).view(torch.uint8), group=group, group_src=root, async_op=True)
        for tensor in on_wire
        if tensor.numel()
    ]
    for work in works:
        work.wait()
    return on_wire


def _broadcast_bytes(data: bytes, root: int, group: dist.ProcessGroup | None) -> bytes:
    """Broadcast bytes of any number, in one message if they are few."""
    message = len(data).to_bytes(_LENGTH) + data
    first = _broadcast_message(message[:_FIRST].ljust(_FIRST, b"\0"), root, group)
    length = int.from_bytes(first[:_LENGTH])
    num_left = length - (_FIRST - _LENGTH)
    if num_left <= 0:
        return first[_LENGTH : _LENGTH + length]
    return first[_LENGTH:] + _broadcast_message(data[-num_left:].ljust(num_left, b"\0"), root, group)


def _broadcast_message(data: bytes, root: int, group: dist.ProcessGroup | None) -> bytes:
    """Broadcast bytes of the same number on all ranks."""
    message = _on_wire(torch.frombuffer(bytearray(data), dtype=torch.uint8), group)
    dist.broadcast(message, group=group, group_src=root)
    return message.cpu().numpy().tobytes()


def _on_wire(tensor: Tensor, group: dist.ProcessGroup | None) -> Tensor:
    """Move a tensor to a device that the group has a backend for, if its own has none."""
    return tensor if backend_of(tensor.device.type, group) else tensor.to(default_device())
