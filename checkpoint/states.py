"""Optimizer states in files, through torch.distributed.checkpoint: what each rank holds, in boxes of whole tensors.

torch plans who writes and who reads which box; the files are safetensors and the index is JSON, so nothing that is
read was pickled. A name is `STATE/PARAMETER`, a key in a file `NAME@OFFSET`.
"""

import json
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from os import PathLike
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch import Tensor
from torch.distributed.checkpoint import (
    DefaultLoadPlanner,
    DefaultSavePlanner,
    LoadPlan,
    LoadPlanner,
    Metadata,
    SavePlan,
    SavePlanner,
    StorageReader,
    StorageWriter,
)
from torch.distributed.checkpoint.metadata import (
    ChunkStorageMetadata,
    MetadataIndex,
    TensorProperties,
    TensorStorageMetadata,
)
from torch.distributed.checkpoint.planner import TensorWriteData, WriteItem, WriteItemType
from torch.distributed.checkpoint.storage import WriteResult
from torch.futures import Future

from .box import Box
from .consent import told_together
from .held import HeldTensor
from .tensor_file import Entry, FileRecord, TensorFile, TensorFileWriter, dtype_name, dtype_of, write_small

INDEX = "index.json"


class BoxedTensor(Tensor):
    """A whole tensor of which this rank holds some boxes, for torch.distributed.checkpoint alone."""

    held: HeldTensor

    @staticmethod
    def __new__(cls, held: HeldTensor) -> "BoxedTensor":
        """Without memory of its own."""
        self: BoxedTensor = Tensor._make_wrapper_subclass(cls, held.shape, dtype=held.dtype)
        self.held = held
        return self

    def __init__(self, held: HeldTensor) -> None:
        pass

    @classmethod
    def __torch_dispatch__(  # type: ignore[override]
        cls, function: Any, types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        raise AssertionError(f"{function} was called with a tensor that only stands for what ranks hold")

    def __create_chunk_list__(self) -> list[ChunkStorageMetadata]:
        return [_chunk(part.box) for part in self.held.parts]

    def __create_write_items__(self, name: str, _: Any) -> list[WriteItem]:
        return [_write_item(name, self.held, part.box) for part in self.held.parts if self.held.counts]

    def __get_tensor_shard__(self, index: MetadataIndex) -> Tensor:
        return next(part.local for part in self.held.parts if part.box.offset == index.offset)


def save_states(
    held: Mapping[str, HeldTensor], folder: Path, *, group: dist.ProcessGroup
) -> dict[str, FileRecord]:
    """Write what this rank holds; of what several hold, each box once. Collective over the group.

    Returns:
        This rank's files.

    Raises:
        OSError, ValueError, CheckpointError: it failed on some rank; on all of them.
    """
    writer = _Writer(folder, group)
    planner = DefaultSavePlanner(flatten_state_dict=False, flatten_sharded_tensors=False)
    boxed = {name: BoxedTensor(each) for name, each in held.items()}
    with _failures_of_torch():
        dcp.save(boxed, storage_writer=writer, planner=planner, process_group=group)
    return writer.records


def load_states(held: Mapping[str, HeldTensor], stored: "StateFiles", *, group: dist.ProcessGroup) -> None:
    """Fill what this rank holds, under these names. Collective over the group.

    Raises:
        OSError, ValueError, CheckpointError: it failed on some rank; on all of them.
    """
    planner = DefaultLoadPlanner(flatten_state_dict=False, flatten_sharded_tensors=False)
    boxed: dict[str, Any] = {name: BoxedTensor(each) for name, each in held.items()}
    with _failures_of_torch():
        dcp.load(boxed, storage_reader=_Reader(stored), planner=planner, process_group=group)


@contextmanager
def _failures_of_torch() -> Iterator[None]:
    """What torch gathered from all ranks, told as of `on_all_ranks`."""
    try:
        yield
    except dcp.CheckpointException as error:
        raise told_together({rank: each for rank, (each, _) in error.failures.items()}) from error


def state_file(number: int) -> str:
    """The name of one of the files of states: of a rank's, where ranks wrote them."""
    return f"rank-{number:05}.safetensors"


def state_key(name: str, offset: Sequence[int]) -> str:
    """What a box of a tensor is called in its file."""
    return f"{name}@{','.join(map(str, offset))}"


def listed_box(box: Box, file: str, key: str) -> dict[str, Any]:
    """A box as the index has it."""
    return {"offset": list(box.offset), "size": list(box.size), "file": file, "key": key}


def listed_tensor(shape: Sequence[int], dtype: torch.dtype, boxes: Sequence[Mapping]) -> dict[str, Any]:
    """A tensor as the index has it."""
    return {"shape": list(shape), "dtype": dtype_name(dtype), "boxes": list(boxes)}


def write_index(folder: Path, listing: Mapping[str, Any]) -> FileRecord:
    """Write the index of a folder of states: its tensors by name."""
    content = json.dumps({"tensors": listing}, separators=(",", ":")).encode()
    return write_small(folder / INDEX, content)


class StoredBox:
    """A box of a tensor, and where it lies."""

    def __init__(self, listed: Mapping[str, Any]) -> None:
        self.box = Box(tuple(listed["offset"]), tuple(listed["size"]))
        self.file: str = listed["file"]
        self.key: str = listed["key"]


class StateFiles:
    """The states in a folder, by name; `Stored`. Files are opened when they are read first.

    Raises:
        ValueError: the index cannot be read; names it.
    """

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self._files: dict[str, TensorFile] = {}
        path = folder / INDEX
        try:
            self._listing = json.loads(path.read_text())["tensors"]
            self.boxes = {
                name: [StoredBox(each) for each in listed["boxes"]] for name, listed in self._listing.items()
            }
        except (ValueError, KeyError, TypeError) as error:
            raise ValueError(f"{path} cannot be read, it is damaged: {error!r}") from error

    @property
    def names(self) -> Collection[str]:
        """All tensors."""
        return self._listing.keys()

    def shape(self, name: str) -> tuple[int, ...]:
        """The shape of a whole one."""
        return tuple(self._listing[name]["shape"])

    def dtype(self, name: str) -> torch.dtype:
        """The format that it is stored in."""
        return dtype_of(self._listing[name]["dtype"])

    def file(self, name: str) -> TensorFile:
        """A file of the folder, opened once."""
        if name not in self._files:
            self._files[name] = TensorFile(self.folder / name)
        return self._files[name]

    def read(self, name: str, box: Box) -> Tensor:
        """A box of one, put together from those that were stored.

        Raises:
            ValueError: they do not cover it.
        """
        found = torch.empty(box.size, dtype=self.dtype(name), device="cpu")
        missing = box.numel
        for stored in self.boxes[name]:
            common = stored.box.common(box)
            if common is not None:
                content = self.file(stored.file).mapped(stored.key)
                found[common.within(box)] = content[common.within(stored.box)]
                missing -= common.numel
        if missing:
            raise ValueError(f"{self.folder} lacks {missing} entries of {name} in {box}")
        return found


class _Writer(StorageWriter):
    """One file per rank, and the index on the first."""

    def __init__(self, folder: Path, group: dist.ProcessGroup) -> None:
        super().__init__()
        self.records: dict[str, FileRecord] = {}
        self._folder = folder
        self._num_ranks = group.size()
        self._file_name = state_file(group.rank())

    def reset(self, checkpoint_id: str | PathLike | None = None) -> None:
        """Nothing is kept between saves."""

    def set_up_storage_writer(self, is_coordinator: bool, *args: Any, **kwargs: Any) -> None:
        """The folder is there."""

    def prepare_local_plan(self, plan: SavePlan) -> SavePlan:
        """As torch planned it."""
        return plan

    def prepare_global_plan(self, plans: list[SavePlan]) -> list[SavePlan]:
        """As torch planned it."""
        return plans

    def write_data(self, plan: SavePlan, planner: SavePlanner) -> Future[list[WriteResult]]:
        """Write this rank's file, if there is anything to write."""
        items = {_key(item.index): item for item in plan.items}
        entries = [_entry(key, item) for key, item in items.items()]
        results = []
        if entries:
            writer = TensorFileWriter(self._folder / self._file_name, entries)
            try:
                for entry in writer.order:
                    item = items[entry.name]
                    content = planner.resolve_data(item)
                    assert isinstance(content, Tensor)
                    writer.write(content)
                    results.append(WriteResult(item.index, entry.nbytes, (self._file_name, entry.name)))
                self.records[self._file_name] = writer.finish()
            finally:
                writer.abandon()
        done: Future[list[WriteResult]] = Future()
        done.set_result(results)
        return done

    def finish(self, metadata: Metadata, results: list[list[WriteResult]]) -> None:
        """Write the index.

        Raises:
            ValueError: torch was left without a process group, and knows of this rank alone.
        """
        if len(results) != self._num_ranks:
            raise ValueError(
                "the process group was destroyed before the optimizer's states were written: let a save with use_async "
                "end, by its wait(), before that"
            )
        places = {result.index: result.storage_data for each in results for result in each}
        listing = {
            name: _listed(name, stored, places) for name, stored in metadata.state_dict_metadata.items()
        }
        self.records[INDEX] = write_index(self._folder, listing)

    @classmethod
    def validate_checkpoint_id(cls, checkpoint_id: str | PathLike) -> bool:
        """Any path will do."""
        return True


class _Reader(StorageReader):
    """What `_Writer` wrote."""

    def __init__(self, stored: StateFiles) -> None:
        super().__init__()
        self._stored = stored

    def reset(self, checkpoint_id: str | PathLike | None = None) -> None:
        """Nothing is kept between loads."""

    def read_metadata(self, *args: Any, **kwargs: Any) -> Metadata:
        """The index as torch has it."""
        return Metadata(
            state_dict_metadata={
                name: TensorStorageMetadata(
                    properties=TensorProperties(dtype=self._stored.dtype(name)),
                    size=torch.Size(self._stored.shape(name)),
                    chunks=[_chunk(stored.box) for stored in self._stored.boxes[name]],
                )
                for name in self._stored.names
            }
        )

    def set_up_storage_reader(
        self, metadata: Metadata, is_coordinator: bool, *args: Any, **kwargs: Any
    ) -> None:
        """The index was read."""

    def prepare_local_plan(self, plan: LoadPlan) -> LoadPlan:
        """As torch planned it."""
        return plan

    def prepare_global_plan(self, plans: list[LoadPlan]) -> list[LoadPlan]:
        """As torch planned it."""
        return plans

    def read_data(self, plan: LoadPlan, planner: LoadPlanner) -> Future[None]:
        """Copy what is stored into the memory that the planner names."""
        for item in plan.items:
            stored = self._box(item.storage_index)
            there = Box(tuple(item.storage_offsets), tuple(item.lengths))
            content = self._stored.file(stored.file).mapped(stored.key)
            target = planner.resolve_tensor(item).detach()
            target.copy_(content[there.within(Box.whole(content.shape))])
            planner.commit_tensor(item, target)
        done: Future[None] = Future()
        done.set_result(None)
        return done

    def _box(self, index: MetadataIndex) -> StoredBox:
        boxes: Iterable[StoredBox] = self._stored.boxes[index.fqn]
        return next(stored for stored in boxes if stored.box.offset == index.offset)

    @classmethod
    def validate_checkpoint_id(cls, checkpoint_id: str | PathLike) -> bool:
        """Any path will do."""
        return True


def _chunk(box: Box) -> ChunkStorageMetadata:
    return ChunkStorageMetadata(offsets=torch.Size(box.offset), sizes=torch.Size(box.size))


def _write_item(name: str, held: HeldTensor, box: Box) -> WriteItem:
    return WriteItem(
        index=MetadataIndex(name, torch.Size(box.offset)),
        type=WriteItemType.SHARD,
        tensor_data=TensorWriteData(
            chunk=_chunk(box), properties=TensorProperties(dtype=held.dtype), size=torch.Size(held.shape)
        ),
    )


def _key(index: MetadataIndex) -> str:
    assert index.offset is not None
    return state_key(index.fqn, index.offset)


def _entry(key: str, item: WriteItem) -> Entry:
    assert item.tensor_data is not None
    return Entry(key, tuple(item.tensor_data.chunk.sizes), item.tensor_data.properties.dtype)


def _listed(name: str, stored: Any, places: Mapping[MetadataIndex, Sequence[str]]) -> dict[str, Any]:
    boxes = []
    for chunk in stored.chunks:
        file, key = places[MetadataIndex(name, chunk.offsets)]
        boxes.append(listed_box(Box(tuple(chunk.offsets), tuple(chunk.sizes)), file, key))
    return listed_tensor(stored.size, stored.properties.dtype, boxes)
