"""The model types of transformers that train in a plain loop, from a small config: what coverage is a share of.

    python -m tests.coverage.plain [--part 3/16] [--only TYPE ...] [--jobs 2]

One process per type, with a limit of CPU time and memory. A finished type is a line of build/coverage/plain.jsonl, and
is skipped when the script goes on; all lines together make docs/coverage.json and docs/coverage.md. A type trains if
its loss is finite, has gradients, and is another one after a step of SGD. Nothing of Echelon is used but its small
copies of models (derive/), which import nothing of it.
"""

import os
import time
import warnings
from typing import Any

import torch

from .page import make_page
from .records import Records, released, run_each, run_options, warmed
from .stages import on_meta

CPU_SECONDS, WALL_SECONDS, MEMORY = 90, 300, 12 << 30


def trained(model_type: str) -> dict[str, Any]:
    """Return the row of a model type: its usual class, and if it trains or why it does not."""
    import transformers

    from echelon.derive.build import described, small_copy
    from echelon.derive.tasks import tasks_of

    task, name = next(iter(tasks_of(model_type).items()))
    row: dict[str, Any] = {}
    started = time.process_time()
    try:
        config = transformers.CONFIG_MAPPING[model_type]()
        copy = small_copy(getattr(transformers, name), config, task)
    except Exception as error:  # of any type of model
        return row | {"reason": str(error) if isinstance(error, ValueError) else described(error)}
    parameters = [parameter for parameter in copy.model.parameters() if parameter.requires_grad]
    row |= {
        "inputs": sorted(copy.batch),
        "parameters": sum(parameter.numel() for parameter in parameters),
        "convolutional": _convolutional_share(on_meta(type(copy.model), config) or copy.model) > 0.5,
    }
    try:
        loss = copy.loss()
        loss.backward()
        before = loss.detach()
        learned = [parameter for parameter in parameters if parameter.grad is not None]
        row["unused"] = len(parameters) - len(learned)
        norm = torch.stack([parameter.grad.double().norm() for parameter in learned]).norm()
        if not (torch.isfinite(before) and torch.isfinite(norm) and norm > 0):
            return row | {"reason": f"loss {float(before)}, norm of the gradients {float(norm)}"}
        for parameter in learned:
            parameter.data -= parameter.grad * (0.05 / max(float(norm), 1e-6))
        after = copy.loss().detach()
    except Exception as error:  # of any type of model
        return row | {"reason": described(error)}
    row["seconds"] = round(time.process_time() - started, 1)
    if not torch.isfinite(after) or float(after) == float(before):
        return row | {"reason": f"loss {float(before)} is {float(after)} after a step"}
    return row | {"trains": True}


def _convolutional_share(model: torch.nn.Module) -> float:
    kinds = (torch.nn.Conv1d, torch.nn.Conv2d, torch.nn.Conv3d)
    inside = [module.weight.numel() for module in model.modules() if isinstance(module, kinds)]
    return sum(inside) / max(1, sum(parameter.numel() for parameter in model.parameters()))


def main() -> None:
    """Try the types of a part, and make the page if all have been tried."""
    os.environ.setdefault("HF_HUB_OFFLINE", "1")
    warnings.filterwarnings("ignore")
    from echelon.derive.tasks import family_of, model_types, tasks_of

    options = run_options(__doc__)
    number, count = options.part
    records = Records("plain", released())
    done = {name for name, row in records.rows.items() if row.get("trains") or not options.failed}
    types = options.only or [name for name in model_types()[number - 1 :: count] if name not in done]
    warmed()
    limits = {"cpu_seconds": CPU_SECONDS, "wall_seconds": WALL_SECONDS, "memory": MEMORY}
    for model_type, row in run_each(trained, types, jobs=options.jobs, **limits):
        task, name = next(iter(tasks_of(model_type).items()))
        head = {"type": model_type, "class": name, "task": task, "family": family_of(task)}
        records.add(head | {"trains": False} | row)
        print(
            model_type,
            row.get("trains", False),
            row.get("reason", "")[: 500 if options.only else 90],
            flush=True,
        )
    if set(model_types()) <= records.rows.keys():
        print(make_page(rows=records.rows))


if __name__ == "__main__":
    main()
