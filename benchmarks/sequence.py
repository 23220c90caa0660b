r"""Bytes kept for backward and step times by sequence length, for every mode of sequence parallelism.

    python benchmarks/sequence.py --json sequence.json --plot sequence.png
    python benchmarks/sequence.py --ranks 4 --sequence 2048

Lengths are --sequence and its half, quarter and eighth. Every round runs one step of each contender, in a rotating
order; a ratio is the median of the rounds' ratios. The last line is for the longest sequence on the most ranks: the
fastest mode of Echelon relative to torch's fastest, and the fewest bytes kept relative to torch's fewest. With 1 among
--ranks, it searches on each number of ranks the longest sequence under ring attention that fits the memory of one
process, and simulates it up to 64 ranks.
"""

import argparse
import gc
import json
import sys
import tempfile
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from statistics import median
from typing import Any

import report
import torch
import torch.distributed as dist
from arguments import common_parser, parse, settings_of, workload_of
from contender import Contender, agreement
from echelon_batch import EchelonBatch
from launch import enter
from live_bytes import bytes_before_layers, training_bytes
from processes import run, torchrun
from rounds import time_rounds
from sequence_contenders import NAMES, RING, contender_makers
from sequence_longest import error, fit, search, simulated
from sequence_peers import why_not_itself
from sequence_picture import draw
from stepped import OneProcess
from workload import Workload

from echelon.cluster.device import default_device

_HALVINGS = 3
_SIMULATED = (1, 2, 4, 8, 16, 32, 64)


def parse_arguments() -> argparse.Namespace:
    parser = common_parser(__doc__)
    parser.set_defaults(hidden=256, layers=4, vocabulary=1024, sequence=4096, batch=1, rounds=5, warmup=1)
    parser.add_argument("--ranks", type=int, nargs="+", default=[1, 2, 4], help="one run for each number")
    parser.add_argument("--contenders", nargs="+", choices=NAMES, default=NAMES)
    parser.add_argument(
        "--memory", type=float, help=argparse.SUPPRESS
    )  # bytes, of a process that this script started
    parser.add_argument(
        "--alone", type=int, help=argparse.SUPPRESS
    )  # the number of ranks of a started process
    return parse(parser)


def main() -> None:
    arguments = parse_arguments()
    workload = workload_of(arguments, microbatches=1)
    if arguments.alone is not None:
        enter(arguments.alone, option="--ranks", matmul=arguments.matmul)
        measurements = measure(workload, arguments)
        if dist.get_rank() == 0:
            report.write_json(arguments.json, measurements)
        dist.destroy_process_group()
        return
    results: dict[str, Any] = {"machine": report.machine(), "settings": settings_of(arguments), "runs": {}}
    memory = None
    for num_ranks in sorted(set(arguments.ranks)):
        measurements = results["runs"][num_ranks] = start(num_ranks, memory)
        if num_ranks == 1:
            memory = measurements["lengths"][-1]["bytes"][OneProcess.name]["peak"]
    if memory is not None:
        results["longest"] = longest_sequences(results["runs"], memory)
    show_results(results, f"{replace(workload, sequence=0)}".replace(" sequence 0,", ""), arguments)


def start(num_ranks: int, memory: float | None) -> dict[str, Any]:
    """Return the results of `measure`, in processes started for it with the same arguments.

    Raises:
        RuntimeError: they failed.
    """
    with tempfile.TemporaryDirectory() as folder:
        written = Path(folder) / "found.json"
        words = [*torchrun(num_ranks), *sys.argv, "--alone", str(num_ranks), "--json", str(written)]
        words += [] if memory is None else ["--memory", str(memory)]
        run(f"{num_ranks} ranks", words)
        return json.loads(written.read_text())


def measure(workload: Workload, arguments: argparse.Namespace) -> dict[str, Any]:
    """Run all measurements on the ranks of a run. Collective over the world."""
    device, num_ranks = default_device(), dist.get_world_size()
    lengths = [workload.sequence >> halvings for halvings in range(_HALVINGS, -1, -1)]
    measurements: dict[str, Any] = {"lengths": []}
    if num_ranks > 1:
        measurements["why_not_context_parallel"] = why_not_itself(device)
    for length in lengths:
        if length % (2 * num_ranks) == 0:  # torch's context parallelism does not pad
            measurements["lengths"].append(
                measure_length(replace(workload, sequence=length), arguments, device)
            )
    if arguments.memory is not None and RING in measurements["lengths"][-1]["seconds"]:
        measurements["longest"] = longest_here(workload, device, measurements["lengths"], arguments.memory)
    return measurements


def measure_length(workload: Workload, arguments: argparse.Namespace, device: torch.device) -> dict[str, Any]:
    """Return agreement, times and bytes of every contender. Collective over the world."""
    wanted = (*arguments.contenders, OneProcess.name)
    contenders = [make() for name, make in contender_makers(workload, device).items() if name in wanted]
    agreed = agreement(contenders, OneProcess(workload, device, works=True))
    seconds = time_rounds(contenders, rounds=arguments.rounds, warmup=arguments.warmup, device=device)
    return {
        "length": workload.sequence,
        "agreement": agreed,
        "seconds": seconds,
        "bytes": {contender.name: bytes_of(contender) for contender in contenders},
    }


def bytes_of(contender: Contender) -> dict[str, int]:
    """Return the bytes that a contender keeps for backward, and its peak; the largest of all ranks. Communicates.

    For Echelon's contenders also the peak before the layers.
    """
    gc.collect()
    sizes = dict(zip(("kept", "peak"), training_bytes(contender.compute), strict=True))
    contender.forget()
    if isinstance(contender, EchelonBatch):
        llama = contender.model.unwrap().model
        sizes["before"] = bytes_before_layers(
            contender.compute, embedding=llama.embed_tokens, first_layer=llama.layers[0]
        )
        contender.forget()
    largest = torch.tensor(list(sizes.values()))
    dist.all_reduce(largest, op=dist.ReduceOp.MAX)
    return dict(zip(sizes, largest.tolist(), strict=True))


def longest_here(
    workload: Workload, device: torch.device, rows: Sequence[Mapping[str, Any]], memory: float
) -> int:
    """Return the longest sequence whose peak under ring attention fits this memory. Collective over the world."""
    (short, low), (long, high) = ((row["length"], row["bytes"][RING]["peak"]) for row in (rows[-2], rows[-1]))
    near = long + (memory - high) * (long - short) / (high - low)

    def peak(length: int) -> float:
        contender = contender_makers(replace(workload, sequence=length), device)[RING]()
        contender.compute()  # tensors that are made once and kept do not depend on the sequence
        contender.forget()
        return bytes_of(contender)["peak"]

    unit = max(2 * dist.get_world_size(), workload.sequence // 32)  # shorter steps would be padded
    return search(peak, start=int(near), unit=unit, memory=memory)


def longest_sequences(runs: Mapping[int, Mapping[str, Any]], memory: float) -> dict[str, Any]:
    """Return measured and simulated lengths by ranks; empty unless ring attention ran on two numbers of ranks."""
    rows = {
        (num_ranks, row["length"]): row["bytes"][RING]
        for num_ranks, measurements in runs.items()
        for row in measurements["lengths"]
        if RING in row["bytes"]
    }
    if len({num_ranks for num_ranks, _ in rows}) < 2:
        return {}
    needs = {
        name: fit({place: row[kind] for place, row in rows.items()})
        for name, kind in (("at most", "peak"), ("before the layers", "before"))
    }
    measured = {
        str(num_ranks): measurements["longest"]
        for num_ranks, measurements in runs.items()
        if "longest" in measurements
    }
    return {
        "memory": memory,
        "measured": {"1": runs[1]["lengths"][-1]["length"], **measured},
        "error": error(needs.values(), {place: row["peak"] for place, row in rows.items()}),
        **simulated(needs, memory, _SIMULATED),
    }


def last_line(row: Mapping[str, Any]) -> dict[str, float]:
    """Return the smallest time and memory of Echelon relative to torch's, for one length."""
    seconds, kept = row["seconds"], {name: sizes["kept"] for name, sizes in row["bytes"].items()}
    ours, theirs = ([name for name in seconds if name.startswith(side)] for side in ("echelon", "torch"))
    if not (ours and theirs):
        return {}
    return {
        "ratio_to_best_peer": report.ratio(
            seconds[report.fastest(seconds, ours)], seconds[report.fastest(seconds, theirs)]
        ),
        "bytes_to_best_peer": min(kept[name] for name in ours) / min(kept[name] for name in theirs),
    }


def show_results(results: dict[str, Any], title: str, arguments: argparse.Namespace) -> None:
    """Print the tables and the last line; write the requested files."""
    note = report.conditions(results["machine"], arguments.rounds)
    for num_ranks, measurements in results["runs"].items():
        show(f"{title}, {num_ranks} rank{'s'[: num_ranks > 1]}", measurements["lengths"], note)
        if why := measurements.get("why_not_context_parallel"):
            print(
                f"torch's context_parallel itself does not compute here, its ring with another kernel does: {why}"
            )
    if longest := results.get("longest"):
        show_longest(longest)
    results["summary"] = last_line(results["runs"][max(results["runs"])]["lengths"][-1])
    if arguments.json is not None:
        report.write_json(arguments.json, results)
    if arguments.plot is not None:
        draw(arguments.plot, lines(results["runs"]), points(results.get("longest", {})))
    print(" ".join(f"{name}={value:.3f}" for name, value in results["summary"].items()))


def show(title: str, rows: Sequence[Mapping[str, Any]], note: str) -> None:
    """Print bytes and times of each contender, by length."""
    header = ["contender", *(f"{row['length']} tokens" for row in rows), "peak MiB"]
    names = list(rows[-1]["seconds"])

    def kept(row: Mapping[str, Any], name: str) -> str:
        return f"{row['bytes'][name]['kept'] / 2**20:.1f}, {median(row['seconds'][name]) * 1e3:.0f}"

    cells = [
        [name, *(kept(row, name) for row in rows), f"{rows[-1]['bytes'][name]['peak'] / 2**20:.1f}"]
        for name in names
    ]
    report.show(f"{title}: MiB kept for backward, ms of the median step", header, cells, note=note)


def show_longest(longest: Mapping[str, Any]) -> None:
    """Print the longest sequences, and the formula of the simulated ones."""
    rows = [
        [num_ranks, str(longest["measured"].get(num_ranks, "")), str(tokens)]
        for num_ranks, tokens in longest["longest"].items()
    ]
    needs = [
        f"{name}: {need['constant']:.0f} + ({need['whole']:.0f} + {need['shared']:.0f} / ranks) · tokens"
        for name, need in longest["needs"].items()
    ]
    title = f"longest sequence under ring attention in {longest['memory'] / 2**20:.0f} MiB"
    report.show(title, ["ranks", "measured", "simulated"], rows)
    print(
        f"bytes {'; '.join(needs)}; fitted to what was measured, at most {100 * longest['error']:.1f} % off"
    )


def lines(runs: Mapping[int, Mapping[str, Any]]) -> dict[int, dict[str, list[dict[str, float]]]]:
    """Return the plotted lines of each run of several ranks: rows by contender."""
    return {
        num_ranks: {
            name: [
                {
                    "length": row["length"],
                    "kept": row["bytes"][name]["kept"],
                    "median": median(row["seconds"][name]),
                }
                for row in measurements["lengths"]
            ]
            for name in measurements["lengths"][-1]["seconds"]
        }
        for num_ranks, measurements in runs.items()
        if num_ranks > 1
    }


def points(longest: Mapping[str, Any]) -> dict[str, dict[int, float]]:
    """Return the plotted points of the longest sequences: tokens by ranks."""
    named = {"simulated": longest.get("longest", {}), "measured": longest.get("measured", {})}
    return {
        name: {int(ranks): tokens for ranks, tokens in tokens_of.items()}
        for name, tokens_of in named.items()
        if tokens_of
    }


if __name__ == "__main__":
    main()
