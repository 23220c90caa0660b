"""Recorded live bytes, operations and messages of a trace, from which its sections follow, also for another `ep_size`.

[Note: experts] A rank with E/P of E experts, over P ranks, has parameters of experts and gradients of E/P rows; with
balanced experts every other tensor has the same size under every P, and so have the rows that arrive. So every number
of a trace is a + b/P, and two traces give all further ones. Numbers are recorded at each growth of the live bytes, not
only the maximum, which another moment may have under another P. One expert per rank is traced on its own: a dimension
of size 1 may need no copy.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from fractions import Fraction
from itertools import zip_longest
from typing import Any

from ..cluster.traffic import Count
from .cost import Measured, Operation
from .sections import BACKWARD, FORWARD, LocalParameters, Section, Trace


@dataclass(frozen=True, kw_only=True)
class Recording:
    """The measured sections of one rank's computation of a microbatch.

    Args:
        forwards, backwards: by section, in the order of forward: an even number is between two layers, an odd one a
            layer. A section without gradients has an empty backward.
        outputs: bytes of each section's output.
        parameters: of all layers.
        num_rows: numbers of rows that a rank sends to experts in one exchange.
    """

    forwards: Sequence[Measured]
    backwards: Sequence[Measured]
    outputs: Sequence[int]
    parameters: Sequence[LocalParameters]
    num_rows: frozenset[int]

    def trace(self, traced_of: Sequence[int]) -> Trace:
        """Return the trace of the full model.

        Args:
            traced_of: by layer of the full model, the index of the recorded layer like it.
        """
        kept = self.forwards[0].start
        groups: list[list[Section]] = [[]]
        for number, (forward, backward) in enumerate(zip(self.forwards, self.backwards, strict=True)):
            kept += forward.end - forward.start
            if number % 2:
                groups.append([])
            groups[-1].append(
                Section(
                    kept=forward.end - forward.start,
                    output=self.outputs[number],
                    forward_peak=forward.peak - forward.start,
                    backward_peak=max(0, backward.peak - kept),
                    operations={FORWARD: forward.operations, BACKWARD: backward.operations},
                    traffic={FORWARD: forward.traffic, BACKWARD: backward.traffic},
                )
            )
        before, *layers = groups
        return Trace(
            before=before, layers=[layers[traced] for traced in traced_of], parameters=self.parameters
        )


class _Unlike(Exception):
    """Two recordings have other operations, or their numbers are not a + b/P."""


def recording_of(ep_size: int, known: Mapping[int, Recording]) -> Recording | None:
    """Return the recording under another size of the expert axis; None if it has to be traced.

    See [Note: experts].

    Args:
        ep_size: P, with more than one expert per rank.
        known: recordings by P, likewise, of the same layout otherwise.
    """
    if len(known) < 2:
        return None
    (first_size, first), (second_size, second) = list(known.items())[:2]
    if any(rows % ep_size for rows in first.num_rows):
        return None
    share = (Fraction(1, ep_size) - Fraction(1, second_size)) / (
        Fraction(1, first_size) - Fraction(1, second_size)
    )

    def number(left: Any, right: Any) -> Any:
        if left == right:
            return left
        value = right + share * (Fraction(left) - Fraction(right))
        if isinstance(left, float) or isinstance(right, float):
            return float(value)
        if value.denominator > 1:
            raise _Unlike
        return int(value)

    try:
        return _combined(first, second, number)
    except _Unlike:
        return None


def _combined(left: Recording, right: Recording, number: Callable[[Any, Any], Any]) -> Recording:
    """Return a recording of which each number is that of two numbers of these."""

    def numbers(left: Sequence[Any], right: Sequence[Any]) -> list[Any]:
        if len(left) != len(right):
            raise _Unlike
        return [number(*pair) for pair in zip(left, right, strict=True)]

    def measured(left: Measured, right: Measured) -> Measured:
        if left.traffic.keys() != right.traffic.keys() or len(left.operations) != len(right.operations):
            raise _Unlike
        return Measured(
            start=number(left.start, right.start),
            end=number(left.end, right.end),
            moments=numbers(left.moments, right.moments),
            operations=[
                Operation(number(one.flops, other.flops), number(one.nbytes, other.nbytes))
                for one, other in zip(left.operations, right.operations, strict=True)
            ],
            traffic={
                key: Count(
                    number(one.calls, (other := right.traffic[key]).calls),
                    number(one.nbytes, other.nbytes),
                    number(one.sent, other.sent),
                )
                for key, one in left.traffic.items()
            },
        )

    def parameters(left: LocalParameters | None, right: LocalParameters | None) -> LocalParameters:
        if left is None or right is None or (left.axis, left.layers) != (right.axis, right.layers):
            raise _Unlike
        sizes = {name: number(getattr(left, name), getattr(right, name)) for name in ("numel", "nbytes")}
        return LocalParameters(**sizes, axis=left.axis, layers=left.layers)

    if len(left.forwards) != len(right.forwards):
        raise _Unlike
    return Recording(
        forwards=[*map(measured, left.forwards, right.forwards)],
        backwards=[*map(measured, left.backwards, right.backwards)],
        outputs=numbers(left.outputs, right.outputs),
        parameters=[parameters(*pair) for pair in zip_longest(left.parameters, right.parameters)],
        num_rows=left.num_rows,
    )
