"""Training loop of all examples: steps, their records, evaluations and checkpoints."""

import argparse
import itertools
import sys
import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import metrics
import torch
import torch.distributed as dist
import transformers
from command_line import BAD_ARGUMENTS, Refused, refuse
from interruption import Interrupted
from saving import Keeper, NotSaved, Record, Saving, resumed_records
from torch import Tensor, nn
from tqdm import tqdm
from train_step import mean_over_replicas, train_step

from echelon import Booster, DistCoordinator, launch_from_torch


@dataclass(frozen=True, kw_only=True)
class Run:
    """Model, optimizer and data of a training run.

    Args:
        booster: the booster of model and optimizer.
        model, optimizer, scheduler: as returned by `booster.boost`.
        loader: this replica's loader, from `prepare_dataloader`.
        per_epoch: see `endless`.
        num_steps: total number of steps.
        max_norm: see `train_step`.
        criterion: see `train_step`.
        observe: further entries of a step's record; collective over the world.
        unit: unit of the throughput, in the plural.
        units_per_step: number of units in a global batch.
    """

    booster: Booster
    model: nn.Module
    optimizer: Any
    scheduler: Any
    loader: Any
    per_epoch: int | None = None
    num_steps: int
    max_norm: float
    criterion: Callable | None = None
    observe: Callable[[], Record] = dict
    unit: str = "samples"
    units_per_step: int

    @property
    def saved(self) -> dict[str, Any]:
        """Keyword arguments of `booster.save_checkpoint` and `load_checkpoint`."""
        return {
            "model": self.model,
            "optimizer": self.optimizer,
            "lr_scheduler": self.scheduler,
            "dataloader": self.loader,
        }


def start(run: Callable[[argparse.Namespace], int], arguments: argparse.Namespace) -> int:
    """Initialize the process group, call `run`, and destroy the group.

    Returns:
        The exit status: that of `run`, 1 if the end of the run could not be saved, 2 for invalid arguments, which the
        first rank has reported, or 128 + the number of the signal that interrupted the run.
    """
    launch_from_torch(seed=arguments.seed)
    transformers.logging.set_verbosity_error()
    coordinator = DistCoordinator()
    try:
        status = run(arguments)
    except Refused:
        status = BAD_ARGUMENTS
    except NotSaved:
        status = 1
    except Interrupted as interrupted:
        status = 128 + interrupted.number
    coordinator.destroy()
    return status


def boost(booster: Booster, model: nn.Module, *others: Any, **named: Any) -> tuple[Any, ...]:
    """Call `booster.boost` and report its errors once.

    Raises:
        Refused: the model does not fit the plugin; the error was reported.
    """
    try:
        return booster.boost(model, *others, **named)
    except ValueError as error:
        refuse([str(error)])
        raise


def endless(loader: Any, per_epoch: int | None = None) -> Iterator[dict[str, Tensor]]:
    """Yield batches from the loader's position on, without end: epochs of at most `per_epoch`, each reshuffled."""
    position, per_step = loader.state_dict(), loader.batch_size * loader.sampler.num_replicas
    per_epoch = len(loader) if per_epoch is None else per_epoch
    left = max(per_epoch - position["samples"] // per_step, 0)
    for epoch in itertools.count(position["epoch"]):
        loader.sampler.set_epoch(epoch)
        yield from itertools.islice(loader, left)
        left = per_epoch


def train(
    run: Run,
    *,
    evaluate: Callable[[], Mapping[str, float]],
    eval_every: int,
    line_every: int,
    log: Path | None,
    saving: Saving,
    export: Callable[[], None],
) -> list[Record]:
    """Take all remaining steps and return the records of all steps. Collective over the world.

    The first rank reports progress: a bar, printed lines, and a JSON object per step.

    Args:
        evaluate: returns the figures of an evaluation by name; collective over the world.
        eval_every: steps between evaluations, with one more after the last step; 0 never evaluates.
        line_every: steps between printed lines; evaluations print one, too.
        log: file for the JSON objects.
        saving: checkpoints of the run, and the one to resume from.
        export: writes the trained model; collective over the world.

    Raises:
        NotSaved: all steps were taken, but the last checkpoint could not be written.
        Refused: the run cannot resume from its checkpoint; the error was reported.
        Interrupted: a signal ended the run; it was saved.
    """
    is_first, num_steps = dist.get_rank() == 0, run.num_steps
    records = resumed_records(partial(run.booster.load_checkpoint, **run.saved), saving, num_steps)
    batches, save = endless(run.loader, run.per_epoch), partial(run.booster.save_checkpoint, **run.saved)
    lines = metrics.JsonLines(log if is_first else None, records)
    with lines, Keeper(save, saving, num_steps) as keeper:
        for step in (bar := progress_bar(len(records), num_steps)):
            record = one_step(run, batches, step)
            is_evaluated = eval_every > 0 and (step % eval_every == 0 or step == num_steps)
            if is_evaluated:
                record |= {f"{metrics.EVAL}{name}": value for name, value in evaluate().items()}
            records.append(record)
            lines.write(record)
            bar.set_postfix_str(metrics.progress_of(record), refresh=False)
            if is_first and (is_evaluated or step % line_every == 0):
                tqdm.write(metrics.line_of(record, num_steps), file=sys.stdout)
            keeper.after_step(records)
    export()
    keeper.require_saved()
    return records


def progress_bar(done: int, num_steps: int) -> tqdm:
    """Return the remaining step numbers, with a progress bar on the first rank if its standard error is a terminal."""
    left = range(done + 1, num_steps + 1)
    is_off = None if dist.get_rank() == 0 else True  # tqdm's None: off in files and pipes
    return tqdm(left, desc="training", initial=done, total=num_steps, disable=is_off)


def one_step(run: Run, batches: Iterator[dict[str, Tensor]], step: int) -> Record:
    """Take a step and return its record. Collective over the world."""
    start = time.monotonic()
    lr = run.scheduler.get_last_lr()[0]
    loss, norm = train_step(
        run.booster,
        run.model,
        run.optimizer,
        batches,
        criterion=run.criterion,
        max_norm=run.max_norm,
    )
    run.scheduler.step()
    record = {"step": step, "loss": mean_over_replicas(loss), "lr": lr, "grad_norm": norm}
    record["skipped_steps"] = run.optimizer.skipped_steps  # so far, for gradients that were not finite
    record[f"{run.unit}{metrics.PER_SECOND}"] = run.units_per_step / (time.monotonic() - start)
    record["peak_memory_bytes"], record["peak_memory_of"] = metrics.highest_memory()
    return record | run.observe()


def make_optimizer(
    model: nn.Module, *, lr: float, weight_decay: float, betas: tuple[float, float] = (0.9, 0.999)
) -> torch.optim.Optimizer:
    """Make an AdamW that decays weight matrices but not biases and norms."""
    parameters = list(model.parameters())
    groups = [
        {"params": [one for one in parameters if one.dim() >= 2], "weight_decay": weight_decay},
        {"params": [one for one in parameters if one.dim() < 2], "weight_decay": 0.0},
    ]
    return torch.optim.AdamW(groups, lr=lr, betas=betas)
