"""Elementwise code between a model's layers with weights, compiled: bias + activation, and dropout + addition.

[Note: compiled code] What is compiled is the forward of transformers' own class, as it is. It runs on a shadow of the
module, in which everything that has weights is opaque to the compiler: it is called as ever, with its hooks,
collectives and split backwards. A module that was changed since runs as ever (another child or attribute, a hook on
what was compiled). Only a linear layer whose result goes into an activation leaves its bias to the
compiled code, which adds it in front of the activation. Random numbers are drawn as without compiling, so dropout
drops the same entries.
"""

import ast
import copy
import functools
import inspect
import itertools
import textwrap
from collections import Counter
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.modules.dropout import _DropoutNd
from transformers import PreTrainedModel
from transformers.pytorch_utils import Conv1D

from ..pipeline.stand_ins import StandIn
from .layers.linear import Linear1D_Col, SharedKeyValueLinear1D_Col
from .layers.parallel_module import AROUND_FORWARD, ParallelModule

_CONTAINERS = (nn.ModuleList, nn.ModuleDict, nn.Sequential)
_OF_ONE = ("_modules", "_natives", "_shadow", "training")  # attributes of a module or its shadow alone
# Graphs are small: a pool of processes to compile them would take longer to start.
_OPTIONS: dict[str, Any] = {"fallback_random": True, "compile_threads": 1}


def compile_elementwise(model: nn.Module) -> dict[str, int]:
    """Compile what a model does to a bias and its activation, or to a dropout and a sum, in place.

    Names, parameters and hooks stay. The compiler itself runs when such code runs first.

    Args:
        model: split already; weight gradients are deferred already where a schedule asks for that.

    Returns:
        How many modules are compiled, by the names of their classes; empty where the model has no such code.
    """
    found: dict[str, int] = {}
    for module in list(model.modules()):
        if _has_fusible_code(module):
            name = type(module).__name__
            found[name] = found.get(name, 0) + 1
            vars(module)["_shadow"] = _shadow_of(module)
            module.__class__ = _compiled_class(type(module))  # type: ignore[arg-type]  # a class is hashable
    return found


def _has_fusible_code(module: nn.Module) -> bool:
    """Return True where a module's own code does either, and only children that can be opaque have weights."""
    children = list(module.children())
    if (
        not children
        or isinstance(module, (PreTrainedModel, StandIn, ParallelModule, *_CONTAINERS))
        or any(isinstance(child, _CONTAINERS) for child in children)
        or any(True for _ in (*module.parameters(recurse=False), *module.buffers(recurse=False)))
        or "forward" in vars(module)
    ):
        return False
    return bool(_biased(module)) or adds_dropout(type(module))


def _biased(module: nn.Module) -> dict[str, str]:
    """The linear layers of a module that leave their bias, and the activation that each of them goes into."""
    children = module._modules
    return {
        linear: activation
        for linear, activation in activated(type(module)).items()
        if _leaves_bias(children.get(linear)) and _is_activation(children.get(activation))
    }


def _leaves_bias(module: nn.Module | None) -> bool:
    """Return True where this is a linear layer that adds its bias last, to the outputs that this rank holds."""
    if not isinstance(module, (nn.Linear, Conv1D, Linear1D_Col)) or isinstance(
        module, SharedKeyValueLinear1D_Col
    ):
        return False
    # Only ours have `weight_gradients`, see layers/weight_gradient.py.
    is_known = type(module) in (nn.Linear, Conv1D) or hasattr(module, "weight_gradients")
    is_gathered = getattr(module, "gather_output", False)
    return is_known and not is_gathered and _has_own_bias(module)


def _has_own_bias(module: nn.Module) -> bool:
    """Return True where a layer has a bias of its own, and nobody sees what it returns."""
    is_watched = "forward" in vars(module) or module._forward_hooks or module._backward_hooks
    return not is_watched and module._parameters.get("bias") is not None


def _is_activation(module: nn.Module | None) -> bool:
    """Return True where a module computes each entry of its output from that of its input: tried on numbers."""
    if module is None or isinstance(module, (_DropoutNd, StandIn)):
        return False
    if any(True for _ in (*module.parameters(), *module.buffers(), *module.children())):
        return False
    x = torch.linspace(-3.0, 3.0, 12, device="cpu").view(3, 4)
    is_first = torch.arange(12, device="cpu").view(3, 4) == 0
    try:
        with torch.no_grad(), torch.random.fork_rng(devices=()):
            out, other = module.forward(x), module.forward(x + is_first)
    except (RuntimeError, ValueError, TypeError, IndexError, AttributeError):
        return False
    is_alike = isinstance(out, Tensor) and out.shape == x.shape and not torch.equal(out, x)
    return is_alike and bool((out == other)[~is_first].all())


class _Opaque(nn.Module):
    """A child that the compiler does not look into; it is found anew in each call, under its name."""

    def __init__(self, owner: nn.Module, name: str) -> None:
        super().__init__()
        vars(self).update(_owner=owner, _name=name)  # no sub-modules of this one

    @torch.compiler.disable
    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """Call the child."""
        return vars(self)["_owner"]._modules[vars(self)["_name"]](*args, **kwargs)

    def __getattr__(self, name: str) -> Any:
        return getattr(vars(self)["_owner"]._modules[vars(self)["_name"]], name)


class _OpaqueProduct(_Opaque):
    """A linear layer that leaves its bias in this place; it has it wherever else it is called."""

    @torch.compiler.disable
    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """The product alone."""
        layer = vars(vars(self)["_owner"]._modules[vars(self)["_name"]])
        layer["_leaves_bias"] = True
        try:
            return super().forward(*args, **kwargs)
        finally:
            layer["_leaves_bias"] = False


class _Biased(nn.Module):
    """An activation that first adds the bias that a linear layer left."""

    def __init__(self, owner: nn.Module, *, linear: str, activation: nn.Module) -> None:
        super().__init__()
        vars(self).update(_owner=owner, _linear=linear)
        self.activation = activation

    def forward(self, x: Tensor) -> Tensor:
        """The activation of x plus the bias."""
        bias = self._bias()
        return self.activation(x + bias)

    @torch.compiler.disable
    def _bias(self) -> Tensor:
        bias: Tensor = vars(self)["_owner"]._modules[vars(self)["_linear"]]._parameters["bias"]
        return bias


def _shadow_of(module: nn.Module) -> nn.Module:
    """The module that is compiled in a module's place; see [Note: compiled code]."""
    seen: dict[str, nn.Module | None] = {}
    for name, child in module._modules.items():
        has_state = child is not None and any(True for _ in (*child.parameters(), *child.buffers()))
        seen[name] = _Opaque(module, name) if has_state or isinstance(child, StandIn) else child
    for linear, activation in _biased(module).items():
        child, after = module.get_submodule(linear), module.get_submodule(activation)
        child.__class__ = _product_class(type(child))  # type: ignore[arg-type]  # a class is hashable
        seen[linear] = _OpaqueProduct(module, linear)
        seen[activation] = _Biased(module, linear=linear, activation=after)
    shadow = copy.copy(module)
    vars(shadow)["_natives"] = dict(module._modules)
    vars(shadow)["_modules"] = seen
    return shadow


def _own_attributes(module: nn.Module) -> dict[str, Any]:
    """Attributes that a module and its shadow have in common."""
    return {name: value for name, value in vars(module).items() if name not in _OF_ONE}


def _is_as_compiled(module: nn.Module, shadow: nn.Module) -> bool:
    """Return True where a module is unchanged since: its attributes and children, and hooks of what was compiled."""
    own, other = _own_attributes(module), _own_attributes(shadow)
    natives = vars(shadow)["_natives"]
    if own.keys() != other.keys() or any(own[name] is not other[name] for name in own):
        return False
    for name, child in module._modules.items():
        seen = shadow._modules.get(name)
        if child is not natives.get(name):
            return False
        if isinstance(seen, _OpaqueProduct) and not (child is not None and _has_own_bias(child)):
            return False
        is_compiled = child is not None and not isinstance(seen, _Opaque)
        if is_compiled and any(getattr(child, hooks) for hooks in AROUND_FORWARD):
            return False
    return len(natives) == len(module._modules)


def _bias_unless_left(self: nn.Module) -> Tensor | None:
    return None if vars(self).get("_leaves_bias") else self._parameters["bias"]


class _ConvProduct(Conv1D):
    """transformers' Conv1D, which can do without its bias."""

    def forward(self, x: Tensor) -> Tensor:
        """(..., I) in, (..., O) out."""
        product = x @ self.weight
        return product if self.bias is None else product + self.bias


@functools.cache
def _product_class(kind: type[nn.Module]) -> type[nn.Module]:
    """The class of a linear layer that computes without its bias where it is to leave it."""
    bases = (_ConvProduct,) if kind is Conv1D else (kind,)
    return type(kind.__name__, bases, {"bias": property(_bias_unless_left)})


@functools.cache
def _compiled_class(kind: type[nn.Module]) -> type[nn.Module]:
    """A class whose forward is the compiled one of another, run on its shadow."""
    compiled: Callable[..., Any] = torch.compile(kind.forward, dynamic=True, backend=_inductor)

    @functools.wraps(kind.forward)
    def forward(self: nn.Module, *args: Any, **kwargs: Any) -> Any:
        shadow = vars(self)["_shadow"]
        if not _is_as_compiled(self, shadow):
            return kind.forward(self, *args, **kwargs)
        shadow.training = self.training
        try:
            return compiled(shadow, *args, **kwargs)
        finally:
            vars(self).update(_own_attributes(shadow))

    return type(f"Compiled{kind.__name__}", (kind,), {"forward": forward})


def _inductor(graph: torch.fx.GraphModule, inputs: list[Any]) -> Callable[..., Any]:
    """torch's own compiler; imported when the first graph comes, which takes seconds."""
    from torch._inductor.compile_fx import compile_fx

    compiled: Any = compile_fx(graph, inputs, config_patches=_OPTIONS)
    return compiled


# What of a class's code can be fused: it is read, not run, and only plain code is understood.


def adds_dropout(kind: type[nn.Module]) -> bool:
    """Return True where a class's forward adds something to what a dropout returned, and calls no methods of its own.

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
