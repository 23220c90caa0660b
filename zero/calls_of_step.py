"""The calls of `backward` and `execute_pipeline` whose gradients one step uses."""

_TWO_KINDS = (
    "execute_pipeline and backward were both called for one step under gradient_accumulation_steps: use one for "
    "all calls of a step, since backward does not know how many labels its loss counted"
)


class CallsOfStep:
    """Number and kind of the calls since the last step, which uses the mean of the gradients of `accumulation_steps`.

    Args:
        accumulation_steps: calls in each step; 1 allows any number, and counts none.
    """

    def __init__(self, accumulation_steps: int) -> None:
        self._steps, self._number, self._has_backward = accumulation_steps, 0, False

    @property
    def is_first(self) -> bool:
        """Return True if the next call is the first one of a step, or calls are not counted."""
        return self._number == 0

    @property
    def is_last(self) -> bool:
        """Return True if a step may follow the next call."""
        return self._number + 1 >= self._steps

    @property
    def is_incomplete(self) -> bool:
        """Return True if calls of a step were made, and not all."""
        return 0 < self._number < self._steps

    def begin(self, *, is_backward: bool, has_factor: bool) -> None:
        """Begin a call: check that it may follow, and note its kind; `end` counts it.

        Args:
            is_backward: it is a `backward`, which has no count of labels and sets no `gradient_factor`.
            has_factor: the gradients of earlier calls have a pending `gradient_factor`.

        Raises:
            RuntimeError: all calls of the step have been made.
            ValueError: counted calls are of two kinds.
        """
        if self._steps > 1 and self._number == self._steps:
            raise RuntimeError(
                f"this is call {self._number + 1} since the last optimizer.step(), and gradient_accumulation_steps="
                f"{self._steps}: call optimizer.step() and optimizer.zero_grad() after every {self._steps} calls, or "
                "drop their gradients by optimizer.zero_grad()"
            )
        if not is_backward and self._has_backward:
            raise ValueError(_TWO_KINDS)
        if is_backward:
            self.require_one_kind(has_factor=has_factor)
            self._has_backward = self._steps > 1

    def require_one_kind(self, *, has_factor: bool) -> None:
        """Raise ValueError if a backward without a factor would follow calls of the same step that share one."""
        if has_factor and self.is_incomplete:
            raise ValueError(_TWO_KINDS)

    def end(self) -> None:
        """Count a call."""
        if self._steps > 1:
            self._number += 1

    def require_all(self, name: str) -> None:
        """Raise RuntimeError if calls are missing in a step; `name` is what needs all."""
        if self.is_incomplete:
            raise RuntimeError(
                f"{name} after {self._number} of gradient_accumulation_steps={self._steps} calls: step after "
                f"every {self._steps} calls of execute_pipeline or booster.backward; if the data ends earlier, "
                "continue with the next epoch's, or drop the gradients by optimizer.zero_grad()"
            )

    def clear(self) -> None:
        """Begin a step anew."""
        self._number, self._has_backward = 0, False
