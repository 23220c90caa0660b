"""The folders of checkpoints: one a step, which is complete or not there. What lies in them is checkpoint.py's.

[Note: complete or not there] A checkpoint is written in a folder of another name, every file of it brought to the disk.
Its manifest, which lists all files with their hashes, is last. Then the folder gets its name, by one rename, and the
folder above is brought to the disk. One that is to go gets another name first. So whatever has the name of a step was
complete once, and what was interrupted is found by its name, and removed by the next save.
"""

import json
import os
import re
import shutil
from collections.abc import Mapping
from contextlib import suppress
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

import xxhash

from .tensor_file import ALGORITHM, FileRecord, damage_of_tensors, write_small

MANIFEST = "manifest.json"
FORMAT = 1
_NAME = re.compile(r"step-(\d{8,})")
_CHUNK = 2**24
_REPLACED = ".replaced"


def step_path(directory: Path, step: int) -> Path:
    """The folder of a step."""
    return directory / f"step-{step:08}"


def unfinished_path(directory: Path, step: int) -> Path:
    """The folder in which a step is written."""
    return directory / f".{step_path(directory, step).name}.writing"


def begin_step(directory: Path, step: int) -> Path:
    """Make the folder in which a step is written, and remove what earlier saves left unfinished.

    Raises:
        OSError: it cannot be made.
    """
    directory.mkdir(parents=True, exist_ok=True)
    sync_folder(directory.parent)
    recover(directory)
    for left in directory.glob(".step-*"):
        shutil.rmtree(left)
    folder = unfinished_path(directory, step)
    folder.mkdir()
    return folder


def commit_step(folder: Path, directory: Path, step: int, records: Mapping[str, FileRecord]) -> Path:
    """Write the manifest, and give the folder its name. A step that is there already is replaced.

    Raises:
        OSError: it cannot be done; the folder is as it was.
    """
    manifest = {
        "format": FORMAT,
        "echelon": _version(),
        "step": step,
        "algorithm": ALGORITHM,
        "files": {name: _listed(record) for name, record in sorted(records.items())},
    }
    write_small(folder / MANIFEST, _sealed(manifest))
    for inner in (*(path for path in folder.iterdir() if path.is_dir()), folder):
        sync_folder(inner)
    final = step_path(directory, step)
    replaced = directory / f".{final.name}{_REPLACED}"
    if final.exists():
        os.rename(final, replaced)
    try:
        os.rename(folder, final)
        sync_folder(directory)
    except OSError:
        with suppress(OSError):  # what a disk refuses here too is put right by the next load or save
            _take_back(folder, final)
            recover(directory)
        raise
    shutil.rmtree(replaced, ignore_errors=True)  # the next save removes what is left of it
    return final


def _take_back(folder: Path, final: Path) -> None:
    if not folder.exists():
        os.rename(final, folder)


def recover(directory: Path) -> None:
    """Give a step that was about to be replaced its name back, where what replaces it never got there."""
    for replaced in directory.glob(f".step-*{_REPLACED}"):
        final = directory / replaced.name.removeprefix(".").removesuffix(_REPLACED)
        if not final.exists():
            os.rename(replaced, final)


def keep_newest(directory: Path, count: int, step: int) -> None:
    """Of a step and those before it remove all but the newest.

    Later ones are of a run that went on from an earlier step, perhaps since they are damaged: they do not count.

    Raises:
        OSError: it cannot be done.
    """
    up_to = step_path(directory, step)
    steps = steps_in(directory)
    for path in steps[steps.index(up_to) + count :]:
        try:
            _remove(path)
        except OSError as error:
            raise OSError(
                f"{up_to.name} is complete, and older ones could not be removed: {error}"
            ) from error


def steps_in(directory: Path) -> list[Path]:
    """The folders of steps, newest first."""
    if not directory.is_dir():
        return []
    found = {
        int(match[1]): path
        for path in directory.iterdir()
        if (match := _NAME.fullmatch(path.name)) and path.is_dir()
    }
    return [found[step] for step in sorted(found, reverse=True)]


def manifest_of(folder: Path) -> dict[str, Any]:
    """What a step's manifest says; "files" by name as `FileRecord`.

    Raises:
        ValueError: it cannot be read; names it.
    """
    path = folder / MANIFEST
    try:
        content = path.read_bytes()
        manifest = json.loads(content)
        told = (manifest["format"], manifest["algorithm"])
        seal = manifest.pop("seal", None)  # another format may have none
        files = {name: FileRecord(**each) for name, each in manifest["files"].items()}
    except FileNotFoundError:
        raise ValueError(
            f"{path} is missing: the checkpoint is not complete, or is none of Echelon's"
        ) from None
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        raise ValueError(f"{path} cannot be read, it is damaged: {error!r}") from error
    if told != (FORMAT, ALGORITHM):
        raise ValueError(
            f"{path} is of format {told[0]} with hashes of {told[1]}, and this release of Echelon reads format "
            f"{FORMAT} with {ALGORITHM}"
        )
    if seal != _seal(manifest) or content != _sealed(manifest):
        raise ValueError(f"{path} is damaged: it is not what its own hash says")
    return {**manifest, "files": files}


def damage_of(folder: Path, name: str, record: FileRecord) -> list[str]:
    """What is wrong with a file, each with the file and where there are tensors the tensor; empty when it is sound."""
    path = folder / name
    if not path.is_file():
        return [f"{path} is missing"]
    if (size := path.stat().st_size) != record.bytes:
        return [f"{path} has {size} bytes, and {record.bytes} were written"]
    if record.tensors is None:
        return [] if _hash_of(path) == record.hash else [f"{path} is damaged"]
    return [f"{path} is damaged: {each}" for each in damage_of_tensors(path, record)]


def sync_folder(folder: Path) -> None:
    """Have the names in a folder on the disk."""
    descriptor = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def _remove(path: Path) -> None:
    """Take a step's name away first: what was half removed must not look like one."""
    gone = path.with_name(f".{path.name}.removed")
    if gone.exists():
        shutil.rmtree(gone)
    os.rename(path, gone)
    shutil.rmtree(gone, ignore_errors=True)  # the next save removes what is left of it


def _sealed(manifest: Mapping[str, Any]) -> bytes:
    """A manifest as it is written: with its own hash, so that no byte of it can change unnoticed."""
    return json.dumps({**manifest, "seal": _seal(manifest)}, indent=1).encode()


def _seal(manifest: Mapping[str, Any]) -> str:
    return xxhash.xxh3_128(json.dumps(manifest).encode()).hexdigest()


def _hash_of(path: Path) -> str:
    digest = xxhash.xxh3_128()
    with open(path, "rb") as file:
        while content := file.read(_CHUNK):
            digest.update(content)
    return digest.hexdigest()


def _listed(record: FileRecord) -> dict[str, Any]:
    return {name: value for name, value in record._asdict().items() if value is not None}


def _version() -> str:
    try:
        return version("echelon")
    except PackageNotFoundError:  # a source tree that was never installed
        return "unknown"
