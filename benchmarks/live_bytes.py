"""Live bytes of a forward and backward."""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

from echelon.planning.cost import LiveBytes
from echelon.shardformer.sequence.before_layers import ShardTensor


class KeptBytes(LiveBytes):
    """A context that counts the live storages created inside it.

    Attributes:
        kept: live bytes at the start of the first backward inside: saved by forward, with its outputs.
    """

    kept: int | None = None

    def run(self, func: Any, args: Any, kwargs: Any) -> Any:
        """Run an operation and count its new storages."""
        if self.kept is None and torch._C._current_graph_task_id() >= 0:  # type: ignore[attr-defined]
            self.kept = self.now
        return super().run(func, args, kwargs)


def training_bytes(compute: Callable[[], None]) -> tuple[int, int]:
    """Return the bytes that a forward keeps for its backward, and the peak of both, including the new gradients.

    Args:
        compute: runs both, once.
    """
    with KeptBytes() as live:
        compute()
    if live.kept is None:
        raise AssertionError("nothing ran backward")
    return live.kept, live.peak


def bytes_before_layers(compute: Callable[[], None], *, embedding: nn.Module, first_layer: nn.Module) -> int:
    """Return the peak bytes before the first layer's forward and after its backward.

    Args:
        compute: runs forward and backward, once.
        embedding: its output is the input of the layers.
        first_layer: gets that as its first argument.
    """
    with LiveBytes() as live:
        most: list[int] = []

        def arrive(*_: Any) -> None:
            most.append(live.peak)

        def begin_again(*_: Any) -> None:
            live.peak = live.now

        def watch(module: nn.Module, args: Any, output: Tensor) -> None:
            # This rank's shard of the output.
            shard = output.part if isinstance(output, ShardTensor) else None
            (output if shard is None else shard).register_hook(arrive)

        handles = (
            first_layer.register_forward_pre_hook(arrive),
            first_layer.register_full_backward_hook(begin_again),
            embedding.register_forward_hook(watch),
        )
        compute()
        for handle in handles:
            handle.remove()
    return max(most)
