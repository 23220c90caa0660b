"""Tables for the models of an older transformers, tested on modules with the same names."""

from dataclasses import replace

import pytest
import torch
from torch import Tensor, nn

from echelon.pipeline.stage_plan import OutputStructure, StagePlan
from echelon.shardformer import Table
from echelon.shardformer.table_policy import TablePolicy, table_as_installed
from echelon.shardformer.tables.decoders import GPT2
from echelon.verify.model_choice import ModelChoice


class OfTensors(nn.Module):
    def forward(self, hidden: Tensor) -> Tensor:
        return hidden


class OfTuples(nn.Module):
    def forward(self, hidden: Tensor, output_attentions: bool = False) -> tuple[Tensor, ...]:
        outputs = (hidden,)
        if output_attentions:
            outputs += (hidden,)
        return outputs


def model_of(layer: nn.Module, path: str) -> nn.Module:
    """Build a model with this layer in a list at a path of two names."""
    model, (outer, inner) = nn.Module(), path.split(".")
    model.add_module(outer, nn.Module())
    model.get_submodule(outer).add_module(inner, nn.ModuleList([layer]))
    return model


def table_at(layers: str, arity: int = 0) -> Table:
    return Table(stage=StagePlan(layers=layers, entry=(), arity=arity), divisible=())


def as_installed(table: Table, model: nn.Module) -> Table:
    return table_as_installed(table, model, lambda path: path)


@pytest.mark.parametrize(
    ("arity", "layer", "expected"), [(0, OfTensors, 0), (0, OfTuples, 1), (2, OfTuples, 2)]
)
def test_a_layer_returns_what_its_code_says(arity: int, layer: type[nn.Module], expected: int) -> None:
    table = as_installed(table_at("encoder.layers", arity), model_of(layer(), "encoder.layers"))
    assert isinstance(table.stage, StagePlan)
    assert table.stage.arity == expected


def test_the_layers_of_an_encoder_are_read_too() -> None:
    stage = StagePlan(layers="decoder.layers", entry=(), module="decoder", leading=("encoder",))
    encoder = StagePlan(
        layers="encoder.layers", entry=(), module="encoder", returned=OutputStructure.of(torch.zeros(1))
    )
    model = model_of(OfTensors(), "decoder.layers")
    model.encoder = model_of(OfTuples(), "encoder.layers").encoder
    installed = as_installed(Table(stage=replace(stage, encoder=encoder), divisible=()), model).stage
    assert isinstance(installed, StagePlan) and installed.encoder is not None
    assert (installed.arity, installed.encoder.arity) == (0, 1)


def test_a_policy_uses_the_table_for_each_given_model() -> None:
    policy = TablePolicy(replace(GPT2, older={"wpe": replace(GPT2, regions=("mlp", "attn"))}))
    for model_type, regions in (("gpt2", ("mlp", "attn")), ("gptj", GPT2.regions)):
        policy.set_model(ModelChoice(model_type=model_type).build_on_meta())
        assert policy.table.regions == regions
