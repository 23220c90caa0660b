"""A training run in plain torch, in one process. It imports nothing of Echelon, to share none of its bugs."""

import itertools
import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor, nn
from torch.optim.lr_scheduler import LambdaLR
from torch.utils.data import DataLoader, Dataset
from torch.utils.data.distributed import DistributedSampler
from transformers import LlamaConfig, LlamaForCausalLM


@dataclass(frozen=True, kw_only=True)
class Training:
    """Settings of a run, independent of the library.

    Args:
        steps: the number of optimizer steps.
        batch_size: sequences of a step.
        lr: the highest learning rate, after a linear warm-up of a tenth of the steps; half a cosine leads to 0.
        weight_decay: weight decay of matrices; other parameters have none.
        max_norm: gradients of a larger norm are scaled down to it.
        seed: the seed of weights.
        order_seed: the seed of the order of sequences.
    """

    steps: int = 200
    batch_size: int = 16
    lr: float = 1e-3  # at 3e-3, weights that are off by 1e-6 change losses by 1e-3
    weight_decay: float = 0.1
    max_norm: float = 1.0
    seed: int = 42
    order_seed: int = 1024


@dataclass(frozen=True, kw_only=True)
class Curve:
    """The losses of a run's steps, and the gradient norms before clipping."""

    losses: tuple[float, ...]
    norms: tuple[float, ...]


def byte_sequences(files: Sequence[Path], length: int) -> list[dict[str, Tensor]]:
    """Return texts as sequences of bytes, which are inputs and labels; a byte of 0 ends a text."""
    text = "\0".join(path.read_text(encoding="utf-8") for path in files).encode()
    tokens = torch.frombuffer(bytearray(text), dtype=torch.uint8).long()
    rows = tokens[: len(tokens) // length * length].view(-1, length)
    return [{"input_ids": row, "labels": row} for row in rows]


def unigram_entropy(sequences: Sequence[dict[str, Tensor]]) -> float:
    """Return the entropy of the tokens' frequencies in nats: the loss of a model that ignores the context."""
    counts = torch.cat([sequence["input_ids"] for sequence in sequences]).bincount()
    shares = counts[counts > 0] / counts.sum()
    return -(shares * shares.log()).sum().item()


def train_plainly(config: LlamaConfig, sequences: Dataset, training: Training) -> Curve:
    """Train a Llama in float32 in one process.

    Args:
        config: the model's config.
        sequences: examples with `input_ids` and `labels`.
        training: all other settings.
    """
    torch.manual_seed(training.seed)
    model = LlamaForCausalLM(config).train()
    optimizer = _make_optimizer(model, training)
    scheduler = LambdaLR(optimizer, _learning_rate(training))
    losses, norms = [], []
    for batch in itertools.islice(_batches(sequences, training), training.steps):
        loss = model(**batch).loss
        loss.backward()
        norms.append(_clip(model, training.max_norm))
        optimizer.step()
        optimizer.zero_grad()
        scheduler.step()
        losses.append(loss.item())
    return Curve(losses=tuple(losses), norms=tuple(norms))


def _clip(model: nn.Module, max_norm: float) -> float:
    """Scale gradients down to a norm; return the norm before.

    Like `clip_grad_norm_`, but summed in float64: torch's float32 norm is off by 1e-5 here, which training amplifies.
    """
    gradients = [parameter.grad for parameter in model.parameters() if parameter.grad is not None]
    norms = [torch.linalg.vector_norm(gradient, dtype=torch.float64) for gradient in gradients]
    norm = torch.linalg.vector_norm(torch.stack(norms)).item()
    for gradient in gradients:
        gradient.mul_(min(max_norm / (norm + 1e-6), 1.0))
    return norm


def _make_optimizer(model: nn.Module, training: Training) -> torch.optim.AdamW:
    matrices = [parameter for parameter in model.parameters() if parameter.dim() >= 2]
    others = [parameter for parameter in model.parameters() if parameter.dim() < 2]
    groups = [
        {"params": matrices, "weight_decay": training.weight_decay},
        {"params": others, "weight_decay": 0.0},
    ]
    return torch.optim.AdamW(groups, lr=training.lr, betas=(0.9, 0.95))


def _learning_rate(training: Training) -> Callable[[int], float]:
    """Return a function from a step to its fraction of `lr`."""
    warmup = training.steps // 10

    def share(step: int) -> float:
        if step < warmup:
            return step / warmup
        return (1 + math.cos(math.pi * (step - warmup) / max(training.steps - warmup, 1))) / 2

    return share


def _batches(sequences: Dataset, training: Training) -> Iterator[dict[str, Tensor]]:
    """Yield full batches without end, each epoch in another order: that of torch's sampler for one replica."""
    sampler: DistributedSampler = DistributedSampler(
        sequences, num_replicas=1, rank=0, seed=training.order_seed, drop_last=True
    )
    loader = DataLoader(sequences, batch_size=training.batch_size, sampler=sampler, drop_last=True)
    for epoch in itertools.count():
        sampler.set_epoch(epoch)
        yield from loader
