"""Memory of a sharded optimizer, by kind."""

from collections.abc import Iterable, Sequence

from torch import Tensor

from .bucket import Bucket
from .buffers import BufferPool
from .owned import OwnedParameters
from .partition import ManagedParameter


def bytes_by_kind(
    buckets: Sequence[Bucket],
    owned: OwnedParameters,
    *,
    frozen: Sequence[ManagedParameter],
    states: Iterable[object],
    pool: BufferPool | None,
    is_offloaded: bool,
) -> dict[str, int]:
    """Return the bytes on this rank by kind, as `ShardedOptimizer.held_bytes` documents.

    Args:
        buckets: of the optimizer.
        owned: parameters that this rank steps in full.
        frozen: parameters without an optimizer.
        states: the values in the inner optimizer's states.
        pool: buffers for unsharded gradients at stage 2.
        is_offloaded: True if masters and states are on the CPU.
    """
    state_tensors = [state for state in states if isinstance(state, Tensor)]
    masters = sum(bucket.masters.nbytes for bucket in buckets if bucket.has_masters) + owned.master_bytes
    large = sum(tensor.nbytes for tensor in state_tensors if tensor.numel() > 1)
    gradients = [
        bucket.gradient_slice if bucket.shards_gradients or bucket.gradients is None else bucket.gradients
        for bucket in buckets
    ]
    num_bytes = {
        "parameters": sum(bucket.parameters.nbytes for bucket in buckets)
        + sum(managed.parameter.nbytes for managed in frozen),
        "gradients": sum(buffer.nbytes for buffer in gradients),
        "buffers": 0 if pool is None else pool.nbytes,
        "masters": 0 if is_offloaded else masters,
        "states": 0 if is_offloaded else large,
        "scalars": sum(tensor.nbytes for tensor in state_tensors if tensor.numel() <= 1),
    }
    if is_offloaded:
        copies = sum(bucket.stepped_gradients.nbytes for bucket in buckets if bucket.is_offloaded)
        num_bytes["offloaded_gradients"] = copies + owned.master_bytes
        num_bytes["offloaded_masters"], num_bytes["offloaded_states"] = masters, large
    return num_bytes
