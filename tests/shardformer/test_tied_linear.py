"""Linear weights that the script tied: sharded once where both layers shard alike, refused by name elsewhere."""

from typing import Any

import pytest
import torch
from torch import nn

from echelon.verify.batch import loss_of, make_batch
from echelon.verify.model_choice import ModelChoice

from ..plugins.training import hybrid, refused, sgd, steps
from ..pool import Pool
from ..slow import slow

LLAMA = ModelChoice(model_type="llama", num_layers=2)
BIASED = ModelChoice(
    model_type="llama", num_layers=2, settings=(("attention_bias", True), ("num_key_value_heads", 4))
)
SEQUENCES = {"enable_sequence_parallelism": True, "sequence_parallelism_mode": "split_gather"}
DOWN = ("model.layers.0.mlp.down_proj", "model.layers.1.mlp.down_proj")
GATE = ("model.layers.0.mlp.gate_proj", "model.layers.0.mlp.up_proj")
QUERY = ("model.layers.0.self_attn.q_proj", "model.layers.0.self_attn.o_proj")


def tied(pair: tuple[str, str]) -> nn.Module:
    model = LLAMA.build()
    model.get_submodule(pair[1]).weight = model.get_submodule(pair[0]).weight
    return model


def trained(pair: tuple[str, str], settings: dict[str, Any]) -> list[float]:
    """Return loss and norm of two steps."""
    booster, plain = hybrid(num_microbatches=1, max_norm=1.0, **settings), tied(pair)
    model, optimizer, *_ = booster.boost(plain, sgd(plain), loss_of)
    batches = [make_batch(LLAMA, num_samples=4, seed=step) for step in range(2)]
    numbers = []
    for loss in steps(booster, model, optimizer, batches):
        numbers += [loss, float(optimizer.get_grad_norm())]
    return numbers


@pytest.mark.parametrize("pair", [DOWN, GATE])
@pytest.mark.parametrize("settings", [SEQUENCES, *slow({}, {"zero_stage": 1})])
def test_layers_that_shard_alike_train_as_in_one_process(
    pool: Pool, pair: tuple[str, str], settings: dict[str, Any]
) -> None:
    expected = pytest.approx(pool.run(1, trained, pair, {})[0], rel=1e-5)
    assert pool.run(2, trained, pair, {"tp_size": 2, **settings}) == [expected] * 2


@pytest.mark.parametrize("name", ["weight", "bias", "module"])
def test_a_column_tied_to_a_row_is_refused_by_both_names_in_one_sentence(pool: Pool, name: str) -> None:
    query, output = QUERY
    tied_name, there, here = {
        "bias": ("bias", "sharded along dim 0", "replicated, with equal gradients")
    }.get(name, ("weight", "sharded along dim 0", "sharded along dim 1"))
    expected = (
        f"{output}: shares a parameter with {query}.{tied_name}, where it is {there}, and here {here}: give it a copy "
        "of its own (torch.nn.Parameter(weight.detach().clone())), or use tp_size=1"
    )
    assert pool.run(2, refusal_of, QUERY, name) == [expected] * 2


def refusal_of(pair: tuple[str, str], name: str) -> str:
    model = BIASED.build()
    first, second = map(model.get_submodule, pair)
    if name == "module":
        model.set_submodule(pair[1], first)
    else:
        setattr(second, name, getattr(first, name))
    before = {name: parameter.clone() for name, parameter in model.named_parameters()}
    booster = hybrid(tp_size=2)
    text = refused(lambda: booster.boost(model, sgd(model), loss_of))
    assert all(torch.equal(parameter, before[name]) for name, parameter in model.named_parameters())
    return text
