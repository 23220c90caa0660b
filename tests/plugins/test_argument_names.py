"""Refusals of plugins with several reasons, all at once; single ones are in tests/contract/misuse_rows.py."""

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
from echelon.verify.batch import loss_of
from echelon.verify.model_choice import ModelChoice
from echelon.verify.parity import make_optimizer

from ..pool import Pool
from .training import BERT, booster_of, hybrid, refused

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
]


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

    def strange(model: Any) -> torch.optim.Optimizer:
        model.scale = nn.Parameter(torch.tensor(1.0))
        model.lm_head.weight.register_post_accumulate_grad_hook(lambda _: None)
        return make_optimizer(model)

    narrow = ModelChoice(model_type="llama", settings=(("intermediate_size", 25),))
    exact = ModelChoice(model_type="bloom", settings=(("slow_but_exact", True),))
    dropping = ModelChoice(model_type="bert", settings=(("layerdrop", 0.1),))
    plain = nn.Sequential(nn.Linear(4, 4))
    whole = fsdp.boost(GPT2.build(), None)[0]
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
        "scalar and hook": (sharded(strange), ("2 errors", "is a scalar", "has hooks")),
        "boosted inside": (lambda: fsdp.boost(whole.unwrap()), ("already boosted",)),
    }


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


def test_all_reasons_are_reported_on_every_rank(pool: Pool) -> None:
    assert pool.run(2, unreported) == [[], []]


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
