"""The optimizers that are verified: those of the boosted run, and those of one process."""

from collections.abc import Sequence

import torch
from torch import nn
from torch.nn import Parameter
from torch.optim import AdamW, Optimizer

from ..zero.combined import CombinedOptimizer
from ..zero.muon import Muon
from .layout_choice import EPSILON, LEARNING_RATE

OPTIMIZERS = ("adamw", "muon", "adafactor", "sgd")
# An error of a gradient stays an error of this fraction, where AdamW divides it by its own size.
SGD_RATE = 0.1
# The fraction of the learning rate by which a matrix may be off after a step of Muon whose gradients agree. It computes
# in bfloat16: five iterations with a slope of up to 3.44 at small singular values amplify the rounding of an entry,
# 2^-9, by 3.44^5 = 480, to about the size of the entry.
_ROUNDED = 1e-1
# The same for SGD: that of the norm to which gradients are clipped.
_ROUNDED_SGD = 1e-5


def optimizers_of(
    model: nn.Module, kind: str, *, vector_rate: float = LEARNING_RATE, fused: bool | None = None
) -> list[Optimizer]:
    """Return the optimizers that together update a model: one, or Muon for matrices beside AdamW for the others."""
    parameters = list(model.parameters())
    matrices = [parameter for parameter in parameters if parameter.ndim > 1]
    vectors = [parameter for parameter in parameters if parameter.ndim <= 1]
    if kind == "sgd":
        return [torch.optim.SGD(parameters, lr=SGD_RATE)]
    if kind == "adafactor":
        return [torch.optim.Adafactor(_groups(matrices, vectors, vector_rate), lr=LEARNING_RATE)]
    if kind == "adamw":
        return [AdamW(_groups(matrices, vectors, vector_rate), lr=LEARNING_RATE, eps=EPSILON, fused=fused)]
    hidden = _hidden(model)
    muon = [parameter for name, parameter in model.named_parameters() if name in hidden]
    tables = [
        parameter for name, parameter in model.named_parameters() if parameter.ndim > 1 and name not in hidden
    ]
    adamw = AdamW(_groups(tables, vectors, vector_rate), lr=LEARNING_RATE, eps=EPSILON, fused=fused)
    return [Muon(muon, lr=LEARNING_RATE, weight_decay=0.01), adamw]


def rounding_of(model: nn.Module, kind: str) -> dict[str, float]:
    """Return by name the `rounding` that `compare_float32` takes."""
    if kind == "sgd":
        return {name: _ROUNDED_SGD for name, _ in model.named_parameters()}
    return dict.fromkeys(_hidden(model), _ROUNDED) if kind == "muon" else {}


def largest_rate(kind: str, vector_rate: float) -> float:
    """Return the largest learning rate of a model's parameters."""
    return SGD_RATE if kind == "sgd" else max(LEARNING_RATE, vector_rate)


def combined(optimizers: Sequence[Optimizer]) -> Optimizer:
    """Return one optimizer of several."""
    return optimizers[0] if len(optimizers) == 1 else CombinedOptimizer(optimizers)


def _groups(
    matrices: list[Parameter], vectors: list[Parameter], vector_rate: float
) -> list[dict[str, object]]:
    """Return groups with weight decay on matrices only, as in fine-tuning scripts."""
    return [
        {"params": matrices, "weight_decay": 0.01},
        {"params": vectors, "weight_decay": 0.0, "lr": vector_rate},
    ]


def _hidden(model: nn.Module) -> set[str]:
    """Return the names of matrices that Muon updates: all but embeddings and the head."""
    modules = dict(model.named_modules())
    tables = {path for path, module in modules.items() if isinstance(module, nn.Embedding)}
    linear = [path for path, module in modules.items() if isinstance(module, nn.Linear)]
    tables.update(linear[-1:])  # the head
    return {
        name
        for name, parameter in model.named_parameters()
        if parameter.ndim > 1 and name.rpartition(".")[0] not in tables
    }
