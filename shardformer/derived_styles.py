"""The styles of transformers' tensor plans, sorted by what becomes of a module or parameter here."""

import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field

from torch import nn
from torch.nn import Parameter

# Packed: two projections of equal length side by side.
_PACKED = 2
# Nothing is done here: whole modules need no style, parameters are found by their own entries, and activations
# outside of regions are never split, whatever the plan proposes for norms.
_IGNORED = ("replicate", "local_params", "sequence_parallel")


@dataclass(kw_only=True)
class Styles:
    """Names of a layer, by what the plan says of them.

    Args:
        column, row: linear layers split by outputs or by inputs.
        gathered: linear layers split by outputs, which are gathered again.
        scattered: linear layers split by inputs, which arrive whole.
        partial: whole modules whose gradients are partial.
        experts: modules that hold experts as parameters and are given routing weights.
        summed: other modules whose outputs are summed over the ranks.
        split: parameters, with the dimension that is cut.
        fused: of `column` and `split`, how many parts each fuses.
        faults: what of the plan is not known here.
    """

    column: tuple[str, ...] = ()
    row: tuple[str, ...] = ()
    gathered: tuple[str, ...] = ()
    scattered: tuple[str, ...] = ()
    partial: tuple[str, ...] = ()
    experts: tuple[str, ...] = ()
    summed: tuple[str, ...] = ()
    split: dict[str, int] = field(default_factory=dict)
    fused: dict[str, int] = field(default_factory=dict)
    faults: tuple[str, ...] = ()

    @property
    def exits(self) -> tuple[str, ...]:
        """Modules other than linear layers that end a region."""
        return (*self.experts, *self.summed)

    @property
    def modules(self) -> tuple[str, ...]:
        """All linear layers that are split, and the modules that end regions."""
        return (*self.column, *self.row, *self.gathered, *self.scattered, *self.exits)


# By style the field of `Styles`, for modules.
_OF_MODULES = {
    "colwise": "column",
    "packed_colwise": "column",
    "rowwise": "row",
    "colwise_gather_output": "gathered",
    "colwise_rep": "gathered",
    "rowwise_split_input": "scattered",
    "rowwise_rep": "scattered",
    "replicated_with_grad_allreduce": "partial",
    "mla_kv_a_proj": "partial",
    "moe_tp_experts": "experts",
    "all_reduce": "summed",
}
# By style the dimension that is cut, for parameters, and how many dimensions they must have.
_OF_PARAMETERS = {
    "colwise": (-2, 1),
    "packed_colwise": (-2, 2),
    "rowwise": (-1, 2),
    "packed_rowwise": (-1, 2),
}


def sort_styles(
    plan: Mapping[str, str], stack: str, layers: Sequence[nn.Module], *, embedding: str | None
) -> Styles:
    """The plan's entries for what these layers hold; an entry for what none of them holds is passed over.

    Args:
        plan: styles by path from the base model, with `*` for numbers.
        stack: the path of the list of layers.
        layers: the layers.
        embedding: the path of the vocabulary's embedding, which is split whatever the plan says of it.
    """
    found = Styles()
    held: dict[str, nn.Module | Parameter] = {}
    for layer in layers:
        held |= {**dict(layer.named_modules()), **dict(layer.named_parameters())}
    for path, style in plan.items():
        if not path.startswith(f"{stack}.*."):
            if path != embedding and style not in _IGNORED:
                found.faults += (f"transformers' plan splits {path} ({style!r}), which is no layer",)
            continue
        for name in _matching(path.removeprefix(f"{stack}.*."), held):
            _sort(found, name, held[name], style)
    return found


def _matching(pattern: str, names: Iterable[str]) -> list[str]:
    expression = re.compile(r"\d+".join(re.escape(part) for part in pattern.split("*")))
    return [name for name in names if expression.fullmatch(name)]


def _sort(found: Styles, name: str, thing: nn.Module | Parameter, style: str) -> None:
    if style in _IGNORED:
        return
    if isinstance(thing, Parameter) and style in _OF_PARAMETERS and thing.ndim >= _OF_PARAMETERS[style][1]:
        found.split[name] = max(thing.ndim + _OF_PARAMETERS[style][0], 0)
    elif isinstance(thing, nn.Module) and style in _OF_MODULES:
        kind = _OF_MODULES[style]
        setattr(found, kind, (*getattr(found, kind), name))
    else:
        found.faults += (
            f"transformers' plan gives {name} ({type(thing).__name__}) the style {style!r}, which is not known here "
            "for it: write a table",
        )
        return
    if style.startswith("packed"):
        found.fused[name] = _PACKED
