"""Facts that are read from the code of forwards."""

import pytest
import torch
from torch import Tensor, nn

from echelon.shardformer.layers.forward_code import (
    exit_error,
    only_scales_result,
    returns_tuple,
)


class Attention(nn.Module):
    def forward(self, hidden_states: Tensor, attention_mask: Tensor | None = None) -> tuple[Tensor, None]:
        scores = self.q_norm(self.q_proj(hidden_states))
        hidden_states = self.o_proj(scores)
        hidden_states = hidden_states.contiguous()
        return hidden_states, scores


class NormBehind(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        return self.norm(self.o_proj(x))


class NormLater(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        x = self.o_proj(x)
        return self.norm(x)


class Residual(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        return x + self.o_proj(x)


class GateLater(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        gate = self.norm(x).sigmoid()
        out = self.o_proj(x)
        return out * gate


class GatedInPlace(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        gate = x.sigmoid()
        out = self.o_proj(x)
        out *= gate
        return out


class Twice(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        out = self.o_proj(x)
        return self.o_proj(out)


def test_a_result_that_is_returned_unchanged_is_recognized() -> None:
    assert exit_error(Attention(), "o_proj", ["q_proj", "q_norm"]) is None


@pytest.mark.parametrize(
    ("kind", "reason"),
    [
        (NormBehind, "uses norm after o_proj"),
        (NormLater, "uses norm after o_proj"),
        (Residual, "computes with what o_proj returns"),
        (GateLater, "computes with what o_proj returns"),
        (GatedInPlace, "computes with what o_proj returns"),
        (Twice, "in one place"),
    ],
)
def test_code_that_uses_a_result_is_recognized(kind: type[nn.Module], reason: str) -> None:
    error = exit_error(kind(), "o_proj", ["norm"])
    assert error is not None
    assert reason in error


class Capped(nn.Module):
    def forward(self, x: Tensor, labels: Tensor) -> object:
        logits = self.lm_head(x[:, 1:]).float()
        logits = logits / self.config.cap
        logits = torch.tanh(logits) * self.config.cap
        loss = None
        if labels is not None:
            loss = self.loss_function(logits, labels)
        return CausalOutput(loss=loss, logits=logits)  # noqa: F821


class Suppressed(nn.Module):
    def forward(self, x: Tensor, labels: Tensor) -> object:
        logits = self.lm_head(x)
        logits[:, :, 3] = -1.0
        return self.loss_function(logits, labels), logits


class Shifted(nn.Module):
    def forward(self, x: Tensor, labels: Tensor) -> object:
        logits = self.lm_head(x)
        logits = logits - logits.mean(-1)
        return self.loss_function(logits, labels), logits


class ShiftedInPlace(nn.Module):
    def forward(self, x: Tensor, labels: Tensor) -> object:
        logits = self.lm_head(x)
        logits -= self.shift
        return self.loss_function(logits, labels), logits


class Masked(nn.Module):
    def forward(self, x: Tensor, labels: Tensor) -> object:
        logits = self.lm_head(x)
        logits = logits * self.scale[labels]
        return self.loss_function(logits, labels), logits


def test_logits_that_are_only_scaled_or_capped_are_recognized() -> None:
    assert only_scales_result(Capped(), "lm_head")
    for kind in (Suppressed, Shifted, ShiftedInPlace, Masked):
        assert not only_scales_result(kind(), "lm_head"), kind


class Tuples(nn.Module):
    def forward(self, hidden: Tensor, position_ids: Tensor, **kwargs: object) -> tuple:
        outputs = (hidden, None)
        return outputs


def test_a_forward_that_returns_a_tuple_is_recognized() -> None:
    assert returns_tuple(Tuples())
    assert not returns_tuple(Twice())
