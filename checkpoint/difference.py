"""Compare two checkpoints, independent of the layouts that wrote them."""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from math import inf, prod
from typing import Any, NamedTuple

import torch
from torch import Tensor

from ..cluster.box import Box, Stored, flat_boxes
from .inspection import Opened, Progress, nbytes
from .tensor_file import dtype_name

# Config entries that do not describe the model.
PASSED_OVER = ("transformers_version", "_name_or_path")
CHUNK = 1 << 20  # entries read at a time: 8 MiB for each of a few temporary float64 tensors

_BITS = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}


@dataclass(frozen=True, kw_only=True)
class Distance:
    """The largest differences between two tensors.

    Args:
        absolute: the largest |a − b|; infinite if one of them is NaN or infinite and the other is not.
        relative: the largest |a − b| / max(|a|, |b|).
        magnitude: the largest finite |a| or |b|.
        differing: number of entries that differ in any bit; for different dtypes, in value.
        entries: number of all entries.
    """

    absolute: float = 0.0
    relative: float = 0.0
    magnitude: float = 0.0
    differing: int = 0
    entries: int = 0

    def joined(self, other: "Distance") -> "Distance":
        """Combine with the distance of other entries."""
        return Distance(
            absolute=max(self.absolute, other.absolute),
            relative=max(self.relative, other.relative),
            magnitude=max(self.magnitude, other.magnitude),
            differing=self.differing + other.differing,
            entries=self.entries + other.entries,
        )

    def exceeds(self, tolerance: float) -> bool:
        """Return True if |a − b| exceeds `tolerance` times the largest entry; with tolerance 0, if any bit differs."""
        return self.differing > 0 if tolerance == 0 else self.absolute > tolerance * self.magnitude


class Difference(NamedTuple):
    """A difference between checkpoints A and B.

    Args:
        kind: "model", "config", "optimizer", "groups", "scalars", "training" or "random".
        name: name of the tensor or value.
        what: description of the difference.
        distance: for tensors of equal shape, and for numbers.
    """

    kind: str
    name: str
    what: str
    distance: Distance | None = None


class Comparison:
    """Comparison of two checkpoints.

    Args:
        a, b: the opened checkpoints.
        tolerance: tensors and floats differ if any |a − b| exceeds this fraction of the tensor's largest entry; with
            0, if any bit differs.
    """

    def __init__(self, a: Opened, b: Opened, tolerance: float = 0.0) -> None:
        self._tolerance = tolerance
        self.notes: list[str] = []  # parts that are not compared, and why
        self._stores: list[tuple[str, Stored | None, Stored | None]] = [("model", a.model, b.model)]
        self._values: list[tuple[str, Any, Any]] = [("config", _config_of(a), _config_of(b))]
        if a.manifest is None or b.manifest is None:
            self.notes.append("a Hugging Face folder has no optimizer: only models are compared")
            return
        self._stores.append(("optimizer", a.optimizer, b.optimizer))
        for kind in ("scalars", "groups"):
            if a.optimizer is not None and b.optimizer is not None:
                self._values.append(
                    (kind, _scalars_or_rest(a.groups, kind), _scalars_or_rest(b.groups, kind))
                )
        self._values.append(("training", {**a.training, "layout": None}, {**b.training, "layout": None}))
        if a.random.keys() == b.random.keys():  # comparable only between the same ranks
            self._values.append(("random", dict(a.random), dict(b.random)))
        else:
            self.notes.append("written by other ranks: their random states are not compared")

    @property
    def total_bytes(self) -> int:
        """Size of A's tensors that are read, in bytes."""
        return sum(
            nbytes(a, name)
            for _, a, b in self._stores
            if a is not None and b is not None
            for name in a.names
            if name in b.names and a.shape(name) == b.shape(name)
        )

    def differences(self, progress: Progress) -> Iterator[Difference]:
        """Yield all differences as they are found.

        Args:
            progress: called with the bytes of A's tensors as they are read.

        Raises:
            ValueError, OSError: a file is damaged or missing.
        """
        for kind, a, b in self._stores:
            if a is not None and b is not None:
                yield from self._tensor_differences(kind, a, b, progress)
            elif a is not None or b is not None:
                yield Difference(kind, kind, f"only in {'B' if a is None else 'A'}")
        for kind, a_values, b_values in self._values:
            yield from self._value_differences(kind, dict(_leaves(a_values)), dict(_leaves(b_values)))

    def _tensor_differences(
        self, kind: str, a: Stored, b: Stored, progress: Progress
    ) -> Iterator[Difference]:
        """Yield the tensors that differ between two stores of one kind; reads them in chunks."""
        for name in dict.fromkeys([*a.names, *b.names]):
            if name not in a.names or name not in b.names:
                yield Difference(kind, name, f"only in {'A' if name in a.names else 'B'}")
                continue
            if (shape := a.shape(name)) != b.shape(name):
                yield Difference(kind, name, f"shape {list(shape)} in A, {list(b.shape(name))} in B")
                continue
            distance = Distance()
            for box in chunks_of(shape):
                distance = distance.joined(distance_between(a.read(name, box), b.read(name, box)))
                progress(box.numel * a.dtype(name).itemsize)
            if a.dtype(name) != b.dtype(name):
                what = f"{dtype_name(a.dtype(name))} in A, {dtype_name(b.dtype(name))} in B"
                yield Difference(kind, name, what, distance)
            elif distance.exceeds(self._tolerance):
                yield Difference(kind, name, "values", distance)

    def _value_differences(
        self, kind: str, a: Mapping[str, Any], b: Mapping[str, Any]
    ) -> Iterator[Difference]:
        """Yield the differences between plain values, as `_leaves` names them."""
        for name in dict.fromkeys([*a, *b]):
            if name not in a or name not in b:
                yield Difference(kind, name, f"only in {'A' if name in a else 'B'}")
                continue
            differ, distance = self._compared(a[name], b[name])
            if differ:
                yield Difference(kind, name, f"{_shown(a[name])} in A, {_shown(b[name])} in B", distance)

    def _compared(self, a: Any, b: Any) -> tuple[bool, Distance | None]:
        """Return True if two values differ, and their distance if they are numbers or tensors of one shape."""
        x, y = _as_tensor(a), _as_tensor(b)
        if x is None and y is None:
            differs = type(a) is not type(b) or a != b
            return differs, None
        if x is None or y is None or x.shape != y.shape:
            return True, None
        distance = distance_between(x, y)
        differs = x.dtype != y.dtype or distance.exceeds(self._tolerance)
        return differs, distance


def _config_of(opened: Opened) -> Mapping[str, Any]:
    return {name: value for name, value in (opened.config or {}).items() if name not in PASSED_OVER}


def _scalars_or_rest(groups: Mapping[str, Any], kind: str) -> Any:
    """Return the scalars of an optimizer's groups file, or everything else in it."""
    if kind == "scalars":
        return groups.get("scalars", {})
    return {name: value for name, value in groups.items() if name != "scalars"}


def _leaves(values: Any, name: str = "") -> Iterator[tuple[str, Any]]:
    """Yield plain values with their path, such as "scheduler._last_lr.1"."""
    if isinstance(values, Mapping):
        pairs: Any = values.items()
    elif isinstance(values, Sequence) and not isinstance(values, str | bytes):
        pairs = enumerate(values)
    else:
        yield name, values
        return
    for key, value in pairs:
        yield from _leaves(value, f"{name}.{key}" if name else str(key))


def _as_tensor(value: Any) -> Tensor | None:
    """Return a float or a tensor as a tensor; None for other values."""
    if isinstance(value, float):
        return torch.tensor(value, dtype=torch.float64)
    return value if isinstance(value, Tensor) else None


def _shown(value: Any) -> str:
    if isinstance(value, Tensor):
        return f"{dtype_name(value.dtype)} {list(value.shape)}" if value.numel() != 1 else repr(value.item())
    text = repr(value)
    return text if len(text) <= 60 else f"{text[:57]}…"


def distance_between(a: Tensor, b: Tensor) -> Distance:
    """Return the distance of two tensors of equal shape."""
    if not a.numel():
        return Distance()
    if a.is_complex() or b.is_complex():
        a, b = (torch.view_as_real(tensor.to(torch.complex128)) for tensor in (a, b))
    differing = int((_bits(a) != _bits(b)).sum()) if a.dtype == b.dtype else None
    if differing == 0:
        return Distance(magnitude=_magnitude(a.double()), entries=a.numel())
    x, y = a.double(), b.double()
    difference = (x - y).abs_()
    alike = (x == y) | (x.isnan() & y.isnan())  # equal infinities too
    difference.masked_fill_(alike, 0.0).nan_to_num_(nan=inf, posinf=inf)
    relative = difference / torch.maximum(x.abs(), y.abs()).nan_to_num_(nan=inf, posinf=inf)
    relative.masked_fill_(alike, 0.0).nan_to_num_(nan=inf, posinf=inf)  # inf / inf is NaN
    return Distance(
        absolute=difference.max().item(),
        relative=relative.max().item(),
        magnitude=max(_magnitude(x), _magnitude(y)),
        differing=int((~alike).sum()) if differing is None else differing,
        entries=a.numel(),
    )


def chunks_of(shape: Sequence[int], entries: int = CHUNK) -> Iterator[Box]:
    """Yield consecutive boxes of a tensor, in row-major order, of at most `entries` entries each."""
    num_entries = prod(shape)
    for start in range(0, num_entries, entries):
        yield from flat_boxes(start, min(start + entries, num_entries), shape)


def _bits(tensor: Tensor) -> Tensor:
    return tensor.contiguous().view(_BITS[tensor.dtype.itemsize])


def _magnitude(values: Tensor) -> float:
    return values.abs().nan_to_num_(nan=0.0, posinf=0.0).max().item()
