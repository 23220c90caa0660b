r"""Peak and permanent memory of Echelon's data parallelism and torch's, each contender in fresh processes.

    python benchmarks/zero_memory.py --json memory.json
    python benchmarks/zero_memory.py --dp 4 --sequence 32

A peak is the maximum of a rank in a training step, above the level before the model is built: memory of CUDA's
allocator, or resident memory on CPUs. It is no timing: other load does not matter.
"""

import argparse
import gc
import json
import sys
import tempfile
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from statistics import median
from typing import Any

import report
import torch
import torch.distributed as dist
from arguments import parse, settings_of, workload_of, workload_parser
from launch import enter
from memory import measure_held
from peak import ENVIRONMENT, Meter
from processes import run, torchrun
from rounds import step
from stepped import OneProcess
from workload import Workload
from zero_contenders import EchelonZero, contender_makers

from echelon.cluster.device import default_device

_NAMES = list(contender_makers(Workload(), torch.device("cpu")))
_WARMUP = 3  # steps: the first creates the states, and DDP rebuilds its buckets after it


def parse_arguments() -> argparse.Namespace:
    parser = workload_parser(__doc__)
    parser.add_argument("--dp", type=int, default=2, help="ranks, each with its part of the batch")
    parser.add_argument("--contenders", nargs="+", choices=_NAMES, default=_NAMES)
    parser.add_argument("--steps", type=int, default=5, help="that are measured, after a warm-up")
    parser.add_argument("--alone", help=argparse.SUPPRESS)  # the contender of a started process
    return parse(parser)


def main() -> None:
    arguments = parse_arguments()
    workload = workload_of(arguments, microbatches=1)
    if arguments.alone is not None:
        enter(arguments.dp, option="--dp", matmul="highest")
        measured = measure_alone(arguments.alone, workload, arguments.steps)
        if dist.get_rank() == 0:
            report.write_json(arguments.json, measured)
        dist.destroy_process_group()
        return
    results = {"machine": report.machine(), "settings": settings_of(arguments)}
    results["memory"] = {name: start_alone(name, arguments.dp) for name in arguments.contenders}
    show_results(results, workload, arguments)


def start_alone(name: str, num_ranks: int) -> dict[str, Any]:
    """Return the results of `measure_alone`, in processes started for it with the same arguments.

    Raises:
        RuntimeError: they failed.
    """
    with tempfile.TemporaryDirectory() as folder:
        written = Path(folder) / "found.json"
        words = [*torchrun(num_ranks), *sys.argv, "--alone", name, "--json", str(written)]
        run(name, words, environment=ENVIRONMENT)
        return json.loads(written.read_text())


def measure_alone(name: str, workload: Workload, steps: int) -> dict[str, Any]:
    """Return a contender's bytes: permanent by kind, and the peak of each step, of the largest rank; collective."""
    device = default_device()
    # A first step, so that the base includes the memory of code and libraries.
    step(OneProcess(replace(workload, hidden=64, layers=1, vocabulary=128), device, works=True))
    gc.collect()
    meter = Meter(device)
    contender = contender_makers(workload, device)[name]()
    for _ in range(_WARMUP):
        step(contender)
    gc.collect()
    peaks = torch.tensor([meter.peak(lambda: step(contender)) for _ in range(steps)])
    dist.all_reduce(peaks, op=dist.ReduceOp.MAX)
    held = measure_held([contender])[name]
    if isinstance(contender, EchelonZero):
        held = contender.held()
    return {"held": held, "peaks": peaks.tolist()}


def show_results(results: Mapping[str, Any], workload: Workload, arguments: argparse.Namespace) -> None:
    """Print the table, and the ratios to torch's smallest peak in the last line; write the requested file."""
    contenders = results["memory"]
    peaks = {name: median(contender["peaks"]) for name, contender in contenders.items()}
    rows = []
    for name in sorted(peaks, key=lambda name: peaks[name]):
        held = sum(contenders[name]["held"].values())
        spread = max(contenders[name]["peaks"]) - min(contenders[name]["peaks"])
        rows.append(
            [name, *(f"{size / 2**20:.1f}" for size in (held, peaks[name], peaks[name] - held, spread))]
        )
    header = ["contender", "held MiB", "peak MiB", "peak − held MiB", "spread MiB"]
    note = f"median of {arguments.steps} steps, largest rank; each contender alone in its processes"
    report.show(f"{workload}, dp {arguments.dp}", header, rows, note=note)
    if arguments.json is not None:
        report.write_json(arguments.json, results)
    print(" ".join(f"{name.replace(' ', '_')}={ratio:.3f}" for name, ratio in to_best_peer(peaks).items()))


def to_best_peer(peaks: Mapping[str, float]) -> dict[str, float]:
    """Return the peaks of Echelon's stages relative to torch's smallest; empty without a contender of torch."""
    others = [peak for name, peak in peaks.items() if name.startswith("torch")]
    ours = {name: peak for name, peak in peaks.items() if not name.startswith("torch")}
    return {name: peak / min(others) for name, peak in ours.items()} if others else {}


if __name__ == "__main__":
    main()
