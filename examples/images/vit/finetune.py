r"""Train a vision transformer to read handwritten digits under any plugin, and report its accuracy.

    torchrun --standalone --nproc_per_node 4 examples/images/vit/finetune.py --target_accuracy 0.95

The digits are those of scikit-learn, and a small ViT is built from a config, so that nothing is downloaded.
"""

import argparse
import sys
from pathlib import Path

import torch
from torch import Tensor
from torch.nn.functional import cross_entropy
from transformers import ViTConfig, ViTForImageClassification

from echelon import Booster

sys.path.append(str(Path(__file__).parents[2]))  # modules that all examples share
import digits
import fine_tuning
from evaluation import outputs_of, sums_over


def parse_arguments() -> argparse.Namespace:
    parser = fine_tuning.make_parser(__doc__)
    fine_tuning.add_options(parser, epochs=12, batch_size=32, lr=1e-3, target="accuracy")
    return parser.parse_args()


def make_model(arguments: argparse.Namespace) -> ViTForImageClassification:
    """A pretrained model with a new head, or a small ViT with random weights; equal on every rank."""
    torch.manual_seed(arguments.seed)
    dropout = arguments.dropout
    if arguments.model_name_or_path is not None:
        named = ("hidden_dropout_prob", "attention_probs_dropout_prob")
        return ViTForImageClassification.from_pretrained(
            arguments.model_name_or_path,
            num_labels=digits.NUM_CLASSES,
            ignore_mismatched_sizes=True,  # those of the new head
            dtype=torch.float32,
            **({} if dropout is None else dict.fromkeys(named, dropout)),
        ).train()
    config = ViTConfig(
        image_size=digits.SIDE,
        patch_size=2,
        num_channels=1,
        hidden_size=64,
        num_hidden_layers=4,
        num_attention_heads=4,
        intermediate_size=256,
        # ViT's default 0.02 is for wider layers: here patch and position embeddings would start too small.
        initializer_range=0.1,
        hidden_dropout_prob=dropout or 0.0,
        attention_probs_dropout_prob=dropout or 0.0,
        num_labels=digits.NUM_CLASSES,
    )
    return ViTForImageClassification(config).train()


def evaluate(
    booster: Booster, model: torch.nn.Module, samples: list[digits.Sample], batch_size: int
) -> dict[str, float]:
    """Return accuracy and loss over all samples, on every rank; each replica predicts its shard. Collective."""

    def figures(batch: dict[str, Tensor]) -> Tensor | None:
        outputs = outputs_of(booster, model, batch)
        return None if outputs is None else figures_of(outputs.logits.float().cpu(), batch["labels"])

    sums = sums_over(
        booster, model, samples, batch_size=batch_size, names=("accuracy", "loss"), figures=figures
    )
    return {name: total / len(samples) for name, total in sums.items()}


def figures_of(logits: Tensor, labels: Tensor) -> Tensor:
    """Return for each sample 1 if its prediction is correct, else 0, and its loss: (samples, 2)."""
    return torch.stack([logits.argmax(-1) == labels, cross_entropy(logits, labels, reduction="none")], dim=1)


def fine_tune(arguments: argparse.Namespace) -> dict[str, float]:
    """Train and return the figures of the last evaluation."""
    booster = fine_tuning.make_booster(arguments, digits.errors())
    model = make_model(arguments)
    trained, tested = digits.splits(side=model.config.image_size, num_channels=model.config.num_channels)
    run = fine_tuning.make_run(arguments, booster, model, trained)
    return fine_tuning.train_and_evaluate(
        arguments,
        run,
        lambda: evaluate(booster, run.model, tested, arguments.batch_size),
        shares=("accuracy",),
    )


if __name__ == "__main__":
    sys.exit(fine_tuning.main(fine_tune, parse_arguments()))
