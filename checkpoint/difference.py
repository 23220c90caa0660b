"""What differs between two checkpoints, whatever layouts wrote them. Distances of tensors are distance.py."""

from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from .distance import Distance, chunks_of, distance_between
from .opened import Opened
from .stored import Stored
from .tensor_file import dtype_name
from .weight_files import nbytes

# Of a config: what says nothing of the model.
PASSED_OVER = ("transformers_version", "_name_or_path")

Progress = Callable[[int], object]


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
    """What two checkpoints have in common, to be gone through.

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
        """Whether one is a Hugging Face folder, which has nothing else."""
        return self.a.manifest is None or self.b.manifest is None

    @property
    def same_ranks(self) -> bool:
        """Whether random states can be compared: those of a rank mean something only to the same rank."""
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
        """What was not compared, and why."""
        if self.models_alone:
            return ["a Hugging Face folder has no optimizer: models alone are compared"]
        return [] if self.same_ranks else ["written by other ranks: their random states are not compared"]

    def differences(self, progress: Progress) -> Iterator[Difference]:
        """All of them, as they are found.

        Args:
            progress: told the bytes of A's tensors as they are read.

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
