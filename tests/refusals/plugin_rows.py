"""Refused arguments, models and calls of plugins on two ranks, and words of each message."""

from collections.abc import Callable
from functools import cache, partial
from itertools import cycle
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

from echelon import (
    Booster,
    HybridParallelPlugin,
    LazyInitContext,
    LowLevelZeroPlugin,
    PipelineGradientCheckpointConfig,
    ShardConfig,
    ShardFormer,
    TorchDDPPlugin,
    TorchFSDPPlugin,
    shard_model,
)
from echelon.cluster.mesh import ParallelMesh
from echelon.pipeline.stage_manager import PipelineStageManager
from echelon.plugins.colossalai import DDP, FSDP, HYBRID, ZERO
from echelon.shardformer import Policy
from echelon.shardformer.tables.decoders import GPT2
from echelon.verify.batch import loss_of, make_batch
from echelon.verify.model_choice import ModelChoice
from echelon.verify.parity import make_optimizer

from ..plugins.test_float64 import MASKED
from ..plugins.test_formats import OTHER, ROUNDED
from ..plugins.test_router_loss import mixture
from ..plugins.test_two_models import SEQUENCES as ALL_TO_ALL
from ..plugins.test_two_models import SHARED
from ..plugins.training import BERT, LLAMA, boosted, booster_of, hybrid, sgd, share
from .rows import OF_RANK, Row, table

CHOICE = ModelChoice(model_type="llama", num_layers=2)
NLLB = ModelChoice(model_type="nllb-moe", num_layers=2)
IDS = torch.arange(5, 11)[None]
HOW: dict[str, Any] = {"backend": "eager"}  # without inductor, whose compiler takes seconds
PLUGINS: dict[str, Callable[[], Any]] = {
    "ddp": lambda: booster_of("ddp"),
    "zero": lambda: booster_of("zero2", precision="fp32"),
    "fsdp": lambda: booster_of("fsdp", precision="fp32"),
    "tensor": lambda: hybrid(tp_size=2),
    "stages": lambda: hybrid(pp_size=2),
}
MLP = PipelineGradientCheckpointConfig(gradient_checkpointing_ratio=1.0, recompute_modules=("mlp",))


def alone(call: Callable[[], Any]) -> Callable[[], Any]:
    """Make a call that must be refused before any process group is made."""

    def checked() -> None:
        before = dist.distributed_c10d._world.group_count
        try:
            call()
        finally:
            assert dist.distributed_c10d._world.group_count == before, "a group was made before the refusal"

    return checked


def made(plugin: Callable[..., Any], **arguments: Any) -> Callable[[], Any]:
    if plugin is not TorchDDPPlugin:
        arguments = {"precision": "fp32"} | arguments
    return alone(lambda: plugin(**arguments))


def typo(called: Any, *nearest: str, **unknown: Any) -> Row:
    """Make a row of unknown arguments, each with the nearest known ones."""
    start = f"{called.__name__}.__init__() got an unexpected keyword argument"
    questions = [f": did you mean {names}?" * bool(names) for names in nearest]
    errors = [f"{start} {name!r}{question}" for name, question in zip(unknown, questions, strict=True)]
    return alone(partial(called, **unknown)), *errors, "TypeError" if len(errors) == 1 else "2 errors"


@cache
def boosted_by(plugin: str) -> Any:
    return PLUGINS[plugin]().boost(CHOICE.build())[0]


def boost(plugin: str, model: Any, **others: Any) -> Callable[[], Any]:
    """Make a call of boost; `model` is a function, or another value."""
    return lambda: PLUGINS[plugin]().boost(model() if callable(model) else model, **others)


def boost_again(first: str, second: str, unwraps: bool) -> None:
    model = boosted_by(first)
    PLUGINS[second]().boost(model.unwrap() if unwraps else model)


def under(
    choice: ModelChoice, other: ModelChoice | None = None, make: Any = make_optimizer, **settings: Any
) -> Callable[[], Any]:
    """Make a call of boost with an optimizer, which may be that of another model."""

    def call() -> None:
        model = choice.build()
        hybrid(**settings).boost(model, make(other.build() if other else model), loss_of)

    return call


def strange() -> None:
    model: Any = LLAMA.build()
    model.scale = nn.Parameter(torch.tensor(1.0))
    model.lm_head.weight.register_post_accumulate_grad_hook(lambda _: None)
    booster_of("fsdp").boost(model, make_optimizer(model))


def of(model_type: str, **settings: Any) -> ModelChoice:
    return ModelChoice(model_type=model_type, settings=tuple(settings.items()))


def boost_in_float64(kind: str) -> None:
    model: Any = MASKED.build()
    bias = model.get_parameter("cls.predictions.bias")
    bias.data = bias.data.double()
    booster_of(kind, precision="fp32").boost(model, sgd(model))


def boost_shared(name: str, settings: dict[str, Any]) -> None:
    """Boost a model that has a layer or weight of a boosted one; a refusal changes nothing."""
    booster, first = hybrid(**settings), LLAMA.build()
    second = SHARED[name](first)
    booster.boost(first, sgd(first), loss_of)
    before = {name: weight.clone() for name, weight in second.named_parameters()}
    try:
        booster.boost(second, sgd(second), loss_of)
    finally:
        after = {name: weight for name, weight in second.named_parameters() if not weight.is_meta}
        assert all(torch.equal(weight, before[name]) for name, weight in after.items())


def sharded_by(policy: Any) -> None:
    shard_model(CHOICE.build(), policy)


def wrapped() -> Any:
    return torch.compile(CHOICE.build(), **HOW)


def compiled_before() -> nn.Module:
    model = CHOICE.build()
    model.compile(**HOW)
    return model


def of_stage(call: Callable[[Any], Any]) -> Callable[[], Any]:
    return lambda: call(boosted_by("stages").unwrap().eval())


def generate(settings: dict[str, Any], ids: Callable[[], Any] = lambda: IDS) -> Callable[[], Any]:
    def call() -> None:
        hybrid(**settings).boost(CHOICE.build())[0].generate(ids(), max_new_tokens=1)

    return call


def gather(samples: Callable[[], Any]) -> Callable[[], Any]:
    return lambda: booster_of("zero", precision="fp32").gather_for_metrics(samples())


def routed(choice: ModelChoice, samples: tuple[int, int] = (4, 4), **settings: Any) -> Callable[[], Any]:
    """Make a training call with these samples by replica; `asks` puts the loss of routers into the batch."""
    asks = {"output_router_logits": True} if settings.pop("asks", False) else {}

    def call() -> None:
        booster, model = hybrid(**settings), choice.build()
        boosted, optimizer, *_ = booster.boost(model, sgd(model))
        batch = make_batch(choice, num_samples=samples[booster.plugin.data_rank[0]], seed=3) | asks
        booster.execute_pipeline(iter([batch]), boosted, None, optimizer)

    return call


def differing(*settings: dict[str, Any]) -> Callable[[], Any]:
    return lambda: hybrid(**settings[dist.get_rank()])


def with_other_rates() -> None:
    model = LLAMA.build()
    hybrid(zero_stage=1).boost(model, torch.optim.SGD(model.parameters(), lr=0.1 * (1 + dist.get_rank())))


def train_on_the_first(**sizes: Any) -> None:
    booster = hybrid(**sizes)
    model, optimizer = boosted(booster, LLAMA)
    with torch.set_grad_enabled(dist.get_rank() == 0):
        booster.execute_pipeline(share(booster, LLAMA, 0), model, loss_of, optimizer)


def clip(first: Callable[[Any], Any], second: Callable[[Any], Any]) -> Callable[[], Any]:
    """Make a training step in which the ranks end differently."""

    def call() -> None:
        booster = hybrid(tp_size=2)
        model, optimizer = boosted(booster, LLAMA)
        booster.execute_pipeline(share(booster, LLAMA, 0), model, loss_of, optimizer)
        (second if dist.get_rank() else first)(optimizer)

    return call


def ddp(*settings: tuple[dict[str, Any], str]) -> Callable[[], Any]:
    def call() -> None:
        options, precision = settings[dist.get_rank() % len(settings)]
        boosted(Booster(plugin=TorchDDPPlugin(**options), mixed_precision=precision), LLAMA)

    return call


def clip_at_the_second_step() -> None:
    booster = booster_of("ddp")
    model, optimizer = boosted(booster, LLAMA)
    for step in range(2):
        booster.backward(model(**make_batch(LLAMA, num_samples=2, seed=step)).loss, optimizer)
        if dist.get_rank() == 0:
            optimizer.clip_grad_by_norm(0.1)
        optimizer.step()


SEQUENCES = "sequence_parallelism_mode or enable_sequence_parallelism"
SCALING = dict(growth_factor=1, backoff_factor=1, growth_interval=0, hysteresis=2, min_scale=1, max_scale=4)
PIPELINED = dict(zero_stage=1, pp_size=2, num_microbatches=2, pp_style="zbh1")
COLOSSALAI: tuple[tuple[Any, Any], ...] = (
    (HybridParallelPlugin, HYBRID), (LowLevelZeroPlugin, ZERO), (TorchDDPPlugin, DDP), (TorchFSDPPlugin, FSDP)
)  # fmt: skip
BOOSTED = "already boosted, or sharded by ShardFormer: give the plain"
META = "are on the meta device, without values"
COMPILED = "with a tp_size, sp_size, wp_size or ep_size above 1", "compile_layers=True"
DIFFER = "the settings of the plugin differ between ranks"
# fmt: off
PLUGINS_ROWS: dict[str, Row] = {
    **table("arguments",
        (made(HybridParallelPlugin, tp_size=3, precision="fp8", zero_stage=3, pp_style="zigzag", max_norm=float("nan")),
            "does not divide the world size 2", "precision='fp8'", "zero_stage=3 is not available: use TorchFSDPPlugin",
            "pp_style: there is no schedule 'zigzag'", "max_norm=nan must be a number of at least 0"),
        (made(HybridParallelPlugin, compile_layers=True, enable_all_optimization=True, overlap_allgather=True,
            gradient_checkpoint_config=MLP, **PIPELINED), "4 errors:",
            "recompute_modules=('mlp',) with compile_layers=True", "overlap_allgather=True: compiled code does not",
            "enable_jit_fused=True (which enable_all_optimization=True turns on)",
            "pp_style='zbh1' with compile_layers=True: a compiled layer cannot defer"),
        (made(HybridParallelPlugin, tp_size="2", pp_size=1.5, gradient_accumulation_steps="2", precision=3,
            enable_sequence_parallelism="no", initial_scale="a", hysteresis="b"), "hysteresis='b' must be an integer",
            "precision=3 must be one of 'fp32'", "initial_scale='a' must be a number", "tp_size='2' must be an integer",
            "pp_size=1.5 must be", "gradient_accumulation_steps='2' must", "enable_sequence_parallelism='no' must be"),
        (made(TorchFSDPPlugin, precision="fp8", shard_size=3, cpu_offload="yes", reshard_after_forward=2,
            initial_scale=0, **SCALING), "11 errors", "'fp8'", "shard_size=3 must be a divisor above 1 of",
            "cpu_offload='yes'", "reshard_after_forward=2", "initial_scale=0 must be a finite number above 0",
            "growth_factor=1", "backoff_factor=1", "growth_interval=0", "hysteresis=2 of ColossalAI is not available",
            "min_scale=1 of", "max_scale=4 of"),
        *((lambda kind=kind: booster_of(kind, precision="fp8"), "precision='fp8'", "bf16") for kind in ("ddp", "zero")),
        (lambda: HybridParallelPlugin.from_config({"pipeline": 3}), "InternEvo's configuration", "=3 is pipeline.size"),
        *((made(plugin, **{name: "else"}), known.instead) for plugin, known_names in COLOSSALAI
            for name, known in known_names.items() if known.instead),
        (made(HybridParallelPlugin, tp=2, use_fp8=True, dp_outside=False), "argument 'tp': did you mean tp_size?",
            "- use_fp8=True of ColossalAI is not available: leave it out and use precision="),
        (alone(lambda: HybridParallelPlugin(*[1] * 20)), "too many positional arguments", "it takes tp_size, pp_size"),
        (alone(lambda: HybridParallelPlugin(1, tp_size=1)), "multiple values for argument 'tp_size'"),
    ),
    **table("typos",
        typo(HybridParallelPlugin, "dp_size", "pp_size", dp=2, pp_szie=2),
        typo(HybridParallelPlugin, SEQUENCES, sequence_parallelism=True),
        typo(HybridParallelPlugin, "use_fp8", use_fp9=True),
        typo(TorchDDPPlugin, "bucket_cap_mb", bucket_cap=25),
        typo(Booster, "mixed_precision", precision="bf16"),
        typo(LazyInitContext, "default_device", device="cpu"),
        typo(LazyInitContext, "", tensor_cls=None),
        *(typo(plugin, "", x=1) for plugin, _ in COLOSSALAI),
    ),
    **table("models",
        (lambda: booster_of("ddp").boost(nn.Sequential(nn.Linear(4, 4)), "adamw", "loss", None, "linear"), "3 errors",
            "optimizer='adamw'", "criterion='loss'", "lr_scheduler='linear' is not valid: give a scheduler"),
        (under(of("bloom", slow_but_exact=True), tp_size=2, enable_flash_attention=True),
            "BloomForCausalLM cannot compute attention", "is not supported with tensor parallelism"),
        (under(of("llama", intermediate_size=25), of("llama", intermediate_size=25), tp_size=2),
            "25 entries along dim 1 are not divisible by 2 ranks", "parameters are not in the model"),
        (under(of("bert", layerdrop=0.1), BERT, wp_size=2),
            "layerdrop=0.1 in the model's config", "parameters are not in the model"),
        (strange, "2 errors", "is a scalar", "has hooks"),
        *((boost(plugin, "llama"), "a model is a torch.nn.Module, and this is a str") for plugin in PLUGINS),
        (lambda: shard_model("llama"), "a model is a torch.nn.Module, and this is a str"),
        *((boost(plugin, CHOICE.build_on_meta), "model.embed_tokens.weight and", "more of the model are on the meta")
            for plugin in PLUGINS),
        (lambda: shard_model(CHOICE.build_on_meta()), META, "build or load the model in a Lazy"),
        *((partial(boost_again, first, second, unwraps), BOOSTED)
            for first, second in zip(PLUGINS, [*PLUGINS][1:] + [*PLUGINS][:1], strict=True)
            for unwraps in (False, True)),
        *((lambda first=first: shard_model(boosted_by(first)), BOOSTED) for first in PLUGINS),
        *((boost(plugin, wrapped), "the model is wrapped by torch.compile, which renames") for plugin in PLUGINS),
        (lambda: shard_model(wrapped()), "give the plain model, and call model.compile() on the returned one"),
        (boost("tensor", compiled_before), *COMPILED),
        (under(CHOICE, tp_size=2, custom_policy=GPT2), "the stage plan names 'model.h'", "has no such"),
        *((call, f"policy is {words}") for policy, words in (
            ("llama", "'llama' and must be"), (Policy, "the class Policy and must be"))
            for call in (partial(sharded_by, policy), made(HybridParallelPlugin, custom_policy=policy))),
        (under(of("mixtral", num_local_experts=3), ep_size=2), "ep_size=2 does not divide the 3 experts", "a divisor"),
        (under(of("switch_transformers"), make=lambda model: torch.optim.Adafactor(model.parameters()), ep_size=2),
            "where an optimizer of full parameters (Muon, Adafactor) cannot step it"),
        (under(ROUNDED), "router_dtype='bfloat16' of the model's config rounds routers' weights"),
        (under(OTHER, precision="bf16"), "router_dtype='float16' of the model's config rounds routers' weights"),
        *((partial(boost_in_float64, kind), "cls.predictions.bias in torch.float64 would be rounded to float32")
            for kind in ("hybrid", "zero1")),
        *((partial(boost_shared, name, settings), f"model.{name}", "is already boosted, or sharded")
            for name, settings in zip(cycle(SHARED), ({"pp_size": 2}, {"tp_size": 2}, ALL_TO_ALL))),
        *((partial(boost_shared, name, {"zero_stage": stage}), f"model.{name}", "is already trained by another")
            for name, stage in zip(cycle(SHARED), (0, 1, 2))),
        (lambda: ShardFormer(ShardConfig(pipeline_stage_manager=PipelineStageManager(ParallelMesh(pp=2)))).optimize(
            mixture().build()), "use HybridParallelPlugin"),
    ),
    **table("calls",
        (lambda: hybrid().execute_pipeline(iter([{"input_ids": IDS}]), wrapped()), "not torch.compile's wrapper of it",
            "call model.compile()"),
        (lambda: boosted_by("tensor").compile(**HOW), *COMPILED),
        (lambda: torch.compile(boosted_by("tensor"), **HOW)(IDS), *COMPILED),
        *((generate(sizes), "model.generate needs pp_size, sp_size, wp_size and ep_size of 1", "booster.save_model")
            for sizes in ({"pp_size": 2}, {"wp_size": 2}, {"sp_size": 2, "enable_sequence_parallelism": True})),
        (generate({"tp_size": 2}, lambda: IDS + dist.get_rank()), "the inputs of rank(s) [1] of axis tp differ"),
        *((of_stage(call), OF_RANK, "has only stages [", "] of 2, but was called directly or by generate")
            for call in (lambda model: model(IDS), lambda model: model.generate(IDS, max_new_tokens=1))),
        (gather(lambda: torch.ones(2, 3 + dist.get_rank())), "shape (2, 4)", "of replica 1", "of replica 0", "(2, 3)"),
        (gather(lambda: {"loss": torch.ones(()), "logits": torch.ones(2)}), "a number as a tensor"),
        (gather(lambda: [torch.ones(2), "a"]), "'a', a str beside tensors"),
        (gather(lambda: ["a"] * (2 + dist.get_rank())), "a list of 3 objects of replica 1", "a list of 2 objects"),
        (gather(lambda: ["a", "b"] if dist.get_rank() else torch.ones(2)), "objects of replica 1", "replica 0 tensors"),
        (gather(lambda: {"text": "a"}), "no samples: a dict"),
        (lambda: boosted(hybrid(), LLAMA)[0].expert_load(), "the model has no experts"),
        (routed(mixture(adds=False), asks=True), "set model.config.output_router_logits=True"),
        (routed(mixture(adds=True), (4, 6), num_microbatches=None, microbatch_size=2),
            "output_router_logits=True needs equally many microbatches"),
        (routed(NLLB, pp_size=2, asks=True), "output_router_logits=True of an encoder-decoder needs all layers"),
    ),
    **table("unequal ranks",
        (differing({"zero_stage": 1}, {"zero_stage": 2}), DIFFER, "zero_stage is 1 on rank(s) [0] and 2 on"),
        (differing({"pp_size": 2}, {"tp_size": 2}), DIFFER, "pp_size is 2 on rank(s) [0] and 1 on rank(s) [1]"),
        (differing(*({"pp_size": 2, "num_layers_per_stage": layers} for layers in ([3, 1], [2, 2]))), DIFFER,
            "num_layers_per_stage is [3, 1] on rank(s) [0] and [2, 2] on rank(s) [1]"),
        (differing({"precision": "fp16"}, {}), DIFFER, "precision is 'fp16' on rank(s) [0] and 'fp32' on rank(s) [1]"),
        (differing({"communication_dtype": torch.bfloat16}, {}), DIFFER, "torch.bfloat16 on rank(s) [0] and None on"),
        (with_other_rates, "lr of group 0 is 0.1 on rank(s) [0] and 0.2 on rank(s) [1]"),
        *((partial(train_on_the_first, **sizes), "called to train on rank(s) [0]", "torch.no_grad() on the others")
            for sizes in ({"pp_size": 2}, {"zero_stage": 1})),
        (clip(lambda made: made.clip_grad_by_norm(1.0), lambda made: made.clip_grad_by_norm(2.0)),
            "max_norm is 1.0 on rank(s) [0] and 2.0 on rank(s) [1]"),
        (clip(lambda made: made.clip_grad_by_norm(1.0), lambda made: made.step()), OF_RANK, "must make the same calls"),
        (ddp(({"static_graph": True}, "fp32"), ({}, "fp32")), DIFFER, "static_graph is True on rank(s) [0]"),
        (ddp(({}, "fp32"), ({}, "bf16")), DIFFER, "mixed_precision is 'fp32' on rank(s) [0]"),
        (clip_at_the_second_step, "the settings of the optimizer differ", "max_norm is 0.1 on rank(s) [0]"),
    ),
}
# fmt: on
