"""Attention through transformers' interface with sharded sequences, and refusals of models."""

import re
from functools import partial
from typing import Any
from unittest.mock import patch

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from transformers import CONFIG_MAPPING, AttentionInterface, LlamaConfig
from transformers.integrations.sdpa_attention import sdpa_attention_forward
from transformers.masking_utils import bidirectional_mask_function

from echelon.pipeline.stage_plan import StagePlan
from echelon.shardformer import policy_for
from echelon.shardformer.derived import derived_table
from echelon.shardformer.layers.forward_code import mixing_errors
from echelon.shardformer.layers.sequence_axis import SequenceAxis, SequenceOrder
from echelon.shardformer.sequence.attention import all_to_all_attention, ring_attention_of
from echelon.shardformer.sequence.block_mask import block_mask
from echelon.shardformer.sequence.config import MODES, SequenceParallelism
from echelon.shardformer.sequence.loss import stays_sharded
from echelon.shardformer.sharder import split_errors
from echelon.shardformer.table_policy import TablePolicy
from echelon.verify.model_choice import ModelChoice

from ...pool import Pool
from ..compare import build

B, LENGTH = 2, 7


class Attention(nn.Module):
    """The attributes that attention functions read."""

    def __init__(self, config: Any = None) -> None:
        super().__init__()
        self.num_key_value_groups, self.is_causal, self.config = 2, True, config


def tensors(length: int) -> list[Tensor]:
    generator = torch.Generator().manual_seed(0)
    return [torch.randn(B, heads, length, 8, generator=generator) for heads in (4, 2, 2)]


def attend_with_flash() -> None:
    """Flash attention finds packed sequences by the full positions, and its version by the config."""
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
    axis.mark(module)
    module.config._attn_implementation_internal = "echelon_all_to_all_flash_attention_2"
    positions = torch.tensor([[0, 1, 2, 0, 1, 2, 3]])
    q, k, v = (axis.shard(each, 2) for each in tensors(LENGTH))
    padding = torch.ones(B, LENGTH, dtype=torch.bool)
    with patch.dict(AttentionInterface._global_mapping, flash_attention_2=stand_in):
        out, _ = all_to_all_attention(
            "flash_attention_2", module, q, k, v, padding, position_ids=axis.shard(positions, 1)
        )
    assert seen["kernel"] == "flash_attention_2" and seen["length"] == LENGTH
    assert torch.equal(seen["positions"], positions)
    kept = LENGTH - 4 if axis.rank else 4  # the rest is padding
    assert torch.equal(out[:, :kept], q.transpose(1, 2)[:, :kept])
    for function in (partial(all_to_all_attention, "sdpa"), ring_attention_of):
        with pytest.raises(ValueError, match="Attention passes indices to its attention"):
            function(module, q, k, v, None, indices=positions)
    with pytest.raises(ValueError, match="passes s_aux to its attention"):
        ring_attention_of(module, q, k, v, None, softcap=50.0, s_aux=torch.zeros(4))
    with pytest.raises(ValueError, match="caps its scores"):
        ring_attention_of(Attention(module.config), q, k, v, None, softcap=50.0)


def test_flash_attention_gets_full_positions_and_unknown_arguments_are_refused(pool: Pool) -> None:
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
def test_unsharded_sequences_use_torchs_attention(given: dict[str, Any], plain: Tensor) -> None:
    module = Attention()
    q, k, v = tensors(5)
    blocks = block_mask(batch_size=B, q_length=5, kv_length=5, **given)
    expected, _ = sdpa_attention_forward(module, q, k, v, plain, scaling=0.3)
    found, _ = ring_attention_of(module, q, k, v, blocks, scaling=0.3)
    torch.testing.assert_close(found, expected)
    found, _ = all_to_all_attention("sdpa", module, q, k, v, plain, scaling=0.3)
    assert torch.equal(found, expected)


# In older releases of transformers the attention of these models does not use the interface.
CAME_LATER = ("t5", "swin", "beit")
IS_OLDER = "qwen3_5_text" not in CONFIG_MAPPING


def errors_of(model_type: str, mode: str, **settings: object) -> list[str]:
    """Return the errors of a dry run with this mode."""
    if model_type not in CONFIG_MAPPING or (IS_OLDER and model_type in CAME_LATER):
        pytest.skip("this release of transformers has no such model, or computes its attention otherwise")
    model = ModelChoice(model_type=model_type, settings=tuple(settings.items())).build_on_meta()
    kind = getattr(getattr(model, "config", None), "_attn_implementation", None)
    policy = (
        TablePolicy(derived_table(model)) if model_type in ("minimax", "qwen3_5_text") else policy_for(model)
    )
    sequence, tp = SequenceParallelism(mode=mode), 2 if mode in ("split_gather", "ring") else 1
    found = split_errors(model, policy, tp_size=tp, sp_size=2 // tp, sequence=sequence)
    assert getattr(getattr(model, "config", None), "_attn_implementation", None) == kind, (
        "the model was changed"
    )
    return found


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize(
    "model_type", ["llama", "gpt2", "bert", "opt", "mixtral", "vit", "gemma2", "deepseek_v3"]
)
def test_models_of_the_attention_interface_are_supported(model_type: str, mode: str) -> None:
    assert errors_of(model_type, mode) == []


BOTH = ("all_to_all", "ring_attn")
EAGER = {"attn_implementation": "eager"}


@pytest.mark.parametrize(
    ("model_type", "modes", "settings", "reason"),
    [
        ("bloom", BOTH, {}, "BloomModel has the attention that was chosen when it was built"),
        ("t5", BOTH, {}, "has a decoder with cross-attention"),
        ("bart", BOTH, {}, "has a decoder with cross-attention"),
        ("bert", BOTH, {"is_decoder": True, "add_cross_attention": True}, "cross-attention"),
        ("qwen3_5_text", BOTH, {}, "mixes positions by Qwen3_5GatedDeltaNet"),
        ("minimax", BOTH, {}, "MiniMaxDecoderLayer mixes positions by MiniMaxLightningAttention"),
        ("swin", MODES, {}, "compute on windows of an image"),
        ("albert", MODES, {}, "run several times each"),
        ("beit", BOTH, {}, "BeitRelativePositionBias computes positions itself"),
        ("beit", ("split_gather", "ring"), {}, "the code of BeitLayer uses shape"),
        ("llama", BOTH, {"output_attentions": True, **EAGER}, "output_attentions=True in the model's config"),
        ("gpt2", BOTH, {"reorder_and_upcast_attn": True, **EAGER}, "(config.reorder_and_upcast_attn)"),
        ("llama", BOTH, {"attn_implementation": "paged|eager"}, "must be one of eager, sdpa, sdpa_fa"),
        (
            "llama",
            BOTH[:1],
            {"num_attention_heads": 1, "num_key_value_heads": 1},
            "more than the 1 attention",
        ),
        ("granite_swa", BOTH[1:], {}, "GraniteSWAAttention passes s_aux to its attention"),
        ("bert", ("split_gather",), {"chunk_size_feed_forward": 4}, "set it to 0"),
        ("llama", MODES, {"output_hidden_states": True}, "collects the outputs of layers"),
    ],
)
def test_layers_that_would_compute_something_else_are_refused(
    model_type: str, modes: tuple[str, ...], settings: dict[str, object], reason: str
) -> None:
    for mode in modes:
        found = errors_of(model_type, mode, **settings)
        assert any(reason in each for each in found), found
        assert all(re.search("sequence_parallelism|set it to 0", each) for each in found), "no advice"
        assert len(set(found)) == len(found)


class Layer(nn.Module):
    def __init__(self, mixer: nn.Module) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(4)
        self.mlp = nn.Sequential(nn.Linear(4, 8), nn.Linear(8, 4))
        self.mixer = mixer

    def forward(self, x: Tensor) -> Tensor:
        return self.mixer(x + self.mlp(self.norm(x)))


class Slices(Layer):
    def forward(self, x: Tensor) -> Tensor:
        return x + self.mlp(self.norm(x[:, 1:]))


class Reshapes(Layer):
    def forward(self, x: Tensor) -> Tensor:
        return x + self.mlp(self.norm(x.view(-1, 4)))


@pytest.mark.parametrize(
    ("layer", "message"),
    [
        (Layer(nn.Conv1d(4, 4, 3)), "Layer.mixer is a Conv1d, which may mix positions"),
        (Layer(nn.MultiheadAttention(4, 1)), "the code of Layer.mixer uses"),
        (Slices(nn.Identity()), "the code of Slices takes slices"),
        (Reshapes(nn.Identity()), "the code of Reshapes uses view"),
    ],
)
def test_code_that_may_mix_positions_is_refused(layer: nn.Module, message: str) -> None:
    assert any(message in error for error in mixing_errors(layer, ["mlp"]))
    assert mixing_errors(Layer(nn.Identity()), ["mlp"]) == []


@pytest.mark.parametrize(
    ("class_name", "expected"),
    [("LlamaForCausalLM", True), ("GPT2LMHeadModel", False), ("LlamaForSequenceClassification", False)],
)
def test_sequences_stay_sharded_if_all_modules_after_the_layers_work_by_position(
    class_name: str, *, expected: bool
) -> None:
    model = build(class_name)
    policy = policy_for(model)
    policy.set_model(model)
    plan = policy.stage_plan()
    assert isinstance(plan, StagePlan)
    assert stays_sharded(model, plan, policy.head_path()) is expected
