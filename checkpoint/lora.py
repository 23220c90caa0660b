"""Adapters in the files that peft reads, from any layout. What they are called there is plugins/lora.py."""

import os
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from tempfile import TemporaryDirectory

import torch
import torch.distributed as dist
from safetensors.torch import save_file
from torch import Tensor

from ..cluster.mesh import ParallelMesh
from ..cluster.placement import Placement
from .gather import gather_whole

WEIGHTS = "adapter_model"  # the name of the file, with .safetensors, or .bin in torch's format


@dataclass(frozen=True, kw_only=True)
class Adapter:
    """One adapter of a model, as it is saved.

    Args:
        folder: where it is saved, seen from the folder that is given; "" is that one.
        names: of its tensors in the model, by those in the file.
        write_config: writes its configuration into a folder.
    """

    folder: str
    names: Mapping[str, str]
    write_config: Callable[[Path], None]


def save_adapters(
    folder: Path,
    adapters: Sequence[Adapter],
    tensors: Mapping[str, Tensor],
    placements: Mapping[str, Placement | None],
    mesh: ParallelMesh,
    *,
    use_safetensors: bool,
) -> None:
    """Write whole adapters on global rank 0; each file appears under its name only once complete.

    Collective over the world (see `gather_whole`); returns on every rank when the files are there.

    Args:
        folder: made where missing.
        adapters: of the model.
        tensors: this rank's parameters and buffers by their names in the model.
        placements: how each is spread over an axis.
        mesh: the mesh.
        use_safetensors: safetensors, or torch's own format.

    Raises:
        OSError: rank 0 could not write; on every rank.
    """
    wanted = {name for adapter in adapters for name in adapter.names.values()}
    held = {name: tensor for name, tensor in tensors.items() if name in wanted}
    whole = gather_whole(held, placements, mesh)
    failure: list[str | None] = [None]
    if mesh.global_rank == 0:
        try:
            for adapter in adapters:
                _write(folder / adapter.folder, adapter, whole, use_safetensors)
        except OSError as error:
            failure = [f"{type(error).__name__}: {error}"]
    dist.broadcast_object_list(failure, src=0)
    if failure[0] is not None:
        raise OSError(f"rank 0 could not save the adapters to {folder}: {failure[0]}")


def _write(folder: Path, adapter: Adapter, whole: Mapping[str, Tensor], use_safetensors: bool) -> None:
    # A tensor of its own for each name: safetensors refuses those that share memory.
    tensors = {key: whole[name].detach().to("cpu", copy=True) for key, name in adapter.names.items()}
    folder.mkdir(parents=True, exist_ok=True)
    with TemporaryDirectory(prefix=".writing-", dir=folder) as beside:
        if use_safetensors:
            save_file(tensors, Path(beside, f"{WEIGHTS}.safetensors"), metadata={"format": "pt"})
        else:
            torch.save(tensors, Path(beside, f"{WEIGHTS}.bin"))
        adapter.write_config(Path(beside))
        for written in sorted(
            Path(beside).iterdir(), reverse=True
        ):  # the weights, then what says how to read them
            with open(written, "rb") as file:
                os.fsync(file.fileno())
            os.replace(written, folder / written.name)
    # Of an earlier save in the other format: peft would read one of both.
    other = folder / f"{WEIGHTS}.{'bin' if use_safetensors else 'safetensors'}"
    other.unlink(missing_ok=True)
