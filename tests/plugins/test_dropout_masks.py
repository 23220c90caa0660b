"""Dropout masks of boosted models: equal and different ones between ranks, repetition, and other random numbers."""

import random
from collections.abc import Iterator
from functools import partial
from itertools import combinations, count
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from echelon.cluster import forward_random as random_module
from echelon.cluster.forward_random import ForwardRandom
from echelon.verify.batch import loss_of, make_batch
from echelon.verify.model_choice import ModelChoice
from echelon.verify.parity import make_optimizer

from ..pool import Pool
from ..slow import slow_row
from .training import RECOMPUTED, ULYSSES, boosted, booster_of, hybrid, mean_over_replicas, parts, steps

GPT2 = ModelChoice(model_type="gpt2", settings=(("resid_pdrop", 0.5), ("attn_pdrop", 0.2)))
# The fraction of equal entries of independent masks: a half, within ten standard deviations of the smallest sample.
NEAR_A_HALF = pytest.approx(0.5, abs=0.05)

Masks = dict[str, list[Tensor]]


def generators() -> list[Any]:
    """The states of the global generators of torch, NumPy and Python."""
    name, keys, *rest = np.random.get_state()
    return [torch.get_rng_state().tolist(), name, keys.tolist(), rest, random.getstate()]


class Run:
    """A boosted GPT-2 with dropout, on batches of eight samples over all replicas.

    Args:
        seed: of its forwards; None leaves it to boost, on ranks that are seeded apart.
    """

    def __init__(self, kind: str, sizes: dict[str, Any], *, seed: int | None = 0, change: str = "") -> None:
        self.kind, self.booster = kind, booster_of(kind, **sizes)
        model = GPT2.build()
        if change == "recomputed":
            # Before transformers 5.23 the method had the second name; now that one warns.
            enable = getattr(model, "activation_checkpointing_enable", model.gradient_checkpointing_enable)
            enable()
        self.called_again = change == "called again"
        if seed is None:
            torch.manual_seed(dist.get_rank())
        self.before_boost = generators()
        self.model, self.optimizer, *_ = self.booster.boost(model, make_optimizer(model), loss_of)
        if seed is not None:
            self.booster.seed(self.model, seed)
        self.called = torch.compile(self.model, backend="eager") if change == "compiled" else self.model

    def step(self, number: int, *, by_calls: bool = False) -> float:
        """Return the loss of a step."""
        loss = self.loss(number, by_calls=by_calls)
        self.optimizer.step()
        self.optimizer.zero_grad()
        return loss

    def loss(self, number: int, *, by_calls: bool = False) -> float:
        """Return the loss of a batch: by `execute_pipeline` if the plugin has a pipeline, else by calls."""
        rank, size = self.booster.plugin.data_rank
        global_batch = make_batch(GPT2, num_samples=8, seed=number)
        # In the order of a dataloader.
        batch = {name: tensor[rank::size] for name, tensor in global_batch.items()}
        if by_calls or self.kind in ("ddp", "fsdp"):
            call = partial(self.called, **batch)
            outputs = checkpoint(call, use_reentrant=False) if self.called_again else call()
            if torch.is_grad_enabled():
                self.booster.backward(outputs.loss, self.optimizer)
            loss = outputs.loss.detach()
        else:
            loss = self.booster.execute_pipeline(iter([batch]), self.model, loss_of, self.optimizer)["loss"]
        return float(loss)

    def masks(self, **step: Any) -> Masks:
        """Return the entries that every dropout module of this rank kept in a step."""
        masks: Masks = {}
        for name, module in self.model.unwrap().named_modules():
            if isinstance(module, nn.Dropout) and module.p == 0.5:
                module.register_forward_hook(
                    lambda _, args, output, name=name: masks.setdefault(name, []).append(output.detach() != 0)
                )
        self.step(0, **step)
        return masks


def masks_of(kind: str, sizes: dict[str, Any], *, seed: int | None = 0, **step: Any) -> Masks:
    return Run(kind, sizes, seed=seed).masks(**step)


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
    ("kind", "by_calls"),
    [("hybrid", False), ("fsdp", True)] + [slow_row(kind, True) for kind in ("hybrid", "ddp")],
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


@pytest.mark.parametrize("by_calls", [False, slow_row(True)])
def test_ranks_that_compute_one_activation_drop_the_same_entries(pool: Pool, by_calls: bool) -> None:
    # Even if their own generators differ.
    masks = pool.run(4, masks_of, "hybrid", {"tp_size": 2}, seed=None, by_calls=by_calls)
    for replica in (masks[:2], masks[2:]):
        assert in_common(*replica) == 1
    assert in_common(masks[0], masks[2]) == NEAR_A_HALF


@pytest.mark.parametrize("size", [2, slow_row(4)])
def test_ranks_with_different_tokens_drop_different_entries(pool: Pool, size: int) -> None:
    masks = pool.run(size, masks_of, "hybrid", ULYSSES)
    for one, other in combinations(masks, 2):
        assert in_common(one, other) == NEAR_A_HALF


def losses_of(
    kind: str, sizes: dict[str, Any], *, seed: int = 0, change: str = "", by_calls: bool = False
) -> list[float]:
    """Return the losses of three steps; a later loss depends on the gradients of earlier steps."""
    run = Run(kind, sizes, seed=seed, change=change)
    return [run.step(number, by_calls=by_calls) for number in range(3)]


@pytest.mark.parametrize(
    ("kind", "sizes", "option", "change", "by_calls"),
    [
        slow_row("hybrid", {"zero_stage": 2}, RECOMPUTED, "", False),
        ("hybrid", {"pp_size": 2, "pp_style": "zbv"}, RECOMPUTED, "", False),
        slow_row("ddp", {}, {}, "recomputed", True),
        ("fsdp", {}, {}, "recomputed", True),
        ("zero", {}, {}, "called again", True),
    ],
    ids=str,
)
def test_recomputed_layers_drop_the_same_entries(
    pool: Pool, kind: str, sizes: dict[str, Any], option: dict[str, Any], change: str, by_calls: bool
) -> None:
    expected = pool.run(2, losses_of, kind, sizes, by_calls=by_calls)
    losses = pool.run(2, losses_of, kind, sizes | option, change=change, by_calls=by_calls)
    # Recomputed values may differ in the last digit.
    assert losses == [pytest.approx(of_rank, rel=1e-6) for of_rank in expected]
    assert expected[0][0] != expected[0][1]


@pytest.mark.slow  # the compiler starts on two ranks
# A warning of torch's compiler, when it continues after a call that it does not trace (here a random draw).
@pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor that is not a leaf:UserWarning")
@pytest.mark.parametrize("kind", ["zero", *(slow_row(kind) for kind in ("ddp", "fsdp"))])
def test_a_compiled_model_drops_the_same_entries(pool: Pool, kind: str) -> None:
    compiled = pool.run(2, losses_of, kind, {}, change="compiled", by_calls=True)
    expected = pool.run(2, losses_of, kind, {}, by_calls=True)
    assert compiled == [pytest.approx(of_rank, rel=1e-5) for of_rank in expected]


@pytest.mark.parametrize("kind", ["hybrid", slow_row("ddp")])
def test_masks_follow_from_the_seed(pool: Pool, kind: str) -> None:
    first = pool.run(2, losses_of, kind, {})
    assert pool.run(2, losses_of, kind, {}) == first
    assert pool.run(2, losses_of, kind, {}, seed=1) != first


@pytest.mark.parametrize(
    "sizes",
    [{"pp_size": 2, "pp_style": "interleaved", "num_model_chunks": 2}, slow_row({"pp_size": 4})],
    ids=str,
)
def test_masks_do_not_depend_on_the_schedule_or_on_the_ranks_of_stages(
    pool: Pool, sizes: dict[str, Any]
) -> None:
    expected = pytest.approx(pool.run(sizes["pp_size"], losses_of, "hybrid", sizes)[0], rel=1e-5)
    assert pool.run(2, losses_of, "hybrid", {"pp_size": 2, "pp_style": "zbv"})[0] == expected


def mean_losses(sizes: dict[str, Any]) -> list[float]:
    """Return the losses of three steps, averaged over all replicas."""
    return [mean_over_replicas(loss) for loss in losses_of("hybrid", sizes)]


@pytest.mark.parametrize("stages", [1, slow_row(2)])
def test_masks_of_single_samples_do_not_depend_on_the_number_of_replicas(pool: Pool, stages: int) -> None:
    sizes = {"pp_size": stages, "num_microbatches": None, "microbatch_size": 1}
    expected = pool.run(stages, mean_losses, sizes)[0]
    assert pool.run(2 * stages, mean_losses, sizes)[0] == pytest.approx(expected, rel=1e-5)


def seeded_losses(kind: str, sizes: dict[str, Any]) -> tuple[list[float], list[list[int]]]:
    """Return the mean losses of three steps over all replicas, and the seeds of this rank's forwards in each."""
    run, seeds = Run(kind, sizes), list[list[int]]()
    run.model.unwrap().transformer.wte.register_forward_pre_hook(
        lambda *_: seeds[-1].append(torch.initial_seed())
    )
    losses = []
    for number in range(3):
        seeds.append([])
        losses.append(mean_over_replicas(run.step(number)))
    return losses, seeds


def plain_losses(seeds: list[list[list[int]]]) -> list[float]:
    """Return the losses of three steps of a plain loop, with a seed for each microbatch, by replica and step."""
    model = GPT2.build()
    optimizer = make_optimizer(model)
    losses = []
    for number in range(3):
        batch = make_batch(GPT2, num_samples=8, seed=number)
        total = 0.0
        for replica, of_replica in enumerate(seeds):
            mine = {name: tensor[replica :: len(seeds)] for name, tensor in batch.items()}
            num_microbatches = len(of_replica[number])
            for microbatch, seed in zip(parts(mine, num_microbatches), of_replica[number], strict=True):
                torch.manual_seed(seed)
                loss = model(**microbatch).loss / len(seeds) / num_microbatches
                loss.backward()
                total += loss.item()
        losses.append(total)
        optimizer.step()
        optimizer.zero_grad()
    return losses


@pytest.mark.parametrize("size", [slow_row(1), 2])
@pytest.mark.parametrize("kind", ["hybrid", "ddp", "fsdp"])
def test_a_plain_loop_of_the_same_seeds_drops_the_same_entries(pool: Pool, kind: str, size: int) -> None:
    sizes = {"loss_reduction": "microbatch_mean"} if kind == "hybrid" else {}  # as the plain loop
    by_rank = pool.run(size, seeded_losses, kind, sizes)
    seeds = [of_replica for _, of_replica in by_rank]
    flat = [seed for of_replica in seeds for step in of_replica for seed in step]
    assert len(set(flat)) == len(flat) == size * 3 * (2 if kind == "hybrid" else 1)
    expected = pool.run(1, plain_losses, seeds)[0]
    assert by_rank[0][0] == pytest.approx(expected, rel=1e-6)


def changed_generators(kind: str, sizes: dict[str, Any], *, by_calls: bool, change: str) -> list[str]:
    """Return what changed the generators: boost, training of a model that draws from all of them, or validation."""
    np.random.standard_normal()  # a second one is kept in the generator's state
    run = Run(kind, sizes, seed=None, change=change)
    causes = ["boost"] * (generators() != run.before_boost)

    def draw(*_: Any) -> None:
        np.random.standard_normal(3), random.random(), torch.rand(3)

    # Not in layers: torch's recomputation restores its own generators only.
    for name, module in run.model.unwrap().named_modules():
        if name in ("transformer.wte", "lm_head"):
            module.register_forward_hook(draw)
    for number in range(2):
        run.step(number, by_calls=by_calls)
    causes += ["training"] * (generators() != run.before_boost)
    with torch.no_grad():  # in training mode
        run.loss(2, by_calls=by_calls)
    return causes + ["validation"] * (generators() != run.before_boost)


@pytest.mark.parametrize(
    ("size", "kind", "sizes", "by_calls", "change"),
    [
        slow_row(1, "hybrid", {}, False, ""),
        (1, "hybrid", {}, True, "called again"),
        slow_row(1, "ddp", {}, True, ""),
        (1, "fsdp", {}, True, "recomputed"),
        slow_row(2, "zero", {}, True, "called again"),
        slow_row(2, "hybrid", {"tp_size": 2}, False, ""),
        (2, "hybrid", {"tp_size": 2} | RECOMPUTED, True, ""),
        (2, "hybrid", ULYSSES, False, ""),
        (2, "hybrid", {"pp_size": 2} | RECOMPUTED, False, ""),
        slow_row(4, "hybrid", {"tp_size": 2, "pp_size": 2} | RECOMPUTED, False, ""),
        (2, "ddp", {}, True, "recomputed"),
        slow_row(2, "fsdp", {}, True, ""),
    ],
    ids=str,
)
def test_the_generators_of_a_script_are_left_as_they_were(
    pool: Pool, size: int, kind: str, sizes: dict[str, Any], by_calls: bool, change: str
) -> None:
    causes = pool.run(size, changed_generators, kind, sizes, by_calls=by_calls, change=change)
    assert causes == [[]] * size


QUIET = ModelChoice(model_type="gpt2")


def batches_drawn_by_the_script(sizes: dict[str, Any]) -> tuple[list[list[int]], float]:
    """Return the tokens that a script draws from torch's generator in three steps, and the loss of the first."""
    booster = hybrid(**sizes)
    model, optimizer = boosted(booster, QUIET)
    torch.manual_seed(1337)
    tokens = []

    def batches() -> Iterator[dict[str, Tensor]]:
        for _ in range(3):
            ids = torch.randint(3, 60, (4, 8))
            tokens.append(ids.flatten().tolist())
            yield {"input_ids": ids, "labels": ids}

    losses = [*steps(booster, model, optimizer, batches())]
    return tokens, losses[0]


@pytest.mark.parametrize("tp", [1, slow_row(2)])
def test_a_script_that_draws_its_batches_trains_on_the_same_data_under_every_layout(
    pool: Pool, tp: int
) -> None:
    torch.manual_seed(1337)
    expected = [torch.randint(3, 60, (4, 8)).flatten().tolist() for _ in range(3)]
    tokens, loss = pool.run(1, batches_drawn_by_the_script, {})[0]
    assert tokens == expected
    for size, sizes in ((2, {}), (2 * tp, {"tp_size": tp, "pp_size": 2})):
        for of_rank in pool.run(size, batches_drawn_by_the_script, sizes):
            assert of_rank == (expected, pytest.approx(loss, rel=1e-6))


def seeds_of_boosts(torch_seeds: list[int]) -> list[int]:
    """Return the seed of the stream of each boosted model; torch is seeded before each boost."""
    seeds = []
    for seed in torch_seeds:
        torch.manual_seed(seed + 100 * dist.get_rank())
        run = Run("hybrid", {}, seed=None)
        seeds.append(run.model.random.state()["seed"])
    return seeds


def test_models_of_one_process_have_different_streams_that_all_ranks_agree_on(pool: Pool) -> None:
    first, second = pool.run(2, seeds_of_boosts, [0, 0, 0])
    assert first == second
    assert len(set(first)) == 3


def test_seeding_torch_before_boost_decides_the_stream(monkeypatch: pytest.MonkeyPatch) -> None:
    mesh: Any = SimpleNamespace(device=torch.device("cpu"), rank=lambda _: 0, size=lambda _: 1)
    monkeypatch.setattr(random_module, "gather_integers", lambda values: [values])

    def seed_of(seed: int) -> int:
        monkeypatch.setattr(random_module, "_BOOSTS", count())
        torch.manual_seed(seed)
        torch.rand(3)
        return ForwardRandom(mesh).state()["seed"]

    assert seed_of(3) == seed_of(3) != seed_of(4)


def repeated_losses() -> list[float]:
    run = Run("hybrid", {})
    losses = []
    for seed in (5, 5, 6):
        run.booster.seed(run.model, seed)
        with torch.no_grad():
            losses += [run.loss(0), run.loss(0)]
    return losses


def test_a_seed_repeats_the_masks_of_calls(pool: Pool) -> None:
    first, second, again, second_again, other, _ = pool.run(1, repeated_losses)[0]
    assert first == again != second == second_again
    assert other not in (first, second)
