"""All reading of the models' source code: what no trace or trial tells yet.

[Note: code that is read] A trial of sequence parallelism would have to try every mask and mode; so layers are judged by
their code, and by the names of their classes. Whether a layer returns a tuple differs between releases of transformers,
for the same table: a trace would need a small copy at every boost. Which forwards add to the result of a dropout must
be known before the first one runs, and decides only what is compiled, not what is computed. Code that is not understood
is refused, or not compiled.
"""

import ast
import inspect
import re
import textwrap
from collections.abc import Callable, Iterable, Sequence
from functools import cache
from typing import Any, cast

from torch import nn

from ...cluster.transformers_api import CALLS_ATTENTION, CALLS_INTERFACE, DEFAULT_ATTENTION
from ...pipeline.stage_plan import is_within
from .sequence_axis import INSTEAD

# Attributes in code that accesses several positions, or their number.
_MIXING = re.compile(
    "(un)?flatten|(un)?squeeze|view|reshape|permute|transpose|chunk|split|roll|shape|size|mean|sum|cumsum|gather|"
    "index_select|pad|conv[12]d"
)
_USES_MASK = re.compile(r"attention_mask\s*(\.|\[|\+|\*)")
_ARGUMENT = re.compile(r"^\s*(\w+)=", re.MULTILINE)
# Substrings in names of modules that compute each position independently.
_BY_POSITION = ("Norm", "Dropout", "DropPath", "LayerScale", "Linear", "Conv1D", "Identity", "Activation")
_BY_POSITION_OF = ("torch.nn.modules.activation", "transformers.activations")
# Classes whose code does so harmlessly: OPT's flattens the tokens of all samples, and restores the shape.
_CHECKED = ("OPTDecoderLayer",)


def returns_tuple(module: nn.Module) -> bool:
    """Return True if the code of a module's forward explicitly returns a tuple."""
    nodes = _nodes(type(module).forward)
    returned = [node.value for node in nodes if isinstance(node, ast.Return)]
    names = {value.id for value in returned if isinstance(value, ast.Name)}
    tuples = [
        node.targets[0]
        for node in nodes
        if isinstance(node, ast.Assign) and isinstance(node.value, ast.Tuple)
    ]
    is_named = any(isinstance(target, ast.Name) and target.id in names for target in tuples)
    return is_named or any(isinstance(value, ast.Tuple) for value in returned)


def is_by_position_after_loops(module: nn.Module) -> bool:
    """Return True if a forward computes each position independently after its last loop, or in all of its code."""
    nodes = _nodes(type(module).forward)
    last_end = max((node.end_lineno or 0 for node in nodes if isinstance(node, ast.For)), default=0)
    return bool(nodes) and not _mixing_attributes(
        node for node in nodes if getattr(node, "lineno", 0) > last_end
    )


def mixing_errors(layer: nn.Module, exempt: Sequence[str]) -> list[str]:
    """Return errors of modules of a layer that may mix positions, and so cannot compute on a sequence shard.

    Modules with children are judged by the code of their forward, others by the names of their classes.

    Args:
        layer: the native layer.
        exempt: paths of sub-modules that receive full sequences, or support sequence shards.
    """
    kind = type(layer).__name__
    errors = []
    if size := getattr(layer, "chunk_size_feed_forward", 0):
        errors.append(
            f"{kind} has chunk_size_feed_forward={size}, which chunks the sharded sequences again: set it to "
            "0"
        )
    for name, module in layer.named_modules():
        if any(is_within(name, path) for path in exempt):
            continue
        where = f"{kind}.{name}" if name else kind
        if list(module.children()):
            if mixing := _described_mixing(module):
                errors.append(f"the code of {where} {mixing}, and may depend on the full sequence: {INSTEAD}")
        elif not is_by_position(module):
            errors.append(f"{where} is a {type(module).__name__}, which may mix positions: {INSTEAD}")
    return errors


def _described_mixing(module: nn.Module) -> str:
    """Describe how the code of a module's forward may mix positions, as "uses view"; empty if it does not."""
    if isinstance(module, (nn.ModuleList, nn.ModuleDict)) or type(module).__name__ in _CHECKED:
        return ""
    if not (nodes := _nodes(type(module).forward)):
        return "cannot be read"
    if used := _mixing_attributes(nodes):
        return f"uses {', '.join(used)}"
    indices = [node.slice for node in nodes if isinstance(node, ast.Subscript)]
    by_dim = [entry for index in indices if isinstance(index, ast.Tuple) for entry in index.elts]
    return "takes slices" if any(isinstance(entry, ast.Slice) for entry in by_dim) else ""


def is_by_position(module: nn.Module) -> bool:
    """Return True if a leaf module computes each position independently, judging by the name of its class."""
    kind = type(module)
    return kind.__module__ in _BY_POSITION_OF or any(part in kind.__name__ for part in _BY_POSITION)


def _mixing_attributes(nodes: Iterable[ast.AST]) -> list[str]:
    """Return the attributes in this code that access several positions, or their number."""
    names = {node.attr for node in nodes if isinstance(node, ast.Attribute)}
    return sorted(filter(_MIXING.fullmatch, names))


def is_attention(module: nn.Module) -> bool:
    """Return True if a module calls attention through transformers' interface."""
    return CALLS_INTERFACE.search(_code(type(module))) is not None


def attention_arguments(kind: type[nn.Module]) -> set[str]:
    """Return the names of the keyword arguments that a class passes to transformers' attention interface."""
    calls = CALLS_ATTENTION.findall(_code(kind))
    return {argument for call in calls for argument in _ARGUMENT.findall(call)}


def default_attentions(kind: type[nn.Module]) -> set[str]:
    """Return the names of the functions by which a class computes eager attention."""
    return set(DEFAULT_ATTENTION.findall(_code(kind)))


def uses_mask(kind: type[nn.Module]) -> bool:
    """Return True if a class computes with the attention mask itself."""
    return _USES_MASK.search(_code(kind)) is not None


def computes_positions(kind: type[nn.Module]) -> bool:
    """Return True if a class numbers positions itself."""
    return "arange(" in _code(kind)


def adds_dropout(kind: type[nn.Module]) -> bool:
    """Return True if a forward adds something to the result of a dropout, and calls no methods of its class.

    The code is parsed, not run. Methods of the class rearrange tensors (Swin's windows), which takes minutes to
    compile.
    """
    nodes = _nodes(kind.forward)
    if any(isinstance(node, ast.Call) and _calls_method(node, kind) for node in nodes):
        return False
    dropout_results: set[str] = set()  # variables with the result of a dropout, at the current statement
    statements = [node for node in nodes if isinstance(node, (ast.Assign, ast.Return)) and node.value]
    for statement in sorted(statements, key=lambda statement: statement.lineno):
        inside = list(ast.walk(statement.value or statement))
        sums = [node for node in inside if isinstance(node, ast.BinOp) and isinstance(node.op, ast.Add)]
        terms = [term for addition in sums for term in (addition.left, addition.right)]
        if any(_is_dropout(term) or getattr(term, "id", "") in dropout_results for term in terms):
            return True
        if any(_function_name(node).endswith("dropout_add") for node in inside):
            return True
        if isinstance(statement, ast.Assign):
            names = {getattr(node, "id", "") for target in statement.targets for node in ast.walk(target)}
            if _is_dropout(statement.value):
                dropout_results |= names - {""}
            else:
                dropout_results -= names
    return False


def _calls_method(call: ast.Call, kind: type) -> bool:
    """Return True for `self.method(...)`, a method of the class; children are attributes of instances only."""
    owner = call.func.value if isinstance(call.func, ast.Attribute) else None
    return isinstance(owner, ast.Name) and owner.id == "self" and hasattr(kind, _function_name(call))


def _function_name(node: Any) -> str:
    """Return the last part of a called function's name; "" if the node is not a call."""
    function = node.func if isinstance(node, ast.Call) else None
    return str(getattr(function, "attr", getattr(function, "id", "")))


def _is_dropout(node: Any) -> bool:
    """Return True for a call of a function or child named "dropout" or "..._dropout"."""
    return _function_name(node) == "dropout" or _function_name(node).endswith("_dropout")


@cache  # a model has many layers of few classes
def _nodes(forward: Callable[..., Any]) -> list[ast.AST]:
    """Return all nodes in the body of a forward; empty if its source cannot be read."""
    try:
        source = textwrap.dedent(inspect.getsource(inspect.unwrap(forward)))
        (tree,) = ast.parse(source).body
    except (OSError, TypeError, ValueError, SyntaxError):
        return []
    return [node for statement in getattr(tree, "body", []) for node in ast.walk(statement)]


def _code(kind: type[nn.Module]) -> str:
    """Return the source code of a class; empty for torch's classes, or without source."""
    return "" if kind.__module__.partition(".")[0] == "torch" else _source(cast("Any", kind))


@cache
def _source(kind: Any) -> str:
    try:
        return inspect.getsource(kind)
    except (OSError, TypeError):
        return ""
