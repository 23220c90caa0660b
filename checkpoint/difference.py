"""The differences between two checkpoints, whatever layouts wrote them."""

from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass
from math import inf, prod
from typing import Any

import torch
from torch import Tensor

from .box import Box, Stored, flat_boxes
from .inspect import Opened, nbytes
from .tensor_file import dtype_name

# Parts of a config that say nothing of the model.
PASSED_OVER = ("transformers_version", "_name_or_path")
CHUNK = 1 << 20  # entries that are read at once: some 8 MiB for each of a few tensors in float64

_BITS = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}

Progress = Callable[[int], object]


@dataclass(frozen=True, kw_only=True)
class Distance:
    """The largest differences of two tensors.

    Args:
        absolute: the largest |a − b|; infinite where one of them is no number, or infinite, and the other is not.
        relative: the largest |a − b| / max(|a|, |b|).
        magnitude: the largest finite |a| or |b|.
        differing: entries that are not equal to the bit, of tensors of one format; else that are not equal.
        entries: of all.
    """

    absolute: float = 0.0
    relative: float = 0.0
    magnitude: float = 0.0
    differing: int = 0
    entries: int = 0

    def joined(self, other: "Distance") -> "Distance":
        """Of both."""
        return Distance(
            absolute=max(self.absolute, other.absolute),
            relative=max(self.relative, other.relative),
            magnitude=max(self.magnitude, other.magnitude),
            differing=self.differing + other.differing,
            entries=self.entries + other.entries,
        )

    def exceeds(self, tolerance: float) -> bool:
        """True where they differ by more than a share of the largest entry; by any bit where the share is 0."""
        return self.differing > 0 if tolerance == 0 else self.absolute > tolerance * self.magnitude


@dataclass(frozen=True, kw_only=True)
class Difference:
    """Something that is not the same in A and in B.

    Args:
        part: "model", "config", "optimizer", "groups", "scalars", "training" or "random".
        name: the tensor or the value.
        what: in words.
        distance: of tensors of one shape, and of numbers.
    """

    part: str
    name: str
    what: str
    distance: Distance | None = None


@dataclass(frozen=True, kw_only=True)
class Comparison:
    """Two checkpoints that are compared.

    Args:
        a, b: opened.
        tolerance: tensors and numbers differ where |a − b| is somewhere more than this share of the tensor's largest
            entry; 0: where any bit differs.
    """

    a: Opened
    b: Opened
    tolerance: float = 0.0

    @property
    def models_alone(self) -> bool:
        """True where one is a Hugging Face folder, which has nothing else."""
        return self.a.manifest is None or self.b.manifest is None

    @property
    def same_ranks(self) -> bool:
        """True where random states can be compared: those of a rank mean something only to the same rank."""
        return self.a.random.keys() == self.b.random.keys()

    @property
    def total_bytes(self) -> int:
        """Of A's tensors that are read."""
        stores: list[tuple[Stored, Stored]] = [(self.a.model, self.b.model)]
        if not self.models_alone and self.a.optimizer is not None and self.b.optimizer is not None:
            stores.append((self.a.optimizer, self.b.optimizer))
        return sum(
            nbytes(a, name)
            for a, b in stores
            for name in a.names
            if name in b.names and _same_shape(a, b, name)
        )

    def notes(self) -> list[str]:
        """Parts that are not compared, and why."""
        if self.models_alone:
            return ["a Hugging Face folder has no optimizer: models alone are compared"]
        return [] if self.same_ranks else ["written by other ranks: their random states are not compared"]

    def differences(self, progress: Progress) -> Iterator[Difference]:
        """All of them, as they are found.

        Args:
            progress: gets the bytes of A's tensors as they are read.

        Raises:
            ValueError, OSError: a file is damaged or missing.
        """
        yield from self._tensors("model", self.a.model, self.b.model, progress)
        yield from self._values("config", _model_config(self.a), _model_config(self.b))
        if self.models_alone:
            return
        yield from self._optimizers(progress)
        yield from self._values("training", _without_layout(self.a), _without_layout(self.b))
        if self.same_ranks:
            yield from self._values("random", self.a.random, self.b.random)

    def _optimizers(self, progress: Progress) -> Iterator[Difference]:
        a, b = self.a.optimizer, self.b.optimizer
        if a is None or b is None:
            if a is not b:
                yield Difference(
                    part="optimizer", name="optimizer", what=f"only in {'B' if a is None else 'A'}"
                )
            return
        yield from self._tensors("optimizer", a, b, progress)
        a_groups, b_groups = dict(self.a.groups), dict(self.b.groups)
        yield from self._values("scalars", a_groups.pop("scalars", {}), b_groups.pop("scalars", {}))
        yield from self._values("groups", a_groups, b_groups)

    def _tensors(self, part: str, a: Stored, b: Stored, progress: Progress) -> Iterator[Difference]:
        for name, only in _lonely(a.names, b.names):
            yield Difference(part=part, name=name, what=only)
        for name in a.names:
            if name not in b.names:
                continue
            if not _same_shape(a, b, name):
                what = f"shape {list(a.shape(name))} in A, {list(b.shape(name))} in B"
                yield Difference(part=part, name=name, what=what)
                continue
            distance = _distance(a, b, name, progress)
            if a.dtype(name) != b.dtype(name):
                what = f"{dtype_name(a.dtype(name))} in A, {dtype_name(b.dtype(name))} in B"
                yield Difference(part=part, name=name, what=what, distance=distance)
            elif distance.exceeds(self.tolerance):
                yield Difference(part=part, name=name, what="values", distance=distance)

    def _values(self, part: str, a: Any, b: Any, name: str = "") -> Iterator[Difference]:
        """Of plain values: mappings, sequences, tensors, and what is compared by ==."""
        if isinstance(a, Mapping) and isinstance(b, Mapping):
            for key, only in _lonely(a, b):
                yield Difference(part=part, name=_below(name, key), what=only)
            for key in a:
                if key in b:
                    yield from self._values(part, a[key], b[key], _below(name, key))
        elif _are_sequences(a, b) and len(a) == len(b):
            for index, (left, right) in enumerate(zip(a, b, strict=True)):
                yield from self._values(part, left, right, _below(name, index))
        else:
            yield from self._leaves(part, a, b, name)

    def _leaves(self, part: str, a: Any, b: Any, name: str) -> Iterator[Difference]:
        x, y = _as_tensor(a), _as_tensor(b)
        if x is None or y is None or x.shape != y.shape:
            if type(a) is not type(b) or _plainly_differ(a, b):
                yield Difference(part=part, name=name, what=f"{_shown(a)} in A, {_shown(b)} in B")
            return
        distance = distance_between(x, y)
        if distance.exceeds(self.tolerance) or x.dtype != y.dtype:
            yield Difference(
                part=part, name=name, what=f"{_shown(a)} in A, {_shown(b)} in B", distance=distance
            )


def _distance(a: Stored, b: Stored, name: str, progress: Progress) -> Distance:
    distance = Distance()
    for box in chunks_of(a.shape(name)):
        distance = distance.joined(distance_between(a.read(name, box), b.read(name, box)))
        progress(box.numel * a.dtype(name).itemsize)
    return distance


def _lonely(a: Collection[Any], b: Collection[Any]) -> Iterator[tuple[Any, str]]:
    yield from ((name, "only in A") for name in a if name not in b)
    yield from ((name, "only in B") for name in b if name not in a)


def _same_shape(a: Stored, b: Stored, name: str) -> bool:
    return a.shape(name) == b.shape(name)


def _model_config(opened: Opened) -> Mapping[str, Any]:
    return {name: value for name, value in (opened.config or {}).items() if name not in PASSED_OVER}


def _without_layout(opened: Opened) -> Mapping[str, Any]:
    return {name: value for name, value in opened.training.items() if name != "layout"}


def _below(name: str, key: object) -> str:
    return f"{name}.{key}" if name else str(key)


def _are_sequences(a: Any, b: Any) -> bool:
    return all(isinstance(each, Sequence) and not isinstance(each, str | bytes) for each in (a, b))


def _as_tensor(value: Any) -> Tensor | None:
    """A number or a tensor as a tensor."""
    if isinstance(value, Tensor):
        return value
    if isinstance(value, float):
        return torch.tensor(value, dtype=torch.float64)
    return None


def _plainly_differ(a: Any, b: Any) -> bool:
    return bool(a.shape != b.shape) if isinstance(a, Tensor) else bool(a != b)


def _shown(value: Any) -> str:
    if isinstance(value, Tensor):
        return f"{dtype_name(value.dtype)} {list(value.shape)}" if value.numel() > 1 else repr(value.item())
    text = repr(value)
    return text if len(text) <= 60 else f"{text[:57]}…"


def distance_between(a: Tensor, b: Tensor) -> Distance:
    """The distance of two tensors of one shape."""
    if not a.numel():
        return Distance()
    if a.is_complex() or b.is_complex():
        a, b = (torch.view_as_real(each.to(torch.complex128)) for each in (a, b))
    differing = int((_bits(a) != _bits(b)).sum()) if a.dtype == b.dtype else None
    if differing == 0:
        return Distance(magnitude=_magnitude(a.double()), entries=a.numel())
    x, y = a.double(), b.double()
    difference = (x - y).abs_()
    alike = (x == y) | (x.isnan() & y.isnan())  # infinities too
    difference.masked_fill_(alike, 0.0).nan_to_num_(nan=inf, posinf=inf)
    relative = difference / torch.maximum(x.abs(), y.abs()).nan_to_num_(nan=inf, posinf=inf)
    relative.masked_fill_(alike, 0.0).nan_to_num_(nan=inf, posinf=inf)  # inf / inf: no number
    return Distance(
        absolute=difference.max().item(),
        relative=relative.max().item(),
        magnitude=max(_magnitude(x), _magnitude(y)),
        differing=int((~alike).sum()) if differing is None else differing,
        entries=a.numel(),
    )


def chunks_of(shape: Sequence[int], entries: int = CHUNK) -> Iterator[Box]:
    """Boxes of a tensor, end to end in row-major order, of at most so many entries each."""
    whole = prod(shape)
    for start in range(0, whole, entries):
        yield from flat_boxes(start, min(start + entries, whole), shape)


def _bits(tensor: Tensor) -> Tensor:
    return tensor.contiguous().view(_BITS[tensor.dtype.itemsize])


def _magnitude(values: Tensor) -> float:
    return values.abs().nan_to_num_(nan=0.0, posinf=0.0).max().item()
