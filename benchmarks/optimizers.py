r"""Times of `step()` and bytes of states of AdamW, Muon and Adafactor under Echelon's ZeRO, compared with torch's.

    python benchmarks/optimizers.py --json times.json --plot times.png
    python benchmarks/optimizers.py --dp 4 --optimizers muon

Every round computes the gradients of each contender, reduces them, and times its step, in a rotating order. A ratio is
the median of the rounds' ratios. The last line compares Echelon's stage 1 with the fastest of torch on all ranks, for
every optimizer. Run it on an idle machine.
"""

import argparse
import gc
from collections.abc import Mapping, Sequence
from functools import partial
from typing import Any

import report
import torch.distributed as dist
from arguments import common_parser, parse, settings_of, workload_of
from contender import agreement, require_equal_training
from data_parallel import tensors_in
from launch import enter
from memory import held_bytes, largest_of_all_ranks
from rounds import time_rounds
from stepped import OneProcess, Stepped
from torch import nn
from torch.optim import Optimizer
from workload import Workload
from zero_contenders import EchelonZero, name_of
from zero_peers import TorchDDP, TorchFSDP

from echelon.cluster.device import default_device
from echelon.verify.optimizers import OPTIMIZERS, combined, optimizers_of

STAGES = (1, 2)
MAIN = name_of(STAGES[0])  # the contender of the last line
# torch 2.13's Adafactor fails on DTensors: no in-place power of a partial norm.
FSDP_REFUSES = ("adafactor",)


class EchelonStep(EchelonZero):
    """A stage of ZeRO whose gradients are reduced before its step, as those of torch's peers are."""

    def compute(self) -> None:
        """Compute loss and gradients of the batch, and reduce them. Communicates over the world."""
        super().compute()
        self._optimizer.reduce_gradients()

    def masters(self) -> int:
        """Return the bytes of float32 masters beside the parameters on this rank."""
        return self._optimizer.held_bytes()["masters"]


def parse_arguments() -> argparse.Namespace:
    parser = common_parser(__doc__)
    parser.add_argument("--dp", type=int, default=2, help="ranks, each with its part of the batch")
    parser.add_argument("--optimizers", nargs="+", choices=OPTIMIZERS, default=list(OPTIMIZERS))
    # The gradients' values cost nothing: few tokens.
    parser.set_defaults(layers=4, vocabulary=2048, sequence=32, rounds=10, warmup=2)
    return parse(parser)


def main() -> None:
    arguments = parse_arguments()
    enter(arguments.dp, option="--dp", matmul=arguments.matmul)
    workload = workload_of(arguments, microbatches=1)
    results: dict[str, Any] = {"machine": report.machine(), "settings": settings_of(arguments)}
    results["optimizers"] = {}
    for kind in arguments.optimizers:
        results["optimizers"][kind] = measure(kind, workload, arguments)
        gc.collect()  # one optimizer's contenders at a time
    if dist.get_rank() == 0:
        show_results(results, f"{workload}, dp {arguments.dp}", arguments)
    dist.destroy_process_group()


def make_optimizer(model: nn.Module, kind: str) -> Optimizer:
    """Return an optimizer of all parameters: Muon takes hidden matrices, and AdamW what remains."""
    return combined(optimizers_of(model, kind, fused=True))


def measure(kind: str, workload: Workload, arguments: argparse.Namespace) -> dict[str, Any]:
    """Check the contenders of one optimizer, time their steps and count their states. Collective over the world."""
    device, make = default_device(), partial(make_optimizer, kind=kind)
    contenders: list[Any] = [EchelonStep(stage, workload, make) for stage in STAGES]
    contenders.append(TorchDDP(workload, device, make))
    if kind not in FSDP_REFUSES:
        contenders.append(TorchFSDP(workload, device, reshard=True, make_optimizer=make))
    measured: dict[str, Any] = {}
    measured["agreement"] = agreement(contenders, OneProcess(workload, device, works=True))
    contenders.append(OneProcess(workload, device, works=dist.get_rank() == 0, make_optimizer=make))
    measured["seconds"] = time_rounds(
        contenders,
        rounds=arguments.rounds,
        warmup=arguments.warmup,
        device=device,
        before=lambda contender: contender.compute(),
        work=lambda contender: contender.update(),
    )
    measured["held"] = measure_states(contenders)
    measured["loss_afterwards"] = require_equal_training(contenders)
    best_peer = report.fastest(
        measured["seconds"], [name for name in measured["seconds"] if name.startswith("torch")]
    )
    measured["summary"] = {
        "contenders": report.compared(measured["seconds"], best_peer),
        "best_peer": best_peer,
    }
    return measured


def measure_states(contenders: Sequence[Stepped]) -> dict[str, dict[str, int]]:
    """Return the bytes of the optimizer's states and of float32 masters beside the parameters. Communicates.

    Returns:
        The largest of all ranks, by contender.
    """
    held = {}
    for contender in contenders:
        states = [state for state in tensors_in(contender.states()) if state.numel() > 1]
        local_bytes = {"states": held_bytes(states), "masters": 0}
        if isinstance(contender, EchelonStep):
            local_bytes["masters"] = contender.masters()
        held[contender.name] = largest_of_all_ranks(local_bytes)
    return held


def show_results(results: Mapping[str, Any], title: str, arguments: argparse.Namespace) -> None:
    """Print a table for every optimizer and the last line; write the requested files."""
    seconds, last = {}, []
    for kind, measured in results["optimizers"].items():
        rows, best_peer = measured["summary"]["contenders"], measured["summary"]["best_peer"]
        cells = [
            [
                *report.timing_cells(name, row),
                *(f"{size / 2**20:.1f}" for size in measured["held"][name].values()),
            ]
            for name, row in report.by_median(rows)
        ]
        header = [*report.timing_header(best_peer), "states MiB", "masters MiB"]
        note = report.conditions(results["machine"], arguments.rounds)
        report.show(f"step() of {kind}: {title}", header, cells, note=note)
        seconds |= {f"{kind}: {name}": times for name, times in measured["seconds"].items()}
        last.append(f"{kind}_to_best_peer={rows[MAIN]['ratio_to_best_peer']:.3f}")
    if arguments.json is not None:
        report.write_json(arguments.json, results)
    if arguments.plot is not None:
        line = f"median of {best_peer} with {kind}", rows[best_peer]["median"]
        report.plot(arguments.plot, seconds, title=title, line=line)
    print(*last)


if __name__ == "__main__":
    main()
