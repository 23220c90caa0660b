"""Training script of public calls, and its oracle: the same training in plain torch on one process.

A global batch is cut into equal parts, so means over replicas and microbatches equal the mean of the batch.
"""

from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from echelon import (
    Booster,
    HybridParallelPlugin,
    LazyInitContext,
    LowLevelZeroPlugin,
    PipelineGradientCheckpointConfig,
    Plugin,
    ShardConfig,
    ShardFormer,
    TorchDDPPlugin,
    TorchFSDPPlugin,
)
from echelon.pipeline.action import Action, Op
from echelon.verify import reference
from echelon.verify.batch import loss_of, make_batch
from echelon.verify.model_choice import ModelChoice
from echelon.verify.parity import make_optimizer

from ..plugins.training import mean_over_replicas, steps

NUM_STEPS, NUM_SAMPLES = 3, 8
LLAMA = ModelChoice(model_type="llama", num_layers=2)
hybrid = partial(HybridParallelPlugin, precision="fp32", num_microbatches=2)


def batch_of(choice: ModelChoice, step: int) -> dict[str, Tensor]:
    """Return the global batch of a step; nothing is padded, so all samples have equal weight."""
    batch = make_batch(choice, num_samples=NUM_SAMPLES, seed=step)
    return {"input_ids": (ids := batch["input_ids"].clamp_min(3)), "labels": ids}


def plain_losses(choice: ModelChoice) -> list[float]:
    """Return the losses of plain torch; the last is that of a batch without a step."""
    records = reference.train(
        choice.build(),
        [[[batch_of(choice, step)]] for step in range(NUM_STEPS + 1)],
        make_optimizers=lambda model: [make_optimizer(model)],
        criterion=loss_of,
        dtypes=[torch.float32] * (NUM_STEPS + 1),
    )
    return [record.loss for record in records]


@dataclass(frozen=True, kw_only=True)
class Script:
    """A run by the public calls, whose losses must equal those of plain torch.

    Args:
        plugin: makes the plugin, or the ShardFormer of a loop without a booster.
        num_ranks: number of processes.
        choice: the model.
        criterion: criterion of `execute_pipeline`; None for the model's own loss.
        by_calls: steps are `model(**batch)` and `booster.backward` instead of `execute_pipeline`.
        building: a context in which the model is built.
    """

    plugin: Callable[[], Plugin | ShardFormer]
    num_ranks: int = 2
    choice: ModelChoice = LLAMA
    criterion: Callable[..., Any] | None = None
    by_calls: bool = False
    building: Callable[[], AbstractContextManager[Any]] = nullcontext

    def build(self) -> nn.Module:
        """Build the model as a script does."""
        with self.building():
            return self.choice.build()

    def losses(self) -> list[float]:
        """Train, then evaluate; return the losses, on each rank of the pool."""
        plugin = self.plugin()
        return _with_a_booster(self, plugin) if isinstance(plugin, Plugin) else _without(self, plugin)

    def departure(self) -> str | None:
        """Return the difference from plain torch, on each rank of the pool."""
        losses, expected = self.losses(), plain_losses(self.choice)
        is_near = all(abs(one - other) <= 1e-5 * other for one, other in zip(losses, expected, strict=True))
        return None if is_near else f"losses {losses} instead of {expected}"


def shard_former(**sizes: int) -> ShardFormer:
    """Make a ShardFormer with groups of its own."""
    former = ShardFormer(ShardConfig(**sizes))
    former.init_distributed()
    return former


def _with_a_booster(script: Script, plugin: Plugin) -> list[float]:
    booster, model = Booster(plugin=plugin), script.build()
    model, optimizer, *_ = booster.boost(model, make_optimizer(model))
    rank, size = plugin.data_rank
    *batches, last = (
        {name: tensor.chunk(size)[rank] for name, tensor in batch_of(script.choice, step).items()}
        for step in range(NUM_STEPS + 1)
    )
    losses = [*steps(booster, model, optimizer, batches, script.criterion, by_calls=script.by_calls)]
    model.eval()
    with torch.no_grad():
        if script.by_calls:
            loss = model(**last).loss
        else:
            loss = booster.execute_pipeline(iter([last]), model, script.criterion)["loss"]
    return [mean_over_replicas(loss) for loss in [*losses, loss.item()]]


def _without(script: Script, former: ShardFormer) -> list[float]:
    model = former.shard_model(script.build())
    optimizer = make_optimizer(model)
    losses = []
    for step in range(NUM_STEPS + 1):
        loss = model(**batch_of(script.choice, step)).loss
        losses.append(loss.item())
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
    return losses


def global_loss(outputs: Any, inputs: dict[str, Tensor]) -> tuple[Tensor, Tensor]:
    """Return the sum over tokens and their number: exact for a global batch under any layout."""
    logits, labels = outputs.logits[:, :-1].flatten(0, 1), inputs["labels"][:, 1:].flatten()
    return torch.nn.functional.cross_entropy(logits, labels, reduction="sum"), torch.tensor(len(labels))


def custom_schedule() -> HybridParallelPlugin:
    """Make a custom schedule: both microbatches forward, and backward in reverse order."""
    schedule = [
        [
            *(Action(Op.FORWARD, stage, microbatch) for microbatch in (0, 1)),
            *(Action(Op.BACKWARD, stage, microbatch) for microbatch in (1, 0)),
        ]
        for stage in (0, 1)
    ]
    return hybrid(pp_size=2, pp_style=schedule)


def from_internevo() -> HybridParallelPlugin:
    """Make a plugin by InternEvo's names for weight parallelism with sharded sequences."""
    parallel = dict(tensor=dict(size=2, mode="isp"), weight=dict(size=2))
    settings = dict(data=dict(micro_num=2), model=dict(dtype="torch.float32"), parallel=parallel)
    return HybridParallelPlugin.from_config(settings)


ONE_LAYER = PipelineGradientCheckpointConfig(num_ckpt_layers_per_stage=[1])
SCRIPTS = {
    "ShardFormer in a plain loop": Script(plugin=partial(shard_former, tensor_parallel_size=2)),
    "an own schedule": Script(plugin=custom_schedule),
    "InternEvo's configuration": Script(plugin=from_internevo),
    "LowLevelZeroPlugin": Script(plugin=partial(LowLevelZeroPlugin, stage=2, precision="fp32")),
    "TorchDDPPlugin": Script(plugin=TorchDDPPlugin, by_calls=True),
    "TorchFSDPPlugin": Script(plugin=partial(TorchFSDPPlugin, precision="fp32"), by_calls=True),
    "a loss exact over the global batch": Script(
        plugin=partial(hybrid, zero_stage=1, tp_size=1), criterion=global_loss
    ),
    "recomputed layers, by a number": Script(
        plugin=partial(hybrid, tp_size=2, gradient_checkpoint_config=ONE_LAYER)
    ),
    "a model built without memory": Script(
        plugin=partial(hybrid, tp_size=2, pp_size=2), num_ranks=4, building=LazyInitContext
    ),
}
