"""Tensors between the stages of a pipeline, point to point through torch.distributed."""

import pickle
from collections import deque
from collections.abc import Hashable, Iterator, Sequence
from contextlib import contextmanager
from typing import NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor

from ..cluster.mesh import ParallelMesh
from .action import Action, Op, counterpart, send_of

_DOING = {
    Op.SEND_FORWARD: "sending the activations",
    Op.RECV_FORWARD: "receiving the activations",
    Op.SEND_BACKWARD: "sending the gradients",
    Op.RECV_BACKWARD: "receiving the gradients",
}

# Sends that may be in flight on one channel: all below so many bytes together, and the latest few of any size. Beyond
# that the oldest is waited for, and its memory is free. Waiting cannot deadlock: a valid schedule runs even if every
# send blocks until its receive is posted, see [Note: rendezvous channels].
_MAX_BYTES_IN_FLIGHT = 64 * 2**20
_ALWAYS_IN_FLIGHT = 4


class TensorSpec(NamedTuple):
    """The shape and dtype of a tensor."""

    shape: tuple[int, ...]
    dtype: torch.dtype

    @classmethod
    def of(cls, tensor: Tensor) -> "TensorSpec":
        """The spec of a tensor."""
        return cls(tuple(tensor.shape), tensor.dtype)

    def __str__(self) -> str:
        return f"{str(self.dtype).removeprefix('torch.')} {list(self.shape)}"


def takes_gradient(dtype: torch.dtype) -> bool:
    """Whether the next stage answers a tensor of this dtype with a gradient."""
    return dtype.is_floating_point or dtype.is_complex


class Arrival:
    """Tensors in flight to this rank, or about to be: see [Note: shapes that are not known yet]."""

    def __init__(self, channel: "_Receiving", action: Action, key: Hashable = None) -> None:
        self.action = action
        self.key = key
        self.is_posted = False
        self._channel = channel
        self._tensors: list[Tensor] = []
        self._works: list[dist.Work] = []

    def post(self, specs: Sequence[TensorSpec]) -> None:
        """Start to receive tensors of these shapes and dtypes; empty ones are not sent."""
        self.is_posted = True
        for spec in specs:
            tensor = torch.empty(spec.shape, dtype=spec.dtype, device=self._channel.device)
            self._tensors.append(tensor)
            if tensor.numel():
                self._works.append(self._channel.irecv(self.action, tensor))

    def wait(self) -> tuple[Tensor, ...]:
        """The tensors once they are here. On CUDA the current stream waits, not the process.

        Raises:
            ValueError: the sender works on a microbatch of another signature.
            RuntimeError: the sender is lost; names it.
        """
        if not self.is_posted:
            self._channel.post_up_to(self)
        works, self._works = self._works, []  # each is waited for once: gloo would wait for a further tensor
        with self._channel.naming_peer(self.action):
            for work in works:
                work.wait()
        return tuple(self._tensors)


class _End:
    """One end of a channel: one direction between two ranks, activations or gradients, in one order."""

    def __init__(self, mesh: ParallelMesh, group: dist.ProcessGroup, peer: int) -> None:
        self.device = mesh.device
        self._group = group
        self._peer = peer
        self._peer_global_rank = mesh.global_ranks("pp")[peer]

    @contextmanager
    def naming_peer(self, action: Action) -> Iterator[None]:
        """Put the peer's name before the backend's error; its words and class stay for who goes by them."""
        try:
            yield
        except RuntimeError as error:
            kind = type(error) if isinstance(error, dist.DistError) else RuntimeError
            raise kind(
                f"lost rank {self._peer_global_rank} (pipeline stage {counterpart(action).stage}) while "
                f"{_DOING[action.op]} of microbatch {action.microbatch} at stage {action.stage}: {error}"
            ) from error


class _InFlight(NamedTuple):
    action: Action
    tensor: Tensor  # keeps the memory until the send is done
    work: dist.Work


class _Sending(_End):
    def __init__(self, mesh: ParallelMesh, group: dist.ProcessGroup, peer: int) -> None:
        super().__init__(mesh, group, peer)
        self._in_flight: deque[_InFlight] = deque()
        self._num_bytes = 0
        # Whether the receiver may post only when it needs the tensors: then waiting for it could deadlock.
        self.is_describing = False

    def isend(self, action: Action, tensor: Tensor) -> None:
        """Start to send."""
        self._num_bytes += tensor.nbytes
        while (
            self._num_bytes > _MAX_BYTES_IN_FLIGHT
            and len(self._in_flight) >= _ALWAYS_IN_FLIGHT
            and not self.is_describing
        ):
            self._wait_for_oldest()
        with self.naming_peer(action):
            work = dist.isend(tensor, group=self._group, group_dst=self._peer)
        assert work is not None  # this rank is in the group
        self._in_flight.append(_InFlight(action, tensor, work))

    def flush(self) -> None:
        """Wait for all sends, and forget their tensors."""
        while self._in_flight:
            self._wait_for_oldest()
        self.is_describing = False

    def _wait_for_oldest(self) -> None:
        action, tensor, work = self._in_flight[0]
        with self.naming_peer(action):
            work.wait()
        self._num_bytes -= tensor.nbytes
        self._in_flight.popleft()


class _Receiving(_End):
    def __init__(self, mesh: ParallelMesh, group: dist.ProcessGroup, peer: int) -> None:
        super().__init__(mesh, group, peer)
        self._unposted: deque[Arrival] = deque()
        self._specs: dict[tuple[int, Hashable], tuple[TensorSpec, ...]] = {}

    def irecv(self, action: Action, tensor: Tensor) -> dist.Work:
        """Start to receive into a tensor."""
        with self.naming_peer(action):
            work = dist.irecv(tensor, group=self._group, group_src=self._peer)
        assert work is not None  # this rank is in the group
        return work

    def receive(self, action: Action, key: Hashable) -> Arrival:
        """Post a receive, now where its shapes are known and else when it is waited for."""
        arrival = Arrival(self, action, key)
        specs = None if self._unposted else self._specs.get((action.stage, key))
        if specs is None:
            self._unposted.append(arrival)
        else:
            arrival.post(specs)
        return arrival

    def post_up_to(self, last: Arrival) -> None:
        """Post every receive before this one, and this. Waits for the sender to describe unknown shapes."""
        while not last.is_posted:
            arrival = self._unposted.popleft()
            place = arrival.action.stage, arrival.key
            if place not in self._specs:
                self._specs[place] = self._description(arrival.action, arrival.key)
            arrival.post(self._specs[place])

    def _description(self, action: Action, key: Hashable) -> tuple[TensorSpec, ...]:
        """The specs that `_described` wrote at the other end. On CUDA the process waits, once per key."""
        length = self._now(action, torch.empty(1, dtype=torch.int64, device=self.device))
        written = self._now(action, torch.empty(int(length), dtype=torch.uint8, device=self.device))
        sent_key, specs = pickle.loads(written.cpu().numpy().tobytes())
        if sent_key != repr(key):
            raise ValueError(
                f"stage {action.stage} and the stage before it have different microbatches "
                f"{action.microbatch}: here {key}, there {sent_key}; every rank of a pipeline must be given the "
                "same batch"
            )
        return specs

    def _now(self, action: Action, tensor: Tensor) -> Tensor:
        work = self.irecv(action, tensor)
        with self.naming_peer(action):
            work.wait()
        return tensor


def _described(specs: Sequence[TensorSpec], key: Hashable) -> tuple[Tensor, Tensor]:
    """Specs as two tensors: the number of bytes, and the bytes."""
    written = pickle.dumps((repr(key), tuple(specs)))
    return torch.tensor([len(written)]), torch.frombuffer(bytearray(written), dtype=torch.uint8)


class Transport:
    """Channels between the stages of a pipeline. Making one is collective over the world.

    [Note: channels] From one rank to another there is one channel for activations and one for gradients, each
    with a communicator of its own (`ParallelMesh.pipeline_groups`): NCCL runs what shares one in a single order,
    and a receive that is posted ahead holds it until its tensor comes. What arrives on a channel must be received
    in the order in which it was sent; a validated schedule sees to it. Sends return at once and end by `flush`.

    [Note: shapes that are not known yet] A stage describes its outputs to the next one once for every
    signature of a microbatch. A receive of a signature that was not met before cannot be posted ahead: it is
    posted when it is waited for, and so is all that stands behind it on its channel. Meanwhile the sender
    waits for none of its sends.

    Args:
        mesh: the mesh whose axis pp the stages lie along.
        placement: the pipeline rank of each stage.
        overlap: go on while tensors are in flight; otherwise every transfer is over before the next action.
    """

    def __init__(self, mesh: ParallelMesh, placement: Sequence[int], *, overlap: bool = True) -> None:
        self._overlap = overlap
        self._device = mesh.device
        self._failure: str | None = None
        self._sending: dict[tuple[Op, int], _Sending] = {}
        self._receiving: dict[tuple[Op, int], _Receiving] = {}
        self._specs: dict[tuple[int, Hashable], tuple[TensorSpec, ...]] = {}  # of outputs that were sent
        self._open_channels(mesh, placement)

    def send_outputs(self, action: Action, tensors: Sequence[Tensor], key: Hashable) -> None:
        """Start sending a stage's outputs; they must not be changed before `flush`. Empty ones are not sent.

        Args:
            action: the send.
            tensors: the outputs.
            key: decides shapes and dtypes; equal on both ends.

        Raises:
            ValueError: the tensors are not those that were described under this key before.
            RuntimeError: the receiver is lost; names it.
        """
        channel = self._sending[action.op, action.stage]
        specs = tuple(map(TensorSpec.of, tensors))
        known = self._specs.get((action.stage, key))
        if known is None:
            self._specs[action.stage, key] = specs
            channel.is_describing = True
            for description in _described(specs, key):
                channel.isend(action, description.to(self._device))
        elif known != specs:
            raise ValueError(
                f"stage {action.stage} sends {_listed(specs)} for microbatch {action.microbatch}, and "
                f"{_listed(known)} for an earlier one of the same names, shapes and dtypes: let what a stage sends "
                "follow from the shapes of the microbatch alone"
            )
        self._send(channel, action, tensors)

    def send_gradients(self, action: Action, tensors: Sequence[Tensor]) -> None:
        """Start sending the gradients of a stage's inputs, under the same conditions."""
        self._send(self._sending[action.op, action.stage], action, tensors)

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
        arrival = Arrival(self._receiving[action.op, action.stage], action)
        arrival.post([spec for spec in self._specs[action.stage, key] if takes_gradient(spec.dtype)])
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

    def check_open(self) -> None:
        """Raise RuntimeError where an earlier step broke off."""
        if self._failure is not None:
            raise RuntimeError(
                f"an earlier step of this pipeline broke off ({self._failure}), and its ranks no longer "
                "agree on what comes next: end the run and start it again from a checkpoint"
            )

    def _send(self, channel: _Sending, action: Action, tensors: Sequence[Tensor]) -> None:
        for tensor in tensors:
            if tensor.numel():
                channel.isend(action, tensor.detach().contiguous())
        if not self._overlap:
            channel.flush()

    def _open_channels(self, mesh: ParallelMesh, placement: Sequence[int]) -> None:
        """Make this rank's ends of all channels, and use each once.

        NCCL connects two ranks at their first transfer and blocks both until then: here every rank meets its
        peers in one common order, before a schedule could have them wait for each other.
        """
        ranks, own = dict(enumerate(placement)), mesh.rank("pp")
        forwards_and_backwards = (Action(op, stage, 0) for op in (Op.FORWARD, Op.BACKWARD) for stage in ranks)
        sends = [send for each in forwards_and_backwards if (send := send_of(each, ranks)) is not None]
        routes = [(send, ranks[send.stage], ranks[counterpart(send).stage]) for send in sends]
        kinds = sorted({(send.op.value, source < target) for send, source, target in routes})
        groups = dict(zip(kinds, mesh.pipeline_groups(len(kinds)), strict=True))
        greeting = torch.zeros(1, device=self._device)
        senders: dict[
            tuple[Op, int], _Sending
        ] = {}  # by kind and peer: stages between the same ranks share one
        receivers: dict[tuple[Op, int], _Receiving] = {}
        for send, source, target in routes:
            group, receive = groups[send.op.value, source < target], counterpart(send)
            if own == source:
                if (send.op, target) not in senders:
                    senders[send.op, target] = _Sending(mesh, group, target)
                    senders[send.op, target].isend(send, greeting)
                    senders[send.op, target].flush()
                self._sending[send.op, send.stage] = senders[send.op, target]
            elif own == target:
                if (receive.op, source) not in receivers:
                    receivers[receive.op, source] = _Receiving(mesh, group, source)
                    arrival = Arrival(receivers[receive.op, source], receive)
                    arrival.post([TensorSpec.of(greeting)])
                    arrival.wait()
                self._receiving[receive.op, receive.stage] = receivers[receive.op, source]


def _listed(specs: Sequence[TensorSpec]) -> str:
    return ", ".join(map(str, specs)) or "nothing"
