"""Sharded weights of linear layers with the booster: memory, communication, names, files, overflow."""

from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from safetensors.torch import load_file

from echelon import LazyInitContext
from echelon.cluster.placement import shard_on
from echelon.verify.batch import loss_of
from echelon.verify.model_choice import ModelChoice

from ..pool import Pool, on_ranks
from ..slow import slow_row
from .training import LLAMA, boosted, hybrid, share, steps

# Odd widths: not all are divisible by 2 or 4 ranks.
ODD = ModelChoice(model_type="gpt2", num_layers=2, settings=(("n_inner", 47), ("n_embd", 36)))


def measure(stage: int, wp: int) -> tuple[dict[str, int], dict[tuple[str, str], float], int, int]:
    """Return local bytes, the traffic of a step, and the numbers of sharded and of other elements."""
    booster = hybrid(wp_size=wp, zero_stage=stage, num_microbatches=1, zero_bucket_size_in_m=1)
    model, optimizer = boosted(booster, LLAMA)
    placed = [(parameter, shard_on(parameter, "wp")) for parameter in model.local_parameters.values()]
    sharded = sum(shard.blocks[0] * parameter[0].numel() for parameter, shard in placed if shard is not None)
    replicated = sum(parameter.numel() for parameter, shard in placed if shard is None)
    for step in range(2):
        with booster.plugin.ledger(optimizer) as ledger:
            booster.execute_pipeline(share(booster, LLAMA, step), model, loss_of, optimizer)
            optimizer.step()
    sent = {key: count.sent for key, count in ledger.traffic.items() if key[0] == "wp"}
    return dict(ledger.held.items()), sent, sharded, replicated


@pytest.mark.parametrize(("ranks", "stage"), [(2, 0), slow_row(4, 1)])
def test_permanent_weights_and_their_states_are_sharded(pool: Pool, ranks: int, stage: int) -> None:
    for held, sent, sharded, replicated in pool.run(ranks, measure, stage, 2):
        # Without padding: of odd numbers of rows, and of buckets.
        assert held["parameters"] == pytest.approx(4 * (sharded / 2 + replicated), rel=0.03)
        states = 8 * (sharded + replicated) / 4 if stage else 2 * held["parameters"]
        assert held["states"] == pytest.approx(states, rel=0.03)
        gathered = sent["wp", "all_gather"] + sent.get(("wp", "small all_gather"), 0)
        scattered = sent["wp", "reduce_scatter"] + sent.get(("wp", "small reduce_scatter"), 0)
        assert gathered == pytest.approx(2 * scattered)
        assert gathered + scattered == pytest.approx(3 * 4 * sharded / 2, rel=0.03)


def save_and_load(folder: Path) -> None:
    """Compare the files of layouts with the full model's; load shards, master weights and states of a lazy model."""
    booster = hybrid(wp_size=2, zero_stage=1)
    model, optimizer = boosted(booster, ODD)
    next(steps(booster, model, optimizer, share(booster, ODD, 0)))
    booster.save_checkpoint(folder, 1, model=model, optimizer=optimizer).wait()
    saved = load_file(folder / "step-00000001" / "model" / "model.safetensors")
    shapes = {name: parameter.shape for name, parameter in ODD.build_on_meta().named_parameters()}
    assert {name: saved[name].shape for name in saved} == {name: shapes[name] for name in saved}
    with LazyInitContext():
        lazy = ODD.build(seed=1)
    other, second = boosted(booster, lazy)
    booster.load_checkpoint(folder, model=other, optimizer=second)
    for name, parameter in other.local_parameters.items():
        assert torch.equal(parameter, model.local_parameters[name]), name
    pairs = ((model, optimizer), (other, second))
    losses = [next(steps(booster, *pair, share(booster, ODD, 1))) for pair in pairs]
    assert losses[0] == losses[1]


@pytest.mark.parametrize("ranks", [2, slow_row(4)])
def test_files_have_full_weights(pool: Pool, tmp_path: Path, ranks: int) -> None:
    pool.run(ranks, save_and_load, tmp_path)


@on_ranks(2)
def test_an_overflow_on_one_rank_skips_the_step_on_all() -> None:
    """It is in a sharded weight."""
    booster = hybrid(wp_size=2, zero_stage=1, precision="fp16", initial_scale=256.0)
    model, optimizer = boosted(booster, LLAMA)
    before = {name: master.clone() for name, master in optimizer.masters().items()}
    loss = model(**next(share(booster, LLAMA, 0))).loss
    if dist.get_rank() == 1:
        loss.register_hook(lambda gradient: gradient * float("inf"))
    booster.backward(loss, optimizer)
    optimizer.step()
    assert all(torch.equal(master, before[name]) for name, master in optimizer.masters().items())
    assert optimizer.skipped_steps == 1


def sharded_names(choice: ModelChoice) -> set[str]:
    model, _ = boosted(hybrid(wp_size=2), choice)
    return {name for name, parameter in model.local_parameters.items() if shard_on(parameter, "wp")}


@pytest.mark.parametrize(
    ("model_type", "layers"),
    [
        ("gpt2", ("c_attn", "attn.c_proj", "c_fc", "mlp.c_proj")),
        ("falcon", ("query_key_value", "dense", "dense_h_to_4h", "dense_4h_to_h")),
    ],
)
def test_a_booster_shards_the_linear_weights_of_all_layers(
    pool: Pool, model_type: str, layers: tuple[str, ...]
) -> None:
    choice = ModelChoice(model_type=model_type)
    weights = tuple(f"{layer}.weight" for layer in layers)
    expected = {name for name, _ in choice.build_on_meta().named_parameters() if name.endswith(weights)}
    assert len(expected) == 4 * len(layers)
    assert pool.run(2, sharded_names, choice) == [expected, expected]
