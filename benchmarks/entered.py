"""Print the files and functions of Echelon that boost and one warm training step enter, by layout.

python benchmarks/entered.py            # counts
python benchmarks/entered.py --list     # and the names

Four processes train a small Llama. A function counts if any rank enters it; the body of a module does not count.
"""

import argparse
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from types import CodeType, FrameType
from typing import Any

import torch
import torch.distributed as dist
from launch import enter
from transformers import LlamaConfig, LlamaForCausalLM

import echelon
from echelon import Booster, HybridParallelPlugin

ROOT = Path(echelon.__file__).resolve().parent
LAYOUTS: dict[str, dict[str, int]] = {
    "tp2·pp2": {"tp_size": 2, "pp_size": 2},
    "pp2·dp2·zero1": {"tp_size": 1, "pp_size": 2, "zero_stage": 1},
    "tp2·dp2·zero2": {"tp_size": 2, "pp_size": 1, "zero_stage": 2},
}
WARM = 3  # steps before the measured one: the first ones record orders that later ones use
Entered = set[tuple[str, str]]


@contextmanager
def recorded() -> Iterator[Entered]:
    """Collect (file, function) of every call into Echelon, in all threads."""
    codes: set[CodeType] = set()

    def note(frame: FrameType, event: str, argument: Any) -> None:
        if event == "call":
            codes.add(frame.f_code)

    entered: Entered = set()
    threading.setprofile(note)
    sys.setprofile(note)
    try:
        yield entered
    finally:
        sys.setprofile(None)
        threading.setprofile(None)  # type: ignore[arg-type]
        for code in codes:
            path = Path(code.co_filename).resolve()
            if path.suffix != ".py" or code.co_name == "<module>" or "site-packages" in path.parts:
                continue
            if path.is_relative_to(ROOT):
                name = getattr(code, "co_qualname", f"{code.co_name}:{code.co_firstlineno}")
                entered.add((str(path.relative_to(ROOT)), name))
        entered.difference_update([call for call in entered if call[0].startswith("benchmarks/")])


def trained(layout: dict[str, int]) -> tuple[Entered, Entered]:
    """Return the functions that boost enters on this rank, and those of the step after `WARM` others."""
    torch.manual_seed(0)
    model = LlamaForCausalLM(
        LlamaConfig(
            vocab_size=64,
            hidden_size=32,
            intermediate_size=64,
            num_hidden_layers=4,
            num_attention_heads=4,
            use_cache=False,
        )
    )
    optimizer: Any = torch.optim.AdamW(model.parameters(), lr=1e-3)
    plugin = HybridParallelPlugin(precision="fp32", num_microbatches=2, max_norm=1.0, **layout)  # type: ignore[arg-type]
    booster = Booster(plugin=plugin)
    with recorded() as boosting:
        boosted, optimizer, *_ = booster.boost(model, optimizer)

    def step() -> None:
        numbers = torch.randint(64, (4, 16), generator=torch.Generator().manual_seed(0))
        batch = {"input_ids": numbers, "labels": numbers}
        booster.execute_pipeline(iter([batch]), boosted, optimizer=optimizer)
        optimizer.step()
        optimizer.zero_grad()

    for _ in range(WARM):
        step()
    with recorded() as stepping:
        step()
    return boosting, stepping


def times_num_ranks(local: Entered) -> Entered:
    """Return the union over the ranks. Collective."""
    entered_by_rank: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(entered_by_rank, local)
    return set().union(*entered_by_rank)


def lines_in(entered: Entered) -> int:
    """Count all lines of the entered files."""
    return sum((ROOT / path).read_text().count("\n") for path in {path for path, _ in entered})


def described(name: str, entered: Entered, *, is_listed: bool) -> list[str]:
    """Return a line of the table, and on request the functions of each file."""
    files = sorted({path for path, _ in entered})
    lines = [f"| {name} | {len(files)} | {len(entered)} | {lines_in(entered):,} |"]
    if is_listed:
        lines += [
            f"    {path}: {', '.join(sorted(function for entered_path, function in entered if entered_path == path))}"
            for path in files
        ]
    return lines


def main() -> None:
    """Train under each layout and print the table."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--list", action="store_true", help="list the functions")
    arguments = parser.parse_args()
    enter(4, option="processes", matmul="highest")
    lines = ["| | files | functions | lines of those files |", "|---|---|---|---|"]
    boosts: Entered = set()
    steps: Entered = set()
    for name, layout in LAYOUTS.items():
        boosting, stepping = (times_num_ranks(local) for local in trained(layout))
        boosts |= boosting
        steps |= stepping
        lines += described(f"boost, {name}", boosting, is_listed=arguments.list)
        lines += described(f"warm step, {name}", stepping, is_listed=arguments.list)
    lines += described("boost, all three", boosts, is_listed=False)
    lines += described("warm step, all three", steps, is_listed=False)
    lines += described("both", boosts | steps, is_listed=False)
    if dist.get_rank() == 0:
        sys.stdout.write("\n".join(lines) + "\n")
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
