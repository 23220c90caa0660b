"""The regions of a derived table, and what in their code makes them unfit for tensor parallelism."""

from collections.abc import Sequence

from torch import nn

from ..pipeline.plan import is_within
from .derived_styles import Styles
from .forward_code import exit_fault, own_names, takes_named_inputs, tensor_inputs
from .table import present

# Attributes with counts of heads. Code that computes with one would count the heads of other ranks.
_HEAD_COUNTS = ("num_heads", "num_attention_heads", "num_key_value_heads", "n_heads", "n_head", "embed_dim")
_ADVICE = "write a table for this model type"


def regions_of(styles: Styles) -> tuple[str, ...]:
    """The modules that hold split layers and parameters directly."""
    owners = (name.rpartition(".")[0] for name in (*styles.column, *styles.split))
    return tuple(dict.fromkeys((*owners, *styles.exits)))


def region_faults(layers: Sequence[nn.Module], styles: Styles) -> list[str]:
    """Why regions do not start and end where the modules that hold split layers do, each once."""
    found: dict[str, None] = {}
    for layer in layers:
        active = _active(layer, styles)
        found |= dict.fromkeys(
            f"{inner} works on split activations within {outer}, which does too: {_ADVICE}"
            for inner in (*active, *present(layer, (*styles.gathered, *styles.scattered)))
            for outer in active
            if inner != outer and is_within(inner, outer)
        )
        found |= dict.fromkeys(fault for path in active for fault in _faults(layer, path, styles))
        found |= dict.fromkeys(
            f"{row} is split by its inputs, and nothing beside it by its outputs: {_ADVICE}"
            for row in present(layer, styles.row)
            if row.rpartition(".")[0] not in active
        )
    return list(found)


def whole_modules(layers: Sequence[nn.Module], styles: Styles) -> list[str]:
    """Modules in regions that hold parameters which the plan does not split: their gradients are partial."""
    found: dict[str, None] = {}
    for layer in layers:
        for path in _active(layer, styles):
            found |= dict.fromkeys(f"{path}.{name}" for name in _whole(layer, path, styles))
    return list(found)


def _faults(layer: nn.Module, path: str, styles: Styles) -> list[str]:
    module = layer.get_submodule(path)
    whole = _whole(layer, path, styles)
    rows = [name for name in present(layer, styles.row) if name.rpartition(".")[0] == path]
    own = [name for name, _ in module.named_parameters(recurse=False) if f"{path}.{name}" not in styles.split]
    found = [f"{path}.{name} is whole among split activations: {_ADVICE}" for name in own]
    further = tensor_inputs(module)
    if path in styles.exits:
        found += [f"{path}.{name} is whole among split experts: {_ADVICE}" for name in whole + rows]
        is_known = len(further) <= (path in styles.experts) and takes_named_inputs(module)
        return found if is_known else [*found, f"{path} takes {further or 'inputs without names'}: {_ADVICE}"]
    if further:
        found.append(f"{path} takes {', '.join(further)} besides hidden states: {_ADVICE}")
    if counts := sorted(own_names(module) & {*_HEAD_COUNTS}):
        found.append(f"the code of {path} reads {', '.join(counts)}, of which a rank has a part: {_ADVICE}")
    if len(rows) != 1:
        return [*found, f"{path} has split outputs, and {rows or 'no layer'} to end them: {_ADVICE}"]
    others = [name for name, _ in module.named_children() if f"{path}.{name}" != rows[0]]
    others = [name for name in others if any(True for _ in module.get_submodule(name).parameters())]
    fault = exit_fault(
        module, rows[0].rpartition(".")[2], [*others, *dict(module.named_parameters(recurse=False))]
    )
    return [*found, *([f"{path}: {fault}: {_ADVICE}"] if fault else [])]


def _active(layer: nn.Module, styles: Styles) -> list[str]:
    """The regions of which this layer holds something that is split."""
    held = {*dict(layer.named_modules()), *dict(layer.named_parameters())}
    owners = (name.rpartition(".")[0] for name in (*styles.column, *styles.split) if name in held)
    return list(dict.fromkeys(owners))


def _whole(layer: nn.Module, path: str, styles: Styles) -> list[str]:
    """The modules below a region, without itself, that hold parameters which the plan does not split."""
    known = (*styles.modules, *styles.partial, *styles.split)
    names = (name for name, _ in layer.get_submodule(path).named_parameters() if "." in name)
    whole = [name for name in names if not any(is_within(f"{path}.{name}", each) for each in known)]
    return list(dict.fromkeys(name.rpartition(".")[0] for name in whole))
