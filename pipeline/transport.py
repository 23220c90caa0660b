"""Tuples of tensors between the stages of a pipeline, point to point. What is sent when is runner.py."""

import zlib
from collections import deque
from collections.abc import Hashable, Iterator, Sequence
from contextlib import contextmanager
from typing import NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor

from ..cluster.mesh import ParallelMesh
from .action import Action, Op, counterpart, stage_rank

# Both ends write a dtype as its place in this list.
_DTYPES = (
    torch.float32,
    torch.bfloat16,
    torch.float16,
    torch.float64,
    torch.int64,
    torch.int32,
    torch.uint8,
    torch.int8,
    torch.bool,
)
_DOING = {
    Op.SEND_FORWARD: "sending the activations",
    Op.RECV_FORWARD: "receiving the activations",
    Op.SEND_BACKWARD: "sending the gradients",
    Op.RECV_BACKWARD: "receiving the gradients",
}

# How many sends to one peer and in one direction may be under way. Gloo tells that a send is done only to who
# waits for it, so the oldest is waited for once there are more, and its memory is free. Waiting cannot
# deadlock: a valid schedule runs even if every send blocks, see [Note: rendezvous channels].
_MAX_UNDER_WAY = 4


class TensorSpec(NamedTuple):
    """What a receiver must know of a tensor before it arrives."""

    shape: tuple[int, ...]
    dtype: torch.dtype


def spec_of(tensor: Tensor) -> TensorSpec:
    """The shape and dtype of a tensor."""
    return TensorSpec(tuple(tensor.shape), tensor.dtype)


class _UnderWay(NamedTuple):
    action: Action
    tensor: Tensor  # keeps the memory until the send is done
    work: dist.Work


class Arrival:
    """Tensors on their way to this rank."""

    def __init__(
        self, transport: "Transport", action: Action, tensors: list[Tensor], works: list[dist.Work]
    ) -> None:
        self._transport = transport
        self._action = action
        self._tensors = tensors
        self._works = works

    def wait(self) -> tuple[Tensor, ...]:
        """The tensors once they are here. On CUDA the current stream waits, not the process.

        Raises:
            RuntimeError: the sender is lost; names it.
        """
        for work in self._works:
            self._transport.wait(work, self._action)
        return tuple(self._tensors)


class Transport:
    """The way between neighbouring stages: activations in one direction, gradients in the other.

    Both directions have a group of their own. What arrives must be received in the order it was sent; a
    validated schedule sees to it. Sends return at once and end by `flush`.

    Args:
        mesh: the mesh whose axis pp the stages lie along.
    """

    def __init__(self, mesh: ParallelMesh) -> None:
        forward_group, backward_group = mesh.pipeline_groups
        self._groups = {
            Op.SEND_FORWARD: forward_group,
            Op.RECV_FORWARD: forward_group,
            Op.SEND_BACKWARD: backward_group,
            Op.RECV_BACKWARD: backward_group,
        }
        self._device = mesh.device
        self._global_ranks = mesh.global_ranks("pp")
        self._specs: dict[tuple, tuple[TensorSpec, ...]] = {}
        self._under_way: dict[tuple[int, Op], deque[_UnderWay]] = {}
        self._failure: str | None = None

    def describe(self, action: Action, tensors: Sequence[Tensor], key: Hashable) -> None:
        """Tell the receiver of a send what will come, once per stage and key; `expect` is its other end.

        Args:
            action: the send.
            tensors: what it will send.
            key: decides shapes and dtypes; equal on both ends.

        Raises:
            ValueError: the tensors are not those that were described under this key before.
        """
        specs = tuple(map(spec_of, tensors))
        known = self._specs.get((action.op, action.stage, key))
        if known is None:
            for number in _packed(specs, key):
                self._post_send(action, number.to(self._device))
            self._specs[action.op, action.stage, key] = specs
        elif known != specs:
            raise ValueError(
                f"stage {action.stage} sends {_told(specs)} for microbatch {action.microbatch}, and for an "
                f"earlier microbatch of the same names, shapes and dtypes it sent {_told(known)}: the next "
                "stage was told those. What a stage sends must follow from the shapes of the microbatch alone"
            )

    def expect(self, action: Action, key: Hashable) -> tuple[TensorSpec, ...]:
        """What will come to a receive. Waits for the sender where the stage has not seen the key before.

        Raises:
            ValueError: the sender works on a microbatch of another key.
            RuntimeError: the sender is lost.
        """
        known = self._specs.get((action.op, action.stage, key))
        if known is None:
            length, checksum = self._receive_numbers(action, 2)
            numbers = self._receive_numbers(action, length)
            if checksum != _checksum(key):
                raise ValueError(
                    f"stage {action.stage} and the stage before it have different microbatches "
                    f"{action.microbatch} (here {key}): every rank of a pipeline must be given the same batch"
                )
            known = self._specs[action.op, action.stage, key] = _unpacked(numbers)
        return known

    def send(self, action: Action, tensors: Sequence[Tensor]) -> None:
        """Start sending tensors; they must not be changed before `flush`. Empty ones do not travel.

        Raises:
            RuntimeError: the receiver is lost.
        """
        for tensor in tensors:
            if tensor.numel():
                self._post_send(action, tensor.detach().contiguous())

    def receive(self, action: Action, specs: Sequence[TensorSpec]) -> Arrival:
        """Start receiving tensors of known shapes and dtypes.

        Raises:
            RuntimeError: the sender is lost.
        """
        tensors = [torch.empty(spec.shape, dtype=spec.dtype, device=self._device) for spec in specs]
        works = [self._post_receive(action, tensor) for tensor in tensors if tensor.numel()]
        return Arrival(self, action, tensors, works)

    def wait(self, work: dist.Work, action: Action) -> None:
        """Wait for one transfer of an action; a failure names the peer."""
        with self._naming_peer(action):
            work.wait()

    def flush(self) -> None:
        """Wait for all sends, after which what was sent may be changed.

        Raises:
            RuntimeError: a receiver is lost.
        """
        for queue in self._under_way.values():
            while queue:
                self.wait(queue[0].work, queue[0].action)
                queue.popleft()

    def close(self, reason: str) -> None:
        """Refuse all further use: after a step that broke off, the peers stand elsewhere in it."""
        self._failure = self._failure or reason
        self._under_way.clear()

    def check_open(self) -> None:
        """Raise RuntimeError where an earlier step broke off."""
        if self._failure is not None:
            raise RuntimeError(
                f"an earlier step of this pipeline broke off ({self._failure}), and its ranks no longer "
                "agree on what comes next: end the run and start it again from a checkpoint"
            )

    def _post_send(self, action: Action, tensor: Tensor) -> None:
        peer = self._peer(action)
        queue = self._under_way.setdefault((peer, action.op), deque())
        while queue and (queue[0].work.is_completed() or len(queue) >= _MAX_UNDER_WAY):
            self.wait(queue[0].work, queue[0].action)
            queue.popleft()
        with self._naming_peer(action):
            work = dist.isend(tensor, group=self._groups[action.op], group_dst=peer)
        assert work is not None
        queue.append(_UnderWay(action, tensor, work))

    def _post_receive(self, action: Action, tensor: Tensor) -> dist.Work:
        with self._naming_peer(action):
            work = dist.irecv(tensor, group=self._groups[action.op], group_src=self._peer(action))
        assert work is not None
        return work

    def _receive_numbers(self, action: Action, count: int) -> list[int]:
        numbers = torch.empty(count, dtype=torch.int64, device=self._device)
        self.wait(self._post_receive(action, numbers), action)
        return numbers.tolist()

    def _peer(self, action: Action) -> int:
        return stage_rank(counterpart(action).stage, len(self._global_ranks))

    @contextmanager
    def _naming_peer(self, action: Action) -> Iterator[None]:
        """Put the peer's name before what the backend says; its words and class stay for who goes by them."""
        try:
            yield
        except RuntimeError as error:
            kind = type(error) if isinstance(error, dist.DistError) else RuntimeError
            global_rank = self._global_ranks[self._peer(action)]
            raise kind(
                f"lost rank {global_rank} (pipeline stage {counterpart(action).stage}) while "
                f"{_DOING[action.op]} of microbatch {action.microbatch} at stage {action.stage}: {error}"
            ) from error


def _packed(specs: Sequence[TensorSpec], key: Hashable) -> tuple[Tensor, Tensor]:
    """Specs as two tensors of int64: length and checksum of the key, then dtype, dim and shape of each."""
    numbers = [len(specs)]
    for spec in specs:
        if spec.dtype not in _DTYPES:
            raise ValueError(f"a stage sends a tensor of {spec.dtype}, and only {_DTYPES} can travel")
        numbers += [_DTYPES.index(spec.dtype), len(spec.shape), *spec.shape]
    return torch.tensor([len(numbers), _checksum(key)]), torch.tensor(numbers)


def _unpacked(numbers: Sequence[int]) -> tuple[TensorSpec, ...]:
    rest = iter(numbers)
    count = next(rest)
    specs = []
    for _ in range(count):
        dtype, dim = _DTYPES[next(rest)], next(rest)
        specs.append(TensorSpec(tuple(next(rest) for _ in range(dim)), dtype))
    return tuple(specs)


def _checksum(key: Hashable) -> int:
    return zlib.crc32(repr(key).encode())


def _told(specs: Sequence[TensorSpec]) -> str:
    return (
        ", ".join(f"{str(spec.dtype).removeprefix('torch.')} {list(spec.shape)}" for spec in specs)
        or "nothing"
    )
