"""Layers that backward computes again, of sequences that may be of another length by then."""

from collections.abc import Callable, Sequence
from typing import Any

from torch import nn

from ..layers.sequence_axis import SequenceAxis, axis_of


class RememberingLength:
    """A function that checkpoints, in front of which the length of the sequence is kept for the second time.

    Args:
        checkpoint: calls what it is given once in forward and again in backward, as transformers' layers have it.
        axis: of the layer.
    """

    def __init__(self, checkpoint: Callable[..., Any], axis: SequenceAxis) -> None:
        self.checkpoint, self._axis = checkpoint, axis

    def __call__(self, function: Callable[..., Any], *args: Any) -> Any:
        """What `checkpoint` makes of it."""
        lengths: list[int] = []

        def compute(*args: Any) -> Any:
            if lengths:
                with self._axis.computing(lengths[0]):
                    return function(*args)
            outputs = function(*args)
            lengths.append(self._axis.length)  # the first layer sets it itself
            return outputs

        return self.checkpoint(compute, *args)


def remember_lengths(layers: Sequence[nn.Module]) -> None:
    """Let these layers keep the length where they are checkpointed, whoever told them to be, and when."""
    for layer in layers:
        checkpoint, axis = getattr(layer, "_gradient_checkpointing_func", None), axis_of(layer)
        if checkpoint is not None and axis is not None and not isinstance(checkpoint, RememberingLength):
            layer._gradient_checkpointing_func = RememberingLength(checkpoint, axis)  # type: ignore[assignment]
