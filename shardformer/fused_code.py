"""Compile the elementwise code between layers with weights: activation formulas, and dropout + addition.

[Note: compiled code] The compiled code is the unchanged forward of transformers' class. It runs on a shadow of the
module, in which every child with weights or hooks is opaque to the compiler: such a child is called without
compilation, with its hooks, collectives and split backwards. Biases stay in the matrix products, whose kernels add them
at no cost. Random numbers are drawn as without compiling, so dropout drops the same entries.
"""

import copy
import functools
import os
import shutil
from collections import Counter
from collections.abc import Callable
from importlib.util import find_spec
from typing import Any

import torch
from torch import nn
from transformers import PreTrainedModel

from ..cluster.device import is_cuda
from ..pipeline.stand_ins import StandIn
from .layers.class_change import change_class
from .layers.forward_code import adds_dropout
from .layers.parallel_module import AROUND_FORWARD, ParallelModule

_CONTAINERS = (nn.ModuleList, nn.ModuleDict, nn.Sequential)
_FORMULAS = "transformers.activations"
_SINGLE_KERNEL = ("GELUActivation", "GELUTanh", "PytorchGELUTanh", "SiLUActivation")  # one kernel of torch
_NOT_SHARED = ("_modules", "_shadow")  # attributes that a module and its shadow do not share
# Graphs are small: starting a pool of compiler processes would take longer than compiling them.
_OPTIONS: dict[str, Any] = {"fallback_random": True, "compile_threads": 1}


def compile_elementwise(model: nn.Module) -> Counter[str]:
    """Compile a model's activation formulas, and modules that add something to the result of a dropout, in place.

    Names, parameters and hooks stay. The compiler runs at the first call of such code. See [Note: compiled code].

    Args:
        model: already sharded. Linear layers in it may be changed later, to defer their weight gradients.

    Returns:
        The number of compiled modules, by class name; empty if the model has no such code.
    """
    num_compiled: Counter[str] = Counter()
    for module in list(model.modules()):
        kind = type(module)
        is_formula = kind.__module__ == _FORMULAS and kind.__name__ not in _SINGLE_KERNEL
        if is_formula or _has_dropout_and_sum(module):
            num_compiled[kind.__name__] += 1
            vars(module)["_shadow"] = shadow = copy.copy(module)
            vars(shadow)["_opaque"] = {name: _Opaque(module, name) for name in module._modules}
            change_class(module, _compiled_class(kind))  # type: ignore[arg-type]  # a class is hashable
    return num_compiled


def _has_dropout_and_sum(module: nn.Module) -> bool:
    """Return True if a module's own forward adds something to the result of a dropout, and can be compiled.

    It can if all weights are in children, which are opaque to the compiler, and no child is a container of modules.
    """
    children = list(module.children())
    return (
        bool(children)
        and not isinstance(module, (PreTrainedModel, StandIn, ParallelModule, *_CONTAINERS))
        and not any(isinstance(child, _CONTAINERS) for child in children)
        and not any(True for _ in (*module.parameters(recurse=False), *module.buffers(recurse=False)))
        and "forward" not in vars(module)
        and adds_dropout(type(module))
    )


class _Opaque(nn.Module):
    """A child that the compiler does not trace; each call looks it up by its name."""

    def __init__(self, owner: nn.Module, name: str) -> None:
        super().__init__()
        vars(self).update(_owner=owner, _name=name)  # no sub-modules of this one

    @torch.compiler.disable
    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """Call the child."""
        return vars(self)["_owner"]._modules[vars(self)["_name"]](*args, **kwargs)

    def __getattr__(self, name: str) -> Any:
        return getattr(vars(self)["_owner"]._modules[vars(self)["_name"]], name)


def _is_traceable(child: nn.Module | None) -> bool:
    """Return True if the compiler may trace a child: it has neither weights nor hooks.

    A stand-in has none either, but reads the tensors of the current microbatch from Python objects.
    """
    if child is None:
        return True
    has_state = bool([*child.parameters(), *child.buffers()])
    has_hooks = any(getattr(module, hooks) for module in child.modules() for hooks in AROUND_FORWARD)
    return not (has_state or has_hooks or isinstance(child, StandIn))


@functools.cache
def _compiled_class(kind: type[nn.Module]) -> type[nn.Module]:
    """Return a subclass whose forward is compiled and runs on the module's shadow; see [Note: compiled code]."""
    backend = functools.partial(inductor, options=_OPTIONS)
    compiled: Callable[..., Any] = torch.compile(kind.forward, dynamic=True, backend=backend)

    @functools.wraps(kind.forward)
    def forward(self: nn.Module, *args: Any, **kwargs: Any) -> Any:
        """Run the compiled forward on the shadow, in which children with weights or hooks are opaque."""
        shadow = vars(self)["_shadow"]
        # Copy the current attributes of the module, which may have changed.
        vars(shadow).update({name: value for name, value in vars(self).items() if name not in _NOT_SHARED})
        opaque = vars(shadow)["_opaque"]
        vars(shadow)["_modules"] = {
            name: child if _is_traceable(child) else opaque[name] for name, child in self._modules.items()
        }
        return compiled(shadow, *args, **kwargs)

    return type(f"Compiled{kind.__name__}", (kind,), {"forward": forward})


def inductor(
    graph: torch.fx.GraphModule, inputs: list[Any], *, options: dict[str, Any]
) -> Callable[..., Any]:
    """Compile a graph by torch's inductor, imported at the first graph because the import takes seconds."""
    from torch._inductor.compile_fx import compile_fx

    compiled: Any = compile_fx(graph, inputs, config_patches=options)
    return compiled


def compiler_errors(option: str, device: torch.device) -> list[str]:
    """List the tools that torch.compile lacks on this machine, with advice. No communication.

    Args:
        option: the option that requests it, as the user wrote it.
        device: where the model will compute.
    """
    if is_cuda(device) and find_spec("triton") is None:
        return [
            f"{option} needs the package triton on CUDA: install it (pip install triton), or leave it out"
        ]
    compilers = filter(None, (os.environ.get("CXX"), "g++", "clang++", "c++"))
    if device.type == "cpu" and not any(map(shutil.which, compilers)):
        return [
            f"{option} needs a C++ compiler on the CPU: install g++, name another one in the environment variable CXX, "
            "or leave it out"
        ]
    return []
