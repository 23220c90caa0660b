"""The outputs of TRL's fused head, computed from a model's logits.

TRL's trainers replace `model.forward` by one that multiplies hidden states with `lm_head.weight` tile by tile, and call
it with `fused_lm_head=True`. A sharded head has only a part of that weight, and a pipeline's stages only a part of the
forward, so boost gets the model with its own forward, and these calls get the same numbers from its logits.
"""

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


class FusedOutputs:
    """Attributes of TRL's `FusedCausalLMOutput`: of every position (B, S), 0 where the label is -100.

    Args:
        logits_BSV: all logits.
        call: the arguments of the call, with `labels` or `shift_labels`.
    """

    aux_loss = None

    def __init__(self, logits_BSV: Tensor, call: dict[str, Any]) -> None:
        labels_BS = call.get("shift_labels")
        if labels_BS is None:
            labels_BS, logits_BSV = call["labels"][:, 1:], logits_BSV[:, :-1]
        self.label_mask = labels_BS != -100
        self._labels_BS, self._logits_BSV = labels_BS, logits_BSV.detach()
        log_probs_BSV = torch.log_softmax(logits_BSV.float(), dim=-1)
        targets_BS1 = labels_BS.clamp(min=0).unsqueeze(-1)
        self.log_probs = self._masked(log_probs_BSV.gather(-1, targets_BS1).squeeze(-1))
        self._log_probs_BSV = log_probs_BSV.detach()
        count = call.get("num_items_in_batch")
        self.loss = -self.log_probs.sum() / (self.label_mask.sum().clamp(min=1) if count is None else count)

    # Of the others a trainer reads some.

    @property
    def entropy(self) -> Tensor:
        """The entropy of the predicted distribution."""
        return self._masked(-(self._log_probs_BSV.exp() * self._log_probs_BSV).sum(-1))

    @property
    def is_top1(self) -> Tensor:
        """True where the label is the most likely token."""
        return (self._logits_BSV.argmax(-1) == self._labels_BS) & self.label_mask

    @property
    def mean_logits(self) -> Tensor:
        """The mean over the vocabulary."""
        return self._masked(self._logits_BSV.float().mean(-1))

    @property
    def log_sum_sq_probs(self) -> Tensor:
        """The logarithm of the sum of squared probabilities."""
        return self._masked((2 * self._log_probs_BSV).logsumexp(-1))

    def _masked(self, values_BS: Tensor) -> Tensor:
        return values_BS.masked_fill(~self.label_mask, 0)
