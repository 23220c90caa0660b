"""A whole model in one file, from any layout and into any. Sharded, asynchronous and optimizer files are to come."""

import os
from collections.abc import Collection, Mapping
from pathlib import Path
from typing import NamedTuple

import torch
import torch.distributed as dist
from safetensors import safe_open
from safetensors.torch import save_file
from torch import Tensor, nn

from ..cluster.mesh import ParallelMesh
from ..cluster.placement import Placement, Shard
from .gather import gather_whole


class TensorNames(NamedTuple):
    """The names of a whole model's parameters and persistent buffers.

    Args:
        needed: one for each tensor.
        known: all of them; a tied parameter has several.
    """

    needed: tuple[str, ...]
    known: frozenset[str]

    @staticmethod
    def of(model: nn.Module) -> "TensorNames":
        """The names of a whole model, before it is cut."""
        first: dict[int, str] = {}
        state = model.state_dict(keep_vars=True)
        for name, tensor in state.items():
            first.setdefault(id(tensor), name)
        return TensorNames(needed=tuple(first.values()), known=frozenset(state))


def save_model_file(
    path: Path,
    tensors: Mapping[str, Tensor],
    placements: Mapping[str, Placement | None],
    mesh: ParallelMesh,
    *,
    use_safetensors: bool,
) -> None:
    """Write the whole model to one file on global rank 0; the file appears under its name only once complete.

    Collective over the world (see `gather_whole`); returns on every rank when the file is there. What rank 0
    cannot write is an error on every rank.

    Args:
        path: the file. Its folder is made where missing.
        tensors: this rank's parameters and buffers by their Hugging Face names.
        placements: how each is spread over an axis.
        mesh: the mesh.
        use_safetensors: safetensors, or torch's own format.

    Raises:
        OSError: rank 0 could not write; the message is that of its error.
    """
    whole = gather_whole(tensors, placements, mesh)
    failure: list[str | None] = [None]
    if mesh.global_rank == 0:
        try:
            _write(path, {name: tensor.cpu().contiguous() for name, tensor in whole.items()}, use_safetensors)
        except OSError as error:
            failure = [f"{type(error).__name__}: {error}"]
    dist.broadcast_object_list(failure, src=0)
    if failure[0] is not None:
        raise OSError(f"rank 0 could not save the model to {path}: {failure[0]}")


def load_model_file(
    path: Path,
    tensors: Mapping[str, Tensor],
    placements: Mapping[str, Placement | None],
    mesh: ParallelMesh,
    *,
    names: TensorNames,
) -> None:
    """Copy this rank's pieces of a whole model's file into its tensors. Every rank reads; nothing communicates.

    Args:
        path: a file of `save_model_file`, or any Hugging Face safetensors or torch file with these names.
        tensors: this rank's parameters and buffers by name; changed in place.
        placements: how each is spread over an axis.
        mesh: the mesh.
        names: those of the whole model.

    Raises:
        FileNotFoundError: there is no such file.
        ValueError: tensors are missing, extra or of another shape; lists all of them. Nothing was changed.
    """
    if not path.is_file():
        raise FileNotFoundError(f"there is no model file {path}: give the path that save_model was given")
    stored_names, stored = _read(path, tensors)
    faults = [f"{name} is missing" for name in names.needed if name not in stored_names]
    faults += [f"{name} is not in the model" for name in stored_names if name not in names.known]
    pieces = {}
    for name, whole in stored.items():
        piece = _piece(whole, placements[name], mesh)
        if piece is None or piece.shape != tensors[name].shape:
            faults.append(f"{name} has shape {tuple(whole.shape)} in the file, which is not the model's")
        else:
            pieces[name] = piece
    if faults:
        raise ValueError(f"{path} does not fit this model: {'; '.join(faults)}")
    with torch.no_grad():
        for name, piece in pieces.items():
            tensors[name].copy_(piece)


def _piece(whole: Tensor, placement: Placement | None, mesh: ParallelMesh) -> Tensor | None:
    """This rank's piece, or None where the whole has not the length that is cut."""
    if not isinstance(placement, Shard):
        return whole
    if placement.dim >= whole.ndim or whole.shape[placement.dim] != sum(placement.blocks):
        return None
    return placement.local(whole, mesh.rank(placement.axis))


def _write(path: Path, tensors: dict[str, Tensor], use_safetensors: bool) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    beside = path.with_name(f"{path.name}.writing")
    if use_safetensors:
        save_file(tensors, beside, metadata={"format": "pt"})
    else:
        torch.save(tensors, beside)
    with open(beside, "rb") as written:
        os.fsync(written.fileno())
    os.replace(beside, path)


def _read(path: Path, wanted: Collection[str]) -> tuple[list[str], dict[str, Tensor]]:
    """All names in a file, and the wanted ones of its tensors."""
    with open(path, "rb") as start:
        is_torch = start.read(2) == b"PK"
    if is_torch:
        stored = torch.load(path, map_location="cpu", weights_only=True, mmap=True)
        return list(stored), {name: tensor for name, tensor in stored.items() if name in wanted}
    with safe_open(path, framework="pt", device="cpu") as file:
        names = list(file.keys())
        return names, {name: file.get_tensor(name) for name in names if name in wanted}
