"""Greedy answers of a boosted encoder-decoder under any layout, also where no rank holds the whole model."""

# B batch, A tokens of an answer

import torch
import torch.distributed as dist
from evaluation import outputs_of
from torch import Tensor, nn

from echelon import Booster, HybridParallelPlugin


@torch.no_grad()
def greedy_answers(booster: Booster, model: nn.Module, batch: dict[str, Tensor], *, length: int) -> Tensor:
    """The likeliest token, again and again, until the one that ends an answer. Collective over the world.

    What `generate` gives without sampling. Each token is a forward of the whole model, for which `execute_pipeline`
    is enough: it needs no memory of earlier ones on other stages.

    Args:
        batch: a text of this replica, input_ids and attention_mask.
        length: how many tokens.

    Returns:
        (B, A) on the CPU of every rank, filled up with the token that pads.
    """
    config = model.unwrap().config  # says what begins and ends an answer
    asked = {name: batch[name] for name in ("input_ids", "attention_mask")}
    tokens_BA = torch.full((len(batch["input_ids"]), 1), config.decoder_start_token_id)
    for _ in range(length):
        outputs = outputs_of(booster, model, asked | {"decoder_input_ids": tokens_BA})
        following = torch.zeros(len(tokens_BA), dtype=torch.long)
        if outputs is not None:
            following = outputs.logits[:, -1].argmax(-1).cpu()
            has_ended = (tokens_BA == config.eos_token_id).any(1)
            following[has_ended] = config.pad_token_id
        tell_other_stages(booster, following)
        tokens_BA = torch.cat([tokens_BA, following.unsqueeze(1)], dim=1)
    return tokens_BA[:, 1:]


def tell_other_stages(booster: Booster, tensor: Tensor) -> None:
    """Give a tensor of the last stage, on the CPU, to all of its pipeline, in place. Broadcast over pp."""
    plugin = booster.plugin
    if isinstance(plugin, HybridParallelPlugin) and plugin.pp_size > 1:
        last = plugin.stage_manager.stage_ranks[-1]
        dist.broadcast(tensor, group=plugin.mesh.group("pp"), group_src=last)
