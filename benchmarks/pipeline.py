r"""Step times of Echelon's pipeline, compared with torch.distributed.pipelining, on the same Llama.

    python benchmarks/pipeline.py --json times.json --plot times.png

Warm-up rounds run all schedules. Further rounds run a step of the three that were then fastest of Echelon and of torch,
in a rotating order; the last few of them also that of one process. A ratio is the median of the rounds' ratios. The
ideal is one process's step time over the same microbatches, alone, × (1 + bubble) / ranks. The last line compares
Echelon's fastest schedule with torch's fastest and with its ideal. Run it on an idle machine. The row of one
independent process on each rank shows the limit of the machine.
"""

import argparse
from collections.abc import Mapping, Sequence
from typing import Any

import pipeline_peers
import report
import torch
import torch.distributed as dist
from arguments import add_max_norm, common_parser, parse, settings_of, workload_of
from contender import Contender, agreement
from engine_alone import time_engines
from launch import enter
from rounds import time_rounds
from stepped import OneProcess, Stepped
from torch import Tensor
from workload import Workload, adamw

from echelon import Booster, HybridParallelPlugin
from echelon.cluster.device import default_device
from echelon.cluster.mesh import ParallelMesh
from echelon.pipeline.schedules import build_schedule, build_stage_ranks
from echelon.pipeline.simulate import Costs, simulate
from echelon.pipeline.stage_manager import assign_layers, layer_errors

# Echelon's styles, with their stages per rank.
STYLES = {"gpipe": 1, "1f1b": 1, "interleaved": 2, "zbh1": 1, "zbv": 2}
# The ranks are independent here: their slowdown compared with "one process" is due to the machine.
ON_EACH_RANK = "one process on each rank"
FINALISTS = 3  # schedules of Echelon, and of torch, that are timed after the warm-up
ALONE_ROUNDS = 3  # the last rounds, in which one process is timed too


class EchelonPipeline(Stepped):
    """A schedule of HybridParallelPlugin over all ranks of the run.

    Args:
        style: one of `STYLES`.
        workload: the computation.
        num_ranks: the number of ranks of the run.
        counts: layers of each stage.
    """

    def __init__(self, style: str, workload: Workload, *, num_ranks: int, counts: Sequence[int]) -> None:
        self.name = f"echelon {style}"
        plugin = HybridParallelPlugin(
            tp_size=1,
            pp_size=num_ranks,
            precision="fp32",
            num_microbatches=workload.microbatches,
            pp_style=style,
            num_layers_per_stage=counts,
            num_model_chunks=STYLES[style],
            max_norm=workload.max_norm,
        )
        self._booster = Booster(plugin=plugin)
        model = workload.model()
        self._model, optimizer, *_ = self._booster.boost(model, adamw(model))
        super().__init__(optimizer)
        self._data = workload.data(plugin.mesh.device)
        self._loss: Tensor | None = None

    def compute(self) -> None:
        """Compute loss and gradients of the batch. Communicates over the world."""
        outputs = self._booster.execute_pipeline(
            iter([self._data]), self._model, _loss_of, self._optimizer, return_loss=True
        )
        self._loss = outputs["loss"]

    def loss(self) -> Tensor | None:
        """Return the mean loss."""
        return self._loss

    def gradients(self) -> Mapping[str, Tensor]:
        """Return this rank's gradients by name. Communicates."""
        self._optimizer.reduce_gradients()
        return self._optimizer.gradients()


def _loss_of(outputs: Any, inputs: Any) -> Tensor:
    return outputs.loss


def parse_arguments() -> argparse.Namespace:
    parser = common_parser(__doc__)
    parser.add_argument("--pp", type=int, default=2, help="ranks, one stage or two on each")
    parser.add_argument("--microbatches", type=int, default=8)
    parser.add_argument(
        "--schedules",
        nargs="+",
        choices=list(STYLES),
        default=list(STYLES),
        help="of Echelon; torch runs all its own",
    )
    parser.add_argument(
        "--layers_per_stage",
        type=int,
        nargs="+",
        metavar="N",
        help="for styles of one stage per rank, all contenders; by default as even as can be, the head counted",
    )
    parser.add_argument(
        "--layers_per_chunk",
        type=int,
        nargs="+",
        metavar="N",
        help="the same for styles of two stages per rank",
    )
    parser.set_defaults(sequence=128, rounds=10, warmup=3)
    add_max_norm(parser)
    arguments = parse(parser)
    if min(arguments.rounds, arguments.warmup) < 1:
        parser.error(
            "--rounds and --warmup must be at least 1: the warm-up chooses the schedules of the rounds"
        )
    return arguments


def main() -> None:
    arguments = parse_arguments()
    enter(arguments.pp, option="--pp", matmul=arguments.matmul)
    workload = workload_of(arguments)
    results = measure(workload, arguments)
    if dist.get_rank() == 0:
        show_results(results, workload, arguments)
    dist.destroy_process_group()


def measure(workload: Workload, arguments: argparse.Namespace) -> dict[str, Any]:
    """Run all measurements, on every rank. Collective over the world."""
    results: dict[str, Any] = {"machine": report.machine(), "settings": settings_of(arguments)}
    device = default_device()
    contenders = make_contenders(arguments, workload, device)
    replicated = OneProcess(workload, device, works=True)
    replicated.name = ON_EACH_RANK
    results["agreement"] = agreement(contenders, replicated)
    alone = OneProcess(workload, device, works=dist.get_rank() == 0)
    results["warmup_seconds"] = time_rounds(contenders, rounds=arguments.warmup, warmup=0, device=device)
    chosen = finalists(results["warmup_seconds"])
    contenders = [contender for contender in contenders if contender.name in chosen]
    few = min(ALONE_ROUNDS, arguments.rounds)
    first = time_rounds(contenders, rounds=arguments.rounds - few, warmup=0, device=device)
    last = time_rounds([*contenders, alone, replicated], rounds=few, warmup=0, device=device)
    results["seconds"] = {name: [*first.get(name, ()), *seconds] for name, seconds in last.items()}
    del contenders, alone, replicated
    mesh = ParallelMesh(pp=arguments.pp)
    results["engine"] = [
        row
        for microbatches in (8, 32)
        for row in time_engines(mesh, num_microbatches=microbatches, rounds=5 * arguments.rounds, warmup=10)
    ]
    return results | {"summary": summary(results["seconds"], arguments.pp, workload.microbatches)}


def finalists(seconds: Mapping[str, Sequence[float]]) -> list[str]:
    """Return the schedules of Echelon and of torch with the shortest step in the warm-up."""
    ordered = sorted(seconds, key=lambda name: min(seconds[name]))
    return [
        name
        for side in ("echelon", "torch")
        for name in [name for name in ordered if name.startswith(side)][:FINALISTS]
    ]


def make_contenders(
    arguments: argparse.Namespace, workload: Workload, device: torch.device
) -> list[Contender]:
    """Return all contenders, with equal weights. Collective over the world."""
    num_ranks, rank = arguments.pp, dist.get_rank()
    layers_of = {1: arguments.layers_per_stage, 2: arguments.layers_per_chunk}

    def counts(style: str) -> Sequence[int]:
        holders = build_stage_ranks(style, num_ranks, STYLES[style])
        return layers_of[STYLES[style]] or balanced_layers(workload, holders)

    ours = [
        EchelonPipeline(style, workload, num_ranks=num_ranks, counts=counts(style))
        for style in arguments.schedules
    ]
    theirs = [
        pipeline_peers.TorchPipeline(
            style, workload, device, rank=rank, num_ranks=num_ranks, counts=counts(style)
        )
        for style in pipeline_peers.STYLES
    ]
    return [*ours, *theirs]


def balanced_layers(workload: Workload, holders: Sequence[int]) -> list[int]:
    """Return the layers of each stage, so that the largest amount of arithmetic on a rank is minimal.

    Starts with equal stages and moves a layer from the busiest rank to the least busy one as long as this helps.

    Args:
        workload: the computation; its head counts as a number of layers, by the size of its products.
        holders: the rank of each stage.
    """
    if errors := layer_errors(workload.layers, len(holders), None):
        raise ValueError("; ".join(errors))
    counts = assign_layers(workload.layers, len(holders))
    while True:
        work = [*counts[:-1], counts[-1] + workload.head_in_layers]
        ranks = [sum(work[stage] for stage in _held(holders, rank)) for rank in range(max(holders) + 1)]
        busiest, idlest = ranks.index(max(ranks)), ranks.index(min(ranks))
        source = max(_held(holders, busiest), key=lambda stage: (counts[stage] > 1, work[stage]))
        target = min(_held(holders, idlest), key=lambda stage: work[stage])
        if counts[source] == 1 or ranks[idlest] + 1 >= ranks[busiest]:
            return counts
        counts[source] -= 1
        counts[target] += 1


def _held(holders: Sequence[int], rank: int) -> list[int]:
    return [stage for stage, holder in enumerate(holders) if holder == rank]


def ideal(style: str, num_ranks: int, num_microbatches: int) -> float:
    """Return the ideal step of a style relative to one process's: equal shares plus the bubble."""
    computations = build_schedule(style, num_ranks, num_microbatches, STYLES[style])
    return (1 + simulate(computations, Costs()).bubble) / num_ranks


def summary(seconds: Mapping[str, Sequence[float]], num_ranks: int, num_microbatches: int) -> dict[str, Any]:
    """Return the contenders' medians and ratios, and the two numbers of the last line."""
    ours = [name for name in seconds if name.startswith("echelon")]
    best_peer = report.fastest(seconds, [name for name in seconds if name.startswith("torch")])
    best = report.fastest(seconds, ours)
    rows = report.compared(seconds, best_peer)
    for name, row in rows.items():
        share = (
            1.0
            if name in (OneProcess.name, ON_EACH_RANK)
            else ideal(name.split()[1], num_ranks, num_microbatches)
        )
        alone = [share * duration for duration in seconds["one process"]]
        row["ratio_to_ideal"] = report.ratio(seconds[name][-len(alone) :], alone)
    return {
        "contenders": rows,
        "best": best,
        "best_peer": best_peer,
        "ratio_to_best_peer": rows[best]["ratio_to_best_peer"],
        "ratio_to_ideal": rows[best]["ratio_to_ideal"],
    }


def show_results(results: Mapping[str, Any], workload: Workload, arguments: argparse.Namespace) -> None:
    """Print the tables and the last line; write the requested files."""
    summarized = results["summary"]
    title = f"{workload} in {workload.microbatches}, pp {arguments.pp}"
    rows = [
        [*report.timing_cells(name, row), f"{row['ratio_to_ideal']:.3f}"]
        for name, row in report.by_median(summarized["contenders"])
    ]
    header = [*report.timing_header(summarized["best_peer"]), "to its ideal"]
    report.show(title, header, rows, note=report.conditions(results["machine"], arguments.rounds))
    rows = [
        [name, f"{min(times) * 1e3:.1f}"]
        for name, times in sorted(results["warmup_seconds"].items(), key=lambda item: min(item[1]))
    ]
    report.show("warm-up", ["contender", "shortest ms"], rows)
    rows = [
        [
            f"{row['style']}, {row['microbatches']} microbatches",
            *(f"{row['microseconds'][name]:.1f}" for name in ("echelon", "torch")),
            f"engine_ratio={row['engine_ratio']:.3f}",
        ]
        for row in results["engine"]
    ]
    report.show("the engine alone", ["schedule", "echelon µs/action", "torch µs/action", "ratio"], rows)
    if arguments.json is not None:
        report.write_json(arguments.json, results)
    if arguments.plot is not None:
        best = summarized["best"].split()[1]
        share = summarized["contenders"][summarized["best"]]["median"] / summarized["ratio_to_ideal"]
        report.plot(arguments.plot, results["seconds"], title=title, line=(f"ideal of {best}", share))
    print(
        f"ratio_to_best_peer={summarized['ratio_to_best_peer']:.3f} ratio_to_ideal={summarized['ratio_to_ideal']:.3f}"
    )


if __name__ == "__main__":
    main()
