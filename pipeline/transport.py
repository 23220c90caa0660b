"""Tensors between the stages of a pipeline, point to point through torch.distributed."""

import pickle
from collections import deque
from collections.abc import Callable, Hashable, Sequence
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from ..cluster.device import backend_of
from ..cluster.mesh import ParallelMesh
from ..cluster.profiling import is_profiled, named
from ..cluster.whereabouts import Described
from .action import Action, Op, counterpart, send_of

WAIT = "wait for "  # begins the names of waits in profiles
_ACTIVITIES = {
    Op.SEND_FORWARD: "sending the activations",
    Op.RECV_FORWARD: "receiving the activations",
    Op.SEND_BACKWARD: "sending the gradients",
    Op.RECV_BACKWARD: "receiving the gradients",
}
# Limits of the sends in flight on one channel: a number of bytes in total, beside the latest few sends of any size.
# Beyond both, the oldest send is waited for. Completed sends are released before the next one starts. Waiting cannot
# deadlock: a valid schedule runs even if every send blocks until its receive is posted, see
# [Note: rendezvous channels].
_MAX_BYTES_IN_FLIGHT = 64 * 2**20
_ALWAYS_IN_FLIGHT = 4

Specs = tuple[tuple[torch.Size, torch.dtype], ...]  # of the tensors of one transfer


def takes_gradient(dtype: torch.dtype) -> bool:
    """Return True if the next stage sends a gradient back for a tensor of this dtype."""
    return dtype.is_floating_point or dtype.is_complex


class PendingTransfer(Described):
    """The tensors that one action sends or receives. A receive may begin late: see [Note: unknown shapes].

    Args:
        channel: the channel of the transfer.
        action: the send or receive.
        key: of a receive, see `Transport.send_outputs`.
    """

    def __init__(self, channel: "_Channel", action: Action, key: Hashable = None) -> None:
        self.action = action
        self.key = key
        self.tensors: tuple[Tensor, ...] | None = None  # None until it begins
        self._channel = channel
        self._works: list[dist.Work] = []

    def begin(self, tensors: tuple[Tensor, ...], transfer: Callable[[Tensor], Any] | None = None) -> None:
        """Begin to send the tensors, or to receive into them. Empty tensors are not sent.

        Args:
            transfer: begins the transfer of one tensor; None uses the channel's function.
        """
        self.tensors = tensors
        begin = transfer or self._channel.transfer
        try:
            self._works = [begin(tensor) for tensor in tensors if tensor.numel()]
        except RuntimeError as error:
            raise self._connection_error(error) from error

    @property
    def is_completed(self) -> bool:
        """Return True if the backend reports that the transfer is complete; gloo reports it for no send. No wait."""
        return all(work.is_completed() for work in self._works)

    def wait(self) -> tuple[Tensor, ...]:
        """Wait for the transfer and return the tensors. On CUDA the current stream waits, not the process.

        Raises:
            ValueError: the sender works on a microbatch of another signature.
            RuntimeError: the connection to the peer is lost; names its rank.
        """
        if self.tensors is None:
            self._channel.begin_up_to(self)
        # Wait once for each: a second wait in gloo would wait for another tensor.
        works, self._works = self._works, []
        try:
            if works and is_profiled():
                with named(f"{WAIT}{self.describe()}"):
                    _wait_for(works)
            else:
                _wait_for(works)
        except RuntimeError as error:
            raise self._connection_error(error) from error
        assert self.tensors is not None
        return self.tensors

    def describe(self) -> str:
        """Describe the transfer, as the error of a lost connection does."""
        _, stage, microbatch = self.action
        peer = f"rank {self._channel.peer}, pipeline stage {counterpart(self.action).stage}"
        return f"{_ACTIVITIES[self.action.op]} of microbatch {microbatch} at stage {stage} ({peer})"

    def peers(self) -> tuple[int, ...]:
        """The other end."""
        return (self._channel.peer,)

    def _connection_error(self, error: RuntimeError) -> RuntimeError:
        """Return the backend's error with the peer's rank in front, of the same class, by which callers classify it."""
        error_class = type(error) if isinstance(error, dist.DistError) else RuntimeError
        op, stage, microbatch = self.action
        return error_class(
            f"lost rank {self._channel.peer} (pipeline stage {counterpart(self.action).stage}) while "
            f"{_ACTIVITIES[op]} of microbatch {microbatch} at stage {stage}: {error}"
        )


class _Channel:
    """One end of a channel: activations or gradients from one rank to another, received in the order of the sends.

    Args:
        mesh: all ranks.
        group: the communicator of the channel.
        peer: the pipeline rank of the other end.
        sends: True at the sender's end.

    Attributes:
        peer: the global rank of the other end.
        transfer: begins to send or receive one tensor.
    """

    def __init__(self, mesh: ParallelMesh, group: dist.ProcessGroup, peer: int, *, sends: bool) -> None:
        self.peer = mesh.global_ranks("pp")[peer]
        cpu_group = mesh.group("pp")  # for descriptions, so that no device is waited for
        send, receive = partial(dist.isend, group_dst=peer), partial(dist.irecv, group_src=peer)
        send_or_receive: Any = send if sends else receive
        self.transfer: Callable[[Tensor], Any] = partial(send_or_receive, group=group)
        self._transfer_description: Callable[[Tensor], Any] = partial(send_or_receive, group=cpu_group)
        self._description_device = (
            mesh.device if backend_of("cpu", cpu_group) is None else torch.device("cpu")
        )
        self._device = mesh.device
        self._sends: deque[tuple[PendingTransfer, int]] = deque()  # with their bytes
        self._num_bytes = 0
        self._descriptions: list[PendingTransfer] = []  # sends in flight
        # Receives whose shapes are not known yet, and all later receives on this channel.
        self._not_posted: deque[PendingTransfer] = deque()
        self._specs: dict[tuple[int, Hashable], Specs] = {}  # by stage, and key of the microbatch

    def send(self, action: Action, tensors: tuple[Tensor, ...]) -> None:
        """Begin to send, and release the tensors of completed sends. Waits for the oldest if too much is in flight."""
        num_bytes = sum([tensor.nbytes for tensor in tensors])
        self._num_bytes += num_bytes
        while self._sends and self._sends[0][0].is_completed:
            self._wait_for_oldest()  # which also releases the backend's references to the tensors
        while self._num_bytes > _MAX_BYTES_IN_FLIGHT and len(self._sends) >= _ALWAYS_IN_FLIGHT:
            # The receiver may post only when it needs the tensors: to wait for it could deadlock.
            if self._descriptions:
                break
            self._wait_for_oldest()
        self._sends.append((self.start(action, tensors), num_bytes))

    def describe(self, action: Action, specs: Specs, key: Hashable) -> None:
        """Send shapes and dtypes, which `_receive_description` at the other end expects before the tensors.

        Two messages: the number of bytes, then the pickled bytes.

        Args:
            action: the send of the tensors.
            specs: their shapes and dtypes.
            key: see `Transport.send_outputs`; compared at the other end.
        """
        pickled = torch.frombuffer(bytearray(pickle.dumps((repr(key), specs))), dtype=torch.uint8)
        for tensor in (torch.tensor([len(pickled)]), pickled):
            self._descriptions.append(PendingTransfer(self, action))
            self._descriptions[-1].begin((tensor.to(self._description_device),), self._transfer_description)

    def flush(self) -> None:
        """Wait for all sends, and release their tensors."""
        while self._sends:
            self._wait_for_oldest()
        while self._descriptions:
            self._descriptions.pop().wait()

    def _wait_for_oldest(self) -> None:
        transfer, num_bytes = self._sends.popleft()
        transfer.wait()
        self._num_bytes -= num_bytes

    def receive(self, action: Action, key: Hashable) -> PendingTransfer:
        """Begin to receive if the shapes are known; otherwise the receive begins when it is waited for."""
        specs = None if self._not_posted else self._specs.get((action.stage, key))
        if specs is not None:
            return self.receive_as(action, specs)
        self._not_posted.append(PendingTransfer(self, action, key))
        return self._not_posted[-1]

    def receive_as(self, action: Action, specs: Specs) -> PendingTransfer:
        """Begin to receive tensors of these shapes and dtypes."""
        return self.start(action, self._empty(specs))

    def begin_up_to(self, last: PendingTransfer) -> None:
        """Begin all receives up to and including `last`. Waits for the sender to describe unknown shapes."""
        while last.tensors is None:
            transfer = self._not_posted.popleft()
            stage_and_key = transfer.action.stage, transfer.key
            if stage_and_key not in self._specs:
                self._specs[stage_and_key] = self._receive_description(transfer.action, transfer.key)
            transfer.begin(self._empty(self._specs[stage_and_key]))

    def start(self, action: Action, tensors: tuple[Tensor, ...]) -> PendingTransfer:
        """Begin to send these tensors, or to receive into them; return the transfer."""
        transfer = PendingTransfer(self, action)
        transfer.begin(tensors)
        return transfer

    def _empty(self, specs: Specs) -> tuple[Tensor, ...]:
        return tuple(torch.empty(shape, dtype=dtype, device=self._device) for shape, dtype in specs)

    def _receive_description(self, action: Action, key: Hashable) -> Specs:
        """Receive shapes and dtypes from the sender, once per key. Waits for the other process, not for a device."""
        (length,) = self._receive_numbers(action, 1, torch.int64).tolist()
        sent_key, specs = pickle.loads(bytes(self._receive_numbers(action, length, torch.uint8).tolist()))
        if sent_key != repr(key):
            raise ValueError(
                f"stage {action.stage} and the stage before it have different microbatches {action.microbatch}: give "
                f"every rank of a pipeline the same batch; here {key}, there {sent_key}"
            )
        return specs

    def _receive_numbers(self, action: Action, length: int, dtype: torch.dtype) -> Tensor:
        """Wait for `length` numbers of a description, and return them."""
        transfer = PendingTransfer(self, action)
        transfer.begin(
            (torch.empty(length, dtype=dtype, device=self._description_device),), self._transfer_description
        )
        return transfer.wait()[0]


class Transport:
    """Channels between the stages of a pipeline. Construction is collective over the world.

    [Note: channels] From one rank to another there is one channel for activations and one for gradients. Each has its
    own communicator (`ParallelMesh.pipeline_groups`): NCCL runs the transfers of one communicator in order, and a
    receive that is posted ahead blocks it until its tensor arrives. Tensors on a channel must be received in the order
    in which they were sent; a validated schedule ensures this. Sends return at once and are complete after `flush`.

    [Note: unknown shapes] A stage describes the shapes and dtypes of its outputs to the next one, once for every
    signature of a microbatch, by two messages between CPUs that wait for no device. A receive with a new signature
    cannot be posted ahead. It is posted when it is waited for, and so are all later receives on its channel. Until then
    the sender waits for none of its sends.

    Args:
        mesh: the mesh whose axis pp the stages lie along.
        stage_ranks: the pipeline rank of each stage.
        overlap: continue while tensors are in flight; otherwise every transfer is complete before the next action.
    """

    def __init__(self, mesh: ParallelMesh, stage_ranks: Sequence[int], *, overlap: bool = True) -> None:
        self._overlap = overlap
        self._failure: str | None = None
        self._specs: dict[tuple[int, Hashable], Specs] = {}  # of outputs that were sent, by stage and key
        self._channels: dict[
            tuple[Op, int], _Channel
        ] = {}  # by op and stage of a send or receive on this rank
        self._open_channels(mesh, dict(enumerate(stage_ranks)))

    def send_outputs(self, action: Action, tensors: tuple[Tensor, ...], key: Hashable) -> None:
        """Start sending a stage's outputs, which must not be changed before `flush`. Empty tensors are not sent.

        Args:
            action: the send.
            tensors: the outputs.
            key: determines shapes and dtypes; equal on both ends.

        Raises:
            ValueError: shapes or dtypes differ from those described under this key before.
            RuntimeError: the connection to the receiver is lost; names its rank.
        """
        specs = tuple([(tensor.shape, tensor.dtype) for tensor in tensors])
        earlier_specs = self._specs.get((action.stage, key))
        if earlier_specs is None:
            self._specs[action.stage, key] = specs
            self._channels[action.op, action.stage].describe(action, specs, key)
        elif earlier_specs != specs:
            raise ValueError(
                f"stage {action.stage} sends {_describe_specs(specs)} for microbatch {action.microbatch}, but "
                f"{_describe_specs(earlier_specs)} for an earlier one of the same names, shapes and dtypes: outputs of "
                "a stage must depend only on the shapes of the microbatch"
            )
        self._send(action, tensors)

    def send_gradients(self, action: Action, tensors: tuple[Tensor, ...]) -> None:
        """Start sending the gradients of a stage's inputs, which must not be changed before `flush`."""
        self._send(action, tensors)

    def _send(self, action: Action, tensors: tuple[Tensor, ...]) -> None:
        channel = self._channels[action.op, action.stage]
        channel.send(action, tuple([tensor.detach().contiguous() for tensor in tensors]))
        if not self._overlap:
            channel.flush()

    def receive_inputs(self, action: Action, key: Hashable) -> PendingTransfer:
        """Start receiving a stage's inputs.

        Raises:
            RuntimeError: the connection to the sender is lost; names its rank.
        """
        return self._wait_unless_overlapped(self._channels[action.op, action.stage].receive(action, key))

    def receive_gradients(self, action: Action, key: Hashable) -> PendingTransfer:
        """Start receiving the gradients of a stage's outputs, which were sent under this key before."""
        specs = tuple([spec for spec in self._specs[action.stage, key] if takes_gradient(spec[1])])
        return self._wait_unless_overlapped(self._channels[action.op, action.stage].receive_as(action, specs))

    def flush(self) -> None:
        """Wait for all sends; afterwards the tensors may be changed.

        Raises:
            RuntimeError: the connection to a receiver is lost.
        """
        for channel in self._channels.values():
            channel.flush()

    def close(self, reason: str) -> None:
        """Refuse all further use, after an interrupted step: its ranks may be at different actions."""
        self._failure = self._failure or reason

    def check_open(self) -> None:
        """Raise RuntimeError if an earlier step was interrupted."""
        if self._failure is not None:
            raise RuntimeError(
                f"an earlier step of this pipeline failed ({self._failure}), and its ranks may be at different "
                "actions: end the run and restart it from a checkpoint"
            )

    def _wait_unless_overlapped(self, transfer: PendingTransfer) -> PendingTransfer:
        if not self._overlap:
            transfer.wait()
        return transfer

    def _open_channels(self, mesh: ParallelMesh, ranks: dict[int, int]) -> None:
        """Create this rank's ends of all channels, and use each once. Stages on the same two ranks share a channel.

        Collective over the world.

        NCCL connects two ranks at their first transfer and blocks both until then. Here all ranks connect in one common
        order, before a schedule could make them wait for each other.
        """
        computations = (Action(op, stage, 0) for op in (Op.FORWARD, Op.BACKWARD) for stage in ranks)
        sends = [send for action in computations if (send := send_of(action, ranks)) is not None]
        routes = [(send, ranks[send.stage], ranks[counterpart(send).stage]) for send in sends]
        # One communicator for activations and one for gradients, of each direction between ranks.
        kinds = sorted({(send.op.value, source < target) for send, source, target in routes})
        groups = dict(zip(kinds, mesh.pipeline_groups(len(kinds)), strict=True))
        by_peer: dict[tuple[Op, int], _Channel] = {}
        rank = mesh.rank("pp")
        for send, source, target in routes:
            if rank not in (source, target):
                continue
            end, peer = (send, target) if rank == source else (counterpart(send), source)
            if (end.op, peer) not in by_peer:
                group = groups[send.op.value, source < target]
                by_peer[end.op, peer] = channel = _Channel(mesh, group, peer, sends=end is send)
                channel.start(end, (torch.zeros(1, device=mesh.device),)).wait()
            self._channels[end.op, end.stage] = by_peer[end.op, peer]


def _wait_for(works: Sequence[dist.Work]) -> None:
    for work in works:
        work.wait()


def _describe_specs(specs: Specs) -> str:
    tensors = [f"{str(dtype).removeprefix('torch.')} {list(shape)}" for shape, dtype in specs]
    return ", ".join(tensors) or "nothing"
