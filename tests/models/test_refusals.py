"""What the tables of decoders do not split, and why, on models without memory."""

import re

import pytest

from echelon.shardformer import table_for
from echelon.shardformer.derived import derived_table
from echelon.shardformer.sequence.config import MODES, SequenceParallelism
from echelon.shardformer.sharder import split_errors
from echelon.shardformer.table_policy import TablePolicy
from echelon.verify.models import ModelChoice


def faults(model_type: str, *, tp_size: int = 1, num_stages: int = 1, **settings: object) -> list[str]:
    """What the table of a model type says of a small model with these settings."""
    table = table_for(model_type)
    assert table is not None
    model = ModelChoice(model_type=model_type, settings=tuple(settings.items())).build_on_meta()
    return split_errors(model, TablePolicy(table), tp_size=tp_size, num_stages=num_stages)


def test_products_with_parts_of_weights_are_refused_under_tensor_parallelism_alone() -> None:
    (found,) = faults("bloom", tp_size=2, slow_but_exact=True)
    assert found.startswith("slow_but_exact=True in the model's config does not go with tensor parallelism")
    assert faults("bloom", num_stages=2, slow_but_exact=True) == []


def test_layers_left_out_at_random_are_refused_under_a_pipeline_alone() -> None:
    (found,) = faults("opt", num_stages=2, layerdrop=0.1)
    assert found.startswith("layerdrop=0.1 in the model's config leaves out layers at random")
    assert faults("opt", tp_size=2, layerdrop=0.1) == []


def test_shared_heads_that_cannot_be_padded_in_one_projection_are_refused() -> None:
    """All queries lie before all keys, and ranks that share a key need as many queries each."""
    (found,) = faults("phi3", tp_size=4, hidden_size=48, num_attention_heads=6, num_key_value_heads=2)
    assert "2 ranks would share the 3 query heads of a key-value head, which is not divisible by 2" in found


def test_a_shared_head_whose_width_does_not_divide_is_refused() -> None:
    (found,) = faults("phi3", tp_size=4, num_key_value_heads=1, hidden_size=24)
    assert "4 ranks would share a key-value head of width 6, which is not divisible by 4" in found


def sequence_faults(model_type: str, mode: str, **settings: object) -> list[str]:
    table = table_for(model_type)
    assert table is not None
    policy = TablePolicy(table)
    policy.set_model(ModelChoice(model_type=model_type, settings=tuple(settings.items())).build_on_meta())
    return policy.sequence_faults(SequenceParallelism(mode=mode), tp_size=2, sp_size=2)


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize(("model_type", "settings"), [("gpt2", {"add_cross_attention": True}), ("beit", {})])
def test_nobody_is_sent_to_a_mode_that_is_refused_too(
    model_type: str, settings: dict[str, object], mode: str
) -> None:
    taking = {each for each in MODES if not sequence_faults(model_type, each, **settings)}
    for told in sequence_faults(model_type, mode, **settings):
        assert ("no other mode takes this model" in told) == (not taking), told
        assert set(re.findall(r"'(\w+)'", told.partition("use sequence_parallelism_mode=")[2])) <= taking, (
            told
        )
        assert taking or "on the sequence axis" not in told
    # BEiT's layers of older releases take a part of the sequence.
    assert not taking or (model_type == "beit" and taking == {"split_gather", "ring"})


@pytest.mark.parametrize("mode", ["all_to_all", "ring_attn"])
def test_layers_of_another_attention_are_refused_in_one_sentence(mode: str) -> None:
    policy = TablePolicy(derived_table(ModelChoice(model_type="minimax").build_on_meta()))
    policy.set_model(ModelChoice(model_type="minimax").build_on_meta())
    (found,) = policy.sequence_faults(SequenceParallelism(mode=mode), tp_size=1, sp_size=2)
    assert found == (
        f"sequence_parallelism_mode='{mode}': MiniMaxDecoderLayer mixes positions by MiniMaxLightningAttention, which "
        "sees those of one rank alone: leave enable_sequence_parallelism out, for no other mode takes this model either"
    )


def test_a_mode_that_is_not_refused_is_advised() -> None:
    found = sequence_faults("bloom", "ring_attn")
    assert found and all("use sequence_parallelism_mode='split_gather' or 'ring'" in each for each in found)
