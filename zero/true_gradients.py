"""The reduced gradients in this rank's slices: what makes them the true ones, their norm, clipping.

How they came there is reduction.py, and when each of this happens is optimizer.py.
"""

from collections.abc import Sequence
from math import isfinite

import torch
from torch import Tensor

from .bucket import Bucket
from .norm import clip_coefficient, norm_over_all_ranks
from .precision import DynamicScaler
from .reduction import Reducer


class TrueGradients:
    """Reduced gradients, which a loss scale and a factor keep from being the true ones until they are clipped.

    A step or the user clips them.

    Args:
        buckets: where the slices are.
        reducer: who reduced them.
        scaler: the loss scale that they carry after a reduction; None carries none.
        norm_type: the p of `norm`.
        device: where norms are built.

    Attributes:
        factor: what they must be multiplied with besides, None for nothing; taken in when they are measured.
        norm: the norm of the true gradients before anything clipped them; None until it is measured.
        present: for each of the reducer's slots whether any rank has a gradient, as of the last measuring.
        is_agreed: whether all ranks gave the same code, as of the last measuring.
    """

    def __init__(
        self,
        buckets: Sequence[Bucket],
        reducer: Reducer,
        *,
        scaler: DynamicScaler | None,
        norm_type: float,
        device: torch.device,
    ) -> None:
        self.factor: float | Tensor | None = None
        self.norm: float | None = None
        self.present: list[bool] = []
        self.is_agreed = True
        self._buckets = buckets
        self._reducer = reducer
        self._scaler = scaler
        self._norm_type = norm_type
        self._device = device
        # What makes the slices true but for the factor, None since a reduction; and what undoes a step's clipping.
        self._to_true: float | None = None
        self._unclip = 1.0

    @property
    def loss_scale(self) -> float:
        """What the loss is multiplied with before backward."""
        return 1.0 if self._scaler is None else self._scaler.scale

    @property
    def multiplier(self) -> float | Tensor:
        """What makes the slices true and unclipped by a step, the factor as it now is."""
        factor = 1.0 if self.factor is None else self.factor
        return factor * self._unclip * (1 / self.loss_scale if self._to_true is None else self._to_true)

    def renew(self) -> None:
        """New gradients were reduced, or all were dropped."""
        self.norm = None
        self._to_true = None
        self._unclip = 1.0

    def finish(self) -> None:
        """The step is over: another one on the same gradients measures what this one left."""
        self.factor = None
        self.norm = None

    def measure(self, norm_type: float | None = None, *, code: int = 0) -> float:
        """The norm of the true gradients as they now are; infinite or NaN where any of any rank is.

        One all-reduce over the world, and one wait of the host for the device.

        Args:
            norm_type: the p of the norm; None is the one of `norm`.
            code: see `is_agreed`; below 2**32.
        """
        norm, is_agreed = norm_over_all_ranks(
            [run for bucket in self._buckets for run in bucket.counted],
            [run for bucket in self._buckets for run in bucket.watched],
            norm_type=self._norm_type if norm_type is None else norm_type,
            device=self._device,
            code=code,
        )
        factor = torch.as_tensor(
            1.0 if self.factor is None else self.factor, dtype=torch.float64, device=self._device
        )
        figures = torch.cat([torch.stack([norm, factor, is_agreed.double()]), self._reducer.present.double()])
        measured, factor_, agreed, *present = figures.tolist()
        self.is_agreed = agreed > 0
        self._to_true = factor_ * (1 / self.loss_scale if self._to_true is None else self._to_true)
        self.factor = 1.0  # and not None: the gradients of another batch know that one was taken in
        self.present = [flag > 0 for flag in present]
        true = measured * abs(self._to_true)
        if self.norm is None and norm_type is None:
            self.norm = true
        return true

    def scale_(self, coefficient: float = 1.0) -> None:
        """Make the slices the true gradients times a coefficient. They have been measured."""
        assert self._to_true is not None
        if self._to_true * coefficient != 1.0:
            for bucket in self._buckets:
                bucket.own_gradients.mul_(self._to_true * coefficient)
            self._reducer.writes.note()
        self._to_true = 1.0
        # What a further backward brings carries the loss scale: so must these, before it is added.
        self._reducer.resumed_factor = self.loss_scale

    def clip_for_step_(self, norm: float, max_norm: float) -> None:
        """Make them the true ones, of this norm, clipped to another; 0 never clips. `multiplier` undoes it."""
        coefficient = clip_coefficient(norm, max_norm)
        self.scale_(coefficient)
        self._unclip = 1 / coefficient

    def clip_by_norm_(self, max_norm: float, norm_type: float) -> float:
        """Make them the true ones and clip them to a norm, unless it is not finite; returns it. See `measure`."""
        norm = self.measure()
        if norm_type != self._norm_type:
            norm = self.measure(norm_type)
        if isfinite(norm):
            self.scale_(clip_coefficient(norm, max_norm))
        return norm

    def clip_by_value_(self, clip_value: float) -> None:
        """Make them the true ones and clip every entry, unless one is not finite: it stays so. See `measure`."""
        if isfinite(self.measure()):
            self.scale_()
            for bucket in self._buckets:
                bucket.own_gradients.clamp_(-clip_value, clip_value)
            self._reducer.writes.note()
