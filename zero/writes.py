"""Whether anything but a backward wrote to gradients before a step. What a bucket is, is bucket.py.

[Note: writes to unreduced gradients] Until they are reduced a rank's gradients are its own share, at stage 1 outside
of its slice even then, and in fp16 they are scaled. `torch.nn.utils.clip_grad_norm_` then clips to the norm of that
share, on every rank to another, and nothing would ever show it. torch counts the in-place writes to a buffer and all
of its views, so a count that has moved since the backward tells of it, for one integer per bucket. Writes during a
backward are seen as its own: hooks may change gradients. Averages on their way write through an alias that is not
counted, whose thread would else decide.

[Note: plain backwards] A `loss.backward()` that the optimizer does not run brings gradients too. Without a loss scale
they are as good as any. With one they lack it, which the next step or clipping refuses; not the backward itself, since
another model's loss may bring gradients here that are dropped again. Nor do gradients carry it that a script assigned
where no backward of the optimizer had brought any.
"""

from collections.abc import Sequence

import torch
from torch.autograd import Variable

from .bucket import Bucket, Slot


class WriteWatch:
    """The write counts of whole gradients, as the last backward or reduction left them.

    Args:
        buckets: whose gradients.
        has_loss_scale: whether the losses of the optimizer's own backwards are scaled.
    """

    def __init__(self, buckets: Sequence[Bucket], *, has_loss_scale: bool = False) -> None:
        self._has_loss_scale = has_loss_scale
        self._has_unscaled = False
        self._plain_backward = -1
        self._buckets = buckets
        self._slots = [slot for bucket in buckets for slot in bucket.slots]
        self._versions: list[int | None] | None = None
        self._had: list[bool] = []

    def note(self) -> None:
        """A backward or a reduction has ended: whatever it wrote was right."""
        self._versions = [_version(bucket) for bucket in self._buckets]
        self._had = [slot.parameter.grad is not None for slot in self._slots]

    def forget(self) -> None:
        """Gradients are dropped, or written to rightly."""
        self._versions = None
        self._has_unscaled = False

    def take_in_plain_backward(self) -> None:
        """A backward that the optimizer does not run is under way; at its end its writes are noted as right.

        Raises:
            RuntimeError: gradients were written to before it.
        """
        # By its number, since one that breaks off ends without the note.
        backward = torch._C._current_graph_task_id()
        if backward != self._plain_backward:
            self._plain_backward = backward
            self.require_no_writes()
            self._versions = None
            Variable._execution_engine.queue_callback(self.note)

    def note_unscaled(self) -> None:
        """A backward that the optimizer does not run brought a gradient: see [Note: plain backwards]."""
        self._has_unscaled = self._has_loss_scale

    def require_none(self) -> None:
        """Raise RuntimeError where gradients were written to since the last backward, or lack the loss scale."""
        if self._has_unscaled or self._has_assigned():
            how = "loss.backward()" if self._has_unscaled else "an assignment to parameter.grad"
            raise RuntimeError(
                f"gradients come from {how} and lack the loss scale that fp16 divides by: call "
                "booster.backward(loss, optimizer) or optimizer.backward(loss) instead, or optimizer.zero_grad() to "
                "drop them"
            )
        self.require_no_writes()

    def _has_assigned(self) -> bool:
        """Whether a gradient but for zeros stands, under a loss scale, where the last backward had left none."""
        if not self._has_loss_scale:
            return False
        had = [False] * len(self._slots) if self._versions is None else self._had
        new = [slot.whole_gradient for slot, had_one in zip(self._slots, had, strict=True) if not had_one]
        return any(gradient is not None and bool(gradient.count_nonzero()) for gradient in new)

    def require_no_writes(self) -> None:
        """Raise RuntimeError where gradients were written to since the last backward, but by zeros."""
        if self._versions is None:
            return
        for bucket, version in zip(self._buckets, self._versions, strict=True):
            was_written = version is not None and _version(bucket) not in (
                version,
                None,
            )  # None: none is whole now
            if was_written and bucket.gradients is not None and bucket.gradients.any():
                names = ", ".join(slot.managed.name for slot in bucket.slots[:3])
                raise RuntimeError(
                    f"gradients ({names}, …) were written to between backward and step, where they are not the true "
                    "ones yet: call optimizer.clip_grad_by_norm(max_norm) or optimizer.clip_grad_by_value(clip_value) "
                    "instead of torch's clipping, or give the plugin max_norm; any other change belongs into a hook of "
                    "the parameter (parameter.register_hook), which runs inside backward"
                )

    def require_unchanged(self) -> None:
        """Raise RuntimeError where reduced gradients were written to, replaced or dropped, which would not show."""
        self.require_none()
        if self._versions is None:
            return
        for slot, had in zip(self._slots, self._had, strict=True):
            gradient, whole = slot.parameter.grad, slot.whole_gradient
            if (gradient is not None) != had or (whole is not None and whole is not slot.gradient):
                raise _changed(slot)

    def require_no_drops(self) -> None:
        """Raise RuntimeError where sharded gradients were dropped since the last backward, which would not show."""
        if self._versions is None:
            return
        for slot, had in zip(self._slots, self._had, strict=True):
            if had and slot.has_passed and slot.parameter.grad is None:
                raise _changed(slot)


def _changed(slot: Slot) -> RuntimeError:
    how = "dropped" if slot.parameter.grad is None else "replaced"
    return RuntimeError(
        f"the gradient of {slot.managed.name} was {how} after booster.backward, which had reduced it already, and the "
        "step would not see it: call optimizer.zero_grad() to drop all; change single ones in a hook of the parameter "
        "(parameter.register_hook), or give the plugin overlap_communication=False and a stage below 2, with which "
        "gradients are reduced in step()"
    )


def _version(bucket: Bucket) -> int | None:
    return None if bucket.gradients is None else bucket.gradients._version
