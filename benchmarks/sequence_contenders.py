"""Contenders of sequence.py: all modes of Echelon's sequence parallelism, and torch's."""

from collections.abc import Callable
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from contender import Contender
from echelon_batch import EchelonBatch
from sequence_peers import TorchContext
from stepped import OneProcess
from tensor_peers import TorchTensor
from workload import Workload

RING = "echelon ring_attn"  # the mode whose longest sequence grows with the number of ranks


def layouts(num_ranks: int) -> dict[str, dict[str, Any]]:
    """Return the plugin's arguments for each mode on this number of ranks."""
    on_tensor_axis = {"tp_size": num_ranks, "enable_sequence_parallelism": True}
    on_sequence_axis = {"tp_size": 1, "sp_size": num_ranks, "enable_sequence_parallelism": True}
    gathers = on_tensor_axis | {"sequence_parallelism_mode": "split_gather"}
    by_heads = on_sequence_axis | {"sequence_parallelism_mode": "all_to_all"}
    return {
        "echelon tensor parallel": {"tp_size": num_ranks},
        "echelon split_gather": gathers,
        "echelon split_gather, overlap": gathers | {"enable_sequence_overlap": True},
        "echelon split_gather, regather": gathers | {"enable_sequence_regather": True},
        "echelon all_to_all": by_heads,
        "echelon all_to_all, weights": by_heads | {"wp_size": num_ranks, "wp_overlap": True},
        RING: on_sequence_axis | {"sequence_parallelism_mode": "ring_attn"},
    }


NAMES = [*layouts(2), *TorchTensor.names.values(), TorchContext.name]


def contender_makers(workload: Workload, device: torch.device) -> dict[str, Callable[[], Contender]]:
    """Return a maker for every contender, by name. On one rank there is only one process. A maker is collective."""
    num_ranks = dist.get_world_size()
    if num_ranks == 1:
        return {OneProcess.name: lambda: OneProcess(workload, device, works=True)}
    ours = {
        name: partial(EchelonBatch, name, workload, **layout) for name, layout in layouts(num_ranks).items()
    }
    theirs: dict[str, Callable[[], Contender]] = {
        name: partial(TorchTensor, workload, device, kind=kind) for kind, name in TorchTensor.names.items()
    }
    if device.type == "cpu":
        theirs[TorchContext.name] = partial(TorchContext, workload, device)
    return ours | theirs
