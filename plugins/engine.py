"""Run a batch through the pipeline: compare it between ranks, split it, run the schedule, reduce the loss."""

from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from ..cluster.agreement import ENDED, AgreedCall, Agreement, CallKind
from ..cluster.device import allocated_bytes
from ..cluster.errors import raise_errors
from ..cluster.forward_random import ForwardRandom
from ..cluster.gathering import differing_ranks, gather_integers
from ..cluster.hashes import batch_hash
from ..cluster.layout import SUB_AXES
from ..cluster.mesh import ParallelMesh
from ..cluster.objects import broadcast_object
from ..cluster.profiling import named_modules
from ..pipeline.action import Action, Op, Schedule
from ..pipeline.communicate import with_communication
from ..pipeline.counted_loss import LossObserver, ObservedStage
from ..pipeline.host_masks import with_host_copies
from ..pipeline.image_rows import image_rows
from ..pipeline.microbatch import (
    batch_size,
    map_tensors,
    merge,
    microbatch_lengths,
    num_bytes,
    paths_with_gradient,
    require_num_items,
    split,
)
from ..pipeline.runner import Criterion, RunResult, ScheduleRun
from ..pipeline.schedules import forward_only
from ..pipeline.stage import local_stages
from ..pipeline.stage_plan import setting_errors
from ..pipeline.transport import Transport
from ..pipeline.weight_gradients import WeightGradientQueue
from ..shardformer.layers.batch_norm import has_sync_batch_norm
from ..shardformer.layers.deferred_linear import track_weight_gradients
from ..shardformer.layers.vocabulary_loss import ShardedLogits
from ..shardformer.recompute import recomputable_layers
from ..shardformer.router_loss import share_router_loss
from ..zero.optimizer import ShardedOptimizer
from .base import PipelineLoss, Returned
from .hybrid_config import HybridConfig
from .loss_reducer import BatchLoss, LossReducer, set_gradient_factor
from .microbatch_weights import WeightedCriterion, model_loss

_MAX_BYTES_HASHED_ON_HOST = 2**20  # of a batch: about a millisecond on a CPU
_KINDS_DIFFER = (
    "the losses of data-parallel ranks cannot be added{}: let every criterion return (loss_sum, weight) or every one a "
    "plain loss, and give all batches the same num_items_in_batch, which is the number of labels in the global batch, "
    "or none"
)
_COUNTS_DIFFER = (
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
        in_flight: by stage, the microbatches with activations at the end of the last call; none unless it failed.
        kept_bytes: by stage, what the forward of its first microbatch in training kept; empty on a CPU.
    """

    def __init__(self, module: nn.Module, config: HybridConfig, mesh: ParallelMesh) -> None:
        self.module, self.config, self.mesh = module, config, mesh
        self._stages, self._cutting = (
            local_stages(module),
            config.cutting,
        )  # stages by index; arguments of `split`
        self._last_rank = config.stage_ranks[-1]
        self._router_loss = share_router_loss(module, self._stages.values(), mesh)
        observed_last = _observed_last(self._stages, module)
        # This rank's stages by index, the model's last one wrapped so that its losses are observed.
        self._observed_stages: dict[int, Any] = (
            dict(self._stages)
            if observed_last is None
            else {**self._stages, observed_last.index: observed_last}
        )
        self._loss_reducer = LossReducer(mesh, self._last_rank, observed_last, config.loss_reduction)
        self.random = ForwardRandom(mesh)
        self.agreement = Agreement(mesh, config.check_every)
        # Compiled layers compute all their gradients themselves; without stages, `booster.backward` may be called.
        tracks = (mesh.size("pp") > 1 or config.splits_backward) and not config.compile_layers
        self._weight_gradients = track_weight_gradients(module) if tracks else WeightGradientQueue()
        uses = Counter(parameter for stage in self._stages.values() for parameter in stage.parameters())
        self.parameters = {
            index: [parameter for parameter in stage.parameters() if uses[parameter] == 1]
            for index, stage in self._stages.items()
        }
        self._transport = (
            Transport(mesh, config.stage_ranks, overlap=config.overlap_p2p) if mesh.size("pp") > 1 else None
        )
        self._schedules: dict[tuple[int, bool], Schedule] = {}  # by number of microbatches, and with backward
        self._mean_samples = 1.0  # samples per rank in the last compared call
        self._is_even = False  # True if all ranks ran the same number of microbatches in that call
        # Settings with a collective over replicas in every microbatch: all must run the same number.
        self._microbatch_collectives = [
            *(f"{axis}_size={size}" for axis in SUB_AXES if (size := mesh.size(axis)) > 1),
            *["SyncBatchNorm"] * has_sync_batch_norm(module),
            *["output_router_logits=True"] * (self._router_loss is not None and self._router_loss.adds_loss),
        ]
        # True if the number of collectives depends on the samples of each rank's batch: then all calls are compared.
        self._always_compares = config.microbatch_size is not None and (
            config.zero_stage == 2 or bool(self._microbatch_collectives)
        )
        self.in_flight: Counter[int] = Counter()
        self.kept_bytes: dict[int, int] = {}
        self._allocated = partial(allocated_bytes, mesh.device)
        # Layers and the modules in them, whose forwards have names in profiles.
        layers = recomputable_layers(module)
        self._regions = [part for layer in layers for part in (layer, *layer.children())]

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
        and the end of that context starts the remaining ones. Collective over the world.
        """
        trains = torch.is_grad_enabled()
        requested = CallKind(
            trains=trains,
            loss=return_loss or trains,
            outputs=bool(return_outputs),
            outputs_everywhere=return_outputs == "all_ranks",
            training_mode=self.module.training,
        )
        batch, device_batch, call = self._next_batch(data_iter, requested)
        rows = image_rows(batch, getattr(self.module, "config", None))
        microbatches = split(with_host_copies(device_batch, batch, self.module), rows=rows, **self._cutting)
        weighted = WeightedCriterion(
            self._loss_reducer,
            model_loss if criterion is None else criterion,
            microbatches,
            optimizer if trains else None,
            compares=call.is_compared,
            mean_samples=self._mean_samples,
        )
        result = self._run_schedule(microbatches, weighted, optimizer, call.kind)
        mean, replica_loss = (
            self._losses(result, weighted, optimizer, call) if call.kind.loss else (None, None)
        )
        loss = mean if average_loss else replica_loss
        if trains and loss is not None:
            loss = loss.as_subclass(PipelineLoss)
        return {
            "loss": loss if return_loss else None,
            "outputs": self._returned_outputs(result, requested, call.kind),
        }

    def _run_schedule(
        self,
        microbatches: Sequence[Any],
        weighted: WeightedCriterion,
        optimizer: ShardedOptimizer | None,
        wanted: CallKind,
    ) -> RunResult:
        """Run this rank's actions of the schedule; send and receive between the stages.

        Args:
            microbatches: of this replica, on the device.
            weighted: the criterion; called on the rank of the last stage.
            optimizer: scales the loss and reduces gradients; None without backward.
            wanted: the results that some rank of the replica requested.
        """
        schedule = self._schedule(len(microbatches), trains=torch.is_grad_enabled())
        regions = [] if self.config.compile_layers else self._regions
        with self.random.following(self.module) as begin_forward, named_modules(self.module, regions):
            run = ScheduleRun(
                stages=self._observed_stages,
                microbatches=microbatches,
                criterion=weighted if wanted.loss else None,
                transport=self._transport,
                scale=lambda loss: weighted.differentiated(
                    loss if optimizer is None else optimizer.scale_loss(loss)
                ),
                keep_outputs=wanted.outputs,
                before_forward=begin_forward,
                weight_gradients=self._weight_gradients,
                around_backward=None if optimizer is None else self._accumulating(optimizer),
                allocated=self._allocated,
                kept_bytes=self.kept_bytes,
            )
            try:
                result = run.run(schedule[self.mesh.rank("pp")])
            finally:
                self.in_flight = run.in_flight()
        return result

    def _schedule(self, num_microbatches: int, *, trains: bool) -> Schedule:
        """Return the schedule of a number of microbatches, with its sends and receives.

        All-gathers a checksum over pp when a number is new; later calls return the kept schedule.

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
        """Return the function that makes the context of every backward, which decides if it reduces gradients.

        If replicas run different numbers of microbatches, only the last backward of a stage reduces: a reduction in
        every one would find no partner on some ranks.
        """
        is_even = self._is_even

        def around_backward(action: Action, is_last: bool) -> AbstractContextManager:
            """Return the context of one backward of a stage; `is_last`: no later one adds to these gradients."""
            parameters = self.parameters[action.stage]
            if is_last:
                return optimizer.reducer.last_backward(parameters)
            if not is_even or action.op is Op.BACKWARD_INPUT:  # its weight gradients follow in another action
                return optimizer.reducer.accumulating()
            return optimizer.reducer.every_backward(parameters)

        return around_backward

    @property
    def observed_losses(self) -> LossObserver | None:
        """The losses of the last forward of the model's last stage; None on other ranks."""
        stage = self._loss_reducer.stage
        return None if stage is None else stage.observed

    def check_open(self) -> None:
        """Raise RuntimeError if an earlier step was interrupted, so that no rank waits for one that raises."""
        if self._transport is not None:
            self._transport.check_open()

    def _next_batch(self, data_iter: Iterator, kind: CallKind) -> tuple[Any, Any, AgreedCall]:
        """Take the next batch, copy it to the device, and compare the call between ranks; see [Note: compared calls].

        Args:
            data_iter: the user's iterator.
            kind: the results that this rank requested.

        Returns:
            The batch, its copy on the device, and the call as all ranks of the replica make it.

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
        num_samples, batch_error = 0, None
        try:
            num_samples = 0 if batch is ENDED else self._checked_size(batch, trains=kind.trains)
        except ValueError as error:
            batch_error = error
        call = self.agreement.compare_batch(
            batch, kind, num_samples, always=self._always_compares, error=batch_error
        )
        if call.samples is None:
            self._require_enough_samples({self.mesh.global_rank: num_samples})
        else:
            self._require_enough_samples(dict(enumerate(call.samples)))
            self._note_samples(call.samples)
        device_batch = self.to_compute(batch)
        if not call.is_compared:  # a large batch is hashed on the device, without waiting for it
            self.agreement.note(device_batch if num_bytes(batch) > _MAX_BYTES_HASHED_ON_HOST else batch)
        return batch, device_batch, call

    def _note_samples(self, samples: Sequence[int]) -> None:
        """Set `_mean_samples` and `_is_even` from the numbers of samples in all ranks' batches.

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

    def _require_enough_samples(self, samples: dict[int, int]) -> None:
        """Raise ValueError if a batch has fewer samples than `num_microbatches`.

        Args:
            samples: by rank of the world, the number in its batch; only this rank in calls that are not compared.
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
        weighted: WeightedCriterion,
        optimizer: ShardedOptimizer | None,
        call: AgreedCall,
    ) -> tuple[Tensor, Tensor]:
        """Return the loss over all replicas and that of this replica, and check them. All-reduce over the world.

        In training it also sets the factor by which the optimizer corrects the gradients.

        Args:
            result: the losses and weights of the microbatches, on the rank of the last stage.
            weighted: the criterion that computed them.
            optimizer: None in an evaluation.
            call: as the ranks agreed on it.

        Raises:
            ValueError: replicas have losses of different kinds, or terms counted otherwise than expected. A call that
                shall not wait for the device raises nothing; `optimizer.step` does.
        """
        steps = 1 if optimizer is None else optimizer.accumulation_steps
        loss: BatchLoss = weighted.reduced(result, steps)
        self._require_one_kind(loss.kinds, waits=call.is_compared)
        if call.kind.trains or self.mesh.world_size > 1 or weighted.has_terms:
            self.agreement.require_zero(loss.deviation, _COUNTS_DIFFER, waits=not call.kind.trains)
        if optimizer is not None and call.kind.trains:
            set_gradient_factor(optimizer, loss.factor)
        if call.is_compared:
            weighted.log_uneven_labels()
        return loss.mean, loss.of_replica

    def _require_one_kind(self, kinds: Tensor, *, waits: bool) -> None:
        """Require losses of one kind from all replicas; see `Agreement.require_zero`.

        Args:
            kinds: by replica, see `WeightedCriterion.kind`; equal on all ranks.
            waits: read them now.
        """
        if len(kinds) > 1:
            named_kinds = f" ({_describe_kinds(kinds.tolist())})" if waits else ""
            self.agreement.require_zero(
                kinds.max() - kinds.min(), _KINDS_DIFFER.format(named_kinds), waits=waits
            )

    def _returned_outputs(self, result: RunResult, of_rank: CallKind, of_replica: CallKind) -> Any:
        """Return the outputs of the full batch, or None if this rank requested none or has none.

        All-gathers sharded logits over tp or sp. Broadcasts over pp if any rank of the replica requested outputs on
        all ranks, so also on ranks that return None.

        Args:
            result: the outputs of the microbatches, on the rank of the last stage.
            of_rank: the results that this rank requested.
            of_replica: the results that some rank of the replica requested.
        """
        outputs = None if result.outputs is None else merge([_unsharded(output) for output in result.outputs])
        is_last = self.mesh.rank("pp") == self._last_rank
        if of_replica.outputs_everywhere:
            outputs = broadcast_object(outputs, self._last_rank, self.mesh.group("pp"), self.mesh.device)
        return outputs if of_rank.outputs and (is_last or of_rank.outputs_everywhere) else None


def _describe_kinds(kinds: Sequence[float]) -> str:
    """Return the kinds of the replicas' losses in words, for an error; see `WeightedCriterion.kind`."""
    words = {-1.0: "a weighted one", 0.0: "a plain one"}
    return ", ".join(
        f"{words.get(kind, f'one over num_items_in_batch={kind:g}')} on replica {replica}"
        for replica, kind in enumerate(kinds)
    )


def _refuse_gradients_of(batch: Any) -> None:
    """Raise ValueError for a batch that requires gradients.

    They would contain the loss scale, and under a pipeline lack the contributions of other ranks' stages.
    """
    if paths := paths_with_gradient(batch):
        names = ", ".join(path or "the tensor" for path in paths)
        raise ValueError(
            f"the batch requires gradients ({names}), but execute_pipeline computes those of the model's parameters: "
            "detach() it, make it a parameter of the model, or at pp_size=1 call model(**batch) and booster.backward"
        )


def _observed_last(stages: Mapping[int, Any], module: nn.Module) -> ObservedStage | None:
    """Wrap the model's last stage, so that losses computed after its last layer are observed; None on other ranks."""
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
