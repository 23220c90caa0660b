"""The states of the random generators that training draws from, of every rank."""

import random
from collections.abc import Mapping
from typing import Any

import numpy as np
import torch

from ..cluster.mesh import AXES, ParallelMesh
from .values import torch_bytes


def random_state(mesh: ParallelMesh) -> bytes:
    """This rank's generators, as they are now, in torch's own format."""
    name, keys, position, has_gauss, gauss = np.random.get_state(legacy=True)
    state = {
        "coordinates": coordinates(mesh),
        "python": random.getstate(),
        "numpy": (name, torch.from_numpy(np.asarray(keys).copy()), position, has_gauss, gauss),
        "cpu": torch.get_rng_state(),
        "cuda": torch.cuda.get_rng_state(mesh.device) if mesh.device.type == "cuda" else None,
    }
    return torch_bytes(state)


def restore_random_state(state: Mapping[str, Any], mesh: ParallelMesh) -> None:
    """Let this rank's generators go on from a state."""
    random.setstate(state["python"])
    name, keys, position, has_gauss, gauss = state["numpy"]
    np.random.set_state((name, keys.numpy(), position, has_gauss, gauss))
    torch.set_rng_state(state["cpu"])
    if state["cuda"] is not None and mesh.device.type == "cuda":
        torch.cuda.set_rng_state(state["cuda"], mesh.device)


def file_name(rank: int) -> str:
    """That of a rank's file."""
    return f"rank-{rank:05}.pt"


def nearest_rank(mesh: ParallelMesh, saved: Mapping[str, int]) -> int:
    """The rank of the saved mesh whose generators this one goes on from: that of its coordinates, or of the last ones.

    Ranks that stood at one place of the saved mesh draw alike from then on, as all do from the launch.

    Args:
        saved: sizes of the mesh by axis.
    """
    rank = 0
    for axis in AXES:
        rank = rank * saved[axis] + min(mesh.rank(axis), saved[axis] - 1)
    return rank


def coordinates(mesh: ParallelMesh) -> dict[str, int]:
    """This rank's place on every axis."""
    return {axis: mesh.rank(axis) for axis in AXES}


def sizes(mesh: ParallelMesh) -> dict[str, int]:
    """The ranks along every axis."""
    return {axis: mesh.size(axis) for axis in AXES}
