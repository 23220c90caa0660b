"""What is in a checkpoint, in numbers and names. Showing it is the command line's."""

from collections import Counter
from collections.abc import Collection, Iterator, Mapping
from dataclasses import dataclass
from fnmatch import fnmatchcase
from typing import Any

from torch import Tensor

from .box import Box
from .opened import Opened
from .step_save import OPTIMIZER
from .stored import Stored
from .tensor_file import dtype_name
from .weight_files import nbytes

MODEL = "model"


@dataclass(frozen=True, kw_only=True)
class FileSize:
    """A file, by its path in the folder."""

    path: str
    bytes: int


@dataclass(frozen=True, kw_only=True)
class Part:
    """Tensors of one kind.

    Args:
        name: "model", or a state of the optimizer: "exp_avg", "master", …
        tensors, entries, bytes: how many.
        dtypes: bytes by format.
    """

    name: str
    tensors: int
    entries: int
    bytes: int
    dtypes: Mapping[str, int]


@dataclass(frozen=True, kw_only=True)
class Group:
    """A group of the optimizer's parameters."""

    options: Mapping[str, Any]
    parameters: int


@dataclass(frozen=True, kw_only=True)
class Summary:
    """What is in a folder. What a Hugging Face folder has not is None or empty.

    Args:
        path: of the step-… folder, or of the Hugging Face folder.
        step, echelon: the step, and the release that wrote it.
        model_class: of transformers, as the config has it.
        layout: ranks along each axis of what wrote it.
        files: of the whole folder.
        parts: of the tensors.
        optimizer: its class.
        groups: of its parameters.
        scheduler, scaler, data, skipped_steps, user: as they were saved.
        random: the ranks whose random states there are.
    """

    path: str
    step: int | None
    echelon: str | None
    model_class: str | None
    layout: Mapping[str, int] | None
    files: tuple[FileSize, ...]
    parts: tuple[Part, ...]
    optimizer: str | None
    groups: tuple[Group, ...]
    scheduler: Any
    scaler: Any
    data: Any
    skipped_steps: Any
    user: Any
    random: tuple[str, ...]


@dataclass(frozen=True, kw_only=True)
class TensorLine:
    """A tensor, and the files that it lies in, by their paths in the folder."""

    name: str
    shape: tuple[int, ...]
    dtype: str
    files: tuple[str, ...]


def summarize(opened: Opened) -> Summary:
    """What is in a folder; no tensor is read."""
    manifest, training = opened.manifest or {}, opened.training
    extra = opened.groups.get("extra", {})
    return Summary(
        path=str(opened.path),
        step=manifest.get("step"),
        echelon=manifest.get("echelon"),
        model_class=next(iter((opened.config or {}).get("architectures") or ()), None),
        layout=training.get("layout", {}).get("sizes"),
        files=tuple(_files(opened)),
        parts=tuple(_parts(opened)),
        optimizer=opened.groups.get("optimizer"),
        groups=tuple(
            Group(options=group["options"], parameters=len(group["parameters"]))
            for group in opened.groups.get("groups", ())
        ),
        scheduler=training.get("scheduler"),
        scaler=extra.get("scaler"),
        data=training.get("data"),
        skipped_steps=extra.get("skipped_steps"),
        user=training.get("user"),
        random=tuple(opened.random),
    )


def tensor_lines(opened: Opened, pattern: str = "*") -> Iterator[TensorLine]:
    """The tensors whose name fits a pattern of the shell; those of the optimizer are called STATE/PARAMETER."""
    model, states = opened.model, opened.optimizer
    for name in model.names:
        if fnmatchcase(name, pattern):
            yield _line(model, name, [str(model.path(name).relative_to(opened.path))])
    if states is not None:
        for name in states.names:
            if fnmatchcase(name, pattern):
                yield _line(states, name, [f"{OPTIMIZER}/{box.file}" for box in states.boxes[name]])


def plain(value: Any) -> Any:
    """The same as JSON can hold it: tensors by their format and shape, where they are no numbers."""
    if isinstance(value, Tensor):
        return value.item() if value.numel() == 1 else f"{dtype_name(value.dtype)} {list(value.shape)}"
    if isinstance(value, Mapping):
        return {str(key): plain(each) for key, each in value.items()}
    if isinstance(value, Collection) and not isinstance(value, str | bytes):
        return [plain(each) for each in value]
    return value if isinstance(value, str | int | float | None) else repr(value)


def _files(opened: Opened) -> Iterator[FileSize]:
    for path in sorted(opened.path.rglob("*")):
        if path.is_file():
            yield FileSize(path=str(path.relative_to(opened.path)), bytes=path.stat().st_size)


def _parts(opened: Opened) -> Iterator[Part]:
    yield _part(MODEL, opened.model, opened.model.names)
    if opened.optimizer is not None:
        states: dict[str, list[str]] = {}
        for name in opened.optimizer.names:
            states.setdefault(name.partition("/")[0], []).append(name)
        for state, names in states.items():
            yield _part(state, opened.optimizer, names)


def _part(part: str, stored: Stored, names: Collection[str]) -> Part:
    dtypes: Counter[str] = Counter()
    for name in names:
        dtypes[dtype_name(stored.dtype(name))] += nbytes(stored, name)
    return Part(
        name=part,
        tensors=len(names),
        entries=sum(Box.whole(stored.shape(name)).numel for name in names),
        bytes=dtypes.total(),
        dtypes=dict(dtypes),
    )


def _line(stored: Stored, name: str, files: list[str]) -> TensorLine:
    return TensorLine(
        name=name,
        shape=stored.shape(name),
        dtype=dtype_name(stored.dtype(name)),
        files=tuple(dict.fromkeys(files)),
    )
