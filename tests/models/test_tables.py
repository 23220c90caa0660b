"""Tables of models: derived from plans of transformers, composed of parts, and the sequence modes they recommend."""

from copy import deepcopy
from dataclasses import replace
from typing import Any

import pytest
import torch
import transformers
from torch import Tensor, nn

from echelon.pipeline.stage_plan import OutputStructure, StagePlan
from echelon.shardformer import policy_for, table_for
from echelon.shardformer.derived import derived_table
from echelon.shardformer.layers.region import LocalCount
from echelon.shardformer.sharder import split_errors
from echelon.shardformer.table_policy import TablePolicy
from echelon.verify.model_choice import ModelChoice

from ..contract.matrix_rows import ARE_PLANS_OLDER

BLIP2, SAM = ModelChoice(model_type="blip-2"), ModelChoice(model_type="sam")
# Types with a table that must equal the derived one.
WRITTEN = ("gemma2", "granite", "llama", "mistral", "mixtral", "qwen2", "qwen3")


@pytest.mark.parametrize("model_type", WRITTEN)
def test_the_derived_table_of_a_type_is_the_written_one(model_type: str) -> None:
    derived = derived_table(ModelChoice(model_type=model_type).build_on_meta())
    written = table_for(model_type)
    assert written is not None
    if ARE_PLANS_OLDER and model_type in ("granite", "mixtral"):
        pytest.skip(f"transformers {transformers.__version__} has an older plan or layer for {model_type}")
    # A plan is for a whole family, so all of its names may be missing in a type.
    assert replace(derived, optional=written.optional) == written


def test_a_class_without_a_module_that_a_pipeline_cuts_is_refused() -> None:
    with torch.device("meta"):
        model = transformers.Blip2TextModelWithProjection(BLIP2.config())
    del model.qformer
    (error,) = split_errors(model, policy_for(model), tp_size=2)
    assert "has none of the parts ['language_model', 'vision_model', 'qformer']" in error


def test_modules_around_the_layers_are_on_every_stage_and_counted_on_each() -> None:
    model = SAM.build_on_meta()
    plan = policy_of(model).stage_plan()
    assert plan.stages_of(model, "vision_encoder.pos_embed", [0, 1, 4]) == [0, 1]
    assert plan.stages_of(model, "shared_image_embedding.positional_embedding", [0, 1, 4]) == [0, 1]
    assert plan.stages_of(model, "vision_encoder.patch_embed.projection.weight", [0, 1, 4]) == [0]
    assert plan.stages_of(model, "vision_encoder.neck.conv1.weight", [0, 1, 4]) == [1]
    output = OutputStructure.of(torch.zeros(1))
    encoder = StagePlan(layers="encoder.layers", module="encoder", entry=(), returned=output)
    both = StagePlan(
        layers="decoder.layers", module="decoder", entry=(), leading=("encoder",), encoder=encoder
    )
    assert both.layers_of(Twins(), "encoder.scale") == [0, 1]
    assert both.layers_of(Twins(), "scale") == [0, 1, 2]


class Twins(nn.Module):
    """Parameters of an encoder and of a model, around their layers."""

    def __init__(self) -> None:
        super().__init__()
        self.encoder, self.decoder = nn.Module(), nn.Module()
        self.encoder.layers = nn.ModuleList([nn.Linear(2, 2), nn.Linear(2, 2)])
        self.decoder.layers = nn.ModuleList([nn.Linear(2, 2)])
        self.encoder.scale = nn.Parameter(torch.ones(2))
        self.scale = nn.Parameter(torch.ones(2))


def policy_of(model: Any) -> TablePolicy:
    table = table_for(model.config.model_type)
    assert table is not None
    policy = TablePolicy(table)
    policy.set_model(model)
    return policy


def test_a_local_count_divides_by_the_total_and_counts_the_local_part() -> None:
    for heads in (LocalCount(2, 8), deepcopy(LocalCount(2, 8))):
        assert (heads, 32 // heads) == (2, 4)
        assert Tensor.reshape(torch.zeros(2, 4), heads, 32 // heads).shape == (2, 4)
