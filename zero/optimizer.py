"""The sharded optimizer: flat memory, precision and reductions around the user's own optimizer.

backward()            gradients accumulate in float32, in flat buckets (bucket.py)
reduce_gradients()    sums over tied and partial copies, mean over the data axis (reducer.py, partition.py)
clip_grad_by_…()      where the user clips by hand (reduced_gradients.py)
step()                norm and overflows of all ranks, unscale and clip (reduced_gradients.py), inner step on this
                      rank's slices, parameters gathered (parameter_gather.py)
"""

from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from math import isfinite
from typing import Any

import torch
from torch import Tensor
from torch.optim import Optimizer

from ..cluster.agreement import Agreement
from ..cluster.device import numbers_on, wait_for_stream
from ..cluster.failures import naming_failures
from ..cluster.gathering import require_equal
from ..cluster.mesh import ParallelMesh
from .bucket import gather_by_name, make_buckets
from .buffers import BufferPool
from .calls_of_step import CallsOfStep
from .clipping import require_clip_norm, require_clip_value, require_finite_norm
from .inner_optimizer import (
    EQUAL_OPTIONS,
    PARTIAL_STATE,
    OptimizerWrapper,
    load_local_masters,
    load_local_state,
    local_masters,
    local_state,
    managed_groups,
    optimizer_options,
    replace_by_slices,
    require_one_layout,
)
from .kinds import UpdateKind, update_kinds
from .memory import Sharding, bytes_by_kind, explains_out_of_memory
from .owned import OwnedParameters, team_of
from .parameter_gather import ParameterGather
from .partition import ManagedParameter, Partition, default_bucket_size
from .precision import DynamicScaler, PrecisionConfig
from .reduced_gradients import ReducedGradients
from .reducer import Reducer


class ShardedOptimizer(OptimizerWrapper):
    """Plain data parallelism (stage 0), ZeRO-1 or ZeRO-2 around an optimizer (arXiv:1910.02054).

    The inner optimizer stays the user's object, with the same group dicts, so schedulers built on it before or after
    keep working. Its parameters are replaced by 1-D float32 masters, those in this rank's slices, or by full masters
    that this rank owns, see owned.py. Frozen parameters and those of other pipeline stages are removed from it.

    The constructor is collective over the world. The first rank of the data axis broadcasts its parameters.

    Args:
        optimizer: any torch optimizer that updates each parameter on its own, not stepped yet; see
            `choose_fused_kernels`.
        parameters: the local parameters of the model, in one order on all ranks of the data axis. Those that are not in
            the optimizer stay as they are.
        mesh: the processes. A stage above 0 shards over neighbors as many as its layout's axis "zero"; gradients are
            averaged over all of "data".
        stage: 0 replicates optimizer states on every rank, 1 shards them over the data axis, 2 shards gradients, too:
            every backward averages its gradients, after which `parameter.grad` cannot be read.
        precision: the format of the parameters, and the loss scale. Masters are made from the given parameters, which
            may be float32 under every precision.
        max_norm: gradients of a larger norm are scaled down to it; 0 never clips.
        bucket_size: largest number of elements in one collective; None is `default_bucket_size`.
        overlap_communication: average gradients while backward runs. Without it `reduce_gradients` averages them, and
            at stage 2 a backward waits for each bucket.
        communication_dtype: the format in which gradients are averaged.
        cpu_offload: keep masters, their gradients for the step, and states on the CPU, and step there.
        accumulation_steps: number of calls of `backward`, or blocks of `accumulate_and_reduce`, averaged in each step;
            with 1 a step takes the sum of any number of calls.
        agreement: compares calls of this optimizer and of the model between ranks; None makes one of its own.
        after_step: called on all ranks at the end of every step, also of skipped ones.

    Attributes:
        inner: the user's optimizer.
        last_norm: norm of the gradients of the last step, unscaled, before any clipping; None before the first.
        reducer: reduces gradients into this rank's slices; its contexts are for backwards beside `backward`.
        parameter_gather: all-gathers updated parameters; can overlap this with the next forward.
        skipped_steps: number of steps skipped because gradients were not finite on some rank.
        calls: the calls since the last step.
        sharding: how its memory is sharded.
    """

    def __init__(
        self,
        optimizer: Optimizer,
        parameters: Sequence[ManagedParameter],
        *,
        mesh: ParallelMesh,
        stage: int,
        precision: PrecisionConfig,
        max_norm: float = 0.0,
        bucket_size: int | None = None,
        overlap_communication: bool = True,
        communication_dtype: torch.dtype = torch.float32,
        cpu_offload: bool = False,
        accumulation_steps: int = 1,
        agreement: Agreement | None = None,
        after_step: Callable[[], None] | None = None,
    ) -> None:
        full_groups = [i for i, kind in enumerate(update_kinds(optimizer)) if kind is UpdateKind.PARAMETER]
        self.accumulation_steps = accumulation_steps
        self.last_norm: float | None = None
        self.skipped_steps = 0
        self._agreement, self._after_step = agreement or Agreement(mesh), after_step
        self.calls = CallsOfStep(accumulation_steps)
        self._mesh, self._max_norm = mesh, max_norm
        self.sharding = Sharding(stage, max(mesh.layout.zero, 0) or mesh.size("data"), cpu_offload)
        self._scaler = DynamicScaler(precision) if precision.precision == "fp16" else None
        self._partitions = Partition.all_of(mesh, mesh.layout.zero if stage else 1)
        replicas = self._partitions[None]
        groups = managed_groups(optimizer, parameters)
        require_one_layout(groups, group=replicas.group)
        self._frozen = [managed for managed in parameters if not managed.parameter.requires_grad]
        self._pool = BufferPool() if stage == 2 and replicas.num_slices > 1 else None
        team = team_of(mesh, list(self._partitions.values())) if full_groups else None
        self.buckets = make_buckets(
            groups,
            partitions=self._partitions,
            bucket_size=bucket_size or default_bucket_size(mesh.device, replicas.group.size()),
            dtype=precision.dtype,
            pool=self._pool,
            communication_dtype=communication_dtype,
            is_offloaded=cpu_offload,
            full_groups=full_groups,
            is_owned=team is not None,
        )
        self.reducer = Reducer(
            self.buckets,
            parameters,
            group=replicas.group,
            device=mesh.device,
            overlap=overlap_communication,
            scaler=self._scaler,
            before_plain_backward=self._before_plain_backward,
        )
        self._gradients = ReducedGradients(self.buckets, self.reducer, device=mesh.device)
        self.parameter_gather = ParameterGather(self.buckets)
        self._step_device = torch.device("cpu") if cpu_offload else mesh.device
        self._owned = OwnedParameters(self.buckets, mesh=mesh, team=team, device=self._step_device)
        replace_by_slices(optimizer, self.buckets, device=self._step_device)
        super().__init__(optimizer)  # at the end: an optimizer that is refused stays unchanged

    @property
    def loss_scale(self) -> float:
        """Return the factor of the loss before backward; 1 except under fp16."""
        return self.reducer.loss_scale

    @property
    def gradient_factor(self) -> float | Tensor | None:
        """A factor of the gradients in the next step or clipping, equal on all ranks; a step sets it back to None."""
        return self._gradients.factor

    @gradient_factor.setter
    def gradient_factor(self, factor: float | Tensor | None) -> None:
        self._gradients.factor = factor

    def scale_loss(self, loss: Tensor) -> Tensor:
        """Return the scaled loss, on which to call backward."""
        factor = self.loss_scale / self.accumulation_steps
        return loss if factor == 1 else loss * factor

    @contextmanager
    def accumulate_and_reduce(self, name: str | None = None) -> Iterator[None]:
        """Run one of the `accumulation_steps` calls before a step in this context, and reduce its gradients.

        Collective over the data axis, except inside `no_sync` and, below stage 2, without `overlap_communication`.
        Below stage 2 only the last of several calls reduces. `execute_pipeline` sets a `gradient_factor`, so those of
        earlier steps are reduced and kept separate. If it fails in a backward, gradients with its factor are dropped.

        Args:
            name: "backward()" for calls of it, which ranks compare by name; None for `execute_pipeline`.

        Raises:
            RuntimeError: all calls have been made, or gradients were written to by something other than a backward.
        """
        self.calls.begin(is_backward=name is not None, has_factor=self.gradient_factor is not None)
        is_first = self.calls.is_first
        if name is not None:  # backward() has no factor of its own
            self._gradients.apply_factor()
        elif is_first and self.reducer.holds_gradients:  # all calls of a step share the new factor
            self._gradients.set_aside(self._reduce)
        reducer, num_contexts = self.reducer, self.reducer.num_contexts
        with nullcontext() if self.calls.is_last or reducer.shards_gradients else self.no_sync():
            is_collective = reducer.may_launch
            if is_collective and name is not None:
                self._compare_call(name)
            reducer.begin_accumulation()
            try:
                yield
            except BaseException:
                # A later call that fails before any backward leaves the gradients of earlier calls complete.
                if name is None and (is_first or reducer.num_contexts > num_contexts):
                    self.calls.clear()
                    self._gradients.discard()
                raise
            if is_collective and not reducer.shards_gradients:
                self._reduce()
        self.calls.end()

    def backward(self, loss: Tensor, *, retain_graph: bool = False) -> None:
        """Scale the loss and accumulate its gradients; see `accumulate_and_reduce`."""
        with self.accumulate_and_reduce("backward()"), self.reducer.last_backward():
            self.scale_loss(loss).backward(retain_graph=retain_graph)

    def _before_plain_backward(self) -> None:
        """Apply the pending factor before a backward of the user adds gradients without it."""
        self.calls.require_one_kind(has_factor=self.gradient_factor is not None)
        self._gradients.apply_factor()

    def no_sync(self) -> AbstractContextManager[None]:
        """Return a context in which backwards only accumulate; a later one reduces. See `accumulate_and_reduce`."""
        return self.reducer.postponing_averages()

    def get_grad_norm(self) -> float | None:
        """Return `last_norm`; the name is ColossalAI's."""
        return self.last_norm

    @torch.no_grad()
    def zero_grad(self, set_to_none: bool = True) -> None:
        """Drop the gradients. As in torch, a parameter is stepped with zeros, but not with None."""
        if not set_to_none:
            self.parameter_gather.wait()  # zeros take a parameter's shape, and it is empty while in flight
        self._gradients.reset()
        self.calls.clear()
        self._agreement.clear()
        self.reducer.drop(to_zeros=not set_to_none)

    @torch.no_grad()
    def reduce_gradients(self) -> None:
        """Sum partial gradients, then average over the data axis, unless no backward ran since the last reduction.

        Collective over the sum groups and the data axis. Afterwards `parameter.grad` is the reduced gradient only in
        this rank's slice. At stage 0 that is all of it, at stage 1 see `gradients`. At stage 2 it cannot be read.

        Raises:
            RuntimeError: gradients were written to by something other than a backward.
        """
        self._compare_call("reduce_gradients()")
        self._reduce()

    @torch.no_grad()
    def _reduce(self) -> None:
        """Reduce gradients that are not reduced yet, or raise RuntimeError if reduced ones were written to."""
        if self.reducer.is_reduced:
            self.reducer.require_unchanged()
        else:
            self.parameter_gather.wait()  # for parameters that no forward used; they may be given gradients
            self.reducer.reduce()
            self._gradients.begin_reduced()

    @naming_failures("optimizer.clip_grad_by_norm")
    @torch.no_grad()
    def clip_grad_by_norm(
        self, max_norm: float, norm_type: float = 2.0, error_if_nonfinite: bool = False
    ) -> Tensor:
        """Reduce and unscale the gradients, and clip them over all ranks to a norm. Call between backward and step.

        Collective over the world. Gradients that are not finite stay as they are, and the step will be skipped.

        Args:
            max_norm: gradients of a larger norm are scaled down to it; `inf` only measures.
            norm_type: the p of the norm, `inf` for the largest magnitude.
            error_if_nonfinite: raise if the norm is infinite or NaN, as after an overflow of fp16.

        Returns:
            The unscaled norm before clipping, 0-d, equal on all ranks.

        Raises:
            ValueError: arguments differ between ranks, on all of them; nothing was clipped.
            RuntimeError: calls of `gradient_accumulation_steps` are missing.
            UnmatchedCall: other ranks step meanwhile.
        """
        require_clip_norm(max_norm, norm_type)
        self.calls.require_all("optimizer.clip_grad_by_norm()")
        self.reduce_gradients()
        norm = self._agreed_norm(max_norm=max_norm, norm_type=norm_type)
        norm = self._gradients.clip_by_norm_(norm, float(max_norm), float(norm_type))
        if error_if_nonfinite:
            require_finite_norm(norm, norm_type)
        return numbers_on(self._mesh.device, [norm], torch.float32)[0]

    @naming_failures("optimizer.clip_grad_by_value")
    @torch.no_grad()
    def clip_grad_by_value(self, clip_value: float) -> None:
        """Reduce and unscale the gradients, and clip every entry to -clip_value … clip_value.

        Call between backward and step. Collective over the world. If any gradient is not finite, all stay as they are,
        and the step will be skipped. Raises the errors of `clip_grad_by_norm`.
        """
        require_clip_value(clip_value)
        self.calls.require_all("optimizer.clip_grad_by_value()")
        self.reduce_gradients()
        norm = self._agreed_norm(clip_value=clip_value)  # finite if all gradients are
        self._gradients.clip_by_value_(norm, float(clip_value))

    @naming_failures("optimizer.step")
    @explains_out_of_memory
    @torch.no_grad()
    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        """Update the parameters, or skip the step on all ranks if any gradient of any rank is not finite.

        Collective over the world. As in torch, a parameter without a gradient on all ranks does not change.

        Args:
            closure: computes the loss and its gradients, through `backward`.

        Returns:
            The closure's result.

        Raises:
            RuntimeError: parameters were moved or retyped since boost, gradients were written to since backward, the
                loss scale cannot fall further, or fewer than `accumulation_steps` calls were made.
            ValueError: options of the groups, such as learning rates, differ between ranks; nothing was updated.
        """
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        self.calls.require_all("optimizer.step()")
        self.parameter_gather.wait()
        self._require_same_parameters()
        self._compare_call("step()")
        self._reduce()
        norm = self._measure()
        if isfinite(norm):
            self._gradients.clip_for_step_(norm, self._max_norm)
            self._step_slices()
            self.parameter_gather.gather()
        else:
            self._skip()
        if self._scaler is not None:
            self._scaler.update(not isfinite(norm))
        if self._after_step is not None:
            self._after_step()
        return loss

    def _require_same_parameters(self) -> None:
        """Raise RuntimeError if a parameter was moved out of its bucket, or unfrozen, since boost."""
        for slot in self.reducer.slots:
            if not slot.is_in_place:
                raise RuntimeError(
                    f"{slot.managed.name} is no longer in the memory that boost gave it (model.to(), .half() "
                    "and parameter.data = … take it out): move and cast the model before boost"
                )
        for managed in self._frozen:
            if managed.parameter.requires_grad:
                raise RuntimeError(
                    f"{managed.name} was frozen at boost and requires a gradient now, but nothing would "
                    "update it: set requires_grad before boost"
                )

    def _compare_call(self, call: str) -> None:
        self._agreement.compare_reductions(call, is_reduced=self.reducer.is_reduced)

    def _measure(self) -> float:
        """Return the norm for a step, and end the calls that it uses. One all-reduce over the world."""
        norm = self._agreed_norm()
        self._agreement.clear()
        self.last_norm = self._gradients.norm  # `norm` may include clipping by the user
        self._gradients.finish()
        self.calls.clear()
        return norm

    def _agreed_norm(self, **arguments: float) -> float:
        """Return the norm; compare batches, options and `arguments` between ranks. One all-reduce over the world."""
        settings = {**arguments, **optimizer_options(self.inner)}
        norm = self._gradients.measure(
            code=self._agreement.code(settings),
            checksum_term=self._agreement.checksum_term,
            flags=self._owned.write_flags,
        )
        if not self._gradients.is_agreed:
            require_equal(settings, what="the optimizer", rule=EQUAL_OPTIONS)
            self._agreement.explain()
        return norm

    def _skip(self) -> None:
        self.skipped_steps += 1
        # Otherwise a scheduler built on the inner optimizer warns that it stepped before its optimizer.
        self.inner._opt_called = True  # type: ignore[attr-defined]

    def _step_slices(self) -> None:
        """Give this rank's masters their gradients and step the inner optimizer. Collective over teams (owned.py)."""
        for bucket in self.buckets:
            if bucket.was_written:
                bucket.refresh_()
            bucket.offload_gradients()
        if any(self._gradients.flags):  # sums of `write_flags`
            self._owned.refresh()
        self._owned.collect_gradients()
        for slot, has_gradient in zip(self.reducer.slots, self._gradients.has_gradients, strict=True):
            if slot.piece is not None:
                slot.piece.grad = slot.piece_gradient if has_gradient else None
        if self.sharding.is_offloaded:
            wait_for_stream(self._mesh.device)
        with self._guard:
            self.inner.step()
        self._owned.scatter_masters()

    @torch.no_grad()
    def gradients(self) -> dict[str, Tensor]:
        """Return the reduced gradients by name: float32, unscaled, unsharded. Collective over the data axis.

        Available from `reduce_gradients` until the next backward or `zero_grad`. The loss scale is removed,
        `gradient_factor` applied, and the clipping of a step to `max_norm` undone (one rounding), but not that of
        `clip_grad_by_norm` and `clip_grad_by_value`. A parameter is left out if no rank has a gradient of it.

        Raises:
            RuntimeError: the gradients are not reduced.
        """
        if not self.reducer.is_reduced:
            raise RuntimeError("gradients() needs reduced gradients: call reduce_gradients() or step() first")
        named = gather_by_name(
            self.buckets, lambda bucket: bucket.gradient_slice * self._gradients.to_unclipped
        )
        names = [slot.managed.name for slot in self.reducer.slots]
        flags = self.reducer.has_gradients.tolist()
        return {name: named[name] for name, has_gradient in zip(names, flags, strict=True) if has_gradient}

    @torch.no_grad()
    def masters(self) -> dict[str, Tensor]:
        """Return unsharded copies of the float32 weights by name. Collective over the data axis, and over teams."""
        slices, device = self._owned.slices(), self._mesh.device
        return gather_by_name(self.buckets, lambda bucket: slices.get(bucket, bucket.masters).to(device))

    @torch.no_grad()
    def refresh_masters(self) -> None:
        """Update the masters from parameters that were written to, for example by loading weights.

        A step does it itself after in-place writes that torch counts, such as `load_state_dict` and
        `parameter.copy_()`, but not after `parameter.data.copy_()`. Masters that still round to their parameter keep
        their low bits. Collective over the team where ranks own full parameters, see owned.py.
        """
        for bucket in self.buckets:
            bucket.refresh_()
        self._owned.refresh()

    def held_bytes(self) -> dict[str, int]:
        """Return the bytes on this rank by kind, padding included.

        "parameters" include frozen ones. "gradients" are unsharded, or at stage 2 this rank's slices. "buffers" are
        those for unsharded gradients at stage 2. "scalars" are optimizer states of one entry. Memory that `cpu_offload`
        keeps on the CPU is listed separately, if there is any.
        """
        return bytes_by_kind(
            self.buckets,
            self._owned,
            frozen=self._frozen,
            states=[entry for state in self.state.values() for entry in state.values()],
            pool=self._pool,
            is_offloaded=self.sharding.is_offloaded,
        )

    def state_dict(self) -> dict[str, Any]:
        """Return `local_state`, if every rank has all states.

        Raises:
            RuntimeError: the states are sharded; names `booster.save_optimizer`.
        """
        slices = [partition.num_slices for partition in self._partitions.values()]
        if max(self._mesh.size("tp", "pp"), len(slices), *slices) > 1:
            raise RuntimeError(PARTIAL_STATE)
        return self.local_state()

    def local_state(self) -> dict[str, Any]:
        """Return this rank's shard: the inner optimizer's state and groups, masters, loss scale and layout."""
        state = local_state(self.inner, self._scaler)
        return state | self.local_masters() | {"skipped_steps": self.skipped_steps}

    def local_masters(self) -> dict[str, Any]:
        """Return the masters of this rank and the layout, as in `local_state`."""
        return local_masters(self.buckets, self._owned)

    def scaler_state(self) -> dict[str, Any] | None:
        """Return the loss scale of fp16 and its counters; None under other precisions."""
        return None if self._scaler is None else self._scaler.state_dict()

    @naming_failures("optimizer.load_state_dict")
    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Load this rank's `local_state` of the same layout. Collective over the data axis.

        Raises:
            ValueError: it was saved under another layout.
        """
        with torch.no_grad():
            self.parameter_gather.wait()
            load_local_masters(self.local_masters(), state_dict)
            load_local_state(self.inner, self._scaler, state_dict, device=self._step_device)
            self._owned.scatter_masters()
            self.parameter_gather.gather()
        self.skipped_steps = state_dict["skipped_steps"]
