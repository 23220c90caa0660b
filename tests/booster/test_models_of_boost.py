"""Models that boost takes, and errors of one rank alone. Refusals are in tests/refusals."""

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn

from echelon import (
    Booster,
    HybridParallelPlugin,
    LowLevelZeroPlugin,
    TorchDDPPlugin,
    TorchFSDPPlugin,
)
from echelon.shardformer.refusals import unfit_model_errors
from echelon.shardformer.tables.decoders import LLAMA
from echelon.verify.model_choice import ModelChoice

from ..pool import Pool

CHOICE = ModelChoice(model_type="llama", num_layers=2)


def hybrid(**settings: Any) -> HybridParallelPlugin:
    return HybridParallelPlugin(precision="fp32", num_microbatches=1, **settings)


PLUGINS: dict[str, Callable[[], Any]] = {
    "ddp": TorchDDPPlugin,
    "zero": lambda: LowLevelZeroPlugin(stage=2, precision="fp32"),
    "fsdp": TorchFSDPPlugin,
    "stages": lambda: hybrid(pp_size=2),
}


def boost_a_copy() -> None:
    """Boost a copy of a boosted model, which counts as another model."""
    model = Booster(plugin=TorchDDPPlugin()).boost(CHOICE.build())[0].unwrap()
    Booster(plugin=hybrid(tp_size=2)).boost(copy.deepcopy(model))


def take_a_table() -> None:
    """Give a plugin a table as policy, as ShardFormer takes it."""
    boosted = Booster(plugin=hybrid(tp_size=2, custom_policy=LLAMA)).boost(CHOICE.build())[0]
    assert boosted.unwrap().lm_head.weight.shape[0] < 101


def train_after_a_refused_call() -> None:
    booster = Booster(plugin=hybrid(pp_size=2))
    boosted = booster.boost(CHOICE.build())[0]
    ids = torch.ones(1, 3, dtype=torch.long)
    model: Any = boosted.unwrap().eval()
    with pytest.raises(RuntimeError, match="called directly"):
        model(ids)
    with torch.no_grad():
        booster.execute_pipeline(iter([{"input_ids": ids, "labels": ids}]), boosted)


@pytest.mark.parametrize(
    "function",
    [
        boost_a_copy,
        take_a_table,
        train_after_a_refused_call,
    ],
)
def test_models_and_policies_are_taken_or_refused_on_all_ranks(
    pool: Pool, function: Callable[[], None]
) -> None:
    pool.run(2, function)


def test_a_module_without_values_is_reported_by_name() -> None:
    (reported,) = unfit_model_errors(nn.Linear(2, 2, bias=False, device="meta"))
    assert reported.startswith("weight of the model is on the meta device")


def refuse_what_one_rank_cannot_wrap(plugin: str) -> str:
    """Give one rank alone a model without values, then boost a good one. Return the error."""
    booster = Booster(plugin=PLUGINS[plugin]())
    with pytest.raises(ValueError) as refused:
        booster.boost(CHOICE.build() if torch.distributed.get_rank() == 0 else CHOICE.build_on_meta())
    with pytest.raises(ValueError, match="optimizer") as wrong_type:
        booster.boost(CHOICE.build(), "adam" if torch.distributed.get_rank() == 1 else None)  # type: ignore[arg-type]  # the mistake
    assert str(wrong_type.value).endswith("(rank 1)")
    booster.boost(CHOICE.build())
    return str(refused.value)


@pytest.mark.parametrize("plugin", ["ddp", "stages"])
def test_an_error_of_one_rank_alone_is_raised_on_all_before_anything_changes(pool: Pool, plugin: str) -> None:
    errors = pool.run(2, refuse_what_one_rank_cannot_wrap, plugin)
    assert errors[0] == errors[1]
    assert "of the model are on the meta device" in errors[0] and errors[0].endswith("(rank 1)")
