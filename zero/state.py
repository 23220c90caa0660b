"""What one rank saves and loads of its optimizer under one layout. Changing the layout is checkpoint/'s."""

from collections.abc import Sequence
from typing import Any

from torch.optim import Optimizer

from .bucket import Bucket
from .precision import DynamicScaler

PARTIAL_STATE = (
    "this rank has only a part of this optimizer's state, which state_dict() would give for the whole: call "
    "booster.save_optimizer(optimizer, folder) or booster.save_checkpoint on every rank"
)


def local_state(inner: Optimizer, buckets: Sequence[Bucket], scaler: DynamicScaler | None) -> dict[str, Any]:
    """torch's own state dict of the inner optimizer, and beside it masters, loss scale and layout.

    As in torch, tensors are the live ones: copy or save them before the next step.
    """
    return {
        **inner.state_dict(),
        "masters": [bucket.masters for bucket in buckets],
        "scaler": None if scaler is None else scaler.state_dict(),
        "layout": layout_lines(buckets),
    }


def load_local_state(
    inner: Optimizer, buckets: Sequence[Bucket], scaler: DynamicScaler | None, state: dict[str, Any]
) -> None:
    """Load what `local_state` returned. The parameters are as they were.

    Raises:
        ValueError: it was saved under another layout or precision.
    """
    saved, own = state.get("layout", ["a state dict of another optimizer"]), layout_lines(buckets)
    if saved != own:
        shorter, longer = sorted((saved, own), key=len)
        at = next((i for i, line in enumerate(shorter) if line != longer[i]), len(shorter))
        there, here = (lines[at] if at < len(lines) else "nothing" for lines in (saved, own))
        raise ValueError(
            f"the optimizer state was saved under another layout: number {at} is {there} there and {here} "
            "here. Load what booster.save_optimizer wrote under any layout by booster.load_optimizer"
        )
    inner.load_state_dict({key: state[key] for key in ("state", "param_groups")})
    for bucket, masters in zip(buckets, state["masters"], strict=True):
        bucket.masters.copy_(masters)
    if scaler is not None and state["scaler"] is not None:  # else it was saved under another precision
        scaler.load_state_dict(state["scaler"])


def layout_lines(buckets: Sequence[Bucket]) -> list[str]:
    """One line per parameter; equal lines mean that a state fits."""
    return [line for bucket in buckets for line in bucket.describe()]
