"""Models that boost takes, and errors of one rank alone. Refusals are in tests/refusals."""

import copy

import pytest
import torch
from torch import nn

from echelon.shardformer.refusals import unfit_model_errors
from echelon.shardformer.tables.decoders import LLAMA
from echelon.verify.model_choice import ModelChoice

from ..plugins.training import booster_of, hybrid
from ..pool import Pool, on_ranks

CHOICE = ModelChoice(model_type="llama", num_layers=2)


@on_ranks(2)
def test_a_copy_of_a_boosted_model_counts_as_another_model() -> None:
    model = booster_of("ddp").boost(CHOICE.build())[0].unwrap()
    hybrid(tp_size=2).boost(copy.deepcopy(model))


@on_ranks(2)
def test_a_table_is_taken_as_policy() -> None:
    """As ShardFormer takes it."""
    boosted = hybrid(tp_size=2, custom_policy=LLAMA).boost(CHOICE.build())[0]
    assert boosted.unwrap().lm_head.weight.shape[0] < 101


@on_ranks(2)
def test_a_model_is_evaluated_after_a_refused_call() -> None:
    booster = hybrid(pp_size=2)
    boosted = booster.boost(CHOICE.build())[0]
    ids = torch.ones(2, 3, dtype=torch.long)
    with pytest.raises(RuntimeError, match="called directly"):
        boosted.unwrap().eval()(ids)
    with torch.no_grad():
        booster.execute_pipeline(iter([{"input_ids": ids, "labels": ids}]), boosted)


def test_a_module_without_values_is_reported_by_name() -> None:
    (reported,) = unfit_model_errors(nn.Linear(2, 2, bias=False, device="meta"))
    assert reported.startswith("weight of the model is on the meta device")


def refuse_what_one_rank_cannot_wrap(plugin: str, sizes: dict[str, int]) -> str:
    """Give one rank alone a model without values, then boost a good one. Return the error."""
    booster = booster_of(plugin, **sizes)
    with pytest.raises(ValueError) as refused:
        booster.boost(CHOICE.build() if torch.distributed.get_rank() == 0 else CHOICE.build_on_meta())
    with pytest.raises(ValueError, match="optimizer") as wrong_type:
        booster.boost(CHOICE.build(), "adam" if torch.distributed.get_rank() == 1 else None)  # type: ignore[arg-type]  # the mistake
    assert str(wrong_type.value).endswith("(rank 1)")
    booster.boost(CHOICE.build())
    return str(refused.value)


@pytest.mark.parametrize(("plugin", "sizes"), [("ddp", {}), ("hybrid", {"pp_size": 2})])
def test_an_error_of_one_rank_alone_is_raised_on_all_before_anything_changes(
    pool: Pool, plugin: str, sizes: dict[str, int]
) -> None:
    errors = pool.run(2, refuse_what_one_rank_cannot_wrap, plugin, sizes)
    assert errors[0] == errors[1]
    assert "of the model are on the meta device" in errors[0] and errors[0].endswith("(rank 1)")
