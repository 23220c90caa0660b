r"""Step times of Echelon's tensor parallelism beside torch's and transformers', on the same Llama.

    python benchmarks/tensor.py --json times.json --plot times.png
    python benchmarks/tensor.py --tp 4 --sequence 32

Every round runs one step of each contender, in a rotating order. A ratio is the median of the rounds' ratios. The
last line compares Echelon with the fastest of the others. Run it on an idle machine: it shows no more than what the
machine lets it.
"""

import argparse
from collections.abc import Mapping
from functools import partial

from arguments import common_parser, parse, workload_of
from comparison import compare
from launch import enter
from stepped import OneBatch
from tensor_peers import TorchTensor, TransformersTensor
from torch import Tensor
from workload import Workload, adamw

from echelon import Booster, HybridParallelPlugin
from echelon.checkpoint.gather import gather_whole
from echelon.cluster.launch import default_device
from echelon.cluster.placement import placement_of


class EchelonTensor(OneBatch):
    """HybridParallelPlugin with tensor parallelism over all ranks of the run.

    Args:
        workload: what is computed.
        num_ranks: of the run.
    """

    name = "echelon"

    def __init__(self, workload: Workload, num_ranks: int) -> None:
        self._plugin = HybridParallelPlugin(tp_size=num_ranks, precision="fp32")
        booster = Booster(plugin=self._plugin)
        model = workload.model()
        boosted, optimizer, *_ = booster.boost(model, adamw(model))
        super().__init__(
            boosted,
            optimizer,
            backward=partial(booster.backward, optimizer=optimizer),
            batch=workload.data(self._plugin.mesh.device),
        )

    def gradients(self) -> Mapping[str, Tensor]:
        """Gradients by name, gathered to the first rank. Communicates over the world."""
        self._optimizer.reduce_gradients()
        gradients = self._optimizer.gradients()
        placements = {name: placement_of(self._model.held[name]) for name in gradients}
        return gather_whole(gradients, placements, self._plugin.mesh)


def parse_arguments() -> argparse.Namespace:
    parser = common_parser(__doc__)
    parser.add_argument("--tp", type=int, default=2, help="ranks, each with its part of every layer")
    return parse(parser)


def main() -> None:
    arguments = parse_arguments()
    enter(arguments.tp, option="--tp", matmul=arguments.matmul)
    workload, device = workload_of(arguments, microbatches=1), default_device()
    contenders = [
        EchelonTensor(workload, arguments.tp),
        *(TorchTensor(workload, device, kind=kind) for kind in TorchTensor.names),
        TransformersTensor(workload, device),
    ]
    compare(contenders, workload, arguments, main=EchelonTensor.name, layout=f"tp {arguments.tp}")


if __name__ == "__main__":
    main()
