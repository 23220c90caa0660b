r"""Train a small T5 to sort and to reverse digits, and report the share of right answers.

    torchrun --standalone --nproc_per_node 2 examples/language/t5/finetune.py --pp_size 2 --target_exact 0.9
    torchrun --standalone --nproc_per_node 4 examples/language/t5/finetune.py --tp_size 2 --pp_size 2

The pipeline's first stages are the encoder's layers, its last ones the decoder's. No answer of the test was trained.
"""

import argparse
import random
import sys

import torch
from torch.utils.data import DataLoader
from transformers import T5Config, T5ForConditionalGeneration, get_linear_schedule_with_warmup

import echelon
from echelon import Booster, Metrics

PAD, END, SORT, REVERSE = 10, 11, 12, 13  # tokens after those of the ten digits
IGNORED = -100  # labels that count in no loss
LENGTH = 6  # the most digits of a text


def parse_arguments() -> argparse.Namespace:
    parser = echelon.ArgumentParser(description=__doc__)
    parser.add_argument("--num_samples", type=int, default=12800, help="for training; 1024 more for the test")
    parser.add_argument("--epochs", type=int, default=4)
    parser.add_argument("--batch_size", type=int, default=64, help="over all replicas")
    parser.add_argument("--lr", type=float, default=3e-3)
    parser.add_argument("--target_exact", type=float, default=0.0, help="exit with status 1 below it")
    parser.add_argument("--metrics", help="file of JSON lines")
    echelon.add_plugin_arguments(parser, precision="fp32", num_microbatches=4, max_norm=1.0)
    return parser.parse_args()


def make_samples(count: int) -> list[dict[str, torch.Tensor]]:
    """Generate distinct questions, each a task and two or more digits, with their answers as labels."""
    drawn, samples = random.Random(0), {}
    while len(samples) < count:
        digits, task = drawn.choices(range(10), k=drawn.randint(2, LENGTH)), drawn.choice((SORT, REVERSE))
        answer = sorted(digits) if task == SORT else digits[::-1]
        padding = LENGTH - len(digits)
        samples[task, *digits] = {
            "input_ids": torch.tensor([task, *digits, END, *[PAD] * padding]),
            "attention_mask": torch.tensor([1] * (len(digits) + 2) + [0] * padding),
            "labels": torch.tensor([*answer, END, *[IGNORED] * padding]),
        }
    return list(samples.values())


@torch.no_grad()
def evaluate(booster: Booster, model: torch.nn.Module, loader: DataLoader) -> float:
    """Return the share of answers with every token right, on every rank.

    Given the right tokens before, each token must be the likeliest: so greedy generation gives the same answers.
    """
    model.eval()
    results = []
    for batch in loader:
        wanted = {"return_loss": False, "return_outputs": "all_ranks"}
        logits = booster.execute_pipeline(iter([batch]), model, **wanted)["outputs"].logits
        is_right = (logits.argmax(-1).cpu() == batch["labels"]) | (batch["labels"] == IGNORED)
        results.append(booster.gather_for_metrics(is_right.all(1)))
    model.train()
    return torch.cat(results).float().mean().item()


def main() -> int:
    arguments = parse_arguments()
    echelon.launch_from_torch(seed=42)
    plugin = echelon.plugin_from_arguments(arguments)
    booster = Booster(plugin=plugin)
    samples, per_replica = make_samples(arguments.num_samples + 1024), arguments.batch_size // plugin.dp_size
    loader = plugin.prepare_dataloader(samples[1024:], per_replica, shuffle=True, drop_last=True)
    test_loader = plugin.prepare_dataloader(samples[:1024], per_replica)

    config = T5Config(
        vocab_size=14,
        d_model=64,
        d_kv=16,
        d_ff=256,
        num_layers=2,
        num_heads=4,
        feed_forward_proj="gated-gelu",
        dropout_rate=0.0,
        pad_token_id=PAD,
        eos_token_id=END,
        decoder_start_token_id=PAD,
    )
    model = T5ForConditionalGeneration(config).train()
    optimizer = torch.optim.AdamW(model.parameters(), lr=arguments.lr)
    num_steps = arguments.epochs * len(loader)
    scheduler = get_linear_schedule_with_warmup(optimizer, num_steps // 10, num_steps)
    model, optimizer, _, loader, scheduler = booster.boost(model, optimizer, None, loader, scheduler)

    metrics = Metrics(booster, optimizer, num_steps=num_steps, jsonl=arguments.metrics)
    for _ in range(arguments.epochs):
        for batch in loader:
            # The loss is the mean over all tokens of the global batch, however many a microbatch has.
            loss = booster.execute_pipeline(iter([batch]), model, optimizer=optimizer)["loss"]
            optimizer.step()
            optimizer.zero_grad()
            scheduler.step()
            metrics.step(loss, lr=scheduler.get_last_lr()[0])
        exact = evaluate(booster, model, test_loader)
        metrics.write(exact=exact)
    booster.print(f"exact={exact:.4f}")
    echelon.DistCoordinator().destroy()
    return int(exact < arguments.target_exact)


if __name__ == "__main__":
    sys.exit(main())
