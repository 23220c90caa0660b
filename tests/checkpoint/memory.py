"""The most memory that saving and loading need, of processes that free what they free at once."""

import ctypes
import gc
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch.distributed as dist

from .failures import run_ranks
from .runs import Run, config_of

MEBI = 2**20
# 39 MiB of weights in float32, the largest of them 8 MiB, and twice as much of states.
SIZES = {
    "vocab_size": 8192,
    "hidden_size": 256,
    "intermediate_size": 1024,
    "num_hidden_layers": 6,
    "num_attention_heads": 4,
}
LARGEST, EVERYTHING = 8 * MEBI, 3 * 39 * MEBI
_MMAP_THRESHOLD, _TRIM_THRESHOLD = -3, -1  # of mallopt(3)
_SMALL = 65536


def measure(folder: Path, world: int, layout: dict[str, Any]) -> None:
    """Peaks of every rank above what it holds, in `folder/RANK.json`. To be called in a process that may be forked."""
    assert run_ranks(world, _save, folder, layout) == [0] * world
    assert run_ranks(world, _load, folder, layout) == [0] * world


def found(folder: Path, world: int) -> list[dict[str, int]]:
    """What each rank measured, in bytes."""
    return [
        json.loads((folder / f"{rank}-save.json").read_text())
        | json.loads((folder / f"{rank}-load.json").read_text())
        for rank in range(world)
    ]


def _save(folder: Path, layout: dict[str, Any]) -> None:
    _free_at_once()
    _load_code(folder / "small", layout)
    run = Run(config_of(**SIZES), **layout)
    run.step(0)

    def save(step: int, **options: Any) -> None:
        run.booster.save_checkpoint(
            folder / "steps", step, **run.everything, size_per_shard=16, **options
        ).wait()

    peaks = {
        "save": _peak(lambda: save(1)),
        "async": _peak(lambda: save(2, use_async=True)),
        "model": _peak(
            lambda: run.booster.save_model(run.model, folder / "m", shard=True, size_per_shard=16)
        ),
    }
    _tell(folder, "save", peaks)


def _load(folder: Path, layout: dict[str, Any]) -> None:
    _free_at_once()
    _load_code(folder / "small", layout)
    run = Run(config_of(**SIZES), seed=7, **layout)
    peak = _peak(lambda: run.booster.load_checkpoint(folder / "steps", **run.everything))
    states = sum(2 * piece.key.nbytes for piece in run.booster.plugin.trained(run.optimizer).pieces)
    _tell(folder, "load", {"load": peak, "states": states})


def _load_code(folder: Path, layout: dict[str, Any]) -> None:
    """Do all of it once, so that the memory of code and libraries is there before."""
    small = Run(config_of(), **layout)
    small.step(0)
    small.booster.save_checkpoint(folder, 1, **small.everything, use_async=True).wait()
    small.booster.load_checkpoint(folder, **small.everything)
    small.booster.save_model(small.model, folder / "m", shard=True)


def _peak(work: Callable[[], object]) -> int:
    """The most resident memory above what there is before; files of other processes' pages included."""
    gc.collect()
    dist.barrier()
    before = _status("VmRSS")
    Path("/proc/self/clear_refs").write_text("5")
    work()
    return _status("VmHWM") - before


def _status(name: str) -> int:
    lines = Path("/proc/self/status").read_text().splitlines()
    return next(int(line.split()[1]) * 1024 for line in lines if line.startswith(name))


def _tell(folder: Path, name: str, numbers: dict[str, int]) -> None:
    (folder / f"{dist.get_rank()}-{name}.json").write_text(json.dumps(numbers))


def _free_at_once() -> None:
    library = ctypes.CDLL(None)
    library.mallopt(_MMAP_THRESHOLD, _SMALL)
    library.mallopt(_TRIM_THRESHOLD, _SMALL)
