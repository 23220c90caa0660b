"""The key-value cache of a call, under the name that a release of transformers has for it."""

import warnings
from collections.abc import Mapping
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import nn
from transformers import Cache, DynamicCache

from echelon.cluster.transformers_api import CACHE_NAMES, EmptyCache
from echelon.pipeline.stage import Stage, cache_name, drop_cache, with_known_cache_name
from echelon.shardformer.recompute import PipelineGradientCheckpointConfig, checkpoint_layers
from echelon.verify.model_choice import ModelChoice

from ..contract.variant_rows import packed
from ..plugins.training import boosted, booster_of, hybrid
from ..pool import Pool
from ..shardformer.compare import gradients

LLAMA, GPT2 = ModelChoice(model_type="llama"), ModelChoice(model_type="gpt2")
# Names that callers write, of this release and of others.
WRITTEN = ("cache", "past_key_values")


@pytest.mark.parametrize("kernel", ["sdpa", "eager"])
@pytest.mark.parametrize(
    ("choice", "modules"), [(GPT2, None), (LLAMA, ("self_attn",))], ids=["layers", "attention"]
)
def test_packed_texts_under_recomputation_have_the_gradients_of_the_plain_call(
    choice: ModelChoice, modules: tuple[str, ...] | None, kernel: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A cache would get the keys twice, and sdpa would silently take the first ones, of the previous graph."""
    choice = replace(choice, settings=(("attn_implementation", kernel),))
    model, batch = choice.build().train(), packed(choice, num_samples=3, seed=0)
    plain = model(**batch)
    plain.loss.backward()
    expected = gradients(model)
    stage = Stage(model)
    base: Any = model.base_model
    layers = list(base.h if choice.model_type == "gpt2" else base.layers)
    config = PipelineGradientCheckpointConfig(gradient_checkpointing_ratio=1.0, recompute_modules=modules)
    checkpoint_layers({0: layers}, config)
    monkeypatch.setattr(Cache, "update", lambda *_, **__: pytest.fail("keys were saved"))
    for _ in range(2):
        model.zero_grad()
        outputs = stage.forward(batch, ())
        assert torch.equal(outputs.loss, plain.loss)
        outputs.loss.backward()
        torch.testing.assert_close(gradients(model), expected, rtol=0, atol=1e-6)
    with torch.no_grad():
        assert torch.equal(stage.forward(batch, ()).loss, plain.loss)


def test_a_stage_returns_no_cache_under_any_name() -> None:
    model, batch = LLAMA.build().train(), packed(LLAMA, num_samples=3, seed=0)
    received: list[Any] = []
    model.model.register_forward_pre_hook(
        lambda module, args, kwargs: received.append(kwargs), with_kwargs=True
    )
    outputs = Stage(model).forward(batch, ())
    assert isinstance(received[0][cache_name(model) or ""], EmptyCache)
    assert not any(isinstance(value, Cache) for value in outputs.values()) and outputs.logits is not None
    assert drop_cache((outputs.logits, EmptyCache())) == (outputs.logits,)


class Takes(nn.Module):
    """A model that takes a cache under one name."""

    def __init__(self, name: str) -> None:
        super().__init__()
        takes = {"cache": lambda x, cache=None: x, "layer_past": lambda x, layer_past=None: x}
        self.forward = takes[name]


@pytest.mark.parametrize("known", ["cache", "layer_past"])
def test_a_cache_gets_the_name_of_the_model(known: str) -> None:
    model, cache = Takes(known), object()
    for name in CACHE_NAMES:
        assert with_known_cache_name(model, {"x": 1, name: cache}) == {"x": 1, known: cache}
    assert with_known_cache_name(nn.Linear(1, 1), {"cache": cache}) == {"cache": cache}


def call_with_cache(kind: str, name: str) -> list[float]:
    """Return the difference of logits from a call without a cache, and the number of cached keys."""
    model, _ = boosted(booster_of(kind, precision="fp32"), LLAMA)
    model.eval()
    ids, cache = torch.arange(3, 9)[None], DynamicCache()
    with torch.no_grad(), warnings.catch_warnings():
        warnings.simplefilter("error")
        uncached = model(input_ids=ids).logits[:, 4:]
        model(input_ids=ids[:, :4], **{name: cache})
        rest = model(input_ids=ids[:, 4:], **{name: cache}).logits
    return [(rest - uncached).abs().max().item(), cache.get_seq_length()]


@pytest.mark.parametrize("name", WRITTEN)
@pytest.mark.parametrize("kind", ["hybrid", "ddp"])
def test_callers_may_give_a_cache_under_both_names(pool: Pool, kind: str, name: str) -> None:
    ((difference, length),) = pool.run(1, call_with_cache, kind, name)
    assert difference < 1e-5 and length == 6


def refused_caches(mode: str) -> Mapping[str, str]:
    settings = {"enable_sequence_parallelism": True, "sequence_parallelism_mode": mode}
    model, *_ = hybrid(sp_size=2, **settings).boost(LLAMA.build())
    ids = torch.arange(3, 11)[None]
    errors = {}
    for name in WRITTEN:
        with pytest.raises(ValueError) as refused:
            model(input_ids=ids, labels=ids, **{name: DynamicCache()})
        errors[name] = str(refused.value)
    return errors


@pytest.mark.parametrize("mode", ["ring_attn", "all_to_all"])
def test_a_cache_under_sequence_parallelism_is_refused_under_both_names(pool: Pool, mode: str) -> None:
    """If it were not seen, each rank would cache the keys of its shard."""
    for errors in pool.run(2, refused_caches, mode):
        assert all(errors[name].startswith("use_cache=True, as in generate()") for name in WRITTEN)
