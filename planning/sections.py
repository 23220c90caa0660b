"""The computation of one rank for a microbatch, section by section, and its parameters."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property

from ..cluster.traffic import Count
from .cost import Operation

FORWARD, BACKWARD = "forward", "backward"


@dataclass(frozen=True, kw_only=True, eq=False)
class Section:
    """A part of the model between two cuts; see [Note: sections] in cost.py. Bytes, per microbatch.

    Args:
        kept: what forward keeps for backward, with its output.
        output: its output, which the next stage receives.
        forward_peak: the maximum during forward, above what was live before it.
        backward_peak: the maximum during backward, above what forward kept of this section and those before.
        operations, traffic: by direction.
    """

    kept: int
    output: int
    forward_peak: int
    backward_peak: int
    operations: Mapping[str, Sequence[Operation]]
    traffic: Mapping[str, Mapping[tuple[str, str], Count]]

    @cached_property
    def recomputed(self) -> "Section":
        """The same section if backward computes its forward again."""
        forward, backward = self.operations[FORWARD], self.operations[BACKWARD]
        sent, sent_back = self.traffic[FORWARD], self.traffic[BACKWARD]
        both = {key: sent.get(key, Count()) + sent_back.get(key, Count()) for key in {**sent, **sent_back}}
        kept = min(self.kept, self.output)
        again = self.kept - kept
        return replace(
            self,
            kept=kept,
            backward_peak=max(self.forward_peak, again + self.backward_peak),
            operations={FORWARD: forward, BACKWARD: [*forward, *backward]},
            traffic={FORWARD: sent, BACKWARD: both},
        )

    def scaled(self, samples: int) -> "Section":
        """Return the section for a microbatch of this many times as many samples."""
        return replace(
            self,
            **{
                name: samples * getattr(self, name)
                for name in ("kept", "output", "forward_peak", "backward_peak")
            },
            operations={
                direction: [
                    Operation(samples * operation.flops, samples * operation.nbytes)
                    for operation in operations
                ]
                for direction, operations in self.operations.items()
            },
            traffic={
                direction: {
                    key: Count(count.calls, samples * count.nbytes, samples * count.sent)
                    for key, count in counts.items()
                }
                for direction, counts in self.traffic.items()
            },
        )


@dataclass(frozen=True, kw_only=True)
class LocalParameters:
    """Parameters of this rank that lie in the same layers.

    Args:
        numel, nbytes: of the local shards.
        axis: the sub-axis of data over which they are sharded; None if all ranks of data replicate them.
        layers: the layers of the full model whose stages have them.
    """

    numel: int
    nbytes: int
    axis: str | None
    layers: frozenset[int]


@dataclass(frozen=True, kw_only=True, eq=False)
class Trace:
    """One rank's computation of a microbatch.

    Args:
        before: the sections before the first layer.
        layers: the sections of every layer of the full model, with those behind it.
        parameters: of all layers; of a model without known layers, of a single one.
    """

    before: Sequence[Section]
    layers: Sequence[Sequence[Section]]
    parameters: Sequence[LocalParameters]

    def scaled(self, samples: int) -> "Trace":
        """Return the trace of a microbatch of this many times as many samples."""
        made: dict[Section, Section] = {}  # like layers share one

        def scale(section: Section) -> Section:
            if section not in made:
                made[section] = section.scaled(samples)
            return made[section]

        return replace(
            self, before=[*map(scale, self.before)], layers=[[*map(scale, layer)] for layer in self.layers]
        )

    def stage(self, start: int, stop: int, *, num_recomputed: int = 0) -> list[Section]:
        """Return the sections of a stage with the layers range(start, stop), of which the first are recomputed."""
        sections = [*self.before] if start == 0 else []
        stop = min(stop, len(self.layers))  # of a model without known layers all sections are before
        for layer in range(start, stop):
            first, *others = self.layers[layer]
            sections += [first.recomputed if layer < start + num_recomputed else first, *others]
        return sections
