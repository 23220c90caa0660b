"""The outputs of TRL's fused head, computed from a model's logits.

TRL's trainers replace `model.forward` by one that multiplies hidden states with `lm_head.weight` tile by tile, and call
it with `fused_lm_head=True`. A sharded head has only a part of that weight, and a pipeline's stages only a part of the
forward, so boost gets the model with its own forward, and these calls get the same numbers from its logits.
"""

from types import SimpleNamespace
from typing import Any

import torch
from torch import Tensor, nn

FUSED = "fused_lm_head"


def remove_fused_head(model: nn.Module) -> None:
    """Give a model its own forward back, if TRL has replaced it."""
    for module in model.modules():
        forward = module.__dict__.get("forward")
        if "_fused_forward" in str(getattr(getattr(forward, "__func__", None), "__code__", "")):
            del module.forward


def fused_outputs(logits_BSV: Tensor, call: dict[str, Any]) -> Any:
    """Return what TRL's `FusedCausalLMOutput` has: numbers of every position, 0 where the label is -100.

    Args:
        logits_BSV: all logits.
        call: the arguments of the call, with `labels` or `shift_labels`.
    """
    labels_BS = call.get("shift_labels")
    if labels_BS is None:
        labels_BS, logits_BSV = call["labels"][:, 1:], logits_BSV[:, :-1]
    mask_BS = labels_BS != -100
    log_probs_BSV = torch.log_softmax(logits_BSV.float(), dim=-1)
    targets_BS1 = labels_BS.clamp(min=0).unsqueeze(-1)
    log_probs_BS = log_probs_BSV.gather(-1, targets_BS1).squeeze(-1).masked_fill(~mask_BS, 0)
    with torch.no_grad():
        entropy_BS = -(log_probs_BSV.exp() * log_probs_BSV).sum(-1).masked_fill(~mask_BS, 0)
        is_top1_BS = (logits_BSV.argmax(-1) == labels_BS) & mask_BS
    count = call.get("num_items_in_batch")
    total = -log_probs_BS.sum()
    return SimpleNamespace(
        loss=total / (mask_BS.sum().clamp(min=1) if count is None else count),
        log_probs=log_probs_BS,
        entropy=entropy_BS,
        is_top1=is_top1_BS,
        label_mask=mask_BS,
        aux_loss=None,
    )
