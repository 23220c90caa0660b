"""What is wrong with a checkpoint: files that are not as they were written, and files that do not fit together."""

from collections import Counter
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import nullcontext
from dataclasses import dataclass
from itertools import product
from pathlib import Path
from typing import Any

import torch
import transformers
from transformers import AutoConfig, initialization

from ..cluster.mesh import AXES
from .coverage import coverage_faults
from .model_files import SAFETENSORS
from .names import TensorNames
from .opened import open_states, read_config, read_mapping, read_random_states
from .random_states import file_name
from .states import INDEX, StateFiles
from .step_folder import MANIFEST, damage_of, manifest_of
from .step_save import MODEL, OPTIMIZER, RANDOM, TRAINING
from .stored import Stored
from .tensor_file import dtype_name
from .trained import GROUPS
from .weight_files import WeightFiles, all_bytes, index_path, read_json

Progress = Callable[[int], object]


@dataclass(frozen=True, kw_only=True)
class Findings:
    """What was found out about a folder.

    Args:
        faults: damage, each with the file, and the tensor where it is one.
        notes: what could not be checked, and what does no harm.
    """

    faults: tuple[str, ...]
    notes: tuple[str, ...]


def examine_checkpoint(folder: Path, *, progress: Progress) -> Findings:
    """Read every byte of a checkpoint, and see whether its files fit together.

    Args:
        progress: told the bytes of every file that was read.
    """
    try:
        manifest = manifest_of(folder)
    except ValueError as error:
        return Findings(faults=(str(error),), notes=())
    faults, notes = [], [f"{name} is not in the manifest" for name in _unlisted(folder, manifest["files"])]
    for name, record in manifest["files"].items():
        faults += damage_of(folder, name, record)
        progress(record.bytes)
    findings = _consistency(folder, manifest["step"])
    return Findings(faults=tuple(dict.fromkeys([*faults, *findings.faults])), notes=(*notes, *findings.notes))


def examine_pretrained(folder: Path) -> Findings:
    """See whether the files of a Hugging Face folder fit together; there are no hashes to compare with."""
    faults, notes = _model(folder)
    return Findings(
        faults=tuple(faults), notes=(f"without {MANIFEST} there are no hashes to compare", *notes)
    )


def _consistency(folder: Path, step: int) -> Findings:
    """Of files that can be read; what cannot is a fault too."""
    faults, notes = _model(folder / MODEL)
    if (folder / OPTIMIZER).is_dir():
        faults += _told(lambda: _optimizer_faults(folder), folder / OPTIMIZER)
    faults += _told(lambda: _training_faults(folder, step), folder / TRAINING)
    return Findings(faults=tuple(faults), notes=tuple(notes))


def _told(check: Callable[[], Iterable[str]], path: Path) -> list[str]:
    try:
        return list(check())
    except Exception as error:  # what is damaged may make anything of the code that reads it
        return [_reason(path, error)]


def _reason(path: Path, error: Exception) -> str:
    """What was told of a file, which it names; else what went wrong in reading what is there."""
    if isinstance(error, ValueError | OSError):
        return str(error)
    return f"{path} lacks what it should have, or has it in another form: {error!r}"


def _unlisted(folder: Path, listed: Collection[str]) -> list[str]:
    found = (str(path.relative_to(folder)) for path in folder.rglob("*") if path.is_file())
    return sorted(set(found) - {*listed, MANIFEST})


def _model(folder: Path) -> tuple[list[str], list[str]]:
    """Faults and notes."""
    try:
        return _model_findings(folder)
    except Exception as error:  # as in `_told`
        return [_reason(folder, error)], []


def _model_findings(folder: Path) -> tuple[list[str], list[str]]:
    model, config = WeightFiles(folder), read_config(folder)
    faults = _index_faults(folder, model)
    if config is None:
        return faults, [f"{folder} has no config.json to compare the weights with"]
    class_name = next(iter(config.get("architectures") or ()), None)
    model_class = getattr(transformers, str(class_name), None)
    if model_class is None:
        return faults, [
            f"{folder / 'config.json'} is of no class of transformers ({class_name}): not compared"
        ]
    return _compare_with_class(folder, model, model_class, faults)


def _index_faults(folder: Path, model: WeightFiles) -> list[str]:
    """Where the index does not say what is in the files."""
    index = index_path(folder)
    if index is None:
        return []
    listing = read_json(index)
    listed, metadata = listing["weight_map"], listing.get("metadata") or {}
    faults = [
        f"{index} lacks {name}, which is in {model.path(name).name}"
        for name in model.names
        if name not in listed
    ]
    for name, file in listed.items():
        if name not in model.names or model.path(name).name != file:
            faults.append(f"{index} has {name} in {file}, where it is not")
    total = all_bytes(model)
    tells = index.name == SAFETENSORS.listing and "total_size" in metadata  # others count tied ones once
    if tells and metadata["total_size"] != total:
        faults.append(f"{index} speaks of {metadata['total_size']} bytes of tensors, and there are {total}")
    return faults


def _compare_with_class(
    folder: Path, model: WeightFiles, model_class: Any, faults: list[str]
) -> tuple[list[str], list[str]]:
    """The names and shapes of what the config makes, beside those in the files."""
    path, class_name = folder / "config.json", model_class.__name__
    safely = getattr(initialization, "meta_device_safe_creation_ops", nullcontext)  # since 5.1
    try:
        with torch.device("meta"), safely():
            built = model_class(AutoConfig.from_pretrained(folder))
    except Exception as error:  # a class may raise anything, and for want of a package too
        return faults, [f"{path} makes no {class_name} without memory, so it is not compared: {error!r}"]
    shapes = {name: tuple(tensor.shape) for name, tensor in built.state_dict().items()}
    names = TensorNames.of(built)
    for name in shapes.keys() & model.names:
        if model.shape(name) != shapes[name]:
            faults.append(
                f"{name} has shape {model.shape(name)} in {model.path(name)}, and {shapes[name]} by {path}"
            )
    there = {names.first[name] for name in model.names if name in names.first}
    missing = [name for name in names.needed if name not in there]
    unknown = [name for name in model.names if name not in names.first]
    if unknown:  # adapters, other heads, names of the hub: transformers may well know what to do with them
        return faults, [f"{len(unknown)} tensors are none of a {class_name}'s: {unknown[0]}, …"]
    return [*faults, *(f"{folder} lacks {name}, which a {class_name} has" for name in missing)], []


def _optimizer_faults(folder: Path) -> list[str]:
    states = open_states(folder / OPTIMIZER)
    groups = read_mapping(folder / OPTIMIZER / GROUPS)
    return [*_state_faults(states), *_group_faults(folder, states, groups)]


def _state_faults(states: StateFiles) -> Iterator[str]:
    """Where the index does not say what is in the files, and where boxes do not make up a tensor."""
    index = states.folder / INDEX
    indexed: dict[str, set[str]] = {}
    for name in states.names:
        boxes = [stored.box for stored in states.boxes[name]]
        num_dims = len(states.shape(name))
        if any((len(box.offset), len(box.size)) != (num_dims, num_dims) for box in boxes):
            yield f"{index}: {name} has boxes of other dimensions than {states.shape(name)}"
            continue
        for fault in coverage_faults(states.shape(name), boxes):
            yield f"{index}: {name}: {fault}"
        for stored in states.boxes[name]:
            indexed.setdefault(stored.file, set()).add(stored.key)
            if wrong := _key_fault(states, name, stored.file, stored.key, stored.box.size):
                yield f"{index}: {name}: {wrong}"
    for file, keys in indexed.items():
        if (states.folder / file).is_file():
            extra = sorted(set(states.file(file).names) - keys)
            yield from (f"{states.folder / file} has {key}, which is not in {index}" for key in extra)


def _key_fault(states: StateFiles, name: str, file_name: str, key: str, size: tuple[int, ...]) -> str | None:
    if not (states.folder / file_name).is_file():
        return f"{file_name} is missing"
    file = states.file(file_name)
    if key not in file.names:
        return f"{file_name} has no {key}"
    if (file.shape(key), file.dtype(key)) != (size, states.dtype(name)):
        expected = f"{dtype_name(states.dtype(name))} {size}"
        return f"{key} in {file_name} is {dtype_name(file.dtype(key))} {file.shape(key)}, and not {expected}"
    return None


def _group_faults(folder: Path, states: StateFiles, groups: Mapping[str, Any]) -> Iterator[str]:
    """Whether every parameter is in one group, and is one of the model's."""
    path = folder / OPTIMIZER / GROUPS
    grouped = [name for group in groups["groups"] for name in group["parameters"]]
    yield from (f"{path} has {name} in several groups" for name in _repeated(grouped))
    owners = {name.partition("/")[2] for name in states.names} | groups["scalars"].keys()
    yield from (f"{path} has no group for {name}" for name in sorted(owners - set(grouped)))
    model: Stored = WeightFiles(folder / MODEL)
    yield from (
        f"{path} names {name}, which is not in the model" for name in grouped if name not in model.names
    )


def _training_faults(folder: Path, step: int) -> Iterator[str]:
    path = folder / TRAINING
    training = read_mapping(path)
    if training.get("step") != step:
        yield f"{path} is of step {training.get('step')}, and {MANIFEST} of step {step}"
    sizes = training["layout"]["sizes"]
    ranks = product(*(range(sizes[axis]) for axis in AXES))
    expected = {file_name(rank): dict(zip(AXES, place, strict=True)) for rank, place in enumerate(ranks)}
    found = {name: state.get("coordinates") for name, state in read_random_states(folder / RANDOM).items()}
    for name in sorted(expected.keys() | found.keys()):
        if name not in found:
            yield f"{folder / RANDOM / name} is missing: {len(expected)} ranks wrote the checkpoint"
        elif found[name] != expected.get(name):
            yield f"{folder / RANDOM / name} is of the rank {found[name]}, by {path} of {expected.get(name)}"


def _repeated(names: Sequence[str]) -> list[str]:
    return [name for name, count in Counter(names).items() if count > 1]
