"""A draw trained by a plain loop and by Echelon's public names alone, and the saved tensors of both compared."""

import operator
from collections.abc import Callable
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import torch
from safetensors import safe_open
from safetensors.torch import load_file
from torch import Tensor

from echelon import (
    Booster,
    HybridParallelPlugin,
    LazyInitContext,
    PipelineGradientCheckpointConfig,
    launch_from_torch,
)
from echelon.verify.batch import make_batch
from echelon.verify.model_choice import VOCABULARY, ModelChoice

from .draw import FAMILIES, OPTIMIZERS, Draw

STEPS = 2  # of each half
Batch = dict[str, Tensor]
# float32 sums in another order, over four steps: a wrong gradient, mask or state changes a hundred times as much. It is
# of the largest entry of a tensor, or of a thousandth of the largest of all: some gradients are zero but for rounding.
ALLOWED = 1e-3
LOSS_ALLOWED = 2e-5  # relative


def batch_of(draw: Draw, step: int) -> Batch:
    """All samples of a step."""
    chance = torch.Generator().manual_seed(1000 * draw.seed + step)
    kind, shape = FAMILIES[draw.family].data, (draw.samples, draw.length)
    if kind == "images":
        choice = ModelChoice(model_type=draw.family)
        return make_batch(choice, num_samples=draw.samples, seed=1000 * draw.seed + step)
    tokens = torch.randint(3, VOCABULARY, shape, generator=chance)
    batch = dict(input_ids=tokens, labels=tokens.clone())
    if kind == "seq2seq":
        batch["labels"] = torch.randint(3, VOCABULARY, (draw.samples, 7), generator=chance)
    if kind == "masked":
        hidden = torch.rand(shape, generator=chance) < 0.4
        hidden[:, 4] = True
        batch["labels"] = torch.where(hidden, tokens, -100)
    if draw.texts == "packed":
        ends = torch.randint(3, draw.length - 3, (draw.samples, 1), generator=chance)
        place = torch.arange(draw.length).expand(shape)
        batch["position_ids"] = torch.where(place < ends, place, place - ends)
    elif draw.texts != "whole":
        empty = torch.randint(0, 5, (draw.samples, 1), generator=chance)
        place = torch.arange(draw.length).expand(shape)
        kept = place >= empty if draw.texts == "left" else place < draw.length - empty
        batch["attention_mask"] = kept.long()
        if kind != "seq2seq":
            batch["labels"] = torch.where(kept, batch["labels"], -100)
    return batch


def criterion_of(draw: Draw) -> Callable | None:
    """The criterion that `execute_pipeline` is given: None for the model's own loss, else (loss_sum, weight)."""

    def of_tokens(outputs: Any, inputs: Batch) -> tuple[Tensor, Tensor]:
        weight = torch.tensor(float(_weight(draw, inputs)))
        return outputs.loss * weight, weight

    return of_tokens if draw.criterion == "tokens" else None


def plain_run(draw: Draw) -> tuple[list[float], dict[str, Tensor], dict[str, Tensor]]:
    """Train on one process without Echelon. Return losses, the model's state and the optimizer's, both by name."""
    model = draw.build(draw.seed)
    optimizer = _optimizer(draw, model)
    losses = []
    for step in range(2 * STEPS):
        layout = draw.halves[step // STEPS]
        parts = [
            _cut(replica, layout.num_microbatches)
            for call in _cut(batch_of(draw, step), layout.num_calls)
            for replica in _cut(call, layout.num_replicas)
        ]
        losses.append(_accumulate(draw, model, parts))
        if max_norm := layout.arguments["max_norm"]:
            torch.nn.utils.clip_grad_norm_(model.parameters(), max_norm)
        optimizer.step()
        optimizer.zero_grad()
    states = {
        f"{state}/{name}": value
        for name, parameter in model.named_parameters()
        for state, value in optimizer.state[parameter].items()
        if isinstance(value, Tensor) and value.dim()
    }
    return losses, dict(model.state_dict()), states


def parallel_half(draw: Draw, half: int, folder: Path) -> list[float]:
    """Train one half under its layout, on each rank of the world; the second goes on from the folder."""
    launch_from_torch(seed=draw.seed)
    layout = draw.halves[half]
    recomputed = (
        PipelineGradientCheckpointConfig(gradient_checkpointing_ratio=layout.recomputed)
        if layout.recomputed
        else None
    )
    plugin = HybridParallelPlugin(precision="fp32", gradient_checkpoint_config=recomputed, **layout.arguments)
    booster = Booster(plugin=plugin)
    with LazyInitContext() if draw.is_lazy else nullcontext():
        model = draw.build(draw.seed + half)  # the second half's weights come from the checkpoint alone
    boosted, optimizer, criterion, _, _ = booster.boost(model, _optimizer(draw, model), criterion_of(draw))
    if half:
        booster.load_checkpoint(folder, model=boosted, optimizer=optimizer, resume=STEPS)
    losses = []
    for step in range(half * STEPS, (half + 1) * STEPS):
        losses_of_step, weights = [], []
        for call in _cut(batch_of(draw, step), layout.num_calls):
            batch = _cut(call, layout.num_replicas)[plugin.data_rank[0]]
            result = booster.execute_pipeline(iter([batch]), boosted, criterion, optimizer)
            losses_of_step.append(result["loss"].item())
            weights.append(_weight(draw, call))
        losses.append(sum(map(operator.mul, losses_of_step, weights)) / sum(weights))
        optimizer.step()
        optimizer.zero_grad()
    booster.save_checkpoint(folder, (half + 1) * STEPS, model=boosted, optimizer=optimizer).wait()
    return losses


def saved(folder: Path) -> tuple[dict[str, Tensor], dict[str, Tensor]]:
    """Return the weights and the optimizer's states of a checkpoint of all steps, read without Echelon."""
    step = folder / f"step-{2 * STEPS:08}"
    weights: dict[str, Tensor] = {}
    for file in (step / "model").glob("*.safetensors"):
        weights |= load_file(file)
    boxes: dict[str, list[tuple[list[int], Tensor]]] = {}
    for file in (step / "optimizer").glob("*.safetensors"):
        with safe_open(file, "pt") as opened:
            for key in opened.keys():  # noqa: SIM118  # it is no mapping
                name, _, offset = key.rpartition("@")
                place = [int(coordinate) for coordinate in offset.split(",")]
                boxes.setdefault(name, []).append((place, opened.get_tensor(key)))
    return weights, {name: _assembled(of_name) for name, of_name in boxes.items()}


def departures(draw: Draw, losses: list[list[float]], folder: Path) -> list[str]:
    """Compare what each rank's losses and the folder hold with the plain loop: all differences, a line each."""
    plain_losses, plain_weights, plain_states = plain_run(draw)
    lines = [
        f"loss of step {step} on rank {rank}: {loss} instead of {plain}"
        for rank, of_rank in enumerate(losses)
        for step, (loss, plain) in enumerate(zip(of_rank, plain_losses, strict=True))
        if not abs(loss - plain) <= LOSS_ALLOWED * max(1.0, abs(plain))
    ]
    weights, states = saved(folder)
    missing = _pointers(plain_weights, set(plain_weights)) - _pointers(plain_weights, set(weights))
    if missing or set(weights) - set(plain_weights):
        lines.append(f"saved weights are {sorted(weights)} instead of {sorted(plain_weights)}")
    if set(states) != set(plain_states):
        lines.append(f"saved states differ in {sorted(set(states) ^ set(plain_states))}")
    for kind in ("", *sorted({name.partition("/")[0] for name in states})):
        tensors = states if kind else weights
        expected = plain_states if kind else plain_weights
        lines += _distances(
            tensors, expected, [name for name in tensors if name.startswith(kind) and name in expected]
        )
    return lines


def checked(draw: Draw, run: Callable[..., list[list[float]]], folder: Path) -> list[str]:
    """Train both halves by `run(world_size, function, *arguments)`, which returns each rank's result, and compare."""
    first, second = (
        run(layout.world_size, parallel_half, draw, half, folder) for half, layout in enumerate(draw.halves)
    )
    pairs = [
        (first[rank % len(first)], second[rank % len(second)]) for rank in range(max(len(first), len(second)))
    ]
    return departures(draw, [before + after for before, after in pairs], folder)


def reproduction(draw: Draw) -> str:
    """Lines that run one draw again."""
    return f"python -m tests.fuzz <<'EOF'\n{draw!r}\nEOF"


def _distances(tensors: dict[str, Tensor], expected: dict[str, Tensor], names: list[str]) -> list[str]:
    """Return a line for each named tensor that is too far from the expected one."""
    peaks = {name: expected[name].abs().max().item() for name in names}
    least = 1e-3 * max(peaks.values(), default=0.0)
    lines = []
    for name in names:
        if tensors[name].shape != expected[name].shape:
            lines.append(f"{name}: shape {tensors[name].shape} instead of {expected[name].shape}")
            continue
        distance = (tensors[name] - expected[name]).abs().max().item()
        if not distance <= ALLOWED * max(peaks[name], least):  # not a number is no agreement
            lines.append(f"{name}: off by {distance:.3g} of {peaks[name]:.3g}")
    return lines


def _optimizer(draw: Draw, model: torch.nn.Module) -> torch.optim.Optimizer:
    trained = [parameter for parameter in model.parameters() if parameter.requires_grad]
    optimizer: torch.optim.Optimizer = getattr(torch.optim, draw.optimizer)(
        trained, **OPTIMIZERS[draw.optimizer]
    )
    return optimizer


def _cut(batch: Batch, number: int) -> list[Batch]:
    """So many parts of a batch, of which the first are one sample longer where it does not divide."""
    parts = {name: value.tensor_split(number) for name, value in batch.items()}
    return [{name: of_name[index] for name, of_name in parts.items()} for index in range(number)]


def _weight(draw: Draw, batch: Batch) -> int:
    """The share of a part of a batch in the loss of all of it: the number of its labels that count."""
    first = 1 if FAMILIES[draw.family].data == "causal" else 0  # nothing predicts the first token
    return int((batch["labels"][..., first:] != -100).sum())


def _accumulate(draw: Draw, model: torch.nn.Module, parts: list[list[Batch]]) -> float:
    """Add up the gradients of a step, and return its loss."""
    criterion = criterion_of(draw)
    if criterion is None:
        batches = [batch for replica in parts for batch in replica]
        loss = model(**{name: torch.cat([batch[name] for batch in batches]) for name in batches[0]}).loss
        loss.backward()
        return float(loss.item())
    # of the whole batch: sums of all parts before anything is differentiated
    sums = [criterion(model(**batch), batch) for replica in parts for batch in replica]
    loss = sum(total for total, _ in sums) / sum(weight for _, weight in sums)
    loss.backward()
    return float(loss.item())


def _pointers(weights: dict[str, Tensor], names: set[str]) -> set[int]:
    """The memory of named tensors: tied ones, of which one is saved, share it."""
    return {weights[name].data_ptr() for name in names & weights.keys()}


def _assembled(boxes: list[tuple[list[int], Tensor]]) -> Tensor:
    """A tensor put together from boxes at offsets."""
    ends = [[start + size for start, size in zip(place, box.shape, strict=True)] for place, box in boxes]
    tensor = torch.full([max(of_dim) for of_dim in zip(*ends, strict=True)], torch.nan)
    for place, box in boxes:
        tensor[tuple(slice(start, start + size) for start, size in zip(place, box.shape, strict=True))] = box
    return tensor
