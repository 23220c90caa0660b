"""The guide to policies: its code runs as shown, and the model that it shards trains like the unsharded one."""

import contextlib
import io
import re
import sys
from copy import deepcopy
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn

from echelon import ShardConfig, ShardFormer, shard_model
from echelon.cluster.placement import PartialGrad, Replicated, Shard, placement_on
from echelon.shardformer import Table
from echelon.shardformer.layers import Linear1D_Col, VocabParallelLMHead1D

from ..plugins.training import hybrid, steps
from ..pool import Pool
from ..shardformer.bare_training import _whole, causal_batch, departure
from ..shardformer.compare import named
from .scripts import code_blocks

ROOT = Path(__file__).parents[2]
GUIDE = ROOT / "docs" / "policies.md"
NOTHING, TABLE, BY_TABLE, GPT, POLICY, BY_POLICY, TRAINING = range(7)  # numbers of the guide's blocks


def executed(*blocks: int) -> dict[str, Any]:
    """Run blocks of the guide in order and return their definitions."""
    names: dict[str, Any] = {"__name__": "guide"}
    sys.path.insert(0, str(Path(__file__).parent))  # the folder of small_decoder.py
    try:
        for index in blocks:
            exec(code_blocks(GUIDE, "python")[index], names)
    finally:
        sys.path.remove(str(Path(__file__).parent))
    return names


def train_without_a_table() -> None:
    split = executed(NOTHING)
    boosted, booster, optimizer = split["model"], split["booster"], split["optimizer"]
    layer = boosted.unwrap().biogpt.layers[0]
    for module in (layer.self_attn.q_proj, layer.fc1):
        assert isinstance(placement_on(module.weight, "tp"), Shard)
    torch.manual_seed(0)
    reference = split["BioGptForCausalLM"](split["config"])
    plain = torch.optim.AdamW(reference.parameters(), lr=1e-3)
    ids = torch.arange(40).view(4, 10) * 7 % 101
    for _ in range(3):
        expected, loss = reference(ids, labels=ids).loss, boosted(ids, labels=ids).loss
        torch.testing.assert_close(loss, expected, rtol=1e-5, atol=0.0)
        expected.backward()
        booster.backward(loss, optimizer)
        for adamw in (plain, optimizer):
            adamw.step()
            adamw.zero_grad()


def test_a_model_without_a_table_trains_as_one_process(pool: Pool) -> None:
    pool.run(2, train_without_a_table)


def loss_of(outputs: Any, inputs: Any) -> Tensor:
    return outputs["loss"]


def changed_by_hand(model: Any) -> Any:
    """Make the changes of DecoderPolicy that are not sharding."""
    for block in model.blocks:
        block.mlp.down.bias.data.zero_()
        block.mlp.activation = lambda x: x.relu().square()
    return model


def world() -> ShardFormer:
    return ShardFormer(ShardConfig(tensor_parallel_process_group=dist.group.WORLD))


def train(way: int) -> None:
    names = executed(*((TABLE, BY_TABLE) if way == BY_TABLE else (POLICY, BY_POLICY)))
    split, decoder = names["model"], names["Decoder"]
    torch.manual_seed(0)
    reference = decoder()
    if way == BY_POLICY:
        reference = changed_by_hand(reference)
        assert type(split) is names["TunedDecoder"]
        assert split.num_blocks == 3
    assert split.unembedding.weight is split.tokens.weight
    assert isinstance(split.unembedding, VocabParallelLMHead1D)
    require_split(split)
    assert departure(reference, split, world(), loss_of=loss_of) is None


def require_split(model: Any) -> None:
    """Check that every layer that the guide mentions is sharded as described."""
    block = model.blocks[1]
    assert block.attention.num_heads == 4 // dist.get_world_size()
    assert isinstance(block.mixer, Linear1D_Col)
    assert block.mixer.gather_output
    for name, parameter in block.named_parameters():
        placement = placement_on(parameter, "tp")
        if "query_norm" in name or "key_norm" in name:
            assert isinstance(placement, PartialGrad), name
        elif "_norm" in name or name in ("attention.out.bias", "mlp.down.bias"):
            assert isinstance(placement, Replicated), name
        else:
            assert isinstance(placement, Shard), name


@pytest.mark.parametrize(
    ("way", "ranks"), [(BY_TABLE, 2), pytest.param(BY_TABLE, 4, marks=pytest.mark.slow), (BY_POLICY, 2)]
)
def test_the_guides_code_splits_a_model_that_trains_as_one_process(pool: Pool, way: int, ranks: int) -> None:
    pool.run(ranks, train, way)


def train_variants() -> None:
    names = {**executed(TABLE), **executed(POLICY)}
    for is_gated in (False, True):
        for is_tied in (False, True):
            torch.manual_seed(1)
            reference = names["Decoder"](is_gated=is_gated, is_tied=is_tied)
            with named((is_gated, is_tied, "table")):
                split = shard_model(deepcopy(reference))
                assert departure(reference, split, world(), loss_of=loss_of) is None
            with named((is_gated, is_tied, "policy")):
                split = shard_model(deepcopy(reference), names["DecoderPolicy"]())
                assert departure(changed_by_hand(reference), split, world(), loss_of=loss_of) is None


@pytest.mark.slow
def test_layers_and_ties_are_optional(pool: Pool) -> None:
    pool.run(2, train_variants)


def pipeline_losses(by_policy: bool, tp_size: int, pp_size: int) -> list[float]:
    """Return the losses of three steps of the hybrid plugin, or of a plain loop if both sizes are 0."""
    names = {**executed(TABLE), **executed(POLICY)}
    torch.manual_seed(0)
    model: nn.Module = names["Decoder"]()
    if not tp_size:
        return plain_losses(changed_by_hand(model) if by_policy else model)
    policy = names["DecoderPolicy"]() if by_policy else None
    booster = hybrid(tp_size=tp_size, pp_size=pp_size, custom_policy=policy)
    boosted, optimizer, *_ = booster.boost(model, torch.optim.AdamW(model.parameters(), lr=1e-3, eps=1e-5))
    criterion = loss_of if by_policy else None  # by default the loss in the outputs
    return [*steps(booster, boosted, optimizer, [causal_batch(4, seed=0)] * 3, criterion)]


def plain_losses(model: nn.Module) -> list[float]:
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3, eps=1e-5)
    losses = []
    for _ in range(3):
        loss = loss_of(model(**causal_batch(4, seed=0)), None)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    return losses


@pytest.mark.slow
@pytest.mark.parametrize("by_policy", [False, True])
def test_stages_of_the_guides_model_train_as_one_process(pool: Pool, by_policy: bool) -> None:
    (expected,) = pool.run(1, pipeline_losses, by_policy, 0, 0)
    assert expected[0] != pytest.approx(expected[2], rel=1e-2), "the steps change nothing"
    for losses in pool.run(4, pipeline_losses, by_policy, 2, 2):
        assert losses == pytest.approx(expected, rel=1e-5)


def printed_training() -> str:
    with contextlib.redirect_stdout(io.StringIO()) as printed:
        executed(TABLE, BY_TABLE, TRAINING)
    return printed.getvalue()


def test_the_guides_loop_prints_the_same_on_one_process_and_on_two(pool: Pool) -> None:
    figures = [
        [float(figure) for figure in re.findall(r"\d+\.\d+", printed)]
        for printed in pool.run(1, printed_training) + pool.run(2, printed_training)
    ]
    assert len(figures[0]) == 6
    assert figures[0][0] > figures[0][4], "the loss does not fall"
    assert figures[1] == pytest.approx(figures[0], rel=1e-5)
    assert figures[2] == figures[1]


def refuse_three_heads() -> str:
    names = executed(TABLE)
    with pytest.raises(ValueError) as raised:
        shard_model(names["Decoder"](num_heads=3, width=36))
    return str(raised.value)


def refuse_by_policy() -> None:
    names = executed(POLICY)
    model = names["Decoder"](num_heads=3, width=36)
    before = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    with pytest.raises(ValueError, match=r"^num_heads=3 is not divisible by tp_size=2$"):
        shard_model(model, names["DecoderPolicy"]())
    assert all(torch.equal(tensor, before[name]) for name, tensor in model.state_dict().items())


def test_the_guides_policy_reports_indivisible_sizes_before_it_changes_anything(pool: Pool) -> None:
    pool.run(2, refuse_by_policy)


def test_the_guide_quotes_the_error_of_indivisible_heads(pool: Pool) -> None:
    assert "`Decoder(num_heads=3, width=36)`" in GUIDE.read_text()
    _, quoted = code_blocks(GUIDE, "text")
    assert pool.run(2, refuse_three_heads) == [quoted.strip()] * 2


# The GPT with fused queries, keys and values.


def gpt_batch(step: int) -> dict[str, Tensor]:
    ids = torch.randint(0, 101, (4, 9), generator=torch.Generator().manual_seed(step))
    return {"idx": ids[:, :-1].contiguous(), "targets": ids[:, 1:].contiguous()}


def new_gpt() -> tuple[nn.Module, Table]:
    names = executed(GPT)
    torch.manual_seed(1)
    return names["GPT"](sys.modules["small_gpt"].GPTConfig()), names["SMALL_GPT"]


def gpt_departures(tp_size: int, pp_size: int) -> tuple[int, list[str]]:
    """Train by plain SGD; return the number of compared gradients, and the tensors that differ from one process."""
    model, _ = new_gpt()
    alone = deepcopy(model)
    booster = hybrid(tp_size=tp_size, pp_size=pp_size)
    boosted, optimizer, *_ = booster.boost(model, torch.optim.SGD(model.parameters(), lr=0.1))
    plain = torch.optim.SGD(alone.parameters(), lr=0.1)
    group = booster.plugin.mesh.group("tp") if tp_size > 1 else None
    wrong, count = [], 0
    for step in range(3):
        loss = alone(**gpt_batch(step))[1]
        loss.backward()
        batches = iter([gpt_batch(step)])
        outputs = booster.execute_pipeline(batches, boosted, lambda outputs, _: outputs[1], optimizer)
        wrong += differing(f"loss of step {step}", outputs["loss"], loss.detach())
        optimizer.reduce_gradients()
        gradients = optimizer.gradients()
        expected = dict(alone.named_parameters(remove_duplicate=False))  # the last stage has the tied lm_head
        local = dict(boosted.unwrap().named_parameters())
        for name, parameter in local.items():
            if name in gradients:
                count += 1
                unsharded = _whole(parameter, gradients[name], group, name)
                wrong += differing(f"gradient of {name} in step {step}", unsharded, expected[name].grad)
        plain.step()
        plain.zero_grad()
        optimizer.step()
        optimizer.zero_grad()
        for name, parameter in local.items():
            unsharded = _whole(parameter, parameter.data, group, name)
            wrong += differing(f"{name} after step {step}", unsharded, expected[name].detach())
    return count, wrong


def differing(name: str, tensor: Tensor, expected: Tensor | None) -> list[str]:
    """Return the name if a tensor departs by more than 5e-6 of the largest entry: float32 sums in another order."""
    assert expected is not None
    distance = (tensor - expected).abs().max()
    return [] if distance <= 5e-6 * expected.abs().max() else [f"{name}: {distance:g}"]


@pytest.mark.parametrize(
    ("tp_size", "pp_size"), [(2, 1), (1, 2), pytest.param(2, 2, marks=pytest.mark.slow)], ids=str
)
def test_the_guides_gpt_has_the_gradients_of_one_process(pool: Pool, tp_size: int, pp_size: int) -> None:
    results = pool.run(tp_size * pp_size, gpt_departures, tp_size, pp_size)
    assert [wrong for _, wrong in results] == [[]] * len(results)
    # 4 layers of 12 tensors, embeddings, final norm; the gradient of the tied weight is the first stage's.
    assert sum(count for count, _ in results) == 3 * tp_size * 52


def gpt_refusals() -> dict[str, str]:
    """Return the errors of tables that a newcomer writes first, by what they lack."""
    model, table = new_gpt()
    lacks = {"counts": {"divide": (), "divisors": ()}, "order": {"fused": {}}, "head": {"heads": ()}}
    errors = {}
    for lack, fields in lacks.items():
        with pytest.raises(ValueError) as raised:
            shard_model(deepcopy(model), replace(table, **fields))
        errors[lack] = str(raised.value)
    return errors


def test_tables_without_counts_order_or_head_are_refused_with_the_entry_to_write(pool: Pool) -> None:
    for errors in pool.run(2, gpt_refusals):
        assert "name in divide those of attn.n_head=4, attn.n_embd=32 that" in errors["counts"]
        assert "its 96 outputs are 3 times the 32 inputs of attn.c_proj" in errors["order"]
        assert "give fused={'attn.c_attn': 3}" in errors["order"]
        assert "shares a parameter with" in errors["head"]
        order, heads = "its 96 outputs are 3 times the 32 inputs", "the table takes num_attention_heads"
        for quoted in (f"{order} of attn.c_proj", heads):
            assert quoted in GUIDE.read_text() and quoted in "\n".join(errors.values())


def unfit_shapes() -> None:
    """Without `divisors` the code divides the full width by the local number: torch's error is quoted in the guide."""
    model, table = new_gpt()
    split = shard_model(model, replace(table, divisors=()))
    with pytest.raises(RuntimeError, match=r"shape '\[4, 8, 2, 16\]' is invalid for input of size"):
        split(**gpt_batch(0))


def test_a_width_that_is_divided_by_a_local_number_fits_no_shape(pool: Pool) -> None:
    pool.run(2, unfit_shapes)
