"""Pipeline stages of every model type that trains in a plain loop: a table, a proven derivation, or the refusal.

    python -m tests.coverage.stages [--part 3/16] [--only TYPE ...] [--failed] [--jobs 2]

One process per type, for which `derive/` runs the stages of a small copy in this process beside the whole copy, as
boost does. The rows of build/coverage/stages.jsonl go into the page, too.
"""

import time
from typing import Any

from .records import run_options, run_types

CPU_SECONDS, WALL_SECONDS, MEMORY = 60, 300, 12 << 30


def staged(model_type: str) -> dict[str, Any]:
    """Return the row of a model type: what places its layers on stages, or why nothing does."""
    from echelon.derive.plans import stage_plan_of
    from echelon.shardformer.tables.table import table_for

    if table_for(model_type) is not None:
        return {"stages": "table"}
    model = meta_model(model_type)
    started = time.process_time()
    try:
        plan = stage_plan_of(model)
    except ValueError as error:
        return {"stages": "refused", "why": str(error)}
    finally:
        seconds = round(time.process_time() - started, 1)
    names = ("entry", "leading", "everywhere", "sent")
    around = {name: [*getattr(plan, name)] for name in names if getattr(plan, name)}
    around |= {"encoder": plan.encoder.layers} if plan.encoder else {}
    around |= {"carried": plan.carried.num_tensors} if plan.carried else {}
    return {"stages": "derived", "layers": plan.layers, "arity": plan.arity, "seconds": seconds, **around}


def on_meta(kind: Any, config: Any) -> Any:
    """Return a model on the meta device; None if its constructor reads values."""
    import torch

    try:
        with torch.device("meta"):
            return kind(config)
    except Exception:  # of any type of model
        return None


def meta_model(model_type: str) -> Any:
    """Return the usual model of a type on the meta device: in its default size, or as a small copy."""
    import transformers

    from echelon.derive.build import small_copy
    from echelon.derive.tasks import tasks_of

    task, name = next(iter(tasks_of(model_type).items()))
    config, kind = transformers.CONFIG_MAPPING[model_type](), getattr(transformers, name)
    return on_meta(kind, config) or small_copy(kind, config, task).model


if __name__ == "__main__":
    options = run_options(__doc__)
    run_types("stages", staged, options, cpu_seconds=CPU_SECONDS, wall_seconds=WALL_SECONDS, memory=MEMORY)
