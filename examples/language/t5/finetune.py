r"""Train a T5 to sort, reverse and add digits, under any plugin, and report the fraction of correct answers.

    torchrun --standalone --nproc_per_node 4 examples/language/t5/finetune.py --target_exact 0.9

The texts are generated and a small T5 is built from a config, so that nothing is downloaded.
"""

import argparse
import sys
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.functional import cross_entropy, one_hot
from torch.utils.data import default_collate
from transformers import AutoTokenizer, PreTrainedTokenizerBase, T5Config, T5ForConditionalGeneration

from echelon import Booster, DistCoordinator

sys.path.append(str(Path(__file__).parents[2]))  # modules that all examples share
import fine_tuning
import tasks
from command_line import range_errors
from decoding import greedy_answers
from evaluation import outputs_of, sums_over

NUM_SHOWN = 6
LOWEST = {"longest": 2, "num_train": 1, "num_test": 1}
ASKED = [f"asked_{task}" for task in tasks.TASKS]
RIGHT = [f"exact_{task}" for task in tasks.TASKS]


def parse_arguments() -> argparse.Namespace:
    parser = fine_tuning.make_parser(__doc__)
    parser.add_argument("--longest", type=int, default=7, help="maximum digits of a text, at least 2")
    parser.add_argument("--num_train", type=int, default=12_000, help="number of training texts")
    parser.add_argument("--num_test", type=int, default=1000, help="number of test texts")
    fine_tuning.add_options(parser, epochs=8, batch_size=64, lr=3e-3, target="exact")
    return parser.parse_args()


def task_errors(arguments: argparse.Namespace) -> list[str]:
    """Return errors for numbers out of range, or larger than the number of distinct texts."""
    if errors := range_errors(arguments, LOWEST, {}):
        return errors
    there_are = tasks.number_of_texts(arguments.longest)
    return [
        f"--{name} {getattr(arguments, name)} can be at most {most} with --longest {arguments.longest}"
        for name, most in zip(("num_train", "num_test"), there_are, strict=True)
        if getattr(arguments, name) > most
    ]


def make_tokenizer(arguments: argparse.Namespace) -> PreTrainedTokenizerBase:
    """Load the tokenizer of a pretrained model, or make one of the task's words."""
    if arguments.model_name_or_path is not None:
        return AutoTokenizer.from_pretrained(arguments.model_name_or_path)
    return tasks.make_tokenizer()


def make_model(
    arguments: argparse.Namespace, tokenizer: PreTrainedTokenizerBase
) -> T5ForConditionalGeneration:
    """Load a pretrained model, or make a small T5 with random weights, equal on every rank."""
    torch.manual_seed(arguments.seed)
    dropout = arguments.dropout
    if arguments.model_name_or_path is not None:
        return T5ForConditionalGeneration.from_pretrained(
            arguments.model_name_or_path,
            dtype=torch.float32,
            **({} if dropout is None else {"dropout_rate": dropout}),
        ).train()
    config = T5Config(
        vocab_size=len(tokenizer),
        d_model=64,
        d_kv=16,
        d_ff=256,
        num_layers=2,
        num_heads=4,
        feed_forward_proj="gated-gelu",  # as in T5 1.1; smooth, so layouts diverge later than with ReLU
        dropout_rate=dropout or 0.0,
        pad_token_id=tokenizer.pad_token_id,
        eos_token_id=tokenizer.eos_token_id,
        decoder_start_token_id=tokenizer.pad_token_id,
    )
    return T5ForConditionalGeneration(config).train()


def criterion(outputs: Any, inputs: Any) -> tuple[Tensor, Tensor]:
    """Return the sum of the token losses and the number of tokens, so all tokens of the batch have equal weight."""
    num_tokens = (inputs["labels"] != tasks.IGNORED_LABEL).sum()
    return outputs.loss.float() * num_tokens, num_tokens


def evaluate(
    booster: Booster, model: nn.Module, samples: list[dict[str, Tensor]], batch_size: int
) -> dict[str, float]:
    """Return the fraction of exact answers, overall and per task, and the loss per token. Collective over the world.

    Args:
        samples: samples with the number of their task; each replica answers its shard.
        batch_size: global batch size, over all replicas.
    """

    def figures(batch: dict[str, Tensor]) -> Tensor | None:
        asked = one_hot(batch.pop("task"), len(tasks.TASKS))
        answers = greedy_answers(booster, model, batch, length=batch["labels"].shape[1])
        outputs = outputs_of(booster, model, batch)
        if outputs is None:
            return None
        right = is_right(answers, batch["labels"]).unsqueeze(1)
        return torch.cat(
            [loss_and_tokens(outputs.logits.float().cpu(), batch["labels"]), asked, asked * right], 1
        )

    names = ("loss", "tokens", *ASKED, *RIGHT)
    sums = sums_over(booster, model, samples, batch_size=batch_size, names=names, figures=figures)
    found = {"exact": sum(sums[name] for name in RIGHT) / len(samples)}
    found |= {right: sums[right] / max(sums[asked], 1) for asked, right in zip(ASKED, RIGHT, strict=True)}
    return found | {"loss": sums["loss"] / sums["tokens"]}


def is_right(answers: Tensor, labels: Tensor) -> Tensor:
    """Return (B,) booleans: answers (B, A) equal the labels in every token that is not ignored."""
    is_counted = labels != tasks.IGNORED_LABEL
    return ((answers == labels) | ~is_counted).all(1)


def loss_and_tokens(logits: Tensor, labels: Tensor) -> Tensor:
    """Return each sample's sum of token losses and number of tokens, (B, 2), from logits (B, A, V)."""
    losses = cross_entropy(logits.mT, labels, ignore_index=tasks.IGNORED_LABEL, reduction="none")
    return torch.stack([losses.sum(1), (labels != tasks.IGNORED_LABEL).sum(1)], dim=1)


def show_answers(
    booster: Booster,
    model: nn.Module,
    tokenizer: PreTrainedTokenizerBase,
    pairs: list[tasks.Pair],
    samples: list[dict[str, Tensor]],
) -> None:
    """Print the model's answers to the first texts, on the first rank. Collective over the world.

    Args:
        samples: a local batch, beginning with samples of the first pairs.
    """
    model.eval()
    batch = default_collate(samples)
    answers = greedy_answers(booster, model, batch, length=batch["labels"].shape[1])
    for pair, answer in zip(
        pairs[:NUM_SHOWN], tokenizer.batch_decode(answers, skip_special_tokens=True), strict=False
    ):
        verdict = "right" if answer == pair.answer else f"not {pair.answer}"
        DistCoordinator().print_on_master(f"{pair.text} → {answer} ({verdict})")


def fine_tune(arguments: argparse.Namespace) -> dict[str, float]:
    """Train, show some answers, and return the figures of the last evaluation."""
    booster = fine_tuning.make_booster(arguments, task_errors(arguments))
    tokenizer = make_tokenizer(arguments)
    trained, tested = tasks.make_pairs(
        num_train=arguments.num_train,
        num_test=arguments.num_test,
        longest=arguments.longest,
        seed=arguments.seed,
    )
    samples = tasks.encode(tested, tokenizer)
    numbered = tasks.with_numbers(samples, tested)
    run = fine_tuning.make_run(
        arguments,
        booster,
        make_model(arguments, tokenizer),
        tasks.encode(trained, tokenizer),
        criterion=criterion,
    )
    found = fine_tuning.train_and_evaluate(
        arguments,
        run,
        lambda: evaluate(booster, run.model, numbered, arguments.batch_size),
        shares=("exact", *RIGHT),
        tokenizer=tokenizer,
    )
    shown = [
        samples[row % len(samples)] for row in range(arguments.batch_size // booster.plugin.data_rank[1])
    ]
    show_answers(booster, run.model, tokenizer, tested, shown)
    return found


if __name__ == "__main__":
    sys.exit(fine_tuning.main(fine_tune, parse_arguments()))
