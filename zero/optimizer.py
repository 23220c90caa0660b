"""The optimizer that owns a run's flat memory, precision and reductions, around the user's own optimizer.

backward()            gradients accumulate in float32, in flat buckets (bucket.py)
reduce_gradients()    sums over tied and partial copies (reduction.py), mean over the data axis (partition.py)
step()                norm and verdict of all ranks (norm.py), unscale and clip, inner step on own slices,
                      parameters gathered
"""

from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from math import isfinite
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import Parameter
from torch.optim import Optimizer

from ..cluster.faults import naming_failures
from ..cluster.mesh import ParallelMesh
from .bucket import Bucket
from .buckets import fill_buckets, publish
from .elementwise import require_elementwise
from .embedding import add_gradients_by_row
from .faults import require_untouched, sharding_faults, zero_size_faults
from .groups import hold_pieces, managed_groups
from .held import HeldBytes, held_bytes
from .loan import Loans
from .norm import clip_coefficient, norm_over_all_ranks
from .parameter import ManagedParameter
from .partition import Partition
from .precision import DynamicScaler, PrecisionConfig
from .reduction import Reducer, require_one_layout
from .state import load_local_state, local_state


class ShardedOptimizer(Optimizer):
    """Plain data parallelism (stage 0), ZeRO-1 or ZeRO-2 around any element-wise optimizer (arXiv:1910.02054).

    The inner optimizer stays the user's object, with the same group dicts: schedulers built on it, before or
    after, keep acting. Its groups hold, in the place of the parameters, float32 1-D pieces of them: those of
    this rank's slice. Parameters of other pipeline stages and frozen ones are taken out of it.

    Building it is collective over the world. All ranks of the data axis start from the first's parameters.

    Args:
        optimizer: any torch optimizer that updates every entry on its own, not stepped yet.
        parameters: this rank's part of the model, in one order on all ranks of the data axis. Those that the
            optimizer does not hold are left alone.
        mesh: the processes.
        stage: 0 keeps all optimizer states on every rank, 1 shares them out over the data axis, 2 the gradients
            too: every backward averages what it brings, and `parameter.grad` is None from then on.
        precision: the format of the parameters, and the loss scale. Parameters may arrive in float32 under
            every precision: masters are made from what arrives.
        max_norm: gradients of a larger norm are scaled down to it; 0 never clips.
        norm_type: the p of the norm that is measured and clipped, `inf` for the largest magnitude.
        bucket_size: largest number of elements that are communicated at once.
        data_axis: the axis of the mesh that gradients are averaged over.
        zero_size: over how many neighbouring ranks of that axis a stage above 0 shares out, a node for example; -1
            or 0 is all of them, 1 none. Gradients are averaged over the whole axis all the same.
        overlap_communication: average gradients while backward runs. Without it `reduce_gradients` does, and at
            stage 2 a backward waits for each bucket.
        communication_dtype: the format in which gradients are averaged over the data axis.

    Attributes:
        inner: the user's optimizer.
        gradient_factor: what the next step multiplies gradients with besides, None for nothing; equal on all
            ranks. `step` and `zero_grad` set it back to None.
        last_norm: norm of the gradients of the last step, unscaled, before clipping; None before the first.
        skipped_steps: how many steps were skipped since their gradients were not finite on some rank.
    """

    def __init__(  # the base class is not initialized: groups, state, defaults and hooks are the inner one's
        self,
        optimizer: Optimizer,
        parameters: Sequence[ManagedParameter],
        *,
        mesh: ParallelMesh,
        stage: int,
        precision: PrecisionConfig,
        max_norm: float = 0.0,
        norm_type: float = 2.0,
        bucket_size: int = 12 * 1024**2,
        data_axis: str = "dp",
        zero_size: int = -1,
        overlap_communication: bool = True,
        communication_dtype: torch.dtype = torch.float32,
    ) -> None:
        faults = sharding_faults(
            stage=stage, max_norm=max_norm, norm_type=norm_type, bucket_size=bucket_size
        ) + zero_size_faults(zero_size, mesh.size(data_axis))
        if faults:
            raise ValueError("; ".join(faults))
        require_elementwise(optimizer)
        self.inner = optimizer
        self.gradient_factor: float | Tensor | None = None
        self.last_norm: float | None = None
        self.skipped_steps = 0
        self._mesh = mesh
        self._max_norm = max_norm
        self._norm_type = norm_type
        self._scaler = DynamicScaler(precision) if precision.precision == "fp16" else None
        self._partition = Partition.of(mesh, data_axis, zero_size if stage else 1)
        groups = managed_groups(optimizer, parameters)
        require_one_layout(groups, group=self._partition.group, device=mesh.device)
        self._frozen = [managed for managed in parameters if not managed.parameter.requires_grad]
        self._loans = Loans() if stage == 2 and self._partition.num_slices > 1 else None
        self.buckets = fill_buckets(
            groups,
            dtype=precision.dtype,
            partition=self._partition,
            bucket_size=bucket_size,
            loans=self._loans,
            communication_dtype=communication_dtype,
        )
        self._reducer = Reducer(
            self.buckets,
            parameters,
            partition=self._partition,
            device=mesh.device,
            overlap=overlap_communication,
        )
        hold_pieces(optimizer, self.buckets)
        # What reduced gradients must be multiplied with to be the true ones; None before a step.
        self._unclip: float | None = None
        self._is_stepping = False
        self._is_held_back = False
        optimizer.register_step_pre_hook(self._refuse_inner_step)
        # Hooks registered on this optimizer run with the inner one's.
        self.__dict__.update(
            {name: value for name, value in vars(optimizer).items() if name.endswith("_hooks")}
        )

    @property
    def param_groups(self) -> list[dict[str, Any]]:  # type: ignore[override]
        """The inner optimizer's own groups."""
        return self.inner.param_groups

    @property
    def state(self) -> Any:  # type: ignore[override]
        """The inner optimizer's state, by piece."""
        return self.inner.state

    @property
    def defaults(self) -> dict[str, Any]:  # type: ignore[override]
        """The inner optimizer's defaults."""
        return self.inner.defaults

    @property
    def loss_scale(self) -> float:
        """What the loss is multiplied with before backward; 1 but for fp16."""
        return 1.0 if self._scaler is None else self._scaler.scale

    def scale_loss(self, loss: Tensor) -> Tensor:
        """The loss to call backward on."""
        return loss if self._scaler is None else loss * self._scaler.scale

    def backward(self, loss: Tensor, *, retain_graph: bool = False) -> None:
        """Scale the loss and accumulate its gradients, which are averaged over the data axis meanwhile.

        Collective over the data axis, but inside `no_sync` and (below stage 2) without `overlap_communication`. A
        further one before the step is averaged on its own, and added.
        """
        is_alone = not (self._is_held_back or self._reducer.is_launching)
        if is_alone:
            self._reducer.meet("backward()")
        self.settle()
        with self.last_backward():
            self.scale_loss(loss).backward(retain_graph=retain_graph)
        if is_alone and self._reducer.reduces_in_backward:
            self._reduce()

    @property
    def _factor(self) -> float | Tensor:
        return 1.0 if self.gradient_factor is None else self.gradient_factor

    def __deepcopy__(self, memo: dict[int, Any]) -> "ShardedOptimizer":
        raise TypeError(
            "a boosted optimizer cannot be copied, since its parameters and process groups cannot: take its "
            "state_dict(), or copy the optimizer before boost"
        )

    def get_grad_norm(self) -> float | None:
        """`last_norm`, under ColossalAI's name."""
        return self.last_norm

    @torch.no_grad()
    def zero_grad(self, set_to_none: bool = True) -> None:
        """Forget the gradients. As in torch, a parameter is stepped with zeros, but not with None."""
        self._unclip = None
        self.gradient_factor = None
        self._reducer.forget(to_zeros=not set_to_none)

    @torch.no_grad()
    def reduce_gradients(self) -> None:
        """Sum partial gradients, then average over the data axis, unless no backward ran since the last time.

        Collective over the sum groups and the data axis. After it, `parameter.grad` is the reduced gradient
        only in this rank's slice: all of it in stage 0; in stage 1 see `gradients`. In stage 2 it is None.
        """
        self._reducer.meet("reduce_gradients()")
        self._reduce()

    @torch.no_grad()
    def _reduce(self) -> None:
        if not self._reducer.is_reduced:
            self._reducer.reduce()
            self._unclip = None

    def add_gradients_by_row(self, model: nn.Module) -> None:
        """Let a model's embeddings add their gradients row by row: see embedding.py."""
        add_gradients_by_row(model, self._reducer)

    def settle(self) -> None:
        """Finish reductions that a `last_backward` began, so that a further backward may add to them.

        Collective over the sum groups and the data axis, where they began. If every rank's gradients were dropped
        since then, by the model's own `zero_grad`, they are forgotten.
        """
        if self._reducer.has_started:
            if self._reducer.was_dropped():
                self._reducer.forget(to_zeros=False)
            else:
                self._reduce()

    def accumulating(self) -> AbstractContextManager[None]:
        """A context for parts of a backward that add to the gradients, before the part that is the last."""
        return self._reducer.accumulating()

    def every_backward(self, parameters: Sequence[Parameter] | None = None) -> AbstractContextManager[None]:
        """A context for a backward that is not called through `backward`, and adds to the gradients too.

        At stage 2 they are averaged over the data axis while it runs, but inside `no_sync`. Every rank of that axis
        enters it for the same parameters in the same order.

        Args:
            parameters: those whose gradients are complete for this backward when the context ends; None is all.
        """
        return self.accumulating() if self._is_held_back else self._reducer.every_backward(parameters)

    def last_backward(self, parameters: Sequence[Parameter] | None = None) -> AbstractContextManager[None]:
        """A context for the last backward of these parameters, or of all, before the next step.

        Their gradients are averaged over the data axis while it runs. Every rank of that axis enters it for
        the same parameters in the same order. Inside `no_sync` it is `accumulating` alone.
        """
        if self._is_held_back:
            return self.accumulating()
        return self._reducer.last_backward(parameters)

    @contextmanager
    def no_sync(self) -> Iterator[None]:
        """More backwards follow before the next step: start no reduction inside."""
        before, self._is_held_back = self._is_held_back, True
        try:
            yield
        finally:
            self._is_held_back = before

    @naming_failures("optimizer.step")
    @torch.no_grad()
    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        """Update the parameters, or skip the step on all ranks if any gradient of any rank is not finite.

        Collective over the world. A parameter that got no gradient on any rank is left alone, as in torch.

        Args:
            closure: computes the loss and its gradients, through `backward`.

        Returns:
            What the closure returned.

        Raises:
            RuntimeError: parameters were moved or retyped since boost, or the loss scale cannot fall further.
        """
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        require_untouched(self._reducer.slots, self._frozen)
        self._reducer.meet("step()")
        self._reduce()
        norm, factor, present = self._measured()
        self.last_norm = norm * abs(factor)
        overflow = not isfinite(self.last_norm)
        self.gradient_factor = None
        if overflow:
            self.skipped_steps += 1
            self._unclip = factor
            # Or a scheduler built on the inner optimizer warns that it stepped before its optimizer.
            self.inner._opt_called = True  # type: ignore[attr-defined]
        else:
            clip = clip_coefficient(self.last_norm, self._max_norm)
            self._unclip = 1 / clip
            self._update_own_slices(factor * clip, present)
            publish(self.buckets)
        if self._scaler is not None:
            self._scaler.update(overflow)
        self._reducer.resumed_factor = self.loss_scale
        return loss

    @torch.no_grad()
    def gradients(self) -> dict[str, Tensor]:
        """The reduced gradients by name: float32, unscaled, unclipped, whole. Collective over the data axis.

        Callable from `reduce_gradients` until the next backward or `zero_grad`. Before a step they include
        `gradient_factor` as it then is; after a step they are those that the step used, with its clipping
        divided out again (one rounding). Parameters that got no gradient on any rank are left out.

        Raises:
            RuntimeError: the gradients are not reduced.
        """
        if not self._reducer.is_reduced:
            raise RuntimeError("gradients() needs reduced gradients: call reduce_gradients() or step() first")
        true = self._factor / self.loss_scale if self._unclip is None else self._unclip
        named = self._named(lambda bucket: self._partition.gathered(bucket.own_gradients) * true)
        present = self._reducer.present.tolist()
        return {
            slot.managed.name: named[slot.managed.name]
            for slot, is_present in zip(self._reducer.slots, present, strict=True)
            if is_present
        }

    @torch.no_grad()
    def masters(self) -> dict[str, Tensor]:
        """Copies of the float32 weights by name, whole. Collective over the data axis."""
        return self._named(lambda bucket: self._partition.gathered(bucket.masters))

    def _named(self, flat: Callable[[Bucket], Tensor]) -> dict[str, Tensor]:
        return {
            name: part for bucket in self.buckets for name, part in bucket.unflattened(flat(bucket)).items()
        }

    @torch.no_grad()
    def refresh_masters(self) -> None:
        """Take over parameters that were written to, by loading weights for example.

        A step does it by itself for in-place writes that torch counts, as `load_state_dict` and
        `parameter.copy_()` are; `parameter.data.copy_()` is not. Masters that still round to their
        parameter keep their low bits.
        """
        for bucket in self.buckets:
            bucket.refresh_()

    def held_bytes(self) -> HeldBytes:
        """The memory of parameters, gradients, masters and states on this rank."""
        frozen = [managed.parameter for managed in self._frozen]
        buffers = 0 if self._loans is None else self._loans.nbytes
        return held_bytes(self.buckets, frozen, self.inner, buffers=buffers, arrivals=self._partition.nbytes)

    def state_dict(self) -> dict[str, Any]:
        """This rank's part: the inner optimizer's state and groups, masters, loss scale and layout."""
        return local_state(self.inner, self.buckets, self._scaler) | {"skipped_steps": self.skipped_steps}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Continue from this rank's `state_dict` of the same layout. Collective over the data axis.

        Raises:
            ValueError: it was saved under another layout.
        """
        with torch.no_grad():
            load_local_state(self.inner, self.buckets, self._scaler, state_dict)
        self.skipped_steps = state_dict["skipped_steps"]

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """Refused: the flat memory is laid out once."""
        raise RuntimeError("add parameter groups to the optimizer before boost: its memory is laid out there")

    def _measured(self) -> tuple[float, float, list[bool]]:
        """The norm of the scaled gradients, what unscales them, and which slots any rank has a gradient for.

        One all-reduce over the world, and one wait of the host for the device.
        """
        device = self._mesh.device
        norm = norm_over_all_ranks(
            [run for bucket in self.buckets for run in bucket.counted],
            [run for bucket in self.buckets for run in bucket.watched],
            norm_type=self._norm_type,
            device=device,
        )
        factor = torch.as_tensor(self._factor, dtype=torch.float64, device=device).view(1)
        measured, factor_, *present = torch.cat(
            [norm.view(1), factor, self._reducer.present.double()]
        ).tolist()
        # A second step on the same gradients finds them unscaled.
        scale = self.loss_scale if self._unclip is None else 1.0
        return measured, factor_ / scale, [flag > 0 for flag in present]

    def _update_own_slices(self, coefficient: float, present: list[bool]) -> None:
        for bucket in self.buckets:
            if bucket.was_written:
                bucket.refresh_()
            if coefficient != 1.0:
                bucket.own_gradients.mul_(coefficient)
        for slot, is_present in zip(self._reducer.slots, present, strict=True):
            if slot.piece is not None:
                slot.piece.grad = slot.piece_gradient if is_present else None
        self._is_stepping = True
        try:
            self.inner.step()
        finally:
            self._is_stepping = False

    def _refuse_inner_step(self, *_: Any) -> None:
        if not self._is_stepping:
            raise RuntimeError(
                "this optimizer was boosted: step the one that boost returned, which reduces gradients first"
            )
