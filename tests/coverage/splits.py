"""Splits over the tensor axis of every model type that trains in a plain loop: what proposes them, or the refusal.

    python -m tests.coverage.splits [--part 3/16] [--only TYPE ...] [--failed] [--jobs 2]

One process per type, which plans the split over two ranks as boost does: that of a table is checked on a meta copy of
the default config, any other is tried on two threads with a small copy beside the whole one, in float64. The rows of
build/coverage/splits.jsonl go into the page, too.
"""

import time
from typing import Any

from .records import run_options, run_types

CPU_SECONDS, WALL_SECONDS, MEMORY = 90, 400, 12 << 30


def split(model_type: str) -> dict[str, Any]:
    """Return the row of a model type: what splits its layers over two ranks, or why nothing does."""
    from echelon.shardformer import policy_for
    from echelon.shardformer.sharder import split_errors
    from echelon.shardformer.tables.table import table_for

    from .stages import meta_model

    model = meta_model(model_type)
    started = time.process_time()
    policy = policy_for(model)
    errors = split_errors(model, policy, tp_size=2)
    seconds = round(time.process_time() - started, 1)
    if errors:  # behind those of transformers' plan, that of the trial
        return {"split": "refused", "why": errors[-1]}
    if table_for(model.config.model_type) is not None:
        return {"split": "table"}
    is_proposed = vars(policy)["_is_proposed"]
    return {"split": "proposed" if is_proposed else "transformers' plan", "seconds": seconds}


if __name__ == "__main__":
    options = run_options(__doc__)
    run_types("splits", split, options, cpu_seconds=CPU_SECONDS, wall_seconds=WALL_SECONDS, memory=MEMORY)
