"""Static analysis of forwards: inputs, uses of a sub-module's result, and returned values. Nothing is run.

Only plain code is understood. Anything else is reported as not understood, never assumed to be harmless.
"""

import ast
import inspect
import re
import textwrap
from collections.abc import Callable, Collection, Iterable, Sequence
from functools import cache
from typing import Any

from torch import nn

from ...pipeline.plan import is_within
from .sequence_axis import INSTEAD

# Names that a statement may use besides the value under analysis.
_NEUTRAL = frozenset(("self", "torch", "nn", "F"))
# Attributes in code that accesses several positions, or their number.
_MIXING = re.compile(
    "(un)?flatten|(un)?squeeze|view|reshape|permute|transpose|chunk|split|roll|shape|size|mean|sum|cumsum|gather|"
    "index_select|pad|conv[12]d"
)
# Substrings in names of modules that compute each position independently.
_BY_POSITION = ("Norm", "Dropout", "DropPath", "LayerScale", "Linear", "Conv1D", "Identity", "Activation")
_BY_POSITION_OF = ("torch.nn.modules.activation", "transformers.activations")
# Classes whose code does so harmlessly: OPT's flattens the tokens of all samples, and restores the shape.
_CHECKED = ("OPTDecoderLayer",)


def exit_error(module: nn.Module, name: str, other_names: Collection[str]) -> str | None:
    """Return the reason why a module may compute with the result of its sub-module; None if it only returns it.

    A tensor-parallel region ends with such a sub-module: nothing may be added to its result or multiplied with it, and
    no parameter may be used after it.

    Args:
        module: the module whose class defines the forward.
        name: name of the direct sub-module, which the forward calls as `self.name(...)`.
        other_names: names of the other sub-modules and parameters of the module; none may be used after the call.
    """
    statements = _statements(module)
    calling = [
        statement for statement in statements if any(_is_call(node, name) for node in _nodes(statement))
    ]
    if len(calling) != 1:
        return f"the code of its forward does not call {name} in one place"
    (calling_statement,) = calling
    (call,) = (node for node in _nodes(calling_statement) if _is_call(node, name))
    (value,) = (value for value in _evaluated(calling_statement) if call in set(ast.walk(value)))
    inside = set(ast.walk(call))
    around = [node for node in ast.walk(value) if node not in inside]
    last_line = calling_statement.end_lineno or 0
    after = [statement for statement in statements if statement.lineno > last_line]
    # The names that the call's result is combined with, in its own expression and in later ones.
    results = _assigned_names(calling_statement)
    combined = _names_read(around)
    for expression in (value for statement in after for value in _evaluated(statement)):
        names = _names_read(ast.walk(expression))
        if names & results:
            combined |= names - results
    if combined - _NEUTRAL:
        return f"its forward computes with what {name} returns"
    later = [*around, *(node for statement in after for node in _nodes(statement))]
    attributes = [node for node in later if isinstance(node, ast.Attribute)]
    if used := sorted({node.attr for node in attributes if _is_self_attribute(node, other_names)}):
        return f"its forward uses {', '.join(used)} after {name}"
    return None


def only_scales_result(model: nn.Module, head: str, *, require_unscaled: bool = False) -> bool:
    """Return True if a model's forward does nothing with its head's result but scale or cap it, for loss and outputs.

    Each rank may then do the same with its local columns of logits. Modules around a nested head must only return its
    result.

    Args:
        model: the model whose class defines the forward.
        head: the path of the head.
        require_unscaled: require that the result is not scaled either.
    """
    head, _, path = head.partition(".")
    outer = model.get_submodule(head) if path else model
    for name in filter(None, path.split(".")):
        parameters = [parameter for parameter, _ in outer.named_parameters(recurse=False)]
        if exit_error(outer, name, parameters) is not None:
            return False
        outer = outer.get_submodule(name)
    statements = _statements(model)
    calling = [
        statement for statement in statements if any(_is_call(node, head) for node in _nodes(statement))
    ]
    if len(calling) != 1 or len(results := _assigned_names(calling[0])) != 1:
        return False
    (result,) = results
    uses = [
        (statement, value)
        for statement in statements
        for value in _evaluated(statement)
        if result in _names_read(ast.walk(value)) or statement is calling[0]
    ]

    def is_allowed(statement: ast.stmt, value: ast.expr) -> bool:
        """Return True if an expression of a statement passes the result on, calls the head, or scales the result."""
        if _passes_on(statement, value, result):
            return True
        if require_unscaled:
            return _is_call(value, head)
        return _assigned_names(statement) == results and _is_scaled(value, result, head)

    return all(is_allowed(statement, value) for statement, value in uses)


def returns_tuple(module: nn.Module) -> bool:
    """Return True if the code of a module's forward explicitly returns a tuple."""
    statements = _statements(module)
    returned = _returned(statements)
    names = {value.id for value in returned if isinstance(value, ast.Name)}
    assignments = [statement for statement in statements if isinstance(statement, ast.Assign)]
    tuples = [
        statement
        for statement in assignments
        if isinstance(statement.targets[0], ast.Name) and isinstance(statement.value, ast.Tuple)
    ]
    if any(_assigned_names(statement) & names for statement in tuples):
        return True
    return any(isinstance(value, ast.Tuple) for value in returned)


def attributes_read(module: nn.Module, *, after_loops: bool = False) -> set[str]:
    """Return the names of all attributes in a module's forward, or only in the code after its last loop."""
    statements = _statements(module)
    if after_loops:
        ends = [statement.end_lineno or 0 for statement in statements if isinstance(statement, ast.For)]
        last_end = max(ends, default=0)
        statements = [statement for statement in statements if statement.lineno > last_end]
    nodes = (node for statement in statements for node in _nodes(statement))
    return {node.attr for node in nodes if isinstance(node, ast.Attribute)}


def is_by_position_after_loops(module: nn.Module) -> bool:
    """Return True if a forward computes each position independently after its last loop, or in all of its code."""
    names = attributes_read(module, after_loops=True)
    return bool(_statements(module)) and not any(map(_MIXING.fullmatch, names))


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
    if not (statements := _statements(module)):
        return "cannot be read"
    if used := sorted(filter(_MIXING.fullmatch, attributes_read(module))):
        return f"uses {', '.join(used)}"
    nodes = [node for statement in statements for node in _nodes(statement)]
    indices = [node.slice for node in nodes if isinstance(node, ast.Subscript)]
    by_dim = [entry for index in indices if isinstance(index, ast.Tuple) for entry in index.elts]
    return "takes slices" if any(isinstance(entry, ast.Slice) for entry in by_dim) else ""


def is_by_position(module: nn.Module) -> bool:
    """Return True if a leaf module computes each position independently, judging by the name of its class."""
    kind = type(module)
    return kind.__module__ in _BY_POSITION_OF or any(part in kind.__name__ for part in _BY_POSITION)


def _returned(statements: list[ast.stmt]) -> list[ast.expr]:
    """Return the expressions that these statements return."""
    return [
        statement.value
        for statement in statements
        if isinstance(statement, ast.Return) and statement.value is not None
    ]


def _passes_on(statement: ast.stmt, value: ast.AST, result: str) -> bool:
    """Return True if an expression of a statement uses a variable in one of the ways that leave it unchanged.

    It returns it, passes it to `self.loss_function(...)` or to `SomeOutput(...)`, or puts it into a tuple.
    """
    if isinstance(value, ast.BinOp):  # older outputs: (logits,) + outputs[1:]
        return isinstance(value.op, ast.Add) and isinstance(value.left, ast.Tuple)
    if not isinstance(value, ast.Call):
        return isinstance(statement, ast.Return) and isinstance(value, ast.Name)
    is_output = isinstance(value.func, ast.Name) and "Output" in value.func.id
    arguments = [*value.args, *(keyword.value for keyword in value.keywords)]
    with_result = [argument for argument in arguments if result in _names_read(ast.walk(argument))]
    is_unchanged = all(isinstance(argument, ast.Name) for argument in with_result)
    return is_unchanged and (is_output or _is_self_attribute(value.func, ("loss_function",)))


def _is_scaled(value: ast.AST, result: str, head: str) -> bool:
    """Return True if an expression only scales the head's result: multiplies, divides, caps by tanh, or casts it.

    Args:
        value: the expression.
        result: the variable with the result.
        head: name of the head, whose call is the result too.
    """
    if _is_call(value, head):
        return True
    if isinstance(value, ast.Name):
        return value.id == result
    if isinstance(value, ast.BinOp) and isinstance(value.op, (ast.Mult, ast.Div)):
        nodes = list(ast.walk(value.right))
        is_number = _names_read(nodes) <= {"self"} and not any(isinstance(node, ast.Call) for node in nodes)
        return is_number and _is_scaled(value.left, result, head)
    if isinstance(value, ast.Call) and isinstance(value.func, ast.Attribute):
        inner = value.args[0] if value.func.attr == "tanh" and value.args else value.func.value
        return value.func.attr in ("tanh", "float", "contiguous") and _is_scaled(inner, result, head)
    return False


def _statements(module: nn.Module) -> list[ast.stmt]:
    """Return all statements of a module's forward; none if its code cannot be read."""
    return _statements_of(type(module).forward)


@cache  # a model has many layers of few classes
def _statements_of(forward: Callable[..., Any]) -> list[ast.stmt]:
    """Return all statements of a forward, nested ones too; empty if its source cannot be read."""
    try:
        source = textwrap.dedent(inspect.getsource(inspect.unwrap(forward)))
        (tree,) = ast.parse(source).body
    except (OSError, TypeError, ValueError, SyntaxError):
        return []
    return [node for node in ast.walk(tree) if isinstance(node, ast.stmt) and node is not tree]


def _evaluated(statement: ast.stmt) -> list[ast.expr]:
    """Return the expressions that a statement itself evaluates; a returned tuple counts as its entries."""
    if isinstance(statement, ast.Return) and isinstance(statement.value, ast.Tuple):
        return statement.value.elts
    targets = _targets(statement)
    if isinstance(statement, ast.AugAssign) and isinstance(statement.target, ast.Name):
        # It reads its target, too: x += y is x + y.
        return [ast.BinOp(ast.Name(statement.target.id, ast.Load()), statement.op, statement.value)]
    if any(isinstance(target, (ast.Subscript, ast.Attribute)) for target in targets):
        # A part of the target's object changes, so the rest of it counts as read.
        return [ast.Tuple([*targets, *filter(None, [getattr(statement, "value", None)])], ast.Load())]
    expressions = [node for node in ast.iter_child_nodes(statement) if isinstance(node, ast.expr)]
    return [expression for expression in expressions if expression not in targets]


def _targets(statement: ast.stmt) -> list[ast.expr]:
    """Return the expressions to which a statement assigns."""
    single = [statement.target] if isinstance(statement, (ast.AugAssign, ast.AnnAssign, ast.For)) else []
    return statement.targets if isinstance(statement, ast.Assign) else single


def _nodes(statement: ast.stmt) -> list[ast.AST]:
    """Return all nodes of the expressions that a statement itself evaluates."""
    return [node for value in _evaluated(statement) for node in ast.walk(value)]


def _assigned_names(statement: ast.stmt) -> set[str]:
    """Return the variables in the targets of a statement."""
    names = (node for target in _targets(statement) for node in ast.walk(target))
    return {node.id for node in names if isinstance(node, ast.Name)}


def _names_read(nodes: Iterable[Any]) -> set[str]:
    """Return the variables that these nodes read."""
    return {node.id for node in nodes if isinstance(node, ast.Name) and isinstance(node.ctx, ast.Load)}


def _is_call(node: ast.AST, name: str) -> bool:
    """Return True if an expression is `self.name(...)`."""
    return isinstance(node, ast.Call) and _is_self_attribute(node.func, (name,))


def _is_self_attribute(node: Any, names: Collection[str]) -> bool:
    """Return True if a node is one of these attributes of `self`."""
    return (
        isinstance(node, ast.Attribute)
        and isinstance(node.value, ast.Name)
        and node.value.id == "self"
        and node.attr in names
    )
