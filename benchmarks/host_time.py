r"""Host time: CPU time of a layer, a region, an action of a pipeline and an optimizer's step.

    python benchmarks/host_time.py --json host.json

On a GPU the host has to run ahead of the kernels, so its time per layer bounds the speed. The process is one rank of
two over torch's "fake" process group, which sends nothing, and tensors are so small that arithmetic takes almost no
time. All contenders run in every round, in a rotating order. Times are CPU times of the process, so that other load on
the machine has little effect. The last line has two results: the time that Echelon's tensor parallelism adds to
a transformers layer, forward and backward, relative to DTensor's; and `step()` of a model of 300 parameters.
"""

import argparse
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import replace
from functools import partial
from statistics import median
from time import process_time
from typing import Any

import report
import torch
import torch.distributed as dist
import transformers
from arguments import parse, settings_of, workload_of, workload_parser
from checkout import refuse_another_checkout
from data_parallel import DataParallel
from echelon_batch import EchelonBatch
from engine_alone import ENGINES, STYLES
from fake_world import RANKS, fake_world
from rounds import in_turn
from stepped import OneProcess
from tensor_peers import TorchTensor
from torch import Tensor, nn
from torch.futures import Future
from workload import Workload
from zero_contenders import contender_makers
from zero_peers import TorchDDP, TorchZero

from echelon.cluster.device import default_device
from echelon.cluster.mesh import ParallelMesh

PLAIN, OURS, DTENSOR = "transformers", "echelon", TorchTensor.names["plain"]
PARTS = ("layer", "attention", "mlp")  # the last two are one region each
# With several stages per rank, a rank receives shapes from the other one, which does not exist.
ONE_STAGE = [style for style, stages in STYLES.items() if stages == 1]
# A Llama has 9 parameters in a layer, and 3 besides.
STEPPED_LAYERS, STEPPED_PARAMETERS = 33, 300
STEPPED_HIDDEN = 16  # so narrow that norms and updates need almost no arithmetic
STEPPED = "echelon stage 1"  # the contender of the last line

# By name: a function that runs once, and returns the seconds of its parts.
Works = Mapping[str, Callable[[], Sequence[float]]]
Seconds = dict[str, list[Sequence[float]]]


def parse_arguments() -> argparse.Namespace:
    parser = workload_parser(__doc__)
    parser.set_defaults(hidden=64, layers=8, vocabulary=64, sequence=16, batch=2)
    parser.add_argument("--rounds", type=int, default=60)
    parser.add_argument("--warmup", type=int, default=10, help="rounds that are not timed")
    return parse(parser)


def main() -> None:
    refuse_another_checkout()
    arguments = parse_arguments()
    torch.set_num_threads(1)
    # Repeated regions alone shrink the activations to denormals, which are slow.
    torch.set_flush_denormal(True)
    transformers.logging.set_verbosity_error()
    workload = workload_of(arguments, microbatches=1)
    results: dict[str, Any] = {"machine": report.machine(), "settings": settings_of(arguments)}
    timed = partial(times, rounds=arguments.rounds, warmup=arguments.warmup)
    with fake_world():
        results["layers"] = {module: timed(works) for module, works in layer_works(workload).items()}
        results["engines"] = {style: timed(engine_works(style, workload.batch)) for style in ONE_STAGE}
        results["steps"] = timed(step_works(workload))
    results["summary"] = summary(results, workload)
    show(results["summary"], report.conditions(results["machine"], arguments.rounds))
    if arguments.json is not None:
        report.write_json(arguments.json, results)
    print(" ".join(f"{name}={value:.3f}" for name, value in results["summary"]["last"].items()))


def times(works: Works, *, rounds: int, warmup: int) -> Seconds:
    """Return the seconds of each round, by contender."""
    seconds_of: Seconds = {name: [] for name in works}
    names = list(works)
    for number, index in in_turn(len(names), rounds=rounds, warmup=warmup):
        seconds = works[names[index]]()
        if number >= 0:
            seconds_of[names[index]].append(seconds)
    return seconds_of


# Layers and their regions.


def layer_works(workload: Workload) -> dict[str, Works]:
    """Return by part of a layer and by contender a function that runs this part of all layers in sequence."""
    device = default_device()
    ours = EchelonBatch(OURS, workload, tp_size=RANKS)
    models: dict[str, Any] = {
        PLAIN: workload.model().to(device),
        OURS: ours.model.unwrap(),
        DTENSOR: TorchTensor(workload, device, kind="plain").model,
    }
    hidden = torch.randn(1, workload.sequence, workload.hidden, device=device, requires_grad=True)
    rotary = models[PLAIN].model.rotary_emb(hidden, torch.arange(workload.sequence, device=device)[None])

    def work(name: str, module: str) -> Callable[[], Sequence[float]]:
        parts = [calls_of(layer, rotary)[module] for layer in models[name].model.layers]
        return partial(through, parts, hidden, ours.accumulating if name == OURS else nullcontext)

    return {module: {name: work(name, module) for name in models} for module in PARTS}


def calls_of(layer: nn.Module, rotary: Any) -> dict[str, Callable[[Tensor], Tensor]]:
    """Return the parts of a layer, each called as by transformers."""

    def attention(hidden: Tensor) -> Tensor:
        return layer.self_attn(hidden_states=hidden, position_embeddings=rotary, attention_mask=None)[0]

    def whole_layer(hidden: Tensor) -> Tensor:
        return layer(hidden, position_embeddings=rotary, attention_mask=None)

    return dict(zip(PARTS, (whole_layer, attention, layer.mlp), strict=True))


def through(
    parts: Sequence[Callable[[Tensor], Tensor]],
    hidden: Tensor,
    around: Callable[[], AbstractContextManager[None]],
) -> tuple[float, float]:
    """Return the seconds for each part, forward and backward. Gradients accumulate, as in a later microbatch.

    Args:
        parts: the parts, called in sequence.
        hidden: the input of the first part.
        around: the context of the backward.
    """
    start = process_time()
    for module in parts:
        hidden = module(hidden)
    forward = process_time() - start
    gradient = hidden.detach()
    with around():
        start = process_time()
        hidden.backward(gradient)
        backward = process_time() - start
    return forward / len(parts), backward / len(parts)


# Actions of a pipeline, and the rest of a step.


def engine_works(style: str, num_microbatches: int) -> Works:
    """Return for each engine a function that runs a batch on the first rank of a pipeline of tiny stages."""
    mesh = ParallelMesh(pp=RANKS)

    def work(engine: Any) -> tuple[float]:
        start = process_time()
        engine.step()
        seconds = process_time() - start
        engine.forget()
        return (seconds / (2 * num_microbatches),)

    return {name: partial(work, make(style, mesh, num_microbatches)) for name, make in ENGINES.items()}


def step_works(workload: Workload) -> Works:
    """Return for each data-parallel contender a function that trains a step of a model of 300 parameters."""
    many = replace(workload, layers=STEPPED_LAYERS, hidden=STEPPED_HIDDEN, microbatches=1)
    makers: dict[str, Callable[[], Any]] = contender_makers(many, default_device())
    del makers[TorchZero.name]  # it receives shards from other ranks
    contenders = [OneProcess(many, default_device(), works=True), *(make() for make in makers.values())]
    for contender in contenders:
        if contender.name == TorchDDP.name:
            contender.model.register_comm_hook(None, summed)
    return {contender.name: partial(trained, contender) for contender in contenders}


def summed(_: None, bucket: dist.GradBucket) -> Future[Tensor]:
    """Sum gradients for DDP: the fake group returns no result for DDP's own sum."""
    dist.all_reduce(bucket.buffer(), async_op=True)
    done: Future[Tensor] = Future()
    done.set_result(bucket.buffer())
    return done


def trained(contender: DataParallel | OneProcess) -> tuple[float, float]:
    """Return the seconds of forward and backward, and of the optimizer's step with `zero_grad`."""
    start = process_time()
    contender.compute()
    middle = process_time()
    contender.update()
    end = process_time()
    return middle - start, end - middle


# Results.


def summary(results: Mapping[str, Any], workload: Workload) -> dict[str, Any]:
    """Return medians in milliseconds, for layers also the time added to transformers', and the last line's results."""
    layers = {
        module: {
            name: {**medians(seconds, ("forward", "backward")), **added(seconds, by_contender[PLAIN])}
            for name, seconds in by_contender.items()
        }
        for module, by_contender in results["layers"].items()
    }
    engines = {
        style: {name: medians(seconds, ("action",)) for name, seconds in by_contender.items()}
        for style, by_contender in results["engines"].items()
    }
    steps = {
        name: medians(seconds, ("forward and backward", "step")) for name, seconds in results["steps"].items()
    }
    ours = layers["layer"][OURS]
    return {
        "layers": layers,
        "engines": engines,
        "steps": steps,
        "last": {
            "layer_forward_ms": ours["added forward"],
            "layer_backward_ms": ours["added backward"],
            "ratio_to_dtensor": ratio_of_added(results["layers"]["layer"]),
            "step_ms": steps[STEPPED]["step"],
        },
    }


def medians(seconds: Sequence[Sequence[float]], names: Sequence[str]) -> dict[str, float]:
    """Return the median of each part, in milliseconds."""
    return {name: median(phase) * 1e3 for name, phase in zip(names, zip(*seconds, strict=True), strict=True)}


def added(seconds: Sequence[Sequence[float]], plain: Sequence[Sequence[float]]) -> dict[str, float]:
    """Return the median of the time that a round adds to the same round of plain layers, in milliseconds."""
    more = [
        [ours - theirs for ours, theirs in zip(*both, strict=True)]
        for both in zip(seconds, plain, strict=True)
    ]
    return medians(more, ("added forward", "added backward"))


def ratio_of_added(seconds: Seconds) -> float:
    """Return the median of the rounds' ratios of the times that Echelon and DTensor add, forward plus backward."""
    rounds = zip(*(map(sum, seconds[name]) for name in (OURS, DTENSOR, PLAIN)), strict=True)
    return median((ours - plain) / (theirs - plain) for ours, theirs, plain in rounds)


def show(summarized: Mapping[str, Any], note: str) -> None:
    """Print the tables, in milliseconds."""
    for module, rows in summarized["layers"].items():
        table(f"{module}, on one of {RANKS} ranks", rows, note)
    for style, rows in summarized["engines"].items():
        table(f"pipeline engine, {style}, forward or backward of a microbatch in a stage", rows, note)
    table(f"a model of {STEPPED_PARAMETERS} parameters on one of {RANKS} replicas", summarized["steps"], note)


def table(title: str, rows: Mapping[str, Mapping[str, float]], note: str) -> None:
    """Print one table."""
    columns = list(next(iter(rows.values())))
    cells = [[name, *(f"{value:.3f}" for value in row.values())] for name, row in rows.items()]
    report.show(f"{title}, ms", ["contender", *columns], cells, note=note)


if __name__ == "__main__":
    main()
