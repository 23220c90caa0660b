"""Parity of several ranks with one process: quick rows of tests/contract/parity_rows.py and others, on GPUs if any.

With a GPU for each rank communication uses NCCL, with fewer GPUs gloo within `staging`. Every rank runs this module. An
error on one rank would leave the others waiting, so it ends the process, and the runner continues with the next row.
"""

import os
import sys
import time
from contextlib import nullcontext
from dataclasses import replace
from itertools import chain

import torch

from echelon import launch_from_torch
from echelon.cluster.device import default_device
from echelon.cluster.objects import broadcast_object
from echelon.verify.layout_choice import Layout

from ..contract.parity_rows import ALL_AXES, TIED_LLAMA, parity_rows
from ..contract.row import ParityRow, distinct
from .kernels import ring_rows
from .results import FAILED, PASSED, UNAVAILABLE, Results, described, short
from .staging import staging
from .streams import stream_rows

# Layouts on eight ranks that CPU tests have on four.
EIGHT = (
    replace(ALL_AXES, precision="bf16", max_norm=0.1, overlap_allgather=True, schedule="zbv"),
    replace(ALL_AXES, sequence="split_gather", max_norm=0.1),
    Layout(tp=2, pp=2, sp=2, zero=1, sequence="all_to_all"),
    Layout(tp=2, pp=2, sp=2, zero=2, sequence="ring_attn", precision="bf16"),
)


def rows(num_ranks: int) -> dict[str, ParityRow]:
    """Return the quick rows for this number of ranks, by name."""
    tied_rows = (ParityRow(choice=TIED_LLAMA, layout=layout, num_steps=2, quick=True) for layout in EIGHT)
    every = distinct(chain(tied_rows, ring_rows(), stream_rows(2).values(), parity_rows()))
    return {name: row for name, row in every.items() if row.quick and row.layout.world_size == num_ranks}


def run(results: Results, *, seconds: float) -> bool:
    """Run the rows of this number of ranks that have no result; return True if none is left. Collective."""
    num_ranks, rank = int(os.environ["WORLD_SIZE"]), int(os.environ["RANK"])
    is_shared = torch.cuda.device_count() < num_ranks
    launch_from_torch(backend="gloo" if is_shared else None)
    end, known = time.monotonic() + seconds, rows(num_ranks)
    with staging(default_device().type) if is_shared else nullcontext():
        for name in broadcast_object(results.left(list(known)), 0, None):
            if not broadcast_object(time.monotonic() < end, 0, None):
                return False
            if known[name].missing:
                figures, state = {"reason": known[name].missing}, UNAVAILABLE
            else:
                if rank == 0:
                    results.begin(name)
                figures, state = _compared(known[name], name, rank)
            if rank == 0:
                results.put(name, state, **figures)
                print(f"{state:13}{name}  {short(figures)}", flush=True)
    return True


def _compared(row: ParityRow, name: str, rank: int) -> tuple[dict[str, object], str]:
    start = time.monotonic()
    try:
        report = row.compare()
    except Exception as error:
        print(f"rank {rank}: {name}: {described(error)}", file=sys.stderr, flush=True)
        os._exit(1)
    figures: dict[str, object] = {"departure": report.departure or ""}
    figures["seconds"] = round(time.monotonic() - start, 2)
    return figures, FAILED if report.departure else PASSED
