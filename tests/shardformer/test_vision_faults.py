"""What tables of vision models and of shared layers refuse, and say instead."""

from dataclasses import replace

import pytest

from echelon.shardformer import policy_for
from echelon.shardformer.table_policy import TablePolicy
from echelon.shardformer.tables.encoders import ALBERT
from echelon.shardformer.tables.vision import BEIT, SWIN
from echelon.verify.models import ModelChoice


def faults(choice: ModelChoice, *, tp_size: int = 1, num_stages: int = 1) -> list[str]:
    model = choice.build_on_meta()
    policy = policy_for(model)
    policy.set_model(model)
    return policy.faults(tp_size=tp_size, num_stages=num_stages)


def test_heads_that_do_not_divide_are_told_with_what_would_work() -> None:
    told = faults(ModelChoice(model_type="sam"), tp_size=8)
    heads = "num_attention_heads=4 is not divisible by tp_size=8: use one of tp_size=[1, 2, 4]"
    assert f"in mask_decoder: {heads}" in told


# Swin's heads are 4, 4 and 8.
@pytest.mark.parametrize(
    "model_type", ["vit", "deit", "roberta", "electra", "albert", "beit", "swin", "swinv2", "t5", "bart"]
)
def test_heads_are_added_where_the_ranks_do_not_divide_them(model_type: str) -> None:
    assert faults(ModelChoice(model_type=model_type), tp_size=8) == []


def test_layers_that_run_several_times_count_as_often() -> None:
    choice = ModelChoice(model_type="albert", num_layers=4)
    assert faults(choice, num_stages=4) == []
    (told,) = faults(choice, num_stages=5)
    assert "4" in told and "5" in told


def test_a_module_that_is_not_named_whole_is_told() -> None:
    model = ModelChoice(model_type="albert").build_on_meta()
    policy = TablePolicy(replace(ALBERT, whole=()))
    policy.set_model(model)
    (told,) = [fault for fault in policy.faults(tp_size=2) if "LayerNorm.weight" in fault]
    assert "works on split activations in the region 'albert_layers.0.attention'" in told


def test_what_contradicts_itself_in_a_table_is_told() -> None:
    bias = "attention.relative_position_bias.relative_position_bias_table"
    with pytest.raises(ValueError, match="lies in the region 'attention': put it in split"):
        replace(SWIN, split={}, biases={bias: 1})
    with pytest.raises(ValueError, match="lies in none of the regions"):
        replace(BEIT, split=BEIT.biases, biases={})
    with pytest.raises(ValueError, match=r"layer of joined .* is not in column"):
        replace(ALBERT, joined={"albert_layers.0.attention": ("albert_layers.0.attention.dense",)})
