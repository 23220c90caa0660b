"""Files of optimizer states, through torch.distributed.checkpoint (DCP): every rank's boxes of global tensors.

DCP plans the rank that writes each box. The files are safetensors and the index is JSON, so loading unpickles
nothing. A name is `STATE/PARAMETER`, a key in a file `NAME@OFFSET`.
"""

import json
from collections.abc import Collection, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch import Tensor
from torch.distributed.checkpoint import (
    DefaultSavePlanner,
    FileSystemWriter,
    Metadata,
    SavePlan,
    SavePlanner,
)
from torch.distributed.checkpoint.metadata import (
    ChunkStorageMetadata,
    MetadataIndex,
    TensorProperties,
)
from torch.distributed.checkpoint.planner import TensorWriteData, WriteItem, WriteItemType
from torch.distributed.checkpoint.storage import WriteResult
from torch.futures import Future

from ..cluster.box import Box
from ..cluster.gathering import joined_errors
from ..lazy.files import open_tensors
from .local_tensors import LocalBox, LocalTensor
from .tensor_file import Entry, Records, TensorFileWriter, dtype_name, dtype_of, write_small

INDEX = "index.json"


def save_states(states: Mapping[str, LocalTensor], folder: Path, *, group: dist.ProcessGroup) -> Records:
    """Write this rank's boxes; a box that several ranks have is written once. Collective over the group.

    Returns:
        The records of this rank's files.

    Raises:
        OSError, ValueError, AgreedError: a rank failed; on every rank.
    """
    writer = _Writer(folder, group)
    try:
        dcp.save({}, storage_writer=writer, planner=_Planner(states), process_group=group)
    except dcp.CheckpointException as error:  # errors that torch gathered from all ranks
        raise joined_errors({rank: failure for rank, (failure, _) in error.failures.items()}) from error
    return writer.records


class StoredBox(NamedTuple):
    """A box of a tensor, and its place: a file and a key in it."""

    box: Box
    file: str
    key: str


class StateFiles:
    """The optimizer states in a folder, by name; implements `Stored`. Files are opened at their first read.

    Raises:
        ValueError: the index cannot be read; names it.
    """

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self._files: dict[str, dict[str, Tensor]] = {}  # by file, its tensors by key
        path = folder / INDEX
        try:
            listing = json.loads(path.read_text())["tensors"]
            self._tensors = {
                name: Entry(name, tuple(map(int, listed["shape"])), dtype_of(listed["dtype"]))
                for name, listed in listing.items()
            }
            self.boxes = {
                name: [
                    StoredBox(Box(tuple(box["offset"]), tuple(box["size"])), box["file"], box["key"])
                    for box in listed["boxes"]
                ]
                for name, listed in listing.items()
            }
        except (ValueError, KeyError, TypeError, AttributeError) as error:
            raise ValueError(f"{path} cannot be read, it is damaged: {error!r}") from error

    @property
    def names(self) -> Collection[str]:
        """The names of all tensors."""
        return self._tensors.keys()

    def shape(self, name: str) -> tuple[int, ...]:
        """Return the global shape of a tensor."""
        return self._tensors[name].shape

    def dtype(self, name: str) -> torch.dtype:
        """Return the stored dtype."""
        return self._tensors[name].dtype

    def file(self, name: str) -> Mapping[str, Tensor]:
        """Return the tensors of a file of the folder; each file is opened once."""
        if name not in self._files:
            self._files[name] = open_tensors(self.folder / name)
        return self._files[name]

    def read(self, name: str, box: Box) -> Tensor:
        """Return a box of a tensor: a view of one stored box, or assembled from several.

        Raises:
            ValueError: the stored boxes do not cover it.
        """
        for stored in self.boxes[name]:
            if stored.box.common(box) == box:
                return self.file(stored.file)[stored.key][box.within(stored.box)]
        assembled = torch.empty(box.size, dtype=self.dtype(name), device="cpu")
        missing = box.numel
        for stored in self.boxes[name]:
            if (common := stored.box.common(box)) is not None:
                assembled[common.within(box)] = self.file(stored.file)[stored.key][common.within(stored.box)]
                missing -= common.numel
        if missing:
            raise ValueError(f"{self.folder} lacks {missing} entries of {name} in {box}")
        return assembled


class _Planner(DefaultSavePlanner):
    """A DCP planner for the boxes that this rank has."""

    def __init__(self, states: Mapping[str, LocalTensor]) -> None:
        super().__init__(flatten_state_dict=False)
        self._boxes: dict[MetadataIndex, Tensor] = {}
        self._items: list[WriteItem] = []
        for name, local in states.items():
            for piece in local.boxes if local.may_save else ():
                self._add(name, local, piece)

    def _add(self, name: str, local: LocalTensor, piece: LocalBox) -> None:
        """Add a box of a tensor to the plan, in torch's terms."""
        data = TensorWriteData(
            chunk=ChunkStorageMetadata(
                offsets=torch.Size(piece.box.offset), sizes=torch.Size(piece.box.size)
            ),
            properties=TensorProperties(dtype=local.dtype),
            size=torch.Size(local.shape),
        )
        index = MetadataIndex(name, torch.Size(piece.box.offset))
        self._boxes[index] = piece.local
        self._items.append(WriteItem(index=index, type=WriteItemType.SHARD, tensor_data=data))

    def create_local_plan(self) -> SavePlan:
        """Return the plan of this rank's boxes."""
        self.plan = SavePlan(self._items)
        return self.plan

    def resolve_data(self, write_item: WriteItem) -> Tensor:
        """Return the memory of a box."""
        return self._boxes[write_item.index]


class _Writer(FileSystemWriter):
    """A DCP writer: one file per rank, and the index, written by the first rank."""

    def __init__(self, folder: Path, group: dist.ProcessGroup) -> None:
        super().__init__(folder)
        self.records: Records = {}
        self._folder = folder
        self._num_ranks = group.size()
        self._file_name = f"rank-{group.rank():05}.safetensors"

    def write_data(self, plan: SavePlan, planner: SavePlanner) -> Future[list[WriteResult]]:
        """Write this rank's file, if there is anything to write."""
        items = {
            f"{item.index.fqn}@{','.join(map(str, item.index.offset or ()))}": item for item in plan.items
        }
        results = []
        entries = [
            Entry(key, tuple(item.tensor_data.chunk.sizes), item.tensor_data.properties.dtype)
            for key, item in items.items()
            if item.tensor_data is not None  # always; for mypy
        ]
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
            ValueError: the process group was destroyed before, so torch gathered the results of this rank only.
        """
        if len(results) != self._num_ranks:
            raise ValueError(
                "the process group was destroyed before the optimizer's states were written: call wait() of a save "
                "with use_async before"
            )
        places = {result.index: result.storage_data for of_rank in results for result in of_rank}
        listing = {
            name: _listed(name, stored, places) for name, stored in metadata.state_dict_metadata.items()
        }
        content = json.dumps({"tensors": listing}, separators=(",", ":")).encode()
        self.records[INDEX] = write_small(self._folder / INDEX, content)


def _listed(name: str, stored: Any, places: Mapping[MetadataIndex, Sequence[str]]) -> dict[str, Any]:
    """Return a tensor's entry of the index: its shape, dtype and boxes, each with its file and key."""
    boxes = []
    for chunk in stored.chunks:
        file, key = places[MetadataIndex(name, chunk.offsets)]
        boxes.append({"offset": list(chunk.offsets), "size": list(chunk.sizes), "file": file, "key": key})
    return {"shape": list(stored.size), "dtype": dtype_name(stored.properties.dtype), "boxes": boxes}
