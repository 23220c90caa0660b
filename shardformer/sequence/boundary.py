"""Where sequences are taken apart and put together: at the first and the last layer of a stack.

All that a model computes around its layers it computes on whole sequences, as ever: embeddings, masks, positions,
pooling, losses; but for what before_layers.py knows to go by position. What the layers do with a part of one is the
regions' business, or attention's.
"""

import inspect
from collections.abc import Callable, Mapping
from typing import Any

from torch import Tensor, nn
from torch.utils._pytree import tree_map_only

from ..layers.sequence_axis import (
    CommonRandom,
    PartRandom,
    SequenceAxis,
    draws,
    gather_sequence,
    samplewise,
    shard_sequence,
)
from .part_tensor import PartTensor

_DIM = 1  # of the sequence in hidden states (B, S, H)
# What layers are given besides hidden states with an entry for each position, and the dimension of those.
_BY_POSITION = {"position_embeddings": -2, "position_ids": -1, "cache_position": -1}
# Whole for all layers: attention sees the whole sequence, and the loss takes its own part.
_WHOLE = ("attention_mask", "past_key_values", "past_key_value", "shift_labels")


class Boundary:
    """The two ends of one stack of layers.

    Args:
        axis: over which its sequences are spread. On the tensor axis only the stretches between regions are.
        is_data: whether it is the sequence axis, see [Note: gradients over the sequence axis].
    """

    def __init__(self, axis: SequenceAxis, *, is_data: bool) -> None:
        self.axis, self._is_data = axis, is_data

    def enter(self, first: nn.Module, *, is_held: bool) -> None:
        """Take sequences apart in front of the first layer, or in front of what stands for it on a later stage."""

        def begin(module: nn.Module, args: tuple, kwargs: dict[str, Any]) -> tuple[tuple, dict[str, Any]]:
            hidden, put = _hidden(args, kwargs)
            if hidden.ndim != _DIM + 2:
                raise ValueError(
                    "sequence parallelism takes hidden states of (batch, sequence, width), and a "
                    f"{type(module).__name__} is given {tuple(hidden.shape)}: leave "
                    "enable_sequence_parallelism out for this model"
                )
            self.axis.length = hidden.shape[_DIM]
            if isinstance(hidden, PartTensor):
                if is_held and hidden.part is not None:
                    return put(hidden.part)
                hidden = hidden.whole()
            return put(shard_sequence(hidden, self.axis, is_data=self._is_data) if is_held else hidden)

        first.register_forward_pre_hook(begin, with_kwargs=True)

    def leave(self, last: nn.Module) -> None:
        """Put them together behind the last layer, unless they are to stay spread up to the loss."""

        def end(module: nn.Module, args: tuple, output: Any) -> Any:
            if not self.axis.ends_whole:
                return output
            hidden = output[0] if isinstance(output, tuple) else output
            whole = gather_sequence(hidden, self.axis, self.axis.length, is_data=self._is_data)
            return (whole, *output[1:]) if isinstance(output, tuple) else whole

        last.register_forward_hook(end)

    def note(self, layer: nn.Module) -> None:
        """Let a layer compute on parts: it is told of the axis, and what it is given by position is cut."""
        self.axis.note(layer)
        if not self._is_data:
            return
        names = list(inspect.signature(layer.forward).parameters)

        def cut(module: nn.Module, args: tuple, kwargs: dict[str, Any]) -> tuple[tuple, dict[str, Any]]:
            named = dict(zip(names, args, strict=False))
            first = next(iter(named), names[0])  # the hidden states
            own = {
                name: value if name == first else self._own(module, name, value)
                for name, value in (*named.items(), *kwargs.items())
            }
            return (
                tuple(own[name] for name in names[: len(args)]),
                {name: own[name] for name in kwargs},
            )

        layer.register_forward_pre_hook(cut, with_kwargs=True)
        if draws(layer):
            for name in samplewise(layer):
                CommonRandom.from_native_module(layer.get_submodule(name), self.axis.group, layer=layer)
            PartRandom.from_native_module(layer, self.axis.group)

    def _own(self, layer: nn.Module, name: str, value: Any) -> Any:
        if name in _BY_POSITION:
            return tree_map_only(Tensor, lambda x: self._part(x, _BY_POSITION[name]), value)
        if name not in _WHOLE and isinstance(value, Tensor) and self.axis.length in value.shape:
            raise ValueError(
                f"{type(layer).__name__} is given {name} of {tuple(value.shape)}, and nothing says how a sequence of "
                f"{self.axis.length} is cut in it: use sequence_parallelism_mode='split_gather' for this model"
            )
        return value

    def _part(self, x: Tensor, dim: int) -> Tensor:
        """This rank's, which may be there without the whole."""
        part = x.part if isinstance(x, PartTensor) else None
        return self.axis.own(x, dim) if part is None else part


def _hidden(
    args: tuple, kwargs: Mapping[str, Any]
) -> tuple[Tensor, Callable[[Tensor], tuple[tuple, dict[str, Any]]]]:
    """The hidden states among a layer's arguments, and the arguments with others in their place."""
    if args:
        return args[0], lambda hidden: ((hidden, *args[1:]), dict(kwargs))
    name = next(name for name, value in kwargs.items() if isinstance(value, Tensor))
    return kwargs[name], lambda hidden: ((), {**kwargs, name: hidden})
