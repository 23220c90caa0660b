r"""Fine-tune BERT on paraphrases under any plugin, and report F1.

    torchrun --standalone --nproc_per_node 4 examples/language/bert/finetune.py \
        --target_f1 0.86 --plugin hybrid_parallel --model_type bert

By default the data is generated and a small BERT is built from a config, so that nothing is downloaded.
"""

import argparse
import json
import math
import sys
import time
from pathlib import Path
from typing import Any

import data as paraphrase_data
import datasets
import torch
import torch.distributed as dist
import transformers
from torch import Tensor, nn
from torch.utils.data import DataLoader
from tqdm import tqdm
from transformers import (
    AutoModelForSequenceClassification,
    BertConfig,
    BertForSequenceClassification,
    PreTrainedTokenizerBase,
    get_linear_schedule_with_warmup,
)

from echelon import Booster, DistCoordinator, TorchDDPPlugin, launch_from_torch

sys.path.append(str(Path(__file__).parents[1]))  # what the examples of this folder share
from command_line import (
    BAD_ARGUMENTS,
    FirstRankParser,
    add_plugin_options,
    batch_faults,
    booster_or_faults,
    max_norm_of,
    refused_options,
    tell_faults,
)
from train_step import mean_over_replicas, on_device_of, train_step


def parse_arguments() -> argparse.Namespace:
    parser = FirstRankParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model_type", choices=["bert"], default="bert")
    parser.add_argument(
        "--model_name_or_path", help="a local directory of model and tokenizer, or a name on the hub"
    )
    parser.add_argument(
        "--task", choices=["paraphrase", "mrpc"], default="paraphrase", help="mrpc is on the hub"
    )
    parser.add_argument("--data_dir", type=Path, help="a folder with MRPC's train.tsv and test.tsv")
    parser.add_argument("--target_f1", type=float, help="end with status 1 below it")
    parser.add_argument("--epochs", type=int, default=2)
    parser.add_argument("--batch_size", type=int, default=32, help="of all processes together")
    parser.add_argument("--lr", type=float, default=5e-4)
    parser.add_argument("--warmup_fraction", type=float, default=0.1)
    parser.add_argument("--dropout", type=float, help="default: a pretrained model's own, 0 for a new one")
    parser.add_argument("--seed", type=int, default=42)
    parser.add_argument("--max_steps", type=int, help="end an epoch early")
    parser.add_argument(
        "--log_losses", type=Path, help="write the loss of each step to this file, as JSON lines"
    )
    add_plugin_options(parser)
    arguments = parser.parse_args()
    if refused := refused_options(arguments):
        parser.error(refused[0])
    return arguments


def load_data(arguments: argparse.Namespace) -> tuple[datasets.DatasetDict, PreTrainedTokenizerBase]:
    if arguments.data_dir is not None:
        raw = paraphrase_data.mrpc_files(arguments.data_dir)
    elif arguments.task == "mrpc":
        raw = paraphrase_data.mrpc_from_hub()
    else:
        raw = paraphrase_data.generated_data(arguments.seed)
    if arguments.model_name_or_path is not None:
        tokenizer = paraphrase_data.pretrained_tokenizer(arguments.model_name_or_path)
    else:
        tokenizer = paraphrase_data.train_tokenizer(raw)
    return paraphrase_data.tokenize(raw, tokenizer), tokenizer


def make_model(arguments: argparse.Namespace, tokenizer: PreTrainedTokenizerBase) -> nn.Module:
    """A pretrained model, or a small BERT with random weights, equal on every rank."""
    torch.manual_seed(arguments.seed)
    if arguments.model_name_or_path is not None:
        source = paraphrase_data.pretrained_source(arguments.model_name_or_path)
        own = arguments.dropout
        dropouts = {} if own is None else {"hidden_dropout_prob": own, "attention_probs_dropout_prob": own}
        model = AutoModelForSequenceClassification.from_pretrained(
            source, num_labels=2, dtype=torch.float32, **dropouts
        )
    else:
        config = BertConfig(
            vocab_size=len(tokenizer),
            hidden_size=128,
            num_hidden_layers=2,
            num_attention_heads=4,
            intermediate_size=512,
            max_position_embeddings=paraphrase_data.MAX_LENGTH,
            pad_token_id=tokenizer.pad_token_id,
            # What a new model must find, that the two sentences are to be compared, begins as a faint signal:
            # larger weights than BERT's 0.02 show it, and dropout would drown it.
            initializer_range=0.1,
            hidden_dropout_prob=arguments.dropout or 0.0,
            attention_probs_dropout_prob=arguments.dropout or 0.0,
            num_labels=2,
        )
        model = BertForSequenceClassification(config)
    return model.train()


def make_optimizer(model: nn.Module, lr: float) -> torch.optim.Optimizer:
    """AdamW without weight decay on biases and norms."""
    named = list(model.named_parameters())
    plain = [parameter for name, parameter in named if name.endswith("bias") or "LayerNorm" in name]
    decayed = [parameter for name, parameter in named if not (name.endswith("bias") or "LayerNorm" in name)]
    groups = [{"params": decayed, "weight_decay": 0.01}, {"params": plain, "weight_decay": 0.0}]
    return torch.optim.AdamW(groups, lr=lr)


def criterion(outputs: Any, inputs: Any) -> Tensor:
    return outputs.loss


@torch.no_grad()
def evaluate(
    booster: Booster, model: nn.Module, dataset: datasets.Dataset, batch_size: int
) -> tuple[float, float]:
    """F1 and accuracy over the whole data set, on every rank; each replica predicts its share."""
    model.eval()
    replica, num_replicas = booster.plugin.data_rank
    # Whole batches only, the last one filled up from the start: a short one may have too few samples to be cut.
    filled = math.ceil(len(dataset) / batch_size) * batch_size
    whole = dataset.select([row % len(dataset) for row in range(filled)])
    loader = booster.plugin.prepare_dataloader(whole, batch_size=batch_size // num_replicas)
    is_last = isinstance(booster.plugin, TorchDDPPlugin) or booster.plugin.stage_manager.is_last_stage(
        ignore_chunk=True
    )
    counts = torch.zeros(
        4, dtype=torch.float64
    )  # true positives, false positives, false negatives, all right
    batches, done = iter(loader), 0
    for expected in loader:
        if isinstance(booster.plugin, TorchDDPPlugin):
            outputs = model(**on_device_of(model, next(batches)))
        else:
            outputs = booster.execute_pipeline(
                batches, model, criterion, return_loss=False, return_outputs=True
            )["outputs"]
        size = len(expected["labels"])
        if is_last:
            # The sampler gives every n-th sample; what was filled up stands last and was counted already.
            positions = (torch.arange(size) + done) * num_replicas + replica
            counts += count(outputs.logits.float().cpu(), expected["labels"], positions < len(dataset))
        done += size
    dist.all_reduce(counts)
    model.train()
    true_positives, false_positives, false_negatives, right = (counts / holders_of_outputs(booster)).tolist()
    wrong = false_positives + false_negatives
    return 2 * true_positives / max(2 * true_positives + wrong, 1), right / len(dataset)


def holders_of_outputs(booster: Booster) -> int:
    """How many ranks count the same predictions: all of a tensor group."""
    return booster.plugin.tp_size


def count(logits: Tensor, labels: Tensor, is_counted: Tensor) -> Tensor:
    predicted, labels = logits.argmax(-1)[is_counted] == 1, labels[is_counted] == 1
    return torch.stack(
        [
            (predicted & labels).sum(),
            (predicted & ~labels).sum(),
            (~predicted & labels).sum(),
            (predicted == labels).sum(),
        ]
    ).double()


def train(
    arguments: argparse.Namespace,
    booster: Booster,
    model: nn.Module,
    optimizer: Any,
    scheduler: Any,
    loader: DataLoader,
) -> list[float]:
    """All epochs, with a progress bar on one rank; the loss of every step."""
    losses: list[float] = []
    for epoch in range(arguments.epochs):
        loader.sampler.set_epoch(epoch)  # type: ignore[attr-defined]
        batches = iter(loader)
        num_steps = min(len(loader), arguments.max_steps or len(loader))
        bar = tqdm(
            range(num_steps), desc=f"epoch {epoch + 1}/{arguments.epochs}", disable=dist.get_rank() != 0
        )
        start = time.monotonic()
        for step in bar:
            loss, _ = train_step(
                booster, model, optimizer, batches, criterion=criterion, max_norm=max_norm_of(arguments)
            )
            scheduler.step()
            losses.append(mean_over_replicas(loss))
            speed = arguments.batch_size * (step + 1) / (time.monotonic() - start)
            told = f"loss {losses[-1]:.4f}, lr {scheduler.get_last_lr()[0]:.2e}, {speed:.0f} samples/s"
            # An overflow of fp16 skips a step.
            skipped = f", {optimizer.skipped_steps} steps skipped" if optimizer.skipped_steps else ""
            bar.set_postfix_str(told + skipped)
    return losses


def main() -> int:
    arguments = parse_arguments()
    launch_from_torch(seed=arguments.seed)
    transformers.logging.set_verbosity_error()
    datasets.disable_progress_bars()
    coordinator = DistCoordinator()
    start = time.monotonic()
    booster, faults = booster_or_faults(arguments, coordinator.world_size)
    if booster is not None:
        faults += batch_faults(arguments, booster, ["batch_size"])
    if tell_faults(faults, program="finetune.py") or booster is None:
        coordinator.destroy()
        return BAD_ARGUMENTS
    num_replicas = booster.plugin.data_rank[1]
    data, tokenizer = load_data(arguments)
    loader = booster.plugin.prepare_dataloader(
        data["train"],
        batch_size=arguments.batch_size // num_replicas,
        shuffle=True,
        drop_last=True,
        seed=arguments.seed,
    )
    model = make_model(arguments, tokenizer)
    optimizer = make_optimizer(model, arguments.lr)
    num_steps = arguments.epochs * min(len(loader), arguments.max_steps or len(loader))
    scheduler = get_linear_schedule_with_warmup(
        optimizer, math.ceil(arguments.warmup_fraction * num_steps), num_steps
    )
    model, optimizer, _, _, scheduler = booster.boost(model, optimizer, criterion, loader, scheduler)

    losses = train(arguments, booster, model, optimizer, scheduler, loader)
    if arguments.log_losses is not None and coordinator.is_master():
        arguments.log_losses.write_text("".join(f"{json.dumps({'loss': loss})}\n" for loss in losses))
    f1, accuracy = evaluate(booster, model, data["test"], arguments.batch_size)
    missed = arguments.target_f1 is not None and f1 < arguments.target_f1
    if missed:
        coordinator.print_on_master(f"F1 {f1:.4f} is below the target {arguments.target_f1}")
    coordinator.print_on_master(f"f1={f1:.4f} accuracy={accuracy:.4f} seconds={time.monotonic() - start:.1f}")
    coordinator.destroy()
    return 1 if missed else 0


if __name__ == "__main__":
    sys.exit(main())
