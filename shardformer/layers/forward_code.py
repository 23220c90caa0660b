"""All parsing of the models' source code: what no trace or trial tells yet.

[Note: code that is read] Whether a layer returns a tuple differs between releases of transformers, for the same table:
a trace would need a small copy at every boost. Which forwards add to the result of a dropout must be known before the
first one runs, and decides only what is compiled, not what is computed. Code that is not understood returns no tuple,
and is not compiled.
"""

import ast
import inspect
import textwrap
from collections.abc import Callable
from functools import cache
from typing import Any

from torch import nn


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
