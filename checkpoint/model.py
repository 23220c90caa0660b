"""A model in files that Hugging Face reads, written by all ranks: each its own files of whole tensors."""

import json
import os
import shutil
from collections.abc import Callable, Mapping, Sequence
from copy import deepcopy
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor, nn
from transformers import PreTrainedModel
from transformers.dynamic_module_utils import custom_object_save
from transformers.utils import CONFIG_NAME, GENERATION_CONFIG_NAME

from .background import Copies
from .box import Box
from .commit import (
    Replaced,
    make_anew,
    remove_abandoned,
    sync_folder,
    unfinished,
    unfinished_of_all,
    write_together,
    written_beside,
)
from .consent import alike, on_first_rank
from .exchange import (
    Assembled,
    FilePlan,
    Offer,
    assemble,
    entries_of,
    needed_parts,
    plan_files,
    split_into_files,
)
from .local import LocalTensor
from .tensor_file import Entry, FileRecord, TensorFileWriter, TorchFileWriter, write_small

DESCRIBED = ".described"

Records = dict[str, FileRecord]
Describe = Callable[[torch.dtype, Path], None]


class FileNames(NamedTuple):
    """The names of a model's files: one, several, and their index."""

    one: str
    several: str
    listing: str

    def with_prefix(self, prefix: str | None) -> "FileNames":
        """The same behind a prefix and a point, where there is one."""
        return self if prefix is None else FileNames(*(f"{prefix}.{name}" for name in self))

    def of(self, count: int) -> list[str]:
        """The names of so many files."""
        if count == 1:
            return [self.one]
        return [self.several.format(number=number, count=count) for number in range(1, count + 1)]


SAFETENSORS = FileNames(
    "model.safetensors", "model-{number:05}-of-{count:05}.safetensors", "model.safetensors.index.json"
)
TORCH = FileNames(
    "pytorch_model.bin", "pytorch_model-{number:05}-of-{count:05}.bin", "pytorch_model.bin.index.json"
)
ADAPTER_SAFETENSORS = FileNames("adapter_model.safetensors", "", "")
ADAPTER_TORCH = FileNames("adapter_model.bin", "", "")
ADAPTER_FILES = Replaced(
    entries=("adapter_config.json",), others=(ADAPTER_SAFETENSORS.one, ADAPTER_TORCH.one)
)


@dataclass(frozen=True, kw_only=True)
class ModelFiles:
    """A model about to be written: who writes what, and this rank's memory of it.

    Args:
        plans: equal on all ranks.
        parts: the boxes that this rank sends and writes.
        index: the name of the index; None where there is one file alone.
        describe: writes the model's config into a folder, None where there is nothing.
        is_torch: whether files are of torch's own format, and not safetensors.
        group: all ranks, over the CPU.
    """

    plans: Sequence[FilePlan]
    parts: Mapping[tuple[str, Box], Tensor]
    index: str | None
    describe: Callable[[Path], None] | None
    is_torch: bool
    group: dist.ProcessGroup

    def copied(self, copies: Copies) -> "ModelFiles":
        """The same, with the memory as it is now, once the copies are finished."""
        parts = {key: copies.copy(part) for key, part in self.parts.items()}
        return replace(self, parts=parts)

    def write(self, folder: Path) -> Records:
        """Write all of it into a folder that is there, and return this rank's files. Collective over the group.

        Raises:
            OSError: some rank could not write; on every rank.
        """
        records: Records = {}
        output = _Output(folder, records, TorchFileWriter if self.is_torch else TensorFileWriter)
        for each in assemble(self.parts, self.plans, self.group):
            output.take(each)

        def end() -> None:
            output.end()
            self._describe(folder, records)

        alike(end, self.group)
        return records

    def _describe(self, folder: Path, records: Records) -> None:
        """Write index and config, on the first rank."""
        if self.group.rank() > 0:
            return
        if self.index is not None and len(self.plans) > 1:
            files = {plan.name: [written.entry for written in plan.tensors] for plan in self.plans}
            records[self.index] = write_small(folder / self.index, index_of(files))
        if self.describe is not None:
            records |= _describe_into(folder, self.describe)


def plan_model(
    local: Mapping[str, LocalTensor],
    offers: Sequence[Mapping[str, Offer]],
    order: Sequence[str],
    names: FileNames,
    *,
    max_bytes: float,
    describe: Describe | None,
    is_torch: bool = False,
    group: dist.ProcessGroup,
) -> ModelFiles:
    """Decide who writes what.

    Args:
        local: this rank's tensors.
        offers: of every rank, see `offers_of`.
        order: of all tensors; others come behind them.
        names: of the files.
        max_bytes: of a file; at least one, and below the bytes of all over the ranks for all of them to write.
        describe: writes what belongs to the tensors into a folder, given the format that most of them are in.
        is_torch: whether files are of torch's own format, and not safetensors.
        group: all ranks, over the CPU.
    """
    files = split_into_files(entries_of(offers, order), max_bytes)
    plans = plan_files(dict(zip(names.of(len(files)), files, strict=True)), offers)
    dtype = largest_format([written.entry for plan in plans for written in plan.tensors])
    return ModelFiles(
        plans=plans,
        parts=needed_parts(local, plans, group.rank()),
        index=names.listing,
        describe=None if describe is None else partial(describe, dtype),
        is_torch=is_torch,
        group=group,
    )


def write_model_file(files: ModelFiles, path: Path, group: dist.ProcessGroup) -> None:
    """Write a model as one file, which appears under its name once complete. Collective over the group.

    Raises:
        OSError: it could not be written; on every rank. What was there stands.
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
        files.write(folder)
        on_first_rank(lambda: place(folder), group)


def write_model_folder(
    files: ModelFiles, path: Path, group: dist.ProcessGroup, *, prefix: str | None = None
) -> None:
    """Write a model as a folder; other files in it stay, weights of an earlier save go. Collective over the group.

    See [Note: placing] in commit.py.

    Args:
        prefix: of the names of its files; those with another one, or none, stay.

    Raises:
        OSError: it could not be written; on every rank. What was there stands.
    """
    write_together(path, files.write, _replaced(prefix), group)


def _replaced(prefix: str | None) -> Replaced:
    kinds = [names.with_prefix(prefix) for names in (SAFETENSORS, TORCH)]
    return Replaced(
        entries=tuple(entry for names in kinds for entry in (names.one, names.listing)),
        others=tuple(names.several.replace("{number:05}", "*").replace("{count:05}", "*") for names in kinds),
    )


def describing(model: nn.Module) -> Describe | None:
    """A writer of the configs of a transformers model; None for any other."""
    return partial(_write_configs, model) if isinstance(model, PreTrainedModel) else None


def config_errors(model: nn.Module) -> list[str]:
    """Errors of configs of a transformers model that cannot be written."""
    if not isinstance(model, PreTrainedModel):
        return []
    errors = []
    for name, as_json in (("config", _config_json), ("generation_config", _generation_json)):
        try:
            as_json(model)
        except Exception as error:  # of whatever somebody put into it
            errors.append(
                f"the model's {name} cannot be written as JSON ({error}): take out of it what is no plain value"
            )
    return errors


def _write_configs(model: PreTrainedModel, dtype: torch.dtype, folder: Path) -> None:
    if model.config._auto_class is not None:  # it is defined by a file of the user's
        custom_object_save(model.config, folder, config=model.config)
    (folder / CONFIG_NAME).write_text(_config_json(model, dtype))
    if (generation := _generation_json(model)) is not None:
        (folder / GENERATION_CONFIG_NAME).write_text(generation)


# Neither by save_pretrained, which refuses settings that contradict each other, nor from a config that is built anew,
# which does so too: no run is to end for them.
def _config_json(model: PreTrainedModel, dtype: torch.dtype = torch.float32) -> str:
    config = deepcopy(model.config)
    config.dtype = dtype
    config.architectures = [type(model).__name__.removeprefix("FSDP")]
    vars(config).pop("transformers_weights", None)  # of where it was loaded from
    text: str = config.to_json_string()
    return text


def _generation_json(model: PreTrainedModel) -> str | None:
    if not model.can_generate() or model.generation_config is None:
        return None
    text: str = model.generation_config.to_json_string(keys_to_pop=["compile_config"])
    return text


def largest_format(entries: Sequence[Entry]) -> torch.dtype:
    """The floating-point format that most of the bytes are in."""
    bytes_: dict[torch.dtype, int] = {}
    for entry in entries:
        if entry.dtype.is_floating_point:
            bytes_[entry.dtype] = bytes_.get(entry.dtype, 0) + entry.nbytes
    return max(bytes_, key=lambda dtype: bytes_[dtype], default=torch.float32)


class _Output:
    """The files of this rank, one after the other. A failure is kept for the end: others still need its boxes."""

    def __init__(
        self, folder: Path, records: Records, kind: type[TensorFileWriter] | type[TorchFileWriter]
    ) -> None:
        self._folder, self._records, self._kind = folder, records, kind
        self._writer: TensorFileWriter | TorchFileWriter | None = None
        self._failure: Exception | None = None

    def take(self, each: Assembled) -> None:
        if self._failure is None:
            try:
                self._write(each)
            except Exception as error:  # raised once all ranks have their tensors
                self._failure = error
                if self._writer is not None:
                    self._writer.abandon()

    def _write(self, each: Assembled) -> None:
        entries = [written.entry for written in each.file.tensors]
        if self._writer is None:
            self._writer = self._kind(self._folder / each.file.name, entries)
        self._writer.write(each.tensor)
        if each.name == entries[-1].name:
            self._records[each.file.name] = self._writer.finish()
            self._writer = None

    def end(self) -> None:
        if self._failure is not None:
            raise self._failure


def _describe_into(folder: Path, describe: Callable[[Path], None]) -> Records:
    """Write configs into a folder in which other ranks may be writing still.

    First in a folder within that one, and not in the system's for temporary files, which may be full or read-only.
    """
    apart = folder / DESCRIBED
    apart.mkdir()
    describe(apart)
    records = {path.name: write_small(folder / path.name, path.read_bytes()) for path in apart.iterdir()}
    shutil.rmtree(apart)
    return records


def index_of(files: Mapping[str, Sequence[Entry]]) -> bytes:
    """The index of several files of a model, from what is in each."""
    places = {entry.name: file for file, entries in files.items() for entry in entries}
    size = sum(entry.nbytes for entries in files.values() for entry in entries)
    listing = {"metadata": {"total_size": size}, "weight_map": dict(sorted(places.items()))}
    return json.dumps(listing, indent=2).encode()
