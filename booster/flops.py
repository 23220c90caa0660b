"""FLOPs of a model's step by the usual formula, and the peak of a device, for model FLOPs utilisation."""

from typing import Any

import torch
from torch import nn

from ..cluster.device import described
from ..cluster.gpus import gpu_of
from ..shardformer.tables.experts import interface_of


def peak_flops(device: torch.device, precision: str) -> float | None:
    """Return the peak of a device in FLOPs per second in 16 bits; None for another precision or an unknown device."""
    if precision not in ("bf16", "fp16"):
        return None
    gpu = gpu_of(described(device))
    return None if gpu is None else 1e12 * gpu.teraflops


def flops_per_token(model: nn.Module, sequence_length: int) -> float:
    """Return the FLOPs of forward and backward for a token: 6 N + 12 L D S (arXiv:2204.02311, appendix B).

    N are the parameters of matrices that a token is multiplied by: without the table of an input embedding, unless it
    is the head's too, and of a mixture's experts only those that the token chooses. L D S is the number of layers
    times the width of all heads times the sequence length: full attention, also of a causal model. Recomputed
    activations do not count.

    Args:
        model: a transformers model of one sequence (no encoder-decoder), before `boost`.
        sequence_length: tokens of a sequence.
    """
    config: Any = model.config.get_text_config()  # type: ignore[operator, union-attr]
    experts = {
        parameter: config.num_experts_per_tok / getattr(module, interface.counts[0])
        for module in model.modules()
        if (interface := interface_of(module)) is not None
        for parameter in module.parameters()
    }
    heads = {module.weight for module in model.modules() if isinstance(module, nn.Linear)}
    tables = {module.weight for module in model.modules() if isinstance(module, nn.Embedding)} - heads
    num_parameters = sum(
        parameter.numel() * experts.get(parameter, 1.0)
        for parameter in model.parameters()
        if parameter.dim() >= 2 and parameter not in tables
    )
    head_dim = getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads
    width = config.num_attention_heads * head_dim
    return 6 * num_parameters + 12 * config.num_hidden_layers * width * sequence_length
