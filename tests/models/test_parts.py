"""Encoder-decoders and models made of parts: what the matrix does not run, what is refused, and that rows can fail."""

from copy import deepcopy
from dataclasses import replace
from typing import Any

import pytest
import torch
import transformers
from torch import Tensor, nn

from echelon.pipeline.plan import StagePlan
from echelon.shardformer import table_for
from echelon.shardformer.layer.held_count import HeldCount
from echelon.shardformer.sequence.config import SequenceParallelism
from echelon.shardformer.shard_former import policy_for
from echelon.shardformer.sharder import split_errors
from echelon.shardformer.table_policy import TablePolicy
from echelon.verify.models import ModelChoice

WHISPER = ModelChoice(model_type="whisper")
SAM = ModelChoice(model_type="sam")
BLIP2 = ModelChoice(model_type="blip-2")
GEMMA3 = ModelChoice(model_type="gemma3")
RETRIEVAL = replace(BLIP2, head="zero_shot_image")


def with_text_model(model_type: str) -> ModelChoice:
    return replace(BLIP2, settings=(("text_config", {"model_type": model_type}),))


def set_to(choice: ModelChoice, **settings: object) -> ModelChoice:
    return replace(choice, settings=tuple(settings.items()))


def faults(choice: ModelChoice, **asked: int) -> list[str]:
    table = table_for(choice.model_type)
    assert table is not None
    return split_errors(choice.build_on_meta(), TablePolicy(table), **asked)


@pytest.mark.parametrize(
    ("choice", "asked", "told"),
    [
        (
            set_to(replace(WHISPER, head="audio_classification"), use_weighted_layer_sum=True),
            {"num_stages": 2},
            "use_weighted_layer_sum=True in the model's config collects over all layers",
        ),
        (
            set_to(WHISPER, decoder_layerdrop=0.1),
            {"num_stages": 2},
            "decoder_layerdrop=0.1 in the model's config leaves out layers at random",
        ),
        (
            set_to(SAM, vision_config={"output_hidden_states": True}),
            {"num_stages": 2},
            "output_hidden_states=True in the model's config, vision_config collects over all layers",
        ),
        (SAM, {"num_stages": 5}, "4 layers and the pipeline 5 stages"),
        (
            set_to(SAM, mask_decoder_config={"num_attention_heads": 2}),
            {"tp_size": 4},
            "num_attention_heads=2 is not divisible by tp_size=4",
        ),
        (
            with_text_model("codegen"),
            {"tp_size": 2},
            "no table says how to split language_model of this Blip2ForConditionalGeneration (model_type='codegen')",
        ),
    ],
)
def test_what_cannot_be_done_is_refused(choice: ModelChoice, asked: dict[str, int], told: str) -> None:
    assert any(told in fault for fault in faults(choice, **asked))


@pytest.mark.parametrize(
    ("choice", "told"),
    [
        (
            set_to(replace(WHISPER, head="audio_classification"), use_weighted_layer_sum=True),
            "use_weighted_layer_sum=True in the model's config collects what layers compute",
        ),
        (
            set_to(BLIP2, vision_config={"output_hidden_states": True}),
            "output_hidden_states=True in the model's config, vision_config collects what layers compute",
        ),
    ],
    ids=["whisper", "blip-2"],
)
@pytest.mark.parametrize("mode", ["split_gather", "ring"])
def test_what_collects_over_all_layers_is_refused_where_they_compute_parts(
    choice: ModelChoice, told: str, mode: str
) -> None:
    policy = policy_for(choice.build_on_meta())
    policy.set_model(choice.build_on_meta())
    (fault,) = policy.sequence_faults(SequenceParallelism(mode=mode), tp_size=2, sp_size=1)
    assert fault.startswith(f"sequence_parallelism_mode={mode!r}: {told}")


def test_a_class_without_a_part_that_a_pipeline_cuts_is_refused() -> None:
    with torch.device("meta"):
        model = transformers.Blip2TextModelWithProjection(BLIP2.config())
    del model.qformer
    (fault,) = split_errors(model, policy_for(model), tp_size=2)
    assert "has none of the parts ['language_model', 'vision_model', 'qformer']" in fault


def test_what_stands_around_the_layers_is_on_every_stage_and_counted_on_each() -> None:
    model = SAM.build_on_meta()
    plan = policy_of(model).stage_plan()
    assert plan.stages_of(model, "vision_encoder.pos_embed", [0, 1, 4]) == [0, 1]
    assert plan.stages_of(model, "shared_image_embedding.positional_embedding", [0, 1, 4]) == [0, 1]
    assert plan.stages_of(model, "vision_encoder.patch_embed.projection.weight", [0, 1, 4]) == [0]
    assert plan.stages_of(model, "vision_encoder.neck.conv1.weight", [0, 1, 4]) == [1]
    encoder = StagePlan(layers="encoder.layers", module="encoder", entry=())
    both = StagePlan(layers="decoder.layers", module="decoder", entry=(), encoder=encoder)
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


def test_a_table_of_parts_with_names_of_its_own_is_refused() -> None:
    table = table_for("sam")
    assert table is not None
    with pytest.raises(ValueError, match=r"stage names the part 'neck'.*\nrow names modules of layers"):
        replace(table, stage=(replace(table.stage[0], part="neck"),), row=("proj",))  # type: ignore[index]


def test_a_held_count_divides_by_the_whole_and_counts_what_is_held() -> None:
    for heads in (HeldCount(2, 8), deepcopy(HeldCount(2, 8))):
        assert (heads, 32 // heads) == (2, 4)
        assert Tensor.reshape(torch.zeros(2, 4), heads, 32 // heads).shape == (2, 4)
