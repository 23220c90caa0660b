"""The folders of steps: named and removed at once, with a manifest of all files and their hashes.

[Note: complete or not there] A checkpoint is written in a folder of another name, every file of it brought to the disk.
Its manifest, which lists all files with their hashes, is last. Then the folder gets its name, by one rename, and the
folder above is brought to the disk. One that is to go gets another name first. So whatever has the name of a step was
complete once, and what was interrupted is found by its name, and removed by the next save.

[Note: left behind] A run may go on from an earlier step than the newest. Its next manifest lists the seals of the later
ones, which stay, and are not the newest any more.
"""

import json
import os
import re
import shutil
from collections.abc import Iterable, Mapping, Sequence
from contextlib import suppress
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

from .commit import (
    locked,
    make_anew,
    make_folder,
    remove_abandoned,
    sync_folder,
    unfinished,
    unfinished_of_all,
)
from .tensor_file import ALGORITHM, FileRecord, damage_of_tensors, hash_of, hash_of_bytes, write_small

MANIFEST = "manifest.json"
FORMAT = 1
_NAME = re.compile(r"step-(\d{8,})")
_REPLACED = "replaced"
_UNFINISHED = re.compile(r"\.(step-\d{8,})\.(?:writing|replaced|removed)(?:-.*)?")


def step_path(directory: Path, step: int) -> Path:
    """The folder of a step."""
    return directory / f"step-{step:08}"


def begin_step(directory: Path, step: int, *, inside: Iterable[str] = ()) -> Path:
    """Make the folder in which this process writes a step, and remove what earlier ones left unfinished.

    Args:
        directory: of all steps.
        step: its number.
        inside: the folders in it.

    Raises:
        OSError: it cannot be made.
    """
    make_folder(directory, exist_ok=True)
    sync_folder(directory.parent)
    recover(directory)
    remove_abandoned(path for path in directory.iterdir() if _UNFINISHED.fullmatch(path.name))
    folder = unfinished(step_path(directory, step))
    make_anew(folder)
    try:
        for name in inside:
            (folder / name).mkdir()
    except OSError:
        shutil.rmtree(folder, ignore_errors=True)
        raise
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
        "left_behind": [seal for path in later_steps(directory, step) if (seal := _lineage(path)[0])],
        "files": {name: _listed(record) for name, record in sorted(records.items())},
    }
    write_small(folder / MANIFEST, _sealed(manifest))
    for inner in (*(path for path in folder.iterdir() if path.is_dir()), folder):
        sync_folder(inner)
    final = step_path(directory, step)
    with locked(directory):
        replaced = _name_step(folder, final)
    shutil.rmtree(replaced, ignore_errors=True)  # the next save removes what is left of it
    return final


def _name_step(folder: Path, final: Path) -> Path:
    """Give a step its name, and return the place of the one that had it."""
    replaced = unfinished(final, _REPLACED)
    if final.exists():
        if replaced.exists():
            shutil.rmtree(replaced)
        os.rename(final, replaced)
    try:
        os.rename(folder, final)
        sync_folder(final.parent)
    except OSError:
        with suppress(OSError):  # what a disk refuses here too is put right by the next load or save
            if not folder.exists():
                os.rename(final, folder)
            _recover(final.parent)
        raise
    return replaced


def recover(directory: Path) -> None:
    """Give a step that was about to be replaced its name back, where what replaces it never got there."""
    if _nameless(directory):
        with locked(directory):
            _recover(directory)


def _recover(directory: Path) -> None:
    for final, whole in _nameless(directory).items():
        os.rename(max(whole, key=lambda each: (each / MANIFEST).stat().st_mtime), final)


def _nameless(directory: Path) -> dict[Path, list[Path]]:
    """The steps that are without their name while they are replaced, and where they are then."""
    found = [match for path in _entries(directory) if (match := _UNFINISHED.fullmatch(path.name))]
    nameless = {}
    for final in {directory / match[1] for match in found}:
        whole = [each for each in unfinished_of_all(final, _REPLACED) if (each / MANIFEST).is_file()]
        if whole and not final.exists():
            nameless[final] = whole
    return nameless


def keep_newest(directory: Path, count: int, step: int) -> None:
    """Of a step and those before it remove all but the newest; see `newest_first`.

    Later ones are of before a run went on from an earlier step, perhaps since they are damaged: they do not count.

    Raises:
        OSError: it cannot be done.
    """
    later = later_steps(directory, step)
    steps = [path for path in newest_first(directory) if path not in later]
    for path in steps[count:]:
        try:
            _remove(path)
        except OSError as error:
            raise OSError(
                f"{step_path(directory, step).name} is complete, and older ones could not be removed: {error}"
            ) from error


def steps_in(directory: Path) -> list[Path]:
    """The folders of steps, the highest number first."""
    found = [path for path in _entries(directory) if _NAME.fullmatch(path.name) and path.is_dir()]
    return sorted(found, key=_number, reverse=True)


def later_steps(directory: Path, step: int) -> list[Path]:
    """The folders of steps with a higher number, the highest first."""
    return [path for path in steps_in(directory) if _number(path) > step]


def later_than(path: Path) -> list[Path]:
    """The folders beside that of a step, of steps with a higher number; none beside a folder of another name."""
    return later_steps(path.parent, _number(path)) if _NAME.fullmatch(path.name) else []


def newest_first(directory: Path) -> list[Path]:
    """The folders of steps, the highest number first, but last those that were left behind; see [Note: left behind]."""
    steps = steps_in(directory)
    lineages = {path: _lineage(path) for path in steps}
    left = {seal for _, behind in lineages.values() for seal in behind}
    return sorted(steps, key=lambda path: lineages[path][0] in left)


def _lineage(path: Path) -> tuple[str | None, Sequence[str]]:
    """A step's own seal, None where its manifest cannot be read, and those of the later steps that it left behind."""
    try:
        manifest = json.loads((path / MANIFEST).read_bytes())
        return str(manifest["seal"]), manifest.get("left_behind", ())
    except (OSError, ValueError, KeyError, TypeError, AttributeError):
        return None, ()


def _number(path: Path) -> int:
    return int(path.name.removeprefix("step-"))


def _entries(directory: Path) -> list[Path]:
    return list(directory.iterdir()) if directory.is_dir() else []


def manifest_of(folder: Path) -> dict[str, Any]:
    """The manifest of a step; "files" by name as `FileRecord`.

    Raises:
        ValueError: it cannot be read; names it.
    """
    path = folder / MANIFEST
    try:
        content = path.read_bytes()
        manifest = json.loads(content)
        form = (manifest["format"], manifest["algorithm"])
        seal = manifest.pop("seal", None)  # another format may have none
        files = {name: FileRecord(**each) for name, each in manifest["files"].items()}
    except FileNotFoundError:
        raise ValueError(
            f"{path} is missing: the checkpoint is not complete, or is none of Echelon's"
        ) from None
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        raise ValueError(f"{path} cannot be read, it is damaged: {error!r}") from error
    if form != (FORMAT, ALGORITHM):
        raise ValueError(
            f"{path} is of format {form[0]} with hashes of {form[1]}, and this release of Echelon reads format "
            f"{FORMAT} with {ALGORITHM}"
        )
    if seal != _seal(manifest) or content != _sealed(manifest):
        raise ValueError(f"{path} is damaged: it is not what its own hash says")
    return {**manifest, "files": files}


def damage_of(folder: Path, name: str, record: FileRecord) -> list[str]:
    """Errors of a file that is not as it was written, each with the file and, where there are any, the tensor."""
    path = folder / name
    if not path.is_file():
        return [f"{path} is missing"]
    if (size := path.stat().st_size) != record.bytes:
        return [f"{path} has {size} bytes, and {record.bytes} were written"]
    if record.tensors is None:
        return [] if hash_of(path) == record.hash else [f"{path} is damaged"]
    return [f"{path} is damaged: {each}" for each in damage_of_tensors(path, record)]


def _remove(path: Path) -> None:
    """Take a step's name away first: what was half removed must not look like one."""
    gone = unfinished(path, "removed")
    if gone.exists():
        shutil.rmtree(gone)
    os.rename(path, gone)
    if gone.is_symlink():  # to where a user has moved it
        gone.unlink()
    shutil.rmtree(gone, ignore_errors=True)  # the next save removes what is left of it


def _sealed(manifest: Mapping[str, Any]) -> bytes:
    """A manifest as it is written: with its own hash, so that no byte of it can change unnoticed."""
    return json.dumps({**manifest, "seal": _seal(manifest)}, indent=1).encode()


def _seal(manifest: Mapping[str, Any]) -> str:
    return hash_of_bytes(json.dumps(manifest).encode())


def _listed(record: FileRecord) -> dict[str, Any]:
    return {name: value for name, value in record._asdict().items() if value is not None}


def _version() -> str:
    try:
        return version("echelon")
    except PackageNotFoundError:  # a source tree that was never installed
        return "unknown"
