"""Models and tables that cannot be sharded, on the meta device without processes: all errors, and words of each."""

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import torch
import transformers
from torch import nn

from echelon.pipeline.stage_plan import StagePlan
from echelon.shardformer import Policy, Table, policy_for
from echelon.shardformer.sharder import split_errors
from echelon.shardformer.table_policy import TablePolicy
from echelon.shardformer.tables.decoders import GPT2, LLAMA
from echelon.shardformer.tables.encoder_decoders import T5
from echelon.verify.model_choice import ModelChoice

from ..shardformer import compare
from ..shardformer.test_lora import adapted
from .rows import Row

# A table without `attention`, so that heads cannot be padded.
UNPADDED = replace(LLAMA, attention={})
STAGE = StagePlan(layers="0", entry=())
BARE = Table(stage=STAGE, regions=("0",), column=("0.0",), row=("0.1",), divisible=("num_heads",))
TWO = {"tp_size": 2}
GROUPED = dict(hidden_size=48, num_attention_heads=12, num_key_value_heads=3, intermediate_size=48)


def on_meta(class_name: str, **settings: Any) -> Any:
    model_class = getattr(transformers, class_name)
    base = compare.BASES.get(model_class.config_class.model_type, compare.TINY)
    with torch.device("meta"):
        return model_class(model_class.config_class(**{**base, **settings}))


def llama(**settings: Any) -> Any:
    return on_meta("LlamaForCausalLM", **settings)


def errors(model: nn.Module, policy: Policy | None = None, **sizes: Any) -> list[str]:
    return split_errors(model, policy or policy_for(model), **sizes)


def changed(change: Callable[[Any], object], **settings: Any) -> Callable[[], Any]:
    """Build a llama and change it by a function."""

    def build() -> Any:
        with torch.device("meta"):
            model = llama(**settings)
            change(model)
        return model

    return build


def with_second_head(model: Any) -> None:
    model.second_head = nn.Linear(32, compare.VOCABULARY, bias=False)
    model.second_head.weight = model.lm_head.weight


def with_shared_layer(model: Any) -> None:
    model.model.layers[1] = model.model.layers[0]


class Adapted(nn.Linear):
    """A projection with an additional low-rank term."""


def with_adapters(model: Any) -> None:
    for layer in model.model.layers:
        layer.mlp.up_proj = Adapted(32, 48)
    model.lm_head = Adapted(32, compare.VOCABULARY)


def with_gate(model: Any) -> None:
    model.model.layers[1].self_attn.gate = nn.Linear(32, 1, bias=False)


class Special(nn.Parameter):
    """A tensor subclass, for example a quantized one."""


def with_special_tensor(model: Any) -> None:
    projection = model.model.layers[0].mlp.up_proj
    projection.weight = Special(torch.empty(projection.weight.shape))


def with_another_layer(model: Any) -> None:
    layers = model.model.layers
    layers[1] = type("Other", (type(layers[1]),), {})(model.config, 1)


class FusedLoss(transformers.LlamaForCausalLM):
    """A model that computes its loss from the head's weight, like fused losses."""

    def forward(self, input_ids: torch.Tensor, labels: torch.Tensor, **kwargs: Any) -> torch.Tensor:
        hidden = self.model(input_ids, **kwargs).last_hidden_state
        return nn.functional.cross_entropy((hidden @ self.lm_head.weight.T).flatten(0, 1), labels.flatten())


def fused_loss(model: Any) -> None:
    model.__class__ = FusedLoss


def returning(setting: str) -> Callable[[], Any]:
    return changed(lambda model: setattr(model.config, setting, True), attn_implementation="eager")


def without_config() -> nn.Module:
    class Stack(nn.Sequential):
        pass

    return Stack(nn.ModuleList([nn.Sequential(nn.ModuleList([nn.Linear(4, 4), nn.Linear(4, 4)]))]))


def without_output() -> Any:
    model = on_meta("T5Model")
    del model.decoder.block[1].layer[1].EncDecAttention.o
    return model


def row(
    build: Callable[[], nn.Module], number: int, *words: str, table: Table | None = None, **sizes: Any
) -> Row:
    """Make a row of a model, the sizes for which it is refused, by default tp_size=2, and the number of errors."""

    def call() -> None:
        model = build()
        refused = errors(model, None if table is None else TablePolicy(table), **(sizes or TWO))
        raise ValueError("\n".join([f"{len(refused)} errors:", *refused]))

    return call, f"{number} errors:", *words


def merged() -> Any:
    model = adapted(lora=Q)
    model.model.layers[0].self_attn.q_proj.merge()
    return model


Q, EXPERTS = {"target_modules": ["q_proj"]}, "mlp.experts.gate_up_proj"
MANY_HEADS = {"num_attention_heads": 4, "num_key_value_heads": 2, "intermediate_size": 50}
# fmt: off
SPLITS: dict[str, Row] = {
    "a module is missing": row(without_output, 1, "decoder.block.1", "'layer.1.EncDecAttention.o'", "no such module"),
    "another second input": row(lambda: on_meta("UMT5Model", num_decoder_layers=1), 1, "'key_value_states'",
        "decoder.block.0.layer.1.EncDecAttention", "'encoder_hidden_states'", table=T5),  # umT5 names it otherwise
    "a second head": row(changed(with_second_head, tie_word_embeddings=False), 1,
        "second_head: shares a parameter with lm_head"),
    "key-value heads": row(lambda: llama(**GROUPED), 1, "tp_size=[1, 3, 6, 12]",
        "num_key_value_heads=3 is neither a divisor nor a multiple of tp_size=2", table=UNPADDED),
    "heads of a part": row(lambda: ModelChoice(model_type="sam").build_on_meta(), 4, "mask_decoder",
        "num_attention_heads=4 is not divisible by tp_size=8: use one of tp_size=[1, 2", tp_size=8),
    "a width": row(lambda: on_meta("GPT2LMHeadModel", n_inner=49), 2, "one of [1, 7, 49]",
        *(f"transformer.h.0.mlp.{name} (and 1 more like it): 49 entries" for name in ("c_fc", "c_proj"))),
    "layers of stages": row(llama, 1, "num_layers_per_stage=[2, 0]",
        "use [1, 1], for example", num_stages=2, num_layers_per_stage=[2, 0]),
    "too few runs of one layer": row(lambda: ModelChoice(model_type="albert", num_layers=4).build_on_meta(),
        1, "4 layers and the pipeline 5 stages", num_stages=5),
    "a layer listed twice": row(changed(with_shared_layer), 1, "model.layers.1 is the same module as model.layers.0",
        "give each layer its own, or use pp_size=1", num_stages=2),
    "attentions of all heads": row(returning("output_attentions"), 1, "only the local heads' attention",
        "output_attentions=True in the model's config"),
    "adapters of one's own": row(changed(with_adapters), 1, "lm_head (and 2 more like it): ", "Adapted, not a plain"),
    "adapter of a head": row(lambda: adapted(lora={"target_modules": ["lm_head", "q_proj"]}), 1, "lm_head: ",
        "peft.tuners.lora.layer.Linear of peft and not a plain Linear: leave it out of target_modules"),
    "saved embedding": row(lambda: adapted(lora={**Q, "modules_to_save": ["embed_tokens"]}), 1, "model.embed_tokens: ",
        "ModulesToSaveWrapper of peft and not a plain Embedding"),
    "saved projection": row(lambda: adapted(lora={**Q, "modules_to_save": ["o_proj"]}), 1, "self_attn.o_proj (and ",
        "ModulesToSaveWrapper of peft and not a plain Linear"),
    "DoRA": row(lambda: adapted(lora={**Q, "use_dora": True}), 1, "model.layers.0.self_attn.q_proj (and ", "DoraL"),
    "adapter of experts": row(lambda: adapted("MixtralForCausalLM", lora={"target_parameters": [EXPERTS]}), 1,
        "model.layers.0 (and ", "peft's ParamWrapper around mlp.experts cannot be sharded: leave it out"),
    "merged adapter": row(merged, 1, "model.layers.0.self_attn.q_proj: the adapter is merged", "unmerge_adapter()"),
    "whole among split": row(changed(with_gate), 1, "the axis 'tp'", "in column, row",
        "model.layers.1.self_attn.gate.weight: computes on sharded"),
    # The table of llama is not that of qwen3.
    "norms by head": row(lambda: on_meta("Qwen3ForCausalLM", num_key_value_heads=2, head_dim=8), 1,
        "model.layers.0.self_attn.q_norm.weight (and 3 more like it)", "computes on sharded activations", table=LLAMA),
    "a hook": row(changed(lambda model: model.get_input_embeddings().register_forward_hook(print)), 1,
        "model.embed_tokens: ", "has hooks", "after the model is sharded"),
    "a special tensor": row(changed(with_special_tensor), 1, "mlp.up_proj: ", "a weight of Special in torch."),
    "layers of two classes": row(changed(with_another_layer), 1, "model.layers: the layers are of several classes"),
    "a fused loss": row(changed(fused_loss), 1, "the forward of this FusedLoss reads a weight itself"),
    "a table of another model": row(llama, 4, "the stage plan names 'model.h', and this Llama", table=GPT2),
    "a name that matches nothing": row(llama, 1, "model.layers.0 (and 1 more like it): ", "'mlp.side_proj' in",
        table=replace(LLAMA, column=(*LLAMA.column, "mlp.side_proj"))),
    "an embedding that is not there": row(llama, 1, "names 'model.embed', and the model has no such",
        table=replace(LLAMA, embedding="embed")),
    "an attribute that is not there": row(llama, 1, "(and 1 more like it): the table names 'self_attn.heads'",
        "no attribute of", table=replace(LLAMA, divide=("self_attn.heads",))),
    "a setting that the split needs": row(llama, 1, "hidden_act='silu' in the model's config is not supported",
        "use hidden_act='gelu' or tp_size=1", table=replace(LLAMA, needed={"hidden_act": "gelu"})),
    "a setting that is not there": row(changed(lambda model: setattr(model.config, "num_key_value_heads", None)), 1,
        "takes num_key_value_heads from the model's config", "a LlamaConfig has no", table=LLAMA),
    "no config": row(without_config, 1, "takes num_heads from the model's config, and the model has none",
        "name in divide those", table=BARE),
    "all at once": row(lambda: llama(**MANY_HEADS), 7,
        "2 layers and the pipeline 3 stages", "at most 2 stages", "num_key_value_heads=2",
        "num_attention_heads=4 is not divisible by tp_size=3: use one of tp_size=[1, 2, 4]",
        "mlp.gate_proj (and 3 more like it): 50 entries along dim 0",
        "mlp.down_proj (and 1 more like it): 50 entries along dim 1",
        *(f"self_attn.{name} (and 1 more like it): 32 entries" for name in ("o_proj", "q_proj")),
        table=UNPADDED, tp_size=3, num_stages=3),
}
# fmt: on
