"""The package flash-attn as models call it, by a stand-in of its signatures: masks, windows, caps and heads arrive."""

from typing import Any

import pytest
import torch
import transformers
from torch import Tensor
from transformers import modeling_flash_attention_utils as flash_utils

from echelon.shardformer.attention import FLASH_ATTENTION_2, attention_faults, set_attention
from echelon.verify.batch import make_batch
from echelon.verify.models import ModelChoice

from ..models.stand_ins import installed_flash_attn

pytestmark = pytest.mark.skipif(
    not hasattr(flash_utils, "FLASH_ATTENTION_COMPATIBILITY_MATRIX"),
    reason=f"transformers {transformers.__version__} looks for flash-attn in another way",
)
# Grouped queries; a cap and windows; both directions.
TYPES = ("llama", "gemma2", "gemma3_text", "bert")


@pytest.mark.parametrize("model_type", TYPES)
def test_a_model_computes_as_with_its_plain_code(model_type: str) -> None:
    choice = ModelChoice(model_type=model_type)
    model: Any = choice.build().eval()
    batch = make_batch(choice, num_samples=3, seed=1)
    model.set_attn_implementation("eager")
    expected = of_loss(model, batch)
    with installed_flash_attn() as called:
        assert attention_faults(model, FLASH_ATTENTION_2, "enable_flash_attention") == []
        set_attention(model, FLASH_ATTENTION_2)
        found = of_loss(model, batch)
    assert called
    torch.testing.assert_close(found, expected, rtol=1e-5, atol=1e-6)


def of_loss(model: Any, batch: dict[str, Tensor]) -> list[Tensor]:
    """The loss, and its gradient of the first and the last parameter that have one."""
    model.zero_grad()
    loss = model(**batch, use_cache=False).loss if model.can_generate() else model(**batch).loss
    loss.backward()
    gradients = [each.grad for each in model.parameters() if each.grad is not None]
    return [loss.detach(), gradients[0].clone(), gradients[-1].clone()]
