"""Refused models, inputs and calls of ShardFormer and of sharded models, on ranks, and words of each message."""

from collections.abc import Callable
from functools import cache, partial
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, SubsetRandomSampler
from transformers import CONFIG_MAPPING

from echelon import ShardConfig, ShardFormer, clip_grad_norm_
from echelon.cluster.mesh import ParallelMesh
from echelon.shardformer.policy import ModulePolicyDescription, Policy
from echelon.verify.model_choice import ModelChoice
from echelon.verify.parity import make_optimizer

from ..contract.matrix_rows import ARE_PLANS_OLDER
from ..contract.models import NARROW_EXPERTS
from ..models.chatglm import ChatGLMConfig, ChatGLMForConditionalGeneration, register_chatglm
from ..plugins.test_two_models import LLAMA, with_layer_of
from ..plugins.training import hybrid
from ..shardformer.bare_training import causal_batch
from ..shardformer.compare import VOCABULARY, batch_for, build, split, text
from ..shardformer.sequence.test_boundary import batch
from ..shardformer.sequence.test_boundary import boosted as boosted_sequence
from ..shardformer.test_lora import adapted, in_peft
from ..shardformer.test_shard_model import Choosy, formed
from .plugin_rows import BOOSTED, PLUGINS
from .rows import Row, Stream, table


def llama(**settings: Any) -> nn.Module:
    return build("LlamaForCausalLM", **settings)


@cache
def sharded() -> nn.Module:
    return formed().shard_model(llama(attention_dropout=0.1))


@cache
def averaged() -> nn.Module:
    return formed(tensor_parallel_size=1, data_parallel_size=2).shard_model(Choosy())


def boost(plugin: str, model: Callable[[], nn.Module]) -> None:
    PLUGINS[plugin]().boost(model(), torch.optim.SGD(model().parameters(), lr=0.1))


def call_with(seeds: int = 0, states: int = 0, mode: Callable[[], bool] = lambda: True) -> None:
    """Call a sharded model with batches, random states or modes that differ between ranks."""
    torch.manual_seed(states * dist.get_rank())
    model = sharded().train(mode())
    model(**causal_batch(2, seed=seeds * dist.get_rank()))


def over_pieces() -> None:
    """DDP would broadcast the shards of the first rank, and the loss would look plausible."""
    DistributedDataParallel(formed().shard_model(llama()))(**causal_batch(2, seed=0))


def without_groups(name: str) -> Callable[[], Any]:
    return lambda: getattr(ShardFormer(ShardConfig(tensor_parallel_size=2)), name)(llama())


class OwnPolicy(Policy):
    """A policy that is not made from a table."""

    def module_policy(self) -> dict[type[nn.Module] | str, ModulePolicyDescription]:
        return {}


def over_world() -> ShardConfig:
    return ShardConfig(tensor_parallel_process_group=dist.group.WORLD)


def twice_by_shard_former() -> None:
    former, first = ShardFormer(over_world()), LLAMA.build()
    second = with_layer_of(first)
    former.optimize(first)
    former.optimize(second)


def clip_boosted(max_norm: float) -> None:
    clip_grad_norm_(PLUGINS["tensor"]().boost(llama())[0], max_norm)


@cache
def by_heads() -> Any:
    return boosted_sequence(llama(num_attention_heads=4), mode="all_to_all")


def call_sequence(differs: bool = False, **options: Any) -> None:
    by_heads()(input_ids=batch()["input_ids"] + (dist.get_rank() if differs else 0), **options)


def with_all_hidden_states() -> None:
    model = boosted_sequence(llama(num_attention_heads=4), mode="all_to_all")
    model.unwrap().config.output_hidden_states = True
    model(input_ids=batch()["input_ids"])


def with_an_unknown_token() -> None:
    ids = batch()["input_ids"]
    ids[0, -1] = 10**6  # on the first rank in zigzag
    boosted_sequence(llama())(input_ids=ids)


def without_a_booster() -> None:
    group = ParallelMesh(sp=2).group("sp")
    config = ShardConfig(sequence_parallel_process_group=group, enable_sequence_parallelism=True)
    ShardFormer(config).optimize(llama())


@cache
def outputs() -> tuple[Any, Any]:
    model = split(llama(attention="eager"))
    return model, model(**batch_for(model)).logits


def label_outside() -> None:
    model = outputs()[0]
    labels = batch_for(model)["labels"].clamp(min=0) + VOCABULARY
    try:
        model(**{**batch_for(model), "labels": labels})
    finally:  # a failed call does not affect the next use of the head
        assert model.lm_head(torch.zeros(1, 1, 32)).shape[-1] == VOCABULARY


def with_attentions(by_config: bool) -> None:
    model = split(llama(attention="eager"))
    model.config.output_attentions = by_config
    model(**text(), **({} if by_config else {"output_attentions": True}))


def chatglm(**settings: Any) -> nn.Module:
    """Build a model whose code comes with its checkpoints."""
    register_chatglm()
    return ChatGLMForConditionalGeneration(ChatGLMConfig(**settings))


def at(tp: int = 1, pp: int = 1, sp: int = 1, sequence: str | None = None, **further: Any) -> dict[str, Any]:
    """Return options of these sizes."""
    asked = {"enable_sequence_parallelism": True, "sequence_parallelism_mode": sequence} if sequence else {}
    return {"tp_size": tp, "pp_size": pp, "sp_size": sp, **asked, **further}


def boosting(
    options: dict[str, Any], *words: str, model: Any = "llama", head: str | None = None, **settings: Any
) -> list[Row]:
    """Make a row of boost under these options; none if the installed transformers has no such model."""
    if not callable(model) and model not in CONFIG_MAPPING:
        return []

    def build() -> nn.Module:
        choice = ModelChoice(model_type=model, head=head, settings=tuple(settings.items()))
        return choice.build()

    def call() -> None:
        booster = hybrid(**options)
        made = model(**settings) if callable(model) else build()
        booster.boost(made, make_optimizer(made))

    return [(call, *words)]


UNEQUAL = "the model of rank(s) [1] differs from that of rank 0"
NOTHING, INPUTS = "nothing was refused", "the inputs of rank(s) [1]"
OF_TENSOR_AXIS, SHARDED = "of the tensor axis differ", "call outputs.logits.gather() on every rank"
WIDTH, HIDDEN = "a key-value head of width 6 is not divisible by the 4 ranks", {"output_hidden_states": True}
Q = {"target_modules": ["q_proj"]}
ALL_LAYERS = {"model": "whisper", "head": "audio_classification", "use_weighted_layer_sum": True}
NARROW = {"hidden_size": 48, "num_attention_heads": 6, "num_key_value_heads": 2}
# fmt: off
TWO: dict[str, Row] = {
    **table("ShardFormer",
        (lambda: formed().shard_dataset(Stream(), batch_size=1), "Stream) is iterable-style or has no length"),
        (lambda: formed().shard_dataset(DataLoader([1, 2], sampler=SubsetRandomSampler([0]))), "cannot be sharded",
            "its samples are chosen by a SubsetRandomSampler"),
        (lambda: formed(tensor_parallel_size=3), "dp_size=1 = 3 is not the world size 2", "start 3 processes"),
        *((without_groups(name), "call ShardFormer.init_distributed() first")
            for name in ("shard_model", "optimize", "shard_dataset")),
        (lambda: formed().shard_model(sharded()), BOOSTED),
        *((partial(boost, plugin, model), BOOSTED) for plugin in PLUGINS for model in (sharded, averaged)),
        (lambda: formed().shard_model(llama(seed=dist.get_rank())), UNEQUAL),
        (partial(call_with, seeds=1), INPUTS, OF_TENSOR_AXIS),
        (partial(call_with, states=1), "the random states of rank(s) [1]", OF_TENSOR_AXIS),
        (partial(call_with, states=1, mode=lambda: False), NOTHING),
        (partial(call_with, mode=lambda: dist.get_rank() == 0), "the modes (training or evaluation) of rank(s) [1]"),
        (lambda: sharded().state_dict(), "this rank has only a part of this LlamaForCausalLM"),
        (over_pieces, "the shards of [0, 1] by one rank's, though [0, 1] have"),
        (lambda: ShardConfig(tensor_parallel_process_group=dist.group.WORLD,
            data_parallel_process_group=dist.group.WORLD), "have the ranks [0, 1] in common"),
        (lambda: formed().shard_model(llama(**({"intermediate_size": 25} if dist.get_rank() else {}))),
            "25 entries", "(rank 1)"),
        (lambda: ShardFormer(over_world()).optimize(in_peft(lora=Q)), "PeftModel", "get_base_model()"),
        (lambda: ShardFormer(over_world()).optimize(adapted(lora=Q), OwnPolicy()),
            "model.layers.0.self_attn.q_proj has an adapter, which OwnPolicy cannot shard"),
        (twice_by_shard_former, "model.layers.1 of this LlamaForCausalLM is already boosted, or sharded"),
        (partial(clip_boosted, 1.0), "under a booster call optimizer.clip_grad_by_norm"),
        (partial(clip_boosted, -1.0), "max_norm=-1.0 must be at least 0"),
    ),
    **table("sequences of ranks",
        (lambda: by_heads().unwrap().generate(batch()["input_ids"], max_new_tokens=2), "keys and values of its shard"),
        *((partial(call_sequence, **{name: True}), f"{name}=True in this call")
            for name in ("output_hidden_states", "output_attentions")),
        (partial(call_sequence, differs=True), INPUTS, "of axis sp differ"),
        (with_all_hidden_states, "output_hidden_states=True in the model's config", "set it to False"),
        (with_an_unknown_token, "entry 1000000 is outside the vocabulary"),
        (without_a_booster, "needs a booster"),
    ),
    **table("sharded logits",
        (label_outside, "label", "is outside the vocabulary of 101"),
        *((lambda use=use: use(outputs()[1]), SHARDED) for use in (lambda x: x.argmax(-1), lambda x: x.shape)),
        *((lambda use=use: use(outputs()[1]), "TypeError") for use in (lambda x: x + 1, lambda x: x[0], torch.exp)),
        *((partial(with_attentions, by_config), "only the local heads' attention") for by_config in (False, True)),
    ),
    **table("boost",
        *boosting(at(zero_stage=7, precision="int8", num_microbatches=-1, compile_layers=True), "zero_stage=7",
            "precision='int8'", "num_microbatches=-1"),
        *boosting(at(tp=2), "multi_query_attention=False in the model's config", "no attribute", model=chatglm,
            multi_query_attention=False),
        *boosting(at(tp=2), "num_multi_query_groups_per_partition=3 is neither a divisor nor a multiple of tp_size=2",
            model=chatglm, num_attention_heads=6, multi_query_group_num=3),
        # Products with parts of weights go with a pipeline, and layers left out at random with tensor parallelism.
        *boosting(at(pp=2), NOTHING, model="bloom", slow_but_exact=True),
        *boosting(at(tp=2), NOTHING, model="opt", layerdrop=0.1),
        *boosting(at(pp=2), "decoder_layerdrop=0.1 in the model's config drops layers at random", model="whisper",
            decoder_layerdrop=0.1),
        *boosting(at(pp=2), "use_weighted_layer_sum=True in the model's config collects the outputs of all layers",
            **ALL_LAYERS),
        *boosting(at(pp=2), "output_hidden_states=True in the model's config, vision_config collects the outputs",
            model="sam", vision_config=HIDDEN),
        *boosting(at(tp=2, sequence="split_gather"), "mode='split_gather'", "collects the outputs of", **ALL_LAYERS),
        *boosting(at(tp=2, sequence="ring"), "mode='ring'", "collects the outputs of layers", model="blip-2",
            vision_config=HIDDEN),
        *boosting(at(tp=2), "there is no table to shard language_model of this Blip2ForConditionalGeneration",
            model="blip-2", text_config={"model_type": "xglm"}),
        *boosting(at(tp=2), "no split of a HrmTextForCausalLM", "register a Table of its layers", model="hrm_text"),
        *([] if ARE_PLANS_OLDER else [
            *boosting(at(tp=2), "no split of a MambaForCausalLM gives the numbers of one", model="mamba"),
            *boosting(at(pp=2), "model.H_module.layers: its layers run up to 2 times", model="hrm_text")]),
    ),
}
FOUR: dict[str, Row] = {
    # The error is raised on all ranks, even if their own tensor axis has equal models.
    "different replicas": (lambda: formed(data_parallel_size=2).shard_model(llama(seed=int(dist.get_rank() == 3))),
        UNEQUAL),
    **table("boost on four ranks",
        *boosting(at(tp=4), "num_attention_heads=2 is not divisible by tp_size=4", model="sam",
            mask_decoder_config={"num_attention_heads": 2}),
        *([] if ARE_PLANS_OLDER else boosting(at(tp=4, precision="fp16"), "gives each rank 12 of the 48 columns",
            "of model.layers.0.block_sparse_moe.experts", "use tp_size=1 or 2 or 3, or call "
            "model.set_experts_implementation('eager') before boost", model="granitemoe", **dict(NARROW_EXPERTS))),
        *boosting(at(tp=4), "the 3 query heads of a key-value head are not divisible by the 2 ranks that share it",
            model="phi3", **NARROW),
        *boosting(at(tp=4), WIDTH, model="phi3", num_key_value_heads=1, hidden_size=24),
        *boosting(at(tp=4), WIDTH, model=chatglm, kv_channels=6, multi_query_group_num=1),
        *boosting(at(pp=2, sp=2, sequence="all_to_all"), "of this MambaForCausalLM departs from", model="mamba"),
    ),
}
# fmt: on
