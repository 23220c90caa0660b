"""Regions: parts of a layer with sharded activations, between one entry and one exit.

The entry is a hook on the module that takes the replicated input; the exit is the row-sharded layer at its end
(linear.py). So q, k and v together cost one all-reduce in backward. A learned mask enters too.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from ...cluster.collectives import copy_to, reduce_from
from ...cluster.forward_random import SplitRandom
from ...cluster.placement import PartialGrad, place
from ...cluster.transformers_api import ROTATIONS
from .linear import Linear1D_Col, ProductLayer, enter
from .parallel_module import change_inputs, name_of_first_tensor, shard_of
from .split_gather import RegionSequence


class CommonInput:
    """A second input shared by the regions of several layers, such as encoder states in cross attention.

    It enters once per forward, so that its regions share one all-reduce in backward. It is kept until another enters.
    """

    def __init__(self) -> None:
        # The last input, its version (which counts in-place writes), and the tensor that it entered as.
        self._input: Tensor | None = None
        self._input_version = 0
        self._entered: Tensor | None = None

    def enter(self, xs: Sequence[Tensor], enter: Callable[[Sequence[Tensor]], list[Tensor]]) -> list[Tensor]:
        """Enter a region with two inputs; if the second has entered another one before, reuse that result.

        Args:
            xs: the two inputs of the region.
            enter: enters a region with the inputs that it is given; see linear.py.

        Returns:
            The two entered inputs.
        """
        # Outputs of a layer that backward recomputes have no part in the sum of gradients; a compiled layer has a graph
        # of its own.
        is_compiled = torch.compiler.is_compiling()
        if not torch.is_grad_enabled() or is_compiled or torch._C._current_graph_task_id() != -1:
            return enter(xs)
        first, second = xs
        if self._input is second and self._input_version == second._version and self._entered is not None:
            return [*enter([first]), self._entered]
        first, self._entered = enter(xs)
        self._input, self._input_version = second, second._version
        return [first, self._entered]


@dataclass(frozen=True, kw_only=True)
class AttentionInputs:
    """Inputs of an attention region besides those that its layers multiply with: masks, slopes, rotations.

    Args:
        group: the tensor axis.
        by_head: names of the inputs that are sliced to this rank's heads, each with the dimension of the heads (or of
            samples and heads together, the heads innermost); two more dimensions follow, of queries and keys. Inputs
            with a length of 1, or another number of dimensions, are not sliced.
        num_heads: number of heads on all ranks.
        local_heads: those of this rank.
    """

    group: dist.ProcessGroup
    by_head: Mapping[str, int]
    num_heads: int
    local_heads: Sequence[int]

    def enter(self, module: nn.Module, inputs: dict[str, Any]) -> None:
        """Replace the inputs by those of the region, in place: in backward one all-reduce for each with a gradient.

        Inputs of `by_head` are also sliced to the local heads.

        Args:
            module: of the call; not used.
            inputs: the arguments of its forward by name.
        """
        if (rotations := inputs.get(ROTATIONS)) is not None:
            inputs[ROTATIONS] = self._enter_one(rotations)
        for name, dim in self.by_head.items():
            if not isinstance(x := inputs.get(name), Tensor):
                continue
            inputs[name] = entered = self._enter_one(x)
            if entered.ndim == dim + 3 and entered.shape[dim] > 1:
                inputs[name] = select_heads(entered, dim, self.num_heads, self.local_heads)

    def _enter_one(self, x: Any) -> Any:
        """Return a tensor, or each of a tuple, as a copy whose gradient is summed over the ranks in backward."""
        if isinstance(x, tuple):  # cosines and sines
            return tuple(map(self._enter_one, x))
        return copy_to(x, self.group) if isinstance(x, Tensor) and x.requires_grad else x

    @staticmethod
    def from_native_module(
        module: nn.Module, process_group: dist.ProcessGroup, *, attention_inputs: "AttentionInputs"
    ) -> nn.Module:
        """Add a hook that enters these inputs of a module; for a joined region, whose entries are several layers.

        Args:
            module: the attention, called with the inputs.
            process_group: the tensor axis.
            attention_inputs: the inputs.
        """
        change_inputs(module, attention_inputs.enter)
        return module


class Region:
    """Marks a module as the entry of a region, by a hook; the module itself stays as it is."""

    @staticmethod
    def from_native_module(
        module: nn.Module,
        process_group: dist.ProcessGroup,
        *,
        split_random: SplitRandom | None = None,
        second_input: str | None = None,
        common_input: CommonInput | None = None,
        attention_inputs: AttentionInputs | None = None,
        sequence: RegionSequence | None = None,
    ) -> nn.Module:
        """Let the module's first tensor enter the region before its forward (backward all-reduce); see `enter`.

        Args:
            module: called with the replicated tensor as its first argument, or with this rank's part of a sequence.
            process_group: the tensor axis.
            split_random: random state to switch to until the region's exit, if the region has dropout.
            second_input: the name of another replicated argument, which enters too if a call has it.
            common_input: shared by all regions that may get the same second input; it then enters only once.
            attention_inputs: enters other arguments; None if there are none.
            sequence: the sharding of the first tensor, which is gathered (backward reduce-scatter) instead.
        """
        common = common_input or CommonInput()
        layers = _entry_layers(module)

        def enter_all(xs: Sequence[Tensor]) -> list[Tensor]:
            return enter(xs, process_group, layers, sequence)

        def enter_region(module: nn.Module, inputs: dict[str, Any]) -> None:
            """Switch to the region's random state, and replace the arguments in `inputs` by the entered ones."""
            first_name = name_of_first_tensor(inputs, besides=second_input)
            if split_random is not None and module.training:
                split_random.enter(inputs[first_name].device)
            # In one order on all ranks: backward all-reduces in that order too.
            if second_input is not None and isinstance(second := inputs.get(second_input), Tensor):
                inputs[first_name], inputs[second_input] = common.enter(
                    [inputs[first_name], second], enter_all
                )
            else:
                (inputs[first_name],) = enter_all([inputs[first_name]])
            if attention_inputs is not None:
                attention_inputs.enter(module, inputs)

        change_inputs(module, enter_region)
        return module


def _entry_layers(module: nn.Module) -> list[ProductLayer]:
    """Return the column-parallel layers in a region, which multiply with its input."""
    return [
        layer
        for layer in module.modules()
        if isinstance(layer, Linear1D_Col) and not layer.reduce_input_gradient
    ]


def select_heads(x: Tensor, dim: int, num_heads: int, local: Sequence[int]) -> Tensor:
    """Return the entries of some heads along a dimension.

    Args:
        x: along `dim` one entry per head, or per sample and head.
        dim: the dimension of the heads.
        num_heads: the number of heads on all ranks of the group.
        local: the heads to select.

    Raises:
        ValueError: another number of entries.
    """
    if x.shape[dim] % num_heads:
        raise ValueError(
            f"an input of shape {tuple(x.shape)} should have entries for {num_heads} heads along dim {dim}"
        )
    by_head = x.unflatten(dim, (-1, num_heads))
    return torch.stack([by_head.select(dim + 1, head) for head in local], dim + 1).flatten(dim, dim + 1)


class RegionExit:
    """Marks a module with a partial output on each rank, by a hook; the module itself does not change."""

    @staticmethod
    def from_native_module(module: nn.Module, process_group: dist.ProcessGroup) -> nn.Module:
        """Sum the tensor that the module returns over the group (forward all-reduce)."""
        # What the module needs of its output for backward is its own, so the sum goes to a copy.
        module.register_forward_hook(lambda module, args, output: reduce_from(output.clone(), process_group))
        return module


class PartialGradient:
    """Marks replicated parameters used inside a region, whose partial gradients must be summed."""

    @staticmethod
    def from_native_module(
        module: nn.Module, process_group: dist.ProcessGroup, *, name: str | None = None
    ) -> nn.Module:
        """Place the module's parameters, or the one of this name alone, as `PartialGrad`; the module stays as it is."""
        for parameter in module.parameters() if name is None else [module.get_parameter(name)]:
            place(parameter, PartialGrad(size=process_group.size()), process_group.rank())
        return module


class SplitParameter:
    """Shards one parameter of a module inside a region; the module's own forward uses this rank's shard."""

    @staticmethod
    def from_native_module(
        module: nn.Module,
        process_group: dist.ProcessGroup,
        *,
        name: str,
        dim: int,
        **cut: Any,
    ) -> nn.Module:
        """Place the parameter as a `Shard`; the module itself stays as it is.

        Args:
            module: holds the parameter itself, not in a sub-module.
            process_group: the tensor axis.
            name: of the parameter.
            dim: the dimension that is cut.
            cut: see `shard_of`.
        """
        parameter = module.get_parameter(name)
        place(parameter, shard_of(parameter, dim, process_group, **cut), process_group.rank())
        return module


class AttributeView:
    """A view of a config or module in which some attributes are overridden.

    All other attributes are read from the native object at each access.

    Args:
        native: the config or module.
        overrides: the attributes that differ.
    """

    def __init__(self, native: Any, /, **overrides: Any) -> None:
        self.__dict__.update(overrides, _native=native)

    def __getattr__(self, name: str) -> Any:
        if name == "_native":  # while it is being copied, before it has one
            raise AttributeError(name)
        return getattr(self._native, name)


class LocalCount(int):
    """A local count, such as of heads; dividing a width by it divides by the count of all ranks.

    For attention that takes the heads of its split projections from `num_heads`, and the width of a head from
    whole inputs: `inputs.shape[-1] // num_heads`.

    Args:
        local: the count of this rank.
        total: the count of all ranks together.
    """

    total: int

    def __new__(cls, local: int, total: int) -> "LocalCount":
        count = super().__new__(cls, local)
        count.total = total
        return count

    def __rfloordiv__(self, width: int) -> int:
        return width // self.total

    def __getnewargs__(self) -> tuple[int, int]:  # type: ignore[override]  # for copies and pickles
        return int(self), self.total
