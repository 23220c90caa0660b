"""A checkpoint, or a Hugging Face folder, in one process: opened, summed up, and searched for damage."""

import json
from collections import Counter
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import nullcontext
from dataclasses import dataclass
from fnmatch import fnmatchcase
from itertools import product
from pathlib import Path
from typing import Any

import torch
import transformers
from torch import Tensor
from transformers import AutoConfig, initialization

from ..cluster.mesh import AXES
from .box import Box, Stored, coverage_errors
from .dcp import INDEX, StateFiles
from .local import TensorNames
from .model import SAFETENSORS, TORCH
from .optimizer import GROUPS
from .pretrained import Weights
from .step import MODEL, OPTIMIZER, RANDOM, TRAINING, random_file
from .steps import MANIFEST, damage_of, manifest_of, newest_first
from .tensor_file import dtype_name, read_values

_PATTERNS = ("*.safetensors", "pytorch_model*.bin", "*.index.json")

Progress = Callable[[int], object]


@dataclass(frozen=True, kw_only=True)
class Opened:
    """The content of a folder; tensors are read when asked for.

    Args:
        path: the step-… folder, or the Hugging Face folder.
        manifest: None for a Hugging Face folder.
        model: the weights.
        config: of the model; None where the folder has none.
        optimizer: its tensors, None where there are none.
        groups: class, groups and scalars of the optimizer; empty where there is none.
        training: scheduler, position in the data, user values, sizes of the mesh; empty for a Hugging Face folder.
        random: the random states of every rank, by its coordinates.
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
    """The step-… folder or Hugging Face folder that is meant: this one, or the newest complete step in it.

    Raises:
        ValueError: there is none.
    """
    if not path.is_dir():
        raise ValueError(
            f"{path} is no folder: give a step-… folder, the one above, or a Hugging Face folder"
        )
    if (path / MANIFEST).is_file():
        return path
    complete = [step for step in newest_first(path) if (step / MANIFEST).is_file()]
    if complete:
        return complete[0]
    if any(True for pattern in _PATTERNS for _ in path.glob(pattern)):
        return path
    raise ValueError(
        f"{path} is no complete checkpoint (it has no {MANIFEST}), holds none (step-…), and is no Hugging Face folder "
        "(it has no model.safetensors or the like)"
    )


def open_folder(path: Path) -> Opened:
    """Open a folder of `find_folder`.

    Raises:
        ValueError: something in it is damaged; names the file.
        OSError: something in it is missing.
    """
    is_checkpoint = (path / MANIFEST).is_file()
    model = path / MODEL if is_checkpoint else path
    optimizer = path / OPTIMIZER
    has_optimizer = is_checkpoint and optimizer.is_dir()
    return Opened(
        path=path,
        manifest=manifest_of(path) if is_checkpoint else None,
        model=Weights(model),
        config=read_config(model),
        optimizer=StateFiles(optimizer) if has_optimizer else None,
        groups=read_mapping(optimizer / GROUPS) if has_optimizer else {},
        training=read_mapping(path / TRAINING) if is_checkpoint else {},
        random={
            _place(state): {name: each for name, each in state.items() if name != "coordinates"}
            for state in (read_random_states(path / RANDOM) if is_checkpoint else {}).values()
        },
    )


def _place(state: Mapping[str, Any]) -> str:
    """A rank by its place on every axis: "pp 0, dp 1, sp 0, tp 0"."""
    return ", ".join(f"{axis} {rank}" for axis, rank in state.get("coordinates", {}).items())


def read_config(folder: Path) -> Mapping[str, Any] | None:
    """The model's config, None where there is none.

    Raises:
        ValueError: it cannot be read.
    """
    path = folder / "config.json"
    return read_json(path) if path.is_file() else None


def read_random_states(folder: Path) -> dict[str, Mapping[str, Any]]:
    """The random states of every rank, by the name of its file.

    Raises:
        ValueError: a file is damaged; names it.
    """
    return {path.name: read_mapping(path) for path in sorted(folder.glob("*.pt"))}


def read_mapping(path: Path) -> Mapping[str, Any]:
    """Plain values by name.

    Raises:
        ValueError: they cannot be read; names the file.
    """
    found = read_values(path)
    if not isinstance(found, Mapping):
        raise ValueError(f"{path} has a {type(found).__name__}, and no values by name: it is damaged")
    return found


def nbytes(stored: Stored, name: str) -> int:
    """Bytes of a whole tensor."""
    return Box.whole(stored.shape(name)).numel * stored.dtype(name).itemsize


def read_json(path: Path) -> dict[str, Any]:
    """The values of a JSON file, by name.

    Raises:
        ValueError: it cannot be read as that; names it.
    """
    try:
        found = json.loads(path.read_bytes())
    except ValueError as error:
        raise ValueError(f"{path} is no JSON, it is damaged: {error}") from error
    if not isinstance(found, dict):
        raise ValueError(f"{path} has a {type(found).__name__}, and no values by name: it is damaged")
    return found


def summarize(opened: Opened) -> dict[str, Any]:
    """The content of a folder in numbers and names; None or empty where a Hugging Face folder has none.

    No tensor is read.

    Returns:
        By name: path, step, echelon (the release), model_class, layout (sizes of the mesh), files (path and bytes),
        parts (kinds of tensors: name, tensors, entries, bytes, dtypes by bytes), optimizer (its class), groups
        (options, and number of parameters), scheduler, scaler, data, skipped_steps, user, random (places of ranks).
    """
    manifest, training = opened.manifest or {}, opened.training
    extra = opened.groups.get("extra", {})
    files = sorted(path for path in opened.path.rglob("*") if path.is_file())
    return {
        "path": str(opened.path),
        "step": manifest.get("step"),
        "echelon": manifest.get("echelon"),
        "model_class": next(iter((opened.config or {}).get("architectures") or ()), None),
        "layout": training.get("layout", {}).get("sizes"),
        "files": [
            {"path": str(path.relative_to(opened.path)), "bytes": path.stat().st_size} for path in files
        ],
        "parts": list(_parts(opened)),
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


def list_tensors(opened: Opened, pattern: str = "*") -> Iterator[dict[str, Any]]:
    """Yield name, shape, dtype and files of the tensors whose name fits a pattern of the shell.

    Those of the optimizer are called STATE/PARAMETER.
    """
    places = {name: [str(path.relative_to(opened.path))] for name, path in opened.model.paths.items()}
    yield from _lines(opened.model, places, pattern)
    if (states := opened.optimizer) is not None:
        files = {name: [f"{OPTIMIZER}/{box.file}" for box in boxes] for name, boxes in states.boxes.items()}
        yield from _lines(states, files, pattern)


def _lines(stored: Stored, files: Mapping[str, Sequence[str]], pattern: str) -> Iterator[dict[str, Any]]:
    for name in stored.names:
        if fnmatchcase(name, pattern):
            shape, dtype = list(stored.shape(name)), dtype_name(stored.dtype(name))
            yield {
                "name": name,
                "shape": shape,
                "dtype": dtype,
                "files": list(dict.fromkeys(files[name])),
            }


def plain(value: Any) -> Any:
    """The same as JSON can hold it: tensors by their format and shape, where they are no numbers."""
    if isinstance(value, Tensor):
        return value.item() if value.numel() == 1 else f"{dtype_name(value.dtype)} {list(value.shape)}"
    if isinstance(value, Mapping):
        return {str(key): plain(each) for key, each in value.items()}
    if isinstance(value, Collection) and not isinstance(value, str | bytes):
        return [plain(each) for each in value]
    return value if isinstance(value, str | int | float | None) else repr(value)


def _parts(opened: Opened) -> Iterator[dict[str, Any]]:
    """Tensors of one kind: those of the model, and of each state of the optimizer."""
    yield _part(MODEL, opened.model, opened.model.names)
    if (states := opened.optimizer) is not None:
        kinds: dict[str, list[str]] = {}
        for name in states.names:
            kinds.setdefault(name.partition("/")[0], []).append(name)
        yield from (_part(kind, states, names) for kind, names in kinds.items())


def _part(part: str, stored: Stored, names: Collection[str]) -> dict[str, Any]:
    dtypes: Counter[str] = Counter()
    for name in names:
        dtypes[dtype_name(stored.dtype(name))] += nbytes(stored, name)
    return {
        "name": part,
        "tensors": len(names),
        "entries": sum(Box.whole(stored.shape(name)).numel for name in names),
        "bytes": dtypes.total(),
        "dtypes": dict(dtypes),
    }


@dataclass(frozen=True, kw_only=True)
class Findings:
    """Damage and notes of a folder.

    Args:
        errors: damage, each with the file, and the tensor where it is one.
        notes: parts that could not be checked, and harmless oddities.
    """

    errors: tuple[str, ...]
    notes: tuple[str, ...]


def examine_checkpoint(folder: Path, *, progress: Progress) -> Findings:
    """Read every byte of a checkpoint, and compare its files with each other.

    Args:
        progress: gets the bytes of every file that was read.
    """
    try:
        manifest = manifest_of(folder)
    except ValueError as error:
        return Findings(errors=(str(error),), notes=())
    errors, notes = [], [f"{name} is not in the manifest" for name in _unlisted(folder, manifest["files"])]
    for name, record in manifest["files"].items():
        errors += damage_of(folder, name, record)
        progress(record.bytes)
    findings = _consistency(folder, manifest["step"])
    return Findings(errors=tuple(dict.fromkeys([*errors, *findings.errors])), notes=(*notes, *findings.notes))


def examine_pretrained(folder: Path) -> Findings:
    """Compare the files of a Hugging Face folder with each other; there are no hashes."""
    notes = [f"without {MANIFEST} there are no hashes to compare"]
    errors = _errors_of(lambda: _model_errors(folder, notes), folder)
    return Findings(errors=tuple(errors), notes=tuple(notes))


def _consistency(folder: Path, step: int) -> Findings:
    """Errors of files that can be read and do not fit together; one that cannot be read is an error too."""
    notes: list[str] = []
    errors = _errors_of(lambda: _model_errors(folder / MODEL, notes), folder / MODEL)
    if (folder / OPTIMIZER).is_dir():
        errors += _errors_of(lambda: _optimizer_errors(folder), folder / OPTIMIZER)
    errors += _errors_of(lambda: _training_errors(folder, step), folder / TRAINING)
    return Findings(errors=tuple(errors), notes=tuple(notes))


def _errors_of(check: Callable[[], Iterable[str]], path: Path) -> list[str]:
    """The errors that a check of a file finds, or its own, since damage may make anything of the code that reads it."""
    try:
        return list(check())
    except (ValueError, OSError) as error:  # names the file
        return [str(error)]
    except Exception as error:
        return [f"{path} lacks what it should have, or has it in another form: {error!r}"]


def _unlisted(folder: Path, listed: Collection[str]) -> list[str]:
    found = (str(path.relative_to(folder)) for path in folder.rglob("*") if path.is_file())
    return sorted(set(found) - {*listed, MANIFEST})


def _model_errors(folder: Path, notes: list[str]) -> Iterator[str]:
    """Errors of a model's files, index and config; what cannot be compared is noted."""
    model, config = Weights(folder), read_config(folder)
    yield from _index_errors(folder, model)
    if config is None:
        notes.append(f"{folder} has no config.json to compare the weights with")
        return
    name = next(iter(config.get("architectures") or ()), None)
    if (model_class := getattr(transformers, str(name), None)) is None:
        notes.append(f"{folder / 'config.json'} is of no class of transformers ({name}): not compared")
        return
    yield from _class_errors(folder, model, model_class, notes)


def _index_errors(folder: Path, model: Weights) -> list[str]:
    """Errors of an index that does not fit the files."""
    index = next(
        (folder / each.listing for each in (SAFETENSORS, TORCH) if (folder / each.listing).is_file()), None
    )
    if index is None or any((folder / each.one).is_file() for each in (SAFETENSORS, TORCH)):
        return []
    listing = read_json(index)
    listed, metadata = listing["weight_map"], listing.get("metadata") or {}
    errors = [
        f"{index} lacks {name}, which is in {model.paths[name].name}"
        for name in model.names
        if name not in listed
    ]
    for name, file in listed.items():
        if name not in model.names or model.paths[name].name != file:
            errors.append(f"{index} has {name} in {file}, where it is not")
    total = sum(nbytes(model, name) for name in model.names)
    has_size = index.name == SAFETENSORS.listing and "total_size" in metadata  # others count tied ones once
    if has_size and metadata["total_size"] != total:
        errors.append(f"{index} speaks of {metadata['total_size']} bytes of tensors, and there are {total}")
    return errors


def _class_errors(folder: Path, model: Weights, model_class: Any, notes: list[str]) -> Iterator[str]:
    """Errors of names and shapes that are not those of the model that the config makes."""
    path, class_name = folder / "config.json", model_class.__name__
    safely = getattr(initialization, "meta_device_safe_creation_ops", nullcontext)  # since 5.1
    try:
        with torch.device("meta"), safely():
            built = model_class(AutoConfig.from_pretrained(folder))
    except Exception as error:  # a class may raise anything, and for want of a package too
        notes.append(f"{path} makes no {class_name} without memory, so it is not compared: {error!r}")
        return
    shapes = {name: tuple(tensor.shape) for name, tensor in built.state_dict().items()}
    names = TensorNames.of(built)
    for name in shapes.keys() & model.names:
        if model.shape(name) != shapes[name]:
            where = model.paths[name]
            yield f"{name} has shape {model.shape(name)} in {where}, and {shapes[name]} by {path}"
    unknown = [name for name in model.names if name not in names.first]
    if unknown:  # adapters, other heads, names of the hub: transformers may well know what to do with them
        notes.append(f"{len(unknown)} tensors are none of a {class_name}'s: {unknown[0]}, …")
        return
    there = {names.first[name] for name in model.names}
    missing = [name for name in names.needed if name not in there]
    yield from (f"{folder} lacks {name}, which a {class_name} has" for name in missing)


def _optimizer_errors(folder: Path) -> list[str]:
    states = StateFiles(folder / OPTIMIZER)
    groups = read_mapping(folder / OPTIMIZER / GROUPS)
    return [*_state_errors(states), *_group_errors(folder, states, groups)]


def _state_errors(states: StateFiles) -> Iterator[str]:
    """Errors of an index that does not fit the files, and of boxes that do not make up a tensor."""
    index = states.folder / INDEX
    indexed: dict[str, set[str]] = {}
    for name in states.names:
        boxes = [stored.box for stored in states.boxes[name]]
        num_dims = len(states.shape(name))
        if any((len(box.offset), len(box.size)) != (num_dims, num_dims) for box in boxes):
            yield f"{index}: {name} has boxes of other dimensions than {states.shape(name)}"
            continue
        for error in coverage_errors(states.shape(name), boxes):
            yield f"{index}: {name}: {error}"
        for stored in states.boxes[name]:
            indexed.setdefault(stored.file, set()).add(stored.key)
            if wrong := _key_error(states, name, stored.file, stored.key, stored.box.size):
                yield f"{index}: {name}: {wrong}"
    for file, keys in indexed.items():
        if (states.folder / file).is_file():
            extra = sorted(set(states.file(file)) - keys)
            yield from (f"{states.folder / file} has {key}, which is not in {index}" for key in extra)


def _key_error(states: StateFiles, name: str, file_name: str, key: str, size: tuple[int, ...]) -> str | None:
    if not (states.folder / file_name).is_file():
        return f"{file_name} is missing"
    file = states.file(file_name)
    if key not in file:
        return f"{file_name} has no {key}"
    found, dtype = file[key], states.dtype(name)
    if (tuple(found.shape), found.dtype) != (size, dtype):
        is_, must = f"{dtype_name(found.dtype)} {tuple(found.shape)}", f"{dtype_name(dtype)} {size}"
        return f"{key} in {file_name} is {is_}, and not {must}"
    return None


def _group_errors(folder: Path, states: StateFiles, groups: Mapping[str, Any]) -> Iterator[str]:
    """Errors of parameters that are not in one group, or not in the model."""
    path = folder / OPTIMIZER / GROUPS
    grouped = [name for group in groups["groups"] for name in group["parameters"]]
    yield from (f"{path} has {name} in several groups" for name in _repeated(grouped))
    owners = {name.partition("/")[2] for name in states.names} | groups["scalars"].keys()
    yield from (f"{path} has no group for {name}" for name in sorted(owners - set(grouped)))
    model: Stored = Weights(folder / MODEL)
    yield from (
        f"{path} names {name}, which is not in the model" for name in grouped if name not in model.names
    )


def _training_errors(folder: Path, step: int) -> Iterator[str]:
    path = folder / TRAINING
    training = read_mapping(path)
    if training.get("step") != step:
        yield f"{path} is of step {training.get('step')}, and {MANIFEST} of step {step}"
    sizes = training["layout"]["sizes"]
    ranks = product(*(range(sizes[axis]) for axis in AXES))
    expected = {random_file(rank): dict(zip(AXES, place, strict=True)) for rank, place in enumerate(ranks)}
    found = {name: state.get("coordinates") for name, state in read_random_states(folder / RANDOM).items()}
    for name in sorted(expected.keys() | found.keys()):
        if name not in found:
            yield f"{folder / RANDOM / name} is missing: {len(expected)} ranks wrote the checkpoint"
        elif found[name] != expected.get(name):
            yield f"{folder / RANDOM / name} is of the rank {found[name]}, by {path} of {expected.get(name)}"


def _repeated(names: Sequence[str]) -> list[str]:
    return [name for name, count in Counter(names).items() if count > 1]
