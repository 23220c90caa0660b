"""Lazily built models under every plugin: sharded and trained as eager ones, compared, and never unsharded."""

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from unittest.mock import patch

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
    TorchDDPPlugin,
    TorchFSDPPlugin,
)
from echelon.lazy.tensor import LazyTensor
from echelon.shardformer import transforms
from echelon.verify.batch import make_batch
from echelon.verify.layout_choice import Layout
from echelon.verify.model_choice import ModelChoice
from echelon.verify.parity import make_optimizer, parity

from ..checkpoint.failures import anonymous_peak
from ..contract.matrix_rows import DERIVED
from ..matrix import FeatureCase
from ..plugins.training import hybrid
from ..pool import Pool
from ..slow import slow, slow_except
from .compare import built_in_both_ways, differences
from .test_models import FOLDERS, WITH_TABLE, build

LLAMA = ModelChoice(model_type="llama")
PLUGINS: dict[str, Callable[[], Any]] = {
    "tp in bf16": lambda: HybridParallelPlugin(tp_size=2, precision="bf16"),
    "pp in fp16": lambda: HybridParallelPlugin(pp_size=2, num_microbatches=2, precision="fp16"),
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
        *slow(
            ("t5", True, Layout(tp=2, dp=2, zero=1)),
            ("albert", False, Layout(pp=2, dp=2, zero=2)),
            ("mixtral", False, Layout(tp=2, pp=2, precision="bf16")),
            ("gpt2", False, Layout(pp=2, schedule="interleaved", chunks=2)),
        ),
    ],
    ids=str,
)
def test_a_lazily_built_model_trains_as_one_process_does(
    pool: Pool, model_type: str, tied: bool, layout: Layout
) -> None:
    choice = LazyChoice(model_type=model_type, tied=tied)
    assert pool.run(layout.world_size, parity, choice, layout)[0].departure is None


def sharded_in_both_ways(model_type: str) -> list[str]:
    """Return differences between this rank's shards of a lazily built model and of an eager one."""
    models = built_in_both_ways(lambda: build(model_type))[:2]
    lazy, eager = (hybrid(tp_size=2, pp_size=2).boost(model, make_optimizer(model))[0] for model in models)
    left = [name for name, tensor in lazy.tensors().items() if isinstance(tensor, LazyTensor)]
    lazy_attributes, eager_attributes = (
        {
            name: vars(parameter) | {"_echelon_parallelized": None, "_echelon_trained": None}
            for name, parameter in model.local_parameters.items()
        }
        for model in (lazy, eager)
    )
    return [
        *differences(lazy.module, eager.module),
        *left,
        *(name for name in eager_attributes if eager_attributes[name] != lazy_attributes[name]),
    ]


CASES = [FeatureCase(model_type=name, feature="lazy initialization") for name in (*WITH_TABLE, *DERIVED)]
LLAMA_CASE = FeatureCase(model_type="llama", feature="lazy initialization")


@pytest.mark.parametrize("case", slow_except([LLAMA_CASE], CASES), ids=lambda case: case.model_type)
def test_a_lazily_built_model_is_sharded_as_an_eager_one(pool: Pool, case: FeatureCase) -> None:
    assert pool.run(4, sharded_in_both_ways, case.model_type) == [[]] * 4


def test_the_matrix_has_a_row_for_each_type() -> None:
    assert len(WITH_TABLE) > 45 and len(DERIVED) > 20


def stepped(model: nn.Module, plugin: str) -> nn.Module:
    """Return a boosted model, unwrapped; after a training step if this process has all of it."""
    booster = Booster(plugin=PLUGINS[plugin]())
    boosted, optimizer, *_ = booster.boost(model, torch.optim.AdamW(model.parameters(), lr=0.1))
    assert optimizer is not None
    if plugin != "pp in fp16" and getattr(model.config, "model_type", None) == "llama":  # type: ignore[union-attr]
        batch = make_batch(LLAMA, num_samples=2, seed=dist.get_rank() if booster.plugin.dp_size > 1 else 0)
        booster.backward(boosted(**batch).loss, optimizer)
        optimizer.step()
    inner: nn.Module = boosted.unwrap()
    for module in inner.modules():  # DTensors cannot be compared bitwise
        for name, parameter in module._parameters.items():
            if hasattr(parameter, "to_local"):
                module._parameters[name] = nn.Parameter(parameter.to_local())
    return inner


def stepped_in_both_ways(name: str | None, path: Path, plugin: str) -> list[str]:
    make = (lambda: LLAMA.build(3)) if name is None else (lambda: FOLDERS[name].load(path))
    torch.manual_seed(2)
    eager = stepped(make(), plugin)
    torch.manual_seed(2)
    with LazyInitContext():
        lazy = make()
    assert all(isinstance(parameter, LazyTensor) for parameter in lazy.parameters())
    return differences(stepped(lazy, plugin), eager)


@pytest.mark.parametrize(
    ("name", "plugin"),
    [
        (None, "tp in bf16"),
        (None, "zero"),
        *slow((None, "ddp")),
        (None, "fsdp"),
        ("llama", "tp in bf16"),
        *slow(
            ("llama in bf16", "pp in fp16"),
            ("llama", "zero"),
            ("llama", "ddp"),
            ("llama from bf16", "fsdp"),
            ("gpt2", "tp in bf16"),
            ("gpt2 of torch", "pp in fp16"),
            ("bert with a new head", "tp in bf16"),
            ("mixtral", "tp in bf16"),
            ("mixtral in bf16", "pp in fp16"),
            ("t5", "tp in bf16"),
            ("t5", "pp in fp16"),
        ),
    ],
)
def test_a_model_built_or_read_lazily_is_boosted_and_trained_as_an_eager_one(
    pool: Pool, tmp_path: Path, name: str | None, plugin: str
) -> None:
    if name is not None:
        FOLDERS[name].save(tmp_path)
    assert pool.run(2, stepped_in_both_ways, name, tmp_path, plugin) == [[], []]


def boost_what_differs(makers: list[ModelChoice | Path], seeds: list[int], plugin: str) -> None:
    make, seed = makers[dist.get_rank()], seeds[dist.get_rank()]
    if isinstance(make, Path):
        with LazyInitContext():
            model: nn.Module = AutoModelForCausalLM.from_pretrained(make)
    else:
        model = make.build(seed)
    Booster(plugin=PLUGINS[plugin]()).boost(model, torch.optim.AdamW(model.parameters()))


LAZY = LazyChoice(model_type="llama")


@pytest.mark.parametrize(
    ("makers", "seeds", "plugin"),
    [
        ((LAZY, LAZY), (0, 1), "tp in bf16"),
        *slow(((LAZY, LAZY), (0, 1), "fsdp")),
        ((LLAMA, LAZY), (0, 0), "tp in bf16"),
        (("copy", "other"), (0, 0), "tp in bf16"),
    ],
)
def test_ranks_that_built_or_read_other_models_lazily_are_named(
    pool: Pool, tmp_path: Path, makers: Any, seeds: tuple[int, int], plugin: str
) -> None:
    if "copy" in makers:
        paths = [tmp_path / name for name in ("one", "copy", "other")]
        for path, seed in zip(paths, (3, 3, 4), strict=True):
            LLAMA.build(seed).save_pretrained(path)
        pool.run(2, boost_what_differs, paths[:2], seeds, plugin)
        makers = paths[1:]
    errors = pool.run_failing(2, boost_what_differs, makers, seeds, plugin)
    assert [type(error) for error in errors] == [ValueError] * 2
    assert all("the model of rank(s) [1] differs from that of rank 0" in str(error) for error in errors)


def most_bytes(action: Callable[[], Any]) -> tuple[int, int, Any]:
    """Return the peak and the final increase of CPU memory by an action, in bytes, and its result.

    All allocations and releases of torch are counted.
    """
    with profile(activities=[ProfilerActivity.CPU], profile_memory=True, acc_events=True) as trace:
        result = action()
    events = [event for event in trace.profiler.kineto_results.events() if event.name() == "[memory]"]
    present = most = 0
    for event in sorted(events, key=lambda event: event.start_ns()):
        present += event.nbytes()
        most = max(most, present)
    return most, present, result


def most_anonymous(action: Callable[[], Any]) -> tuple[int, int, Any]:
    """Return the peak of the process's anonymous memory (without mapped files), twice, and the result."""
    result: list[Any] = []
    most = anonymous_peak(lambda: result.append(action()))
    return most, most, result[0]


HEADS = {"num_attention_heads": 8, "num_key_value_heads": 8}
SIZES = {"vocab_size": 2048, "hidden_size": 512, "intermediate_size": 1024, "num_hidden_layers": 8}


def large_llama() -> nn.Module:
    return AutoModelForCausalLM.from_config(AutoConfig.for_model("llama", **SIZES, **HEADS))


def memory_of_boosting(path: Path | None) -> list[tuple[str, bool]]:
    """Return bounds of the memory for building or reading a model and for materializing it, each with its check."""
    original, taken = transforms.materialize, list[tuple[int, int]]()
    measured = most_bytes if path is None else most_anonymous

    def counted(model: nn.Module) -> nn.Module:
        *sizes, made = measured(lambda: original(model))
        taken.append((sizes[0], sizes[1]))
        return made

    def make() -> nn.Module:
        with LazyInitContext():
            if path is not None:
                return AutoModelForCausalLM.from_pretrained(path)
            return large_llama()

    built, left, model = measured(make)
    total = sum(parameter.numel() * 4 for parameter in model.parameters())
    largest = max(parameter.numel() * 4 for parameter in model.parameters())
    with patch.object(transforms, "materialize", counted):
        model, *_ = hybrid(pp_size=2, tp_size=2).boost(model, make_optimizer(model))
    share = sum(parameter.numel() * 4 for parameter in model.parameters())
    ((most, kept),) = taken
    spare = 2**19 if path is None else 2**22  # states of the generator and small objects; code, pages
    drawn = largest if path is None else 0
    return [
        (f"{built} in building, {drawn} the largest drawn", drawn <= max(built, 0) < drawn + spare),
        (f"{left} left of building", left < spare),
        (f"{share} is a quarter of {total}", 0.24 < share / total < 0.27),
        (f"{kept} kept, {share} share", abs(kept - share) < spare or path is not None),
        (f"{most} in materializing, {share} share", most < share + 1.6 * largest + spare),
    ]


@pytest.mark.parametrize("is_read", [False, *slow(True)])
def test_no_rank_has_more_than_its_shards_and_about_one_tensor(
    pool: Pool, tmp_path: Path, is_read: bool
) -> None:
    if is_read:
        large_llama().save_pretrained(tmp_path)
    reports = pool.run(4, memory_of_boosting, tmp_path if is_read else None)
    assert [bound for bounds in reports for bound, is_kept in bounds if not is_kept] == []
