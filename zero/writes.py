"""Detection of writes to gradients by anything but a backward, before a step.

[Note: writes to unreduced gradients] Until they are reduced a rank's gradients are its own share, at stage 1 outside
of its slice even then, and in fp16 they are scaled. `torch.nn.utils.clip_grad_norm_` then clips to the norm of that
share, on every rank to another, and nothing would ever show it. torch counts the in-place writes to a buffer and all
of its views, so a count that has moved since the backward shows it, for one integer per bucket. Writes during a
backward are seen as its own: hooks may change gradients. Averages in flight write through an alias that is not
counted, whose thread would else decide.

[Note: plain backwards] A `loss.backward()` that the optimizer does not run brings gradients too. Without a loss scale
they are as good as any. With one they lack it, which the next step or clipping refuses; not the backward itself, since
another model's loss may bring gradients here that are dropped again. Nor do gradients carry it that a script assigned
where no backward of the optimizer had brought any.
"""

from collections.abc import Sequence

import torch
from torch.autograd import Variable

from .bucket import Bucket


class WriteWatch:
    """The write counts of whole gradients, as the last backward or reduction left them.

    Args:
        buckets: of the gradients.
        has_loss_scale: whether the losses of the optimizer's own backwards are scaled.
    """

    def __init__(self, buckets: Sequence[Bucket], *, has_loss_scale: bool) -> None:
        self._has_loss_scale = has_loss_scale
        self._has_unscaled = False
        self._plain_backward = -1
        self._buckets = buckets
        self._slots = [slot for bucket in buckets for slot in bucket.slots]
        self._versions: list[int | None] | None = None
        self._had = [False] * len(self._slots)

    def note(self) -> None:
        """Accept all that a backward or a reduction wrote, which has ended."""
        self._versions = [_version(bucket) for bucket in self._buckets]
        self._had = [slot.parameter.grad is not None for slot in self._slots]

    def note_again(self) -> None:
        """Accept that reduced gradients were kept aside, unless a plain backward is running."""
        if self._versions is not None:
            self.note()

    def forget(self) -> None:
        """Accept all, until the next note: gradients are dropped or reduced."""
        self._versions = None
        self._has_unscaled = False
        self._had = [False] * len(self._slots)

    def begin_plain_backward(self) -> bool:
        """Accept what a backward that the optimizer does not run will write; returns whether it is a new one.

        Raises:
            RuntimeError: gradients were written to before it.
        """
        # By its number, since one that breaks off ends without the note.
        backward = torch._C._current_graph_task_id()
        if backward == self._plain_backward:
            return False
        self._plain_backward = backward
        self.require_no_writes()
        self._versions = None
        Variable._execution_engine.queue_callback(self.note)
        return True

    def note_unscaled(self) -> None:
        """Note a gradient of a backward that the optimizer does not run, see [Note: plain backwards]."""
        self._has_unscaled = self._has_loss_scale

    def require_scaled(self) -> None:
        """Raise RuntimeError where gradients lack the loss scale."""
        if self._has_unscaled or self._has_assigned():
            how = "loss.backward()" if self._has_unscaled else "an assignment to parameter.grad"
            raise RuntimeError(
                f"gradients come from {how} and lack the loss scale that fp16 divides by: call "
                "booster.backward(loss, optimizer) or optimizer.backward(loss) instead, or optimizer.zero_grad() to "
                "drop them"
            )

    def _has_assigned(self) -> bool:
        """Return True if a gradient but for zeros stands, under a loss scale, where the last backward had left none."""
        if not self._has_loss_scale:
            return False
        new = [slot.local_gradient for slot, had in zip(self._slots, self._had, strict=True) if not had]
        return any(gradient is not None and bool(gradient.count_nonzero()) for gradient in new)

    def require_no_writes(self) -> None:
        """Raise RuntimeError where gradients were written to since the last backward, but by zeros."""
        if self._versions is None:
            return
        for bucket, version in zip(self._buckets, self._versions, strict=True):
            is_same = version is None or _version(bucket) in (version, None)
            if not is_same and bucket.gradients is not None and bucket.gradients.any():
                names = ", ".join(slot.managed.name for slot in bucket.slots[:3])
                raise RuntimeError(
                    f"gradients ({names}, …) were written to between backward and step, where they are not the true "
                    "ones yet: call optimizer.clip_grad_by_norm(max_norm) or optimizer.clip_grad_by_value(clip_value) "
                    "instead of torch's clipping, or give the plugin max_norm; any other change belongs into a hook of "
                    "the parameter (parameter.register_hook), which runs inside backward"
                )

    def require_kept(self, *, reduced: bool) -> None:
        """Raise RuntimeError where gradients that were reduced already were dropped or replaced, which would not show.

        Args:
            reduced: whether all of them are; else only those that no rank has whole.
        """
        if self._versions is None:
            return
        for slot, had in zip(self._slots, self._had, strict=True):
            gradient, local = slot.parameter.grad, slot.local_gradient
            is_replaced = reduced and local is not None and local is not slot.gradient
            is_dropped = had and gradient is None and (reduced or slot.was_reduced)
            if is_replaced or is_dropped or (reduced and not had and gradient is not None):
                raise RuntimeError(
                    f"the gradient of {slot.managed.name} was {'dropped' if gradient is None else 'replaced'} after "
                    "booster.backward, which had reduced it already, and the step would not see it: call "
                    "optimizer.zero_grad() to drop all; change single ones in a hook of the parameter "
                    "(parameter.register_hook), or give the plugin overlap_communication=False and a stage below 2, "
                    "with which gradients are reduced in step()"
                )

    @property
    def were_dropped(self) -> bool:
        """Return True if the model's own `zero_grad` dropped all gradients that the last backward or reduction left."""
        return any(self._had) and all(slot.parameter.grad is None for slot in self._slots)


def _version(bucket: Bucket) -> int | None:
    return None if bucket.gradients is None else bucket.gradients._version
