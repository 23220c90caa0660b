"""The reference: a plain torch training loop in one process.

It imports nothing of Echelon, to share none of its bugs.
"""

import copy
import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from itertools import chain
from math import isfinite
from typing import Any
from unittest.mock import patch

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils._pytree import tree_map_only
from transformers import PreTrainedModel

# Of outputs and microbatch: a loss, or (loss_sum, weight).
Criterion = Callable[[Any, Any], Tensor | tuple[Tensor, Tensor]]
# The weight of a microbatch, from it and from the divisors of its mean losses, see `mean_divisors`.
Weigh = Callable[[Mapping[str, Tensor], Sequence[int]], float]


@dataclass(frozen=True, kw_only=True)
class StepRecord:
    """The numbers of one training step.

    Args:
        loss: of the global batch.
        norm: the norm of all gradients, before clipping.
        gradients: by parameter name, before clipping, float32.
        weights: by parameter name, after the step, float32 (in 16 bits the master weights of trained parameters).
        loss_scale: the loss scale of the step's backwards.
        skipped: the number of skipped steps so far, including this one; their gradients were not finite.
        unequal_copies: weights whose replicas differ between two ranks after the step.
    """

    loss: float
    norm: float
    gradients: dict[str, Tensor]
    weights: dict[str, Tensor]
    loss_scale: float = 1.0
    skipped: float = 0
    unequal_copies: tuple[str, ...] = ()


def train(
    model: nn.Module,
    steps: Sequence[Sequence[Sequence[dict[str, Tensor]]]],
    *,
    make_optimizers: Callable[[nn.Module], Sequence[torch.optim.Optimizer]],
    criterion: Criterion,
    dtypes: Sequence[torch.dtype],
    max_norm: float = 0.0,
    loss_scale: float = 1.0,
    float32_scale: float = 1.0,
    overflow_step: int | None = None,
    weigh: Weigh | None = None,
) -> list[StepRecord]:
    """Train a copy of the model in one process, which computes the global batch at once.

    With a 16-bit dtype a copy in that dtype computes, gradients are accumulated in float32, and the optimizer
    updates float32 weights that are copied back. A step with non-finite gradients updates nothing, and in
    fp16 halves the loss scale.

    Args:
        model: float32, on the device of the computation; not changed. Records are on the CPU.
        steps: by step and by replica, the microbatches.
        make_optimizers: builds the optimizers of a model, which step in a row.
        criterion: a function of outputs and microbatch that returns a loss, or (loss_sum, weight).
        dtypes: by step, its format. The loss scale of fp16 is new where the format changes.
        max_norm: clip to this norm; 0 disables clipping.
        loss_scale: the initial loss scale in fp16; gradients are divided by it.
        float32_scale: the scale in float32; one that is no power of two changes the roundings of backward.
        overflow_step: the step in which the last replica's gradients are not finite.
        weigh: weighs a microbatch whose criterion does not. Microbatches are then computed one by one: for losses that
            are no sum over samples, or for equal bits.
    """
    masters = copy.deepcopy(model)
    optimizers = make_optimizers(masters)
    records: list[StepRecord] = []
    skipped = 0
    for index, (replicas, dtype) in enumerate(zip(steps, dtypes, strict=True)):
        if index == 0 or dtype is not dtypes[index - 1]:
            worker = computing_copy(masters, dtype)
            scale = {torch.float16: loss_scale, torch.float32: float32_scale}.get(dtype, 1.0)
        if weigh is not None:
            microbatches = list(chain.from_iterable(replicas))
        else:  # each with the samples of all replicas
            microbatches = [_joined(of_replicas) for of_replicas in zip(*replicas, strict=True)]
        loss, gradients = _gradients(
            worker,
            microbatches,
            criterion=criterion,
            scale=scale,
            overflows=index == overflow_step,
            weigh=weigh,
        )
        norm = _norm(gradients)
        if isfinite(norm):
            _update(masters, optimizers, gradients, norm=norm, max_norm=max_norm)
        else:
            skipped += 1
        records.append(
            StepRecord(
                loss=loss,
                norm=norm,
                gradients=gradients,
                weights=_copy_weights(masters, worker),
                loss_scale=1.0 if dtype is torch.float32 else scale,
                skipped=skipped,
            )
        )
        if dtype is torch.float16 and not isfinite(norm):
            scale /= 2
    return records


def _gradients(
    worker: nn.Module,
    microbatches: Sequence[dict[str, Tensor]],
    *,
    criterion: Criterion,
    scale: float,
    overflows: bool,
    weigh: Weigh | None,
) -> tuple[float, dict[str, Tensor]]:
    """Return the loss, and the float32 gradients of all parameters that have one, without the scale.

    Without `weigh` the microbatches, each with the samples of all replicas, are computed as one batch.

    The sum of the weights is known only after the last forward. So losses are divided by a power of two near it before
    backward, which rounds nothing and keeps gradients in the range of 16 bits. The sums are corrected in float32.
    """
    sums: dict[str, Tensor] = {}
    losses, weights, divisor = [], [], 0.0
    batches = [_joined(microbatches)] if weigh is None else microbatches
    for index, batch in enumerate(batches):
        loss_sum, weight = _loss_and_weight(worker, batch, microbatches, criterion=criterion, weigh=weigh)
        losses.append(loss_sum.detach().float())
        weights.append(weight)
        divisor = divisor or 2.0 ** int(math.log2(max(weight * len(batches), 1.0)))
        if overflows and index == len(batches) - 1:
            loss_sum.register_hook(lambda gradient: gradient * float("inf"))
        (loss_sum / divisor * scale).backward()
        _move_gradients(worker, sums)
    factor = (torch.tensor(divisor) / sum(weights)).item() / scale
    total = torch.stack(losses).sum() / sum(weights)
    return total.item(), {name: (gradient * factor).cpu() for name, gradient in sums.items()}


@contextmanager
def _as_one_process() -> Iterator[None]:
    """Within, a loss that adds numbers of all ranks (RF-DETR's boxes) has those of this one: the others wait."""
    with (
        patch.object(dist, "all_reduce", lambda *_, **__: None),
        patch.object(dist, "get_world_size", lambda *_: 1),
    ):
        yield


@_as_one_process()
def _loss_and_weight(
    worker: nn.Module,
    batch: dict[str, Tensor],
    microbatches: Sequence[dict[str, Tensor]],
    *,
    criterion: Criterion,
    weigh: Weigh | None,
) -> tuple[Tensor, float]:
    """Return a batch's loss summed over its labels (mean times weight), and its weight (their number).

    An auxiliary loss of experts is no mean over labels: it is the mean over microbatches, even if these are computed
    as one batch.

    Args:
        worker: the computing model.
        batch: one of the microbatches; without `weigh` all of them together.
        microbatches: all microbatches.
        criterion, weigh: see `train`.
    """
    like = next(worker.parameters())
    batch = converted(batch, like)
    with mean_divisors() as divisors:
        outputs = worker(**batch)
        returned = criterion(outputs, batch)
    if isinstance(returned, tuple):
        loss_sum, weight = returned[0], float(returned[1])
    else:
        is_sum = bool(divisors) and not any(divisors)
        if is_sum and weigh is not None:  # sums of microbatches add up: all their weights together are 1
            return returned.float(), 1 / len(microbatches)
        weight = float(1.0 if weigh is None else weigh(batch, divisors))
        loss_sum = returned.float() * weight
    if weigh is None and (auxiliary := _auxiliary(outputs)) is not None:
        by_microbatch = [_auxiliary(worker(**converted(microbatch, like))) for microbatch in microbatches]
        config: Any = worker.config
        # The loss contains the auxiliary loss of the one batch. The mean over microbatches replaces it.
        change = torch.stack(by_microbatch).mean() - auxiliary  # type: ignore[arg-type]  # they have it if the batch has
        loss_sum = loss_sum + config.router_aux_loss_coef * change * weight
    return loss_sum, weight


def _auxiliary(outputs: Any) -> Tensor | None:
    """Return the auxiliary loss of experts, of encoder and decoder together; None for Switch's, means over samples."""
    of_encoder = getattr(outputs, "encoder_aux_loss", None)
    if of_encoder is None:
        return getattr(outputs, "aux_loss", None)
    if outputs.encoder_z_loss is not None:
        return None
    total: Tensor = of_encoder + outputs.decoder_aux_loss
    return total


def _move_gradients(worker: nn.Module, sums: dict[str, Tensor]) -> None:
    """Add the gradients to float32 sums by name, and drop them."""
    for name, parameter in worker.named_parameters():
        if parameter.grad is not None:
            added = parameter.grad.float()
            sums[name] = added if name not in sums else sums[name] + added
            parameter.grad = None


@_as_one_process()
def is_one_mean(model: nn.Module, microbatch: dict[str, Tensor], criterion: Criterion) -> bool:
    """Return True if the loss of a microbatch is one mean, or a sum of means over equally many labels.

    Only then do microbatches, each weighed by its number of labels, give the loss of their batch.
    """
    worker = copy.deepcopy(model)
    microbatch = converted(microbatch, next(worker.parameters()))
    with torch.no_grad(), mean_divisors() as divisors:
        outputs = worker(**microbatch)
        criterion(outputs, microbatch)
    return len(set(divisors)) < 2 and 0 not in divisors and _auxiliary(outputs) is None


@contextmanager
def mean_divisors() -> Iterator[list[int]]:
    """Yield a list, to which every call of a loss function of torch adds the divisor of its mean; 0 for a sum."""
    divisors: list[int] = []
    with ExitStack() as stack:
        for name, count in _COUNTS.items():
            stack.enter_context(patch.object(F, name, _recording(getattr(F, name), count, divisors)))
        yield divisors


def _recording(function: Callable[..., Tensor], count: Callable[..., int], divisors: list[int]) -> Any:
    def recorded(scores: Tensor, target: Tensor, *arguments: Any, **options: Any) -> Tensor:
        divisors.append(0 if options.get("reduction") == "sum" else count(scores, target, options))
        return function(scores, target, *arguments, **options)

    return recorded


def _labels(scores: Tensor, target: Tensor, options: Mapping[str, Any]) -> int:
    return int((target != options.get("ignore_index", -100)).sum())


def _entries(scores: Tensor, target: Tensor, options: Mapping[str, Any]) -> int:
    return target.numel()


def _sounds(scores_PBV: Tensor, target: Tensor, options: Mapping[str, Any]) -> int:
    return scores_PBV.shape[1]


_COUNTS = {
    "cross_entropy": _labels,
    "binary_cross_entropy_with_logits": _entries,
    "mse_loss": _entries,
    "ctc_loss": _sounds,
}


def converted(batch: Mapping[str, Any], parameter: Tensor) -> dict[str, Any]:
    """Return a batch on the device of a parameter, and floating-point tensors in its format."""

    def moved(tensor: Tensor) -> Tensor:
        return tensor.to(parameter if tensor.is_floating_point() else parameter.device)

    return tree_map_only(Tensor, moved, dict(batch))


def _joined(batches: Sequence[dict[str, Tensor]]) -> dict[str, Tensor]:
    """Return one batch of all samples; batches without images have None, or no such tensor."""
    joined: dict[str, Tensor] = {}
    for name in dict.fromkeys(chain.from_iterable(batches)):
        values = [batch[name] for batch in batches if batch.get(name) is not None]
        joined[name] = torch.cat(values) if isinstance(values[0], Tensor) and values[0].dim() else values[0]
    return joined


def _norm(gradients: Mapping[str, Tensor]) -> float:
    """Return the norm of all gradients together."""
    # In float64: torch's own float32 sum loses 1e-3 of the norm of 24 million entries on CPUs.
    norms = [torch.linalg.vector_norm(g, dtype=torch.float64) for g in gradients.values()]
    return torch.linalg.vector_norm(torch.stack(norms)).item()


def _update(
    masters: nn.Module,
    optimizers: Sequence[torch.optim.Optimizer],
    gradients: dict[str, Tensor],
    *,
    norm: float,
    max_norm: float,
) -> None:
    """Clip the gradients, step the optimizers of the master weights, and drop the gradients."""
    for name, parameter in masters.named_parameters():
        parameter.grad = gradients[name].to(parameter.device, copy=True) if name in gradients else None
    if max_norm > 0:
        torch.nn.utils.clip_grads_with_norm_(masters.parameters(), max_norm, torch.tensor(norm))
    for optimizer in optimizers:
        optimizer.step()
    masters.zero_grad()


@torch.no_grad()
def _copy_weights(masters: nn.Module, worker: nn.Module) -> dict[str, Tensor]:
    """Copy the master weights into the computing model; return copies of them, and of frozen computing parameters."""
    weights = {}
    for (name, master), parameter in zip(masters.named_parameters(), worker.parameters(), strict=True):
        if worker is not masters:
            parameter.copy_(master)
        weights[name] = (master if master.requires_grad else parameter).detach().float().clone().cpu()
    return weights


def computing_copy(masters: nn.Module, dtype: torch.dtype) -> nn.Module:
    """Return the computing model: the masters themselves, or a copy of another dtype, as boost casts it."""
    if dtype is torch.float32:
        return masters
    worker = copy.deepcopy(masters)
    for parameter in worker.parameters():
        parameter.data = parameter.data.to(dtype)
    _cast_tables(worker, dtype)
    return worker


def _cast_tables(worker: Any, dtype: torch.dtype) -> None:
    """Cast buffers that no file contains as they are in a model of this dtype: tables, not single numbers."""
    if not isinstance(worker, PreTrainedModel):
        return
    with torch.device("meta"):
        outline = type(worker)._from_config(copy.deepcopy(worker.config), dtype=dtype)
    formats = {name: buffer.dtype for name, buffer in outline.named_buffers()}
    for name in formats.keys() - worker.state_dict().keys():
        path, _, attribute = name.rpartition(".")
        module = worker.get_submodule(path)
        if module._buffers[attribute].ndim > 1:
            module._buffers[attribute] = module._buffers[attribute].to(formats[name])
