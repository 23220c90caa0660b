"""Compare the batches and settings of a step between ranks, within a reduction that the step needs anyway.

[Note: compared calls] In the first calls, and in every `check_every`-th, ranks gather and compare their batches and
settings before they compute, and an error names the rank that differs. In all other calls nothing is sent: each rank
records checksums of its batch and settings. Sums of the checksums are part of the all-reduce of the gradients' norm.
If they show a difference the full comparison runs, and the step raises before any parameter changes.

[Note: sums of codes] A replica of n ranks agrees if (1 − n)·(code of its first rank) + (codes of the others) is 0. The
world agrees if all codes add up to the world size times the first one. Codes are below 2**24 and 2**32, so that these
sums are exact in float64.
"""

from typing import Any

from torch import Tensor

from .agree import batch_code, describe_batch, differing_ranks, gather_integers, require_equal, settings_hash
from .failures import note_batch
from .mesh import ParallelMesh

COMPARED_CALLS = 3  # number of first calls that are compared
CHECK_EVERY = 100
_CODES = 2**24


def is_compared(number: int, check_every: int = CHECK_EVERY) -> bool:
    """Return True if this call, counted from 0, is compared beforehand; see [Note: compared calls]."""
    return number < COMPARED_CALLS or number % check_every == 0


class StepAgreement:
    """The checksums that a rank has recorded since the last step.

    Args:
        mesh: all ranks.
        check_every: every `check_every`-th call is compared beforehand.
    """

    def __init__(self, mesh: ParallelMesh, check_every: int = CHECK_EVERY) -> None:
        self._mesh = mesh
        self._check_every = check_every
        self._ranks = ranks = mesh.replica_ranks()
        self._weight = 1 - len(ranks) if mesh.global_rank == ranks[0] else 1
        self._num_calls = 0
        self._batch: int | Tensor = 0
        self._deviations: list[tuple[Tensor, str]] = []  # with the text of the error
        self._num_noted = 0

    def is_due(self) -> bool:
        """Count a call. Return True if it is compared beforehand; equal on all ranks."""
        number, self._num_calls = self._num_calls, self._num_calls + 1
        return self._mesh.world_size == 1 or is_compared(number, self._check_every)

    def note(self, batch: Any) -> None:
        """Record the checksum of a call that is not compared beforehand. No communication, no wait for a device.

        The heartbeats show the names, shapes and dtypes of the batch: ranks where these differ may never reach the
        comparison of the checksums, because they wait for each other inside a collective.

        Args:
            batch: must be equal on the ranks of one replica.
        """
        if self._weight:  # otherwise no other rank has this batch
            note_batch(describe_batch(batch), self._ranks)
            self._batch = (self._batch * 31 + batch_code(batch)) % _CODES
        self._num_noted += 1

    def note_deviation(self, deviation: Tensor, why: str) -> None:
        """Record a 0-d number, equal on all ranks, that is above 0 on an error, and the text of that error."""
        self._deviations.append((deviation, why))

    @property
    def share(self) -> float | Tensor:
        """This rank's term of a sum that is 0 if the ranks of each replica agree; a Python float, or 0-d float64."""
        # Convert to float64 before adding: a code plus a float is float32, which rounds sums above 2**24.
        parts = (self._batch * self._weight, *(deviation for deviation, _ in self._deviations))
        return sum(part.double() if isinstance(part, Tensor) else part for part in parts)

    def code(self, settings: Any) -> int:
        """The checksum of the number of recorded calls and of settings, equal on all ranks; below 2**32."""
        return settings_hash({"calls": self._num_noted, "settings": settings})

    def clear(self) -> None:
        """Drop the recorded checksums, after a step has compared them."""
        self._batch, self._deviations = 0, []
        self._num_noted = 0

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
        for deviation, why in self._deviations:
            if float(deviation) > 0:
                raise ValueError(why)
        require_equal(
            {"number of calls": self._num_noted}, what="a step", rule="every rank must run the same"
        )
        found = gather_integers((self._mesh.rank("dp"), int(self._batch)))
        self.require_equal_batches([(replica, code) for replica, code in found])

    def require_equal_batches(self, codes: list[tuple[int, int]]) -> None:
        """Compare the batches within replicas.

        Args:
            codes: for each rank of the world its replica and the checksum of its batch.

        Raises:
            ValueError: they differ within a replica.
        """
        differing = {}
        for replica in range(self._mesh.size("dp")):
            ranks = [rank for rank, (of, _) in enumerate(codes) if of == replica]
            if found := differing_ranks([codes[rank][1:] for rank in ranks]):
                differing[replica] = [ranks[place] for place in found]
        if differing:
            where = "; ".join(f"replica {replica}: rank(s) {ranks}" for replica, ranks in differing.items())
            raise ValueError(
                "the batches differ between ranks of one replica "
                f"({where}, unlike its first rank): give the dataloader to booster.boost, or build it with "
                "booster.plugin.prepare_dataloader, or seed your own sampler and collator by the data-parallel rank "
                "alone"
            )
