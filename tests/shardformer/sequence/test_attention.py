"""Attention through transformers' interface with sharded sequences, and refusals of models."""

from copy import deepcopy
from functools import partial
from typing import Any
from unittest.mock import patch

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from transformers import CONFIG_MAPPING, AttentionInterface, LlamaConfig, LlamaForCausalLM
from transformers.integrations.sdpa_attention import sdpa_attention_forward
from transformers.masking_utils import bidirectional_mask_function

from echelon.cli.verify import sharding_errors
from echelon.plugins.hybrid_config import HybridConfig
from echelon.shardformer import policy_for, split_trial
from echelon.shardformer.layers.sequence_axis import SequenceAxis, SequenceOrder
from echelon.shardformer.policy import Policy
from echelon.shardformer.sequence import boundary
from echelon.shardformer.sequence.attention import all_to_all_attention, ring_attention_of
from echelon.shardformer.sequence.block_mask import block_mask
from echelon.shardformer.sequence.config import MODES, TENSOR_MODES, SequenceParallelism
from echelon.shardformer.shard_config import ShardConfig
from echelon.shardformer.sharder import stand_in_config
from echelon.shardformer.split_trial import RESULTS, sequence_errors
from echelon.verify.model_choice import ModelChoice

from ...derive.copies import copy_of
from ...pool import Pool
from ...slow import slow, slow_row
from ..compare import Attention, build

B, LENGTH = 2, 7


def tensors(length: int) -> list[Tensor]:
    generator = torch.Generator().manual_seed(0)
    return [torch.randn(B, heads, length, 8, generator=generator) for heads in (4, 2, 2)]


def attend_with_flash() -> None:
    """Flash attention finds packed sequences by the full positions, and its version by the config."""
    seen: dict[str, Any] = {}

    def stand_in(
        module: Any, query: Tensor, *args: Any, position_ids: Tensor, **rest: Any
    ) -> tuple[Tensor, None]:
        seen.update(kernel=module.config._attn_implementation, positions=position_ids, length=query.shape[2])
        return query.transpose(1, 2).contiguous(), None

    group = dist.group.WORLD
    assert group is not None
    axis = SequenceAxis(group, SequenceOrder(size=2))
    axis.length = LENGTH
    module = Attention(2, config=LlamaConfig(attn_implementation="eager"))
    module.out = nn.Linear(1, 1)  # modules without any are not marked
    axis.mark(module)
    module.config._attn_implementation_internal = "echelon_all_to_all_flash_attention_2"
    positions = torch.tensor([[0, 1, 2, 0, 1, 2, 3]])
    q, k, v = (axis.shard(tensor, 2) for tensor in tensors(LENGTH))
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
        ring_attention_of(Attention(2, config=module.config), q, k, v, None, softcap=50.0)


def test_flash_attention_gets_full_positions_and_unknown_arguments_are_refused(pool: Pool) -> None:
    pool.run(2, attend_with_flash)


TRIANGLE = torch.ones(5, 5, dtype=torch.bool).tril()
PADDING = torch.tensor([[True] * 5, [True, True, True, False, False]])


@pytest.mark.parametrize(
    ("arguments", "plain"),
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
def test_unsharded_sequences_use_torchs_attention(arguments: dict[str, Any], plain: Tensor) -> None:
    module = Attention(2)
    q, k, v = tensors(5)
    blocks = block_mask(batch_size=B, q_length=5, kv_length=5, **arguments)
    expected, _ = sdpa_attention_forward(module, q, k, v, plain, scaling=0.3)
    output, _ = ring_attention_of(module, q, k, v, blocks, scaling=0.3)
    torch.testing.assert_close(output, expected)
    output, _ = all_to_all_attention("sdpa", module, q, k, v, plain, scaling=0.3)
    assert torch.equal(output, expected)


# In older releases of transformers the attention of these models does not use the interface.
CAME_LATER = ("t5", "swin", "beit")
IS_OLDER = "qwen3_5_text" not in CONFIG_MAPPING


def errors_of(model_type: str, mode: str, **settings: object) -> list[str]:
    """Return the errors of a plan with this mode."""
    if model_type not in CONFIG_MAPPING or (IS_OLDER and model_type in CAME_LATER):
        pytest.skip("this release of transformers has no such model, or computes its attention otherwise")
    choice = ModelChoice(model_type=model_type, settings=tuple(settings.items()))
    sizes = {"tp_size": 2} if mode in TENSOR_MODES else {"sp_size": 2}
    return sharding_errors(
        choice, HybridConfig(**sizes, enable_sequence_parallelism=True, sequence_parallelism_mode=mode)
    )


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize(
    "model_type", ["llama", "mixtral", *slow("gpt2", "bert", "opt", "vit", "gemma2", "deepseek_v3")]
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
        ("qwen3_5_text", BOTH, {}, "departs from one process: the loss on 2 ranks is"),
        slow_row("minimax", BOTH, {}, "departs from one process: "),
        ("swin", MODES, {}, "compute on windows of an image"),
        ("albert", MODES, {}, "run several times each"),
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
        errors = errors_of(model_type, mode, **settings)
        assert any(reason in error for error in errors), errors
        assert all("sequence_parallelism" in error or "set it to 0" in error for error in errors), "no advice"
        assert len(set(errors)) == len(errors)


def tried(model: Any, mode: str) -> tuple[list[str], Policy]:
    """Return the errors of the trial of a model with its policy."""
    tp = 2 if mode in TENSOR_MODES else 1
    config = stand_in_config(tp_size=tp, sp_size=2 // tp, sequence=SequenceParallelism(mode=mode))
    policy = policy_for(model)
    return trial_of(model, policy, config), policy


def trial_of(model: Any, policy: Policy, config: ShardConfig) -> list[str]:
    """Return the errors of the trial of a model with this policy."""
    policy.set_model(model)
    policy.set_shard_config(config)
    return sequence_errors(model, policy, config)


def test_a_trial_leaves_nothing_in_modules_that_all_models_share() -> None:
    model: Any = ModelChoice(model_type="xlm").build()
    tried(model, "split_gather")
    deepcopy(model)  # fails with a process group


def test_modules_that_the_small_copy_does_not_have_are_refused() -> None:
    model: Any = build("LlamaForCausalLM")
    model.model.layers[0].input_layernorm = nn.LayerNorm(32)  # computes each position independently
    model.model.layers[0].mlp.adapters = nn.ParameterDict(
        {"added": torch.ones(2)}
    )  # as peft's; computes nothing
    assert tried(model, "all_to_all")[0] == []
    model.model.layers[1].mlp.mixer = nn.Conv1d(4, 4, 3)
    (error,) = tried(model, "all_to_all")[0]
    assert "whose layers have no Conv1d: use another sequence_parallelism_mode" in error


class Centering(nn.Module):
    """A norm over all positions."""

    def forward(self, x: Tensor) -> Tensor:
        return x - x.mean(1, keepdim=True)


def test_sequences_are_gathered_before_modules_that_the_small_copy_does_not_have() -> None:
    model: Any = build("LlamaForCausalLM")
    model.model.norm = Centering()
    errors, policy = tried(model, "ring_attn")
    assert not errors and not policy.keeps_sequences


class Scaled(LlamaForCausalLM):
    """A class of a script, whose constructor needs more than a config."""

    def __init__(self, config: LlamaConfig, scale: float) -> None:
        super().__init__(config)


def test_what_the_trial_cannot_build_is_refused() -> None:
    (error,) = tried(Scaled(build("LlamaForCausalLM").config, 2.0), "split_gather")[0]
    assert "config of this Scaled: no small copy of its config trains (TypeError" in error
    assert error.count("sequence_parallelism_mode=") == 1


@pytest.mark.parametrize(("class_name", "expected"), [("LlamaForCausalLM", True), ("GPT2LMHeadModel", False)])
def test_sequences_stay_sharded_up_to_the_loss_if_the_trial_agrees(
    class_name: str, *, expected: bool
) -> None:
    errors, policy = tried(build(class_name), "all_to_all")
    assert not errors and policy.keeps_sequences is expected


@pytest.mark.parametrize("model_type", ["qwen2_vl", *slow("shieldgemma2")])
def test_an_encoder_stays_unsharded_on_the_sequence_axis(model_type: str) -> None:
    errors, policy = tried(copy_of(model_type).model, "all_to_all")
    plan, sequence_plan = policy.stage_plan(), policy.sequence_plan()
    assert not errors and plan and plan.encoder and sequence_plan and not sequence_plan.encoder
    with patch.object(Policy, "sequence_plan", lambda policy: policy.stage_plan()):
        (error,) = tried(copy_of(model_type).model, "all_to_all")[0]
    assert "departs from one process" in error


@pytest.mark.parametrize("mode", MODES)
def test_modes_that_depart_are_refused(mode: str) -> None:
    def unscaled(shard: Tensor, axis: SequenceAxis, length: int, **_: Any) -> Tensor:
        return axis.gather(shard, 1, length)

    with patch.object(boundary, "gather_sequence", unscaled), patch.dict(RESULTS, clear=True):
        (error,) = tried(build("BertForMaskedLM"), mode)[0]
    assert "departs from one process" in error


def test_models_of_a_type_are_tried_once_unless_they_differ() -> None:
    def number_of_trials(*models: Any) -> int:
        counted = patch.object(split_trial, "_try_mode", wraps=split_trial._try_mode)
        with patch.dict(RESULTS, clear=True), counted as trial:
            for model in models:
                tried(model, "all_to_all")
        return trial.call_count

    model: Any = build("LlamaForCausalLM")
    assert number_of_trials(model, build("LlamaForCausalLM")) == 1
    assert number_of_trials(model, build("LlamaForCausalLM", num_hidden_layers=4)) == 2
    eager: Any = build("LlamaForCausalLM")
    eager.set_attn_implementation("eager")
    changed: Any = build("LlamaForCausalLM")
    changed.model.norm = Centering()
    assert number_of_trials(model, eager, changed) == 3


def test_a_policy_of_several_models_tries_each_of_them() -> None:
    model: Any = build("LlamaForCausalLM")
    config = stand_in_config(sp_size=2, sequence=SequenceParallelism(mode="all_to_all"))
    policy = policy_for(model)
    assert trial_of(model, policy, config) == []
    model.model.layers[1].mlp.mixer = nn.Conv1d(4, 4, 3)
    assert len(trial_of(model, policy, config)) == 1
