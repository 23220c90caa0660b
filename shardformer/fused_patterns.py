"""What of a class's code can be fused, as the code says. It is read, not run; what is fused is fused_code.py.

Only plain code is understood: what is written in another way is not fused.
"""

import ast
import inspect
import itertools
import textwrap
from collections import Counter
from typing import Any

from torch import nn


def adds_dropout(kind: type[nn.Module]) -> bool:
    """Whether a class's forward adds something to what a dropout returned, and calls no methods of its own.

    Such methods rearrange (Swin's windows), which takes a compiler minutes and saves nothing.
    """
    nodes = list(ast.walk(_tree(kind.forward)))
    if any(hasattr(kind, _child(node)) for node in nodes if _child(node)):
        return False
    statements = [node for node in nodes if isinstance(node, (ast.Assign, ast.Return))]
    dropped: set[str] = set()
    for statement in sorted(statements, key=lambda each: each.lineno):
        inside = [] if statement.value is None else list(ast.walk(statement.value))
        sums = [node for node in inside if isinstance(node, ast.BinOp) and isinstance(node.op, ast.Add)]
        terms = [side for each in sums for side in (each.left, each.right)]
        is_added = any(_is_dropout(side) or _name(side) in dropped for side in terms)
        if is_added or any(_called(node).endswith("dropout_add") for node in inside):
            return True
        if isinstance(statement, ast.Assign):
            names = {_name(node) for target in statement.targets for node in ast.walk(target)}
            dropped = dropped | names - {""} if _is_dropout(statement.value) else dropped - names
    return False


def activated(kind: type[nn.Module]) -> dict[str, str]:
    """The children of a class whose results go into another child and nowhere else, with the name of that one.

    Each is called in one place of the class: `self.act(self.linear(x))`, or one after the other under one name.
    """
    trees = [_tree(each) for each in kind.__mro__ if issubclass(each, nn.Module) and each is not nn.Module]
    nodes = [node for tree in trees for node in ast.walk(tree)]
    uses = Counter(
        node.attr for node in nodes if isinstance(node, ast.Attribute) and _name(node.value) == "self"
    )
    stored = Counter(
        node.attr
        for node in nodes
        if isinstance(node, ast.Attribute) and isinstance(node.ctx, ast.Store) and _name(node.value) == "self"
    )
    pairs = [
        (_child(node.args[0]), _child(node))
        for node in nodes
        if isinstance(node, ast.Call) and len(node.args) == 1 and _child(node.args[0])
    ]
    for node in nodes:
        body = getattr(node, "body", None)
        if isinstance(body, list):
            pairs += [pair for first, second in itertools.pairwise(body) if (pair := _in_turn(first, second))]
    return {
        one: other
        for one, other in pairs
        if other and all(uses[name] - stored[name] == 1 for name in (one, other))
    }


def _in_turn(first: ast.stmt, second: ast.stmt) -> tuple[str, str] | None:
    """The two children of `x = self.one(...)` and `x = self.other(x)`."""
    if not (isinstance(first, ast.Assign) and isinstance(second, ast.Assign)):
        return None
    names = [_name(target) for each in (first, second) for target in each.targets]
    if len(names) != 2 or names[0] != names[1] or not names[0] or not _child(first.value):
        return None
    call = second.value
    is_handed_on = (
        isinstance(call, ast.Call) and [_name(each) for each in call.args] == names[:1] and not call.keywords
    )
    return (_child(first.value), _child(call)) if is_handed_on and _child(call) else None


def _tree(code: Any) -> ast.AST:
    """The code of a function or class; an empty one where it cannot be read."""
    try:
        return ast.parse(textwrap.dedent(inspect.getsource(inspect.unwrap(code))))
    except (OSError, TypeError, ValueError, SyntaxError):
        return ast.Module(body=[], type_ignores=[])


def _name(node: Any) -> str:
    return node.id if isinstance(node, ast.Name) else ""


def _child(node: Any) -> str:
    """The name of the child that is called here: `self.child(...)`; "" for anything else."""
    is_own = (
        isinstance(node, ast.Call)
        and isinstance(node.func, ast.Attribute)
        and _name(node.func.value) == "self"
    )
    return node.func.attr if is_own else ""


def _called(node: Any) -> str:
    """The last part of the name of what is called; "" for anything else."""
    if not isinstance(node, ast.Call):
        return ""
    return node.func.attr if isinstance(node.func, ast.Attribute) else _name(node.func)


def _is_dropout(node: Any) -> bool:
    return _called(node) == "dropout" or _called(node).endswith("_dropout")
