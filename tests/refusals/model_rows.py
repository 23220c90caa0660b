"""Refused models, layers, tables and policies, without processes, and words of each message."""

import pickle
import sys
from collections.abc import Callable
from copy import deepcopy
from dataclasses import replace
from functools import partial
from typing import Any
from unittest.mock import patch

import torch
from peft import IA3Config, LoraConfig
from torch import Tensor, nn
from transformers import masking_utils as masks
from transformers.models.gemma2.modeling_gemma2 import Gemma2RMSNorm
from transformers.pytorch_utils import Conv1D

from echelon import LazyInitContext, shard_model
from echelon.lazy import materialize
from echelon.pipeline.stage_plan import StagePlan
from echelon.plugins.adapters import enable_lora
from echelon.shardformer import ShardConfig, ShardFormer, SubModuleReplacementDescription, Table, policy_for
from echelon.shardformer.layers import (
    GPT2FusedLinearConv1D_Col,
    Linear1D_Col,
    Linear1D_Row,
    VocabParallelEmbedding1D,
    VocabParallelLMHead1D,
)
from echelon.shardformer.layers.attention_kernels import xformers_attention
from echelon.shardformer.layers.chunked_loss import chunked_cross_entropy
from echelon.shardformer.layers.embedding import VocabRange
from echelon.shardformer.layers.norm import SplitRMSNorm
from echelon.shardformer.layers.sequence_axis import SequenceAxis, SequenceOrder
from echelon.shardformer.recompute import PipelineGradientCheckpointConfig
from echelon.shardformer.sequence.block_mask import TensorMask, block_mask
from echelon.shardformer.sharder import StandInGroup, plan_parallelism
from echelon.shardformer.tables.encoders import ALBERT
from echelon.shardformer.tables.table import RegionDropout, table_for
from echelon.shardformer.tables.vision import BEIT, SWIN
from echelon.verify.model_choice import ModelChoice

from ..booster.adapters import LLAMA as ADAPTED
from ..contract.matrix_rows import ARE_PLANS_OLDER
from ..derive.copies import double_copy_of
from ..models.stand_ins import installed_xformers
from ..shardformer.sequence.masks import in_blocks, registered
from ..shardformer.sequence.test_parallel_attention import Attend, by_heads, by_ring
from ..shardformer.test_fused_attention import Attention, tensors
from ..shardformer.test_layers import ALONE
from ..shardformer.test_policy import MISSING, Elsewhere, Former, Plain, Tower, TwoAxes, described, sine
from ..shardformer.test_proposed import proposed
from ..shardformer.test_stages import manager_alone
from .rows import Row, entered, table


def zeros(*shape: int, dtype: torch.dtype = torch.float32) -> Tensor:
    return torch.zeros(shape, dtype=dtype)


def attend(by: Attend, keys: int, length: int) -> Callable[[], Any]:
    """Make a call of attention on one of two ranks, with tensors of another length."""
    axis = SequenceAxis(StandInGroup(0, 2), SequenceOrder(size=2))
    axis.length = length
    other = patch("echelon.shardformer.sequence.ulysses.all_to_all", lambda x, *_, **__: torch.cat([x, x]))
    q, kv = zeros(2, 4, 4, 8), zeros(2, 4, keys, 8)
    return entered(other)(lambda: by(q, kv, kv, axis))


def made(cursor: Tensor) -> Any:
    with registered("blocks", block_mask):
        make = masks.AttentionMaskInterface()["blocks"]
    return make(1, kv_length=8, cache_position=cursor)


def recomputed(**settings: Any) -> Callable[[], Any]:
    def call() -> None:
        (error,) = PipelineGradientCheckpointConfig(**settings).errors(2)
        raise ValueError(error)

    return call


def outside_of_vocabulary() -> None:
    entries = VocabRange(vocab_size=5, first=0, width=5, valid=5)
    chunked_cross_entropy(zeros(2, 3), zeros(5, 3), None, torch.tensor([0, 5]), entries=entries)


def by_xformers(name: str) -> None:
    with installed_xformers():
        xformers_attention(Attention(), *tensors(), None, **{name: torch.ones(1)})


def with_all_kernels() -> None:
    config = ShardConfig(enable_all_optimization=True, enable_xformers=True)
    ShardFormer(config).optimize(ModelChoice(model_type="bloom").build())


def with_adapters(model: nn.Module | None = None, **options: Any) -> Callable[[], Any]:
    options = dict.fromkeys(("pretrained_dir", "lora_config", "bnb_quantization_config")) | options
    return lambda: enable_lora(model or ADAPTED.build_plain(), **({"quantize": False} | options))


def lora(**options: Any) -> LoraConfig:
    return LoraConfig(**{"r": 2, "target_modules": ["q_proj", "up_proj"], **options})


def lazily(call: Callable[[nn.Linear], Any], *, ends: bool = False) -> Callable[[], Any]:
    """Make a call with a lazily built layer, in the block of its construction or after it."""

    def run() -> None:
        with LazyInitContext():
            model = nn.Linear(4, 3)
            if not ends:
                call(model)
        if ends:
            call(model)

    return run


def hold_a_view(model: nn.Linear) -> None:
    row = model.weight[0]
    materialize(model)
    raise AssertionError(row)


def on_another_device() -> None:
    with torch.device("meta"), LazyInitContext():
        pass


def copy_another_shape() -> None:
    with LazyInitContext():
        model = nn.Linear(3, 2)
        model.weight.data.copy_(torch.ones(5, 5))
    materialize(model)


STRICT = torch.finfo(torch.float32).min
RATIO = "gradient_checkpointing_ratio"
# fmt: off
LAYERS: dict[str, Row] = {
    **table("masks",
        (lambda: TensorMask(zeros(2, 4, dtype=torch.bool), 4), "shape (2, 4) for a sequence of 4"),
        (lambda: TensorMask(zeros(2, 1, 3, 4, dtype=torch.bool), 4), "shape (2, 1, 3, 4)"),
        (lambda: TensorMask(zeros(2, 1, 4, 5), 4), "give one of (batch, 4), False at padding", "(batch, 1, 4, 4)"),
        (lambda: TensorMask(zeros(2, 1, 4, 4, dtype=torch.long), 4), "torch.int64"),
        (lambda: TensorMask(zeros(2, 1, 4, 4).requires_grad_(), 4), "requires gradients"),
        (lambda: TensorMask(torch.full((2, 1, 4, 4), STRICT), 4), "hides all keys in some rows, down to -3.403e"),
        (lambda: TensorMask(torch.full((2, 1, 1, 4), -torch.inf), 4), "give a mask of (batch, 4), 0 at padding"),
        (lambda: made(torch.tensor([7])), "begin at position 7"),
        (lambda: block_mask(1, 1, 8, q_offset=7, mask_function=masks.causal_mask_function), "use_cache=False"),
    ),
    **table("sequences",
        (attend(by_ring(in_blocks("causal", 9)), 4, 8), "use_cache=False"),
        (attend(by_ring(zeros(1, 1, 9, 9, dtype=torch.bool)), 4, 8), "a sequence of 8"),
        (attend(by_ring(None), 4, 10), "each rank has 5"),
        (attend(by_heads(None), 5, 7), "attends from 4 to 5 positions", "this rank has 4 of a sequence of 7"),
        (attend(by_heads(zeros(2, 1, 4, 4)), 4, 7), "shape (2, 1, 4, 4) for sequences of length 7"),
        (attend(by_heads(None, position_bias=zeros(1, 4, 4, 4)), 4, 7), "shape (1, 4, 4, 4) for sequences"),
        (attend(by_heads(zeros(2, 3, 7, 7)), 4, 7), "for 4 query heads"),
    ),
    **table("recomputation",
        (recomputed(), "neither is given"),
        (recomputed(gradient_checkpointing_ratio=0.5, num_ckpt_layers_per_stage=[1, 1]), "both are given"),
        (recomputed(gradient_checkpointing_ratio=1.5), f"{RATIO}=1.5 must be a number from 0 to 1"),
        (recomputed(gradient_checkpointing_ratio="all"), f"{RATIO}='all'"),
        (recomputed(num_ckpt_layers_per_stage=[1]), "num_ckpt_layers_per_stage=[1]", "one for each of 2 stages"),
        (recomputed(num_ckpt_layers_per_stage=[1, -1]), "integers of at least 0"),
        (recomputed(num_ckpt_layers_per_stage=3), "must be a list"),
        (recomputed(gradient_checkpointing_ratio=1, recompute_modules="mlp"), "recompute_modules='mlp' must be a list"),
        (recomputed(gradient_checkpointing_ratio=1, recompute_modules=[]), "recompute_modules=[] must be a list"),
    ),
    **table("lazy layers",
        (lazily(lambda model: model.weight.data.resize_(7, 3)), "aten.resize_.default on a tensor of sh"),
        (lazily(lambda model: torch._foreach_zero_([model.weight.data])), "aten._foreach_zero_.default"),
        (lazily(lambda model: model.weight.data.copy_(torch.empty(3, 4, device="meta"))), "one on the meta device",
            "which has no values"),
        (lazily(materialize), "after the block of LazyInitContext"),
        (lazily(shard_model), "sharded, within a LazyInitContext: do it after the block"),
        (entered(torch.device("meta"))(partial(shard_model, nn.Linear(4, 3))), "within torch.device('meta'): do it"),
        (lazily(hold_a_view, ends=True), "weight could not be materialized, since something besides its module"),
        (lazily(lambda model: pickle.dumps(model.weight), ends=True), "TypeError", "has no values to save"),
        (on_another_device, "default device is meta, but", "leave out"),
        (copy_another_shape, "weight could not be materialized", "aten.copy_.default could not"),
    ),
    **table("kernels",
        *((partial(by_xformers, name), f"passes {name} to its attention")
            for name in ("softcap", "s_aux", "cu_seq_lens_q", "something_new")),
        (lambda: ShardConfig(enable_flash_attention="flash"), "='flash' must be True, 'eager', 'sdpa'", "or False"),
        (with_all_kernels, "package xformers", "give one", "BloomForCausalLM"),
        (outside_of_vocabulary, "label 5 is outside the vocabulary of 5"),
    ),
    **table("adapters",
        (with_adapters(lora_config=lora(target_modules=["q_proj", "query"])), "'query'", "q_proj, up_proj"),
        (with_adapters(lora_config=lora(modules_to_save=["score"])), "modules_to_save", "'score'"),
        (with_adapters(lora_config=lora(task_type="SEQ_CLS")), "'SEQ_CLS'", "LlamaForCausalLM", "'CAUSAL_LM'"),
        (with_adapters(lora_config=IA3Config(target_modules=["q_proj"])), "IA3Config", "peft.LoraConfig"),
        (with_adapters(), "either lora_config", "or pretrained_dir"),
        (with_adapters(pretrained_dir="/nowhere", lora_config=lora()), "/nowhere", "either lora_config"),
        (with_adapters(lora_config=lora(), quantize=True), "4 or 8 bits"),
        (lambda: with_adapters(ADAPTED.build_peft(), lora_config=lora())(), "has adapters of peft", "the plain"),
        (entered(patch.dict(sys.modules, {"peft": None}))(with_adapters()), "peft", "echelon[lora]"),
    ),
}
# fmt: on


class Scaled(nn.Linear):
    """A linear layer with additional code, like an adapter or a quantized layer."""

    def forward(self, input: Tensor) -> Tensor:
        return 2 * super().forward(input)


class Divided(nn.Embedding):
    """Divide by a scale; the embeddings of transformers multiply."""

    embed_scale = 2.0

    def forward(self, input: Tensor) -> Tensor:
        return super().forward(input) / self.embed_scale


class Shifted(nn.Embedding):
    """Scale and shift; a sharded layer would lose the shift."""

    embed_scale = 2.0

    def forward(self, input: Tensor) -> Tensor:
        return super().forward(input) * self.embed_scale + self.shift


def hooked(layer: nn.Module) -> nn.Module:
    layer.register_forward_hook(lambda module, args, output: 2 * output)
    return layer


def patched() -> nn.Module:
    layer = nn.Linear(4, 8)
    layer.forward = lambda x: x
    return layer


def quantized() -> nn.Module:
    layer = nn.Linear(4, 8, bias=False)
    layer.weight = nn.Parameter(torch.zeros(8, 4, dtype=torch.int8), requires_grad=False)
    return layer


class Group:
    """Stand-in for a process group; a config reads only its size."""

    def size(self) -> int:
        return 2


def optimized(policy: Any, **config: Any) -> Callable[[], Any]:
    """Make a call that shards a tower by a policy, and requires that a refusal changes nothing."""

    def call() -> None:
        model = Tower()
        before = deepcopy(model.state_dict())
        try:
            ShardFormer(ShardConfig(**config)).optimize(model, policy())
        finally:
            after = model.state_dict()
            assert all(torch.equal(after[name], tensor) for name, tensor in before.items())

    return call


def over_another_axis() -> None:
    groups: Any = {name: StandInGroup(0, 2) for name in ("tp", "wp")}
    layer = SubModuleReplacementDescription(suffix="up", target_module=Linear1D_Col, axis="wp")
    config = ShardConfig(tensor_parallel_process_group=groups["tp"], axis_groups={"wp": groups["wp"]})
    plan_parallelism(Tower(), described(sub_module_replacement=(layer,))(), config)


def replaced(targets: tuple[Any, ...], native: nn.Module, words: str, **arguments: Any) -> list[Row]:
    """Make a row of replacing a layer for each of the targets."""
    return [(partial(target.from_native_module, native, ALONE, **arguments), words) for target in targets]


def contradicting() -> None:
    Table(
        stage=StagePlan(layers="layers", entry=("embed",)), regions=("mlp", "f", "down"),
        column=("mlp.up", "attn.qkv", "f"), row=("mlp.down", "down"), second_input={"cross": "states"},
        by_head={"g": {"bias": 0}}, optional=("mlp", "mlp.side"), fused={"attn.q": 3}, key_value=("mlp.k",),
        split={"attn.bias": 1}, gathered=("mlp.gate",), embedding="embed",
        dropout={"attn": RegionDropout(probability="attn.p", row="attn.out")},
    )  # fmt: skip


PAIR: Any = Group()
LINEAR = (Linear1D_Col, Linear1D_Row, VocabParallelLMHead1D)
EMBEDDING, NORM = (VocabParallelEmbedding1D,), (SplitRMSNorm,)
UNSUPPORTED = "which a sharded vocabulary does not support"
SAM, SWIN_BIAS = table_for("sam"), "attention.relative_position_bias.relative_position_bias_table"
INSIDE, SIZE, GROUP = "['mlp', 'f', 'down']", "tensor_parallel_size", "tensor_parallel_process_group"
# fmt: off
POLICIES: dict[str, Row] = {
    **table("configs",
        (lambda: ShardConfig(tensor_parallel_size=0), f"{SIZE}=0 must be at least 1"),
        (lambda: ShardConfig(make_vocab_size_divisible_by=0), "make_vocab_size_divisible_by=0 must be at least 1"),
        (lambda: ShardConfig(make_vocab_size_divisible_by="8"), "make_vocab_size_divisible_by='8' must be an integer"),
        (lambda: ShardConfig(data_parallel_size="2"), "data_parallel_size='2' must be an integer"),
        (lambda: ShardConfig(tensor_parallel_process_group=2), f"{GROUP}=2 must be a process group"),
        (lambda: ShardConfig(enable_jit_fused="no"), "enable_jit_fused='no' must be True or False"),
        (lambda: ShardConfig(tensor_parallel_process_group=PAIR, tensor_parallel_size=4),
            f"{SIZE}=4 is not the size of {GROUP}", "which has 2 ranks"),
        (lambda: ShardConfig(tensor_parallel_process_group=PAIR, data_parallel_size=2),
            "data_parallel_size=2 needs a group", f"beside the {GROUP}"),
        (lambda: ShardConfig(data_parallel_process_group=PAIR, tensor_parallel_size=2),
            f"{SIZE}=2 needs a group", "beside the data_parallel_process_group"),
        (lambda: ShardConfig(tensor_parallel_size=2, enable_tensor_parallelism=False),
            f"{SIZE}=2 needs tensor parallelism", "enable_tensor_parallelism=False turns off"),
        *((partial(ShardConfig, gather_output=value, parallel_output=value),
            f"parallel_output={value} and gather_output={value} contradict each other") for value in (True, False)),
        (lambda: ShardFormer({"tensor_parallel_size": 2}), "ShardFormer takes a ShardConfig", "got a dict"),
    ),
    **table("policies",
        (optimized(described(sub_module_replacement=(MISSING,))), "names 'gate' in Block", "are ['up', 'down']"),
        (optimized(described(attribute_replacement={"num_heads": 2})), "names the attribute 'num_heads' of Block"),
        (optimized(described(attribute_replacement={"up.heads": 2})), "names the attribute 'up.heads' of Block"),
        (optimized(described(method_replacement={"activate": sine})), "replaces the method 'activate' of Block"),
        (optimized(described(key="Blok")), "describes Blok, but the model has no module of", "Block, Linear"),
        (optimized(described(key=nn.Conv2d)), "describes Conv2d, but the model has no module of that class"),
        (over_another_axis, "Linear1D_Col places parameters over ['tp']", "the policy names 'wp'"),
        (optimized(TwoAxes, axis_groups={"wp": StandInGroup(1, 2)}), "axis_groups of wp need a booster"),
        *((optimized(policy, pipeline_stage_manager=manager_alone(0, [0, 2, 3])), *words) for policy, *words in (
            (Former, "Former has a method faults()", "call it config_errors(), without arguments"),
            (Plain, "Plain has no stage_plan, so pp_size must be 1"),
            (Elsewhere, "the stage plan names 'layers', and this Tower has no such module", "plan names 'embed'"))),
        (lambda: policy_for(nn.Linear(2, 2)), "a Linear has no config of transformers",
            "leave tp_size and pp_size at 1", "register_class"),
        # Its linear layers, and its embedding, are classes of their own. With older releases its head is sharded.
        *(() if ARE_PLANS_OLDER else (
            (lambda: proposed(double_copy_of("ibert")), "no linear layers widen and return to their width"),)),
        # Norms over all features lie between its projections.
        (lambda: proposed(double_copy_of("bitnet")), "the layers model.layers: RuntimeError: The size of tensor a"),
    ),
    **table("tables",
        (contradicting, "11 errors",
            *(f"{name} lies in none of the regions {INSIDE}" for name in ("column 'attn.qkv'", "split 'attn.bias'")),
            "gathered 'mlp.gate' lies in the region 'mlp', whose activations are sharded",
            "region 'down' is also in row, but a row-parallel layer ends a region",
            "fused 'attn.q' is not in column and split ['mlp.up', 'attn.qkv', 'f', 'attn.bias']",
            "key_value 'mlp.k' is not in column, split and norms",
            *(f"{name} is not in regions {INSIDE}" for name in ("second_input 'cross'", "by_head 'g'", "dropout 'attn'")
            ),
            "row of dropout 'attn.out' is not in row ['mlp.down', 'down']",
            "optional 'mlp.side' is not the path of a module or parameter"),
        (lambda: replace(SWIN, split={}, biases={SWIN_BIAS: 1}), "lies in the region 'attention', whose activations"),
        (lambda: replace(BEIT, split=BEIT.biases, biases={}), "lies in none of the regions"),
        (lambda: replace(ALBERT, joined={"albert_layers.0.attention": ("albert_layers.0.attention.dense",)}),
            "layer of joined", "is not in column"),
        (lambda: replace(SAM, stage=(replace(SAM.stage[0], part="neck"),), row=("proj",)),
            "stage names the part 'neck'", "- row names modules of layers"),
    ),
    **table("layers",
        *replaced(LINEAR, Scaled(4, 8), "Scaled, not a plain torch.nn.modules.linear.Linear"),
        *replaced(LINEAR, Conv1D(8, 4), "Conv1D, not a plain"),
        *replaced(LINEAR, nn.utils.parametrizations.weight_norm(nn.Linear(4, 8)), "ParametrizedLinear, not"),
        *replaced(LINEAR, hooked(nn.Linear(4, 8)), "has hooks or a replaced forward"),
        *replaced(LINEAR, patched(), "has hooks or a replaced forward"),
        *replaced(LINEAR, quantized(), "weight of Parameter in torch.int8"),
        *replaced(LINEAR, nn.Embedding(8, 4), "not a plain"),
        *replaced(LINEAR, LINEAR[0].from_native_module(nn.Linear(4, 8), ALONE), "is sharded already, perhaps as"),
        *replaced((GPT2FusedLinearConv1D_Col,), nn.Linear(4, 8), "not a plain transformers.pytorch_utils.Conv1D"),
        *replaced(LINEAR[:1], nn.Linear(4, 8), "a single block without replicas", gather_output=True, replicas=2),
        *replaced(LINEAR[:1], nn.Linear(4, 8), "a single block without", gather_output=True, split_sizes=(2, 6)),
        *replaced(LINEAR[:1], nn.Linear(4, 7), "7 entries along dim 0 are not divisible by 2 ranks"),
        *replaced(EMBEDDING, nn.Embedding(8, 6, max_norm=1.0), UNSUPPORTED),
        *replaced(EMBEDDING, nn.Embedding(8, 6, scale_grad_by_freq=True), UNSUPPORTED),
        *replaced(EMBEDDING, nn.Embedding(8, 6, sparse=True), UNSUPPORTED),
        *replaced(EMBEDDING, hooked(nn.Embedding(8, 6)), "has hooks"),
        *replaced(EMBEDDING, Divided(8, 6), "its additional behaviour would be lost"),
        *replaced(EMBEDDING, Shifted(8, 6), "its additional behaviour would be lost"),
        *replaced(NORM, Gemma2RMSNorm(8, eps=1e-6), "does not compute weight"),  # adds 1 to its weight
        *replaced(NORM, nn.LayerNorm(8, bias=False), "does not compute weight"),  # subtracts the mean
        *replaced(NORM, nn.LayerNorm(8), "is not a root-mean-square norm"),
        *replaced(NORM, nn.Linear(8, 8), "is not a root-mean-square norm"),
    ),
}
# fmt: on
