"""Run a batch through the pipeline: compare it between ranks, split it, run the schedule, reduce the loss."""

from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager
from typing import Any

import torch
from torch import Tensor, nn

from ..cluster.agreement import ENDED, AgreedCall, Agreement, CallKind
from ..cluster.errors import raise_errors
from ..cluster.forward_random import ForwardRandom
from ..cluster.gathering import differing_ranks, gather_integers
from ..cluster.hashes import batch_hash
from ..cluster.layout import SUB_AXES
from ..cluster.mesh import ParallelMesh
from ..cluster.objects import broadcast_object
from ..pipeline.action import Action, Op, Schedule
from ..pipeline.communicate import with_communication
from ..pipeline.counted_loss import ObservedStage
from ..pipeline.host_masks import with_host_copies
from ..pipeline.image_rows import image_rows
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
from ..shardformer.router_loss import share_router_loss
from ..zero.optimizer import ShardedOptimizer
from .base import PipelineLoss, Returned
from .hybrid_config import HybridConfig
from .loss import BatchLoss, LossReducer, WeighedCriterion, model_loss, require_num_items, set_gradient_factor

_HASHED_HERE = 2**20  # bytes of a batch; a CPU takes about a millisecond for as many
_OTHER_KINDS = (
    "the losses of data-parallel ranks cannot be added{}: let every criterion return (loss_sum, weight) or every one a "
    "plain loss, and give all batches the same num_items_in_batch, which is the number of labels in the global batch, "
    "or none"
)
_OTHER_COUNTS = (
    "the terms of the model's loss counted other labels than those of the batch, differ between replicas, or "
    "have factors that depend on the microbatch: give a criterion that returns the "
    'loss as (loss_sum, weight), or loss_reduction="microbatch_mean"'
)


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
        self._router_loss = share_router_loss(module, self._stages.values(), mesh)
        last = _observed_last(self._stages, module)
        self._observed_stages: dict[int, Any] = (
            dict(self._stages) if last is None else {**self._stages, last.index: last}
        )
        self._loss_reducer = LossReducer(mesh, self._last_rank, last, config.loss_reduction)
        self.random = ForwardRandom(mesh)
        self.agreement = Agreement(mesh, config.check_every)
        self._weight_gradients = defer_weight_gradients(module) if config.splits_backward else None
        uses = Counter(parameter for stage in self._stages.values() for parameter in stage.parameters())
        self.parameters = {
            index: [parameter for parameter in stage.parameters() if uses[parameter] == 1]
            for index, stage in self._stages.items()
        }
        self._transport = (
            Transport(mesh, config.stage_ranks, overlap=config.overlap_p2p) if mesh.size("pp") > 1 else None
        )
        self._schedules: dict[tuple[int, bool], Schedule] = {}
        self._mean_samples = 1.0  # samples per rank in the last compared call
        self._is_even = False  # True if all ranks ran the same number of microbatches in that call
        # Settings with a collective over replicas in every microbatch: all must run the same number.
        self._microbatch_collectives = [
            *(f"{axis}_size={size}" for axis in SUB_AXES if (size := mesh.size(axis)) > 1),
            *["SyncBatchNorm"] * has_sync_batch_norm(module),
            *["output_router_logits=True"] * (self._router_loss is not None and self._router_loss.is_added),
        ]
        # True if the number of collectives depends on the number of samples in each rank's batch.
        self._compares_numbers = config.microbatch_size is not None and (
            config.zero_stage == 2 or bool(self._microbatch_collectives)
        )
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
        rank_kind = CallKind(
            trains=trains,
            loss=return_loss or trains,
            outputs=bool(return_outputs),
            outputs_everywhere=return_outputs == "all_ranks",
            training_mode=self.module.training,
        )
        batch, moved, call = self._next_batch(data_iter, rank_kind)
        rows = image_rows(batch, getattr(self.module, "config", None))
        microbatches = split(with_host_copies(moved, batch, self.module), rows=rows, **self._cutting)
        weighed = self._loss_reducer.of_batch(
            model_loss if criterion is None else criterion,
            microbatches,
            optimizer if trains else None,
            compares=call.is_compared,
            mean_samples=self._mean_samples,
        )
        result = self._run_schedule(microbatches, weighed, optimizer, call.kind)
        mean, replica_loss = (
            self._losses(result, weighed, optimizer, call) if call.kind.loss else (None, None)
        )
        loss = mean if average_loss else replica_loss
        if trains and loss is not None:
            loss = loss.as_subclass(PipelineLoss)
        return {
            "loss": loss if return_loss else None,
            "outputs": self._returned_outputs(result, rank_kind, call.kind),
        }

    def _run_schedule(
        self,
        microbatches: Sequence[Any],
        weighed: WeighedCriterion,
        optimizer: ShardedOptimizer | None,
        wanted: CallKind,
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
                scale=lambda loss: weighed.differentiated(
                    loss if optimizer is None else optimizer.scale_loss(loss)
                ),
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
            """Return the context of a stage's backward, which reduces gradients if it is the last that adds to them."""
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

    def _next_batch(self, data_iter: Iterator, kind: CallKind) -> tuple[Any, Any, AgreedCall]:
        """Take the next batch, and agree on the call with all ranks; see [Note: compared calls].

        Returns:
            The batch, the same on the device, and the call.

        Raises:
            StopIteration: the iterators of all ranks have ended.
            ValueError: ranks do not agree, or a batch is too small, requires gradients or has a wrong
                `num_items_in_batch`; on which ranks, see `Agreement.compare_batch`.
        """
        if not isinstance(data_iter, Iterator):
            raise TypeError(
                f"execute_pipeline takes an iterator, not a {type(data_iter).__name__}: give iter(dataloader)"
            )
        batch = next(data_iter, ENDED)
        num_samples, own_error = 0, None
        try:
            num_samples = 0 if batch is ENDED else self._checked_size(batch, trains=kind.trains)
        except ValueError as error:
            own_error = error
        call = self.agreement.compare_batch(
            batch, kind, num_samples, always=self._compares_numbers, error=own_error
        )
        if call.samples is None:
            self._require_enough({self.mesh.global_rank: num_samples})
        else:
            self._require_enough(dict(enumerate(call.samples)))
            self._note_samples(call.samples)
        moved = self.to_compute(batch)
        if not call.is_compared:  # a large batch is hashed on the device, without waiting for it
            self.agreement.note(moved if num_bytes(batch) > _HASHED_HERE else batch)
        return batch, moved, call

    def _note_samples(self, samples: Sequence[int]) -> None:
        """Note the numbers of samples of all ranks' batches.

        Raises:
            ValueError: ranks with a collective in every microbatch run different numbers of microbatches.
        """
        self._mean_samples = sum(samples) / len(samples)
        numbers = {count: len(microbatch_lengths(count, **self._cutting)) for count in sorted(set(samples))}
        self._is_even = len(set(numbers.values())) == 1
        if not self._is_even and self._microbatch_collectives:
            text = ", ".join(f"{number} for {count} samples" for count, number in numbers.items())
            raise ValueError(
                f"{self._microbatch_collectives[0]} needs equally many microbatches on every rank, but the "
                f"ranks' batches give {text}: give num_microbatches instead of microbatch_size, or "
                "drop_last=True in the dataloader"
            )

    def _checked_size(self, batch: Any, *, trains: bool) -> int:
        """Return the number of samples; raise ValueError for a batch, or settings in it, that cannot be run."""
        if trains:
            _refuse_gradients_of(batch)
        require_num_items(batch)
        if isinstance(batch, Mapping):
            if self.mesh.size("pp") > 1:
                raise_errors(setting_errors(self.module, batch, "the batch"))
            if self._router_loss is not None and (error := self._router_loss.batch_error(batch)):
                raise ValueError(error)
        return batch_size(batch)

    def _require_enough(self, samples: dict[int, int]) -> None:
        """Raise ValueError for too few samples.

        Args:
            samples: of the known ranks.
        """
        num_microbatches = self.config.num_microbatches or 1
        short = [rank for rank, count in samples.items() if count < num_microbatches]
        if short:
            raise ValueError(
                f"num_microbatches={num_microbatches} is more than the {samples[short[0]]} samples of the batch on "
                f"rank(s) {short}: use at most that many microbatches, larger batches, or drop_last=True in the "
                "dataloader to leave out a short last batch"
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
        call: AgreedCall,
    ) -> tuple[Tensor, Tensor]:
        """Return the loss over all replicas, which is differentiated, and this replica's. All-reduce over the world."""
        steps = 1 if optimizer is None else optimizer.accumulation_steps
        loss: BatchLoss = self._loss_reducer.reduced(result, weighed, steps)
        self._require_one_kind(loss.kinds, waits=call.is_compared)
        if call.kind.trains or self.mesh.world_size > 1 or weighed.has_terms:
            self.agreement.require_none(loss.deviation, _OTHER_COUNTS, waits=not call.kind.trains)
        if optimizer is not None and call.kind.trains:
            set_gradient_factor(optimizer, loss.factor)
        if call.is_compared:
            weighed.note_uneven()
        return loss.mean, loss.of_replica

    def _require_one_kind(self, kinds: Tensor, *, waits: bool) -> None:
        """Require losses of one kind from all replicas; see `Agreement.require_none`.

        Args:
            kinds: by replica, see `WeighedCriterion.kind`; equal on all ranks.
            waits: read them now.
        """
        if len(kinds) > 1:
            given = f" ({_described(kinds.tolist())})" if waits else ""
            self.agreement.require_none(kinds.max() - kinds.min(), _OTHER_KINDS.format(given), waits=waits)

    def _returned_outputs(self, result: RunResult, of_rank: CallKind, of_replica: CallKind) -> Any:
        """Return the outputs that this rank requested.

        All-gather of sharded logits; broadcast over pp if a rank of the replica wants outputs on all ranks.
        """
        outputs = None if result.outputs is None else merge([_unsharded(output) for output in result.outputs])
        is_last = self.mesh.rank("pp") == self._last_rank
        if of_replica.outputs_everywhere:
            outputs = broadcast_object(outputs, self._last_rank, self.mesh.group("pp"), self.mesh.device)
        return outputs if of_rank.outputs and (is_last or of_rank.outputs_everywhere) else None


def _described(kinds: Sequence[float]) -> str:
    """Return the kinds of the replicas' losses in words."""
    words = {-1.0: "a weighted one", 0.0: "a plain one"}
    return ", ".join(
        f"{words.get(kind, f'one over num_items_in_batch={kind:g}')} on replica {replica}"
        for replica, kind in enumerate(kinds)
    )


def _refuse_gradients_of(batch: Any) -> None:
    """Raise ValueError for a batch that requires gradients: they would be scaled, and incomplete under a pipeline."""
    if paths := paths_with_gradient(batch):
        names = ", ".join(path or "the tensor" for path in paths)
        raise ValueError(
            f"the batch requires gradients ({names}), but execute_pipeline computes those of the model's parameters: "
            "detach() it, make it a parameter of the model, or at pp_size=1 call model(**batch) and booster.backward"
        )


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
