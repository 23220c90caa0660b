"""Open, summarize and verify a checkpoint or a Hugging Face folder, in one process."""

from collections import Counter
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
from dataclasses import dataclass
from fnmatch import fnmatchcase
from itertools import product
from pathlib import Path
from typing import Any, NamedTuple

import transformers
from torch import Tensor
from transformers import AutoConfig

from ..cluster.box import Box, Stored, coverage_errors
from ..cluster.layout import AXES
from ..lazy.files import named_values, read_json
from .dcp import INDEX, StateFiles
from .full_state import MODEL, OPTIMIZER, RANDOM, TRAINING, random_file
from .local_tensors import TensorNames
from .model import SAFETENSORS, TORCH
from .optimizer_state import GROUPS
from .pretrained import Weights, fitting_errors, outline_of
from .step_folders import MANIFEST, damage_of, manifest_of, newest_first
from .tensor_file import dtype_name, read_values

_PATTERNS = ("*.safetensors", "pytorch_model*.bin", "*.index.json")

Progress = Callable[[int], object]


@dataclass(frozen=True, kw_only=True)
class Opened:
    """The content of an opened folder; tensors are read on demand.

    Args:
        path: the step-… folder, or the Hugging Face folder.
        manifest: the manifest; None for a Hugging Face folder.
        model: the weights.
        config: the model's config; None if the folder has none.
        optimizer: the optimizer's tensors; None if there are none.
        groups: class, groups and scalars of the optimizer; empty if there is none.
        training: scheduler, position in the data, user values, sizes of the mesh; empty for a Hugging Face folder.
        random: the random states of every rank, by its coordinates: "pp 0, dp 1, sp 0, tp 0".
    """

    path: Path
    manifest: Mapping[str, Any] | None
    model: Weights
    config: Mapping[str, Any] | None
    optimizer: StateFiles | None
    groups: Mapping[str, Any]
    training: Mapping[str, Any]
    random: Mapping[str, Mapping[str, Any]]


def find_folder(path: Path) -> Path:
    """Return the given step-… or Hugging Face folder, or the newest complete step in the given folder.

    Raises:
        ValueError: the path is neither.
    """
    if not path.is_dir():
        raise ValueError(
            f"{path} is not a folder: give a step-… folder, the one above, or a Hugging Face folder"
        )
    if (path / MANIFEST).is_file():
        return path
    complete = [step for step in newest_first(path) if (step / MANIFEST).is_file()]
    if complete:
        return complete[0]
    if any(True for pattern in _PATTERNS for _ in path.glob(pattern)):
        return path
    raise ValueError(
        f"{path} is not a complete checkpoint (it has no {MANIFEST}), contains none (step-…), and is not a Hugging "
        "Face folder (it has no model.safetensors or the like)"
    )


def open_folder(path: Path) -> Opened:
    """Open a folder that `find_folder` returned.

    Raises:
        ValueError: a file in it is damaged; names the file.
        OSError: a file in it is missing.
    """
    is_checkpoint = (path / MANIFEST).is_file()
    model = path / MODEL if is_checkpoint else path
    optimizer = path / OPTIMIZER
    has_optimizer = is_checkpoint and optimizer.is_dir()
    random = {}
    for file in sorted((path / RANDOM).glob("*.pt")) if is_checkpoint else ():
        state = dict(_read_mapping(file))
        random[", ".join(f"{axis} {rank}" for axis, rank in state.pop("coordinates", {}).items())] = state
    return Opened(
        path=path,
        manifest=manifest_of(path) if is_checkpoint else None,
        model=Weights(model),
        config=read_json(model / "config.json") if (model / "config.json").is_file() else None,
        optimizer=StateFiles(optimizer) if has_optimizer else None,
        groups=_read_mapping(optimizer / GROUPS) if has_optimizer else {},
        training=_read_mapping(path / TRAINING) if is_checkpoint else {},
        random=random,
    )


def _read_mapping(path: Path) -> Mapping[str, Any]:
    return named_values(read_values(path), path)


def nbytes(stored: Stored, name: str) -> int:
    """Return the size of an unsharded tensor in bytes."""
    return Box.full(stored.shape(name)).numel * stored.dtype(name).itemsize


def summarize(opened: Opened) -> dict[str, Any]:
    """Summarize the content of a folder, without reading tensors.

    Returns:
        By name: path, step, echelon (the release), model_class, layout (sizes of the mesh), files (path and bytes),
        parts (kinds of tensors: name, tensors, entries, bytes, bytes by dtype), optimizer (its class), groups
        (options, and number of parameters), scheduler, scaler, data, skipped_steps, user, random (coordinates of
        ranks). Entries that a Hugging Face folder lacks are None or empty.
    """
    manifest, training = opened.manifest or {}, opened.training
    extra = opened.groups.get("extra", {})
    files = sorted(path for path in opened.path.rglob("*") if path.is_file())
    by_kind: dict[str, list[tuple[Stored, str]]] = {MODEL: []}
    for stored, name, _ in _tensors(opened):
        kind = MODEL if stored is opened.model else name.partition("/")[0]
        by_kind.setdefault(kind, []).append((stored, name))
    return {
        "path": str(opened.path),
        "step": manifest.get("step"),
        "echelon": manifest.get("echelon"),
        "model_class": next(iter((opened.config or {}).get("architectures") or ()), None),
        "layout": training.get("layout", {}).get("sizes"),
        "files": [
            {"path": str(path.relative_to(opened.path)), "bytes": path.stat().st_size} for path in files
        ],
        "parts": [_kind_summary(kind, tensors) for kind, tensors in by_kind.items()],
        "optimizer": opened.groups.get("optimizer"),
        "groups": [
            {"options": group["options"], "parameters": len(group["parameters"])}
            for group in opened.groups.get("groups", ())
        ],
        "scheduler": training.get("scheduler"),
        "scaler": extra.get("scaler"),
        "data": training.get("data"),
        "skipped_steps": extra.get("skipped_steps"),
        "user": training.get("user"),
        "random": list(opened.random),
    }


def _kind_summary(kind: str, tensors: Collection[tuple[Stored, str]]) -> dict[str, Any]:
    """Summarize the tensors of one kind."""
    bytes_by_dtype: Counter[str] = Counter()
    for stored, name in tensors:
        bytes_by_dtype[dtype_name(stored.dtype(name))] += nbytes(stored, name)
    entries = sum(Box.full(stored.shape(name)).numel for stored, name in tensors)
    sizes = {"tensors": len(tensors), "entries": entries, "bytes": bytes_by_dtype.total()}
    return {"name": kind, **sizes, "dtypes": dict(bytes_by_dtype)}


def list_tensors(opened: Opened, pattern: str = "*") -> Iterator[dict[str, Any]]:
    """Yield name, shape, dtype and files of the tensors whose name matches a shell pattern.

    Tensors of the optimizer are named STATE/PARAMETER.
    """
    for stored, name, files in _tensors(opened):
        if fnmatchcase(name, pattern):
            shape, dtype = list(stored.shape(name)), dtype_name(stored.dtype(name))
            yield {"name": name, "shape": shape, "dtype": dtype, "files": list(dict.fromkeys(files))}


def _tensors(opened: Opened) -> Iterator[tuple[Stored, str, list[str]]]:
    """Yield all tensors with their files."""
    for name, path in opened.model.paths.items():
        yield opened.model, name, [str(path.relative_to(opened.path))]
    if (states := opened.optimizer) is not None:
        for name in states.names:
            yield states, name, [f"{OPTIMIZER}/{box.file}" for box in states.boxes[name]]


def plain(value: Any) -> Any:
    """Convert a value for JSON: a tensor becomes a number, or its dtype and shape if it has several entries."""
    if isinstance(value, Tensor):
        return value.item() if value.numel() == 1 else f"{dtype_name(value.dtype)} {list(value.shape)}"
    if isinstance(value, Mapping):
        return {str(key): plain(entry) for key, entry in value.items()}
    if isinstance(value, Collection) and not isinstance(value, str | bytes):
        return [plain(entry) for entry in value]
    return value if isinstance(value, str | int | float | None) else repr(value)


class Findings(NamedTuple):
    """Errors and notes of a verified folder.

    Args:
        errors: damage; each error names the file and, if known, the tensor.
        notes: parts that could not be checked, and harmless irregularities.
    """

    errors: tuple[str, ...]
    notes: tuple[str, ...]


def examine(folder: Path, *, progress: Progress) -> Findings:
    """Verify the hashes of all files of a checkpoint, then the consistency between the files.

    A Hugging Face folder has no hashes: only its consistency is checked.

    Args:
        folder: result of `find_folder`.
        progress: called with the size of every file after it was read.
    """
    if not (folder / MANIFEST).is_file():
        notes = [f"without {MANIFEST} there are no hashes to compare"]
        errors = _errors_of(lambda: _model_errors(folder, notes), folder)  # adds to the notes
        return Findings(tuple(errors), tuple(notes))
    try:
        manifest = manifest_of(folder)
    except ValueError as error:
        return Findings((str(error),), ())
    present = {str(path.relative_to(folder)) for path in folder.rglob("*") if path.is_file()}
    notes = [f"{name} is not in the manifest" for name in sorted(present - {*manifest["files"], MANIFEST})]
    errors = []
    for name, record in manifest["files"].items():
        errors += damage_of(folder, name, record)
        progress(record.bytes)
    errors += _errors_of(lambda: _model_errors(folder / MODEL, notes), folder / MODEL)
    if (folder / OPTIMIZER).is_dir():
        errors += _errors_of(lambda: _optimizer_errors(folder), folder / OPTIMIZER)
    errors += _errors_of(lambda: _training_errors(folder, manifest["step"]), folder / TRAINING)
    return Findings(tuple(dict.fromkeys(errors)), tuple(notes))


def _errors_of(check: Callable[[], Iterable[str]], path: Path) -> list[str]:
    """Return the errors that a check yields, and the exception that it raises: damaged files may raise any."""
    try:
        return list(check())
    except (ValueError, OSError) as error:  # names the file
        return [str(error)]
    except Exception as error:
        return [f"{path} lacks required entries, or has them in another form: {error!r}"]


def _model_errors(folder: Path, notes: list[str]) -> Iterator[str]:
    """Yield errors of a model's files, index and config; append to `notes` what cannot be compared."""
    model = Weights(folder)
    yield from _index_errors(folder, model)
    yield from _config_errors(folder, model, notes)


def _index_errors(folder: Path, model: Weights) -> Iterator[str]:
    """Yield the tensors that are in another file than the index says; none for a model without an index."""
    indices = [
        folder / names.index_file
        for names in (SAFETENSORS, TORCH)
        if (folder / names.index_file).is_file() and not (folder / names.single).is_file()
    ]
    if not indices:
        return
    index = indices[0]
    listed = read_json(index)["weight_map"]
    for name in sorted({*listed, *model.names}):
        actual = model.paths[name].name if name in model.names else "no file"
        if listed.get(name) != actual:
            yield f"{index} has {name} in {listed.get(name, 'no file')}, and it is in {actual}"


def _config_errors(folder: Path, model: Weights, notes: list[str]) -> Iterator[str]:
    """Yield differences of names and shapes from the model that config.json makes; append a note if it makes none."""
    config = folder / "config.json"
    if not config.is_file():
        notes.append(f"{folder} has no config.json to compare the weights with")
        return
    class_name = next(iter(read_json(config).get("architectures") or ()), None)
    if (model_class := getattr(transformers, str(class_name), None)) is None:
        notes.append(f"{config} names no class of transformers ({class_name}): not compared")
        return
    try:
        built = outline_of(model_class, AutoConfig.from_pretrained(folder))
    except Exception as error:  # a class may raise anything, also for a missing package
        notes.append(
            f"{config} cannot build a {class_name} on the meta device, so it is not compared: {error!r}"
        )
        return
    names = TensorNames.of(built)
    shapes = {names.first[name]: tuple(tensor.shape) for name, tensor in built.state_dict().items()}
    unknown = [name for name in model.names if name not in names.first]
    if unknown:  # adapters, other heads, names of the hub: transformers may be able to load them
        notes.append(f"{len(unknown)} tensors are not in a {class_name}: {unknown[0]}, …")
    errors = fitting_errors(shapes, model, names, strict=not unknown)
    yield from (f"{folder} does not fit its config.json: {error}" for error in errors)


def _optimizer_errors(folder: Path) -> Iterator[str]:
    """Yield errors of the optimizer's index, boxes and groups."""
    states = StateFiles(folder / OPTIMIZER)
    index, path = folder / OPTIMIZER / INDEX, folder / OPTIMIZER / GROUPS
    for name in states.names:
        shape, dtype = states.shape(name), states.dtype(name)
        boxes = [stored.box for stored in states.boxes[name]]
        if any((len(box.offset), len(box.size)) != (len(shape), len(shape)) for box in boxes):
            yield f"{index}: {name} has boxes of other dimensions than {shape}"
            continue
        yield from (f"{index}: {name}: {error}" for error in coverage_errors(shape, boxes))
        for stored in states.boxes[name]:
            tensor = states.file(stored.file).get(stored.key)
            if tensor is None or (tuple(tensor.shape), tensor.dtype) != (stored.box.size, dtype):
                must = f"{dtype_name(dtype)} {stored.box.size}"
                yield f"{index}: {name}: {stored.file} has no {stored.key} that is {must}"
    groups = _read_mapping(path)
    grouped = Counter(name for group in groups["groups"] for name in group["parameters"])
    yield from (f"{path} has {name} in several groups" for name, count in grouped.items() if count > 1)
    owners = {name.partition("/")[2] for name in states.names} | groups["scalars"].keys()
    yield from (f"{path} has no group for {name}" for name in sorted(owners - grouped.keys()))
    known = Weights(folder / MODEL).names
    yield from (f"{path} names {name}, which is not in the model" for name in grouped if name not in known)


def _training_errors(folder: Path, step: int) -> Iterator[str]:
    """Yield errors of the training state's step, and of the random states of all ranks of its layout."""
    path = folder / TRAINING
    training = _read_mapping(path)
    if training.get("step") != step:
        yield f"{path} is of step {training.get('step')}, and {MANIFEST} of step {step}"
    sizes = training["layout"]["sizes"]
    ranks = product(*(range(sizes[axis]) for axis in AXES))
    expected = {random_file(rank): dict(zip(AXES, place, strict=True)) for rank, place in enumerate(ranks)}
    for name in sorted(expected.keys() | {file.name for file in (folder / RANDOM).glob("*.pt")}):
        file = folder / RANDOM / name
        if not file.is_file():
            yield f"{file} is missing: {len(expected)} ranks wrote the checkpoint"
        elif (coordinates := _read_mapping(file).get("coordinates")) != expected.get(name):
            yield f"{file} is of the rank {coordinates}, by {path} of {expected.get(name)}"
