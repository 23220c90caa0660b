"""Elementwise code between a model's layers with weights, compiled: bias + activation, and dropout + addition.

[Note: compiled code] What is compiled is the forward of transformers' own class, as it is. It runs on a shadow of the
module, in which everything that has weights is opaque to the compiler: it is called as ever, with its hooks,
collectives and split backwards. Only linear layers leave their bias to the code that is compiled, which adds it where
the layer returns. Random numbers are drawn as without compiling, so dropout drops the same entries.
"""

import ast
import copy
import functools
import inspect
import textwrap
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.modules.dropout import _DropoutNd
from transformers import PreTrainedModel
from transformers.pytorch_utils import Conv1D

from ..pipeline.stand_in import StandIn
from .layer.key_value import SharedKeyValueLinear1D_Col
from .layer.linear import Linear1D_Col, Linear1D_Row
from .layer.parallel_module import ParallelModule

_LINEAR = (nn.Linear, Conv1D)
# Graphs are small: a pool of processes to compile them would take longer to start.
_OPTIONS: dict[str, Any] = {"fallback_random": True, "compile_threads": 1}


def compile_elementwise(model: nn.Module) -> dict[str, int]:
    """Compile what a model does to a bias and its activation, or to a dropout and a sum, in place.

    Names, parameters and hooks stay. The compiler itself runs when such code runs first.

    Args:
        model: split already; weight gradients are held back already where a schedule asks for that.

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
    """Whether a module's own forward does either, and all that has weights in it is a child that can be opaque."""
    children = dict(module.named_children())
    if (
        not children
        or isinstance(
            module, (PreTrainedModel, StandIn, ParallelModule, nn.ModuleList, nn.Sequential, nn.ModuleDict)
        )
        or any(
            isinstance(child, (nn.ModuleList, nn.Sequential, nn.ModuleDict)) for child in children.values()
        )
        or any(True for _ in module.parameters(recurse=False))
        or any(True for _ in module.buffers(recurse=False))
        or "forward" in vars(module)
    ):
        return False
    has_bias = any(_leaves_bias(child) for child in children.values())
    return (has_bias and any(map(_is_activation, children.values()))) or _adds_dropout(type(module))


def _is_activation(module: nn.Module) -> bool:
    """Whether a module computes each entry of its output from the same entry of its input: tried on numbers."""
    if any(True for _ in (*module.parameters(), *module.buffers(), *module.children())):
        return False
    if isinstance(module, (_DropoutNd, StandIn)):
        return False
    x = torch.linspace(-3.0, 3.0, 12, device="cpu").view(3, 4)
    is_first = torch.arange(12, device="cpu").view(3, 4) == 0
    try:
        with torch.no_grad(), torch.random.fork_rng(devices=()):
            out, other = module(x), module(x + is_first)
    except (RuntimeError, ValueError, TypeError, IndexError, AttributeError):
        return False
    is_same_shape = isinstance(out, Tensor) and out.shape == x.shape
    return (
        is_same_shape
        and torch.equal((out != other) & ~is_first, is_first & False)
        and not torch.equal(out, x)
    )


def _adds_dropout(kind: type[nn.Module]) -> bool:
    """Whether a class's forward adds something to what a dropout returned, as its code says."""
    try:
        (tree,) = ast.parse(textwrap.dedent(inspect.getsource(inspect.unwrap(kind.forward)))).body
    except (OSError, TypeError, ValueError, SyntaxError):
        return False
    statements = [node for node in ast.walk(tree) if isinstance(node, (ast.Assign, ast.Return, ast.Expr))]
    dropped: set[str] = set()
    for statement in sorted(statements, key=lambda each: each.lineno):
        nodes = [] if statement.value is None else list(ast.walk(statement.value))
        sums = [node for node in nodes if isinstance(node, ast.BinOp) and isinstance(node.op, ast.Add)]
        terms = [side for each in sums for side in (each.left, each.right)]
        if any(_is_dropout(side, dropped) for side in terms) or any(
            _calls(node, "dropout_add") for node in nodes
        ):
            return True
        if isinstance(statement, ast.Assign):
            names = {
                each.id
                for target in statement.targets
                for each in ast.walk(target)
                if isinstance(each, ast.Name)
            }
            dropped = dropped | names if _is_dropout(statement.value, dropped) else dropped - names
    return False


def _is_dropout(value: ast.expr | None, dropped: set[str]) -> bool:
    """Whether this is the result of a dropout: the call itself, or a name that it was given."""
    return _calls(value, "dropout") or (isinstance(value, ast.Name) and value.id in dropped)


def _calls(node: Any, name: str) -> bool:
    if not isinstance(node, ast.Call):
        return False
    called = node.func.attr if isinstance(node.func, ast.Attribute) else getattr(node.func, "id", "")
    return called == name or (name == "dropout" and called.endswith("_dropout"))


class _Opaque(nn.Module):
    """A module that the compiler does not look into; it is found anew in each call, under its name."""

    def __init__(self, owner: nn.Module, name: str) -> None:
        super().__init__()
        vars(self).update(_owner=owner, _name=name)  # no sub-modules of this one

    @torch.compiler.disable
    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """What the module returns."""
        return self._owner._modules[self._name](*args, **kwargs)

    def __getattr__(self, name: str) -> Any:
        return getattr(vars(self)["_owner"]._modules[vars(self)["_name"]], name)


class _OpaqueProduct(nn.Module):
    """A linear layer whose product is opaque to the compiler, and whose bias is added before its eyes."""

    def __init__(self, owner: nn.Module, name: str) -> None:
        super().__init__()
        vars(self).update(_owner=owner, _name=name)

    def forward(self, x: Tensor) -> Tensor:
        """What the layer would return, with its bias."""
        product, bias = self._product(x)
        return product + bias

    @torch.compiler.disable
    def _product(self, x: Tensor) -> tuple[Tensor, Tensor]:
        layer = self._owner._modules[self._name]
        return layer(x), layer._parameters["bias"]

    def __getattr__(self, name: str) -> Any:
        return getattr(vars(self)["_owner"]._modules[vars(self)["_name"]], name)


def _shadow_of(module: nn.Module) -> nn.Module:
    """The module that is compiled in a module's place; see [Note: compiled code]."""
    shadow = copy.copy(module)
    vars(shadow)["_modules"] = {name: _seen_by_compiler(module, name) for name in module._modules}
    return shadow


def _seen_by_compiler(owner: nn.Module, name: str) -> nn.Module | None:
    child = owner._modules[name]
    if child is None:
        return None
    if _leaves_bias(child):
        if not hasattr(type(child), "_leaves_bias"):
            child.__class__ = _product_class(type(child))  # type: ignore[arg-type]  # it too
        return _OpaqueProduct(owner, name)
    has_state = any(True for _ in (*child.parameters(), *child.buffers()))
    return _Opaque(owner, name) if has_state or isinstance(child, StandIn) else child


def _leaves_bias(module: nn.Module | None) -> bool:
    """Whether this is a linear layer that adds its bias last, to the outputs that this rank holds."""
    if not isinstance(module, (nn.Linear, Conv1D, Linear1D_Col, Linear1D_Row)):
        return False
    is_known = type(module) in _LINEAR or hasattr(module, "weight_gradients")  # see split_backward.py
    is_known &= (
        type(module).forward is not SharedKeyValueLinear1D_Col.forward
    )  # gathers what it added a bias to
    is_gathered = getattr(module, "gather_output", False)
    is_known |= hasattr(type(module), "_leaves_bias")
    is_watched = "forward" in vars(module) or module._forward_hooks or module._backward_hooks
    return bool(
        is_known and not is_gathered and not is_watched and module._parameters.get("bias") is not None
    )


class _ConvProduct(Conv1D):
    """transformers' Conv1D without its bias, which its own code cannot do without."""

    def forward(self, x: Tensor) -> Tensor:
        """(..., I) in, (..., O) out."""
        return x @ self.weight


@functools.cache
def _product_class(kind: type[nn.Module]) -> type[nn.Module]:
    """The class of a linear layer that computes without the bias that it holds."""
    base = _ConvProduct if kind is Conv1D else kind
    return type(f"{kind.__name__}Product", (base,), {"bias": None, "_leaves_bias": True})


@functools.cache
def _compiled_class(kind: type[nn.Module]) -> type[nn.Module]:
    """A class whose forward is the compiled one of another, run on its shadow."""
    compiled: Callable[..., Any] = torch.compile(kind.forward, dynamic=True, options=_OPTIONS)

    @functools.wraps(kind.forward)
    def forward(self: nn.Module, *args: Any, **kwargs: Any) -> Any:
        shadow = vars(self)["_shadow"]
        shadow.training = self.training
        return compiled(shadow, *args, **kwargs)

    return type(f"Compiled{kind.__name__}", (kind,), {"forward": forward})
