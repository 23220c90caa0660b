"""Lazily built models under every plugin: trained as eager ones, compared between ranks, never whole where split."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.profiler import ProfilerActivity, profile
from transformers import AutoConfig, AutoModelForCausalLM

from echelon import (
    Booster,
    HybridParallelPlugin,
    LazyInitContext,
    LowLevelZeroPlugin,
    ParallelMesh,
    ShardConfig,
    ShardFormer,
    TorchDDPPlugin,
    TorchFSDPPlugin,
)
from echelon.lazy.tensor import LazyTensor
from echelon.pipeline.stage_manager import PipelineStageManager
from echelon.verify.batch import make_batch
from echelon.verify.layout import Layout
from echelon.verify.models import ModelChoice
from echelon.verify.parity import parity

from ..pool import Pool
from .compare import differences

CHOICE = ModelChoice(model_type="llama")
PLUGINS: dict[str, Callable[[], Any]] = {
    "hybrid": lambda: HybridParallelPlugin(tp_size=2, precision="bf16"),
    "zero": lambda: LowLevelZeroPlugin(stage=2, precision="fp32"),
    "ddp": TorchDDPPlugin,
    "fsdp": TorchFSDPPlugin,
}


@dataclass(frozen=True, kw_only=True)
class LazyChoice(ModelChoice):
    """A small model that is built lazily."""

    def build(self, seed: int = 0) -> nn.Module:
        with LazyInitContext():
            return super().build(seed)


@pytest.mark.parametrize(
    ("model_type", "tied", "layout"),
    [
        ("llama", True, Layout(tp=2, pp=2)),
        pytest.param("t5", True, Layout(tp=2, dp=2, zero=1), marks=pytest.mark.slow),
        pytest.param("albert", False, Layout(pp=2, dp=2, zero=2), marks=pytest.mark.slow),
        pytest.param("mixtral", False, Layout(tp=2, pp=2, precision="bf16"), marks=pytest.mark.slow),
        pytest.param("gpt2", False, Layout(pp=2, schedule="interleaved", chunks=2), marks=pytest.mark.slow),
    ],
    ids=str,
)
def test_a_lazily_built_model_trains_as_one_process_does(
    pool: Pool, model_type: str, tied: bool, layout: Layout
) -> None:
    choice = LazyChoice(model_type=model_type, tied=tied)
    assert pool.run(layout.world_size, parity, choice, layout)[0].departure is None


def trained(choice: ModelChoice, plugin: Any) -> tuple[nn.Module, float]:
    """A model after a step, and its loss."""
    model = choice.build(3)
    booster = Booster(plugin=plugin)
    model, optimizer, *_ = booster.boost(model, torch.optim.AdamW(model.parameters(), lr=0.1))
    assert optimizer is not None
    batch = make_batch(choice, num_samples=2, seed=dist.get_rank() if plugin.dp_size > 1 else 0)
    loss = model(**batch).loss
    booster.backward(loss, optimizer)
    optimizer.step()
    return model.unwrap(), loss.item()


def trained_in_both_ways(plugin: str) -> list[str]:
    lazy, lazy_loss = trained(LazyChoice(model_type="llama"), PLUGINS[plugin]())
    eager, eager_loss = trained(CHOICE, PLUGINS[plugin]())
    for model in (lazy, eager):
        for module in model.modules():  # DTensors have no bits of their own
            for name, parameter in module._parameters.items():
                if hasattr(parameter, "to_local"):
                    module._parameters[name] = nn.Parameter(parameter.to_local())
    return differences(lazy, eager) + ([] if lazy_loss == eager_loss else [f"{lazy_loss}, not {eager_loss}"])


@pytest.mark.parametrize("plugin", PLUGINS)
def test_a_lazily_built_model_trains_under_a_plugin_as_an_eager_one(pool: Pool, plugin: str) -> None:
    assert pool.run(2, trained_in_both_ways, plugin) == [[], []]


def boost_what_differs(seed_of_rank: list[int], lazy_ranks: list[int], plugin: str) -> None:
    kind = LazyChoice if dist.get_rank() in lazy_ranks else ModelChoice
    model = kind(model_type="llama").build(seed_of_rank[dist.get_rank()])
    Booster(plugin=PLUGINS[plugin]()).boost(model, torch.optim.AdamW(model.parameters()))


@pytest.mark.parametrize(
    ("seeds", "lazy_ranks", "plugin"),
    [([0, 1], [0, 1], "hybrid"), ([0, 1], [0, 1], "fsdp"), ([0, 0], [1], "hybrid")],
)
def test_ranks_that_built_lazily_from_other_seeds_are_told(
    pool: Pool, seeds: list[int], lazy_ranks: list[int], plugin: str
) -> None:
    errors = pool.run_failing(2, boost_what_differs, seeds, lazy_ranks, plugin)
    assert [type(error) for error in errors] == [ValueError] * 2
    assert all("the model of rank(s) [1] differs from that of rank 0" in str(error) for error in errors)


def most_bytes(action: Callable[[], Any]) -> tuple[int, int, Any]:
    """By how many bytes of the CPU's memory an action rises at most, and in the end; and what it returns.

    Every allocation and release of torch is counted.
    """
    with profile(activities=[ProfilerActivity.CPU], profile_memory=True, acc_events=True) as found:
        result = action()
    events = [each for each in found.profiler.kineto_results.events() if each.name() == "[memory]"]
    held = most = 0
    for event in sorted(events, key=lambda event: event.start_ns()):
        held += event.nbytes()
        most = max(most, held)
    return most, held, result


def memory_of_building() -> list[tuple[str, bool]]:
    """Bounds of what building and splitting a model takes, and whether each is kept."""
    config = AutoConfig.for_model(
        "llama",
        vocab_size=2048,
        hidden_size=512,
        intermediate_size=1024,
        num_hidden_layers=8,
        num_attention_heads=8,
        num_key_value_heads=8,
    )
    mesh = ParallelMesh(pp=2, tp=2)
    former = ShardFormer(
        ShardConfig(
            tensor_parallel_process_group=mesh.group("tp"), pipeline_stage_manager=PipelineStageManager(mesh)
        )
    )

    def build() -> nn.Module:
        with LazyInitContext():
            return AutoModelForCausalLM.from_config(config)

    built, left, model = most_bytes(build)
    whole = sum(each.numel() * 4 for each in model.parameters())
    largest = max(each.numel() * 4 for each in model.parameters())
    optimizer = torch.optim.AdamW(model.parameters())
    split, kept, (model, _) = most_bytes(lambda: former.optimize(model))
    share = sum(each.numel() * 4 for each in model.parameters())
    assert optimizer.param_groups
    assert not any(isinstance(each, LazyTensor) for each in model.parameters())
    spare = 2**19  # states of the generator and other small things
    return [
        (f"{built} in building, {largest} the largest", largest <= built < largest + spare),
        (f"{left} left of building", left < spare),
        (f"{share} is a quarter of {whole}", 0.24 < share / whole < 0.27),
        (f"{kept} kept, {share} share", abs(kept - share) < spare),
        (
            f"{split} in splitting, {share} share, {largest} the largest",
            split < share + 1.6 * largest + spare,
        ),
    ]


def test_no_rank_holds_more_than_its_share_and_about_one_whole_tensor(pool: Pool) -> None:
    found = pool.run(4, memory_of_building)
    assert [told for bounds in found for told, is_kept in bounds if not is_kept] == []
