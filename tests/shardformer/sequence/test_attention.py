"""Attention under transformers' interface with sharded sequences, and models whose attention is refused."""

import copy
from functools import partial
from typing import Any
from unittest.mock import patch

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from transformers import CONFIG_MAPPING, AttentionInterface, LlamaConfig, LlamaModel
from transformers.integrations.sdpa_attention import sdpa_attention_forward
from transformers.masking_utils import bidirectional_mask_function

from echelon.shardformer.layers.sequence_axis import SequenceAxis, SequenceOrder
from echelon.shardformer.sequence.attention import (
    all_to_all_attention,
    ring_attention_of,
    sequence_attention_errors,
    set_sequence_attention,
)
from echelon.shardformer.sequence.block_mask import block_mask
from echelon.verify.models import ModelChoice

from ...pool import Pool

B, LENGTH = 2, 7


def small_llama(kernel: str) -> LlamaModel:
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=32,
        hidden_size=32,
        intermediate_size=48,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        attn_implementation=kernel,
        use_cache=False,
    )
    model = LlamaModel(config)
    model.embed_tokens = None  # it is given what would be embedded
    return model


class _Cut(torch.autograd.Function):
    """This rank's part of what all ranks have; the gradients of all parts are put together."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, axis: SequenceAxis) -> Tensor:
        ctx.axis, ctx.length = axis, axis.length
        return axis.own(x, 1)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None]:
        return gathered(gradient, ctx.axis, ctx.length), None


class _Join(torch.autograd.Function):
    """The whole from all parts; each rank takes its own part of the gradient."""

    @staticmethod
    def forward(ctx: Any, part: Tensor, axis: SequenceAxis) -> Tensor:
        ctx.axis = axis
        return gathered(part, axis, axis.length)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None]:
        return ctx.axis.own(gradient, 1), None


def gathered(part: Tensor, axis: SequenceAxis, length: int) -> Tensor:
    parts = [torch.empty_like(part, memory_format=torch.contiguous_format) for _ in range(axis.order.size)]
    dist.all_gather(parts, part.contiguous(), group=axis.group)
    return axis.order.whole(parts, 1, length)


def split_by_hand(model: LlamaModel, *, is_zigzag: bool) -> SequenceAxis:
    """Let a model's layers compute on this rank's part of the sequence."""
    group = dist.group.WORLD
    assert group is not None
    axis = SequenceAxis(group, SequenceOrder(size=group.size(), is_zigzag=is_zigzag))

    def cut(module: nn.Module, args: tuple[Tensor], kwargs: dict[str, Any]) -> tuple[Any, dict[str, Any]]:
        (hidden_BSH,) = args
        if module is model.layers[0]:
            axis.length = hidden_BSH.shape[1]
            hidden_BSH = _Cut.apply(hidden_BSH, axis)
        kwargs["position_embeddings"] = tuple(axis.own(each, 1) for each in kwargs["position_embeddings"])
        kwargs["position_ids"] = axis.own(kwargs["position_ids"], 1)
        return (hidden_BSH,), kwargs

    for layer in model.layers:
        axis.note(layer)
        layer.register_forward_pre_hook(cut, with_kwargs=True)
    model.layers[-1].register_forward_hook(lambda layer, args, output: _Join.apply(output, axis))
    return axis


def run(model: LlamaModel, inputs: Tensor, mask: Tensor | None) -> Tensor:
    out = model(inputs_embeds=inputs, attention_mask=mask).last_hidden_state
    (out * torch.linspace(0, 1, out.numel()).view_as(out).cos()).sum().backward()
    return out.detach()


def compare(mode: str, kernel: str) -> None:
    """A model whose layers are split and one whose are not."""
    whole = small_llama(kernel)
    split = copy.deepcopy(whole)
    split_by_hand(split, is_zigzag=mode == "ring_attn")
    set_sequence_attention(split, mode)
    padding = torch.ones(B, LENGTH, dtype=torch.long)
    padding[1, 4:] = 0
    for mask in (None, padding):
        found, expected = (
            torch.randn(B, LENGTH, 32, generator=torch.Generator().manual_seed(1)).requires_grad_()
            for _ in range(2)
        )
        torch.testing.assert_close(run(split, found, mask), run(whole, expected, mask))
        assert found.grad is not None and expected.grad is not None
        torch.testing.assert_close(found.grad, expected.grad)
        for (name, one), other in zip(split.named_parameters(), whole.parameters(), strict=True):
            assert one.grad is not None and other.grad is not None
            if "layers." in name:
                dist.all_reduce(one.grad)
            torch.testing.assert_close(one.grad, other.grad, msg=lambda text, name=name: f"{name}: {text}")
            one.grad = other.grad = None


@pytest.mark.parametrize("kernel", ["sdpa", "eager"])
def test_a_llama_attends_by_heads(pool: Pool, kernel: str) -> None:
    pool.run(2, compare, "all_to_all", kernel)


def test_a_llama_attends_round_the_ring(pool: Pool) -> None:
    pool.run(2, compare, "ring_attn", "sdpa")


class Attention(nn.Module):
    """The attributes that attention functions read."""

    def __init__(self, config: Any = None) -> None:
        super().__init__()
        self.num_key_value_groups, self.is_causal, self.config = 2, True, config


def tensors(length: int) -> list[Tensor]:
    generator = torch.Generator().manual_seed(0)
    return [torch.randn(B, heads, length, 8, generator=generator) for heads in (4, 2, 2)]


def attend_with_flash() -> None:
    """Flash attention knows where packed sequences begin by the positions of all, and its version by the config."""
    seen: dict[str, Any] = {}

    def stand_in(
        module: Any, query: Tensor, *given: Any, position_ids: Tensor, **rest: Any
    ) -> tuple[Tensor, None]:
        seen.update(kernel=module.config._attn_implementation, positions=position_ids, length=query.shape[2])
        return query.transpose(1, 2).contiguous(), None

    group = dist.group.WORLD
    assert group is not None
    axis = SequenceAxis(group, SequenceOrder(size=2))
    axis.length = LENGTH
    module = Attention(LlamaConfig(attn_implementation="eager"))
    axis.note(module)
    module.config._attn_implementation_internal = "echelon_all_to_all_flash_attention_2"
    positions = torch.tensor([[0, 1, 2, 0, 1, 2, 3]])
    q, k, v = (axis.own(each, 2) for each in tensors(LENGTH))
    padding = torch.ones(B, LENGTH, dtype=torch.bool)
    with patch.dict(AttentionInterface._global_mapping, flash_attention_2=stand_in):
        out, _ = all_to_all_attention(
            "flash_attention_2", module, q, k, v, padding, position_ids=axis.own(positions, 1)
        )
    assert seen["kernel"] == "flash_attention_2" and seen["length"] == LENGTH
    assert torch.equal(seen["positions"], positions)
    kept = LENGTH - 4 if axis.rank else 4  # the rest is padding
    assert torch.equal(out[:, :kept], q.transpose(1, 2)[:, :kept])
    for function in (partial(all_to_all_attention, "sdpa"), ring_attention_of):
        with pytest.raises(ValueError, match="Attention hands indices to its attention"):
            function(module, q, k, v, None, indices=positions)
    with pytest.raises(ValueError, match="hands s_aux to its attention"):
        ring_attention_of(module, q, k, v, None, softcap=50.0, s_aux=torch.zeros(4))
    with pytest.raises(ValueError, match="caps its scores"):
        ring_attention_of(Attention(module.config), q, k, v, None, softcap=50.0)


def test_flash_attention_gets_whole_positions_and_what_is_unknown_is_refused(pool: Pool) -> None:
    pool.run(2, attend_with_flash)


TRIANGLE = torch.ones(5, 5, dtype=torch.bool).tril()
PADDING = torch.tensor([[True] * 5, [True, True, True, False, False]])


@pytest.mark.parametrize(
    ("given", "plain"),
    [
        ({}, TRIANGLE[None, None]),
        (
            {"mask_function": bidirectional_mask_function, "allow_is_causal_skip": False},
            torch.ones(1, 1, 5, 5, dtype=torch.bool),
        ),
        ({"attention_mask": PADDING}, TRIANGLE & PADDING[:, None, None]),
    ],
    ids=["causal", "all", "padded"],
)
def test_whole_sequences_are_attended_to_as_ever(given: dict[str, Any], plain: Tensor) -> None:
    module = Attention()
    q, k, v = tensors(5)
    blocks = block_mask(batch_size=B, q_length=5, kv_length=5, **given)
    expected, _ = sdpa_attention_forward(module, q, k, v, plain, scaling=0.3)
    found, _ = ring_attention_of(module, q, k, v, blocks, scaling=0.3)
    torch.testing.assert_close(found, expected)
    found, _ = all_to_all_attention("sdpa", module, q, k, v, plain, scaling=0.3)
    assert torch.equal(found, expected)


OPTION = "sequence_parallelism_mode"


# In older releases of transformers the attention of these has not come to the interface.
CAME_LATER = ("t5", "swin")
IS_OLDER = "qwen3_5_text" not in CONFIG_MAPPING


def faults(mode: str, model_type: str, **settings: object) -> list[str]:
    if model_type not in CONFIG_MAPPING or (IS_OLDER and model_type in CAME_LATER):
        pytest.skip("this release of transformers has no such model, or computes its attention otherwise")
    model = ModelChoice(model_type=model_type, settings=tuple(settings.items())).build_on_meta()
    return sequence_attention_errors(model, mode, OPTION)


@pytest.mark.parametrize("mode", ["all_to_all", "ring_attn"])
@pytest.mark.parametrize("model_type", ["llama", "gpt2", "bert", "albert", "mixtral", "vit"])
def test_models_of_the_interface_can(model_type: str, mode: str) -> None:
    assert faults(mode, model_type) == []


@pytest.mark.parametrize("mode", ["all_to_all", "ring_attn"])
@pytest.mark.parametrize(
    ("model_type", "settings", "reason"),
    [
        (
            "bloom",
            {},
            "no layers of BloomForCausalLM call attention through transformers' AttentionInterface",
        ),
        ("t5", {}, "T5Attention counts positions by itself"),
        ("bart", {}, "BartDecoderLayer attends to another sequence than its own (encoder_attn)"),
        ("bert", {"is_decoder": True, "add_cross_attention": True}, "(crossattention)"),
        ("qwen3_5_text", {}, "Qwen3_5DecoderLayer mixes positions by Qwen3_5GatedDeltaNet"),
        ("swin", {}, "SwinRelativePositionBias counts positions by itself"),
        (
            "llama",
            {"output_attentions": True, "attn_implementation": "eager"},
            "config.output_attentions=False",
        ),
        (
            "gpt2",
            {"reorder_and_upcast_attn": True, "attn_implementation": "eager"},
            "config.reorder_and_upcast_attn",
        ),
        (
            "llama",
            {"attn_implementation": "flex_attention"},
            "can be one of eager, sdpa, flash_attention_2, xformers",
        ),
    ],
)
def test_what_would_be_wrong_is_refused(
    model_type: str, mode: str, settings: dict[str, object], reason: str
) -> None:
    found = faults(mode, model_type, **settings)
    assert any(reason in each for each in found), found
    assert all(each.startswith(f"{OPTION}: ") for each in found)
    assert len(set(found)) == len(found)


@pytest.mark.parametrize(
    ("model_type", "reason"),
    [
        ("granite_swa", "GraniteSWAAttention has sinks"),
    ],
)
def test_what_the_ring_lacks_heads_can_do(model_type: str, reason: str) -> None:
    assert faults("all_to_all", model_type) == []
    (*_, fault) = faults("ring_attn", model_type)
    assert reason in fault and "'all_to_all'" in fault


@pytest.mark.parametrize("mode", ["all_to_all", "ring_attn"])
def test_scores_may_be_capped(mode: str) -> None:
    assert faults(mode, "gemma2") == []


def test_only_layers_that_are_to_be_split_are_looked_at() -> None:
    model = ModelChoice(model_type="bart").build_on_meta()
    encoder = list(model.get_submodule("model.encoder.layers").children())
    found = sequence_attention_errors(model, "all_to_all", OPTION, encoder)
    assert found and not any("BartDecoder" in each for each in found), found


def test_a_model_of_another_kind_is_refused() -> None:
    (fault,) = sequence_attention_errors(nn.Linear(1, 1), "all_to_all", OPTION)
    assert "no layers of Linear" in fault
