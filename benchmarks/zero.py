r"""Step times and held memory of Echelon's data parallelism beside torch's, on the same Llama.

    python benchmarks/zero.py --json times.json --plot times.png
    python benchmarks/zero.py --dp 4 --sequence 32

Every round runs one step of each contender, in a rotating order. A ratio is the median of the rounds' ratios. The
last line compares Echelon's stage 1 with the fastest of torch. Run it on an idle machine: it shows no more than
what the machine lets it.
"""

import argparse
from collections.abc import Mapping, Sequence
from typing import Any

import report
import torch.distributed as dist
from arguments import common_parser, parse, settings_of, workload_of
from contender import agreement, require_equal_training
from launch import enter
from memory import measure_held
from rounds import time_rounds
from stepped import OneProcess
from workload import Workload
from zero_contenders import EchelonZero, contender_makers, name_of

from echelon.cluster.launch import default_device

MAIN_STAGE = 1  # the one that the last line is about


def parse_arguments() -> argparse.Namespace:
    parser = common_parser(__doc__)
    parser.add_argument("--dp", type=int, default=2, help="ranks, each with its part of the batch")
    return parse(parser)


def main() -> None:
    arguments = parse_arguments()
    enter(arguments.dp, option="--dp", matmul=arguments.matmul)
    workload = workload_of(arguments, microbatches=1)
    results = measure(workload, arguments)
    if dist.get_rank() == 0:
        tell(results, workload, arguments)
    dist.destroy_process_group()


def measure(workload: Workload, arguments: argparse.Namespace) -> dict[str, Any]:
    """Everything that is measured, on every rank. Collective over the world."""
    results: dict[str, Any] = {"machine": report.machine(), "settings": settings_of(arguments)}
    device = default_device()
    contenders = [make() for make in contender_makers(workload, device).values()]
    results["agreement"] = agreement(contenders, OneProcess(workload, device, works=True))
    results["seconds"] = time_rounds(
        contenders, rounds=arguments.rounds, warmup=arguments.warmup, device=device
    )
    results["held"] = measure_held(contenders)
    results["ledger"] = {each.name: each.held() for each in contenders if isinstance(each, EchelonZero)}
    results["loss_afterwards"] = require_equal_training(contenders)
    return results | {"summary": summary(results["seconds"])}


def summary(seconds: Mapping[str, Sequence[float]]) -> dict[str, Any]:
    """The contenders' medians and ratios, and the number of the last line."""
    best_peer = report.fastest(seconds, [name for name in seconds if name.startswith("torch")])
    rows = report.compared(seconds, best_peer)
    return {
        "contenders": rows,
        "best_peer": best_peer,
        "ratio_to_best_peer": rows[name_of(MAIN_STAGE)]["ratio_to_best_peer"],
    }


def tell(results: Mapping[str, Any], workload: Workload, arguments: argparse.Namespace) -> None:
    """Print the tables and the last line; write the files that are asked for."""
    found, held = results["summary"], results["held"]
    title = f"{workload}, dp {arguments.dp}"
    ordered = report.by_median(found["contenders"])
    rows = [report.timing_cells(name, row) for name, row in ordered]
    note = report.conditions(results["machine"], arguments.rounds)
    report.show(title, report.timing_header(found["best_peer"]), rows, note=note)
    rows = [[name, *(f"{size / 2**20:.1f}" for size in held[name].values())] for name, _ in ordered]
    header = ["contender", *(f"{kind} MiB" for kind in held[name_of(MAIN_STAGE)])]
    report.show("held between backward and step, on the largest rank", header, rows)
    if arguments.json is not None:
        report.write_json(arguments.json, results)
    if arguments.plot is not None:
        line = f"median of {found['best_peer']}", found["contenders"][found["best_peer"]]["median"]
        report.plot(arguments.plot, results["seconds"], title=title, line=line)
    print(f"ratio_to_best_peer={found['ratio_to_best_peer']:.3f}")


if __name__ == "__main__":
    main()
