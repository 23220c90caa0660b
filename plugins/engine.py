"""A batch through the pipeline: agree on it, cut it, run the schedule, give every rank the loss."""

import logging
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, suppress
from typing import Any, NamedTuple
from weakref import WeakKeyDictionary

import torch
from torch import Tensor
from torch.nn import Parameter

from ..cluster.agree import batch_hash, broadcast_object, differing_ranks, gather_integers
from ..cluster.errors import raise_errors
from ..cluster.failures import meet_all_ranks, rename_call
from ..cluster.mesh import ParallelMesh
from ..cluster.random import ForwardRandom
from ..cluster.step_agreement import COMPARED_CALLS, StepAgreement
from ..pipeline.action import Action, Op, Schedule
from ..pipeline.communicate import with_communication
from ..pipeline.microbatch import batch_size, map_tensors, merge, microbatch_lengths, split
from ..pipeline.plan import setting_errors
from ..pipeline.runner import Criterion, RunResult, ScheduleRun, Trace
from ..pipeline.schedules import forward_only
from ..pipeline.simulate import Span
from ..pipeline.stage import Stage
from ..pipeline.transport import Transport
from ..pipeline.weight_gradients import WeightGradients
from ..shardformer.layers.batch_norm import has_sync_batch_norm
from ..shardformer.layers.loss import VocabParallelLogits
from ..shardformer.sequence.loss import SequenceParallelLogits
from ..zero.optimizer import ShardedOptimizer
from .base import Returned
from .hybrid_config import HybridConfig
from .loss import BatchLoss, PipelineLoss, Weighting, model_loss, reduced_loss

_LOG = logging.getLogger("echelon")
_ENDED = object()


class PipelineEngine:
    """Runs batches through this rank's stages; one per boosted model. Making one is collective over the world.

    Args:
        stages: this rank's stages, by index.
        mesh: the mesh.
        config: how batches are cut and in which order they run.
        placement: the pipeline rank of each stage.
        random: of the forwards in training.
        agreement: what the ranks compare, and when.
        weight_gradients: where the stages' layers hold back weight gradients, if the schedule asks for it.

    Attributes:
        parameters: those of each stage that no other stage of this rank uses too.
        trace: a list makes every batch append what this rank computed when; None measures nothing.
    """

    def __init__(
        self,
        stages: Mapping[int, Stage],
        mesh: ParallelMesh,
        config: HybridConfig,
        *,
        placement: Sequence[int],
        random: ForwardRandom,
        agreement: StepAgreement,
        weight_gradients: WeightGradients | None,
    ) -> None:
        self._stages = stages
        self._mesh = mesh
        self._cutting = config.cutting
        self._config = config
        self._last_rank = placement[-1]
        self._random = random
        self.agreement = agreement
        self._weight_gradients = weight_gradients
        self.parameters = _parameters_of_one_stage(stages)
        self._transport = (
            Transport(mesh, placement, overlap=config.overlap_p2p) if mesh.size("pp") > 1 else None
        )
        self._schedules: dict[tuple[int, bool], Schedule] = {}
        self._wanted = _Wanted(
            trains=False, loss=False, outputs=False, own_loss=False, outputs_everywhere=False
        )
        self._mean_samples = 1.0  # of a rank, as of the last comparison
        self._is_even = False  # whether all ranks ran equally many microbatches then
        # Whether criterions return weights in training.
        self._is_weighted: WeakKeyDictionary[Any, bool] = WeakKeyDictionary()
        self._first_weight = 1.0  # of the calls before a step: the samples of a replica in the first of them
        self._normalizes_together = any(has_sync_batch_norm(stage.model) for stage in stages.values())
        # Collectives that depend on the number of microbatches, where that depends on each rank's batch.
        self._compares_numbers = config.microbatch_size is not None and (
            config.zero_stage == 2 or mesh.size("weight") > 1 or self._normalizes_together
        )
        self._equal_steps: list[bool] = []
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
        """Run one batch, with backward where gradients are on; see `HybridParallelPlugin.execute_pipeline`."""
        trains = torch.is_grad_enabled()
        own = _Wanted(
            trains=trains,
            loss=return_loss or trains,
            outputs=bool(return_outputs),
            own_loss=return_loss and not average_loss,
            outputs_everywhere=return_outputs == "all_ranks",
        )
        batch, drawn = self._next_batch(data_iter, own)
        wanted = self._wanted.joined(own)
        microbatches = split(self.to_compute(batch), **self._cutting)
        weighting = Weighting(
            criterion or model_loss,
            num_microbatches=len(microbatches),
            first_weight=self._weight_of_first_call(optimizer, trains=trains),
        )
        result = self._run_schedule(microbatches, weighting, optimizer, wanted, drawn)
        loss = self._common_loss(result, weighting, optimizer, wanted) if wanted.loss else None
        return {
            "loss": self._returned(loss, own) if return_loss and loss is not None else None,
            "outputs": self._returned_outputs(result, own, wanted),
        }

    def _weight_of_first_call(self, optimizer: ShardedOptimizer | None, *, trains: bool) -> float:
        """The samples of a replica in the first of the calls before a step."""
        follows_weighted = optimizer is not None and isinstance(optimizer.gradient_factor, Tensor)
        if trains and not follows_weighted:
            self._first_weight = self._mean_samples
        return self._first_weight

    def _run_schedule(
        self,
        microbatches: Sequence[Any],
        weighting: Weighting,
        optimizer: ShardedOptimizer | None,
        wanted: "_Wanted",
        drawn: int,
    ) -> RunResult:
        """Compute this rank's actions of the schedule; the forwards draw random numbers that follow from `drawn`."""
        schedule = self._schedule(len(microbatches), trains=torch.is_grad_enabled())
        trace = None if self.trace is None else Trace(self._mesh.device)
        with self._random.following(drawn) as begin_forward:
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
            result = run.run(schedule[self._mesh.rank("pp")])
        if trace is not None and self.trace is not None:
            self.trace += trace.spans()
        return result

    def _schedule(self, num_microbatches: int, *, trains: bool) -> Schedule:
        """The schedule of so many microbatches with its communication, made once."""
        key = num_microbatches, trains
        if key not in self._schedules:
            computations = self._config.schedule(num_microbatches)
            full = with_communication(
                computations if trains else forward_only(computations), ahead=self._config.overlap_p2p
            )
            self._require_one_schedule(full, num_microbatches)
            self._schedules[key] = full
        return self._schedules[key]

    def _require_one_schedule(self, schedule: Schedule, num_microbatches: int) -> None:
        """Raise ValueError on every rank of the pipeline whose ranks made different ones. All-gather over pp."""
        codes = gather_integers((batch_hash(repr(schedule)),), self._mesh.group("pp"))
        if differing := differing_ranks(codes):
            raise ValueError(
                f"the schedule for {num_microbatches} microbatches on pipeline rank(s) {differing} differs from that "
                "on the first: pp_style must give every rank the same lists, which hold all ranks' actions"
            )

    def _accumulating(self, optimizer: ShardedOptimizer) -> Callable[[Action, bool], AbstractContextManager]:
        """The context of each backward. Replicas that run different numbers of them meet in the last alone."""
        is_even = self._is_even

        def around_backward(action: Action, is_last: bool) -> AbstractContextManager:
            parameters = self.parameters[action.stage]
            if is_last:
                return optimizer.reducer.last_backward(parameters)
            if not is_even or action.op is Op.BACKWARD_INPUT:  # whose weight gradients are still to come
                return optimizer.reducer.accumulating()
            return optimizer.reducer.every_backward(parameters)

        return around_backward

    def check_open(self) -> None:
        """Raise RuntimeError where an earlier step broke off, so that no rank waits for one that knows."""
        if self._transport is not None:
            self._transport.check_open()

    def _next_batch(self, data_iter: Iterator, own: "_Wanted") -> tuple[Any, int]:
        """The next batch, and the random number that its forwards follow from; see [Note: compared calls].

        Raises:
            StopIteration: all iterators have ended.
            ValueError: some have ended, batches differ within a replica or are too small, or some ranks alone train.
        """
        if not isinstance(data_iter, Iterator):
            raise TypeError(
                f"execute_pipeline takes an iterator, not a {type(data_iter).__name__}: give iter(dataloader)"
            )
        batch = next(data_iter, _ENDED)
        has_batch = batch is not _ENDED
        drawn = self._random.draw(next(iter(self._stages.values())).model) if has_batch else 0
        if self.agreement.is_due() or not own.trains or self._compares_numbers:
            return batch, self._compare(batch if has_batch else None, has_batch, drawn, own)
        if not has_batch:
            rename_call("execute_pipeline at the end of its data")
            meet_all_ranks()
            raise StopIteration
        rename_call("execute_pipeline in training")  # ranks that evaluate never meet it
        self._check_batch(batch, {self._mesh.global_rank: batch_size(batch)})
        self.agreement.note(batch, {"the random number of the batch": drawn})
        return batch, drawn

    def _compare(self, batch: Any, has_batch: bool, drawn: int, own: "_Wanted") -> int:
        """Compare batches and what is asked for, and keep what follows for later calls. All-gather between CPUs.

        Returns:
            The random number of the first rank.
        """
        is_first = own.trains and len(self._equal_steps) < COMPARED_CALLS and self._mesh.size("dp") > 1
        is_hashed = has_batch and (is_first or self._mesh.size("pp", "sp", "tp") > 1)
        code = batch_hash(batch) if is_hashed else 0
        samples = batch_size(batch) if has_batch else 0
        replica = self._mesh.rank("dp")
        found = gather_integers((int(has_batch), code, samples, replica, drawn, *map(int, own)))
        _require_batches([bool(has_batch) for has_batch, *_ in found])
        self._wanted = _common_wishes(
            [(of, _Wanted(*map(bool, wishes))) for _, _, _, of, _, *wishes in found], replica
        )
        codes = [(of, code) for _, code, _, of, *_ in found]
        self.agreement.require_equal_batches(codes)
        if is_first:
            self._note_replicas(codes)
        every = [samples for _, _, samples, *_ in found]
        self._check_batch(batch, dict(enumerate(every)))
        self._check_sharing_ranks(every)
        self._mean_samples = sum(every) / len(every)
        self._is_even = len({len(microbatch_lengths(count, **self._cutting)) for count in every}) == 1
        if len({number for _, _, _, _, number, *_ in found}) > 1:
            self.agreement.compare_always()  # the ranks' generators differ, and one number has to serve all
        return found[0][4]

    def _note_replicas(self, codes: list[tuple[int, int]]) -> None:
        """Log once where all replicas were given equal batches in each of the first steps: no error, data may be so."""
        self._equal_steps.append(len({code for _, code in codes}) == 1)
        if (
            len(self._equal_steps) == COMPARED_CALLS
            and all(self._equal_steps)
            and self._mesh.global_rank == 0
        ):
            _LOG.warning(
                "all %d replicas were given equal batches in each of the first %d steps: give the dataloader to "
                "booster.boost, or build it with booster.plugin.prepare_dataloader",
                self._mesh.size("dp"),
                COMPARED_CALLS,
            )

    def _check_batch(self, batch: Any, samples: dict[int, int]) -> None:
        wanted = self._config.num_microbatches or 1
        short = [rank for rank, count in samples.items() if count < wanted]
        if short:
            raise ValueError(
                f"num_microbatches={wanted} is more than the {samples[short[0]]} samples of the batch on "
                f"rank(s) {short}: use at most that many microbatches, larger batches, or drop_last=True in the "
                "dataloader to leave out a short last batch"
            )
        if not isinstance(batch, Mapping):
            return
        if self._mesh.size("pp") > 1:
            raise_errors(setting_errors(batch, "the batch"))
        if batch.get("num_items_in_batch") is None:
            return
        if (most := max(len(microbatch_lengths(count, **self._cutting)) for count in samples.values())) > 1:
            raise ValueError(
                f"the batch has num_items_in_batch, by which each of its {most} microbatches would divide its part of "
                "the loss before the mean of them is taken: leave it out for a mean by samples, or give a criterion "
                "that returns (loss_sum, weight), with the number of its tokens for the weight"
            )

    def _check_sharing_ranks(self, samples: Sequence[int]) -> None:
        """Ranks that gather weights, or normalize, together in every microbatch must run equally many."""
        counts = {count: len(microbatch_lengths(count, **self._cutting)) for count in sorted(set(samples))}
        shares = self._mesh.size("weight") > 1
        if (shares or self._normalizes_together) and len(set(counts.values())) > 1:
            numbers = ", ".join(f"{number} for {count} samples" for count, number in counts.items())
            why = f"wp_size={self._mesh.size('weight')}" if shares else "SyncBatchNorm"
            raise ValueError(
                f"with {why} every rank must run equally many microbatches, and the ranks' batches make {numbers}: "
                "give num_microbatches instead of microbatch_size, or drop_last=True in the dataloader"
            )

    def to_compute(self, batch: Any) -> Any:
        """A batch on this rank's device, floating tensors in the model's precision."""
        dtype = self._config.dtype

        def convert(tensor: Tensor) -> Tensor:
            return tensor.to(
                self._mesh.device, dtype if tensor.is_floating_point() else None, non_blocking=True
            )

        return map_tensors(batch, convert)

    def _common_loss(
        self,
        result: RunResult,
        weighting: Weighting,
        optimizer: ShardedOptimizer | None,
        wanted: "_Wanted",
    ) -> BatchLoss:
        """The loss of all replicas, from which the optimizer gets what corrects the gradients; see `reduced_loss`."""
        figures_R3 = reduced_loss(
            result if self._mesh.rank("pp") == self._last_rank else None,
            self._mesh,
            num_microbatches=weighting.num_microbatches,
            by_replica=wanted.own_loss,
        )
        loss = BatchLoss(
            figures_R3=figures_R3,
            num_replicas=self._mesh.size("dp"),
            is_weighted=self._returns_weights(
                weighting.criterion, figures_R3[:, 2].sum(), trains=wanted.trains
            ),
        )
        if optimizer is not None and wanted.trains:
            first = weighting.first_weight * loss.num_replicas * optimizer.accumulation_steps
            _note_factor(optimizer, first / loss.weight if loss.is_weighted else 1.0)
        return loss

    def _returns_weights(self, criterion: Criterion, num_weighted: Tensor, *, trains: bool) -> bool:
        """Return True for a criterion of (loss_sum, weight). Waits for the device where it is new, or in evaluation.

        Args:
            num_weighted: replicas on which it did, 0-d, equal on all ranks.

        Raises:
            ValueError: it does on some replicas alone; on every rank, here or by `agreement`.
        """
        num_replicas = self._mesh.size("dp")
        message = (
            "the criterion returned (loss_sum, weight) on {} data-parallel ranks and a plain loss on the others: "
            "return the same kind for every batch"
        )
        known = None
        with suppress(TypeError):  # no weak reference to it can be had
            known = self._is_weighted.get(criterion)
        if known is not None and trains:
            self.agreement.note_deviation((num_weighted - num_replicas * known).abs(), message.format("some"))
            return known
        number = int(num_weighted)
        if number not in (0, num_replicas):
            raise ValueError(message.format(f"{number} of {num_replicas}"))
        if trains:  # in evaluation it may return another kind
            with suppress(TypeError):
                self._is_weighted[criterion] = number > 0
        return number > 0

    def _returned_outputs(self, result: RunResult, asked: "_Wanted", wanted: "_Wanted") -> Any:
        """The outputs that this rank asked for. Broadcast over pp where a rank of the replica wants them everywhere."""
        outputs = None if result.outputs is None else merge([_whole(output) for output in result.outputs])
        is_last = self._mesh.rank("pp") == self._last_rank
        if wanted.outputs_everywhere and self._mesh.size("pp") > 1:
            on_cpu = map_tensors(outputs, Tensor.cpu) if is_last else None  # devices are numbered by process
            arrived = broadcast_object(on_cpu, self._last_rank, self._mesh.group("pp"))
            if not is_last:
                outputs = map_tensors(arrived, lambda tensor: tensor.to(self._mesh.device))
        elif asked.outputs and not is_last:
            self._note_absent_outputs()
        return outputs if asked.outputs and (is_last or asked.outputs_everywhere) else None

    def _note_absent_outputs(self) -> None:
        """Log once, on the first rank without outputs, where they are; a script may well expect None."""
        first = 1 if self._last_rank == 0 else 0
        is_first = self._mesh.rank("pp") == first and self._mesh.rank("data") == self._mesh.rank("tp") == 0
        if is_first and not self._has_noted_outputs:
            _LOG.warning(
                "execute_pipeline returns outputs on the last stage, and None on the others: give "
                'return_outputs="all_ranks" to have them on every rank'
            )
        self._has_noted_outputs = True

    def _returned(self, loss: BatchLoss, asked: "_Wanted") -> Tensor:
        """The loss that this rank asked for."""
        returned = loss.of_replica(self._mesh.rank("dp")) if asked.own_loss else loss.mean
        return returned.as_subclass(PipelineLoss) if asked.trains else returned


def _require_batches(has_batch: Sequence[bool]) -> None:
    """Raise StopIteration where all ranks' data has ended, ValueError where that of some has."""
    ended = [rank for rank, has_one in enumerate(has_batch) if not has_one]
    if len(ended) == len(has_batch):
        raise StopIteration
    if ended:
        raise ValueError(
            f"the dataloader has ended on rank(s) {ended} while the other ranks still have batches: every "
            "rank must get equally many; build it with booster.plugin.prepare_dataloader"
        )


def _note_factor(optimizer: ShardedOptimizer, factor: float | Tensor) -> None:
    """Leave the optimizer what corrects the gradients of a batch, where it accumulates no other that needs another."""
    previous = optimizer.gradient_factor
    if isinstance(previous, Tensor) and isinstance(factor, Tensor) and optimizer.accumulation_steps > 1:
        factor = 1 / (1 / previous + 1 / factor)  # by the sum of their weights, as of one larger batch
    elif previous is not None and (isinstance(previous, Tensor) or isinstance(factor, Tensor)):
        raise ValueError(
            "a batch whose criterion returned (loss_sum, weight) was accumulated with another before "
            "optimizer.step(), and the weights of both are not known together: give the plugin "
            "gradient_accumulation_steps, and return the same kind in all calls, or step after each execute_pipeline"
        )
    optimizer.gradient_factor = factor


class _Wanted(NamedTuple):
    """The results that a call asks for: gradients, a loss, outputs; the replica's own loss; outputs on all stages."""

    trains: bool
    loss: bool
    outputs: bool
    own_loss: bool
    outputs_everywhere: bool

    def joined(self, other: "_Wanted") -> "_Wanted":
        """Combine two calls: everything that either of them asks for."""
        return _Wanted(*(mine or theirs for mine, theirs in zip(self, other, strict=True)))


def _common_wishes(every: Sequence[tuple[int, _Wanted]], replica: int) -> _Wanted:
    """Combine the wishes of all ranks: a loss that any of them wants, and outputs that any of this replica does.

    Both take communication, which ranks that want neither join.

    Args:
        every: by rank, its replica and what it wants.
        replica: this rank's.

    Raises:
        ValueError: gradients are on for some ranks alone.
    """
    training = [rank for rank, (_, wanted) in enumerate(every) if wanted.trains]
    if 0 < len(training) < len(every):
        raise ValueError(
            f"execute_pipeline was called to train on rank(s) {training} and under torch.no_grad() on the others: call "
            "it under torch.no_grad() on every rank, to evaluate, or on none, to train"
        )
    return _Wanted(
        trains=bool(training),
        loss=any(wanted.loss for _, wanted in every),
        outputs=any(wanted.outputs for of, wanted in every if of == replica),
        own_loss=any(wanted.own_loss for _, wanted in every),
        outputs_everywhere=any(wanted.outputs_everywhere for of, wanted in every if of == replica),
    )


def _parameters_of_one_stage(stages: Mapping[int, Stage]) -> dict[int, list[Parameter]]:
    """Each stage's parameters without those that another stage of this rank uses too."""
    uses = Counter(parameter for stage in stages.values() for parameter in stage.parameters())
    return {
        index: [parameter for parameter in stage.parameters() if uses[parameter] == 1]
        for index, stage in stages.items()
    }


def _whole(outputs: Any) -> Any:
    """Outputs with whole logits. All-gather over tp or sp where they are sharded."""
    for name in list(getattr(outputs, "keys", tuple)()):
        if isinstance(outputs[name], (VocabParallelLogits, SequenceParallelLogits)):
            setattr(outputs, name, outputs[name].gather().detach())
    return outputs
