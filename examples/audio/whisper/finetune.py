r"""Train a small Whisper to write down melodies: generated tones of one second, four notes each.

    torchrun --standalone --nproc_per_node 2 examples/audio/whisper/finetune.py --pp_size 2 --target_exact 0.9
    torchrun --standalone --nproc_per_node 4 examples/audio/whisper/finetune.py --tp_size 2 --pp_size 2

A pipeline's first stages are the encoder's layers, its last ones the decoder's.
"""

import argparse
import sys

import numpy as np
import torch
from torch.utils.data import DataLoader
from transformers import (
    WhisperConfig,
    WhisperFeatureExtractor,
    WhisperForConditionalGeneration,
    get_linear_schedule_with_warmup,
)

import echelon
from echelon import Booster, Metrics

RATE, NUM_NOTES = 16000, 4
PITCHES = 220 * 2 ** (np.arange(8) / 4)  # in Hz; tokens 0 to 7
START, END = 8, 9


def parse_arguments() -> argparse.Namespace:
    parser = echelon.ArgumentParser(description=__doc__)
    parser.add_argument("--num_samples", type=int, default=1536, help="for training; 256 more for the test")
    parser.add_argument("--epochs", type=int, default=8)
    parser.add_argument("--batch_size", type=int, default=32, help="over all replicas")
    parser.add_argument("--lr", type=float, default=2e-3)
    parser.add_argument("--target_exact", type=float, default=0.0, help="exit with status 1 below it")
    parser.add_argument("--metrics", help="file of JSON lines")
    echelon.add_plugin_arguments(parser, precision="fp32", num_microbatches=4, max_norm=1.0)
    return parser.parse_args()


def make_samples(count: int) -> list[dict[str, torch.Tensor]]:
    """Generate melodies with noise, as Whisper's spectrograms (mels, frames), and their notes as labels."""
    extractor = WhisperFeatureExtractor(feature_size=80, chunk_length=1)  # seconds
    drawn, samples = np.random.default_rng(0), []
    times = np.arange(RATE // NUM_NOTES) / RATE
    for _ in range(count):
        notes = drawn.integers(len(PITCHES), size=NUM_NOTES)
        sound = np.concatenate([np.sin(2 * np.pi * PITCHES[note] * times) for note in notes])
        sound += drawn.normal(scale=0.1, size=len(sound))
        features = extractor(sound, sampling_rate=RATE, return_tensors="pt").input_features[0]
        samples.append({"input_features": features, "labels": torch.tensor([*notes, END])})
    return samples


def make_model() -> WhisperForConditionalGeneration:
    config = WhisperConfig(
        vocab_size=10,
        d_model=64,
        encoder_layers=2,
        decoder_layers=2,
        encoder_attention_heads=4,
        decoder_attention_heads=4,
        encoder_ffn_dim=128,
        decoder_ffn_dim=128,
        max_source_positions=50,  # 100 frames, of which the second convolution takes every other
        max_target_positions=NUM_NOTES + 1,
        dropout=0.0,
        decoder_start_token_id=START,
        bos_token_id=START,
        eos_token_id=END,
        pad_token_id=END,
    )
    return WhisperForConditionalGeneration(config).train()


@torch.no_grad()
def evaluate(booster: Booster, model: torch.nn.Module, loader: DataLoader) -> float:
    """Return the share of melodies with every note right given those before, on every rank."""
    model.eval()
    results = []
    for batch in loader:
        wanted = {"return_loss": False, "return_outputs": "all_ranks"}
        logits = booster.execute_pipeline(iter([batch]), model, **wanted)["outputs"].logits
        results.append(booster.gather_for_metrics((logits.argmax(-1).cpu() == batch["labels"]).all(1)))
    model.train()
    return torch.cat(results).float().mean().item()


def main() -> int:
    arguments = parse_arguments()
    echelon.launch_from_torch(seed=42)
    plugin = echelon.plugin_from_arguments(arguments)
    booster = Booster(plugin=plugin)
    samples, per_replica = make_samples(arguments.num_samples + 256), arguments.batch_size // plugin.dp_size
    loader = plugin.prepare_dataloader(samples[256:], per_replica, shuffle=True, drop_last=True)
    test_loader = plugin.prepare_dataloader(samples[:256], per_replica)
    model = make_model()
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
        exact = evaluate(booster, model, test_loader)
        metrics.write(exact=exact)
    booster.print(f"exact={exact:.4f}")
    echelon.DistCoordinator().destroy()
    return int(exact < arguments.target_exact)


if __name__ == "__main__":
    sys.exit(main())
