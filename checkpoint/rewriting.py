"""Stored tensors written again by one process: a model's folder, an optimizer's. What is written is convert.py's."""

import json
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch

from .box import Box
from .model_files import SAFETENSORS, index_of, largest_format
from .plan import split_into_files
from .rearranged import Rearranged
from .states import INDEX, listed_box, listed_tensor, state_file, state_key, write_index
from .stored import Stored
from .tensor_file import Entry, FileRecord, TensorFileWriter, dtype_name, write_small
from .weight_files import read_json

Progress = Callable[[int], object]
Records = dict[str, FileRecord]

# Of a model's folder: what is written anew and not copied, and weights in formats of others.
_WEIGHTS = (".safetensors", ".index.json", ".bin", ".pt", ".pth", ".h5", ".msgpack", ".gguf", ".onnx")
_FORMAT_KEYS = {"dtype", "torch_dtype"}


def write_model(
    tensors: Stored,
    folder: Path,
    *,
    source: Path,
    max_bytes: int,
    keeps_formats: bool,
    progress: Progress,
) -> Records:
    """Weights, their index, and the small files of the folder that they are of.

    Args:
        folder: is made.
        source: the folder that they are of.
        max_bytes: of a file of weights.
        keeps_formats: whether the config of the source is right about the weights' format.
        progress: told the bytes of each tensor.

    Returns:
        All files.
    """
    folder.mkdir()
    entries = _entries(tensors)
    files = split_into_files(entries, max_bytes)
    named = dict(zip(SAFETENSORS.of(len(files)), files, strict=True))
    records = {
        name: _write_file(folder / name, entries, tensors, progress) for name, entries in named.items()
    }
    if len(files) > 1:
        records[SAFETENSORS.listing] = write_small(folder / SAFETENSORS.listing, index_of(named))
    for path in sorted(source.iterdir()):
        if path.name == "config.json" and not keeps_formats:
            records[path.name] = _copy_config(path, folder / path.name, largest_format(entries))
        elif path.is_file() and not path.name.endswith(_WEIGHTS):
            records[path.name] = copy_small(path, folder / path.name)
    return records


def write_states(tensors: Rearranged, folder: Path, num_files: int, progress: Progress) -> Records:
    """Each tensor whole in one of so many files, evenly, and an index of where it is; the folder is made."""
    folder.mkdir()
    records: Records = {}
    listing = {}
    for number, entries in enumerate(_dealt(_entries(tensors), num_files)):
        file = state_file(number)
        boxes = {entry.name: Box.whole(entry.shape) for entry in entries}
        keys = {name: state_key(name, box.offset) for name, box in boxes.items()}
        keyed = Rearranged({keys[entry.name]: tensors.sources[entry.name] for entry in entries})
        records[file] = _write_file(folder / file, _entries(keyed), keyed, progress)
        for entry in entries:
            box = listed_box(boxes[entry.name], file, keys[entry.name])
            listing[entry.name] = listed_tensor(entry.shape, entry.dtype, [box])
    records[INDEX] = write_index(folder, listing)
    return records


def _write_file(path: Path, entries: Sequence[Entry], tensors: Stored, progress: Progress) -> FileRecord:
    writer = TensorFileWriter(path, entries)
    try:
        for entry in writer.order:
            writer.write(tensors.read(entry.name, Box.whole(entry.shape)))
            progress(entry.nbytes)
        return writer.finish()
    finally:
        writer.abandon()


def _entries(tensors: Stored) -> list[Entry]:
    return [Entry(name, tensors.shape(name), tensors.dtype(name)) for name in tensors.names]


def _dealt(entries: Sequence[Entry], num_files: int) -> list[list[Entry]]:
    """The largest first, each to where there is least; files without a tensor are left out."""
    files: list[list[Entry]] = [[] for _ in range(num_files)]
    sizes = [0] * num_files
    for entry in sorted(entries, key=lambda entry: -entry.nbytes):
        smallest = sizes.index(min(sizes))
        files[smallest].append(entry)
        sizes[smallest] += entry.nbytes
    return [file for file in files if file]


def copy_small(path: Path, to: Path) -> FileRecord:
    """Copy a file that is no file of tensors; its folder is made where missing."""
    to.parent.mkdir(exist_ok=True)
    return write_small(to, path.read_bytes())


def _copy_config(path: Path, to: Path, dtype: torch.dtype) -> FileRecord:
    """A config, with the format that the weights have now."""
    config = _with_format(read_json(path), dtype_name(dtype))
    if not config.keys() & _FORMAT_KEYS:
        config["dtype"] = dtype_name(dtype)
    return write_small(to, json.dumps(config, indent=2).encode())


def _with_format(config: Any, name: str) -> Any:
    """Also in the configs of parts, as models of images and text have them."""
    if not isinstance(config, dict):
        return config
    return {key: name if key in _FORMAT_KEYS else _with_format(value, name) for key, value in config.items()}
