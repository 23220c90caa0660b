"""A whole model in one file, from any layout and into any. Sharded, asynchronous and optimizer files are to come."""

import os
from collections.abc import Mapping
from pathlib import Path

import torch
import torch.distributed as dist
from safetensors import safe_open
from safetensors.torch import save_file
from torch import Tensor

from ..cluster.mesh import ParallelMesh
from ..cluster.placement import Placement, Shard
from .gather import gather_whole


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
        placements: how each is spread over the tensor axis.
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
    path: Path, tensors: Mapping[str, Tensor], placements: Mapping[str, Placement | None], mesh: ParallelMesh
) -> None:
    """Copy this rank's pieces of a whole model's file into its tensors. Every rank reads; nothing communicates.

    Args:
        path: a file of `save_model_file`, or any Hugging Face safetensors or torch file with these names.
        tensors: this rank's parameters and buffers by name; changed in place.
        placements: how each is spread over the tensor axis.
        mesh: the mesh.

    Raises:
        FileNotFoundError: there is no such file.
        ValueError: tensors are missing in the file, or have another shape; lists all of them. Nothing was changed.
    """
    if not path.is_file():
        raise FileNotFoundError(f"there is no model file {path}: give the path that save_model was given")
    stored = _read(path, tensors)
    pieces, faults = {}, []
    for name, tensor in tensors.items():
        if name not in stored:
            faults.append(f"{name} is missing")
            continue
        piece = _piece(stored[name], placements[name], mesh)
        if piece is None or piece.shape != tensor.shape:
            faults.append(
                f"{name} has shape {tuple(stored[name].shape)} in the file, which does not fit the model"
            )
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
    return placement.local(whole, mesh.rank("tp"))


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


def _read(path: Path, names: Mapping[str, Tensor]) -> dict[str, Tensor]:
    with open(path, "rb") as start:
        is_torch = start.read(2) == b"PK"
    if is_torch:
        return torch.load(path, map_location="cpu", weights_only=True, mmap=True)
    with safe_open(path, framework="pt", device="cpu") as file:
        return {name: file.get_tensor(name) for name in file.keys() if name in names}  # noqa: SIM118 (no mapping)
