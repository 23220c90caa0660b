r"""Step times of Echelon's tensor parallelism, compared with torch's and transformers', on the same Llama.

    python benchmarks/tensor.py --json times.json --plot times.png
    python benchmarks/tensor.py --tp 4 --sequence 32

Every round runs one step of each contender, in a rotating order. A ratio is the median of the rounds' ratios. The
last line compares Echelon with the fastest of the others. Run it on an idle machine.
"""

import argparse

from arguments import common_parser, parse, workload_of
from comparison import compare
from echelon_batch import EchelonBatch
from launch import enter
from tensor_peers import TorchTensor, TransformersTensor

from echelon.cluster.device import default_device

_NAME = "echelon"


def parse_arguments() -> argparse.Namespace:
    parser = common_parser(__doc__)
    parser.add_argument("--tp", type=int, default=2, help="ranks, each with its part of every layer")
    return parse(parser)


def main() -> None:
    arguments = parse_arguments()
    enter(arguments.tp, option="--tp", matmul=arguments.matmul)
    workload, device = workload_of(arguments, microbatches=1), default_device()
    contenders = [
        EchelonBatch(_NAME, workload, tp_size=arguments.tp),
        *(TorchTensor(workload, device, kind=kind) for kind in TorchTensor.names),
        TransformersTensor(workload, device),
    ]
    compare(contenders, workload, arguments, main=_NAME, layout=f"tp {arguments.tp}")


if __name__ == "__main__":
    main()
