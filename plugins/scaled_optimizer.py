"""ScaledOptimizer: a torch optimizer with torch's loss scaling, for TorchDDPPlugin and TorchFSDPPlugin.

HybridParallelPlugin uses `zero.optimizer.ShardedOptimizer` instead.
"""

from collections.abc import Callable, Mapping
from typing import Any, NoReturn

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.tensor import DTensor
from torch.nn import Parameter
from torch.optim import Optimizer

from ..cluster.collectives import InFlight
from ..cluster.failures import naming_failures
from ..cluster.gathering import begin_require_equal
from ..zero.clipping import require_clip_norm, require_clip_value, require_finite_norm
from ..zero.inner_optimizer import EQUAL_OPTIONS, NOT_PICKLED, StepGuard, optimizer_options
from ..zero.precision import beyond_fp16

# torch's GradScaler has no minimum: it halves the scale down to 0, and then skips every step silently. Training fails
# here at the scale and the number of consecutive overflows at which the other plugins fail by default.
_LOWEST_SCALE = 1.0
_MOST_OVERFLOWS = 2
_RULE = EQUAL_OPTIONS + ", but the last step used these: restart from a checkpoint"


class ScaledOptimizer(Optimizer):
    """A torch optimizer with loss scaling; all other attributes are those of the inner optimizer.

    It derives from torch's Optimizer because schedulers require that, and has no parameter groups itself.

    Attributes:
        optim: the inner optimizer.
        scaler: the loss scale.
        names: the parameters' names in the plain model.
        group: all ranks, used only to compare the options of parameter groups; None compares nothing.
        after_step: called at the end of every step, including skipped ones.
        skipped_steps: the number of steps skipped for an overflow; 0 without a loss scale.
    """

    def __init__(
        self, optimizer: Optimizer, scaler: "torch.amp.GradScaler", names: Mapping[Parameter, str]
    ) -> None:
        self.optim = optimizer
        self.scaler = scaler
        self.names = names
        self._last_norm: Tensor | None = None
        self.skipped_steps = 0
        self.group: dist.ProcessGroup | None = None
        self.after_step: Callable[[], None] | None = None
        self._options_comparison: InFlight[None] | None = None  # of the last step; the next one waits for it
        self._clipped: dict[str, float] = {}  # the arguments of clipping since the last step
        self._guard = StepGuard(optimizer)
        self._overflows_in_a_row = 0
        self._is_scaled = False  # True after a backward of a scaled loss, until the next step
        self._is_unscaled = False  # True from clipping until the next step
        # On the device, so that no backward waits: the gradients' norms after the last backward, and True if one was
        # written to since. torch's version counters do not change for DTensors.
        self._recorded_norms: Tensor | None = None
        self._was_written: Tensor | None = None

    def __getattr__(self, name: str) -> Any:
        return getattr(self.__dict__["optim"], name)

    def __reduce_ex__(self, protocol: Any) -> NoReturn:
        raise TypeError(NOT_PICKLED)

    def backward(self, loss: Tensor) -> None:
        """Compute gradients of the loss, scaled if the precision needs it.

        Raises:
            RuntimeError: with a loss scale, the previous gradients were clipped and so are unscaled already.
        """
        if self._is_unscaled:
            self._end_clipping()
        self._watch_writes()
        self.scaler.scale(loss).backward()
        self._is_scaled = True
        self._note_gradients()

    @naming_failures("optimizer.step")
    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        """Update the parameters, or skip the step if a scaled gradient overflowed.

        Args:
            closure: computes the loss and its gradients, through `backward`.

        Returns:
            The result of the closure.

        Raises:
            RuntimeError: with a loss scale, there are no scaled gradients, or they overflow at a scale of 1.
            ValueError: options of the parameter groups (e.g. learning rates) or clipping differed between ranks in the
                previous step.
        """
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        self._require_scaled("step()")
        self._compare_options()
        with self._guard:
            self.scaler.step(self.optim)
        self._update_scale()
        if self.after_step is not None:
            self.after_step()
        return loss

    def zero_grad(self, set_to_none: bool = True) -> None:
        """Drop the gradients, and the records of their scale and of writes to them."""
        if self._is_unscaled:
            # Clipped without a step: GradScaler would regard the next gradients as unscaled, too.
            self._update_scale()
        self.optim.zero_grad(set_to_none)
        if set_to_none:  # zeros are valid under any scale
            self._is_scaled = False
        self._was_written = None
        self._note_gradients()

    @naming_failures("optimizer.clip_grad_by_norm", ())
    def clip_grad_by_norm(
        self, max_norm: float, norm_type: float = 2.0, error_if_nonfinite: bool = False
    ) -> Tensor:
        """Clip the unscaled gradients to a norm, after all backwards of a step; return the norm before clipping.

        The norm of sharded gradients is that over all shards, by an all-reduce over the shard group.

        Args:
            max_norm: gradients of a larger norm are scaled down to it; `inf` only measures.
            norm_type: the p of the norm, `inf` for the largest magnitude.
            error_if_nonfinite: raise if the norm is infinite or NaN, as after an overflow of fp16.

        Raises:
            RuntimeError: with a loss scale, there are no scaled gradients.
        """
        require_clip_norm(max_norm, norm_type)
        self._require_scaled("clip_grad_by_norm()")
        self._clipped |= {"max_norm": max_norm, "norm_type": norm_type}
        self._unscale()
        gradients = [parameter.grad for parameter in self._parameters() if parameter.grad is not None]
        norm = torch.nn.utils.get_total_norm(gradients, norm_type)
        full_norm = norm.full_tensor() if isinstance(norm, DTensor) else norm
        self._last_norm = full_norm
        if error_if_nonfinite:
            require_finite_norm(float(full_norm), norm_type)
        torch.nn.utils.clip_grads_with_norm_(self._parameters(), max_norm, norm)
        return full_norm

    def clip_grad_by_value(self, clip_value: float) -> None:
        """Clip every entry of the unscaled gradients to -clip_value … clip_value, after all backwards of a step.

        With a loss scale, an overflow still skips the step.

        Raises:
            RuntimeError: with a loss scale, there are no scaled gradients.
        """
        require_clip_value(clip_value)
        self._require_scaled("clip_grad_by_value()")
        self._clipped["clip_value"] = clip_value
        self._unscale()
        torch.nn.utils.clip_grad_value_(self._parameters(), clip_value)

    @property
    def last_norm(self) -> float | None:
        """The last result of `clip_grad_by_norm`, read from the device. None before it: torch computes no norm."""
        return None if self._last_norm is None else float(self._last_norm)

    def get_grad_norm(self) -> float | None:
        """Return `last_norm`; the name is ColossalAI's."""
        return self.last_norm

    def state_dict(self) -> dict[str, Any]:
        """Return the inner optimizer's state."""
        return self.optim.state_dict()

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Load the inner optimizer's state."""
        self.optim.load_state_dict(state_dict)

    def scaler_state(self) -> dict[str, Any] | None:
        """Return the loss scale and its counters, in the format of the other plugins; None without a loss scale."""
        if not self.scaler.is_enabled():
            return None
        state = self.scaler.state_dict()
        return {
            "scale": state["scale"],
            "steps_without_overflow": state["_growth_tracker"],
            "overflows_in_a_row": 0,
            "overflows_since_growth": 0,
        }

    def install_state(self, state: dict[str, Any], extra: Mapping[str, Any]) -> None:
        """Restore the inner optimizer's state, the loss scale and the skipped steps from a checkpoint.

        A checkpoint of a run without a loss scale leaves the current one.
        """
        self.optim.load_state_dict(state)
        self.skipped_steps = extra["skipped_steps"]
        if (saved := extra["scaler"]) is not None and self.scaler.is_enabled():
            loaded = {"scale": saved["scale"], "_growth_tracker": saved["steps_without_overflow"]}
            self.scaler.load_state_dict(self.scaler.state_dict() | loaded)

    def _parameters(self) -> list[Parameter]:
        return [parameter for group in self.optim.param_groups for parameter in group["params"]]

    def _has_gradients(self) -> bool:
        return any(parameter.grad is not None for parameter in self._parameters())

    def _require_scaled(self, call: str) -> None:
        """Raise RuntimeError if there are no scaled gradients, or if other code wrote to them. Waits for the device.

        torch's GradScaler would fail an assertion in the first case, and compute wrong numbers in the second. Without
        a loss scale everything is allowed.

        Args:
            call: the user's call, for the error.
        """
        if not self.scaler.is_enabled():
            return
        if not (self._is_scaled and self._has_gradients()):
            raise RuntimeError(
                f"{call} in fp16 needs gradients of a scaled loss, but there are none: call "
                "booster.backward(loss, optimizer) before it, not loss.backward(), and use no GradScaler of "
                "your own"
            )
        self._watch_writes()
        if self._was_written is not None and self._was_written.item():
            raise RuntimeError(
                f"{call} in fp16 needs gradients with the loss scale, but other code wrote to them: call "
                "booster.backward(loss, optimizer) instead of loss.backward(), and "
                "optimizer.clip_grad_by_norm(max_norm) or optimizer.clip_grad_by_value(clip_value) instead "
                "of torch's clipping; optimizer.zero_grad() drops them"
            )

    def _compare_options(self) -> None:
        """Compare the options of parameter groups, and of clipping since the last step, between ranks.

        Starts an all-gather of a checksum, and reads that of the last step, so that no step waits.

        Raises:
            ValueError: options differed in the last step.
        """
        if self.group is None or self.group.size() == 1:
            return
        comparison, self._options_comparison = self._options_comparison, None
        if comparison is not None:
            comparison.wait()
        settings, self._clipped = {**self._clipped, **optimizer_options(self.optim)}, {}
        self._options_comparison = begin_require_equal(
            settings, what="the optimizer", rule=_RULE, group=self.group
        )

    def _note_gradients(self) -> None:
        """Record the norms of the gradients after a backward, with which `_watch_writes` compares."""
        self._recorded_norms = self._norms() if self._is_scaled and self.scaler.is_enabled() else None

    def _watch_writes(self) -> None:
        """Compare the norms of scaled gradients with those after the last backward, and set `_was_written`.

        Norms that differ mean that other code than `backward` wrote to gradients. Nothing waits for the device.
        Writing zeros is allowed, like dropping them. Unscaled gradients may be changed freely.
        """
        if not self.scaler.is_enabled() or self._is_unscaled or not self._has_gradients():
            return
        norms = self._norms()
        recorded_norms = 0.0 if self._recorded_norms is None else self._recorded_norms.nan_to_num()
        is_changed = norms.nan_to_num() != recorded_norms
        was_written = (is_changed & (norms != 0)).any()
        self._was_written = was_written if self._was_written is None else self._was_written | was_written

    def _norms(self) -> Tensor:
        """Return the 2-norms of this rank's shards of all gradients, 1-D float32 on the device; 0 for a missing one."""
        parameters = self._parameters()
        zero = torch.zeros((), device=parameters[0].device)
        gradients = [zero if parameter.grad is None else parameter.grad for parameter in parameters]
        local = [gradient.to_local() if isinstance(gradient, DTensor) else gradient for gradient in gradients]
        dense = [gradient.coalesce().values() if gradient.is_sparse else gradient for gradient in local]
        return torch.stack([norm.float() for norm in torch._foreach_norm(dense)])

    def _end_clipping(self) -> None:
        """Reset the scaler for a new backward after clipping; raise RuntimeError if clipped gradients still exist."""
        if self._has_gradients():
            raise RuntimeError(
                "booster.backward in fp16 after clipping would add scaled gradients to unscaled ones: call "
                "optimizer.step() or optimizer.zero_grad() before it, and clip after the last backward of a step"
            )
        self._update_scale()

    def _unscale(self) -> None:
        """Divide the gradients by the loss scale, once: GradScaler raises on a second call."""
        if not self._is_unscaled:
            self.scaler.unscale_(self.optim)
            self._is_unscaled = True

    def _update_scale(self) -> None:
        """End a step for the scaler: lower the scale after an overflow, or let it grow; count skipped steps.

        Raises:
            RuntimeError: gradients overflowed repeatedly at the lowest scale.
        """
        old_scale = self.scaler.get_scale()
        self.scaler.update()
        overflow = self.scaler.get_scale() < old_scale
        self.skipped_steps += overflow
        self._overflows_in_a_row = self._overflows_in_a_row + 1 if overflow else 0
        self._is_scaled = self._is_unscaled = False
        self._recorded_norms = self._was_written = None
        if self._overflows_in_a_row >= _MOST_OVERFLOWS and old_scale <= _LOWEST_SCALE:
            raise beyond_fp16(self._overflows_in_a_row, f"has fallen to {old_scale:g}")
