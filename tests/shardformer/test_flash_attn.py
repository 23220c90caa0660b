"""The package flash-attn as models call it, by a stand-in of its signatures: masks, windows, caps and heads arrive."""

from typing import Any

import pytest
import torch
from torch import Tensor

from echelon.shardformer.layers.attention import FLASH_ATTENTION_2, SDPA, attention_errors, set_attention
from echelon.verify.batch import make_batch
from echelon.verify.models import ModelChoice

from ..models.stand_ins import LOOKS_FOR_FLASH_ATTN, installed_flash_attn

pytestmark = LOOKS_FOR_FLASH_ATTN
# Grouped queries; a cap and windows; both directions.
TYPES = ("llama", "gemma2", "gemma3_text", "bert")
# Those that choose their attention when they are built; one whose layers all see all tokens.
BUILT: dict[str, dict[str, object]] = {
    "falcon": {},
    "gpt_neo": {"attention_types": [[["global"], 4]]},
    "gptj": {},
}


@pytest.mark.parametrize("model_type", TYPES)
def test_a_model_computes_as_with_its_plain_code(model_type: str) -> None:
    choice = ModelChoice(model_type=model_type)
    model: Any = choice.build().eval()
    batch = make_batch(choice, num_samples=3, seed=1)
    model.set_attn_implementation("eager")
    expected = of_loss(model, batch)
    with installed_flash_attn() as called:
        assert attention_errors(model, FLASH_ATTENTION_2, "enable_flash_attention") == []
        set_attention(model, FLASH_ATTENTION_2)
        found = of_loss(model, batch)
    assert called
    torch.testing.assert_close(found, expected, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("model_type", BUILT)
def test_a_model_that_is_built_with_it_computes_as_with_its_plain_code(model_type: str) -> None:
    with installed_flash_attn() as called:
        models = [
            built_with(kernel, model_type, **BUILT[model_type]) for kernel in ("eager", FLASH_ATTENTION_2)
        ]
        batch = make_batch(ModelChoice(model_type=model_type), num_samples=3, seed=1)
        expected, found = (of_loss(model, batch) for model in models)
        (fault,) = attention_errors(models[0], FLASH_ATTENTION_2, "x")
        assert f"build it with attn_implementation='{FLASH_ATTENTION_2}'" in fault
        assert attention_errors(models[1], FLASH_ATTENTION_2, "x") == []
    assert called
    torch.testing.assert_close(found, expected, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize(
    ("choice", "words"),
    [
        (ModelChoice(model_type="bart"), "takes the padding of the states for that of the decoder's tokens"),
        (ModelChoice(model_type="gemma3"), "the tokens of an image see those behind them"),
        (ModelChoice(model_type="falcon", settings=(("alibi", True),)), "adds slopes of the heads"),
        (ModelChoice(model_type="gpt_neo"), "has layers that see the last tokens alone"),
    ],
    ids=["encoder and decoder", "image tokens", "slopes", "windows"],
)
def test_a_model_whose_mask_would_be_lost_is_refused(choice: ModelChoice, words: str) -> None:
    model = choice.build_on_meta()
    found = attention_errors(model, FLASH_ATTENTION_2, "enable_flash_attention")
    assert any(words in fault and "leave enable_flash_attention out" in fault for fault in found)
    assert not any(words in fault for fault in attention_errors(model, SDPA, "enable_flash_attention"))


@pytest.mark.parametrize("model_type", ["bart", "gemma3", "gpt_neo"])
def test_its_mask_is_lost_in_one_process(model_type: str) -> None:
    """When this fails transformers has mended it, and the model need not be refused."""
    batch = make_batch(ModelChoice(model_type=model_type), num_samples=3, seed=1)
    with installed_flash_attn():
        expected, found = (
            built_with(kernel, model_type)(**batch).loss for kernel in ("eager", FLASH_ATTENTION_2)
        )
    assert abs((found - expected).item()) > 1e-5


def built_with(kernel: str, model_type: str, **settings: object) -> Any:
    """A model for evaluation that computes attention with a kernel from the beginning."""
    given = (("attn_implementation", kernel), *settings.items())
    return ModelChoice(model_type=model_type, settings=given).build().eval()


def of_loss(model: Any, batch: dict[str, Tensor]) -> list[Tensor]:
    """The loss, and its gradient of the first and the last parameter that have one."""
    model.zero_grad()
    loss = model(**batch, use_cache=False).loss if model.can_generate() else model(**batch).loss
    loss.backward()
    gradients = [each.grad for each in model.parameters() if each.grad is not None]
    return [loss.detach(), gradients[0].clone(), gradients[-1].clone()]
