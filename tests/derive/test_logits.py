"""What forwards do with the result of their head, traced on small copies."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
import transformers
from torch import Tensor, nn
from transformers import LlamaConfig, LlamaForCausalLM
from transformers.modeling_outputs import CausalLMOutput

from echelon.derive.logits import LogitsUse, use_of_logits

SIZES = dict(num_hidden_layers=1, hidden_size=16, intermediate_size=16, num_attention_heads=2, vocab_size=20)
SMALL = LlamaConfig(**SIZES)


def using(change: Callable[[Any, Tensor], Tensor], *, after: bool = False) -> type[LlamaForCausalLM]:
    """Return a Llama that changes its logits, before or after the loss."""

    class Using(LlamaForCausalLM):
        def forward(self, input_ids: Tensor, labels: Tensor, **kwargs: Any) -> CausalLMOutput:  # type: ignore[override]
            logits = self.lm_head(self.model(input_ids)[0])
            logits = logits if after else change(self, logits)
            loss = self.loss_function(logits=logits, labels=labels, vocab_size=self.config.vocab_size)
            return CausalLMOutput(loss=loss, logits=change(self, logits) if after else logits)

    return Using


def suppressed(model: Any, logits: Tensor) -> Tensor:
    logits[:, :, 3] = -1.0
    return logits


def shifted_in_place(model: Any, logits: Tensor) -> Tensor:
    logits -= logits.mean(-1, keepdim=True)
    return logits


@pytest.mark.parametrize("after", [False, True])
@pytest.mark.parametrize(
    ("change", "use"),
    [
        (lambda model, logits: logits, LogitsUse.UNCHANGED),
        (lambda model, logits: logits.float() / 3 * torch.tensor(2.0), LogitsUse.SCALED),
        (lambda model, logits: 3 * torch.tanh(logits.to(logits.device)), LogitsUse.SCALED),
        (lambda model, logits: logits[..., :900] if logits.shape[-1] > 900 else logits, LogitsUse.OTHER),
        (lambda model, logits: logits * logits.size(-1), LogitsUse.OTHER),
        (lambda model, logits: logits.mul_(0.5), LogitsUse.SCALED),
        (lambda model, logits: logits * torch.ones(logits.shape[-1]), LogitsUse.OTHER),
        (lambda model, logits: logits - logits.mean(-1, keepdim=True), LogitsUse.OTHER),
        (lambda model, logits: logits + 1, LogitsUse.OTHER),
        (lambda model, logits: logits[:, :-1], LogitsUse.OTHER),
        (lambda model, logits: model.lm_head(model.lm_head.weight[:3][None]), LogitsUse.OTHER),
        (suppressed, LogitsUse.OTHER),
        (shifted_in_place, LogitsUse.OTHER),
    ],
)
def test_logits_that_are_only_scaled_are_recognized(
    change: Callable[[Any, Tensor], Tensor], use: LogitsUse, after: bool
) -> None:
    assert use_of_logits(using(change, after=after)(SMALL), "lm_head") is use


class Computing(LlamaForCausalLM):
    def forward(self, input_ids: Tensor, labels: Tensor, **kwargs: Any) -> CausalLMOutput:  # type: ignore[override]
        logits = self.lm_head(self.model(input_ids)[0])
        return CausalLMOutput(
            loss=nn.functional.cross_entropy(logits.flatten(0, 1), labels.flatten()), logits=logits
        )


def test_a_loss_that_the_forward_computes_itself_is_another_use() -> None:
    assert use_of_logits(Computing(SMALL), "lm_head") is LogitsUse.OTHER
    assert use_of_logits(nn.Linear(2, 2), "") is LogitsUse.OTHER


@pytest.mark.parametrize(
    ("model_type", "head", "use"),
    [
        ("bert", "cls.predictions.decoder", LogitsUse.UNCHANGED),
        ("gemma2", "lm_head", LogitsUse.SCALED),
        ("cohere", "lm_head", LogitsUse.SCALED),
    ],
)
def test_heads_of_transformers_are_followed(model_type: str, head: str, use: LogitsUse) -> None:
    with torch.device("meta"):
        config = transformers.CONFIG_MAPPING[model_type](**SIZES)
        model = transformers.AutoModelForCausalLM.from_config(config)
    before = torch.get_rng_state()
    assert use_of_logits(model, head) is use
    assert torch.equal(before, torch.get_rng_state())
