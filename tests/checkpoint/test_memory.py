"""No rank gathers a model or an optimizer: saving, loading and comparing need memory for one or two tensors more.

Anonymous memory is measured, since the kernel may evict pages of mapped files.
"""

import ctypes
import json
import sys
from pathlib import Path
from typing import Any

import pytest
import torch.distributed as dist

from echelon.checkpoint.difference import Comparison
from echelon.checkpoint.inspection import examine, open_folder

from .failures import anonymous_peak as peak
from .failures import in_warm_process, run_ranks
from .handmade import Handmade, small_config
from .runs import Run, config_of

MEBI = 2**20
# 39 MiB of float32 weights, the largest of 8 MiB, and twice as much of states.
SIZES = dict(vocab_size=8192, hidden_size=256, intermediate_size=1024, num_hidden_layers=6)
LARGEST, EVERYTHING = 8 * MEBI, 3 * 39 * MEBI
FEW = 1.5 * LARGEST + 4 * MEBI  # a written tensor, half of a sent one; stacks, pickled plans
CHUNKS = 64 * MEBI  # a compared chunk of 1 Mi entries, with float64 temporaries
_MMAP_THRESHOLD, _TRIM_THRESHOLD = -3, -1  # parameters of mallopt(3)

needs_proc = pytest.mark.skipif(sys.platform != "linux", reason="anonymous memory is read from /proc")


def free_at_once() -> None:
    library = ctypes.CDLL(None)
    for threshold in (_MMAP_THRESHOLD, _TRIM_THRESHOLD):
        library.mallopt(threshold, 65536)


def measure(folder: Path, world: int, layout: dict[str, Any]) -> None:
    """Write the peaks of every rank to `folder/RANK-save.json` and `-load.json`. Must run in a warm process."""
    for work in (save, load):
        assert run_ranks(world, work, folder, layout) == [0] * world


def run_of(folder: Path, layout: dict[str, Any], seed: int) -> Run:
    """Make a run, after code and libraries have allocated their memory."""
    free_at_once()
    small = Run(config_of(), **layout)
    small.step(0)
    small.booster.save_checkpoint(folder / "small", 1, **small.everything, use_async=True).wait()
    small.booster.load_checkpoint(folder / "small", **small.everything)
    small.booster.save_model(small.model, folder / "small" / "m", shard=True)
    run = Run(config_of(**SIZES), seed=seed, **layout)
    dist.barrier()
    return run


def save(folder: Path, layout: dict[str, Any]) -> None:
    run = run_of(folder, layout, 0)
    run.step(0)

    def save_step(step: int, **options: Any) -> None:
        options |= run.everything
        run.booster.save_checkpoint(folder / "steps", step, size_per_shard=16, **options).wait()

    peaks = {
        "save": peak(lambda: save_step(1)),
        "async": peak(lambda: save_step(2, use_async=True)),
        "model": peak(lambda: run.booster.save_model(run.model, folder / "m", shard=True, size_per_shard=16)),
    }
    (folder / f"{dist.get_rank()}-save.json").write_text(json.dumps(peaks))


def load(folder: Path, layout: dict[str, Any]) -> None:
    run = run_of(folder, layout, 7)
    peak_bytes = peak(lambda: run.booster.load_checkpoint(folder / "steps", **run.everything))
    states = sum(2 * piece.key.nbytes for piece in run.booster.plugin.trained(run.optimizer).pieces)
    (folder / f"{dist.get_rank()}-load.json").write_text(json.dumps({"load": peak_bytes, "states": states}))


@pytest.mark.slow
@needs_proc
@pytest.mark.parametrize(
    ("world", "layout"), [(4, {"tp_size": 2, "pp_size": 2}), (2, {"zero_stage": 1})], ids=str
)
def test_saving_and_loading_need_little_beyond_local_shards(tmp_path: Path, world: int, layout: Any) -> None:
    in_warm_process(measure, tmp_path, world, layout, seconds=250)
    for rank in range(world):
        peaks: dict[str, int] = {}
        for kind in ("save", "load"):
            peaks |= json.loads((tmp_path / f"{rank}-{kind}.json").read_text())
        print(f"rank {rank}:", *(f"{name} {size / MEBI:.1f} MiB" for name, size in peaks.items()))
        assert peaks["save"] <= FEW and peaks["model"] <= FEW
        assert LARGEST <= peaks["async"] <= 1.1 * EVERYTHING / world + FEW
        assert peaks["load"] <= peaks["states"] + FEW


def compare(folder: Path) -> None:
    free_at_once()
    opened = open_folder(folder)
    examine(folder, progress=lambda _: None)  # imports, allocators
    peak_bytes = peak(lambda: list(Comparison(opened, opened).differences(lambda _: None)))
    assert 0 < peak_bytes <= CHUNKS, f"{peak_bytes / MEBI:.1f} MiB"


@pytest.mark.slow
@needs_proc
def test_comparing_needs_the_memory_of_a_chunk(tmp_path: Path) -> None:
    """26 tensors of 1 Mi entries: 52 MiB of weights and 104 MiB of each state; embedding and head are small."""
    sizes = dict(hidden_size=1024, intermediate_size=1024, num_hidden_layers=4, num_key_value_heads=2)
    folder = Handmade.of(small_config(**sizes)).write(tmp_path)
    assert sum(path.stat().st_size for path in folder.rglob("*") if path.is_file()) > 250 * MEBI
    in_warm_process(compare, folder, seconds=100)
