"""Tuples of tensors between the stages of a pipeline, point to point. What is sent when is runner.py."""

from collections import deque
from collections.abc import Hashable, Sequence
from typing import NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor

from ..cluster.direct import Departure, Direct, direct_ways
from ..cluster.exchange import Waitable
from ..cluster.mesh import ParallelMesh
from .action import Action, Op, counterpart, send_of
from .tensor_spec import TensorSpec, checksum, packed, spec_of, takes_gradient, told, unpacked

_DOING = {
    Op.SEND_FORWARD: "sending the activations",
    Op.RECV_FORWARD: "receiving the activations",
    Op.SEND_BACKWARD: "sending the gradients",
    Op.RECV_BACKWARD: "receiving the gradients",
}

# How many bytes may be under way on one channel that the receiver does not expect yet, besides the latest sends. Where
# there are more, the oldest is waited for, and the memory of those that are done is free. Waiting cannot deadlock: a
# valid schedule runs even if every send blocks until its receive is posted, see [Note: rendezvous channels].
_MAX_BYTES_UNDER_WAY = 64 * 2**20
_ALWAYS_UNDER_WAY = 4


class _UnderWay(NamedTuple):
    action: Action
    tensor: Tensor  # keeps the memory until the send is done
    work: Departure


class Arrival:
    """Tensors on their way to this rank, or about to be: see [Note: shapes that are not known yet]."""

    def __init__(self, channel: "_Receiving", action: Action) -> None:
        self.action = action
        self.tensors: list[Tensor] = []
        self.works: list[Waitable] = []
        self.is_posted = False
        self._channel = channel

    def wait(self) -> tuple[Tensor, ...]:
        """The tensors once they are here. On CUDA the current stream waits, not the process.

        Raises:
            ValueError: the sender works on a microbatch of another signature.
            RuntimeError: the sender is lost; names it.
        """
        if not self.is_posted:
            self._channel.post_up_to(self)
        try:
            while self.works:  # each once: gloo would wait for a further tensor
                self.works[0].wait()
                self.works.pop(0)
        except RuntimeError as error:
            raise self._channel.lost(self.action, error) from error
        return tuple(self.tensors)


class _End:
    """One end of a channel: what travels one way between two ranks, activations or gradients, in one order."""

    def __init__(self, way: Direct, *, peer: int, peer_global_rank: int) -> None:
        self._way = way
        self._peer = peer
        self._peer_global_rank = peer_global_rank

    def close(self) -> None:
        """Let the peer know, after a step that broke off. What was sent stays: the peer may still read it."""
        self._way.close()

    def lost(self, action: Action, error: RuntimeError) -> RuntimeError:
        """The peer's name before what the backend says; its words and class stay for who goes by them."""
        kind = type(error) if isinstance(error, dist.DistError) else RuntimeError
        return kind(
            f"lost rank {self._peer_global_rank} (pipeline stage {counterpart(action).stage}) while "
            f"{_DOING[action.op]} of microbatch {action.microbatch} at stage {action.stage}: {error}"
        )


class _Sending(_End):
    def __init__(self, way: Direct, *, peer: int, peer_global_rank: int) -> None:
        super().__init__(way, peer=peer, peer_global_rank=peer_global_rank)
        self.under_way: deque[_UnderWay] = deque()
        self._num_expected = 0  # of the first of them, which the receiver expects
        self._bytes_unexpected = 0
        # Whether the receiver may post only when it needs the tensors: then waiting for it could deadlock.
        self.is_describing = False

    def post(self, action: Action, tensor: Tensor) -> None:
        """Start a send."""
        self._bytes_unexpected += tensor.nbytes
        if not self.is_describing:
            while (
                self._bytes_unexpected > _MAX_BYTES_UNDER_WAY
                and len(self.under_way) - self._num_expected >= _ALWAYS_UNDER_WAY
            ):
                self._wait_until_one_more_is_expected()
        try:
            work = self._way.send(tensor, self._peer)
        except RuntimeError as error:
            raise self.lost(action, error) from error
        self.under_way.append(_UnderWay(action, tensor, work))

    def flush(self) -> None:
        """Wait for all sends, and forget their tensors."""
        while self.under_way:
            self._wait_for_first()
        self._num_expected = self._bytes_unexpected = 0
        self.is_describing = False

    def _wait_for_first(self) -> None:
        action, _, work = self.under_way[0]
        try:
            work.wait()
        except RuntimeError as error:
            raise self.lost(action, error) from error
        self.under_way.popleft()

    def _wait_until_one_more_is_expected(self) -> None:
        action, tensor, work = self.under_way[self._num_expected]
        try:
            work.wait_until_expected()
        except RuntimeError as error:
            raise self.lost(action, error) from error
        self._num_expected += 1
        self._bytes_unexpected -= tensor.nbytes
        while self._num_expected and self.under_way[0].work.is_done:
            self._wait_for_first()
            self._num_expected -= 1


class _Receiving(_End):
    def __init__(self, way: Direct, *, peer: int, peer_global_rank: int, device: torch.device) -> None:
        super().__init__(way, peer=peer, peer_global_rank=peer_global_rank)
        self._device = device
        self._unposted: deque[tuple[Arrival, Hashable]] = deque()
        self._specs: dict[tuple[int, Hashable], tuple[TensorSpec, ...]] = {}

    def receive(self, action: Action, key: Hashable) -> Arrival:
        """Post a receive, now where its shapes are known and else when it is waited for."""
        arrival = Arrival(self, action)
        specs = None if self._unposted else self._specs.get((action.stage, key))
        if specs is None:
            self._unposted.append((arrival, key))
        else:
            self.post(arrival, specs)
        return arrival

    def post_up_to(self, last: Arrival) -> None:
        """Post what stands before an arrival, and that one. Waits for the sender to tell shapes."""
        while not last.is_posted:
            arrival, key = self._unposted.popleft()
            specs = self._specs.get((arrival.action.stage, key))
            if specs is None:
                specs = self._specs[arrival.action.stage, key] = self._expect(arrival.action, key)
            self.post(arrival, specs)

    def post(self, arrival: Arrival, specs: Sequence[TensorSpec]) -> None:
        """Start receiving tensors of known shapes and dtypes; empty ones do not travel."""
        arrival.is_posted = True
        for spec in specs:
            tensor = torch.empty(spec.shape, dtype=spec.dtype, device=self._device)
            arrival.tensors.append(tensor)
            if tensor.numel():
                arrival.works.append(self._post(arrival.action, tensor))

    def forget_unposted(self) -> None:
        """Drop what was never posted, after a step that broke off."""
        self._unposted.clear()

    def _expect(self, action: Action, key: Hashable) -> tuple[TensorSpec, ...]:
        length, found = self._receive_numbers(action, 2)
        numbers = self._receive_numbers(action, length)
        if found != checksum(key):
            raise ValueError(
                f"stage {action.stage} and the stage before it have different microbatches "
                f"{action.microbatch} (here {key}): every rank of a pipeline must be given the same batch"
            )
        return unpacked(numbers)

    def _receive_numbers(self, action: Action, count: int) -> list[int]:
        numbers = torch.empty(count, dtype=torch.int64, device=self._device)
        work = self._post(action, numbers)
        try:
            work.wait()
        except RuntimeError as error:
            raise self.lost(action, error) from error
        return numbers.tolist()

    def _post(self, action: Action, tensor: Tensor) -> Waitable:
        try:
            return self._way.receive(tensor, self._peer)
        except RuntimeError as error:
            raise self.lost(action, error) from error


class Transport:
    """The ways between the stages of a pipeline. Making one is collective over the world.

    [Note: channels] From one rank to another there is one channel for activations and one for gradients, each
    with a communicator of its own (`ParallelMesh.pipeline_groups`): NCCL runs what shares one in a single order,
    and a receive that is posted ahead holds it until its tensor comes. What arrives on a channel must be received
    in the order in which it was sent; a validated schedule sees to it. Sends return at once and end by `flush`.

    [Note: shapes that are not known yet] A stage tells the next one the shapes of its outputs once for every
    signature of a microbatch. A receive of a signature that was not met before cannot be posted ahead: it is
    posted when it is waited for, and so is all that stands behind it on its channel. Meanwhile the sender
    holds back nothing.

    Args:
        mesh: the mesh whose axis pp the stages lie along.
        placement: the pipeline rank of each stage.
        overlap: go on while tensors travel; otherwise every transfer is over before the next action.
    """

    def __init__(self, mesh: ParallelMesh, placement: Sequence[int], *, overlap: bool = True) -> None:
        self._overlap = overlap
        self._device = mesh.device
        self._placement = tuple(placement)
        self._failure: str | None = None
        self._sending: dict[tuple[Op, int], _Sending] = {}
        self._receiving: dict[tuple[Op, int], _Receiving] = {}
        self._described: dict[tuple[int, Hashable], tuple[TensorSpec, ...]] = {}
        self._open_channels(mesh)

    def send_outputs(self, action: Action, tensors: Sequence[Tensor], key: Hashable) -> None:
        """Start sending a stage's outputs; they must not be changed before `flush`. Empty ones do not travel.

        Args:
            action: the send.
            tensors: what it sends.
            key: decides shapes and dtypes; equal on both ends.

        Raises:
            ValueError: the tensors are not those that were described under this key before.
            RuntimeError: the receiver is lost; names it.
        """
        channel = self._sending[action.op, action.stage]
        specs = tuple(map(spec_of, tensors))
        known = self._described.get((action.stage, key))
        if known is None:
            channel.is_describing = True
            for numbers in packed(specs, key):
                channel.post(action, numbers.to(self._device))
            self._described[action.stage, key] = specs
        elif known != specs:
            raise ValueError(
                f"stage {action.stage} sends {told(specs)} for microbatch {action.microbatch}, and for an "
                f"earlier microbatch of the same names, shapes and dtypes it sent {told(known)}: the next "
                "stage was told those. What a stage sends must follow from the shapes of the microbatch alone"
            )
        self._post(channel, action, tensors)

    def send_gradients(self, action: Action, tensors: Sequence[Tensor]) -> None:
        """Start sending the gradients of a stage's inputs, under the same conditions."""
        self._post(self._sending[action.op, action.stage], action, tensors)

    def receive_inputs(self, action: Action, key: Hashable) -> Arrival:
        """Start receiving a stage's inputs.

        Raises:
            RuntimeError: the sender is lost; names it.
        """
        arrival = self._receiving[action.op, action.stage].receive(action, key)
        if not self._overlap:
            arrival.wait()
        return arrival

    def receive_gradients(self, action: Action, key: Hashable) -> Arrival:
        """Start receiving the gradients of a stage's outputs, once those were sent under this key."""
        channel = self._receiving[action.op, action.stage]
        arrival = Arrival(channel, action)
        described = self._described[action.stage, key]
        channel.post(arrival, [spec for spec in described if takes_gradient(spec.dtype)])
        if not self._overlap:
            arrival.wait()
        return arrival

    def flush(self) -> None:
        """Wait for all sends, after which what was sent may be changed.

        Raises:
            RuntimeError: a receiver is lost.
        """
        for channel in self._sending.values():
            channel.flush()

    def close(self, reason: str) -> None:
        """Refuse all further use: after a step that broke off, the peers stand elsewhere in it."""
        self._failure = self._failure or reason
        for receiving in self._receiving.values():
            receiving.forget_unposted()
        for end in (*self._sending.values(), *self._receiving.values()):
            end.close()

    def check_open(self) -> None:
        """Raise RuntimeError where an earlier step broke off."""
        if self._failure is not None:
            raise RuntimeError(
                f"an earlier step of this pipeline broke off ({self._failure}), and its ranks no longer "
                "agree on what comes next: end the run and start it again from a checkpoint"
            )

    def _post(self, channel: _Sending, action: Action, tensors: Sequence[Tensor]) -> None:
        for tensor in tensors:
            if tensor.numel():
                channel.post(action, tensor.detach().contiguous())
        if not self._overlap:
            channel.flush()

    def _open_channels(self, mesh: ParallelMesh) -> None:
        """Make this rank's ends of all channels, and use each once.

        NCCL connects two ranks at their first transfer and blocks both until then: here every rank meets its
        peers in one common order, before a schedule could have them wait for each other.
        """
        own, global_ranks = mesh.rank("pp"), mesh.global_ranks("pp")
        ends: dict[tuple, _Sending | _Receiving] = {}
        routes = _routes(self._placement)
        kinds = sorted({(send.value, sender < receiver) for send, _, sender, receiver in routes})
        ways = dict(zip(kinds, direct_ways(mesh, len(kinds)), strict=True))
        greeting = torch.zeros(1, device=self._device)
        for send, stage, sender, receiver in routes:
            if own not in (sender, receiver):
                continue
            peer = receiver if sender == own else sender
            settings = {"peer": peer, "peer_global_rank": global_ranks[peer]}
            way = ways[send.value, sender < receiver]
            channel, action = (send, sender, receiver), Action(send, stage, 0)
            is_new = channel not in ends
            if sender == own:
                sending = ends.setdefault(channel, _Sending(way, **settings))
                assert isinstance(sending, _Sending)
                self._sending[send, stage] = sending
                if is_new:
                    sending.post(action, greeting)
                    sending.flush()
            else:
                receive = counterpart(action)
                receiving = ends.setdefault(channel, _Receiving(way, device=self._device, **settings))
                assert isinstance(receiving, _Receiving)
                self._receiving[receive.op, receive.stage] = receiving
                if is_new:
                    arrival = Arrival(receiving, receive)
                    receiving.post(arrival, [spec_of(greeting)])
                    arrival.wait()


def _routes(placement: Sequence[int]) -> list[tuple[Op, int, int, int]]:
    """All that travels between ranks, in one order on all: the send, its stage, and from which rank to which."""
    holders = dict(enumerate(placement))
    sends = [send_of(Action(op, stage, 0), holders) for op in (Op.FORWARD, Op.BACKWARD) for stage in holders]
    return [
        (send.op, send.stage, holders[send.stage], holders[counterpart(send).stage]) for send in sends if send
    ]
