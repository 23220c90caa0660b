"""Whether anything but a backward wrote to gradients before a step. What a bucket is, is bucket.py.

[Note: writes to unreduced gradients] Until they are reduced a rank's gradients are its own share, at stage 1 outside
of its slice even then, and in fp16 they are scaled. `torch.nn.utils.clip_grad_norm_` then clips to the norm of that
share, on every rank to another, and nothing would ever show it. torch counts the in-place writes to a buffer and all
of its views, so a count that has moved since the backward tells of it, for one integer per bucket. Writes during a
backward are seen as its own: hooks may change gradients. Averages on their way write through an alias that is not
counted, whose thread would else decide.
"""

from collections.abc import Sequence

from .bucket import Bucket


class WriteWatch:
    """The write counts of whole gradients, as the last backward or reduction left them.

    Args:
        buckets: whose gradients.
    """

    def __init__(self, buckets: Sequence[Bucket]) -> None:
        self._buckets = buckets
        self._slots = [slot for bucket in buckets for slot in bucket.slots]
        self._versions: list[int | None] | None = None
        self._had: list[bool] = []

    def note(self) -> None:
        """A backward or a reduction has ended: whatever it wrote was right."""
        self._versions = [_version(bucket) for bucket in self._buckets]
        self._had = [slot.parameter.grad is not None for slot in self._slots]

    def forget(self) -> None:
        """Gradients are written to by others than a backward that is known, and rightly."""
        self._versions = None

    def require_none(self) -> None:
        """Raise RuntimeError where gradients were written to since the last backward."""
        if self._versions is None:
            return
        for bucket, version in zip(self._buckets, self._versions, strict=True):
            if version is not None and _version(bucket) not in (version, None):  # None: none is whole now
                names = ", ".join(slot.managed.name for slot in bucket.slots[:3])
                raise RuntimeError(
                    f"gradients ({names}, …) were written to between backward and step. There they are this rank's "
                    "share, neither reduced over the ranks nor unscaled, so clipping them "
                    "(torch.nn.utils.clip_grad_norm_, clip_grad_value_) clips something else on every rank: call "
                    "optimizer.clip_grad_by_norm(max_norm) or optimizer.clip_grad_by_value(clip_value) instead, or "
                    "give the plugin max_norm. Any other change belongs into a hook of the parameter "
                    "(parameter.register_hook), which runs inside backward"
                )

    def require_unchanged(self) -> None:
        """Raise RuntimeError where reduced gradients were written to, replaced or dropped, which would not show."""
        self.require_none()
        if self._versions is None:
            return
        for slot, had in zip(self._slots, self._had, strict=True):
            gradient = slot.parameter.grad
            if (gradient is not None) != had or (gradient is not None and gradient is not slot.gradient):
                raise RuntimeError(
                    f"the gradient of {slot.managed.name} was {'dropped' if gradient is None else 'replaced'} after "
                    "booster.backward, which had reduced it already, and the step would not see it: call "
                    "optimizer.zero_grad() to drop all; change single ones in a hook of the parameter "
                    "(parameter.register_hook), or give the plugin overlap_communication=False, with which gradients "
                    "are reduced in step()"
                )


def _version(bucket: Bucket) -> int | None:
    return None if bucket.gradients is None else bucket.gradients._version
