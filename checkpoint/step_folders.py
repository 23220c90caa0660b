"""The folders of steps: created and removed atomically, with a manifest of all files and their hashes.

[Note: complete or not there] A checkpoint is written in a folder with a temporary name, and every file is flushed to
disk. The manifest, which lists all files with their hashes, is written last. One rename then gives the folder its final
name, and the parent folder is flushed. A folder is renamed before it is removed. So every folder with the name of a
step was complete when it got that name. Interrupted ones have temporary names, and the next save removes them.

[Note: left behind] A run may continue from a step that is not the newest. The later steps stay. The run's next manifest
lists their seals, and they no longer count as the newest.
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
    """Return the folder of a step."""
    return directory / f"step-{step:08}"


def begin_step(directory: Path, step: int, *, inside: Iterable[str] = ()) -> Path:
    """Make the temporary folder of a step, and remove unfinished ones of dead processes.

    Args:
        directory: the folder of all steps.
        step: number of the step.
        inside: names of its subfolders.

    Raises:
        OSError: the folder cannot be made.
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
    """Write the manifest and rename the folder to its final name. An existing step of that number is replaced.

    Raises:
        OSError: a file operation failed; an existing step is unchanged.
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
    shutil.rmtree(replaced, ignore_errors=True)  # the next save removes the rest, if any
    return final


def _name_step(folder: Path, final: Path) -> Path:
    """Rename a folder to its final name; return the path to which a step of this name was moved, if there was one."""
    replaced = unfinished(final, _REPLACED)
    if final.exists():
        if replaced.exists():
            shutil.rmtree(replaced)
        os.rename(final, replaced)
    try:
        os.rename(folder, final)
        sync_folder(final.parent)
    except OSError:
        with suppress(OSError):  # if this fails too, the next load or save recovers
            if not folder.exists():  # renamed, but perhaps not on disk
                os.rename(final, folder)
            _recover(final.parent)
        raise
    return replaced


def recover(directory: Path) -> None:
    """Undo interrupted replacements: rename a replaced step back if its successor was never placed."""
    if _interrupted_replacements(directory):
        with locked(directory):
            _recover(directory)


def _recover(directory: Path) -> None:
    for final, predecessors in _interrupted_replacements(directory).items():
        newest = max(predecessors, key=lambda folder: (folder / MANIFEST).stat().st_mtime)
        os.rename(newest, final)


def _interrupted_replacements(directory: Path) -> dict[Path, list[Path]]:
    """Return the steps whose replacement was interrupted, with the folders of their complete predecessors."""
    matches = [match for path in _entries(directory) if (match := _UNFINISHED.fullmatch(path.name))]
    predecessors = {}
    for final in {directory / match[1] for match in matches}:
        replaced = unfinished_of_all(final, _REPLACED)
        complete = [folder for folder in replaced if (folder / MANIFEST).is_file()]
        if complete and not final.exists():
            predecessors[final] = complete
    return predecessors


def keep_newest(directory: Path, count: int, step: int) -> None:
    """Remove the steps that are older than the newest `count` complete ones up to `step`; see `newest_first`.

    Later steps exist if the run continued from an earlier one, perhaps since they are damaged. They do not count and
    are not removed. Neither are incomplete ones among the newest, since they may be copied there at this moment. A link
    and the step that it leads to count as one.

    Raises:
        OSError: a folder cannot be removed.
    """
    later = later_steps(directory, step)
    steps = [path for path in newest_first(directory) if path not in later]
    num_complete, kept = 0, set[Path]()
    for path in steps:
        target = path.resolve()
        if num_complete < count:
            if target not in kept and is_complete(path):
                num_complete += 1
            kept.add(target)
            continue
        if target in kept and not path.is_symlink():  # a kept link leads to it
            continue
        try:
            _remove(path)
        except OSError as error:
            raise OSError(
                f"{step_path(directory, step).name} is complete, and older ones could not be removed: {error}"
            ) from error


def steps_in(directory: Path) -> list[Path]:
    """Return the folders of steps, the highest number first."""
    folders = [path for path in _entries(directory) if _NAME.fullmatch(path.name) and path.is_dir()]
    return sorted(folders, key=_number, reverse=True)


def later_steps(directory: Path, step: int) -> list[Path]:
    """Return the folders of steps with a higher number, the highest first."""
    return [path for path in steps_in(directory) if _number(path) > step]


def later_than(path: Path) -> list[Path]:
    """Return the folders of later steps beside that of a step; empty if the folder is not named as a step."""
    return later_steps(path.parent, _number(path)) if _NAME.fullmatch(path.name) else []


def newest_first(directory: Path) -> list[Path]:
    """Return the folders of steps, the highest number first, steps that were left behind last.

    See [Note: left behind].
    """
    steps = steps_in(directory)
    lineages = {path: _lineage(path) for path in steps}
    left_behind = {seal for _, seals in lineages.values() for seal in seals}
    return sorted(steps, key=lambda path: lineages[path][0] in left_behind)


def _lineage(path: Path) -> tuple[str | None, Sequence[str]]:
    """Return the seal of a step (None if its manifest cannot be read) and the seals of steps that it left behind."""
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
    """Read the manifest of a step; its "files" are a dict from name to `FileRecord`.

    Raises:
        ValueError: the manifest is missing, damaged or of another format; names it.
    """
    path = folder / MANIFEST
    try:
        content = path.read_bytes()
        manifest = json.loads(content)
        written_format, written_algorithm = manifest["format"], manifest["algorithm"]
        seal = manifest.pop("seal", None)  # another format may have none
        files = {name: FileRecord(**fields) for name, fields in manifest["files"].items()}
    except FileNotFoundError:
        raise ValueError(
            f"{path} is missing: the checkpoint is not complete, or not written by Echelon"
        ) from None
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        raise ValueError(f"{path} cannot be read, it is damaged: {error!r}") from error
    if (written_format, written_algorithm) != (FORMAT, ALGORITHM):
        raise ValueError(
            f"{path} is of format {written_format} with hashes of {written_algorithm}, and this release of Echelon "
            f"reads format {FORMAT} with {ALGORITHM}"
        )
    if seal != _seal(manifest) or content != _sealed(manifest):
        raise ValueError(f"{path} is damaged: its contents do not match its own hash")
    return {**manifest, "files": files}


def is_complete(folder: Path) -> bool:
    """Return True if a step has an intact manifest, and its files their sizes; the content of files is not read."""
    try:
        files = manifest_of(folder)["files"]
        return all((folder / name).stat().st_size == record.bytes for name, record in files.items())
    except (ValueError, OSError):
        return False


def damage_of(folder: Path, name: str, record: FileRecord) -> list[str]:
    """Return errors of a file that differs from its record, each with the path and, if known, the tensor."""
    path = folder / name
    if not path.is_file():
        return [f"{path} is missing"]
    if (size := path.stat().st_size) != record.bytes:
        return [f"{path} has {size} bytes, and {record.bytes} were written"]
    if record.tensors is None:
        return [] if hash_of(path) == record.hash else [f"{path} is damaged"]
    return [f"{path} is damaged: {tensor}" for tensor in damage_of_tensors(path, record)]


def _remove(path: Path) -> None:
    """Remove a step. It is renamed first, so that a partly removed folder does not look like a step."""
    gone = unfinished(path, "removed")
    if gone.exists():
        shutil.rmtree(gone)
    os.rename(path, gone)
    if gone.is_symlink():  # the user has moved the step and left a link
        gone.unlink()
    shutil.rmtree(gone, ignore_errors=True)  # the next save removes the rest, if any


def _sealed(manifest: Mapping[str, Any]) -> bytes:
    """Serialize a manifest with its own hash (the seal), so that every changed byte is detected."""
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
