r"""Time to save a run, compared with torch.distributed.checkpoint of the same bytes, and its cost for training.

    python benchmarks/checkpoint.py --json checkpoint.json
    python benchmarks/checkpoint.py --layouts tp2 --folder /mnt/fast

Every round saves the run of each layout once in each way, in a rotating order: by torch alone, by Echelon, and by
Echelon in the background of training steps. A ratio is the median of the rounds' ratios. Run it on an idle machine.
"""

import argparse
import shutil
import tempfile
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from statistics import median
from typing import Any

import report
import torch.distributed as dist
from arguments import common_parser, parse, settings_of, workload_of
from checkpoint_training import SavedTraining
from launch import enter
from rounds import Clock, step

from echelon.cluster.device import default_device

LAYOUTS: dict[str, dict[str, Any]] = {
    "dp2 zero1": {"tp_size": 1, "pp_size": 1, "zero_stage": 1},
    "tp2": {"tp_size": 2, "pp_size": 1},
}
RANKS = 2
PLAIN, SAVED, STALL, SLOWER, DONE = "plain", "saved", "stall", "slower steps", "until done"
_SAME_BYTES = 0.02  # relative to the bytes of tensors: the size of indices and archives


def parse_arguments() -> argparse.Namespace:
    parser = common_parser(__doc__)
    parser.add_argument("--layouts", nargs="+", choices=list(LAYOUTS), default=list(LAYOUTS))
    parser.add_argument("--folder", help="where to save; a folder of the system's by default")
    return parse(parser)


def main() -> None:
    arguments = parse_arguments()
    enter(RANKS, option="the benchmark on", matmul=arguments.matmul)
    results: dict[str, Any] = {"machine": report.machine(), "settings": settings_of(arguments), "layouts": {}}
    for name in arguments.layouts:
        results["layouts"][name] = measure_layout(name, arguments)
    if dist.get_rank() == 0:
        show_results(results, arguments)
    dist.destroy_process_group()


def measure_layout(name: str, arguments: argparse.Namespace) -> dict[str, Any]:
    """Return the seconds of every round by measurement, of the slowest rank, and the bytes. Collective."""
    training = SavedTraining(name, workload_of(arguments, microbatches=1), **LAYOUTS[name])
    clock = Clock(default_device())
    folders = [tempfile.mkdtemp(dir=arguments.folder) if dist.get_rank() == 0 else ""]
    dist.broadcast_object_list(folders)
    folder = Path(folders[0])
    try:
        measured = rounds_of(training, clock, folder, arguments)
        measured["bytes"] = require_same_bytes(training, folder)
    finally:
        clean(folder, again=False)
    return measured


def rounds_of(
    training: SavedTraining, clock: Clock, folder: Path, arguments: argparse.Namespace
) -> dict[str, Any]:
    """Run the rounds of `measure_layout`."""
    ways: list[Callable[[], dict[str, float]]] = [
        lambda: {PLAIN: clock.time(lambda: training.save_plainly(folder))},
        lambda: {SAVED: clock.time(lambda: training.save(folder, use_async=False).wait())},
        lambda: beside(training, clock, folder),
    ]
    local_seconds: dict[str, list[float]] = {name: [] for name in (PLAIN, SAVED, STALL, SLOWER, DONE)}
    for number in range(-arguments.warmup, arguments.rounds):
        for turn in range(len(ways)):
            times = ways[(turn + number) % len(ways)]()
            clean(folder)
            if number >= 0:
                for what, seconds in times.items():
                    local_seconds[what].append(seconds)
    return dict(zip(local_seconds, clock.slowest(list(local_seconds.values())), strict=True))


def beside(training: SavedTraining, clock: Clock, folder: Path) -> dict[str, float]:
    """Save in the background of training. Return how long training stops, and how much its steps slow down."""
    usual = median(clock.time(lambda: step(training)) for _ in range(3))
    saves = []
    stall = clock.time(lambda: saves.append(training.save(folder, use_async=True)))
    slower = total = 0.0
    while not everywhere(saves[0].done):
        seconds = clock.time(lambda: step(training))
        slower, total = slower + max(0.0, seconds - usual), total + seconds
    saves[0].wait()
    return {STALL: stall, SLOWER: slower, DONE: stall + total}


def everywhere(is_done: bool) -> bool:
    """Return True if all ranks are done. Collective over the world."""
    every: list[bool] = [False] * dist.get_world_size()
    dist.all_gather_object(every, is_done)
    return all(every)


def require_same_bytes(training: SavedTraining, folder: Path) -> dict[str, int]:
    """Save both ways once more, and compare the sizes of the files.

    Raises:
        ValueError: one is larger by more than a fiftieth.
    """
    sizes = {}
    for name, save in (
        (PLAIN, training.save_plainly),
        (SAVED, lambda at: training.save(at, use_async=False).wait()),
    ):
        save(folder)
        sizes[name] = sum(path.stat().st_size for path in folder.rglob("*") if path.is_file())
        clean(folder)
    if max(sizes.values()) > (1 + _SAME_BYTES) * min(sizes.values()) and min(sizes.values()) > 2**24:
        raise ValueError(f"the ways do not save the same: {sizes} bytes")
    return sizes


def clean(folder: Path, *, again: bool = True) -> None:
    """Remove the saved files. Collective over the world."""
    dist.barrier()
    if dist.get_rank() == 0:
        shutil.rmtree(folder)
        if again:
            folder.mkdir()
    dist.barrier()


def ratios(seconds: Mapping[str, Sequence[float]]) -> dict[str, float]:
    """Return the medians of the rounds' ratios to torch's own save."""
    return {name: report.ratio(seconds[name], seconds[PLAIN]) for name in (SAVED, STALL, SLOWER, DONE)}


def show_results(results: dict[str, Any], arguments: argparse.Namespace) -> None:
    """Print the tables and the last line; write the requested file."""
    for layout, measured in results["layouts"].items():
        measured["ratios"] = ratios(measured)
        rows = []
        for name in (PLAIN, SAVED, STALL, SLOWER, DONE):
            quartiles = " – ".join(f"{quartile * 1e3:.1f}" for quartile in report.spread(measured[name]))
            to_plain = f"{measured['ratios'].get(name, 1.0):.3f}"
            rows.append([name, f"{median(measured[name]) * 1e3:.1f}", quartiles, to_plain])
        note = report.conditions(results["machine"], arguments.rounds)
        title = f"{workload_of(arguments, microbatches=1)}, {layout}, {measured['bytes'][SAVED] / 1e6:.0f} MB"
        report.show(title, ["", "median ms", "quartiles ms", "to plain"], rows, note=note)
    if arguments.json is not None:
        report.write_json(arguments.json, results)
    worst = {
        name: max(measured["ratios"][name] for measured in results["layouts"].values())
        for name in (SAVED, STALL, SLOWER)
    }
    print(" ".join(f"{name.replace(' ', '_')}_to_plain={ratio:.3f}" for name, ratio in worst.items()))


if __name__ == "__main__":
    main()
