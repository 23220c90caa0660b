"""ScaledOptimizer: a torch optimizer behind torch's loss scale. Scaling over pipelines is zero/."""

from collections.abc import Callable, Mapping
from typing import Any, NoReturn

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.tensor import DTensor
from torch.nn import Parameter
from torch.optim import Optimizer

from ..cluster.agree import begin_require_equal
from ..cluster.collectives import InFlight
from ..cluster.failures import naming_failures
from ..zero.clipping import require_clip_norm, require_clip_value, require_finite_norm
from ..zero.inner_optimizer import EQUAL_OPTIONS, NOT_PICKLED, StepGuard, optimizer_options
from ..zero.precision import beyond_fp16

# torch's GradScaler has no lowest scale: it halves until it multiplies by 0, and skips every step without a word. The
# other plugins' defaults give up at this one, after so many overflows in a row.
_LOWEST_SCALE = 1.0
_MOST_OVERFLOWS = 2
_RULE = EQUAL_OPTIONS + ", and the last step was made with these: go on from a checkpoint"


class ScaledOptimizer(Optimizer):
    """A torch optimizer behind a loss scale; what it does not define is the inner optimizer's.

    A subclass of torch's Optimizer for schedulers that ask; it owns no groups of its own.

    Attributes:
        optim: the inner optimizer.
        scaler: the loss scale.
        names: of the parameters, in the plain model.
        last_norm: the last result of `clip_grad_by_norm`, None before: torch measures no norm by itself.
        group: of all ranks and of no other use: options of the groups are compared in it; None compares nothing.
        after_step: is called at the end of every step, also of one that was skipped.
        skipped_steps: how many steps an overflow skipped; without a loss scale none is.
    """

    def __init__(
        self, optimizer: Optimizer, scaler: "torch.amp.GradScaler", names: Mapping[Parameter, str]
    ) -> None:
        self.optim = optimizer
        self.scaler = scaler
        self.names = names
        self.last_norm: float | None = None
        self.skipped_steps = 0
        self.group: dist.ProcessGroup | None = None
        self.after_step: Callable[[], None] | None = None
        self._require_equal_options: InFlight[None] | None = None  # of the last step
        self._clipped: dict[str, float] = {}  # how, since the last step
        self._guard = StepGuard(optimizer)
        self._overflows_in_a_row = 0
        self._is_scaled = False  # whether gradients of a scaled loss have come since the last step
        self._is_unscaled = False
        # Device-side, so that no backward waits: a number per gradient as the last backward left it, and whether any
        # was written to since. torch's write counts do not move for DTensors.
        self._noted: Tensor | None = None
        self._was_written: Tensor | None = None

    def __getattr__(self, name: str) -> Any:
        return getattr(self.__dict__["optim"], name)

    def __reduce_ex__(self, protocol: Any) -> NoReturn:
        raise TypeError(NOT_PICKLED)

    def backward(self, loss: Tensor) -> None:
        """Compute gradients of the loss, scaled where the precision needs it.

        Raises:
            RuntimeError: under a loss scale, where those before were clipped and so are not scaled any more.
        """
        if self._is_unscaled:
            self._end_clipping()
        self._watch_writes()
        self.scaler.scale(loss).backward()
        self._is_scaled = True
        self._note_gradients()

    @naming_failures("optimizer.step")
    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        """Update the parameters, or skip where a scaled gradient overflowed.

        Args:
            closure: computes the loss and its gradients, through `backward`.

        Returns:
            What the closure returned.

        Raises:
            RuntimeError: under a loss scale, where there are no scaled gradients, or where they overflow although it
                has fallen to 1.
            ValueError: options of the groups, as learning rates, or clipping differed between ranks in the step before.
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
        """Drop the gradients."""
        if self._is_unscaled:
            # Clipped and never stepped: GradScaler would take the next ones for unscaled, too.
            self._update_scale()
        self.optim.zero_grad(set_to_none)
        self._is_scaled &= not set_to_none  # zeros are scaled by anything
        self._was_written = None
        self._note_gradients()

    @naming_failures("optimizer.clip_grad_by_norm", ())
    def clip_grad_by_norm(
        self, max_norm: float, norm_type: float = 2.0, error_if_nonfinite: bool = False
    ) -> Tensor:
        """Clip the true gradients to a norm, after all backwards of a step; returns the norm before.

        Where they are sharded it is that over all shards, by an all-reduce over the shard group.

        Args:
            max_norm: gradients of a larger norm are scaled down to it; `inf` measures alone.
            norm_type: the p of the norm, `inf` for the largest magnitude.
            error_if_nonfinite: raise where the norm is infinite or NaN, as an overflow of fp16 makes it.

        Raises:
            RuntimeError: under a loss scale, where there are no scaled gradients.
        """
        require_clip_norm(max_norm, norm_type)
        self._require_scaled("clip_grad_by_norm()")
        self._clipped |= {"max_norm": max_norm, "norm_type": norm_type}
        self._unscale()
        norm = torch.nn.utils.clip_grad_norm_(self._parameters(), max_norm, norm_type)
        if isinstance(norm, DTensor):
            norm = norm.full_tensor()
        self.last_norm = float(norm)
        if error_if_nonfinite:
            require_finite_norm(self.last_norm, norm_type)
        return norm

    def clip_grad_by_value(self, clip_value: float) -> None:
        """Clip every entry of the true gradients to -clip_value … clip_value, after all backwards of a step.

        An overflow under a loss scale skips the step nevertheless.

        Raises:
            RuntimeError: under a loss scale, where there are no scaled gradients.
        """
        require_clip_value(clip_value)
        self._require_scaled("clip_grad_by_value()")
        self._clipped["clip_value"] = clip_value
        self._unscale()
        torch.nn.utils.clip_grad_value_(self._parameters(), clip_value)

    def get_grad_norm(self) -> float | None:
        """`last_norm`, under ColossalAI's name."""
        return self.last_norm

    def state_dict(self) -> dict[str, Any]:
        """The inner optimizer's state."""
        return self.optim.state_dict()

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Load the inner optimizer's state."""
        self.optim.load_state_dict(state_dict)

    def scaler_state(self) -> dict[str, Any] | None:
        """The loss scale and what it has seen, under the names that the other plugins have; None without one."""
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
        """Go on from a checkpoint: the inner optimizer's state, the loss scale and the skipped steps.

        A run in another precision had no loss scale, and then this one's stays.
        """
        self.optim.load_state_dict(state)
        self.skipped_steps = extra["skipped_steps"]
        if (saved := extra["scaler"]) is not None and self.scaler.is_enabled():
            taken = {"scale": saved["scale"], "_growth_tracker": saved["steps_without_overflow"]}
            self.scaler.load_state_dict(self.scaler.state_dict() | taken)

    def _parameters(self) -> list[Parameter]:
        return [parameter for group in self.optim.param_groups for parameter in group["params"]]

    def _has_gradients(self) -> bool:
        return any(parameter.grad is not None for parameter in self._parameters())

    def _require_scaled(self, call: str) -> None:
        """Say what to do where torch's scaler would fail an assertion, or take gradients for scaled that are not."""
        if not self.scaler.is_enabled():
            return
        if not (self._is_scaled and self._has_gradients()):
            raise RuntimeError(
                f"{call} in fp16 takes gradients of a scaled loss, and there are none: call booster.backward(loss, "
                "optimizer) before it, not loss.backward(), and leave a GradScaler of your own out"
            )
        self._watch_writes()
        if self._was_written is not None and self._was_written.item():
            raise RuntimeError(
                f"{call} in fp16 takes gradients that carry the loss scale, and something else wrote to them: call "
                "booster.backward(loss, optimizer) instead of loss.backward(), and "
                "optimizer.clip_grad_by_norm(max_norm) or optimizer.clip_grad_by_value(clip_value) instead of torch's "
                "clipping; optimizer.zero_grad() drops them"
            )

    def _compare_options(self) -> None:
        """Compare options between ranks. All-gather of a number, looked at in the next step, so that none waits."""
        if self.group is None or self.group.size() == 1:
            return
        require, self._require_equal_options = self._require_equal_options, None
        if require is not None:
            require.wait()
        settings, self._clipped = {**self._clipped, **optimizer_options(self.optim)}, {}
        self._require_equal_options = begin_require_equal(
            settings, what="the optimizer", rule=_RULE, group=self.group
        )

    def _note_gradients(self) -> None:
        """Take the gradients as they now are for rightly scaled."""
        self._noted = self._norms() if self._is_scaled and self.scaler.is_enabled() else None

    def _watch_writes(self) -> None:
        """Note whether anything but a backward of this optimizer wrote to scaled gradients, without waiting for it.

        Zeros may be written: they are as good as dropped. What is unscaled is the user's.
        """
        if not self.scaler.is_enabled() or self._is_unscaled or not self._has_gradients():
            return
        norms = self._norms()
        was_written = norms.nan_to_num() != (0.0 if self._noted is None else self._noted.nan_to_num())
        was_written = (was_written & (norms != 0)).any()
        self._was_written = was_written if self._was_written is None else self._was_written | was_written

    def _norms(self) -> Tensor:
        """The norm of this rank's part of each gradient, on the device; 0 where there is none."""
        parameters = self._parameters()
        nothing = torch.zeros((), device=parameters[0].device)
        gradients = [nothing if each.grad is None else each.grad for each in parameters]
        local = [each.to_local() if isinstance(each, DTensor) else each for each in gradients]
        dense = [each.coalesce().values() if each.is_sparse else each for each in local]
        return torch.stack([norm.float() for norm in torch._foreach_norm(dense)])

    def _end_clipping(self) -> None:
        """Let a backward follow clipped gradients that were dropped, and no others."""
        if self._has_gradients():
            raise RuntimeError(
                "booster.backward in fp16 after clipping would add scaled gradients to unscaled ones: call "
                "optimizer.step() or optimizer.zero_grad() before it, and clip after the last backward of a step"
            )
        self._update_scale()

    def _unscale(self) -> None:
        """Make the gradients the true ones, once: GradScaler refuses a second time."""
        if not self._is_unscaled:
            self.scaler.unscale_(self.optim)
            self._is_unscaled = True

    def _update_scale(self) -> None:
        """Let the scale fall after an overflow, or grow."""
        before = self.scaler.get_scale()
        self.scaler.update()
        overflow = self.scaler.get_scale() < before
        self.skipped_steps += overflow
        self._overflows_in_a_row = self._overflows_in_a_row + 1 if overflow else 0
        self._is_scaled = self._is_unscaled = False
        self._noted = self._was_written = None
        if self._overflows_in_a_row >= _MOST_OVERFLOWS and before <= _LOWEST_SCALE:
            raise beyond_fp16(self._overflows_in_a_row, f"has fallen to {before:g}")
