"""Agreement of ranks on the calls of a boosted model: batches, inputs, reductions and settings.

[Note: compared calls] In the first calls, and in every `check_every`-th, ranks gather and compare their batches before
they compute, and an error names the rank that differs. In all other calls nothing is sent: each rank records checksums
of its batch. Sums of the checksums, and of those of the optimizer's options, are part of the all-reduce of the
gradients' norm. If they show a difference the full comparison runs, and the step raises before any parameter changes.

[Note: sums of codes] A replica of n ranks agrees if (1 − n)·(code of its first rank) + (codes of the others) is 0. The
world agrees if all codes add up to the world size times the first one. Codes are below 2**24 and 2**32, so that these
sums are exact in float64.
"""

import logging
from collections.abc import Mapping, Sequence
from itertools import compress, count
from typing import Any, NamedTuple

import torch.distributed as dist
from torch import Tensor

from .failures import note_batch, note_end_of_data, rename_call, wait_for_all_ranks
from .gathering import differing_ranks, gather_integers, raise_together, require_equal
from .hashes import batch_code, batch_hash, describe_batch, settings_hash
from .mesh import ParallelMesh

_LOG = logging.getLogger("echelon")

COMPARED_CALLS = 3  # number of first calls that are compared
CHECK_EVERY = 100
ENDED = object()  # in place of a batch, at the end of the data
_CODES = 2**24
_MOST_SHAPES = 64  # shapes of batches that ranks wait for; of more, as of texts without padding, any may come
_REDUCING = ("backward()", "reduce_gradients()", "step()")  # calls that communicate over the data axis
MODES, MODES_ADVICE = (
    "the modes (training or evaluation)",
    "call model.train() and model.eval() on all ranks alike",
)


class CallKind(NamedTuple):
    """The kind of a call.

    Args:
        trains: gradients are enabled.
        loss, outputs: the result is requested.
        outputs_everywhere: on all stages, not only the last one.
        training_mode: `model.training`.
    """

    trains: bool
    loss: bool
    outputs: bool
    outputs_everywhere: bool
    training_mode: bool


class AgreedCall(NamedTuple):
    """A call of `execute_pipeline` that all ranks make: its kind for a replica, and the result of a comparison.

    Args:
        kind: of the replica: its ranks may request different results.
        samples: by rank, the number of samples in its batch; None if the call is not compared beforehand.
    """

    kind: CallKind
    samples: Sequence[int] | None

    @property
    def is_compared(self) -> bool:
        """Return True if ranks have compared this call before they compute."""
        return self.samples is not None


def is_compared(number: int, check_every: int) -> bool:
    """Return True if this call, counted from 0, is compared beforehand; see [Note: compared calls]."""
    return number < COMPARED_CALLS or number % check_every == 0


class Agreement:
    """The agreement of all ranks on the calls of one boosted model, and the checksums recorded since the last step.

    Args:
        mesh: all ranks.
        check_every: every `check_every`-th call is compared beforehand.
    """

    def __init__(self, mesh: ParallelMesh, check_every: int = CHECK_EVERY) -> None:
        self._mesh = mesh
        self._check_every = check_every
        self._ranks = ranks = mesh.replica_ranks()
        # Of the code in [Note: sums of codes]; 0 for a replica of one rank, whose batches no other rank has.
        self._code_weight = 1 - len(ranks) if mesh.global_rank == ranks[0] else 1
        self._batches, self._inputs = count(), count()  # replicas may differ in calls of the model
        self._num_steps = 0
        # The kind of the last compared training call, as this rank and as its replica requested it.
        self._rank_kind = self._replica_kind = CallKind(
            trains=True, loss=True, outputs=False, outputs_everywhere=False, training_mode=True
        )
        self._equal_batches: list[bool] = []  # of all replicas, in the first calls
        # Recorded since the last step: a code of all batches, deviations with the text of their error, and calls.
        self._batch_code: int | Tensor = 0
        self._deviations: list[tuple[float | Tensor, str]] = []
        self._num_recorded = 0
        self._shapes: set[str] = set()  # of recorded batches

    # Before a call computes

    def compare_batch(
        self, batch: Any, kind: CallKind, samples: int, *, always: bool, error: ValueError | None = None
    ) -> AgreedCall:
        """Compare a call of `execute_pipeline` between ranks, if it is due; see [Note: compared calls].

        All-gather between CPUs in compared calls; a wait in the store where the data ends or the kind changes.

        Args:
            batch: of this rank, as the dataloader returned it; `ENDED` at the end of its data.
            kind: of the call, as this rank requested it.
            samples: number of samples in the batch.
            always: compare this call in any case.
            error: of this rank's batch.

        Raises:
            StopIteration: the data of all ranks has ended.
            ValueError: the data of some ranks has ended, batches differ within a replica, or only some ranks train.
                Also `error`: on every rank in a call that is compared, otherwise only on this one.
        """
        if batch is ENDED:
            note_end_of_data()
        is_due = self._is_due(next(self._batches)) or not kind.trains or always
        if error is not None and (self._mesh.world_size == 1 or not is_due):
            raise error
        if is_due:
            return self._compared(batch, kind, samples, error)
        if batch is ENDED:
            wait_for_all_ranks("execute_pipeline at the end of its data")
            raise StopIteration
        if kind != self._rank_kind:
            mode = "training" if kind.training_mode else "evaluation"
            has_new_mode = kind.training_mode != self._rank_kind.training_mode
            # Ranks whose call is as before never enter this.
            wait_for_all_ranks(
                f"execute_pipeline in {mode} mode, unlike the previous call" if has_new_mode else None
            )
            return self._compared(batch, kind, samples)
        rename_call("execute_pipeline in training")  # a rank that evaluates has another name
        return AgreedCall(self._replica_kind, None)

    def _is_due(self, number: int) -> bool:
        """Return True if the call of this number is compared beforehand."""
        return self._mesh.world_size == 1 or is_compared(number, self._check_every)

    def _compared(
        self, batch: Any, kind: CallKind, samples: int, error: ValueError | None = None
    ) -> AgreedCall:
        """Compare batches and kinds of calls, and keep the kind for later calls. All-gather between CPUs."""
        is_first = kind.trains and len(self._equal_batches) < COMPARED_CALLS and self._mesh.size("dp") > 1
        is_usable = batch is not ENDED and error is None
        is_hashed = is_usable and (is_first or self._mesh.size("pp", "sp", "tp") > 1)
        replica, code = self._mesh.rank("dp"), batch_hash(batch) if is_hashed else 0
        flags = (int(error is not None), int(batch is not ENDED))
        rows = gather_integers((*flags, replica, code, samples, *map(int, kind)))
        refused, have_batch, replicas, codes, num_samples, trains, losses, outputs, everywhere, modes = zip(
            *rows, strict=True
        )
        if any(refused):
            raise_together(error)
        _require_same_calls(have_batch, trains, modes)
        in_replica = [other == replica for other in replicas]
        replica_kind = CallKind(
            trains=any(trains),
            loss=any(losses),  # its reduction needs all ranks, also those that want none
            outputs=any(compress(outputs, in_replica)),
            outputs_everywhere=any(compress(everywhere, in_replica)),
            training_mode=kind.training_mode,
        )
        if kind.trains:
            self._rank_kind, self._replica_kind = kind, replica_kind
        self._require_equal_batches(replicas, codes)
        if is_first:
            self._note_replicas(are_equal=len(set(codes)) == 1)
        return AgreedCall(replica_kind, num_samples)

    def _note_replicas(self, *, are_equal: bool) -> None:
        """Log once if all replicas got equal batches in each of the first steps. No error: the data may be equal."""
        self._equal_batches.append(are_equal)
        if self._equal_batches == [True] * COMPARED_CALLS and self._mesh.global_rank == 0:
            _LOG.warning(
                f"all {self._mesh.size('dp')} replicas were given equal batches in each of the first {COMPARED_CALLS} "
                "steps: give the dataloader to booster.boost, or build it with booster.plugin.prepare_dataloader"
            )

    def compare_inputs(self, tensors: Any, *, training: bool, always: bool) -> None:
        """Compare a call of the model over the axes whose ranks compute it together, or record it if it is not due.

        All-gather of integers over tp and sp in compared calls.

        Args:
            tensors: of its arguments.
            training: the mode of the model.
            always: compare this call in any case.

        Raises:
            ValueError: inputs or modes differ; on every rank of the axis.
        """
        if not (self._is_due(next(self._inputs)) or always):
            self.note([tensors, training])
            return
        for axis in ("tp", "sp"):
            if self._mesh.size(axis) > 1:
                advice = "give all ranks of this axis equal batches (booster.plugin.prepare_dataloader does)"
                codes = {"the inputs": (batch_hash(tensors), advice), MODES: (int(training), MODES_ADVICE)}
                require_equal_call(codes, self._mesh.group(axis), f"axis {axis}")

    def compare_reductions(self, call: str, *, is_reduced: bool) -> None:
        """Compare the calls that reduce gradients over the data axis, in the first steps and every `check_every`-th.

        All-gather between CPUs.

        Args:
            call: "backward()", "reduce_gradients()" or "step()".
            is_reduced: this rank has reduced gradients.

        Raises:
            RuntimeError: ranks are in different calls, or only some dropped their gradients; on every rank.
        """
        is_due = is_compared(self._num_steps, self._check_every)
        self._num_steps += call == "step()"
        if self._mesh.size("data") == 1 or not is_due:
            return
        group = self._mesh.group("data")
        states = gather_integers(
            (_REDUCING.index(call), int(is_reduced)), group, "optimizer.step or backward"
        )
        by_rank = dict(zip(dist.get_process_group_ranks(group), states, strict=True))
        if len({code for code, _ in states}) > 1:
            where = ", ".join(f"rank {rank} in {_REDUCING[code]}" for rank, (code, _) in by_rank.items())
            raise RuntimeError(
                f"ranks average gradients in different calls: {where}. Call backward equally often on every rank "
                "between two steps; inside no_sync it averages nothing"
            )
        if len(set(states)) > 1:
            without = [rank for rank, (_, has_reduced) in by_rank.items() if not has_reduced]
            raise RuntimeError(
                f"rank(s) {without} have no reduced gradients, but other ranks have: call zero_grad and backward on "
                "every rank alike"
            )

    # Without a message, until the next step

    def note(self, batch: Any) -> None:
        """Record the checksum of a call that is not compared beforehand. No collective, no wait for a device.

        The heartbeats show the names, shapes and dtypes of the batch: ranks where these differ may never reach the
        comparison of the checksums, because they wait for each other inside a collective; gloo ends a process whose
        tensors have another size. So the ranks of a replica wait for each other, in the store, when shapes are new.

        Args:
            batch: must be equal on the ranks of one replica.

        Raises:
            UnmatchedCall: shapes are new, and another rank of the replica has others.
        """
        if self._code_weight:
            shapes = describe_batch(batch)
            is_new = shapes not in self._shapes and len(self._shapes) < _MOST_SHAPES
            note_batch(shapes, self._ranks, waits=is_new)
            self._shapes.add(shapes)
            self._batch_code = (self._batch_code * 31 + batch_code(batch)) % _CODES
        self._num_recorded += 1

    def require_zero(self, deviation: float | Tensor, error: str, *, waits: bool) -> None:
        """Raise an error if a number is above 0.

        Args:
            deviation: a number or 0-d tensor, equal on all ranks.
            error: its text.
            waits: read the number now, which waits for the device. Otherwise the next step reads it with its norm.

        Raises:
            ValueError: on every rank.
        """
        if not waits:
            self._deviations.append((deviation, error))
        elif deviation > 0:
            raise ValueError(error)

    @property
    def checksum_term(self) -> float | Tensor:
        """This rank's term of a sum that is 0 if the ranks of each replica agree; a Python float, or 0-d float64."""
        # Convert to float64 before adding: a code plus a float is float32, which rounds sums above 2**24.
        terms = (self._batch_code * self._code_weight, *(deviation for deviation, _ in self._deviations))
        return sum(term.double() if isinstance(term, Tensor) else term for term in terms)

    def code(self, settings: Any) -> int:
        """The checksum of the number of recorded calls and of settings, equal on all ranks; below 2**32."""
        return settings_hash({"calls": self._num_recorded, "settings": settings})

    def clear(self) -> None:
        """Drop the recorded checksums, after a step has compared them."""
        self._batch_code, self._deviations = 0, []
        self._num_recorded = 0

    def explain(self) -> None:
        """Compare the recorded checksums of all ranks. All-gather over the world.

        Raises:
            ValueError: ranks differ; names them, on every rank.
        """
        try:
            self._explain()
        finally:
            self.clear()
        raise AssertionError("checksums differ between ranks, but a full comparison finds no difference")

    def _explain(self) -> None:
        """Raise the first difference of a step: a deviation, the number of calls or the batches. Collective."""
        for deviation, error in self._deviations:
            self.require_zero(deviation, error, waits=True)
        require_equal(
            {"number of calls": self._num_recorded}, what="a step", rule="every rank must run the same"
        )
        replicas, codes = zip(*gather_integers((self._mesh.rank("dp"), int(self._batch_code))), strict=True)
        self._require_equal_batches(replicas, codes)

    def _require_equal_batches(self, replicas: Sequence[int], codes: Sequence[int]) -> None:
        """Raise ValueError if batches differ within a replica.

        Args:
            replicas: the replica of each rank of the world.
            codes: the code of each rank's batch.
        """
        first: dict[int, int] = {}  # code of a replica's first rank
        differing: dict[int, list[int]] = {}
        for rank, (replica, code) in enumerate(zip(replicas, codes, strict=True)):
            if first.setdefault(replica, code) != code:
                differing.setdefault(replica, []).append(rank)
        if differing:
            where = "; ".join(
                f"replica {replica}: rank(s) {ranks}" for replica, ranks in sorted(differing.items())
            )
            raise ValueError(
                "the batches differ between ranks of one replica "
                f"({where}, unlike its first rank): give the dataloader to booster.boost, or build it with "
                "booster.plugin.prepare_dataloader, or seed your own sampler and collator by the data-parallel rank "
                "alone"
            )


def require_equal_call(codes: Mapping[str, tuple[int, str]], group: dist.ProcessGroup, axis: str) -> None:
    """Raise ValueError on every rank of a group unless all ranks have equal codes. All-gather of integers.

    Args:
        codes: by meaning ("batches"): this rank's code, and the advice for ranks whose codes differ.
        group: ranks that compute one model together.
        axis: name of their axis.
    """
    rows = gather_integers([code for code, _ in codes.values()], group)
    for place, (meaning, (_, advice)) in enumerate(codes.items()):
        if differing := differing_ranks(rows, place):
            raise ValueError(
                f"{meaning} of rank(s) {differing} of {axis} differ from those of its first rank: {advice}"
            )


def _require_same_calls(have_batch: Sequence[int], trains: Sequence[int], modes: Sequence[int]) -> None:
    """Raise StopIteration if all ranks' data has ended, ValueError if only some has, or if only some ranks train.

    Args:
        have_batch: by rank, 1 if it has a batch.
        trains: by rank, 1 if gradients are enabled.
        modes: by rank, 1 if the model is in training mode.
    """
    ended = [rank for rank, has_batch in enumerate(have_batch) if not has_batch]
    if len(ended) == len(have_batch):
        raise StopIteration
    if ended:
        raise ValueError(
            f"the dataloader has ended on rank(s) {ended} while the other ranks still have batches: every "
            "rank must get equally many; build it with booster.plugin.prepare_dataloader"
        )
    if training := _only_some(trains):
        raise ValueError(
            f"execute_pipeline was called to train on rank(s) {training} and under torch.no_grad() on the others: call "
            "it under torch.no_grad() on every rank, to evaluate, or on none, to train"
        )
    if training := _only_some(modes):
        raise ValueError(
            f"the model is in training mode on rank(s) {training} and in evaluation mode on the others: call "
            "model.train() on every rank, or model.eval() on every rank"
        )


def _only_some(flags: Sequence[int]) -> list[int]:
    """Return the ranks with a flag; none if all or no ranks have it."""
    ranks = [rank for rank, is_on in enumerate(flags) if is_on]
    return ranks if len(ranks) < len(flags) else []
