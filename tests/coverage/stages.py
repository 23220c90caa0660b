"""Pipeline stages of every model type that trains in a plain loop: a table, a proven derivation, or the refusal.

    python -m tests.coverage.stages [--part 3/16] [--only TYPE ...] [--failed] [--jobs 2]

One process per type, for which `derive/` runs the stages of a small copy in this process beside the whole copy, as
boost does. The rows of build/coverage/stages.jsonl go into the page, too.
"""

import argparse
import json
import time
import warnings
from typing import Any

from .page import DATA, make_page
from .records import Records, released, run_each, warmed

CPU_SECONDS, WALL_SECONDS, MEMORY = 60, 300, 12 << 30


def staged(model_type: str) -> dict[str, Any]:
    """Return the row of a model type: what places its layers on stages, or why nothing does."""
    import torch
    import transformers

    from echelon.derive.build import small_copy
    from echelon.derive.plans import stage_plan_of
    from echelon.derive.tasks import tasks_of
    from echelon.shardformer.tables.table import table_for

    if table_for(model_type) is not None:
        return {"stages": "table"}
    task, name = next(iter(tasks_of(model_type).items()))
    config, kind = transformers.CONFIG_MAPPING[model_type](), getattr(transformers, name)
    try:
        with torch.device("meta"):
            model = kind(config)
    except Exception:  # a constructor that reads values: the sizes are then those of a small copy
        model = small_copy(kind, config, task).model
    started = time.process_time()
    try:
        plan = stage_plan_of(model)
    except ValueError as error:
        return {"stages": "refused", "why": str(error)}
    finally:
        seconds = round(time.process_time() - started, 1)
    names = ("entry", "leading", "everywhere", "sent")
    around = {each: [*getattr(plan, each)] for each in names if getattr(plan, each)}
    around |= {"encoder": plan.encoder.layers} if plan.encoder else {}
    around |= {"carried": plan.carried.num_tensors} if plan.carried else {}
    return {"stages": "derived", "layers": plan.layers, "arity": plan.arity, "seconds": seconds, **around}


def main() -> None:
    """Derive for the types of a part, and make the page."""
    warnings.filterwarnings("ignore")
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--part", default="1/1")
    parser.add_argument("--only", nargs="*", default=[])
    parser.add_argument("--failed", action="store_true", help="try those again that were refused")
    parser.add_argument("--jobs", type=int, default=2)
    options = parser.parse_args()
    number, count = map(int, options.part.split("/"))
    records = Records("stages", released())
    done = {each for each, row in records.rows.items() if row["stages"] != "refused" or not options.failed}
    known = json.loads(DATA.read_text())["rows"]
    trained = [row["type"] for row in known if row.get("trains") and not row.get("convolutional")]
    types = options.only or [each for each in trained[number - 1 :: count] if each not in done]
    warmed()
    limits = {"cpu_seconds": CPU_SECONDS, "wall_seconds": WALL_SECONDS, "memory": MEMORY}
    for model_type, row in run_each(staged, types, jobs=options.jobs, **limits):
        if "reason" in row:
            row = {"stages": "refused", "why": row["reason"]}
        records.add({"type": model_type} | row)
        print(model_type, row["stages"], row.get("why", row)[:200] if "why" in row else "", flush=True)
    print(make_page(stages=records.rows))


if __name__ == "__main__":
    main()
