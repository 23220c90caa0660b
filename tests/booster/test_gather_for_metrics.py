"""Metrics see every sample of the data set once and in order, and the booster has the calls of Accelerate's scripts."""

import logging
from contextlib import nullcontext
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch.utils.data import DataLoader, TensorDataset

from echelon.verify.model_choice import ModelChoice

from ..log_lines import logged
from ..plugins.training import booster_of, hybrid
from ..pool import Pool, on_ranks

NUM_SAMPLES = 11  # for 2 and 4 replicas the last batches repeat some


def gathered(plugin: str, is_prepared: bool, sizes: dict[str, Any]) -> list[list[int]]:
    """Return the samples of each batch as all ranks gathered them, and require that they agree."""
    booster = booster_of(plugin, **sizes)
    dataset = TensorDataset(torch.arange(NUM_SAMPLES))
    if is_prepared:
        loader: Any = booster.plugin.prepare_dataloader(dataset, batch_size=2)
    else:
        model = torch.nn.Linear(2, 2)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        loader = booster.boost(model, optimizer, dataloader=DataLoader(dataset, batch_size=2))[3]
    batches = []
    for (numbers,) in loader:
        squares = {"squares": (numbers**2, numbers.float()[:, None, None].expand(-1, 2, 3))}
        outputs = booster.gather_for_metrics(squares)["squares"]
        assert torch.equal(outputs[1][:, 1, 2], outputs[0].float().sqrt())
        batches.append(outputs[1][:, 0, 0].int().tolist())
        assert booster.gather_for_metrics([*map(str, numbers.tolist())]) == [*map(str, batches[-1])]
    everywhere: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(everywhere, batches)
    assert everywhere == [batches] * len(everywhere)
    return batches


@pytest.mark.parametrize(
    ("num_ranks", "plugin", "is_prepared", "sizes"),
    [
        (1, "hybrid", True, {}),
        (2, "zero", False, {}),
        (2, "ddp", True, {}),
        (4, "hybrid", True, {"tp_size": 2}),
        (4, "hybrid", False, {}),
    ],
)
def test_every_sample_is_gathered_once_in_its_order(
    pool: Pool, num_ranks: int, plugin: str, is_prepared: bool, sizes: dict[str, Any]
) -> None:
    batches = pool.run(num_ranks, gathered, plugin, is_prepared, sizes)[0]
    assert [sample for batch in batches for sample in batch] == list(range(NUM_SAMPLES))
    num_replicas = num_ranks // sizes.get("tp_size", 1)
    assert len(batches[0]) == 2 * num_replicas


@on_ranks(2)
def test_samples_of_another_loader_are_all_kept() -> None:
    booster = booster_of("zero", precision="fp32")
    next(iter(booster.plugin.prepare_dataloader(TensorDataset(torch.arange(3)), batch_size=2)))
    assert len(booster.gather_for_metrics(torch.arange(8))) == 16


@on_ranks(2)
def test_outputs_of_a_pipeline_are_gathered_on_all_ranks() -> None:
    booster, model = hybrid(pp_size=2), ModelChoice(model_type="llama").build().eval()
    numbers = torch.randint(3, 20, (5, 6), generator=torch.Generator().manual_seed(0))
    with torch.no_grad():
        logits = model(input_ids=numbers).logits
    loader = booster.plugin.prepare_dataloader([{"input_ids": row} for row in numbers], batch_size=3)
    model, *_ = booster.boost(model)
    model.eval()
    gathered_logits, batches, wanted = [], iter(loader), dict(return_loss=False, return_outputs="all_ranks")
    for _ in range(len(loader)):
        with torch.no_grad():
            outputs = booster.execute_pipeline(batches, model, **wanted)["outputs"]
        gathered_logits.append(booster.gather_for_metrics(outputs["logits"]))
    assert torch.allclose(torch.cat(gathered_logits), logits, atol=1e-5)


def call_like_accelerate() -> list[str]:
    """Return the lines that this rank logged, in the order of its first and later blocks."""
    booster = booster_of("zero", precision="fp32")
    with logged(level=logging.INFO) as lines:
        booster.log({"loss": torch.tensor(0.5), "lr": 1e-3}, step=3)
    with booster.main_process_first(), booster.accumulate():
        booster.print("of the first rank")
    assert booster.device == booster.plugin.mesh.device
    return lines


def test_the_first_rank_logs_and_prints(pool: Pool) -> None:
    assert pool.run(2, call_like_accelerate) == [["step 3: loss 0.5, lr 0.001"], []]


def accumulate_in_a_loop(accumulates: bool) -> list[Any]:
    """Return the weights after each batch of a loop that steps for every batch, or after every second one."""
    booster = booster_of("zero", gradient_accumulation_steps=2)
    torch.manual_seed(0)
    model: Any = torch.nn.Linear(3, 1)
    optimizer: Any = torch.optim.SGD(model.parameters(), lr=0.1)
    scheduler: Any = torch.optim.lr_scheduler.ExponentialLR(optimizer, gamma=0.5)
    model, optimizer, _, _, scheduler = booster.boost(model, optimizer, lr_scheduler=scheduler)
    states = []
    for number in range(5):
        x = torch.full((2, 3), 1.0 + number + dist.get_rank())
        with booster.accumulate(model) if accumulates else nullcontext():
            booster.backward((model(x) ** 2).mean(), optimizer)
            if accumulates or number % 2:
                optimizer.step()
                scheduler.step()
                optimizer.zero_grad()
        states.append((scheduler.get_last_lr(), booster.plugin.local_model(model).module.weight.tolist()))
    return states


def test_a_loop_that_steps_for_every_batch_accumulates_as_one_that_counts(pool: Pool) -> None:
    counted, blocks = (pool.run(2, accumulate_in_a_loop, accumulates) for accumulates in (False, True))
    assert counted == blocks
    assert [state[0] for state in blocks[0]] == [[0.1], [0.05], [0.05], [0.025], [0.025]]
