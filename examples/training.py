"""The training loop of all examples: steps, their records, and when to evaluate. One step is train_step.py."""

import argparse
import itertools
import sys
import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import metrics
import torch
import torch.distributed as dist
import transformers
from command_line import BAD_ARGUMENTS, Refused, refuse
from torch import Tensor, nn
from torch.utils.data import DataLoader
from tqdm import tqdm
from train_step import mean_over_replicas, train_step

from echelon import Booster, DistCoordinator, launch_from_torch

Record = dict[str, Any]


@dataclass(frozen=True, kw_only=True)
class Run:
    """What is trained, and on what.

    Args:
        booster: how.
        model, optimizer, scheduler: as `booster.boost` returned them.
        batches: this replica's, at least `num_steps` of them.
        num_steps: how many of them are taken.
        max_norm: see `train_step`.
        criterion: see `train_step`.
        unit: what speed is counted in, in the plural.
        units_per_step: how many of it all replicas take in a step.
    """

    booster: Booster
    model: nn.Module
    optimizer: Any
    scheduler: Any
    batches: Iterator[dict[str, Tensor]]
    num_steps: int
    max_norm: float
    criterion: Callable | None = None
    unit: str = "samples"
    units_per_step: int


def start(run: Callable[[argparse.Namespace], int], arguments: argparse.Namespace) -> int:
    """Start the processes' group, run, and end it.

    Returns:
        The exit status: what was returned, or 2 where the first rank has told why nothing was run.
    """
    launch_from_torch(seed=arguments.seed)
    transformers.logging.set_verbosity_error()
    coordinator = DistCoordinator()
    try:
        status = run(arguments)
    except Refused:
        status = BAD_ARGUMENTS
    coordinator.destroy()
    return status


def boost(booster: Booster, model: nn.Module, *others: Any, **named: Any) -> tuple[Any, ...]:
    """`booster.boost`, which refuses what only the whole model shows, on every rank alike.

    Raises:
        Refused: the model does not fit the plugin; the reason was told.
    """
    try:
        return booster.boost(model, *others, **named)
    except ValueError as error:
        refuse([str(error)])
        raise


def endless(loader: DataLoader, per_epoch: int | None = None) -> Iterator[dict[str, Tensor]]:
    """Batches, each epoch in another order; an epoch ends after `per_epoch` of them at the latest."""
    for epoch in itertools.count():
        loader.sampler.set_epoch(epoch)  # type: ignore[attr-defined]
        yield from itertools.islice(loader, per_epoch)


def train(
    run: Run,
    *,
    judge: Callable[[], Mapping[str, float]],
    judge_every: int,
    line_every: int,
    log: Path | None,
) -> list[Record]:
    """All steps, told on the first rank by a bar, lines and a JSON object each; the records. Collective.

    Args:
        judge: what an evaluation finds now, by name; collective over the world.
        judge_every: steps from one evaluation to the next, and there is one after the last step; 0 is never.
        line_every: steps from one printed line to the next, beside those of evaluations.
        log: a file for a JSON object of each step.
    """
    is_first = dist.get_rank() == 0
    records = []
    with metrics.JsonLines(log if is_first else None) as lines:
        bar = tqdm(range(1, run.num_steps + 1), desc="training", disable=not is_first)
        for step in bar:
            record = one_step(run, step)
            is_judged = judge_every > 0 and (step % judge_every == 0 or step == run.num_steps)
            if is_judged:
                record |= {f"{metrics.JUDGED}{name}": value for name, value in judge().items()}
            records.append(record)
            lines.write(record)
            bar.set_postfix_str(metrics.progress_of(record), refresh=False)
            if is_first and (is_judged or step % line_every == 0):
                tqdm.write(metrics.line_of(record, run.num_steps), file=sys.stdout)
    return records


def one_step(run: Run, step: int) -> Record:
    """Take a step, and tell of it. Collective over the world."""
    start = time.monotonic()
    lr = run.scheduler.get_last_lr()[0]
    loss, norm = train_step(
        run.booster,
        run.model,
        run.optimizer,
        run.batches,
        criterion=run.criterion,
        max_norm=run.max_norm,
    )
    run.scheduler.step()
    record = {"step": step, "loss": mean_over_replicas(loss), "lr": lr, "grad_norm": norm}
    record["skipped_steps"] = run.optimizer.skipped_steps  # so far, since gradients were not finite
    record[f"{run.unit}{metrics.PER_SECOND}"] = run.units_per_step / (time.monotonic() - start)
    record["peak_memory_bytes"], record["peak_memory_of"] = metrics.highest_memory()
    return record


def make_optimizer(
    model: nn.Module, *, lr: float, weight_decay: float, betas: tuple[float, float] = (0.9, 0.999)
) -> torch.optim.Optimizer:
    """AdamW with weight decay on matrices alone, not on biases and norms."""
    parameters = list(model.parameters())
    groups = [
        {"params": [one for one in parameters if one.dim() >= 2], "weight_decay": weight_decay},
        {"params": [one for one in parameters if one.dim() < 2], "weight_decay": 0.0},
    ]
    return torch.optim.AdamW(groups, lr=lr, betas=betas)
