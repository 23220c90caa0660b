"""Which files of a folder hold the tensors of a model. Reading them is lazy/files.py."""

import json
import re
from pathlib import Path

# What a folder is searched for, in this order, as `from_pretrained` does.
_NAMES = (
    "model.safetensors",
    "model.safetensors.index.json",
    "pytorch_model.bin",
    "pytorch_model.bin.index.json",
)
_INDEX = ".index.json"
_OF_SEVERAL = re.compile(r"-(\d+)-of-(\d+)\.")


def tensor_files(path: Path) -> list[Path]:
    """The files with the tensors of a model.

    Args:
        path: a file, which may be an index of others; or a folder.

    Raises:
        FileNotFoundError: there is nothing, or files of several are missing.
        ValueError: an index cannot be read, or the folder holds an adapter.
    """
    if path.is_file():
        return _of_index(path) if path.name.endswith(_INDEX) else [path]
    if not path.is_dir():
        raise FileNotFoundError(f"there is no file or folder {path}: give one that holds a model's weights")
    for name in _NAMES:
        if (path / name).is_file():
            return tensor_files(path / name)
    if (path / "adapter_config.json").is_file():
        raise ValueError(
            f"{path} holds an adapter, and no model: give the folder of the model that it belongs to"
        )
    for pattern in ("*.safetensors", "pytorch_model*.bin"):
        if found := sorted(path.glob(pattern)):
            return _all_of_several(found)
    present = sorted(each.name for each in path.iterdir())[:20]
    raise FileNotFoundError(
        f"{path} holds no model: expected one of {', '.join(_NAMES)} or other safetensors files, and found {present}"
    )


def _of_index(path: Path) -> list[Path]:
    """The files that an index names."""
    try:
        names = set(json.loads(path.read_text(encoding="utf-8"))["weight_map"].values())
    except (ValueError, KeyError, AttributeError) as error:
        raise ValueError(f"{path} is no index of tensors: {type(error).__name__}: {error}") from error
    files = [path.parent / name for name in sorted(names)]
    if not files:
        raise ValueError(f"{path} is no index of tensors: it names no file")
    if missing := [each.name for each in files if not each.is_file()]:
        raise FileNotFoundError(f"files that {path} names are missing: {', '.join(missing)}")
    return files


def _all_of_several(files: list[Path]) -> list[Path]:
    """Files without an index, once those that are numbered are all there."""
    for path in files:
        if (found := _OF_SEVERAL.search(path.name)) is None:
            continue
        number, count = found.groups()
        start, end = path.name[: found.start()], path.name[found.end() :]
        every = [f"{start}-{index:0{len(number)}}-of-{count}.{end}" for index in range(1, int(count) + 1)]
        present = {each.name for each in files}
        if missing := [name for name in every if name not in present]:
            raise FileNotFoundError(f"files of {path.parent} are missing: {', '.join(missing)}")
    return files
