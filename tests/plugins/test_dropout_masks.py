"""Dropout masks of boosted models: equal and different ones between ranks, repetition, and other random numbers."""

import random
from collections.abc import Callable
from functools import partial
from itertools import combinations
from typing import Any

import numpy as np
import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from echelon import (
    Booster,
    HybridParallelPlugin,
    LowLevelZeroPlugin,
    PipelineGradientCheckpointConfig,
    TorchDDPPlugin,
    TorchFSDPPlugin,
)
from echelon.verify.batch import loss_of, make_batch
from echelon.verify.models import ModelChoice
from echelon.verify.parity import make_optimizer

from ..pool import Pool

GPT2 = ModelChoice(model_type="gpt2", settings=(("resid_pdrop", 0.5), ("attn_pdrop", 0.2)))
PLUGINS: dict[str, Callable[..., Any]] = {
    "hybrid": partial(HybridParallelPlugin, precision="fp32", num_microbatches=2),
    "zero": partial(LowLevelZeroPlugin, precision="fp32"),
    "ddp": TorchDDPPlugin,
    "fsdp": TorchFSDPPlugin,
}
RECOMPUTED = {"gradient_checkpoint_config": PipelineGradientCheckpointConfig(gradient_checkpointing_ratio=1)}
# The fraction of equal entries of independent masks: a half, within ten standard deviations of the smallest sample.
NEAR_A_HALF = pytest.approx(0.5, abs=0.05)

Masks = dict[str, list[Tensor]]


class Run:
    """A boosted GPT-2 with dropout, on batches of eight samples over all replicas."""

    def __init__(self, kind: str, sizes: dict[str, Any], *, seed: int = 0, change: str = "") -> None:
        self.booster = Booster(plugin=PLUGINS[kind](**sizes))
        model = GPT2.build()
        if change == "recomputed":
            # Before transformers 5.23 the method had the second name; now that one warns.
            enable = getattr(model, "activation_checkpointing_enable", model.gradient_checkpointing_enable)
            enable()
        self.called_again = change == "called again"
        torch.manual_seed(seed)
        self.model, self.optimizer, *_ = self.booster.boost(model, make_optimizer(model), loss_of)
        self.called = torch.compile(self.model, backend="eager") if change == "compiled" else self.model

    def step(self, number: int, *, by_calls: bool = False) -> float:
        """Return the loss of a step: by `execute_pipeline` if the plugin has a pipeline, else by calls."""
        rank, size = self.booster.plugin.data_rank
        whole = make_batch(GPT2, num_samples=8, seed=number)
        batch = {name: tensor[rank::size] for name, tensor in whole.items()}  # in the order of a dataloader
        if by_calls or isinstance(self.booster.plugin, TorchDDPPlugin | TorchFSDPPlugin):
            call = partial(self.called, **batch)
            outputs = checkpoint(call, use_reentrant=False) if self.called_again else call()
            self.booster.backward(outputs.loss, self.optimizer)
            loss = outputs.loss.detach()
        else:
            loss = self.booster.execute_pipeline(iter([batch]), self.model, loss_of, self.optimizer)["loss"]
        self.optimizer.step()
        self.optimizer.zero_grad()
        return float(loss)

    def masks(self, **step: Any) -> Masks:
        """Return the entries that every dropout module of this rank kept in a step."""
        found: Masks = {}
        for name, module in self.model.unwrap().named_modules():
            if isinstance(module, nn.Dropout) and module.p == 0.5:
                module.register_forward_hook(
                    lambda _, args, output, name=name: found.setdefault(name, []).append(output.detach() != 0)
                )
        self.step(0, **step)
        return found


def masks_of(kind: str, sizes: dict[str, Any], *, own_seeds: bool = False, **step: Any) -> Masks:
    return Run(kind, sizes, seed=dist.get_rank() if own_seeds else 0).masks(**step)


def share(pairs: list[tuple[Tensor, Tensor]]) -> float:
    """Return the fraction of equal entries."""
    assert pairs
    equal = torch.cat([(one == other).flatten() for one, other in pairs])
    return float(equal.float().mean())


def in_common(one: Masks, other: Masks) -> float:
    """Return the fraction of equal entries of two ranks."""
    assert one.keys() == other.keys()
    return share([pair for name in one for pair in zip(one[name], other[name], strict=True)])


def first_masks(masks: Masks, layer: int) -> list[Tensor]:
    return masks[f"transformer.h.{layer}.attn.resid_dropout"]


@pytest.mark.parametrize(
    ("kind", "by_calls"), [("hybrid", False), ("hybrid", True), ("ddp", True), ("fsdp", True)]
)
def test_replicas_drop_different_entries(pool: Pool, kind: str, by_calls: bool) -> None:
    first, second = pool.run(2, masks_of, kind, {}, by_calls=by_calls)
    assert in_common(first, second) == NEAR_A_HALF


def test_stages_and_microbatches_drop_different_entries(pool: Pool) -> None:
    first, second = pool.run(2, masks_of, "hybrid", {"pp_size": 2})
    # The masks of the first layers of both stages, in both microbatches.
    masks = [*first_masks(first, 0), *first_masks(second, 2)]
    assert len(masks) == 4
    assert share(list(combinations(masks, 2))) == NEAR_A_HALF
    for pair in combinations(masks, 2):
        assert share([pair]) == pytest.approx(0.5, abs=0.1)


@pytest.mark.parametrize("by_calls", [False, True])
def test_ranks_that_compute_one_activation_drop_the_same_entries(pool: Pool, by_calls: bool) -> None:
    # Even if their own generators differ.
    masks = pool.run(4, masks_of, "hybrid", {"tp_size": 2}, own_seeds=True, by_calls=by_calls)
    for replica in (masks[:2], masks[2:]):
        assert in_common(*replica) == 1
    assert in_common(masks[0], masks[2]) == NEAR_A_HALF


def test_ranks_with_different_tokens_drop_different_entries(pool: Pool) -> None:
    sizes = {"sp_size": 2, "enable_sequence_parallelism": True, "sequence_parallelism_mode": "all_to_all"}
    masks = pool.run(4, masks_of, "hybrid", sizes)
    for one, other in combinations(masks, 2):
        assert in_common(one, other) == NEAR_A_HALF


def losses_of(
    kind: str, sizes: dict[str, Any], *, seed: int = 0, change: str = "", by_calls: bool = False
) -> list[float]:
    """Return the losses of three steps; a later loss depends on the gradients of earlier steps."""
    run = Run(kind, sizes, seed=seed, change=change)
    return [run.step(number, by_calls=by_calls) for number in range(3)]


@pytest.mark.parametrize(
    ("kind", "sizes", "changed"),
    [
        ("hybrid", {"zero_stage": 2}, RECOMPUTED),
        ("hybrid", {"pp_size": 2, "pp_style": "zbv"}, RECOMPUTED),
        ("ddp", {}, {"change": "recomputed"}),
        ("fsdp", {}, {"change": "recomputed"}),
        ("zero", {}, {"change": "called again", "by_calls": True}),
    ],
    ids=str,
)
def test_recomputed_layers_drop_the_same_entries(
    pool: Pool, kind: str, sizes: dict[str, Any], changed: dict[str, Any]
) -> None:
    by_calls = changed.get("by_calls", False)
    expected = pool.run(2, losses_of, kind, sizes, by_calls=by_calls)
    if changed is RECOMPUTED:
        found = pool.run(2, losses_of, kind, sizes | RECOMPUTED)
    else:
        found = pool.run(2, losses_of, kind, sizes, **changed)
    for one, other in zip(found, expected, strict=True):
        assert one == pytest.approx(other, rel=1e-6)  # recomputed values may differ in the last digit
    assert expected[0][0] != expected[0][1]


@pytest.mark.slow  # the compiler starts on two ranks
# A warning of torch's compiler, when it continues after a call that it does not trace (here a random draw).
@pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor that is not a leaf:UserWarning")
@pytest.mark.parametrize("kind", ["zero", "ddp", "fsdp"])
def test_a_compiled_model_drops_the_same_entries(pool: Pool, kind: str) -> None:
    compiled = pool.run(2, losses_of, kind, {}, change="compiled", by_calls=True)
    expected = pool.run(2, losses_of, kind, {}, by_calls=True)
    for one, other in zip(compiled, expected, strict=True):
        assert one == pytest.approx(other, rel=1e-5)


@pytest.mark.parametrize(("kind", "sizes"), [("hybrid", {"pp_size": 2}), ("ddp", {})])
def test_masks_follow_from_the_seed(pool: Pool, kind: str, sizes: dict[str, Any]) -> None:
    first = pool.run(2, losses_of, kind, sizes)
    assert pool.run(2, losses_of, kind, sizes) == first
    assert pool.run(2, losses_of, kind, sizes, seed=1) != first


def test_masks_do_not_depend_on_the_schedule_or_on_the_ranks_of_stages(pool: Pool) -> None:
    expected = pool.run(4, losses_of, "hybrid", {"pp_size": 4})[0]
    for style in ({"pp_style": "interleaved", "num_model_chunks": 2}, {"pp_style": "zbv"}):
        assert pool.run(2, losses_of, "hybrid", {"pp_size": 2} | style)[0] == pytest.approx(
            expected, rel=1e-5
        )


def mean_losses(sizes: dict[str, Any]) -> list[float]:
    """Return the losses of three steps, averaged over all replicas."""
    losses = torch.tensor(losses_of("hybrid", sizes))
    dist.all_reduce(losses)
    return (losses / dist.get_world_size()).tolist()


def test_masks_of_single_samples_do_not_depend_on_the_number_of_replicas(pool: Pool) -> None:
    sizes = {"pp_size": 2, "num_microbatches": None, "microbatch_size": 1}
    expected = pool.run(2, mean_losses, sizes)[0]
    assert pool.run(4, mean_losses, sizes)[0] == pytest.approx(expected, rel=1e-5)


def plain_losses() -> list[float]:
    model = GPT2.build()
    torch.manual_seed(0)
    optimizer = make_optimizer(model)
    losses = []
    for number in range(3):
        loss = model(**make_batch(GPT2, num_samples=8, seed=number)).loss
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    return losses


@pytest.mark.parametrize("kind", ["hybrid", "ddp", "fsdp"])
def test_one_process_drops_what_a_plain_loop_drops(pool: Pool, kind: str) -> None:
    expected = pool.run(1, plain_losses)[0]
    sizes = {"num_microbatches": 1} if kind == "hybrid" else {}
    assert pool.run(1, losses_of, kind, sizes)[0] == pytest.approx(expected, rel=1e-6)


def drawn_afterwards(kind: str, sizes: dict[str, Any]) -> list[Any]:
    """Draw from all generators after three steps of a model that uses them, and an evaluation."""
    run = Run(kind, sizes)
    rank = dist.get_rank()

    def draw(*_: Any) -> None:
        np.random.rand(rank + 1), random.random(), torch.rand(rank + 1)

    for module in run.model.unwrap().modules():
        if isinstance(module, nn.Dropout):
            module.register_forward_hook(draw)
    for number in range(3):
        run.step(number)
    return [
        torch.randperm(20).tolist(),
        np.random.permutation(20).tolist(),
        np.random.standard_normal(),
        random.random(),
    ]


@pytest.mark.parametrize(
    ("size", "kind", "sizes"),
    [(4, "hybrid", {"pp_size": 2}), (2, "fsdp", {})],
    ids=str,
)
def test_a_script_draws_alike_on_all_ranks_after_training(
    pool: Pool, size: int, kind: str, sizes: dict[str, Any]
) -> None:
    first, *others = pool.run(size, drawn_afterwards, kind, sizes)
    assert all(other == first for other in others)
