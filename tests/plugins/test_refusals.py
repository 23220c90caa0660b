"""Refusals of plugins: equal on every rank, with all reasons, before any communication: calls and needles."""

import copy
from collections.abc import Callable
from inspect import signature
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from echelon import (
    Booster,
    HybridParallelPlugin,
    LazyInitContext,
    LowLevelZeroPlugin,
    PipelineGradientCheckpointConfig,
    TorchDDPPlugin,
    TorchFSDPPlugin,
)
from echelon.cluster.errors import ErrorList
from echelon.plugins.colossalai import DDP, FSDP, HYBRID, ZERO
from echelon.verify.batch import loss_of, make_batch
from echelon.verify.models import ModelChoice
from echelon.verify.parity import make_optimizer

from ..pool import Pool
from .training import BERT, boosted, booster_of, hybrid, refused

GPT2 = ModelChoice(model_type="gpt2", tied=True, num_layers=2)
SEQUENCES = {"enable_sequence_parallelism": True}

# Arguments of a plugin, and parts of its error message.
ARGUMENTS: list[tuple[Callable[..., Any], dict[str, Any], tuple[str, ...]]] = [
    (
        HybridParallelPlugin,
        dict(tp_size=3, precision="fp8", zero_stage=3, pp_style="zigzag", max_norm=float("nan")),
        (
            "does not divide the world size 2",
            "precision='fp8'",
            "zero_stage=3 is not available: use TorchFSDPPlugin, which shards parameters too, or zero_stage 0, 1 or 2",
            "pp_style: there is no schedule 'zigzag'",
            "max_norm=nan must be a number of at least 0",
        ),
    ),
    (
        HybridParallelPlugin,
        dict(use_fp8=True, precision="fp8"),
        ("2 errors:\n- use_fp8=True", "precision='fp8'"),
    ),
    (
        HybridParallelPlugin,
        dict(
            compile_layers=True,
            enable_all_optimization=True,
            overlap_allgather=True,
            zero_stage=1,
            pp_size=2,
            num_microbatches=2,
            pp_style="zbh1",
            gradient_checkpoint_config=PipelineGradientCheckpointConfig(
                gradient_checkpointing_ratio=1.0, recompute_modules=("mlp",)
            ),
        ),
        (
            "4 errors:",
            "recompute_modules=('mlp',) with compile_layers=True",
            "overlap_allgather=True: compiled code does not wait for parameters",
            "enable_jit_fused=True (which enable_all_optimization=True turns on)",
            "pp_style='zbh1' with compile_layers=True: a compiled layer cannot defer",
        ),
    ),
    (
        HybridParallelPlugin,
        dict(pp_size=2, num_model_chunks=3),
        ("needs num_microbatches", "num_model_chunks=3"),
    ),
    (
        HybridParallelPlugin,
        dict(SEQUENCES, sequence_parallelism_mode="split_gather", sp_size=2, inner_ring_size=2),
        (
            "over the tensor axis, and tp_size is 1",
            "sp_size=2 with sequence_parallelism_mode='split_gather'",
            "inner_ring_size=2 is for sequence_parallelism_mode='ring_attn'",
        ),
    ),
    (
        HybridParallelPlugin,
        dict(sp_size=2, enable_sequence_overlap=True, inner_ring_size=3),
        (
            "sp_size=2 without enable_sequence_parallelism=True",
            "enable_sequence_overlap=True without",
            "inner_ring_size=3 without",
        ),
    ),
    (
        HybridParallelPlugin,
        dict(tp_size=2, sequence_parallelism_mode="gather", wp_size=2),
        (
            "sequence_parallelism_mode='gather' must be one of 'split_gather', 'ring', 'all_to_all', 'ring_attn'",
            "wp_size=2 does not divide the 1 ranks",
        ),
    ),
    (
        HybridParallelPlugin,
        dict(
            tp_size="2",
            pp_size=1.5,
            gradient_accumulation_steps="2",
            enable_sequence_parallelism="no",
            precision=3,
            initial_scale="a",
            hysteresis="b",
        ),
        (
            "hysteresis='b' must be an integer",
            "precision=3 must be one of 'fp32'",
            "initial_scale='a' must be a number",
            "tp_size='2' must be an integer\n- pp_size=1.5 must be an integer",
            "gradient_accumulation_steps='2' must be an integer",
            "enable_sequence_parallelism='no' must be True or False",
        ),
    ),
    (
        HybridParallelPlugin,
        dict(
            gradient_accumulation_steps=0,
            num_layers_per_stage=[0],
            zero_bucket_size_in_m=float("nan"),
            communication_dtype="int8",
            overlap_allgather=True,
        ),
        (
            "gradient_accumulation_steps=0 must be at least 1",
            "num_layers_per_stage=[0] must be a list of positive integers",
            "zero_bucket_size_in_m=nan must be a number from 2**-20 (one element) to below 2**20",
            "communication_dtype='int8' must be one of None, 'fp32'",
            "use zero_stage 1 or 2, or leave it out",
        ),
    ),
    (
        HybridParallelPlugin,
        dict(zero_bucket_size_in_m=True, max_norm=True),
        ("zero_bucket_size_in_m=True must be a number or None", "max_norm=True must be a number"),
    ),
    (
        HybridParallelPlugin,
        dict(pp_size=2, enable_xformers=True, enable_all_optimization=True),
        ("needs the package xformers", "needs num_microbatches", "give one of them"),
    ),
    (
        HybridParallelPlugin,
        dict(SEQUENCES, sequence_parallelism_mode="ring_attn", sp_size=2, enable_xformers=True),
        ("enable_xformers=True with sequence_parallelism_mode='ring_attn', which has kernels of its own",),
    ),
    (LowLevelZeroPlugin, dict(cpu_offload="yes"), ("cpu_offload='yes' must be True or False",)),
    (
        LowLevelZeroPlugin,
        dict(stage=3, reduce_bucket_size_in_m=-1),
        ("\n- stage=3 is not available", "reduce_bucket_size_in_m=-1 must be a number from 2**-20"),
    ),
    (
        TorchFSDPPlugin,
        dict(
            **dict(
                precision="fp8", shard_size=3, cpu_offload="yes", reshard_after_forward=2, initial_scale=0
            ),
            **dict(
                growth_factor=1, backoff_factor=1, growth_interval=0, hysteresis=2, min_scale=1, max_scale=4
            ),
        ),
        (
            *(
                "11 errors",
                "'fp8'",
                "shard_size=3 must be a divisor above 1 of",
                "cpu_offload='yes'",
                "reshard_after_forward=2",
            ),
            *(
                "initial_scale=0 must be a finite number above 0",
                "growth_factor=1",
                "backoff_factor=1",
                "growth_interval=0",
            ),
            *("hysteresis=2 of ColossalAI is not available", "min_scale=1 of", "max_scale=4 of"),
        ),
    ),
    (
        TorchFSDPPlugin,
        dict(initial_scale=float("nan")),
        ("initial_scale=nan must be a finite number above 0",),
    ),
    (
        TorchDDPPlugin,
        dict(bucket_cap_mb=-1, static_graph="no", fp8_communication=True),
        ("bucket_cap_mb=-1 must be", "static_graph='no' must be True or False", "fp8_communication=True"),
    ),
    (Booster, dict(device="cuda"), ("leave it out, and give it to the call that starts the process group",)),
    (Booster, dict(plugin="hybrid"), ("plugin='hybrid' is not a plugin: create one first",)),
]


def misuses() -> dict[str, tuple[Callable[[], Any], str]]:
    """Return calls of a boosted BERT, with a part of each error message."""
    booster = hybrid()
    model, optimizer = boosted(booster)
    batch = make_batch(BERT, num_samples=4, seed=0)

    def run(
        criterion: Any = loss_of, data: Any = None, given: Any = optimizer, **options: Any
    ) -> Callable[[], Any]:
        data = iter([batch]) if data is None else data
        return lambda: booster.execute_pipeline(data, model, criterion, given, **options)

    def weighing(weight: Any) -> Callable[[], Any]:
        return run(lambda outputs, _: (outputs.loss, weight))

    def dividing(divisor: Any) -> Callable[[], Any]:
        return run(data=iter([batch | {"num_items_in_batch": divisor}]))

    scalar, turns = "the criterion must return a real scalar tensor", iter([True, False])
    wrong_weights = {"words": "a", "no number": None, "a list of one": [1.0]}
    wrong_divisors = {"a word": "a", "zero": 0, "negative": -3, "not a number": float("nan"), "True": True}
    wrong_divisors |= {"zero on the CPU": torch.tensor(0), "two": torch.tensor([1, 2])}
    wrong_divisors["one in a vector"] = torch.tensor([5])
    return {
        **{
            f"weight: {name}": (weighing(weight), f"{scalar}, or (loss_sum, weight), not (a tensor")
            for name, weight in wrong_weights.items()
        },
        **{
            f"weight {weight}": (
                weighing(weight),
                f"the criterion returned the weight {weight}: return a finite",
            )
            for weight in (-1, float("nan"), float("inf"))
        },
        **{
            f"divisor: {name}": (
                dividing(divisor),
                f"num_items_in_batch={divisor!r} in the batch must be a number",
            )
            for name, divisor in wrong_divisors.items()
        },
        "no function": (
            run("mean"),
            "criterion='mean' is not callable: give a function of (outputs, inputs)",
        ),
        "logits": (
            run(lambda outputs, _: (outputs.loss, outputs.logits)),
            f"{scalar}, or (loss_sum, weight)",
        ),
        "none": (run(lambda *_: None), scalar),
        "no labels": (
            run(lambda outputs, _: outputs.loss, iter([{k: v for k, v in batch.items() if k != "labels"}])),
            scalar,
        ),
        "no loss": (
            run(None, iter([batch | {"return_dict": False}])),
            "the model's outputs contain no loss: give labels in the batch, without return_dict=False",
        ),
        "some weights": (
            run(lambda outputs, _: (outputs.loss, 1) if next(turns) else outputs.loss),
            "the criterion returned a weight for some microbatches only",
        ),
        "detached": (run(lambda outputs, _: outputs.loss.detach()), "the criterion's loss has no graph"),
        "stops": (run(lambda *_: next(iter([]))), "the model or the criterion raised StopIteration"),
        "a list": (run(data=[batch]), "give iter(dataloader)"),
        "elsewhere": (run(return_outputs="x"), "return_outputs='x' must be True, False or 'all_ranks'"),
        "plain optimizer": (
            run(given=optimizer.inner),
            "execute_pipeline takes the optimizer that booster.boost",
        ),
        "no_sync of it": (
            lambda: booster.no_sync(model, optimizer.inner),
            "booster.no_sync takes the optimizer",
        ),
        "no_sync of the model": (
            lambda: booster.no_sync(model.unwrap(), optimizer),
            "no_sync takes the model that",
        ),
        "boost twice": (lambda: booster.boost(model, make_optimizer(model)), "the model is already boosted"),
        "a copy": (lambda: copy.deepcopy(model), "call booster.save_model(model, path)"),
        "a copy of the optimizer": (
            lambda: copy.deepcopy(optimizer),
            "booster.save_optimizer(optimizer, folder)",
        ),
    }


def boosts() -> dict[str, tuple[Callable[[], Any], tuple[str, ...]]]:
    """Return models and optimizers, with parts of the error messages of boost."""

    def hybrid_boost(model: nn.Module, other: nn.Module | None = None, **settings: Any) -> Callable[[], Any]:
        booster = hybrid(**settings)
        return lambda: booster.boost(model, make_optimizer(other or model), loss_of)

    fsdp, ddp = booster_of("fsdp"), booster_of("ddp")

    def sharded(make: Callable[[nn.Module], torch.optim.Optimizer]) -> Callable[[], Any]:
        model = GPT2.build()
        optimizer = make(model)
        return lambda: fsdp.boost(model, optimizer)

    def stepped(model: Any) -> torch.optim.Optimizer:
        model(**make_batch(GPT2, num_samples=2, seed=0)).loss.backward()
        (optimizer := make_optimizer(model)).step()
        return optimizer

    def strange(model: Any) -> torch.optim.Optimizer:
        model.scale = nn.Parameter(torch.tensor(1.0))
        model.lm_head.weight.register_post_accumulate_grad_hook(lambda _: None)
        return make_optimizer(model)

    narrow = ModelChoice(model_type="llama", settings=(("intermediate_size", 25),))
    exact = ModelChoice(model_type="bloom", settings=(("slow_but_exact", True),))
    dropping = ModelChoice(model_type="bert", settings=(("layerdrop", 0.1),))
    plain = nn.Sequential(nn.Linear(4, 4))
    whole, wrapped = fsdp.boost(GPT2.build(), None)[0], fsdp.boost(*_with(make_optimizer, GPT2))[1]
    by_ddp = ddp.boost(GPT2.build())[0]
    return {
        "names": (
            lambda: ddp.boost(plain, "adamw", "loss", None, "linear"),  # type: ignore[arg-type]
            (
                "3 errors",
                "optimizer='adamw'",
                "criterion='loss'",
                "lr_scheduler='linear' is not valid: give a scheduler",
            ),
        ),
        "attention": (
            hybrid_boost(exact.build(), tp_size=2, enable_flash_attention=True),
            ("BloomForCausalLM cannot compute attention", "is not supported with tensor parallelism"),
        ),
        "width": (
            hybrid_boost(narrow.build(), narrow.build(), tp_size=2),
            ("25 entries along dim 1 are not divisible by 2 ranks", "parameters are not in the model"),
        ),
        "sharded weights": (
            hybrid_boost(dropping.build(), BERT.build(), wp_size=2),
            ("layerdrop=0.1 in the model's config", "parameters are not in the model"),
        ),
        "unknown": (
            hybrid_boost(plain, tp_size=2),
            ("the config of a Sequential has no base_model_tp_plan",),
        ),
        "its sequences": (hybrid_boost(plain, sp_size=2, **SEQUENCES), ("leave enable_sequence",)),
        "stepped": (sharded(stepped), ("AdamW already has state for",)),
        "coupled": (
            sharded(lambda m: torch.optim.LBFGS(m.parameters())),
            ("LBFGS could not be tried on a matrix",),
        ),
        "in place": (
            sharded(lambda m: torch.optim.Rprop(m.parameters())),
            ("Rprop assigns to entries",),
        ),
        "foreign": (
            sharded(lambda _: make_optimizer(GPT2.build())),
            ("parameters are not in the model",),
        ),
        "scalar and hook": (sharded(strange), ("2 errors", "is a scalar", "has hooks")),
        "boosted": (lambda: fsdp.boost(whole), ("already boosted",)),
        "boosted inside": (lambda: fsdp.boost(whole.unwrap()), ("already boosted",)),
        "its optimizer": (lambda: fsdp.boost(GPT2.build(), wrapped), ("the optimizer is already boosted",)),
        "plain model": (
            lambda: fsdp.save_model(plain, "never"),
            ("takes the model that booster.boost returned",),
        ),
        "no_sync": (
            lambda: fsdp.no_sync(whole, make_optimizer(whole)),
            ("booster.no_sync takes the optimizer",),
        ),
        "no_sync under DDP": (
            lambda: ddp.no_sync(by_ddp, make_optimizer(by_ddp)),
            ("no_sync takes the optimizer",),
        ),
        "backward": (
            lambda: fsdp.backward(torch.ones(()), make_optimizer(whole)),
            ("booster.backward takes the optimizer that booster.boost returned",),
        ),
        "pipeline": (lambda: fsdp.execute_pipeline(iter([]), plain), ("TorchFSDPPlugin has no pipeline",)),
        "under DDP": (lambda: ddp.execute_pipeline(iter([]), plain), ("TorchDDPPlugin has no pipeline",)),
        "an unknown precision": (
            lambda: Booster(plugin=ddp.plugin, mixed_precision=["bf16"]),  # type: ignore[arg-type]
            ("mixed_precision=['bf16'] is unknown: use one of fp32",),
        ),
        "mixed_precision": (
            lambda: Booster(plugin=fsdp.plugin, mixed_precision="bf16"),
            ("give TorchFSDPPlugin precision='bf16'",),
        ),
    }


def _with(make: Callable[[nn.Module], Any], choice: ModelChoice) -> tuple[nn.Module, Any]:
    model = choice.build()
    return model, make(model)


def missing(message: str, *needles: str) -> list[str]:
    return [f"{needle!r} is not in: {message}" for needle in needles if needle not in message]


def unreported() -> list[str]:
    """Return the needles that are missing in the errors of arguments and models, on one rank."""
    found = []
    for plugin, arguments, needles in ARGUMENTS:
        fp32 = {} if plugin in (Booster, TorchDDPPlugin) else {"precision": "fp32"}
        found += missing(refused(lambda: plugin(**(fp32 | arguments))), *needles)  # noqa: B023
    for call, needles in boosts().values():
        found += missing(refused(call), *needles)
    return found


def unreported_misuses() -> list[str]:
    """Return the needles that are missing in the errors of calls, on one rank."""
    return [line for call, needle in misuses().values() for line in missing(refused(call), needle)]


def test_all_reasons_are_reported_on_every_rank(pool: Pool) -> None:
    assert pool.run(2, unreported) == [[], []]


def test_the_misuse_of_a_call_is_explained(pool: Pool) -> None:
    assert pool.run(1, unreported_misuses) == [[]]


COLOSSALAI = (
    (HybridParallelPlugin, HYBRID),
    (LowLevelZeroPlugin, ZERO),
    (TorchDDPPlugin, DDP),
    (TorchFSDPPlugin, FSDP),
)


def take_and_refuse_arguments_of_colossalai() -> None:
    """Accept values that change nothing, refuse others with advice, and raise Python's error for an unknown name."""
    for plugin, table in COLOSSALAI:
        plugin(**{name: known.accepted[0] for name, known in table.items()})
        for name, known in table.items():
            if known.instead:
                assert known.instead in refused(lambda: plugin(**{name: "else"}))  # noqa: B023
        with pytest.raises(
            TypeError, match=rf"{plugin.__name__}\.__init__\(\) got an unexpected keyword argument 'x'"
        ):
            plugin(x=1)
    assert "fp8_communication=True of ColossalAI is not available: leave it out; nothing" in refused(
        lambda: HybridParallelPlugin(fp8_communication=True)
    )
    LowLevelZeroPlugin(norm_type=2)  # equals 2.0
    TorchFSDPPlugin(cpu_offload=None)


ZERO_SIZES = "zero_size or zero_stage or zero_bucket_size_in_m"
# What is called, with which unknown arguments, and the nearest ones by the error.
TYPOS: tuple[tuple[Callable[..., Any], dict[str, Any], tuple[str, ...]], ...] = (
    (HybridParallelPlugin, {"tp": 2}, ("tp_size",)),
    (HybridParallelPlugin, {"dp": 2, "pp_szie": 2}, ("dp_size", "pp_size")),
    (HybridParallelPlugin, {"zero": 1}, (ZERO_SIZES,)),
    (HybridParallelPlugin, {"num_micro_batches": 4}, ("num_microbatches",)),
    (
        HybridParallelPlugin,
        {"sequence_parallelism": True},
        ("sequence_parallelism_mode or enable_sequence_parallelism",),
    ),
    (HybridParallelPlugin, {"use_fp9": True}, ("use_fp8",)),
    (LowLevelZeroPlugin, {"zero_stage": 2}, ("stage",)),
    (TorchDDPPlugin, {"bucket_cap": 25}, ("bucket_cap_mb",)),
    (TorchFSDPPlugin, {"offload": True}, ("cpu_offload",)),
    (Booster, {"precision": "bf16"}, ("mixed_precision",)),
    (LazyInitContext, {"device": "cpu"}, ("default_device",)),
    (LazyInitContext, {"tensor_cls": None}, ("",)),
)


def misspell_arguments() -> None:
    """Give unknown arguments, and every argument without one of its letters."""
    for called, given, nearest in TYPOS:
        with pytest.raises(TypeError) as error:
            called(**given)
        lines = [
            f"{called.__name__}.__init__() got an unexpected keyword argument {name!r}"  # type: ignore[attr-defined]
            + f": did you mean {meant}?" * bool(meant)
            for name, meant in zip(given, nearest, strict=True)
        ]
        assert str(error.value) == str(ErrorList(*lines))
    for called in dict.fromkeys(called for called, _, _ in TYPOS):
        for name, parameter in signature(called).parameters.items():
            if parameter.kind is not parameter.VAR_KEYWORD:
                with pytest.raises(TypeError, match=rf"did you mean .*{name}"):
                    called(**{name[:3] + name[4:]: 1})
    by_position = "HybridParallelPlugin: too many positional arguments; by position it takes tp_size, pp_size"
    with pytest.raises(TypeError, match=by_position):
        HybridParallelPlugin(*[1] * 20)
    with pytest.raises(TypeError, match="HybridParallelPlugin: multiple values for argument 'tp_size'"):
        HybridParallelPlugin(1, tp_size=1)
    with pytest.raises(TypeError) as error:
        HybridParallelPlugin(tp=2, use_fp8=True, dp_outside=False)
    unknown, unavailable = str(error.value).splitlines()[1:]
    assert unknown.endswith("argument 'tp': did you mean tp_size?")
    assert unavailable.startswith(
        "- use_fp8=True of ColossalAI is not available: leave it out and use precision="
    )


def test_an_unknown_argument_is_answered_with_the_nearest(pool: Pool) -> None:
    pool.run(1, misspell_arguments)


def test_arguments_of_colossalai(pool: Pool) -> None:
    pool.run(1, take_and_refuse_arguments_of_colossalai)


def test_the_page_lists_every_argument_that_is_not_available() -> None:
    page = (Path(__file__).parents[2] / "docs" / "coming-from-colossalai.md").read_text()
    own = {"wp_memory_pool"}  # an argument of an earlier release of Echelon
    assert [name for _, table in COLOSSALAI for name in {*table} - own if f"`{name}" not in page] == []
