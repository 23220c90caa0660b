"""Refusals of the public calls, on every rank and with all reasons: a table of calls and needles of their messages.

Rows with the same number of ranks share a run of the pool: a refusal changes nothing.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

import pytest
from torch import nn
from transformers import CONFIG_MAPPING

from echelon import Booster, HybridParallelPlugin
from echelon.verify.model_choice import ModelChoice
from echelon.verify.parity import make_optimizer

from ..models.chatglm import ChatGLMConfig, ChatGLMForConditionalGeneration, register_chatglm
from ..pool import Pool
from .matrix_rows import ARE_PLANS_OLDER
from .models import NARROW_EXPERTS

NOTHING = "nothing was refused"


@dataclass(frozen=True, kw_only=True)
class Refusal:
    """A call of boost and parts of its error.

    Args:
        needles: parts of the message, each of another reason.
        model: the model type, or a function that builds the model.
        head, settings: head and settings of a small model of that type.
        num_ranks: number of processes.
        arguments: arguments of the plugin.
    """

    needles: tuple[str, ...]
    model: str | Callable[..., nn.Module] = "llama"
    head: str | None = None
    settings: Mapping[str, object] = field(default_factory=dict)
    num_ranks: int = 2
    arguments: Mapping[str, Any] = field(default_factory=dict)

    def build(self) -> nn.Module:
        """Build the model."""
        if callable(self.model):
            return self.model(**self.settings)
        choice = ModelChoice(model_type=self.model, head=self.head, settings=tuple(self.settings.items()))
        return choice.build()

    def message(self) -> str:
        """Return the error of boost, on one rank of the pool."""
        try:
            plugin = HybridParallelPlugin(**{"precision": "fp32", "num_microbatches": 2, **self.arguments})
            model = self.build()
            Booster(plugin=plugin).boost(model, make_optimizer(model))
        except ValueError as error:
            return str(error)
        return NOTHING


def chatglm(**settings: Any) -> nn.Module:
    """Build a model whose code comes with its checkpoints."""
    register_chatglm()
    return ChatGLMForConditionalGeneration(ChatGLMConfig(**settings))


def at(tp: int = 1, pp: int = 1, sp: int = 1, sequence: str | None = None, **further: Any) -> dict[str, Any]:
    """Return fields of a refusal under these sizes."""
    asked = {"enable_sequence_parallelism": True, "sequence_parallelism_mode": sequence} if sequence else {}
    arguments = {"tp_size": tp, "pp_size": pp, "sp_size": sp, **asked, **further}
    return {"num_ranks": tp * pp * sp, "arguments": arguments}


REFUSALS = {
    # Sizes and options that contradict each other.
    "sizes and the world": Refusal(
        needles=("tp_size=3 * pp_size=1 * sp_size=1 = 3 does not divide the world size 4",),
        num_ranks=4,
        arguments={"tp_size": 3},
    ),
    "several options at once": Refusal(
        needles=("zero_stage=7", "precision='int8'", "num_microbatches=-1"),
        **at(zero_stage=7, precision="int8", num_microbatches=-1, compile_layers=True),
    ),
    "weight parallelism beside tensor parallelism": Refusal(
        needles=("wp_size=2 does not combine with tp_size=2",), **{**at(tp=2, wp_size=2), "num_ranks": 4}
    ),
    # Models and sizes.
    "more stages than layers": Refusal(
        settings={"num_hidden_layers": 3}, needles=("3 layers and the pipeline 4 stages",), **at(pp=4)
    ),
    "heads of one part": Refusal(
        model="sam",
        settings={"mask_decoder_config": {"num_attention_heads": 2}},
        needles=("num_attention_heads=2 is not divisible by tp_size=4",),
        **at(tp=4),
    ),
    "experts too narrow for torch's product": Refusal(
        model="granitemoe",
        settings=dict(NARROW_EXPERTS),
        needles=(
            "tp_size=4 gives each rank 12 of the 48 columns of model.layers.0.block_sparse_moe.experts",
            "use tp_size=1 or 2 or 3, or call model.set_experts_implementation('eager') before boost",
        ),
        **at(tp=4, precision="fp16"),
    ),
    "query heads that share a key cannot be padded": Refusal(
        model="phi3",
        settings={"hidden_size": 48, "num_attention_heads": 6, "num_key_value_heads": 2},
        needles=("the 3 query heads of a key-value head are not divisible by the 2 ranks that share it",),
        **at(tp=4),
    ),
    "the width of a shared head": Refusal(
        model="phi3",
        settings={"num_key_value_heads": 1, "hidden_size": 24},
        needles=("a key-value head of width 6 is not divisible by the 4 ranks that share it",),
        **at(tp=4),
    ),
    "heads that are not grouped": Refusal(
        model=chatglm,
        settings={"multi_query_attention": False},
        needles=("multi_query_attention=False in the model's config", "no attribute"),
        **at(tp=2),
    ),
    "groups that do not go over the ranks": Refusal(
        model=chatglm,
        settings={"num_attention_heads": 6, "multi_query_group_num": 3},
        needles=("num_multi_query_groups_per_partition=3 is neither a divisor nor a multiple of tp_size=2",),
        **at(tp=2),
    ),
    "the width of a head that ranks share": Refusal(
        model=chatglm,
        settings={"kv_channels": 6, "multi_query_group_num": 1},
        needles=("a key-value head of width 6 is not divisible by the 4 ranks that share it",),
        **at(tp=4),
    ),
    # Settings of models.
    "products with parts of weights go with a pipeline": Refusal(
        model="bloom", settings={"slow_but_exact": True}, needles=(NOTHING,), **at(pp=2)
    ),
    "layers left out at random go with tensor parallelism": Refusal(
        model="opt", settings={"layerdrop": 0.1}, needles=(NOTHING,), **at(tp=2)
    ),
    "layers of a decoder left out at random": Refusal(
        model="whisper",
        settings={"decoder_layerdrop": 0.1},
        needles=("decoder_layerdrop=0.1 in the model's config drops layers at random",),
        **at(pp=2),
    ),
    "a head over all layers in a pipeline": Refusal(
        model="whisper",
        head="audio_classification",
        settings={"use_weighted_layer_sum": True},
        needles=("use_weighted_layer_sum=True in the model's config collects the outputs of all layers",),
        **at(pp=2),
    ),
    "outputs of all layers in a pipeline": Refusal(
        model="sam",
        settings={"vision_config": {"output_hidden_states": True}},
        needles=(
            "output_hidden_states=True in the model's config, vision_config collects the outputs of all layers",
        ),
        **at(pp=2),
    ),
    "a head over all layers of parts of a sequence": Refusal(
        model="whisper",
        head="audio_classification",
        settings={"use_weighted_layer_sum": True},
        needles=("sequence_parallelism_mode='split_gather'", "collects the outputs of layers"),
        **at(tp=2, sequence="split_gather"),
    ),
    "outputs of all layers of parts of a sequence": Refusal(
        model="blip-2",
        settings={"vision_config": {"output_hidden_states": True}},
        needles=("sequence_parallelism_mode='ring'", "collects the outputs of layers"),
        **at(tp=2, sequence="ring"),
    ),
    # Modes of sequence parallelism.
    # Models without a table.
    "no table and no plan": Refusal(
        model="xglm",
        needles=("has no base_model_tp_plan or", "'xglm' has no table: leave tp_size at 1"),
        **at(tp=2),
    ),
    "a part without a table": Refusal(
        model="blip-2",
        settings={"text_config": {"model_type": "xglm"}},
        needles=("there is no table to shard language_model of this Blip2ForConditionalGeneration",),
        **at(tp=2),
    ),
    "no table and no plan, of another release": Refusal(
        model="hrm_text",
        needles=("has plans for ['L_module.layers', 'H_module.layers']", "no table"),
        **at(tp=2),
    ),
    "no plan of tensor parallelism": Refusal(
        model="mamba",
        needles=(
            "has no base_model_tp_plan",
            "no split of a MambaForCausalLM gives the numbers of one process",
        ),
        **at(tp=2),
    ),
    "sequences of a model without a table, in stages": Refusal(
        model="mamba",
        needles=("sequence parallelism needs a table, and a MambaForCausalLM has none",),
        **at(pp=2, sp=2, sequence="all_to_all"),
    ),
    "layers that run several times": Refusal(
        model="hrm_text", needles=("model.H_module.layers: its layers run up to 2 times",), **at(pp=2)
    ),
}
# Cases whose message differs in older releases.
NEWER = (
    *(
        "experts too narrow for torch's product",
        "no plan of tensor parallelism",
        "layers that run several times",
    ),
)


def _is_known(row: Refusal) -> bool:
    return callable(row.model) or row.model in CONFIG_MAPPING


@pytest.mark.parametrize("name", REFUSALS)
def test_unsupported_calls_are_refused(pool: Pool, name: str) -> None:
    row = REFUSALS[name]
    if not _is_known(row) or (ARE_PLANS_OLDER and name in NEWER):
        pytest.skip("the installed transformers has no such model or plan")
    message, *others = pool.run(row.num_ranks, row.message)
    assert set(others) <= {message}, "ranks disagree"
    for needle in row.needles:
        assert needle in message
