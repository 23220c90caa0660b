"""Criterions, data and memory of HybridParallelPlugin, and ranks that fail during a step."""

import gc
import os
import re
import signal
import subprocess
import sys
import weakref
from dataclasses import fields, replace
from inspect import signature
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

from echelon import HybridParallelPlugin, LowLevelZeroPlugin, TorchDDPPlugin, TorchFSDPPlugin
from echelon.cluster.options import arguments_like, described, option_errors
from echelon.plugins.hybrid_config import HybridConfig
from echelon.plugins.low_level_zero import ZeroConfig
from echelon.plugins.torch_ddp import DDPConfig
from echelon.plugins.torch_fsdp import FSDPConfig
from echelon.verify.batch import loss_of, make_batch

from ..freed import still_alive
from ..pool import Pool, on_ranks
from ..slow import slow_row
from .training import BERT, LLAMA, Numbers, boosted, hybrid, share, shares, steps

PLUGINS: dict[type, type] = {
    HybridParallelPlugin: HybridConfig,
    LowLevelZeroPlugin: ZeroConfig,
    TorchDDPPlugin: DDPConfig,
    TorchFSDPPlugin: FSDPConfig,
}


@pytest.mark.parametrize("plugin", PLUGINS, ids=lambda plugin: plugin.__name__)
def test_the_arguments_of_a_plugin_are_its_options_and_all_are_described(plugin: Any) -> None:
    options, arguments = PLUGINS[plugin], signature(plugin).parameters
    declared = {option.name: (option.type, option.default) for option in fields(options)}
    assert {name: (argument.annotation, argument.default) for name, argument in arguments.items()} == declared
    assert all(f"{name}: {text}" in plugin.__init__.__doc__ for name, text in described(options).items())
    assert option_errors(options()) == []


def test_an_option_under_another_name_is_that_of_the_hybrid_plugin() -> None:
    zero, hybrid = described(ZeroConfig), described(HybridConfig)
    renamed = arguments_like(ZeroConfig(stage=2, reduce_bucket_size_in_m=3))
    assert renamed["zero_stage"] == 2 and renamed["zero_bucket_size_in_m"] == 3
    assert renamed["initial_scale"] == 2**32 and HybridConfig(**renamed).initial_scale == 2**32
    assert zero["stage"] == hybrid["zero_stage"]
    assert zero["reduce_bucket_size_in_m"] == hybrid["zero_bucket_size_in_m"]


MISTAKES = {
    "HybridParallelPlugin(tp=2)": 'Unexpected keyword argument "tp"',
    "HybridParallelPlugin(tp_size='2')": 'Argument "tp_size"',
    "LowLevelZeroPlugin(zero_stage=2)": 'Unexpected keyword argument "zero_stage"',
    "TorchFSDPPlugin(offload=True)": 'did you mean "cpu_offload"?',
    "TorchDDPPlugin(False, 12, True, max_norm=1)": 'Unexpected keyword argument "max_norm"',
}
VALID = "HybridParallelPlugin(2, 1, None, 'bf16', 1, num_microbatches=4), LowLevelZeroPlugin(2, max_norm=1.0)"


@pytest.mark.slow  # mypy reads torch and this package
def test_type_checkers_know_the_names_and_types_of_arguments(tmp_path: Path) -> None:
    (tmp_path / "echelon").symlink_to(Path(__file__).parents[2])
    script = ["from echelon import *", VALID, *MISTAKES]
    (tmp_path / "script.py").write_text("\n".join(script))
    flags = [
        "--config-file=",
        "--explicit-package-bases",
        "--follow-imports=silent",
        "--ignore-missing-imports",
    ]
    command = [sys.executable, "-m", "mypy", *flags, "--no-error-summary", "script.py"]
    lines = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True).stdout.splitlines()
    errors = [line for line in lines if ": error: " in line]
    assert len(errors) == len(MISTAKES), lines
    for number, (error, text) in enumerate(zip(errors, MISTAKES.values(), strict=True), start=3):
        assert error.startswith(f"script.py:{number}:") and text in error


@on_ranks(1)
def test_calls_in_training_have_no_cache_unless_they_request_it() -> None:
    model, _ = boosted(hybrid(), LLAMA)
    ids = torch.arange(6).view(2, 3)
    assert model.train()(input_ids=ids).past_key_values is None
    assert model(input_ids=ids, use_cache=True).past_key_values is not None
    assert model.eval()(input_ids=ids).past_key_values is not None


@pytest.mark.parametrize("num_microbatches", [slow_row(1), 2])
@on_ranks(1)
def test_a_number_of_items_divides_the_sum_over_all_microbatches(num_microbatches: int) -> None:
    booster = hybrid(num_microbatches=num_microbatches)
    model, optimizer = boosted(booster, LLAMA)
    batch = make_batch(LLAMA, num_samples=4, seed=1) | {"num_items_in_batch": 40}
    loss = booster.execute_pipeline(iter([batch]), model, None, optimizer)["loss"]
    assert float(loss) == pytest.approx(LLAMA.build()(**batch).loss.item(), rel=1e-6)


@on_ranks(2)
def test_weights_of_a_batch_are_its_own() -> None:
    """Use a criterion with weights: in training alone, in a dropped batch, and twice before a step."""
    booster = hybrid(tp_size=2)
    model, optimizer = boosted(booster)

    def weighted_by(weight: float) -> Any:
        return lambda outputs, _: (outputs.loss * weight, weight) if torch.is_grad_enabled() else outputs.loss

    def run(criterion: Any) -> float:
        return float(booster.execute_pipeline(share(booster, BERT, 0), model, criterion, optimizer)["loss"])

    def norm() -> float:
        optimizer.reduce_gradients()
        squared_norm = sum(float(gradient.square().sum()) for gradient in optimizer.gradients().values())
        optimizer.zero_grad()
        return squared_norm

    with torch.no_grad():
        evaluated = run(weighted_by(4.0))
    assert run(weighted_by(4.0)) == pytest.approx(evaluated, rel=1e-6)
    optimizer.zero_grad()
    run(loss_of)
    plain = norm()
    run(weighted_by(16.0))
    optimizer.zero_grad()
    run(loss_of)
    assert norm() == pytest.approx(plain, rel=1e-6)
    run(weighted_by(8.0))
    run(weighted_by(2.0))
    assert norm() == pytest.approx(4 * plain, rel=1e-6)  # two equal batches add up; a squared norm


def random_collate(samples: list[int]) -> dict[str, Tensor]:
    return {"drawn": torch.tensor(samples) + torch.rand(len(samples))}


def collated() -> list[list[float]]:
    plugin = hybrid(tp_size=2).plugin
    torch.manual_seed(dist.get_rank())  # other random draws of a rank must have no effect
    loader = plugin.prepare_dataloader(Numbers(), batch_size=4, shuffle=True, collate_fn=random_collate)
    return [batch["drawn"].tolist() for batch in loader]


def test_a_random_collator_gives_one_batch_to_all_ranks_of_a_replica(pool: Pool) -> None:
    by_rank = pool.run(4, collated)
    assert by_rank[0] == by_rank[1] != by_rank[2] == by_rank[3]
    drawn = [int(number) for rank in (0, 2) for batch in by_rank[rank] for number in batch]
    assert sorted(drawn) == list(range(16))


def alive_after_boost() -> set[str]:
    """Return the parameters of a model that still exist when it is cut into stages."""
    model = LLAMA.build()
    parameters = {name: weakref.ref(parameter) for name, parameter in model.named_parameters()}
    stage = boosted(hybrid(pp_size=2), model)
    gc.collect()
    assert stage
    return still_alive(parameters, seconds=0.1)


def test_parameters_of_other_stages_are_freed(pool: Pool) -> None:
    first, second = pool.run(2, alive_after_boost)
    assert first and second and first & second <= {"model.embed_tokens.weight"}  # tied to the head


def feed(error: str) -> None:
    """Run one good step, then raise an error in the data of one rank."""
    booster = hybrid(tp_size=2, pp_size=2, num_microbatches=3)
    model, optimizer = boosted(booster)
    rank = dist.get_rank()
    batches: list[Any] = [make_batch(BERT, num_samples=6, seed=seed) for seed in (0, 1)]
    if error == "small":
        batches[1] = make_batch(BERT, num_samples=2, seed=1)
    elif error == "ends" and rank == 2:
        batches.pop()
    elif error == "differs" and rank == 3:
        batches[1] = make_batch(BERT, num_samples=6, seed=2)
    elif error == "hidden":
        batches[1]["output_hidden_states"] = True
    data = iter(batches)
    for _ in range(2):
        booster.execute_pipeline(data, model, loss_of, optimizer)
        optimizer.step()
        optimizer.zero_grad()


@pytest.mark.parametrize(
    ("error", "message"),
    [
        ("small", r"num_microbatches=3 is more than the 2 samples of the batch on rank\(s\) \[0, 1, 2, 3\]"),
        ("ends", r"the dataloader has ended on rank\(s\) \[2\]"),
        ("differs", r"replica 0: rank\(s\) \[3\]"),
        ("hidden", r"output_hidden_states=True in the batch"),
    ],
)
def test_an_error_in_the_data_is_reported_alike_on_every_rank(pool: Pool, error: str, message: str) -> None:
    errors = pool.run_failing(4, feed, error)
    assert all(isinstance(failure, ValueError) for failure in errors)
    assert len({str(failure) for failure in errors}) == 1
    assert re.search(message, str(errors[0]))


def die_in_a_step(victim: int, how: str, sizes: dict[str, Any]) -> None:
    booster = hybrid(**sizes)
    model, optimizer = boosted(booster, replace(BERT, num_layers=8))

    def fail(*_: Any) -> None:
        if how == "raises":
            raise ZeroDivisionError("on purpose")
        os.kill(os.getpid(), signal.SIGKILL)

    for step, _ in enumerate(steps(booster, model, optimizer, shares(booster, BERT, 3))):
        if step == 1 and dist.get_rank() == victim:
            next(model.module.modules()).register_forward_pre_hook(fail)


@pytest.mark.parametrize("how", [slow_row("raises"), "is killed"])
@pytest.mark.parametrize(
    "sizes",
    [
        {"tp_size": 2, "pp_size": 2},
        *(
            slow_row({"pp_size": 4, "pp_style": style, "num_model_chunks": chunks})
            for style, chunks in (("gpipe", 2), ("1f1b", 1), ("interleaved", 2), ("zbh1", 1), ("zbv", 2))
        ),
    ],
    ids=str,
)
def test_every_rank_names_the_one_that_failed_in_a_step(pool: Pool, sizes: dict[str, Any], how: str) -> None:
    errors = pool.run_failing(4, die_in_a_step, 1, how, sizes, timeout=60.0)
    assert isinstance(errors[1], ZeroDivisionError) or type(errors[1]).__name__ == "RankDied"
    for rank in (0, 2, 3):
        assert type(errors[rank]).__name__ == "RankFailure", errors[rank]
        assert "rank 1 " in str(errors[rank])
        if "tp_size" not in sizes:  # with tensor parallelism a rank may wait on another axis
            where = r"ing the \w+ of microbatch \d at stage \d \(rank \d, pipeline stage \d\)"
            assert re.search(where, str(errors[rank]))
