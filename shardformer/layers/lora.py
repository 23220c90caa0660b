"""LoRA around linear layers, sharded like the layer inside.

[Note: adapters] peft's own forward adds the scaled B(A(dropout(x))) to the output of the layer inside. If that layer is
parallel, A and B are sharded with it:

    by outputs    A is replicated with a partial gradient; B has the rows of this rank's outputs
    by inputs     A has the columns of this rank's inputs, its output is all-reduced; B is replicated
    replicated inputs and outputs (gathered, or sharded inside the layer)    A and B are replicated

Dropout before A draws the same numbers on all ranks if the input is replicated, and different ones if it is sharded.
"""

# R rank of the adapter, I input features, O output features: A is (R, I), B is (O, R)

from collections.abc import Iterator
from typing import Any

import torch.distributed as dist
from torch import nn
from torch.nn import Parameter

from ...cluster.forward_random import SplitRandom
from ...cluster.placement import PartialGrad, Replicated, Shard, place, shard_on
from .linear import Linear1D_Col, Linear1D_Row, SharedKeyValueLinear1D_Col
from .parallel_module import is_of_peft

# peft is optional, so nothing here imports it: its classes are known by their names.
_LORA = ("peft.tuners.lora.layer", "Linear")


def is_lora(module: nn.Module) -> bool:
    """Return True for LoRA around a linear layer, as peft puts it around nn.Linear and transformers' Conv1D."""
    return (type(module).__module__, type(module).__name__) == _LORA


def is_adapted_parameter(module: nn.Module) -> bool:
    """Return True for LoRA of a parameter that is no linear layer's weight, as peft puts it around its module."""
    return (type(module).__module__, type(module).__name__) == (_LORA[0], "ParamWrapper")


def base_layer_of(module: nn.Module) -> Any:
    """Return the linear layer inside LoRA, or the module itself if it is not LoRA."""
    return module.base_layer if is_lora(module) else module


def base_layer_path(root: nn.Module, path: str) -> str:
    """Return the path of the linear layer at a path: below it, if LoRA wraps the layer."""
    return f"{path}.base_layer" if is_lora(root.get_submodule(path)) else path


def adapted(root: nn.Module) -> Iterator[tuple[str, nn.Module]]:
    """Yield peft's outermost wrappers around modules, with their paths."""
    outer = ""  # the last wrapper
    for path, module in root.named_modules():
        if is_of_peft(module) and not (outer and path.startswith(outer)):
            outer = f"{path}."
            yield path, module


class LoraSplit:
    """Shards the adapters that peft put around a linear layer; the module itself stays peft's."""

    @staticmethod
    def from_native_module(
        module: nn.Module, process_group: dist.ProcessGroup, *, split_random: SplitRandom | None = None
    ) -> nn.Module:
        """Shard all adapters of a module; see [Note: adapters].

        Args:
            module: peft's, whose `base_layer` is a parallel layer already.
            process_group: the tensor axis.
            split_random: the random state that the region around the module switches to.

        Raises:
            ValueError: this kind of LoRA has another forward, or is merged into the weight.
        """
        _require_supported(module)
        base = module.base_layer
        if isinstance(base, Linear1D_Col) and not base.gather_output:
            _split_outputs(module, base, process_group, split_random)
        elif isinstance(base, Linear1D_Row) and not base.split_input:
            _split_inputs(module, base, process_group)
        return module


def _require_supported(module: Any) -> None:
    """Raise ValueError for a LoRA layer of another formula, or one that is merged."""
    if module.lora_variant:
        kinds = sorted({type(variant).__name__ for variant in module.lora_variant.values()})
        raise ValueError(
            f"LoRA of a kind that cannot be sharded ({', '.join(kinds)}): use plain LoRA (use_dora=False and "
            "the like), or tp_size=1"
        )
    if module.merged:
        raise ValueError("the adapter is merged into the weight: call unmerge_adapter() before booster.boost")


def _split_outputs(
    module: Any, base: Linear1D_Col, group: dist.ProcessGroup, split_random: SplitRandom | None
) -> None:
    """Shard B of every adapter like the base layer's outputs; A stays replicated.

    A gets partial gradients, to be summed, if the region around the layer sums those of its inputs.
    """
    shard = _tensor_shard(base.weight)
    kwargs: dict[str, Any] = {
        **_cut_arguments(shard),
        "replicas": shard.replicas,
        "reduce_input_gradient": base.reduce_input_gradient,
    }
    kind: type[Linear1D_Col] = Linear1D_Col
    if isinstance(base, SharedKeyValueLinear1D_Col):
        kind = SharedKeyValueLinear1D_Col
        kwargs["num_key_value_heads"] = base.num_key_value_heads
    for name, native in list(module.lora_B.items()):
        module.lora_B[name] = kind(native, group, **kwargs)
        if not base.reduce_input_gradient:
            place(module.lora_A[name].weight, PartialGrad(size=group.size()), group.rank())
        if split_random is not None:
            _draw_common_numbers(module.lora_dropout[name], split_random)


def _split_inputs(module: Any, base: Linear1D_Row, group: dist.ProcessGroup) -> None:
    """Shard A of every adapter like the base layer's inputs; B stays replicated."""
    sizes = _cut_arguments(_tensor_shard(base.weight))
    for name, native in list(module.lora_A.items()):
        module.lora_A[name] = Linear1D_Row(native, group, sequence=base.sequence, **sizes)
        # Under sequence sharding B computes on the local part of the sequence only.
        kind = Replicated if base.sequence is None else PartialGrad
        for parameter in module.lora_B[name].parameters():
            place(parameter, kind(size=group.size()), group.rank())
        if isinstance(module.lora_dropout[name], nn.Dropout):  # identity draws nothing
            SplitRandom(group.rank()).around(module.lora_dropout[name])


def _draw_common_numbers(dropout: nn.Module, split_random: SplitRandom) -> None:
    """Add hooks by which dropout inside a region draws from the random state common to all ranks.

    Modules other than dropout (identity) draw nothing and get none.
    """
    if not isinstance(dropout, nn.Dropout):
        return

    def exchange(module: nn.Module, *_: Any) -> None:
        """Switch from the region's state to the common one before the forward, and back after it."""
        if module.training:
            split_random.exchange()

    dropout.register_forward_pre_hook(exchange)
    dropout.register_forward_hook(exchange)


def _tensor_shard(weight: Parameter) -> Shard:
    """Return the placement of a sharded weight on the tensor axis."""
    shard = shard_on(weight, "tp")
    assert shard is not None
    return shard


def _cut_arguments(shard: Shard) -> dict[str, Any]:
    """Return the sharding of the layer's features, as arguments of another layer."""
    return {"split_sizes": shard.blocks, "padded_sizes": shard.padded, "stretches": shard.stretches}
