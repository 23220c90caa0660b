"""Write a model as Hugging Face files. Each rank writes some of the files, which contain unsharded tensors."""

import json
import os
import shutil
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from copy import deepcopy
from functools import partial
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor, nn
from transformers import PreTrainedModel

from ..cluster.gathering import on_all_ranks, on_first_rank, run_or_raise_together
from ..cluster.packing import packed
from ..cluster.transformers_api import CONFIG_NAME, GENERATION_CONFIG_NAME, custom_object_save
from .background import Keep
from .commit import (
    Replaced,
    make_anew,
    remove_abandoned,
    sync_folder,
    unfinished,
    unfinished_of_all,
    written_beside,
)
from .exchange import FilePlan, assemble, entries_of, needed_boxes, offers_of, plan_files
from .local_tensors import LocalTensor
from .tensor_file import Entry, Records, TensorFileWriter, TorchFileWriter, Write, write_small

# Minimum size of a weights file. Smaller shares are not split further, so some ranks write more than others.
_LEAST_BYTES = 2**25

Describe = Callable[[torch.dtype, Path], None]


class FileNames(NamedTuple):
    """File names of a model in one format.

    Attributes:
        single: the name, if all weights are in one file.
        sharded: the name of each of several files, a format string of `number` (from 1) and `count`.
        index_file: the name of the JSON file that tells which of several files has a tensor.
    """

    single: str
    sharded: str
    index_file: str

    def with_prefix(self, prefix: str | None) -> "FileNames":
        """Return these names after a prefix and a dot; unchanged without a prefix."""
        return self if prefix is None else FileNames(*(f"{prefix}.{name}" for name in self))

    def of(self, count: int) -> list[str]:
        """Return the names of `count` files."""
        if count == 1:
            return [self.single]
        return [self.sharded.format(number=number, count=count) for number in range(1, count + 1)]


SAFETENSORS = FileNames(
    "model.safetensors", "model-{number:05}-of-{count:05}.safetensors", "model.safetensors.index.json"
)
TORCH = FileNames(
    "pytorch_model.bin", "pytorch_model-{number:05}-of-{count:05}.bin", "pytorch_model.bin.index.json"
)
ADAPTER_SAFETENSORS = FileNames("adapter_model.safetensors", "", "")
ADAPTER_TORCH = FileNames("adapter_model.bin", "", "")
ADAPTER_FILES = Replaced(
    entries=("adapter_config.json",), others=(ADAPTER_SAFETENSORS.single, ADAPTER_TORCH.single)
)


def prepare_model(
    local: Mapping[str, LocalTensor],
    order: Sequence[str],
    names: FileNames,
    *,
    max_bytes: float,
    describe: Describe | None,
    keep: Keep,
    group: dist.ProcessGroup,
    is_torch: bool = False,
    by_all: bool = False,
) -> Write:
    """Plan the files of a model and the rank that writes each. One all-gather of objects over the group.

    Args:
        local: this rank's tensors.
        order: names of tensors, in the order of the files; other tensors follow.
        names: file names.
        max_bytes: maximum size of a file; a larger tensor has a file of its own.
        describe: writes configs into a folder, given the dtype of most of the weights.
        keep: returns the memory to save for a tensor that this rank sends or writes (a copy for asynchronous saves).
        group: all ranks, on the CPU backend.
        is_torch: write files of torch's own format instead of safetensors.
        by_all: limit the file size to a rank's share as well, or to 32 MiB if that is larger, so that all ranks write.

    Returns:
        A function that writes the model into an existing folder and returns the records of this rank's files.
        Collective over the group; raises as `on_all_ranks` if any rank could not write.
    """
    offers = on_all_ranks(lambda: offers_of(local), group)
    entries = entries_of(offers, order)
    if by_all:
        share = sum(entry.nbytes for entry in entries) / group.size()
        max_bytes = min(max_bytes, max(share, _LEAST_BYTES))
    files = packed(entries, max_bytes, lambda entry: entry.nbytes) or [[]]  # one empty file without tensors
    plans = plan_files(dict(zip(names.of(len(files)), files, strict=True)), offers)
    boxes = {key: keep(tensor) for key, tensor in needed_boxes(local, plans, group.rank()).items()}

    def write(folder: Path) -> Records:
        records, failure = _write_files(folder, assemble(boxes, plans, group), is_torch=is_torch)

        def write_index_and_configs() -> None:
            if failure is not None:
                raise failure  # on all ranks, as each has this rank's boxes by now
            if group.rank() > 0:
                return
            if len(plans) > 1:
                content = index_of({plan.name: [tensor.entry for tensor in plan.tensors] for plan in plans})
                records[names.index_file] = write_small(folder / names.index_file, content)
            if describe is not None:
                records.update(_describe_into(folder, partial(describe, _largest_format(entries))))

        run_or_raise_together(write_index_and_configs, group)
        return records

    return write


def _write_files(
    folder: Path, assembled: Iterator[tuple[FilePlan, Entry, Tensor]], *, is_torch: bool
) -> tuple[Records, Exception | None]:
    """Write this rank's files in order. Errors are returned, not raised: other ranks still need this rank's boxes."""
    records: Records = {}
    writer: TensorFileWriter | TorchFileWriter | None = None
    failure: Exception | None = None
    for plan, entry, tensor in assembled:
        if failure is not None:
            continue
        try:
            if writer is None:
                kind = TorchFileWriter if is_torch else TensorFileWriter
                writer = kind(folder / plan.name, [written.entry for written in plan.tensors])
            writer.write(tensor)
            if entry == plan.tensors[-1].entry:
                records[plan.name] = writer.finish()
                writer = None
        except Exception as error:
            failure = error
            if writer is not None:
                writer.abandon()
    return records, failure


def write_model_file(write: Write, path: Path, group: dist.ProcessGroup) -> None:
    """Write a model as one file, which appears under its name once complete. Collective over the group.

    Raises:
        OSError: the write failed; on every rank. An existing file is unchanged.
    """

    def begin() -> Path:
        if path.is_dir():
            raise IsADirectoryError(f"{path} is a folder: give the name of a file, or shard=True")
        remove_abandoned(unfinished_of_all(path))
        folder = unfinished(path)
        make_anew(folder)
        return folder

    def place(folder: Path) -> None:
        os.replace(folder / path.name, path)
        sync_folder(path.parent)
        shutil.rmtree(folder, ignore_errors=True)

    with written_beside(begin, group) as folder:
        write(folder)
        on_first_rank(lambda: place(folder), group)


def replaced_weights(prefix: str | None) -> Replaced:
    """Return the files that a saved model replaces in a folder: weights in any format with the same prefix."""
    kinds = [names.with_prefix(prefix) for names in (SAFETENSORS, TORCH)]
    return Replaced(
        entries=tuple(entry for names in kinds for entry in (names.single, names.index_file)),
        others=tuple(names.sharded.replace("{number:05}", "*").replace("{count:05}", "*") for names in kinds),
    )


def describing(model: nn.Module) -> Describe | None:
    """Return a function that writes the configs of a transformers model; None for other models."""
    return partial(_write_configs, model) if isinstance(model, PreTrainedModel) else None


def config_errors(model: nn.Module) -> list[str]:
    """Return errors for configs of a transformers model that cannot be written as JSON."""
    if not isinstance(model, PreTrainedModel):
        return []
    errors = []
    for name, as_json in (("config", _config_json), ("generation_config", _generation_json)):
        try:
            as_json(model)
        except Exception as error:  # a config may contain any object
            errors.append(
                f"the model's {name} cannot be written as JSON ({error}): remove values other than numbers, str, lists "
                "and dicts"
            )
    return errors


def _write_configs(model: PreTrainedModel, dtype: torch.dtype, folder: Path) -> None:
    """Write a model's configs and code, as its `save_pretrained` would for weights of this dtype."""
    kind = _native_class(model)
    for saved in (model.config, kind.__new__(kind)):  # of the model only its class counts
        if saved._auto_class is not None:  # its class is defined in a file of the user's
            custom_object_save(saved, folder, config=model.config)
    (folder / CONFIG_NAME).write_text(_config_json(model, dtype))
    if (generation := _generation_json(model)) is not None:
        (folder / GENERATION_CONFIG_NAME).write_text(generation)


# Not through save_pretrained, and not from a newly built config: both refuse contradictory settings, and a run must not
# fail because of them.
def _config_json(model: PreTrainedModel, dtype: torch.dtype = torch.float32) -> str:
    """Return the content of config.json for weights of this dtype."""
    config = deepcopy(model.config)
    config.dtype = dtype
    config.architectures = [_native_class(model).__name__]
    vars(config).pop("transformers_weights", None)  # refers to the files from which it was loaded
    text: str = config.to_json_string()
    return text


def _native_class(model: PreTrainedModel) -> Any:
    """Return a model's class, which `fully_shard` replaces by a subclass with FSDP before its name."""
    kind = type(model)
    name = kind.__name__.removeprefix("FSDP")
    return next((base for base in kind.__mro__ if base.__name__ == name), kind)


def _generation_json(model: PreTrainedModel) -> str | None:
    if not model.can_generate() or model.generation_config is None:
        return None
    text: str = model.generation_config.to_json_string(keys_to_pop=["compile_config"])
    return text


def _largest_format(entries: Sequence[Entry]) -> torch.dtype:
    """Return the floating-point dtype with the most bytes."""
    sizes: Counter[torch.dtype] = Counter()
    for entry in entries:
        if entry.dtype.is_floating_point:
            sizes[entry.dtype] += entry.nbytes
    return max(sizes, key=sizes.__getitem__, default=torch.float32)


def _describe_into(folder: Path, describe: Callable[[Path], None]) -> Records:
    """Write configs into a folder in which other ranks may still be writing.

    They are first written to a temporary folder inside it. The system's temporary folder may be full or read-only.
    """
    with TemporaryDirectory(dir=folder) as apart:
        describe(Path(apart))
        contents = {path.name: path.read_bytes() for path in Path(apart).iterdir()}
    return {name: write_small(folder / name, content) for name, content in contents.items()}


def index_of(files: Mapping[str, Sequence[Entry]]) -> bytes:
    """Return the JSON index of a model in several files."""
    places = {entry.name: file for file, entries in files.items() for entry in entries}
    size = sum(entry.nbytes for entries in files.values() for entry in entries)
    listing = {"metadata": {"total_size": size}, "weight_map": dict(sorted(places.items()))}
    return json.dumps(listing, indent=2).encode()
