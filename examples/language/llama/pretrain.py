r"""Pretrain a causal language model on text files, under any plugin.

    python examples/language/llama/pretrain.py
    torchrun --standalone --nproc_per_node 4 examples/language/llama/pretrain.py \
        --data ../shared/data/tinyshakespeare --tp_size 2 --pp_size 2 --metrics losses.jsonl --curve losses.svg

By default the text is a part of Python's standard library, so that nothing is downloaded.
"""

import argparse
import math
import shutil
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import datasets
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.utils.data import DataLoader
from transformers import PretrainedConfig

from echelon import (
    Booster,
    DistCoordinator,
    HybridParallelPlugin,
    PipelineGradientCheckpointConfig,
    TorchDDPPlugin,
)
from echelon.cluster.transformers_api import is_experts
from echelon.shardformer.recompute import checkpoint_layers, recomputable_layers

sys.path.append(str(Path(__file__).parents[2]))  # modules that all examples share
import metrics
import models
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
from saving import Record, Saving, add_saving_options, export_model, folder_errors, saving_errors
from train_step import on_device_of
from training import Run, boost, make_optimizer, start, train

import data as texts

DEFAULT_STEPS = 200
DEFAULT_VOCABULARY = 2048


def make_parser() -> argparse.ArgumentParser:
    parser = FirstRankParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    add = parser.add_argument
    add("--data", type=Path, nargs="+", metavar="FILE", help="text files, or folders with *.txt")
    add("--max_bytes", type=int, help=f"size of the default data; default: {texts.MAX_BYTES}")
    add("--cache_dir", type=Path, help="folder that keeps tokenizer and sequences; default: none")
    add("--sequence_length", type=int, default=128)
    add("--vocab_size", type=int, help=f"default: the config's, or {DEFAULT_VOCABULARY}")
    add("--model_type", choices=models.causal_types(), help="default: llama")
    add("--size", choices=models.SIZES, help=f"default: {models.DEFAULT_SIZE}")
    add("--config", type=Path, metavar="FILE.json", help="transformers config, instead of --size")
    text = "fraction of layers that recompute their activations, from 0 to 1"
    add("--gradient_checkpoint_ratio", type=float, default=0.0, help=text)
    add("--steps", type=int, help=f"default: {DEFAULT_STEPS}")
    add("--epochs", type=int, help="instead of --steps")
    add("--batch_size", type=int, default=16, help="global batch size in sequences, over all processes")
    add("--lr", type=float, default=3e-3, help="peak learning rate, after warm-up")
    add("--min_lr_fraction", type=float, default=0.1, help="final fraction of --lr")
    add("--warmup_fraction", type=float, default=0.1, help="fraction of the steps")
    add("--weight_decay", type=float, default=0.1, help="of weight matrices; biases and norms have none")
    add("--eval_every", type=int, default=50, help="steps between evaluations; 0 never evaluates")
    add("--eval_sequences", type=int, default=64, help="number of last sequences, held out for evaluation")
    add("--eval_batch_size", type=int, help="default: twice --batch_size")
    add("--seed", type=int, default=42)
    add("--metrics", type=Path, metavar="FILE.jsonl", help="one JSON object per step")
    add("--curve", type=Path, metavar="FILE.svg", help="plot of the losses: .png, .svg or .pdf")
    text = "plot of how evenly tokens choose the experts of a mixture, by step and layer; also in --metrics"
    add("--imbalance", type=Path, metavar="FILE.svg", help=text)
    add_saving_options(parser)
    add_plugin_options(parser)
    return parser


def parse_arguments() -> argparse.Namespace:
    """Parse the arguments and fill in defaults that depend on other arguments."""
    arguments = make_parser().parse_args()
    if arguments.eval_batch_size is None:
        arguments.eval_batch_size = 2 * arguments.batch_size
    if arguments.steps is None and arguments.epochs is None:
        arguments.steps = DEFAULT_STEPS
    return arguments


def value_errors(arguments: argparse.Namespace) -> list[str]:
    """Return errors for numbers out of their range and for options that exclude each other."""
    lowest = {
        "sequence_length": 2,
        "vocab_size": texts.MIN_VOCABULARY,
        "max_bytes": 1,
        "steps": 1,
        "epochs": 1,
        "batch_size": 1,
        "eval_batch_size": 1,
        "eval_sequences": 1,
        "eval_every": 0,
        "weight_decay": 0,
        "lr": 0,
        "warmup_fraction": 0,
        "min_lr_fraction": 0,
        "gradient_checkpoint_ratio": 0,
    }
    highest = dict.fromkeys(("warmup_fraction", "min_lr_fraction", "gradient_checkpoint_ratio"), 1)
    errors = range_errors(arguments, lowest, highest)
    for first, second in (("steps", "epochs"), ("size", "config"), ("data", "max_bytes")):
        if getattr(arguments, first) is not None and getattr(arguments, second) is not None:
            errors.append(f"--{first} and --{second} exclude each other: give one")
    return errors


def chosen_config(arguments: argparse.Namespace) -> tuple[PretrainedConfig | None, int, list[str]]:
    """Return the model's config, the size of the vocabulary, and errors."""
    if arguments.config is None:
        vocabulary = arguments.vocab_size or DEFAULT_VOCABULARY
        config = models.sized_config(
            arguments.model_type or "llama",
            arguments.size or models.DEFAULT_SIZE,
            vocabulary=vocabulary,
            sequence_length=arguments.sequence_length,
        )
        return config, vocabulary, []
    config, errors = models.config_from_file(arguments.config, arguments.model_type)
    if config is None:
        return None, 0, errors
    vocabulary = arguments.vocab_size or config.vocab_size
    return (
        config,
        vocabulary,
        models.config_errors(config, sequence_length=arguments.sequence_length, vocabulary=vocabulary),
    )


@dataclass(frozen=True, kw_only=True)
class Plan:
    """Checked inputs of a run."""

    booster: Booster
    config: PretrainedConfig
    recipe: texts.Recipe


def plan_of(arguments: argparse.Namespace) -> Plan:
    """Check the arguments and make the inputs of the run. All-gather over the world.

    Raises:
        Refused: the arguments are invalid; all errors were reported.
    """
    errors = value_errors(arguments) + refused_options(arguments)
    errors += metrics.file_errors(arguments.metrics, curve=arguments.curve, imbalance=arguments.imbalance)
    errors += saving_errors(arguments)
    errors += folder_errors(arguments, ("cache_dir",))
    if arguments.data is None:
        files, file_errors = texts.library_files(arguments.max_bytes or texts.MAX_BYTES)
    else:
        files, file_errors = texts.files_of(arguments.data)
    config, vocabulary, config_errors = chosen_config(arguments)
    booster, plugin_errors = booster_or_errors(arguments, dist.get_world_size())
    errors += file_errors + config_errors + plugin_errors
    if booster is not None:
        errors += batch_errors(arguments, booster, ["batch_size", "eval_batch_size"])
        if config is not None:
            plugin = booster.plugin
            is_cut = isinstance(plugin, HybridParallelPlugin)
            num_stages = plugin.stage_manager.num_stages if is_cut else 1
            errors += models.layout_errors(config, tp_size=plugin.tp_size, num_stages=num_stages)
    refuse(errors)
    assert booster is not None and config is not None
    recipe = texts.Recipe(files=files, vocabulary=vocabulary, sequence_length=arguments.sequence_length)
    return Plan(booster=booster, config=config, recipe=recipe)


@contextmanager
def folder_of_texts(cache_dir: Path | None) -> Iterator[Path]:
    """Yield the cache folder, or a temporary one made by the first rank and removed afterwards. Broadcast."""
    if cache_dir is not None:
        yield cache_dir
        return
    is_first = dist.get_rank() == 0
    chosen: list[Any] = [tempfile.mkdtemp(prefix="echelon-llama-") if is_first else None]
    dist.broadcast_object_list(chosen)
    try:
        yield Path(chosen[0])
    finally:
        shutil.rmtree(chosen[0], ignore_errors=True)


def packed_texts(recipe: texts.Recipe, folder: Path) -> Path:
    """Return the folder of the packed texts, prepared by the first rank. Collective over the world.

    A rank that does not see this folder, on another machine, prepares an equal one.

    Raises:
        Refused: the files of a rank differ from those of the first rank.
    """
    digests: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(digests, recipe.digest())
    errors = [
        f"the texts on rank {rank}, or its versions of datasets and tokenizers, differ from those on rank 0"
        for rank, digest in enumerate(digests)
        if digest != digests[0]
    ]
    refuse(errors)
    place = folder / digests[0]
    with DistCoordinator().priority_execution():
        texts.prepare(recipe, place)
    return place


def number_of_steps(arguments: argparse.Namespace, num_sequences: int) -> tuple[int, list[str]]:
    """Return the number of steps, and an error if there is too little text."""
    num_trained = num_sequences - arguments.eval_sequences
    if num_trained < arguments.batch_size:
        needed = arguments.eval_sequences + arguments.batch_size
        return 0, [
            f"the texts make {num_sequences} sequences of {arguments.sequence_length} tokens, and --eval_sequences "
            f"{arguments.eval_sequences} with one --batch_size {arguments.batch_size} need {needed}: give more text, "
            "or a shorter --sequence_length, or less of the other two"
        ]
    return arguments.steps or arguments.epochs * (num_trained // arguments.batch_size), []


def summed_loss(outputs: Any, inputs: Any) -> tuple[Tensor, Tensor]:
    """Return the sum of the token losses and the number of tokens; both 0 for blank sequences."""
    count = (inputs["labels"][:, 1:] != texts.IGNORED_LABEL).sum()
    return torch.where(count > 0, outputs.loss.float() * count, 0.0), count


@torch.no_grad()
def evaluate(booster: Booster, model: nn.Module, loader: DataLoader, num_sequences: int) -> dict[str, float]:
    """Return the mean loss per token over all sequences, and the perplexity. Collective over the world."""
    model.eval()
    batch_size = loader.batch_size * booster.plugin.data_rank[1]  # type: ignore[operator]
    batches, total = iter(loader), 0.0
    for first in range(0, num_sequences, batch_size):
        if isinstance(booster.plugin, TorchDDPPlugin):
            batch = on_device_of(model, next(batches))
            figures = torch.stack(summed_loss(model(**batch), batch))
            dist.all_reduce(figures)
            loss = figures[0] / figures[1]
        else:
            loss = booster.execute_pipeline(batches, model, summed_loss)["loss"]
        # All sequences have the same number of tokens.
        total += loss.item() * min(batch_size, num_sequences - first)
    model.train()
    mean = total / num_sequences
    return {"loss": mean, "perplexity": math.exp(min(mean, 700.0))}


def loaders_of(
    arguments: argparse.Namespace, booster: Booster, sequences: datasets.Dataset
) -> tuple[DataLoader, DataLoader]:
    """Return this replica's loaders of the training and the held-out sequences."""
    num_replicas = booster.plugin.data_rank[1]
    num_trained = len(sequences) - arguments.eval_sequences
    trained = texts.Examples(sequences.select(range(num_trained)))
    held_out = texts.Examples(
        sequences.select(range(num_trained, len(sequences))), multiple=arguments.eval_batch_size
    )
    return booster.plugin.prepare_dataloader(
        trained,
        batch_size=arguments.batch_size // num_replicas,
        shuffle=True,
        drop_last=True,
        seed=arguments.seed,
    ), booster.plugin.prepare_dataloader(held_out, batch_size=arguments.eval_batch_size // num_replicas)


def make_model(arguments: argparse.Namespace, plan: Plan) -> nn.Module:
    """Make the model, with activation recomputation if requested."""
    model = models.make_model(plan.config, end_of_text=texts.END_OF_TEXT_ID, seed=arguments.seed)
    # The hybrid plugin enables it itself, stage by stage.
    if arguments.gradient_checkpoint_ratio and arguments.plugin != "hybrid_parallel":
        config = PipelineGradientCheckpointConfig(
            gradient_checkpointing_ratio=arguments.gradient_checkpoint_ratio
        )
        checkpoint_layers({0: recomputable_layers(model)}, config)
    return model


def imbalance_errors(arguments: argparse.Namespace, model: nn.Module) -> list[str]:
    """Return an error if an imbalance is requested of a model without experts, or of a plugin that counts none."""
    is_counted = arguments.plugin in ("hybrid_parallel", "low_level_zero")
    if arguments.imbalance is None or (is_counted and any(map(is_experts, model.modules()))):
        return []
    return [
        f"--imbalance is of a mixture of experts under hybrid_parallel or low_level_zero, not {type(model).__name__} "
        f"under {arguments.plugin}: add --model_type mixtral, or leave it out"
    ]


def imbalance_of(model: Any) -> Record:
    """Return the imbalance of every mixture layer since the last call, by its path. Collective over the world."""
    return {"imbalance": {path: load.imbalance for path, load in model.expert_load().items()}}


def train_and_evaluate(
    arguments: argparse.Namespace,
    booster: Booster,
    model: nn.Module,
    place: Path,
    num_steps: int,
) -> list[Record]:
    """Train with evaluations, export the model and return the records of all steps. Collective over the world.

    Args:
        place: folder of the packed texts.

    Raises:
        Refused: the model does not fit the plugin, or see `train`; the error was reported.
        Interrupted, NotSaved: see `train`.
    """
    optimizer = make_optimizer(model, lr=arguments.lr, weight_decay=arguments.weight_decay, betas=(0.9, 0.95))
    scheduler = models.make_scheduler(
        optimizer,
        num_steps=num_steps,
        warmup_steps=math.ceil(arguments.warmup_fraction * num_steps),
        min_lr_fraction=arguments.min_lr_fraction,
    )
    trained, held_out = loaders_of(arguments, booster, texts.sequences_of(place))
    model, boosted, _, _, scheduler = boost(booster, model, optimizer, lr_scheduler=scheduler)
    run = Run(
        booster=booster,
        model=model,
        optimizer=boosted,
        scheduler=scheduler,
        loader=trained,
        num_steps=num_steps,
        max_norm=max_norm_of(arguments),
        observe=dict if arguments.imbalance is None else partial(imbalance_of, model),
        unit="tokens",
        units_per_step=arguments.batch_size * arguments.sequence_length,
    )

    def export() -> None:
        if arguments.save_model is not None:  # else a temporary folder of texts may already be removed
            export_model(arguments.save_model, booster, model, texts.tokenizer_of(place))

    return train(
        run,
        evaluate=lambda: evaluate(booster, model, held_out, arguments.eval_sequences),
        eval_every=arguments.eval_every,
        line_every=1,
        log=arguments.metrics,
        saving=Saving.of(arguments, texts=place.name),  # the digest of their contents
        export=export,
    )


def pretrain(arguments: argparse.Namespace) -> int:
    """Prepare the texts, train, report, and return the exit status. Collective over the world."""
    began = time.monotonic()
    datasets.disable_progress_bars()
    plan, coordinator = plan_of(arguments), DistCoordinator()
    with folder_of_texts(arguments.cache_dir) as folder:
        place = packed_texts(plan.recipe, folder)
        facts = texts.facts_of(place)
        num_steps, errors = number_of_steps(arguments, facts.sequences)
        refuse(errors)
        model = make_model(arguments, plan)
        refuse(imbalance_errors(arguments, model))
        coordinator.print_on_master(
            f"{facts.documents} documents, {facts.tokens} tokens of {facts.vocabulary}, {facts.sequences} sequences, "
            f"unigram entropy {facts.unigram_entropy:.4f}; "
            f"{plan.config.model_type} of {sum(map(torch.numel, model.parameters())) / 1e6:.1f}M parameters"
        )
        records = train_and_evaluate(arguments, plan.booster, model, place, num_steps)
    if arguments.curve is not None and coordinator.is_master():
        level = ("unigram entropy", facts.unigram_entropy)
        metrics.draw_curve(records, arguments.curve, unit="nats per token", level=level)
    if arguments.imbalance is not None and coordinator.is_master():
        metrics.draw_imbalance(records, arguments.imbalance)
    last = records[-1]
    evaluated = f" eval_loss={last['eval_loss']:.4f}" if "eval_loss" in last else ""
    coordinator.print_on_master(
        f"loss={last['loss']:.4f}{evaluated} unigram_entropy={facts.unigram_entropy:.4f} "
        f"seconds={time.monotonic() - began:.1f}"
    )
    return 0


if __name__ == "__main__":
    sys.exit(start(pretrain, parse_arguments()))
