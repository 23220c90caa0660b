"""Outputs of a split model: whole logits, or split ones where that was asked for; and generation."""

from collections.abc import Callable
from copy import deepcopy
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from echelon.shardformer.layers import VocabParallelLogits

from ..pool import Pool
from .compare import (
    VOCABULARY,
    batch_for,
    build,
    integers,
    named,
    require_equal_on_ranks,
    require_same_gradients,
    require_same_training,
    split,
    text,
)

CLASSES = ("LlamaForCausalLM", "GPT2LMHeadModel", "BertForMaskedLM", "BertLMHeadModel")


def model_of(class_name: str) -> nn.Module:
    settings = {"num_key_value_heads": 2} if class_name.startswith("Llama") else {}
    if class_name == "BertLMHeadModel":
        settings["is_decoder"] = True
    return build(class_name, **settings)


def require_close(found: Tensor, expected: Tensor) -> None:
    torch.testing.assert_close(found, expected, rtol=1e-5, atol=1e-5)


def labels_and_modes() -> None:
    for class_name in CLASSES:
        model = model_of(class_name)
        copied = split(deepcopy(model))
        batch, ids = batch_for(model), text()
        routed = class_name != "BertForMaskedLM"  # which hard-codes its loss
        with named(class_name):
            for training in (True, False):
                model.train(training)
                copied.train(training)
                expected = model(**batch)
                require_close(copied(**ids).logits, expected.logits)
                outputs = copied(**batch)
                require_close(outputs.loss, expected.loss)
                if routed and training:
                    assert isinstance(outputs.logits, VocabParallelLogits)
                    require_close(outputs.logits.gather(), expected.logits)
                else:
                    require_close(outputs.logits, expected.logits)
                # The call after is not touched by the one before.
                require_close(
                    copied(ids["input_ids"], attention_mask=ids["attention_mask"]).logits, expected.logits
                )
                loss, logits, *_ = copied(**batch, return_dict=False)
                require_close(loss, expected.loss)
                assert isinstance(logits, VocabParallelLogits) == (routed and training)
                whole = logits.gather() if isinstance(logits, VocabParallelLogits) else logits
                require_close(whole, expected.logits)


def whole_output() -> None:
    for class_name in CLASSES:
        with named(class_name):
            _, outputs, expected = require_same_training(
                model_of(class_name), batch_for(model_of(class_name)), parallel_output=False
            )
            require_close(outputs.logits, expected.logits)
            require_equal_on_ranks(outputs.logits, "the logits")


def from_gathered() -> None:
    """A loss of the user's own, on gathered logits, trains the same; so does one on logits without labels."""

    def through_gather(outputs: Any) -> Tensor:
        logits = outputs.logits
        logits = logits.gather() if isinstance(logits, VocabParallelLogits) else logits
        return outputs.loss + logits.logsumexp(-1).square().mean()

    model = model_of("LlamaForCausalLM")
    require_same_training(model, batch_for(model), loss=through_gather)
    model = model_of("LlamaForCausalLM")
    require_same_training(model, text(), loss=lambda outputs: outputs.logits.logsumexp(-1).square().mean())


def counted_items() -> None:
    model = model_of("LlamaForCausalLM")
    require_same_training(model, {**batch_for(model), "num_items_in_batch": torch.tensor(50)})
    model = model_of("LlamaForCausalLM")
    require_same_training(model, {**batch_for(model), "shift_labels": integers(0, VOCABULARY, 3, 13, seed=8)})


def smoothed(logits: Tensor, labels: Tensor, vocab_size: int, **kwargs: Any) -> Tensor:
    """A loss that a user gives a model."""
    return nn.functional.cross_entropy(
        logits.flatten(0, 1), labels.flatten(), ignore_index=-100, label_smoothing=0.1
    )


def own_loss() -> None:
    model = model_of("LlamaForCausalLM")
    model.loss_function = smoothed  # type: ignore[assignment]
    _, outputs, expected = require_same_training(model, batch_for(model))
    require_close(outputs.logits, expected.logits)


def past_the_hooks() -> None:
    """`model.forward(...)` runs no hooks: the loss is right all the same."""
    model = model_of("LlamaForCausalLM")
    copied, batch = split(deepcopy(model)), batch_for(model)
    model.forward(**batch).loss.backward()
    copied.forward(**batch).loss.backward()
    require_same_gradients(copied, model)


def after_an_error() -> None:
    """A call that failed leaves nothing behind for the next use of the head."""
    copied = split(model_of("LlamaForCausalLM"))
    batch = batch_for(copied)
    with pytest.raises(ValueError, match=r"label \d+ is outside the vocabulary of 101"):
        copied(**{**batch, "labels": batch["labels"].clamp(min=0) + VOCABULARY})
    assert copied.lm_head(torch.zeros(1, 1, 32)).shape[-1] == VOCABULARY


def refuse_attentions() -> None:
    copied = split(build("LlamaForCausalLM", attention="eager"))
    with pytest.raises(ValueError, match="the attention of its own heads alone"):
        copied(**text(), output_attentions=True)
    copied.config.output_attentions = True
    with pytest.raises(ValueError, match="the attention of its own heads alone"):
        copied(**text())


def hidden_states() -> None:
    model = model_of("LlamaForCausalLM")
    copied = split(deepcopy(model))
    found = copied(**text(), output_hidden_states=True).hidden_states
    for one, other in zip(found, model(**text(), output_hidden_states=True).hidden_states, strict=True):
        require_close(one, other)


def use_what_is_split() -> None:
    copied = split(model_of("LlamaForCausalLM"))
    logits = copied(**batch_for(copied)).logits
    for use in (lambda: logits.argmax(-1), lambda: logits.shape):
        with pytest.raises(AttributeError, match=r"call outputs\.logits\.gather\(\) on every rank"):
            use()
    uses: list[Callable[[], Any]] = [lambda: logits + 1, lambda: logits[0], lambda: torch.exp(logits)]
    for use in uses:
        with pytest.raises(TypeError):
            use()


def generate() -> None:
    for class_name, attention in (
        ("LlamaForCausalLM", "sdpa"),
        ("LlamaForCausalLM", "eager"),
        ("GPT2LMHeadModel", "sdpa"),
        ("Qwen3ForCausalLM", "sdpa"),
        ("T5ForConditionalGeneration", "sdpa"),
        ("UMT5ForConditionalGeneration", "eager"),
    ):
        settings: dict[str, Any] = {"head_dim": 8, "num_key_value_heads": 2} if "Qwen3" in class_name else {}
        if "T5" in class_name:  # transformers makes a cache of as many layers as the encoder has
            settings = {"num_decoder_layers": 2}
        model = build(class_name, attention=attention, seed=1, **settings).eval()
        model.generation_config.eos_token_id = None
        copied = split(deepcopy(model))
        prompt = {"input_ids": integers(3, VOCABULARY, 2, 5), "attention_mask": torch.ones(2, 5).long()}
        for how in ({"do_sample": False}, {"do_sample": False, "num_beams": 2}, {"do_sample": True}):
            tokens = []
            for each in (model, copied):
                torch.manual_seed(3)
                tokens.append(each.generate(**prompt, max_new_tokens=6, pad_token_id=0, **how))
            assert tokens[0].shape == (2, 7 if "T5" in class_name else 11)
            assert torch.equal(*tokens), f"{class_name} {attention} {how}: {tokens}"


@pytest.mark.parametrize(
    "function",
    [
        labels_and_modes,
        whole_output,
        from_gathered,
        counted_items,
        own_loss,
        past_the_hooks,
        after_an_error,
        refuse_attentions,
        hidden_states,
        use_what_is_split,
    ],
)
def test_outputs_are_whole_or_say_that_they_are_not(pool: Pool, function: Callable[[], None]) -> None:
    pool.run(2, function)


def test_generation_gives_the_tokens_of_the_whole_model(pool: Pool) -> None:
    pool.run(2, generate)
