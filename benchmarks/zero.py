r"""Step times and memory of Echelon's data parallelism, compared with torch's, on the same Llama.

    python benchmarks/zero.py --json times.json --plot times.png
    python benchmarks/zero.py --dp 4 --sequence 32

Every round runs one step of each contender, in a rotating order. A ratio is the median of the rounds' ratios. The
last line compares Echelon's stage 1 with the fastest of torch. Run it on an idle machine.
"""

import argparse
from collections.abc import Mapping, Sequence
from typing import Any

import report
from arguments import add_max_norm, common_parser, parse, workload_of
from comparison import compare
from data_parallel import DataParallel
from launch import enter
from memory import measure_held
from zero_contenders import EchelonZero, contender_makers, name_of

from echelon.cluster.device import default_device

MAIN_STAGE = 1  # the stage of the last line


def parse_arguments() -> argparse.Namespace:
    parser = common_parser(__doc__)
    parser.add_argument("--dp", type=int, default=2, help="ranks, each with its part of the batch")
    add_max_norm(parser)
    return parse(parser)


def main() -> None:
    arguments = parse_arguments()
    enter(arguments.dp, option="--dp", matmul=arguments.matmul)
    workload = workload_of(arguments, microbatches=1)
    compare(
        [make() for make in contender_makers(workload, default_device()).values()],
        workload,
        arguments,
        main=name_of(MAIN_STAGE),
        layout=f"dp {arguments.dp}",
        measure_more=measure_bytes,
        show_more=show_bytes,
    )


def measure_bytes(contenders: Sequence[DataParallel]) -> dict[str, Any]:
    """Return the bytes of the contenders' tensors. Communicates."""
    return {
        "held": measure_held(contenders),
        "ledger": {
            contender.name: contender.held() for contender in contenders if isinstance(contender, EchelonZero)
        },
    }


def show_bytes(results: Mapping[str, Any]) -> None:
    """Print the bytes of the contenders' tensors."""
    ordered = report.by_median(results["summary"]["contenders"])
    held = results["held"]
    rows = [[name, *(f"{size / 2**20:.1f}" for size in held[name].values())] for name, _ in ordered]
    header = ["contender", *(f"{kind} MiB" for kind in held[name_of(MAIN_STAGE)])]
    report.show("held between backward and step, on the largest rank", header, rows)


if __name__ == "__main__":
    main()
