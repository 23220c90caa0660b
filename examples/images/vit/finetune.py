r"""Train a small Vision Transformer on scanned digits, which come with scikit-learn, and report its accuracy.

    torchrun --standalone --nproc_per_node 2 examples/images/vit/finetune.py --pp_size 2 --target_accuracy 0.9
    torchrun --standalone --nproc_per_node 4 examples/images/vit/finetune.py --tp_size 2 --zero_stage 1

`--model` takes a pretrained ViT, as "google/vit-base-patch16-224-in21k" or a folder; it gets a new head.
"""

import argparse
import sys

import torch
from sklearn.datasets import load_digits
from torch.utils.data import DataLoader
from transformers import ViTConfig, ViTForImageClassification, get_linear_schedule_with_warmup

import echelon
from echelon import Booster, Metrics


def parse_arguments() -> argparse.Namespace:
    parser = echelon.ArgumentParser(description=__doc__)
    parser.add_argument("--model", help="a pretrained ViT: a folder, or a name on the hub")
    parser.add_argument("--epochs", type=int, default=10)
    parser.add_argument("--batch_size", type=int, default=32, help="over all replicas")
    parser.add_argument("--lr", type=float, default=1e-3)
    parser.add_argument("--target_accuracy", type=float, default=0.0, help="exit with status 1 below it")
    parser.add_argument("--metrics", help="file of JSON lines")
    echelon.add_plugin_arguments(parser, precision="fp32", num_microbatches=4, max_norm=1.0)
    return parser.parse_args()


def make_model(pretrained: str | None) -> ViTForImageClassification:
    if pretrained is not None:
        return ViTForImageClassification.from_pretrained(
            pretrained, num_labels=10, ignore_mismatched_sizes=True, dtype=torch.float32
        ).train()
    config = ViTConfig(
        image_size=8,
        patch_size=2,
        num_channels=1,
        hidden_size=64,
        num_hidden_layers=4,
        num_attention_heads=4,
        intermediate_size=128,
        num_labels=10,
    )
    return ViTForImageClassification(config).train()


def make_samples(config: ViTConfig) -> list[dict[str, torch.Tensor]]:
    """Return 1,797 digits in a fixed order, scaled to the model's images, with values from -1 to 1."""
    digits = load_digits()
    images = torch.tensor(digits.images, dtype=torch.float32).unsqueeze(1) / 8 - 1
    images = torch.nn.functional.interpolate(images, size=config.image_size, mode="nearest")
    images, labels = images.expand(-1, config.num_channels, -1, -1), torch.tensor(digits.target)
    order = torch.randperm(len(labels), generator=torch.Generator().manual_seed(0))
    return [{"pixel_values": images[row].contiguous(), "labels": labels[row]} for row in order]


@torch.no_grad()
def evaluate(booster: Booster, model: torch.nn.Module, loader: DataLoader) -> float:
    """Return the accuracy on every rank; each replica predicts its share of the digits."""
    model.eval()
    results = []
    for batch in loader:
        wanted = {"return_loss": False, "return_outputs": "all_ranks"}
        logits = booster.execute_pipeline(iter([batch]), model, **wanted)["outputs"].logits
        results.append(booster.gather_for_metrics(logits.argmax(-1).cpu() == batch["labels"]))
    model.train()
    return torch.cat(results).float().mean().item()


def main() -> int:
    arguments = parse_arguments()
    echelon.launch_from_torch(seed=42)
    plugin = echelon.plugin_from_arguments(arguments)
    booster = Booster(plugin=plugin)
    model = make_model(arguments.model)
    samples, per_replica = make_samples(model.config), arguments.batch_size // plugin.dp_size
    loader = plugin.prepare_dataloader(samples[352:], per_replica, shuffle=True, drop_last=True)
    test_loader = plugin.prepare_dataloader(samples[:352], per_replica)
    optimizer = torch.optim.AdamW(model.parameters(), lr=arguments.lr)
    num_steps = arguments.epochs * len(loader)
    scheduler = get_linear_schedule_with_warmup(optimizer, num_steps // 10, num_steps)
    model, optimizer, _, loader, scheduler = booster.boost(model, optimizer, None, loader, scheduler)

    metrics = Metrics(booster, optimizer, num_steps=num_steps, jsonl=arguments.metrics)
    for _ in range(arguments.epochs):
        for batch in loader:
            loss = booster.execute_pipeline(iter([batch]), model, optimizer=optimizer)["loss"]
            optimizer.step()
            optimizer.zero_grad()
            scheduler.step()
            metrics.step(loss, lr=scheduler.get_last_lr()[0])
        accuracy = evaluate(booster, model, test_loader)
        metrics.write(accuracy=accuracy)
    booster.print(f"accuracy={accuracy:.4f}")
    echelon.DistCoordinator().destroy()
    return int(accuracy < arguments.target_accuracy)


if __name__ == "__main__":
    sys.exit(main())
