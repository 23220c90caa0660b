"""Parts that the fine-tuning examples share: options, construction of a run, training with evaluations, exit status."""

import argparse
import math
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import metrics
import torch.distributed as dist
from command_line import (
    FirstRankParser,
    add_plugin_options,
    batch_errors,
    booster_or_errors,
    max_norm_of,
    range_errors,
    refuse,
    refused_options,
)
from pretrained import pretrained_errors
from saving import Saving, add_saving_options, export_model, saving_errors
from torch import nn
from training import Run, boost, make_optimizer, start, train
from transformers import PreTrainedTokenizerBase, get_linear_schedule_with_warmup

from echelon import Booster, DistCoordinator

FineTune = Callable[[argparse.Namespace], Mapping[str, float]]

LOWEST = {
    "epochs": 1,
    "batch_size": 1,
    "max_steps": 1,
    "eval_every": 1,
    "lr": 0,
    "warmup_fraction": 0,
    "weight_decay": 0,
    "dropout": 0,
}
HIGHEST = {"warmup_fraction": 1, "dropout": 1}


def make_parser(description: str | None) -> FirstRankParser:
    """Return a parser with the script's description."""
    return FirstRankParser(description=description, formatter_class=argparse.RawDescriptionHelpFormatter)


def add_options(
    parser: argparse.ArgumentParser, *, epochs: int, batch_size: int, lr: float, target: str
) -> None:
    """Add the options of all fine-tuning scripts, with these defaults, and the options of the plugin.

    Args:
        target: name of the evaluation figure that `--target_…` compares.
    """
    add = parser.add_argument
    add("--model_name_or_path", help="a local directory of a pretrained model, or a name on the hub")
    add(f"--target_{target}", type=float, dest="target", help="exit with status 1 below this figure")
    add("--epochs", type=int, default=epochs)
    add("--batch_size", type=int, default=batch_size, help="global batch size, over all processes")
    add("--lr", type=float, default=lr)
    add("--warmup_fraction", type=float, default=0.1)
    add("--weight_decay", type=float, default=0.01, help="of weight matrices; biases and norms have none")
    add("--dropout", type=float, help="default: that of a pretrained model, 0 for a new one")
    add("--seed", type=int, default=42)
    add("--max_steps", type=int, help="maximum steps of an epoch")
    add("--eval_every", type=int, default=1, help="epochs between evaluations; the last one has one")
    add("--metrics", "--log_losses", type=Path, metavar="FILE.jsonl", help="one JSON object per step")
    add("--curve", type=Path, metavar="FILE.svg", help="plot of the run: .png, .svg or .pdf")
    parser.set_defaults(target_name=target)
    add_saving_options(parser)
    add_plugin_options(parser)


def main(fine_tune: FineTune, arguments: argparse.Namespace) -> int:
    """Initialize the process group, fine-tune, and print the figures of the last evaluation.

    Returns:
        The exit status: 0, or 1 if the target is missed; see `training.start` for others.
    """

    def run(arguments: argparse.Namespace) -> int:
        began, coordinator = time.monotonic(), DistCoordinator()
        found = fine_tune(arguments)
        name, target = arguments.target_name, arguments.target
        missed = target is not None and found[name] < target
        if missed:
            coordinator.print_on_master(f"{name} {found[name]:.4f} is below the target {target}")
        text = " ".join(f"{name}={value:.4f}" for name, value in found.items())
        coordinator.print_on_master(f"{text} seconds={time.monotonic() - began:.1f}")
        return 1 if missed else 0

    return start(run, arguments)


def make_booster(arguments: argparse.Namespace, further_errors: Sequence[str] = ()) -> Booster:
    """Make the booster that the arguments request. All-gather over the world.

    Args:
        further_errors: errors of the script's own arguments.

    Raises:
        Refused: the arguments are invalid; all errors were reported.
    """
    booster, plugin_errors = booster_or_errors(arguments, dist.get_world_size())
    errors = range_errors(arguments, LOWEST, HIGHEST) + refused_options(arguments)
    errors += metrics.file_errors(arguments.metrics, curve=arguments.curve) + saving_errors(arguments)
    errors += [*pretrained_errors(arguments.model_name_or_path), *further_errors, *plugin_errors]
    if booster is not None:
        errors += batch_errors(arguments, booster, ["batch_size"])
    refuse(errors)
    assert booster is not None
    return booster


def make_run(
    arguments: argparse.Namespace,
    booster: Booster,
    model: nn.Module,
    dataset: Any,
    *,
    criterion: Callable | None = None,
) -> Run:
    """Make the run that trains a model on a data set. Collective over the world.

    Args:
        model: equal on all ranks.

    Raises:
        Refused: the model does not fit the plugin, or the data set is smaller than a batch; the error was reported.
    """
    plugin = booster.plugin
    loader = plugin.prepare_dataloader(
        dataset,
        batch_size=arguments.batch_size // plugin.data_rank[1],
        shuffle=True,
        drop_last=True,
        seed=arguments.seed,
    )
    if not len(loader):
        refuse([f"--batch_size {arguments.batch_size} is more than the {len(dataset)} samples to train on"])
    per_epoch = min(len(loader), arguments.max_steps or len(loader))
    num_steps = arguments.epochs * per_epoch
    optimizer = make_optimizer(model, lr=arguments.lr, weight_decay=arguments.weight_decay)
    scheduler = get_linear_schedule_with_warmup(
        optimizer, math.ceil(arguments.warmup_fraction * num_steps), num_steps
    )
    model, boosted, criterion, loader, scheduler = boost(
        booster, model, optimizer, criterion, loader, scheduler
    )
    return Run(
        booster=booster,
        model=model,
        optimizer=boosted,
        scheduler=scheduler,
        loader=loader,
        per_epoch=per_epoch,
        num_steps=num_steps,
        max_norm=max_norm_of(arguments),
        criterion=criterion,
        units_per_step=arguments.batch_size,
    )


def train_and_evaluate(
    arguments: argparse.Namespace,
    run: Run,
    evaluate: Callable[[], Mapping[str, float]],
    *,
    shares: Sequence[str],
    tokenizer: PreTrainedTokenizerBase | None = None,
) -> dict[str, float]:
    """Train with an evaluation every few epochs, and return the last evaluation. Collective over the world.

    Args:
        evaluate: returns the figures of an evaluation by name, equal on every rank.
        shares: names of figures that are fractions of the samples; plotted below the loss.
        tokenizer: tokenizer to export with the model.

    Raises:
        Refused, Interrupted, NotSaved: see `train`.
    """
    eval_every = arguments.eval_every * (run.num_steps // arguments.epochs)
    records = train(
        run,
        evaluate=evaluate,
        eval_every=eval_every,
        line_every=run.num_steps,
        log=arguments.metrics,
        saving=Saving.of(arguments),
        export=lambda: export_model(arguments.save_model, run.booster, run.model, tokenizer),
    )
    if arguments.curve is not None and dist.get_rank() == 0:
        metrics.draw_curve(records, arguments.curve, shares=[f"{metrics.EVAL}{name}" for name in shares])
    return {
        name.removeprefix(metrics.EVAL): value
        for name, value in records[-1].items()
        if name.startswith(metrics.EVAL)
    }
