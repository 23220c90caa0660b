r"""Fine-tune BERT on paraphrases under any plugin, and report F1.

    torchrun --standalone --nproc_per_node 4 examples/language/bert/finetune.py \
        --target_f1 0.86 --plugin hybrid_parallel --model_type bert

By default the data is generated and a small BERT is built from a config, so that nothing is downloaded.
"""

import argparse
import sys
from pathlib import Path
from typing import Any

import datasets
import torch
from torch import Tensor, nn
from transformers import (
    AutoModelForSequenceClassification,
    AutoTokenizer,
    BertConfig,
    BertForSequenceClassification,
    PreTrainedTokenizerBase,
)

from echelon import Booster

sys.path.append(str(Path(__file__).parents[2]))  # modules that all examples share
import fine_tuning
from evaluation import outputs_of, sums_over

import data as paraphrase_data

COUNTS = ("true_positives", "false_positives", "false_negatives", "right")


def parse_arguments() -> argparse.Namespace:
    parser = fine_tuning.make_parser(__doc__)
    parser.add_argument("--model_type", choices=["bert"], default="bert")
    parser.add_argument(
        "--task", choices=["paraphrase", "mrpc"], default="paraphrase", help="mrpc is loaded from the hub"
    )
    parser.add_argument("--data_dir", type=Path, help="folder with MRPC's train.tsv and test.tsv")
    fine_tuning.add_options(parser, epochs=2, batch_size=32, lr=5e-4, target="f1")
    return parser.parse_args()


def load_data(arguments: argparse.Namespace) -> tuple[datasets.DatasetDict, PreTrainedTokenizerBase]:
    if arguments.data_dir is not None:
        raw = paraphrase_data.mrpc_files(arguments.data_dir)
    elif arguments.task == "mrpc":
        raw = paraphrase_data.mrpc_from_hub()
    else:
        raw = paraphrase_data.generated_data(arguments.seed)
    if arguments.model_name_or_path is not None:
        tokenizer = AutoTokenizer.from_pretrained(arguments.model_name_or_path)
    else:
        tokenizer = paraphrase_data.train_tokenizer(raw)
    return paraphrase_data.tokenize(raw, tokenizer), tokenizer


def make_model(arguments: argparse.Namespace, tokenizer: PreTrainedTokenizerBase) -> nn.Module:
    """Load a pretrained model, or make a small BERT with random weights, equal on every rank."""
    torch.manual_seed(arguments.seed)
    if arguments.model_name_or_path is not None:
        dropout = arguments.dropout
        names = ("hidden_dropout_prob", "attention_probs_dropout_prob")
        dropouts = {} if dropout is None else dict.fromkeys(names, dropout)
        model = AutoModelForSequenceClassification.from_pretrained(
            arguments.model_name_or_path, num_labels=2, dtype=torch.float32, **dropouts
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
            # A new model must learn to compare the two sentences, at first from a weak signal: weights larger than
            # BERT's 0.02 strengthen it, and dropout would hide it.
            initializer_range=0.1,
            hidden_dropout_prob=arguments.dropout or 0.0,
            attention_probs_dropout_prob=arguments.dropout or 0.0,
            num_labels=2,
        )
        model = BertForSequenceClassification(config)
    return model.train()


def criterion(outputs: Any, inputs: Any) -> Tensor:
    return outputs.loss


def evaluate(
    booster: Booster, model: nn.Module, dataset: datasets.Dataset, batch_size: int
) -> dict[str, float]:
    """Return F1 and accuracy over the data set, on every rank; each replica predicts its shard. Collective."""

    def figures(batch: dict[str, Tensor]) -> Tensor | None:
        outputs = outputs_of(booster, model, batch)
        return None if outputs is None else counts_of(outputs.logits.float().cpu(), batch["labels"])

    sums = sums_over(booster, model, dataset, batch_size=batch_size, names=COUNTS, figures=figures)
    doubled = 2 * sums["true_positives"]
    wrong = sums["false_positives"] + sums["false_negatives"]
    return {"f1": doubled / max(doubled + wrong, 1), "accuracy": sums["right"] / len(dataset)}


def counts_of(logits: Tensor, labels: Tensor) -> Tensor:
    """Return for each sample 1 for those of COUNTS that it adds to, else 0: (samples, COUNTS)."""
    predicted, labels = logits.argmax(-1) == 1, labels == 1
    return torch.stack(
        [predicted & labels, predicted & ~labels, ~predicted & labels, predicted == labels], dim=1
    )


def fine_tune(arguments: argparse.Namespace) -> dict[str, float]:
    """Train and return the figures of the last evaluation."""
    datasets.disable_progress_bars()
    booster = fine_tuning.make_booster(arguments)
    data, tokenizer = load_data(arguments)
    model = make_model(arguments, tokenizer)
    run = fine_tuning.make_run(arguments, booster, model, data["train"], criterion=criterion)
    return fine_tuning.train_and_evaluate(
        arguments,
        run,
        lambda: evaluate(booster, run.model, data["test"], arguments.batch_size),
        shares=("f1", "accuracy"),
        tokenizer=tokenizer,
    )


if __name__ == "__main__":
    sys.exit(fine_tuning.main(fine_tune, parse_arguments()))
