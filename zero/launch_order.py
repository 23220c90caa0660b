"""Which buckets are averaged while backward still runs. What averaging is, is bucket.py.

[Note: reducing while backward runs] Who knows that a backward is the last to add to some parameters says so by
`Reducer.last_backward`. A bucket whose parameters have all got their last gradient is averaged from then on, while
backward goes on. Buckets start in one order, which is that of a backward and the same on every rank, as NCCL
needs it: one that is complete early waits for those before it. What has to be summed over other groups first
(tied parameters) is left to `Reducer.reduce`. At stage 2 every backward is the last in this sense: buckets start
in each.
"""

from collections import deque
from collections.abc import Callable, Iterable, Mapping, Sequence

from torch.nn import Parameter

from .bucket import Bucket


class LaunchOrder:
    """Which gradients are still to come, and which buckets have started.

    Args:
        buckets: all of this rank.
        position: of each parameter in the model.
        max_passing: at stage 2, how many buckets may be on their way while another gets its gradients.
        before_start: called before a bucket starts.
    """

    def __init__(
        self,
        buckets: Sequence[Bucket],
        position: Mapping[Parameter, int],
        *,
        max_passing: int,
        before_start: Callable[[], None],
    ) -> None:
        self._max_passing = max_passing
        self._before_start = before_start
        # A bucket is complete with its parameter that stands first in the model: it comes last in a backward.
        self._ordered = sorted(
            buckets,
            key=lambda bucket: (bucket.needs_sum, -min(position[slot.parameter] for slot in bucket.slots)),
        )
        early = [bucket for bucket in self._ordered if not bucket.needs_sum]
        self._bucket_of = {slot.parameter: bucket for bucket in early for slot in bucket.slots}
        # Of the backward that is running: whose gradients are to come, and the buckets they belong to.
        self._expected: set[Parameter] = set()
        self._open: deque[Bucket] = deque()
        self._missing: dict[Bucket, set[Parameter]] = {}  # what every bucket that was opened waits for
        self._started: deque[Bucket] = deque()

    @property
    def has_started(self) -> bool:
        """Whether a bucket is being averaged to which nothing may be added until then."""
        return any(not bucket.passes for bucket in self._started)

    def finish(self) -> None:
        """Have the averages of all that has started."""
        while self._started:
            self._started.popleft().finish_average()

    def reset(self) -> None:
        """Expect nothing, once all that has started is done."""
        self.finish()
        self._expected.clear()
        self._open.clear()
        self._missing.clear()

    def expect(self, parameters: Iterable[Parameter]) -> None:
        """The next gradient of each of these is the last that their buckets wait for."""
        self._expected = {parameter for parameter in parameters if parameter in self._bucket_of}
        touched = {self._bucket_of[parameter] for parameter in self._expected}
        self._open = deque(
            bucket for bucket in self._ordered if bucket in touched and self._may_start(bucket)
        )
        for bucket in self._open:
            self._missing.setdefault(bucket, {slot.parameter for slot in bucket.slots})

    def note(self, parameter: Parameter) -> None:
        """A parameter has got a gradient, or will get none."""
        if parameter not in self._expected:
            return
        self._expected.remove(parameter)
        self._missing.get(self._bucket_of[parameter], set()).discard(parameter)
        while self._open and not self._missing[self._open[0]]:
            self._start(self._open.popleft())

    def close(self) -> None:
        """The backward is over: what got no gradient will get none."""
        for parameter in [*self._expected]:
            self.note(parameter)
        for bucket in self._open:  # behind one that waits for another backward
            if not self._missing[bucket]:
                self._start(bucket)
        self._open.clear()

    def waiting(self) -> list[Bucket]:
        """The buckets that have not started, in the order in which they are to start."""
        return [bucket for bucket in self._ordered if self._may_start(bucket)]

    def _may_start(self, bucket: Bucket) -> bool:
        return bucket.passes or bucket not in self._started

    def _start(self, bucket: Bucket) -> None:
        self._before_start()
        del self._missing[bucket]
        bucket.collect()
        bucket.start_average()
        self._started.append(bucket)
        while bucket.passes and len(self._started) > self._max_passing:
            self._started.popleft().finish_average()
