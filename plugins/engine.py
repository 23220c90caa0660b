"""Run a batch through the pipeline: compare it between ranks, split it, run the schedule, reduce the loss."""

import logging
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager
from itertools import compress
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from ..cluster.agree import batch_hash, differing_ranks, gather_integers
from ..cluster.errors import raise_errors
from ..cluster.failures import rename_call, wait_for_all_ranks
from ..cluster.layout import SUB_AXES
from ..cluster.mesh import ParallelMesh
from ..cluster.objects import broadcast_object
from ..cluster.random import ForwardRandom
from ..cluster.step_agreement import COMPARED_CALLS, StepAgreement
from ..pipeline.action import Action, Op, Schedule
from ..pipeline.communicate import with_communication
from ..pipeline.counted_loss import ObservedStage
from ..pipeline.known_masks import with_known_masks
from ..pipeline.microbatch import (
    batch_size,
    map_tensors,
    merge,
    microbatch_lengths,
    num_bytes,
    paths_with_gradient,
    split,
)
from ..pipeline.plan import setting_errors
from ..pipeline.runner import Criterion, RunResult, ScheduleRun, Trace
from ..pipeline.schedules import forward_only
from ..pipeline.simulate import Span
from ..pipeline.stage import local_stages
from ..pipeline.transport import Transport
from ..shardformer.layers.batch_norm import has_sync_batch_norm
from ..shardformer.layers.deferred_linear import defer_weight_gradients
from ..shardformer.layers.loss import ShardedLogits
from ..shardformer.recompute import recomputable_layers
from ..zero.optimizer import ShardedOptimizer
from .base import PipelineLoss, Returned
from .hybrid_config import HybridConfig
from .loss import BatchLoss, LossReducer, WeighedCriterion, model_loss, note_factor, require_num_items

_LOG = logging.getLogger("echelon")
_ENDED = object()
_HASHED_HERE = 2**20  # bytes of a batch; a CPU takes about a millisecond for as many


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
        last = _observed_last(self._stages, module)
        self._observed_stages: dict[int, Any] = (
            dict(self._stages) if last is None else {**self._stages, last.index: last}
        )
        self._loss_reducer = LossReducer(mesh, self._last_rank, last, config.loss_reduction)
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
        self._is_compared = False  # the current call
        # Settings with a collective over replicas in every microbatch: all must run the same number.
        self._microbatch_collectives = [
            *(f"{axis}_size={size}" for axis in SUB_AXES if (size := mesh.size(axis)) > 1),
            *["SyncBatchNorm"] * has_sync_batch_norm(module),
        ]
        # True if the number of collectives depends on the number of samples in each rank's batch.
        self._compares_numbers = config.microbatch_size is not None and (
            config.zero_stage == 2 or bool(self._microbatch_collectives)
        )
        self._equal_batches: list[bool] = []
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
        weighed = self._loss_reducer.of_batch(
            model_loss if criterion is None else criterion,
            microbatches,
            optimizer if trains else None,
            compares=self._is_compared,
            mean_samples=self._mean_samples,
        )
        result = self._run_schedule(microbatches, weighed, optimizer, wanted)
        mean, own_loss = self._losses(result, weighed, optimizer, wanted) if wanted.loss else (None, None)
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
        weighed: WeighedCriterion,
        optimizer: ShardedOptimizer | None,
        wanted: "_CallKind",
    ) -> RunResult:
        """Run this rank's actions of the schedule."""
        schedule = self._schedule(len(microbatches), trains=torch.is_grad_enabled())
        trace = None if self.trace is None else Trace(self.mesh.device)
        with self.random.following(self.module) as begin_forward:
            run = ScheduleRun(
                stages=self._observed_stages,
                microbatches=microbatches,
                criterion=weighed if wanted.loss else None,
                transport=self._transport,
                scale=lambda loss: weighed.share(loss if optimizer is None else optimizer.scale_loss(loss)),
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
            ValueError: those of some ranks have ended, batches differ within a replica, are too small, require
                gradients or have a wrong `num_items_in_batch`, or only some ranks train.
        """
        if not isinstance(data_iter, Iterator):
            raise TypeError(
                f"execute_pipeline takes an iterator, not a {type(data_iter).__name__}: give iter(dataloader)"
            )
        batch = next(data_iter, _ENDED)
        has_batch = batch is not _ENDED
        if has_batch and own.trains:
            _refuse_gradients_of(batch)
        require_num_items(batch)
        is_compared = self.agreement.is_due() or not own.trains or self._compares_numbers
        if not is_compared and has_batch and own != self._own_kind:
            if own.training_mode != self._own_kind.training_mode:
                mode = "training" if own.training_mode else "evaluation"
                rename_call(f"execute_pipeline in {mode} mode, unlike the previous call")
            wait_for_all_ranks()  # ranks whose call is as before never enter this
            is_compared = True
        self._is_compared = is_compared
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
        weighed: WeighedCriterion,
        optimizer: ShardedOptimizer | None,
        wanted: "_CallKind",
    ) -> tuple[Tensor, Tensor]:
        """Return the loss over all replicas, which is differentiated, and this replica's. All-reduce over the world."""
        steps = 1 if optimizer is None else optimizer.accumulation_steps
        loss: BatchLoss = self._loss_reducer.reduced(result, weighed, steps)
        self._require_one_kind(loss.weighted, trains=wanted.trains)
        self._require_expected_counts(loss.deviation, weighed, trains=wanted.trains)
        if optimizer is not None and wanted.trains:
            note_factor(optimizer, loss.factor)
        if self._is_compared:
            weighed.note_uneven()
        return loss.mean, loss.of_replica

    def _require_one_kind(self, weighted: Tensor, *, trains: bool) -> None:
        """Require weights from the criteria of all replicas or of none. Waits for the device in compared calls.

        Args:
            weighted: number of replicas whose criterion returned weights, 0-d, equal on all ranks.

        Raises:
            ValueError: some did, on every rank; in calls that are not compared by `agreement`, at the step.
        """
        num_replicas = self.mesh.size("dp")
        message = (
            "the criterion returned (loss_sum, weight) on {} data-parallel ranks and a plain loss on the others: "
            "return the same kind for every batch"
        )
        if num_replicas == 1:
            return
        if trains and not self._is_compared:
            self.agreement.note_deviation(weighted * (num_replicas - weighted), message.format("some"))
        elif (number := int(weighted)) not in (0, num_replicas):
            raise ValueError(message.format(f"{number} of {num_replicas}"))

    def _require_expected_counts(self, deviation: Tensor, weighed: WeighedCriterion, *, trains: bool) -> None:
        """Require that the terms of a loss counted as expected. Waits for the device in evaluation.

        Args:
            deviation: above 0 if they did not, 0-d, equal on all ranks.
            weighed: the criterion of the call.
            trains: the call is one of training.

        Raises:
            ValueError: on every rank; in training at the step.
        """
        message = (
            "the terms of the model's loss counted other labels than those of the batch, differ between replicas, or "
            "have factors that depend on the microbatch: give a criterion that returns the "
            'loss as (loss_sum, weight), or loss_reduction="microbatch_mean"'
        )
        if trains:
            self.agreement.note_deviation(deviation, message)
        elif (self.mesh.world_size > 1 or weighed.has_terms) and bool(deviation > 0):
            raise ValueError(message)

    def _returned_outputs(self, result: RunResult, asked: "_CallKind", wanted: "_CallKind") -> Any:
        """Return the outputs that this rank requested. Broadcast over pp if a rank wants them on all ranks."""
        outputs = None if result.outputs is None else merge([_unsharded(output) for output in result.outputs])
        is_last = self.mesh.rank("pp") == self._last_rank
        if wanted.outputs_everywhere:
            outputs = broadcast_object(outputs, self._last_rank, self.mesh.group("pp"), self.mesh.device)
        return outputs if asked.outputs and (is_last or asked.outputs_everywhere) else None


def _refuse_gradients_of(batch: Any) -> None:
    """Raise ValueError for a batch with gradients: they would be scaled, and under a pipeline those of some stages."""
    if paths := paths_with_gradient(batch):
        names = ", ".join(path or "the tensor" for path in paths)
        raise ValueError(
            f"the batch requires gradients ({names}), but execute_pipeline computes those of the model's parameters: "
            "detach() it, make it a parameter of the model, or at pp_size=1 call model(**batch) and booster.backward"
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


class _CallKind(NamedTuple):
    """The kind of a call: gradients, a loss, outputs, outputs on all stages, and the model's training mode."""

    trains: bool
    loss: bool
    outputs: bool
    outputs_everywhere: bool
    training_mode: bool


def _observed_last(stages: Mapping[int, Any], module: nn.Module) -> ObservedStage | None:
    """Return this rank's last stage of the model, which observes the losses behind its last layer; None without it."""
    last = next((stage for stage in stages.values() if stage.is_last), None)
    if last is None:
        return None
    layers = last.layers or recomputable_layers(module)
    return ObservedStage(last, module, layers[-1] if layers else None)


def _unsharded(outputs: Any) -> Any:
    """Return outputs with unsharded logits. All-gather over tp or sp if they are sharded."""
    for name in list(getattr(outputs, "keys", tuple)()):
        if isinstance(outputs[name], ShardedLogits):
            setattr(outputs, name, outputs[name].gather().detach())
    return outputs
