"""Run a batch through the pipeline: compare it between ranks, split it, run the schedule, reduce the loss."""

import logging
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, suppress
from itertools import compress
from typing import Any, NamedTuple
from weakref import WeakKeyDictionary

import torch
import torch.distributed as dist
from torch import Tensor, nn

from ..cluster.agree import batch_hash, broadcast_object, differing_ranks, gather_integers
from ..cluster.errors import raise_errors
from ..cluster.failures import rename_call, wait_for_all_ranks
from ..cluster.mesh import PARTS_OF_DATA, ParallelMesh
from ..cluster.random import ForwardRandom
from ..cluster.step_agreement import COMPARED_CALLS, StepAgreement
from ..pipeline.action import Action, Op, Schedule
from ..pipeline.communicate import with_communication
from ..pipeline.known_masks import with_known_masks
from ..pipeline.microbatch import batch_size, map_tensors, merge, microbatch_lengths, num_bytes, split
from ..pipeline.plan import setting_errors
from ..pipeline.runner import Criterion, RunResult, ScheduleRun, Trace
from ..pipeline.schedules import forward_only
from ..pipeline.simulate import Span
from ..pipeline.stage import local_stages
from ..pipeline.transport import Transport
from ..shardformer.layers.batch_norm import has_sync_batch_norm
from ..shardformer.layers.deferred_linear import defer_weight_gradients
from ..shardformer.layers.loss import ShardedLogits
from ..zero.optimizer import ShardedOptimizer
from .base import PipelineLoss, Returned
from .hybrid_config import HybridConfig

_LOG = logging.getLogger("echelon")
_ENDED = object()
_HASHED_HERE = 2**20  # bytes of a batch; a CPU takes about a millisecond for as many


def model_loss(outputs: Any, inputs: Any) -> Tensor:
    """Return the loss that a model computes from the labels in its inputs."""
    loss = outputs.get("loss") if isinstance(outputs, Mapping) else getattr(outputs, "loss", None)
    if loss is None:
        raise ValueError(
            "the model's outputs contain no loss: give labels in the batch, or a criterion of (outputs, inputs)"
        )
    return loss


class PipelineEngine:
    """Runs batches through this rank's stages; one per boosted model. Construction is collective over the world.

    Args:
        module: this rank's stages of the model.
        config: the microbatches and their schedule.
        mesh: the mesh.

    Attributes:
        random: random numbers of forwards in training.
        agreement: comparison of batches and settings between ranks.
        parameters: by stage, the parameters that no other stage of this rank uses.
        trace: a list to which every batch appends the times of this rank's actions; None measures nothing.
    """

    def __init__(self, module: nn.Module, config: HybridConfig, mesh: ParallelMesh) -> None:
        self.module, self.config, self.mesh = module, config, mesh
        self._stages, self._cutting = local_stages(module), config.cutting
        self._last_rank = config.stage_ranks[-1]
        self.random = ForwardRandom(mesh)
        self.agreement = StepAgreement(mesh, config.check_every)
        self._weight_gradients = defer_weight_gradients(module) if config.splits_backward else None
        uses = Counter(each for stage in self._stages.values() for each in stage.parameters())
        self.parameters = {
            index: [each for each in stage.parameters() if uses[each] == 1]
            for index, stage in self._stages.items()
        }
        self._transport = (
            Transport(mesh, config.stage_ranks, overlap=config.overlap_p2p) if mesh.size("pp") > 1 else None
        )
        self._schedules: dict[tuple[int, bool], Schedule] = {}
        # The kind of the last compared training call, as this rank and as its replica requested it.
        self._own_kind = self._replica_kind = _CallKind(
            trains=True, loss=True, outputs=False, outputs_everywhere=False, training_mode=True
        )
        self._mean_samples = 1.0  # samples per rank in the last compared call
        self._is_even = False  # True if all ranks ran the same number of microbatches in that call
        # True for criteria that return weights in training.
        self._is_weighted: WeakKeyDictionary[Any, bool] = WeakKeyDictionary()
        self._first_weight = 1.0  # samples of a replica in the first call of an optimizer step
        # Settings with a collective over replicas in every microbatch: all must run the same number.
        self._microbatch_collectives = [
            *(f"{axis}_size={size}" for axis in PARTS_OF_DATA if (size := mesh.size(axis)) > 1),
            *["SyncBatchNorm"] * has_sync_batch_norm(module),
        ]
        # True if the number of collectives depends on the number of samples in each rank's batch.
        self._compares_numbers = config.microbatch_size is not None and (
            config.zero_stage == 2 or bool(self._microbatch_collectives)
        )
        self._equal_batches: list[bool] = []
        self._has_noted_outputs = False
        self.trace: list[Span] | None = None

    def run(
        self,
        data_iter: Iterator,
        criterion: Criterion | None,
        optimizer: ShardedOptimizer | None,
        *,
        return_loss: bool,
        return_outputs: Returned,
        average_loss: bool,
    ) -> dict[str, Any]:
        """Run one batch, with backward if gradients are enabled; see `HybridParallelPlugin.execute_pipeline`.

        Must be called within `ShardedOptimizer.accumulate_and_reduce`: each stage's last backward starts reductions,
        and the end of that context starts the remaining ones.
        """
        trains = torch.is_grad_enabled()
        own = _CallKind(
            trains=trains,
            loss=return_loss or trains,
            outputs=bool(return_outputs),
            outputs_everywhere=return_outputs == "all_ranks",
            training_mode=self.module.training,
        )
        batch, moved, wanted = self._next_batch(data_iter, own)
        microbatches = split(with_known_masks(moved, batch, self.module), **self._cutting)
        follows_weighted = optimizer is not None and isinstance(optimizer.gradient_factor, Tensor)
        if trains and not follows_weighted:
            self._first_weight = self._mean_samples
        weighting = _Weighting(criterion or model_loss, len(microbatches), self._first_weight)
        result = self._run_schedule(microbatches, weighting, optimizer, wanted)
        mean, own_loss = self._losses(result, weighting, optimizer, wanted) if wanted.loss else (None, None)
        loss = mean if average_loss else own_loss
        if trains and loss is not None:
            loss = loss.as_subclass(PipelineLoss)
        return {
            "loss": loss if return_loss else None,
            "outputs": self._returned_outputs(result, own, wanted),
        }

    def _run_schedule(
        self,
        microbatches: Sequence[Any],
        weighting: "_Weighting",
        optimizer: ShardedOptimizer | None,
        wanted: "_CallKind",
    ) -> RunResult:
        """Run this rank's actions of the schedule."""
        schedule = self._schedule(len(microbatches), trains=torch.is_grad_enabled())
        trace = None if self.trace is None else Trace(self.mesh.device)
        with self.random.following(self.module) as begin_forward:
            run = ScheduleRun(
                stages=self._stages,
                microbatches=microbatches,
                criterion=weighting if wanted.loss else None,
                transport=self._transport,
                scale=lambda loss: weighting.share(loss if optimizer is None else optimizer.scale_loss(loss)),
                keep_outputs=wanted.outputs,
                before_forward=begin_forward,
                weight_gradients=self._weight_gradients,
                around_backward=None if optimizer is None else self._accumulating(optimizer),
                trace=trace,
            )
            result = run.run(schedule[self.mesh.rank("pp")])
        if trace is not None and self.trace is not None:
            self.trace += trace.spans()
        return result

    def _schedule(self, num_microbatches: int, *, trains: bool) -> Schedule:
        """Return the schedule of a number of microbatches, with its communication. All-gather over pp when it is new.

        Raises:
            ValueError: the ranks of the pipeline have different schedules; on each of them.
        """
        key = num_microbatches, trains
        if key in self._schedules:
            return self._schedules[key]
        computations = self.config.schedule(num_microbatches)
        computations = computations if trains else forward_only(computations)
        schedule = with_communication(computations, ahead=self.config.overlap_p2p)
        codes = gather_integers((batch_hash(repr(schedule)),), self.mesh.group("pp"))
        if differing := differing_ranks(codes):
            raise ValueError(
                f"the schedule for {num_microbatches} microbatches on pipeline rank(s) {differing} differs from that "
                "on the first: pp_style must give every rank the same lists, which hold all ranks' actions"
            )
        return self._schedules.setdefault(key, schedule)

    def _accumulating(self, optimizer: ShardedOptimizer) -> Callable[[Action, bool], AbstractContextManager]:
        """The context of each backward. Only the last reduces if replicas run different numbers of microbatches."""
        is_even = self._is_even

        def around_backward(action: Action, is_last: bool) -> AbstractContextManager:
            parameters = self.parameters[action.stage]
            if is_last:
                return optimizer.reducer.last_backward(parameters)
            if not is_even or action.op is Op.BACKWARD_INPUT:  # its weight gradients follow in another action
                return optimizer.reducer.accumulating()
            return optimizer.reducer.every_backward(parameters)

        return around_backward

    def check_open(self) -> None:
        """Raise RuntimeError if an earlier step was interrupted, so that no rank waits for one that raises."""
        if self._transport is not None:
            self._transport.check_open()

    def _next_batch(self, data_iter: Iterator, own: "_CallKind") -> tuple[Any, Any, "_CallKind"]:
        """Take the next batch, and compare the call between ranks; see [Note: compared calls].

        Returns:
            The batch, the same on the device, and the call's kind for the replica.

        Raises:
            StopIteration: the iterators of all ranks have ended.
            ValueError: those of some ranks have ended, batches differ within a replica or are too small, or only some
                ranks train.
        """
        if not isinstance(data_iter, Iterator):
            raise TypeError(
                f"execute_pipeline takes an iterator, not a {type(data_iter).__name__}: give iter(dataloader)"
            )
        batch = next(data_iter, _ENDED)
        has_batch = batch is not _ENDED
        is_compared = self.agreement.is_due() or not own.trains or self._compares_numbers
        if not is_compared and has_batch and own != self._own_kind:
            if own.training_mode != self._own_kind.training_mode:
                mode = "training" if own.training_mode else "evaluation"
                rename_call(f"execute_pipeline in {mode} mode, unlike the previous call")
            wait_for_all_ranks()  # ranks whose call is as before never enter this
            is_compared = True
        if is_compared:
            wanted = self._compare(batch if has_batch else None, has_batch, own)
            return batch, self.to_compute(batch), wanted
        if not has_batch:
            rename_call("execute_pipeline at the end of its data")
            wait_for_all_ranks()
            raise StopIteration
        rename_call("execute_pipeline in training")  # a rank that evaluates has another name
        self._check_batch(batch, {self.mesh.global_rank: batch_size(batch)})
        moved = self.to_compute(batch)
        hashed = moved if num_bytes(batch) > _HASHED_HERE else batch  # on the device, without waiting for it
        self.agreement.note(hashed)
        return batch, moved, self._replica_kind

    def _compare(self, batch: Any, has_batch: bool, own: "_CallKind") -> "_CallKind":
        """Compare batches and kinds of calls, and store the result for later calls. All-gather between CPUs.

        Returns: the kind of the call for this replica.
        """
        is_first = own.trains and len(self._equal_batches) < COMPARED_CALLS and self.mesh.size("dp") > 1
        is_hashed = has_batch and (is_first or self.mesh.size("pp", "sp", "tp") > 1)
        noted = (batch_hash(batch) if is_hashed else 0, batch_size(batch) if has_batch else 0)
        rows = gather_integers((int(has_batch), self.mesh.rank("dp"), *noted, *map(int, own)))
        have, replicas, codes, samples, trains, losses, outputs, everywhere, modes = zip(*rows, strict=True)
        _require_same_calls(have, trains, modes)
        is_own = [each == self.mesh.rank("dp") for each in replicas]
        wanted = _CallKind(
            trains=any(trains),
            loss=any(losses),  # its reduction needs all ranks, also those that want none
            outputs=any(compress(outputs, is_own)),
            outputs_everywhere=any(compress(everywhere, is_own)),
            training_mode=own.training_mode,
        )
        if own.trains:
            self._own_kind, self._replica_kind = own, wanted
        self.agreement.require_equal_batches(list(zip(replicas, codes, strict=True)))
        if is_first:
            self._note_replicas(are_equal=len(set(codes)) == 1)
        self._check_batch(batch, dict(enumerate(samples)))
        self._mean_samples = sum(samples) / len(samples)
        self._is_even = len({self._num_microbatches(count) for count in samples}) == 1
        if not self._is_even:
            self._check_sharing_ranks(samples)
        return wanted

    def _num_microbatches(self, samples: int) -> int:
        return len(microbatch_lengths(samples, **self._cutting))

    def _note_replicas(self, *, are_equal: bool) -> None:
        """Log once if all replicas got equal batches in each of the first steps. No error: the data may be equal."""
        self._equal_batches.append(are_equal)
        if self._equal_batches == [True] * COMPARED_CALLS and self.mesh.global_rank == 0:
            _LOG.warning(
                f"all {self.mesh.size('dp')} replicas were given equal batches in each of the first {COMPARED_CALLS} "
                "steps: give the dataloader to booster.boost, or build it with booster.plugin.prepare_dataloader"
            )

    def _check_batch(self, batch: Any, samples: dict[int, int]) -> None:
        wanted = self.config.num_microbatches or 1
        short = [rank for rank, count in samples.items() if count < wanted]
        if short:
            raise ValueError(
                f"num_microbatches={wanted} is more than the {samples[short[0]]} samples of the batch on "
                f"rank(s) {short}: use at most that many microbatches, larger batches, or drop_last=True in the "
                "dataloader to leave out a short last batch"
            )
        if not isinstance(batch, Mapping):
            return
        if self.mesh.size("pp") > 1:
            raise_errors(setting_errors(batch, "the batch"))
        most = max(map(self._num_microbatches, samples.values()))
        if most > 1 and batch.get("num_items_in_batch") is not None:
            raise ValueError(
                f"the batch has num_items_in_batch, by which each of its {most} microbatches would divide "
                "its loss: leave it out for a mean over samples, or give a criterion that returns (loss_sum, "
                "weight), with the number of its tokens as weight"
            )

    def _check_sharing_ranks(self, samples: Sequence[int]) -> None:
        """Raise ValueError if ranks with a collective in every microbatch run different numbers of microbatches."""
        if self._microbatch_collectives:
            counts = sorted(set(samples))
            numbers = ", ".join(f"{self._num_microbatches(count)} for {count} samples" for count in counts)
            raise ValueError(
                f"{self._microbatch_collectives[0]} needs equally many microbatches on every rank, but the "
                f"ranks' batches give {numbers}: give num_microbatches instead of microbatch_size, or "
                "drop_last=True in the dataloader"
            )

    def to_compute(self, batch: Any) -> Any:
        """Move a batch to this rank's device, and floating-point tensors to the model's precision."""
        dtype = self.config.dtype

        def convert(tensor: Tensor) -> Tensor:
            return tensor.to(
                self.mesh.device, dtype if tensor.is_floating_point() else None, non_blocking=True
            )

        return map_tensors(batch, convert)

    def _losses(
        self,
        result: RunResult,
        weighting: "_Weighting",
        optimizer: ShardedOptimizer | None,
        wanted: "_CallKind",
    ) -> tuple[Tensor, Tensor]:
        """Return the loss over all replicas, which is differentiated, and the loss of this replica; equal on its ranks.

        All-reduce over the world if there are stages or replicas. If the criterion returned weights, the optimizer gets
        the factor that corrects the gradients.
        """
        num_replicas, replica = self.mesh.size("dp"), self.mesh.rank("dp")
        is_reduced = self.mesh.size("pp", "dp") > 1
        # For each replica R: loss, weight, and 1 if it has a weight; float32 whatever torch's default is.
        figures_R3 = torch.zeros(num_replicas, 3, dtype=torch.float32, device=self.mesh.device)
        # All ranks of a replica have the same values: one of them adds them.
        is_counted = self.mesh.rank("tp") == self.mesh.rank("sp") == 0 or not is_reduced
        if self.mesh.rank("pp") == self._last_rank and is_counted:
            figures_R3[replica, 0] = torch.stack([loss.float() for loss in result.losses]).sum()
            if result.weights is None:
                figures_R3[replica, 0] /= weighting.num_microbatches
            else:
                figures_R3[replica, 1] = torch.stack([weight.float() for weight in result.weights]).sum()
                figures_R3[replica, 2] = 1
        if is_reduced:
            dist.all_reduce(figures_R3)
        losses, weights, have_weights = figures_R3.unbind(1)
        is_weighted = self._returns_weights(weighting.criterion, have_weights.sum(), trains=wanted.trains)
        if optimizer is not None and wanted.trains:
            first = weighting.first_weight * num_replicas * optimizer.accumulation_steps
            _note_factor(optimizer, first / weights.sum() if is_weighted else 1.0)
        if is_weighted:
            return losses.sum() / weights.sum(), losses[replica] / weights[replica]
        return losses.mean(), losses[replica].clone()

    def _returns_weights(self, criterion: Criterion, num_weighted: Tensor, *, trains: bool) -> bool:
        """Return True if a criterion returns (loss_sum, weight). Waits for the device if it is new, or in evaluation.

        Args:
            num_weighted: number of replicas on which it does, 0-d, equal on all ranks. Raises ValueError on every rank,
                here or by `agreement`, if that is neither 0 nor all.
        """
        num_replicas = self.mesh.size("dp")
        message = (
            "the criterion returned (loss_sum, weight) on {} data-parallel ranks and a plain loss on the others: "
            "return the same kind for every batch"
        )
        known = None
        with suppress(TypeError):  # some callables allow no weak reference
            known = self._is_weighted.get(criterion)
        if known is not None and trains:
            self.agreement.note_deviation((num_weighted - num_replicas * known).abs(), message.format("some"))
            return known
        number = int(num_weighted)
        if number not in (0, num_replicas):
            raise ValueError(message.format(f"{number} of {num_replicas}"))
        if trains:  # evaluation may use the other kind
            with suppress(TypeError):
                self._is_weighted[criterion] = number > 0
        return number > 0

    def _returned_outputs(self, result: RunResult, asked: "_CallKind", wanted: "_CallKind") -> Any:
        """Return the outputs that this rank requested. Broadcast over pp if a rank wants them on all ranks."""
        outputs = None if result.outputs is None else merge([_unsharded(output) for output in result.outputs])
        is_last = self.mesh.rank("pp") == self._last_rank
        if wanted.outputs_everywhere and self.mesh.size("pp") > 1:
            on_cpu = map_tensors(outputs, Tensor.cpu) if is_last else None  # devices are numbered by process
            arrived = broadcast_object(on_cpu, self._last_rank, self.mesh.group("pp"))
            if not is_last:
                outputs = map_tensors(arrived, lambda tensor: tensor.to(self.mesh.device))
        elif asked.outputs and not is_last:
            self._note_absent_outputs()
        return outputs if asked.outputs and (is_last or asked.outputs_everywhere) else None

    def _note_absent_outputs(self) -> None:
        """Log once, on the first rank without outputs, which rank has them. No error: a script may expect None."""
        first = 1 if self._last_rank == 0 else 0
        is_first = self.mesh.rank("pp") == first and self.mesh.rank("data") == self.mesh.rank("tp") == 0
        if is_first and not self._has_noted_outputs:
            self._has_noted_outputs = True
            _LOG.warning(
                "execute_pipeline returns outputs on the last stage, and None on the others: give "
                'return_outputs="all_ranks" to have them on every rank'
            )


def _require_same_calls(have: Sequence[int], trains: Sequence[int], modes: Sequence[int]) -> None:
    """Raise StopIteration if all ranks' data has ended, ValueError if only some has, or if only some ranks train."""
    ended = [rank for rank, has_one in enumerate(have) if not has_one]
    if len(ended) == len(have):
        raise StopIteration
    if ended:
        raise ValueError(
            f"the dataloader has ended on rank(s) {ended} while the other ranks still have batches: every "
            "rank must get equally many; build it with booster.plugin.prepare_dataloader"
        )
    training = [rank for rank, is_on in enumerate(trains) if is_on]
    if 0 < len(training) < len(trains):
        raise ValueError(
            f"execute_pipeline was called to train on rank(s) {training} and under torch.no_grad() on the others: call "
            "it under torch.no_grad() on every rank, to evaluate, or on none, to train"
        )
    training = [rank for rank, is_on in enumerate(modes) if is_on]
    if 0 < len(training) < len(modes):
        raise ValueError(
            f"the model is in training mode on rank(s) {training} and in evaluation mode on the others: call "
            "model.train() on every rank, or model.eval() on every rank"
        )


def _note_factor(optimizer: ShardedOptimizer, factor: float | Tensor) -> None:
    """Give the optimizer the factor that corrects a batch's gradients, combined with those of accumulated batches."""
    previous = optimizer.gradient_factor
    if isinstance(previous, Tensor) and isinstance(factor, Tensor) and optimizer.accumulation_steps > 1:
        factor = 1 / (1 / previous + 1 / factor)  # by the sum of their weights, as of one larger batch
    elif previous is not None and (isinstance(previous, Tensor) or isinstance(factor, Tensor)):
        raise ValueError(
            "a batch whose criterion returned (loss_sum, weight) cannot be accumulated with another before "
            "optimizer.step(): give the plugin gradient_accumulation_steps, and return the same kind in all "
            "calls, or step after each execute_pipeline"
        )
    optimizer.gradient_factor = factor


class _Weighting:
    """A criterion, and the share of each microbatch's loss in the loss of the batch."""

    def __init__(self, criterion: Criterion, num_microbatches: int, first_weight: float) -> None:
        self.criterion, self.num_microbatches, self.first_weight = criterion, num_microbatches, first_weight
        self.is_weighted = False

    def __call__(self, outputs: Any, inputs: Any) -> Tensor | tuple[Tensor, Tensor]:
        computed = self.criterion(outputs, inputs)
        self.is_weighted = isinstance(computed, tuple)
        return computed

    def share(self, loss: Tensor) -> Tensor:
        """Return the differentiated part: a mean divided by the number of microbatches, a sum by the first weight."""
        return loss / (self.first_weight if self.is_weighted else self.num_microbatches)


class _CallKind(NamedTuple):
    """The kind of a call: gradients, a loss, outputs, outputs on all stages, and the model's training mode."""

    trains: bool
    loss: bool
    outputs: bool
    outputs_everywhere: bool
    training_mode: bool


def _unsharded(outputs: Any) -> Any:
    """Return outputs with unsharded logits. All-gather over tp or sp if they are sharded."""
    for name in list(getattr(outputs, "keys", tuple)()):
        if isinstance(outputs[name], ShardedLogits):
            setattr(outputs, name, outputs[name].gather().detach())
    return outputs
