"""Greedy decoding of a boosted encoder-decoder under any layout, including pipelines."""

# B batch, A tokens of an answer

import torch
import torch.distributed as dist
from evaluation import outputs_of
from torch import Tensor, nn

from echelon import Booster, HybridParallelPlugin


@torch.no_grad()
def greedy_answers(booster: Booster, model: nn.Module, batch: dict[str, Tensor], *, length: int) -> Tensor:
    """Decode answers greedily, up to their end token. Collective over the world.

    The answers equal those of `generate` without sampling. Each token takes a full forward by `execute_pipeline`,
    without key-value caches.

    Args:
        batch: this replica's texts, as input_ids and attention_mask.
        length: maximum number of tokens of an answer.

    Returns:
        (B, A) on the CPU of every rank, padded by the padding token.
    """
    config = model.unwrap().config  # has the start, end and padding tokens
    asked = {name: batch[name] for name in ("input_ids", "attention_mask")}
    tokens_BA = torch.full((len(batch["input_ids"]), 1), config.decoder_start_token_id)
    for _ in range(length):
        outputs = outputs_of(booster, model, asked | {"decoder_input_ids": tokens_BA})
        following = torch.zeros(len(tokens_BA), dtype=torch.long)
        if outputs is not None:
            following = outputs.logits[:, -1].argmax(-1).cpu()
            has_ended = (tokens_BA == config.eos_token_id).any(1)
            following[has_ended] = config.pad_token_id
        broadcast_from_last_stage(booster, following)
        tokens_BA = torch.cat([tokens_BA, following.unsqueeze(1)], dim=1)
    return tokens_BA[:, 1:]


def broadcast_from_last_stage(booster: Booster, tensor: Tensor) -> None:
    """Broadcast a CPU tensor of the last stage to all stages of its pipeline, in place. Broadcast over pp."""
    plugin = booster.plugin
    if isinstance(plugin, HybridParallelPlugin) and plugin.pp_size > 1:
        last = plugin.stage_manager.stage_ranks[-1]
        dist.broadcast(tensor, group=plugin.mesh.group("pp"), group_src=last)
