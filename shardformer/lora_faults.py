"""Why what peft has put into a model cannot be split with it. What can be is layer/lora.py."""

from collections.abc import Collection, Iterator, Mapping
from typing import Any

from torch import nn

from ..pipeline.plan import is_within
from .adapted import adapted, is_lora, is_of_peft
from .lookup import active_regions, has_submodule
from .table import Table


def adapter_faults(
    model: nn.Module, layers: Mapping[str, nn.Module], table: Table, ends: Collection[str]
) -> list[str]:
    """Why the adapters of a model cannot be split by a table, each kind of fault once; empty where they can.

    Args:
        model: the whole model, not yet split.
        layers: its layers by path.
        table: how it is to be split.
        ends: paths of the embeddings and the head.
    """
    told: dict[str, list[str]] = {}
    for path, layer in layers.items():
        for name, module in adapted(layer):
            for fault in _faults_in_layer(layer, name, module, table):
                told.setdefault(fault, []).append(f"{path}.{name}")
    for path in ends:
        if has_submodule(model, path) and is_of_peft(model.get_submodule(path)):
            fault = f"is split by the vocabulary, and {_kind(model.get_submodule(path))} around it is not: {_INSTEAD}"
            told.setdefault(fault, []).append(path)
    return [
        f"{paths[0]}{f' (and {len(paths) - 1} more like it)' if len(paths) > 1 else ''} {fault}"
        for fault, paths in told.items()
    ]


def dropout_faults(layers: Mapping[str, nn.Module], option: str) -> list[str]:
    """Why adapters cannot compute where sequences are spread over the tensor axis: they drop at random.

    Args:
        layers: by path.
        option: what asks for that, in the words of the user.
    """
    found = [f"{path}.{name}" for path, layer in layers.items() for name, _ in _dropping(layer)]
    return [
        f"{option} with lora_dropout above 0 in {found[0]} (and {len(found) - 1} more like it): its ranks would drop "
        "different entries of one input. Use lora_dropout=0, or a sequence_parallelism_mode on the sequence axis"
        for _ in found[:1]
    ]


_INSTEAD = "leave it out of target_modules, target_parameters and modules_to_save, or use tp_size=1"


def _faults_in_layer(layer: nn.Module, name: str, module: Any, table: Table) -> list[str]:
    if name in (*table.column, *table.row, *table.gathered, *table.scattered):
        return _linear_faults(module)
    if any(is_within(name, each) for each in table.whole):
        return []
    is_inside = table.region_of(name) in active_regions(layer, table)
    if is_inside or any(is_within(each, name) for each in table.modules):
        return [
            f"is no linear layer that is split, and {_kind(module)} around it is not split either: {_INSTEAD}"
        ]
    return []


def _linear_faults(module: Any) -> list[str]:
    """Why an adapter around a linear layer that is split cannot be split with it."""
    if not is_lora(module):
        return [f"is split, and {_kind(module)} around it is not: use LoRA on linear layers, or tp_size=1"]
    found = []
    if module.lora_variant:
        kinds = sorted({type(variant).__name__ for variant in module.lora_variant.values()})
        found.append(
            f"has LoRA of a kind that is not split ({', '.join(kinds)}): use plain LoRA (use_dora=False and the like), "
            "or tp_size=1"
        )
    if module.merged:
        found.append("has its adapter merged into the weight: call unmerge_adapter() before booster.boost")
    return found


def _dropping(layer: nn.Module) -> Iterator[tuple[str, nn.Module]]:
    for name, module in adapted(layer):
        dropouts = getattr(module, "lora_dropout", {})
        if any(isinstance(each, nn.Dropout) and each.p > 0 for each in dropouts.values()):
            yield name, module


def _kind(module: nn.Module) -> str:
    return f"peft's {type(module).__qualname__}"
