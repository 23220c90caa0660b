"""The parity check of model types that only derivation supports, under pp2 on two processes: a sample drawn by date.

    python -m tests.coverage.sample [--date 2026-11-26] [--count 40] [--only TYPE ...]

The types are drawn from all that train in a plain loop and have no table. A row is "agrees", "refused" with the reason,
or "departs": a silent departure, of which there must be none. A run that was ended goes on.
"""

import argparse
import json
import random
import time
import warnings
from collections.abc import Sequence
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import torch.distributed as dist

from .page import DATA, make_page
from .records import Records, released

TIMEOUT = 60.0


def compared(model_type: str) -> dict[str, Any]:
    """Return the row of a model type. Collective over the world of two ranks."""
    from echelon.cli.verify import sharding_errors
    from echelon.verify.layout_choice import Layout
    from echelon.verify.model_choice import ModelChoice
    from echelon.verify.parity import parity

    choice, layout = ModelChoice(model_type=model_type), Layout(pp=2)
    if errors := choice.errors() or sharding_errors(choice, layout.config):
        return {"pp2": "refused", "why": errors[0]}
    report = parity(choice, layout)
    worst = max(step.measure("gradient").distance for step in report.steps)
    found = {"gradient": worst, "loss": max(step.measure("loss").distance for step in report.steps)}
    return (
        {"pp2": "agrees", **found} if report.agrees else {"pp2": "departs", "why": report.departure, **found}
    )


def compare_all(rank: int, types: Sequence[str], about: dict[str, str], folder: Path) -> None:
    """Compare types one after the other; rank 0 records each. Collective over the world."""
    warnings.filterwarnings("ignore")
    records = Records("sample", about, folder)
    for model_type in types:
        started = time.time()
        if rank == 0:
            (folder / "sample.now").write_text(model_type)
        row = compared(model_type)
        if rank == 0:
            records.add({"type": model_type} | row | {"seconds": round(time.time() - started, 1)})
            print(model_type, row["pp2"], row.get("why", row.get("gradient")), flush=True)
        dist.barrier()


def drawn(date: str, count: int) -> list[str]:
    """Return the types of a date."""
    from echelon.verify.model_choice import ModelChoice

    known = json.loads(DATA.read_text())["rows"]
    new = [
        row["type"]
        for row in known
        if row.get("trains")
        and not row.get("convolutional")
        and ModelChoice(model_type=row["type"]).is_generic
    ]
    return random.Random(date).sample(new, min(count, len(new)))


def main() -> None:
    """Compare the drawn types, and make the page."""
    from echelon.cli.local_processes import run_on_processes

    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--date", default=datetime.now(UTC).strftime("%Y-%m-%d"))
    parser.add_argument("--count", type=int, default=40)
    parser.add_argument("--only", nargs="*", default=[])
    options = parser.parse_args()
    about = released()
    records = Records("sample", about)
    wanted = options.only or drawn(options.date, options.count)
    records.path.parent.mkdir(parents=True, exist_ok=True)
    while types := [each for each in wanted if each not in records.rows]:
        arguments = (types, about, records.path.parent)
        answer = run_on_processes(compare_all, arguments, num_processes=2, timeout_seconds=TIMEOUT)
        records = Records("sample", about)
        if isinstance(answer, str):  # an error of one type ends the processes: go on with the next
            now = (records.path.parent / "sample.now").read_text()
            records.add({"type": now, "pp2": "fails", "why": answer.strip().splitlines()[-1][:300]})
            print(now, "fails", answer[-600:], flush=True)
    print(make_page(sample=records.rows))


if __name__ == "__main__":
    main()
