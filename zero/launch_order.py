"""Which buckets are averaged while backward still runs. What averaging is, is bucket.py.

[Note: reducing while backward runs] Who knows that a backward is the last to add to some parameters says so by
`Reducer.last_backward`. A bucket whose parameters have all got their last gradient is averaged from then on, while
backward goes on. Buckets start in one order, which is that of a backward and the same on every rank, as NCCL
needs it: one that is complete early waits for those before it. What has to be summed over other groups first
(tied parameters) is left to `Reducer.reduce`.
"""

from collections.abc import Iterable, Sequence

from torch.nn import Parameter

from .bucket import Bucket
from .parameter import ManagedParameter


class LaunchOrder:
    """Which gradients are still to come, and which buckets have started.

    Args:
        buckets: all of this rank.
        parameters: in the order of the model.
    """

    def __init__(self, buckets: Sequence[Bucket], parameters: Sequence[ManagedParameter]) -> None:
        position = {managed.parameter: index for index, managed in enumerate(parameters)}
        # A bucket is complete with its parameter that stands first in the model: it comes last in a backward.
        ordered = sorted(buckets, key=lambda bucket: -min(position[slot.parameter] for slot in bucket.slots))
        self._early = [bucket for bucket in ordered if not bucket.needs_sum]
        self._late = [bucket for bucket in ordered if bucket.needs_sum]
        self._bucket_of = {slot.parameter: bucket for bucket in self._early for slot in bucket.slots}
        self._expected: set[Parameter] = set()
        self._missing: dict[Bucket, int] = {}
        self._num_started = 0
        self.reset()

    @property
    def has_started(self) -> bool:
        """Whether a bucket is being averaged."""
        return self._num_started > 0

    def reset(self) -> None:
        """Expect nothing, once all that has started is done."""
        for bucket in self._early[: self._num_started]:
            bucket.finish_average()
        self._num_started = 0
        self._expected.clear()
        self._missing = {bucket: len(bucket.slots) for bucket in self._early}

    def expect(self, parameters: Iterable[Parameter]) -> None:
        """The next gradient of each of these is its last."""
        self._expected.update(parameter for parameter in parameters if parameter in self._bucket_of)

    def note(self, parameter: Parameter) -> None:
        """A parameter has got a gradient, or will get none."""
        if parameter in self._expected:
            self._expected.remove(parameter)
            bucket = self._bucket_of[parameter]
            self._missing[bucket] -= 1
            if not self._missing[bucket]:
                self._start()

    def waiting(self) -> list[Bucket]:
        """The buckets that have not started, in the order in which they are to start."""
        return [*self._early[self._num_started :], *self._late]

    def _start(self) -> None:
        for bucket in self._early[self._num_started :]:
            if self._missing[bucket]:
                break
            bucket.collect()
            bucket.start_average()
            self._num_started += 1
