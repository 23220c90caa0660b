"""Inference of a sharded model equals the unsharded one: `generate`, and loss and logits of an evaluation."""

from copy import deepcopy
from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from transformers import GenerationMixin

from echelon import ShardConfig, ShardFormer
from echelon.verify.model_choice import FRAMES, MELS, VOCABULARY, ModelChoice

from ..pool import Pool
from ..slow import slow_except
from .compare import MULTIPLE, integers, named, numbers

NUM_TOKENS = 6
HOW: dict[str, dict[str, Any]] = {
    "greedy": {"do_sample": False},
    "sampled": {"do_sample": True, "top_k": 20},
    "beams": {"do_sample": False, "num_beams": 3},
    "static cache": {"do_sample": False, "cache_implementation": "static"},
    "static cache, sampled beams": {"do_sample": True, "num_beams": 2, "cache_implementation": "static"},
    "without a cache": {"do_sample": False, "use_cache": False},
}
ONE_KEY_VALUE_HEAD = (("num_key_value_heads", 1),)
CACHED = ("use_cache", True)
FEW_KEYS = (CACHED, ("new_decoder_architecture", True), ("num_kv_heads", 2))
of_two_layers = partial(ModelChoice, num_layers=2)
CHOICES: dict[str, ModelChoice] = {
    "gpt2": of_two_layers(model_type="gpt2", tied=True),
    "bloom": of_two_layers(model_type="bloom", settings=(CACHED,)),
    "falcon": of_two_layers(model_type="falcon", settings=FEW_KEYS),
    "falcon, one key-value head": of_two_layers(
        model_type="falcon", settings=(CACHED, ("multi_query", True))
    ),
    **{
        name: of_two_layers(model_type=name, settings=ONE_KEY_VALUE_HEAD)
        for name in ("llama", "mixtral", "qwen3")
    },
    **{name: of_two_layers(model_type=name) for name in ("t5", "bart", "whisper")},
}


def inputs_of(choice: ModelChoice) -> dict[str, Tensor]:
    if choice.model_type == "whisper":
        return {"input_features": numbers(2, MELS, 2 * FRAMES)}
    mask = torch.tensor([[0, 0, 1, 1, 1], [1, 1, 1, 1, 1]])  # padded on the left
    return {"input_ids": integers(3, VOCABULARY, 2, 5) * mask, "attention_mask": mask}


def answers(choice: ModelChoice, model: Any, how: dict[str, Any]) -> tuple[Tensor, Tensor]:
    """Return generated tokens (B, S) and the logits (S, B, V) by which they were chosen."""
    torch.manual_seed(3)
    options = {"max_new_tokens": NUM_TOKENS, "pad_token_id": 0, "eos_token_id": None, **how}
    if choice.model_type == "whisper":  # its own `generate` needs language tokens
        options["decoder_start_token_id"] = 1
    generated = GenerationMixin.generate(
        model, **inputs_of(choice), **options, output_logits=True, return_dict_in_generate=True
    )
    return generated.sequences, torch.stack(generated.logits)


def split_and_reference(choice: ModelChoice) -> tuple[nn.Module, nn.Module]:
    config = ShardConfig(tensor_parallel_size=2, gather_output=True, make_vocab_size_divisible_by=MULTIPLE)
    shard_former = ShardFormer(config)
    shard_former.init_distributed()
    model = choice.build(seed=1)
    return shard_former.shard_model(deepcopy(model)), model


def generate(name: str) -> None:
    choice = CHOICES[name]
    split, model = (module.eval() for module in split_and_reference(choice))
    for way, how in HOW.items():
        with named(way):
            tokens, logits = answers(choice, model, how)
            split_tokens, split_logits = answers(choice, split, how)
            assert logits.shape[0] == NUM_TOKENS
            assert torch.equal(split_tokens, tokens)
            torch.testing.assert_close(split_logits, logits, rtol=1e-4, atol=1e-5)


def evaluate(name: str) -> None:
    """With labels, in evaluation and in training, loss and logits equal those of the unsharded model."""
    choice = CHOICES[name]
    split, model = split_and_reference(choice)
    batch = {**inputs_of(choice), "labels": integers(3, VOCABULARY, 2, 5, seed=4)}
    for training in (False, True):
        expected, outputs = (module.train(training)(**batch) for module in (model, split))
        torch.testing.assert_close(outputs.loss, expected.loss, rtol=1e-6, atol=1e-6)
        torch.testing.assert_close(outputs.logits, expected.logits, rtol=1e-4, atol=1e-5)


NAMES = slow_except(["llama"], CHOICES)


@pytest.mark.parametrize("name", NAMES)
def test_generation_has_the_tokens_and_logits_of_the_unsharded_model(pool: Pool, name: str) -> None:
    pool.run(2, generate, name)


@pytest.mark.parametrize("name", NAMES)
def test_an_evaluation_has_the_loss_and_logits_of_the_unsharded_model(pool: Pool, name: str) -> None:
    pool.run(2, evaluate, name)


def draw_apart() -> None:
    """Ranks that sample different tokens raise an error instead of mixing them."""
    choice = CHOICES["llama"]
    split, _ = (module.eval() for module in split_and_reference(choice))
    rank = split.lm_head.group.rank()  # type: ignore[union-attr, operator]
    torch.manual_seed(rank)
    with pytest.raises(ValueError, match=r"the inputs of rank\(s\) \[1\] of the tensor axis differ"):
        split.generate(  # type: ignore[operator]
            **inputs_of(choice), do_sample=True, top_k=0, max_new_tokens=20, pad_token_id=0, eos_token_id=None
        )


def test_tokens_drawn_from_different_states_are_an_error(pool: Pool) -> None:
    pool.run(2, draw_apart)
