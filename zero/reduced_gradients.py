"""Reduced gradients: their norm over all ranks under every layout, their pending factors, and their clipping."""

from collections.abc import Callable, Sequence
from contextlib import suppress
from math import isfinite, isinf
from typing import NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor

from ..cluster.device import is_cuda, numbers_on
from .bucket import Bucket
from .clipping import clip_coefficient
from .reducer import Reducer

# Entries of which a CPU makes a temporary copy in float64 at a time, in its cache. Kernels of CUDA convert as they go.
_CHUNK = 2**16


class _EarlierGradients(NamedTuple):
    """Reduced gradients of earlier calls of a step, kept while a call with a factor of its own accumulates.

    Args:
        slices: by bucket.
        were_reduced: by bucket and slot, `Slot.was_reduced`.
        factor: their pending factor.
    """

    slices: list[Tensor]
    were_reduced: list[list[bool]]
    factor: float | Tensor | None


class ReducedGradients:
    """The reduced gradients in this rank's slices, which may still carry a loss scale and a pending factor.

    Clipping, in a step or by the user, also unscales them. "True" gradients are those without loss scale and factor.

    Args:
        buckets: the buckets with the slices.
        reducer: the reducer, which knows the loss scale of the gradients.
        device: the device on which norms are computed.

    Attributes:
        factor: a pending factor of the gradients besides the loss scale, None for none; `measure` hands it to the
            reducer.
        norm: the 2-norm of the true gradients before any clipping; None until it is measured.
        has_gradients: for each of the reducer's slots, True if any rank had a gradient at the last measurement.
        is_agreed: True if all ranks agreed at the last measurement.
        flags: sums over all ranks of the last flags given to `measure`.
    """

    def __init__(self, buckets: Sequence[Bucket], reducer: Reducer, *, device: torch.device) -> None:
        self.factor: float | Tensor | None = None
        self._earlier: _EarlierGradients | None = None
        self.norm: float | None = None
        self.has_gradients: list[bool] = []
        self.is_agreed = True
        self.flags: list[float] = []
        self._slices = [bucket.gradient_slice for bucket in buckets]
        self._counted = [run for bucket in buckets for run in bucket.counted]
        self._counted_elsewhere = [run for bucket in buckets for run in bucket.counted_elsewhere]
        self._reducer = reducer
        self._device = device
        self._unclip = 1.0  # undoes the clipping of a step

    @property
    def to_unclipped(self) -> float | Tensor:
        """Return the multiplier that unscales the slices, applies `factor` and undoes the clipping of a step."""
        return (1.0 if self.factor is None else self.factor) * self._unclip * self._reducer.unscale_factor

    def set_aside(self, reduce: Callable[[], None]) -> None:
        """Reduce the gradients of earlier calls and keep them, before a call whose gradients get another factor.

        `begin_reduced` adds them to those of the call.

        Args:
            reduce: reduces all gradients; collective over the data axis.
        """
        reduce()
        self._earlier = _EarlierGradients(*self._reducer.take_reduced(), self.factor)
        self.factor = None

    def begin_reduced(self) -> None:
        """Begin with newly reduced gradients: they are neither measured nor clipped. Add those that were set aside."""
        self.norm = None
        self._unclip = 1.0
        if self._earlier is None:
            return
        (slices, _, earlier_factor), self._earlier = self._earlier, None
        if isinstance(self.factor, Tensor):
            # The factor is 0 after a batch without labels, whose gradients are zeros under any factor.
            self.factor = torch.where(self.factor != 0, self.factor, 1.0)
        # Only the new gradients' factor will be applied, to the sum of both.
        new_factor = 1.0 if self.factor is None else self.factor
        earlier_factor = 1.0 if earlier_factor is None else earlier_factor
        with torch.no_grad():
            self._reducer.add_reduced(slices, earlier_factor / new_factor)

    def apply_factor(self) -> None:
        """Multiply the gradients by their pending factor, before a backward adds some without it. No communication."""
        if self.factor is not None:
            self._reducer.scale_(self.factor)
            self.factor = None

    def discard(self) -> None:
        """Drop the gradients of a failed call, and of earlier calls with its factor; restore those set aside."""
        earlier, self._earlier, self.factor = self._earlier, None, None
        # A collective fails if another rank has failed: the call's own error says so.
        with suppress(RuntimeError):
            if earlier is None:
                self._reducer.drop_since_zeros()
            else:
                self._reducer.restore_reduced(earlier.slices, earlier.were_reduced)
                self.factor = earlier.factor

    def finish(self) -> None:
        """Forget the pending factor, the gradients set aside and the norm, once a step has measured them."""
        self.factor = self._earlier = self.norm = None

    def reset(self) -> None:
        """Forget everything about the gradients, which are dropped."""
        self.finish()
        self._unclip = 1.0

    def measure(
        self,
        norm_type: float = 2.0,
        *,
        code: int = 0,
        checksum_term: float | Tensor = 0.0,
        flags: Sequence[float] = (),
    ) -> float:
        """Return the norm of the true gradients as they are now; infinite or NaN if any gradient of any rank is.

        Moves the pending factor to the reducer. One all-reduce over the world, and one wait of the host for the device.

        Args:
            norm_type: the p of the norm.
            code, checksum_term, flags: see `norm_over_all_ranks`. The results become `is_agreed` and `flags`.
        """
        assert self._reducer.is_reduced
        norm, is_agreed, *flag_sums = norm_over_all_ranks(
            self._counted,
            self._counted_elsewhere,
            norm_type=norm_type,
            device=self._device,
            code=code,
            checksum_term=checksum_term,
            flags=flags,
        )
        factor = 1.0 if self.factor is None else self.factor
        if not isinstance(factor, Tensor):
            (factor,) = numbers_on(self._device, [factor], torch.float64)
        # One copy to the host reads all of them.
        numbers = torch.cat([torch.stack([norm, factor, is_agreed, *flag_sums]), self._reducer.has_gradients])
        read_norm, read_factor, read_agreed, *others = numbers.tolist()
        if flags:
            self.flags = others[: len(flags)]
        self.is_agreed = read_agreed > 0
        self.has_gradients = [number > 0 for number in others[len(flags) :]]
        self._reducer.multiply_unscale_factor(read_factor)
        self.factor = None
        # `unscale_factor` now removes the loss scale and applies the factor.
        true_norm = read_norm * abs(self._reducer.unscale_factor)
        if self.norm is None and norm_type == 2:
            self.norm = true_norm
        return true_norm

    def clip_for_step_(self, norm: float, max_norm: float) -> None:
        """Unscale the gradients and clip them; `to_unclipped` undoes the clipping.

        Args:
            norm: the norm of the true gradients.
            max_norm: the largest norm after clipping; 0 never clips.
        """
        coefficient = clip_coefficient(norm, max_norm)
        self._reducer.unscale_(coefficient)
        self._unclip = 1 / coefficient

    def clip_by_norm_(self, norm: float, max_norm: float, norm_type: float) -> float:
        """Unscale the gradients and clip them to a norm, unless it is not finite. Return the norm before clipping.

        A norm of another type than 2 communicates as `measure` does.

        Args:
            norm: their 2-norm, as measured.
            max_norm: 0 never clips.
            norm_type: of `max_norm`; a norm of another type than 2 is measured here.
        """
        if norm_type != 2:
            norm = self.measure(norm_type)
        if isfinite(norm):
            self._reducer.unscale_(clip_coefficient(norm, max_norm))
        return norm

    def clip_by_value_(self, norm: float, clip_value: float) -> None:
        """Unscale the gradients and clip every entry to -clip_value … clip_value.

        If `norm`, measured over all ranks, is not finite, all gradients stay as they are.
        """
        if isfinite(norm) and self._slices:
            self._reducer.unscale_()
            torch._foreach_clamp_min_(self._slices, -clip_value)
            torch._foreach_clamp_max_(self._slices, clip_value)
            self._reducer.writes.accept()


def norm_over_all_ranks(
    counted: Sequence[Tensor],
    watched: Sequence[Tensor],
    *,
    norm_type: float,
    device: torch.device,
    code: int = 0,
    checksum_term: float | Tensor = 0.0,
    flags: Sequence[float] = (),
) -> tuple[Tensor, ...]:
    """Return the norm of the gradients of all ranks. One all-reduce over the world, two for the maximum norm.

    Args:
        counted: this rank's 1-D gradients; each gradient of the model is counted on exactly one rank.
        watched: gradients that another rank counts. They add nothing to the norm, but make it not finite if they are
            not finite: an overflow on one rank is an overflow on all.
        norm_type: the p of the p-norm; `inf` is the largest magnitude.
        device: the device on which the sum is computed.
        code: below 2**32, equal on all ranks if they agree; compared in the same all-reduce.
        checksum_term: this rank's `Agreement.checksum_term`. The terms of all ranks add up to 0 if they agree.
        flags: summed over all ranks in the same all-reduce.

    Returns:
        The norm, 0-d float64, equal on all ranks; infinite or NaN if any gradient of any rank is. Then a 0-d tensor,
        True if all ranks agree, and the sums of the flags.
    """
    codes = numbers_on(device, [code, code if dist.get_rank() == 0 else 0, 0, *flags], torch.float64)
    codes[2] += checksum_term  # may be a tensor of the device, which the host does not read
    norms = torch.stack([codes.new_zeros(()), *_norms(counted, norm_type)])
    if watched:  # times 0: a finite norm adds 0, an infinite one NaN
        norms = torch.cat([norms, torch.stack(_norms(watched, norm_type)) * 0])
    if isinf(norm_type):
        # A maximum over ranks may drop a NaN (gloo's does), never an infinity.
        norm = torch.where(norms.isfinite(), norms, torch.inf).max()
        dist.all_reduce(norm, op=dist.ReduceOp.MAX)
        dist.all_reduce(codes)
    else:
        message = torch.cat([norms.pow(norm_type).sum().view(1), codes])
        dist.all_reduce(message)
        norm, codes = message[0].pow(1 / norm_type), message[1:]
    # Only rank 0 adds to the second sum. Equal codes add up to the world size times its code.
    sum_of_codes, first_code, checksum, *flag_sums = codes.unbind()
    is_agreed = (sum_of_codes == first_code * dist.get_world_size()) & (checksum == 0)
    return norm, is_agreed, *flag_sums


def _norms(tensors: Sequence[Tensor], norm_type: float) -> list[Tensor]:
    """Return norms of 1-D float32 tensors or of chunks of them, summed in float64.

    A float32 sum over 16M entries would lose 6e-4.
    """
    chunks = [
        chunk for x in tensors for chunk in ([x] if is_cuda(x.device) else x.split(_CHUNK)) if chunk.numel()
    ]
    return list(torch._foreach_norm(chunks, norm_type, dtype=torch.float64)) if chunks else []
