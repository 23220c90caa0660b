"""Layers whose code computes on parts of a sequence, and the parameters that do."""

from dataclasses import replace

import pytest
from torch import Tensor, nn

from echelon.pipeline.plan import StagePlan
from echelon.shardformer.table_policy import layer_part_errors
from echelon.shardformer.tables.table import Table, parameters_of_parts, whole_paths

from .layers import FURTHER, LAYERS, built

TABLE = Table(stage=StagePlan(layers="layers", entry=()), regions=("mlp",), column=("mlp.0",), row=("mlp.1",))


class Layer(nn.Module):
    def __init__(self, mixer: nn.Module) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(4)
        self.mlp = nn.Sequential(nn.Linear(4, 8), nn.Linear(8, 4))
        self.mixer = mixer

    def forward(self, x: Tensor) -> Tensor:
        return self.mixer(x + self.mlp(self.norm(x)))


class Slices(Layer):
    def forward(self, x: Tensor) -> Tensor:
        return x + self.mlp(self.norm(x[:, 1:]))


class Reshapes(Layer):
    def forward(self, x: Tensor) -> Tensor:
        return x + self.mlp(self.norm(x.view(-1, 4)))


@pytest.mark.parametrize("name", [*LAYERS, *FURTHER])
def test_layers_of_the_tables_compute_each_position_on_its_own(name: str) -> None:
    layer, table, _ = built(name)
    assert layer_part_errors(table, layer) == []


@pytest.mark.parametrize(
    ("layer", "message"),
    [
        (Layer(nn.Conv1d(4, 4, 3)), "Layer.mixer is a Conv1d, which may mix positions"),
        (Layer(nn.MultiheadAttention(4, 1)), "the code of Layer.mixer uses"),
        (Slices(nn.Identity()), "the code of Slices takes slices"),
        (Reshapes(nn.Identity()), "the code of Reshapes uses view"),
    ],
)
def test_what_may_mix_positions_is_refused(layer: nn.Module, message: str) -> None:
    assert any(message in error for error in layer_part_errors(TABLE, layer))
    assert layer_part_errors(TABLE, Layer(nn.Identity())) == []


def test_chunks_of_sequences_are_refused() -> None:
    layer, table, _ = built("bert", chunk_size_feed_forward=4)
    (error,) = layer_part_errors(table, layer)
    assert error.endswith("set it to 0")


def test_experts_that_a_layer_holds_itself_are_refused() -> None:
    layer = Layer(nn.Identity())
    table = replace(TABLE, exits=("mlp",))
    assert "holds experts itself" in layer_part_errors(table, layer)[0]


def test_what_holds_experts_is_given_whole_sequences_and_its_router_whole_gradients() -> None:
    layer, table, _ = built("mixtral")
    assert whole_paths(table, layer) == ["mlp"]
    assert parameters_of_parts(table, layer) == ["input_layernorm.weight", "post_attention_layernorm.weight"]


def test_norms_behind_a_row_split_layer_are_of_parts_and_its_bias_is_its_own_business() -> None:
    layer, table, _ = built("bert")
    norms = [
        f"{path}.LayerNorm.{name}" for path in ("attention.output", "output") for name in ("weight", "bias")
    ]
    assert parameters_of_parts(table, layer) == norms
