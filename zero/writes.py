"""Detection of foreign writes to gradients before a step, that is of writes outside a backward.

[Note: writes to unreduced gradients] Before the reduction a rank's gradients are local, at stage 1 even afterwards
outside its slice, and in fp16 they are scaled. `torch.nn.utils.clip_grad_norm_` would then clip to the local norm, a
different one on each rank, without an error. torch counts the in-place writes to a buffer and all of its views. A count
that changed since the backward detects such a write, at the cost of one integer per bucket. Writes during a backward
count as its own: hooks may change gradients. Averages in flight write through an alias that is not counted; otherwise
the timing of their thread would matter.

[Note: plain backwards] A `loss.backward()` that the optimizer does not run computes gradients, too. Without a loss
scale they are valid. With a loss scale they lack it, and the next step or clipping refuses them. The backward itself
does not, since another model's loss may compute gradients here that are dropped again. Gradients that a script assigned
where no backward of the optimizer had computed any lack the loss scale as well.
"""

from collections.abc import Sequence

import torch
from torch.autograd import Variable

from .bucket import Bucket


class WriteWatch:
    """Detects writes to gradients since the last backward or reduction; see [Note: writes to unreduced gradients].

    Args:
        buckets: the buckets of the gradients.
        has_loss_scale: True if the losses of the optimizer's own backwards are scaled.
    """

    def __init__(self, buckets: Sequence[Bucket], *, has_loss_scale: bool) -> None:
        self._has_loss_scale = has_loss_scale
        self._has_unscaled = False  # True after a gradient of a plain backward under a loss scale
        self._plain_backward = -1  # autograd's id of the last plain backward
        self._buckets = buckets
        self._slots = [slot for bucket in buckets for slot in bucket.slots]
        # By bucket, at the last `accept`: the version counter of its gradients, None without a buffer. If the list is
        # None, any write is accepted.
        self._versions: list[int | None] | None = None
        self._had_gradient = [False] * len(self._slots)  # as of the last `accept`, by slot

    def accept(self) -> None:
        """Accept all writes until now, of a backward or reduction that has ended; detect later ones."""
        self._versions = [_version(bucket) for bucket in self._buckets]
        self._had_gradient = [slot.parameter.grad is not None for slot in self._slots]

    def accept_if_watching(self) -> None:
        """Accept all writes until now, if later ones would be detected: not during a plain backward."""
        if self._versions is not None:
            self.accept()

    def forget(self) -> None:
        """Accept all writes until the next call of `accept`: gradients are dropped or reduced."""
        self._versions = None
        self._has_unscaled = False
        self._had_gradient = [False] * len(self._slots)

    def begin_plain_backward(self) -> bool:
        """Accept the writes of a running plain backward until it ends. Called for each of its gradients.

        Returns:
            True in the first call for this backward.

        Raises:
            RuntimeError: gradients were written to before it.
        """
        # Compared by its id, since the callback below does not run in a backward that raises.
        backward = torch._C._current_graph_task_id()
        if backward == self._plain_backward:
            return False
        self._plain_backward = backward
        self.require_no_writes()
        self._versions = None
        Variable._execution_engine.queue_callback(self.accept)
        return True

    def record_unscaled(self) -> None:
        """Record a gradient of a backward that the optimizer does not run, see [Note: plain backwards]."""
        self._has_unscaled = self._has_loss_scale

    def require_scaled(self) -> None:
        """Raise RuntimeError if gradients lack the loss scale."""
        if self._has_unscaled or self._has_assigned():
            how = "loss.backward()" if self._has_unscaled else "an assignment to parameter.grad"
            raise RuntimeError(
                f"gradients come from {how} and lack the loss scale of fp16: call booster.backward(loss, optimizer) or "
                "optimizer.backward(loss) instead, or optimizer.zero_grad() to drop them"
            )

    def _has_assigned(self) -> bool:
        """Return True if a script assigned a nonzero gradient where the last backward left none, under a loss scale.

        Waits for the device if there is a new gradient.
        """
        if not self._has_loss_scale:
            return False
        new = [
            slot.unsharded_gradient
            for slot, had in zip(self._slots, self._had_gradient, strict=True)
            if not had
        ]
        return any(gradient is not None and bool(gradient.count_nonzero()) for gradient in new)

    def require_no_writes(self) -> None:
        """Raise RuntimeError if something wrote to gradients since the last `accept`. Writing zeros is allowed."""
        if self._versions is None:
            return
        for bucket, version in zip(self._buckets, self._versions, strict=True):
            had_no_buffer, gradients = version is None, bucket.gradients
            if had_no_buffer or gradients is None or gradients._version == version:
                continue
            if gradients.any():
                names = ", ".join(slot.managed.name for slot in bucket.slots[:3])
                raise RuntimeError(
                    f"gradients ({names}, …) were written to between backward and step, before they are unscaled and "
                    "averaged: call optimizer.clip_grad_by_norm(max_norm) or optimizer.clip_grad_by_value(clip_value) "
                    "instead of torch's clipping, or give the plugin max_norm; any other change belongs into a hook of "
                    "the parameter (parameter.register_hook), which runs inside backward"
                )

    def require_kept(self, *, reduced: bool) -> None:
        """Raise RuntimeError if reduced gradients were dropped or replaced, which the step would not notice.

        Args:
            reduced: True if all gradients are reduced; otherwise only sharded ones are checked.
        """
        if self._versions is None:
            return
        for slot, had_gradient in zip(self._slots, self._had_gradient, strict=True):
            gradient, local = slot.parameter.grad, slot.unsharded_gradient
            is_replaced = reduced and local is not None and local is not slot.gradient
            is_dropped = had_gradient and gradient is None and (reduced or slot.was_reduced)
            is_new = reduced and not had_gradient and gradient is not None
            if is_replaced or is_dropped or is_new:
                raise RuntimeError(
                    f"the gradient of {slot.managed.name} was {'dropped' if gradient is None else 'replaced'} after "
                    "booster.backward, which had already reduced it: call optimizer.zero_grad() to drop all; change "
                    "single ones in a hook of the parameter (parameter.register_hook), or give the plugin "
                    "overlap_communication=False and a stage below 2, with which gradients are reduced in step()"
                )

    @property
    def were_dropped(self) -> bool:
        """Return True if the model's own `zero_grad` dropped all gradients of the last backward or reduction."""
        return any(self._had_gradient) and all(slot.parameter.grad is None for slot in self._slots)


def _version(bucket: Bucket) -> int | None:
    return None if bucket.gradients is None else bucket.gradients._version
