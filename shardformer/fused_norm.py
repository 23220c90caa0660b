"""Norms by fused kernels: of apex or Liger if installed on CUDA, otherwise of torch.

Norms and their formulas are recognized by running the modules on a trial input.
"""

# H features

import copy
from collections import Counter
from collections.abc import Callable, Iterator
from functools import cache, partial
from importlib import import_module
from importlib.util import find_spec
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import Parameter

from ..cluster.device import is_cuda
from ..pipeline.stand_ins import StandIn
from .layers.class_change import change_class
from .layers.norm import epsilon_of
from .layers.parallel_module import ParallelModule

# Arguments by name: x (..., H), weight (H) or None, bias (H) or None, epsilon. Returns the normed x in the dtype of x.
Kernel = Callable[..., Tensor]


def fuse_norms(model: nn.Module, dtype: torch.dtype) -> tuple[Counter[str], Counter[str]]:
    """Replace the forwards of a model's norms by fused kernels, in place: names, parameters and hooks stay.

    Args:
        model: already sharded; norms with sharded features have a class of their own and are not fused.
        dtype: the format of the computation.

    Returns:
        The number of norms that use a kernel, and of norms that match no formula here and stay unchanged; both by
        class name.
    """
    fused, unknown = Counter[str](), Counter[str]()
    first = next(model.parameters(), None)
    library, *kernels = fused_kernels(torch.device("cpu") if first is None else first.device)
    formulas = [formula for kernel in kernels for formula in _formulas(kernel)]
    for norm in list(_norms(model)):
        kind = type(norm)
        if library == "torch" and kind in (nn.LayerNorm, nn.RMSNorm):
            fused[kind.__name__] += 1
        elif (formula := _matching_formula(norm, formulas, dtype)) is None:
            unknown[kind.__name__] += 1
        else:
            vars(norm)["_compute"] = formula
            change_class(norm, _fused_class(kind))  # type: ignore[arg-type]  # a class is hashable
            fused[kind.__name__] += 1
    return fused, unknown


def fused_kernels(device: torch.device) -> tuple[str, Kernel, Kernel]:
    """Return the library that computes norms on a device, and its kernels for RMSNorm and for LayerNorm.

    On CUDA apex if it was built with its kernels, otherwise Liger if it is installed; torch in all other cases.
    """

    def weight_or_ones(x: Tensor, weight: Tensor | None) -> Tensor:
        return x.new_ones(x.shape[-1]) if weight is None else weight

    def bias_or_zeros(x: Tensor, bias: Tensor | None) -> Tensor:
        return x.new_zeros(x.shape[-1]) if bias is None else bias

    on_cuda = is_cuda(device)
    # apex can be installed without its kernels, and another package has its name.
    if on_cuda and find_spec("apex") is not None and find_spec("fused_layer_norm_cuda") is not None:
        apex = import_module("apex.normalization.fused_layer_norm")
        return (
            "apex",
            lambda x, weight, bias, epsilon: apex.fused_rms_norm_affine(
                x, weight_or_ones(x, weight), x.shape[-1:], epsilon
            ),
            lambda x, weight, bias, epsilon: apex.fused_layer_norm_affine(
                x, weight_or_ones(x, weight), bias_or_zeros(x, bias), x.shape[-1:], epsilon
            ),
        )
    if on_cuda and find_spec("liger_kernel") is not None:
        liger = import_module("liger_kernel.transformers.functional")
        return (
            "liger_kernel",
            # "gemma": all in float32, rounded once. In place, the kernel would overwrite the incoming gradient, which
            # a residual connection uses a second time.
            lambda x, weight, bias, epsilon: liger.liger_rms_norm(
                x, weight_or_ones(x, weight), epsilon, 0.0, "gemma", False
            ),
            lambda x, weight, bias, epsilon: liger.liger_layer_norm(
                x, weight_or_ones(x, weight), bias_or_zeros(x, bias), epsilon
            ),
        )
    functional = nn.functional
    return (
        "torch",
        lambda x, weight, bias, epsilon: functional.rms_norm(x, x.shape[-1:], weight, epsilon),
        lambda x, weight, bias, epsilon: functional.layer_norm(x, x.shape[-1:], weight, bias, epsilon),
    )


def _formulas(kernel: Kernel) -> list[Kernel]:
    """Return the formulas of transformers' norms: they differ in the order of casts and of the product with weight."""

    def with_weight_afterwards(x: Tensor, weight: Any, bias: Any, epsilon: float) -> Tensor:
        normed: Tensor = weight * kernel(x, None, None, epsilon)
        return (normed if bias is None else normed + bias).to(x.dtype)

    def with_one_plus_weight(x: Tensor, weight: Any, bias: Any, epsilon: float) -> Tensor:
        return kernel(x.float(), 1.0 + weight.float(), bias, epsilon).to(x.dtype)

    def in_float32(x: Tensor, weight: Any, bias: Any, epsilon: float) -> Tensor:
        bias_float32 = None if bias is None else bias.float()
        return kernel(x.float(), weight.float(), bias_float32, epsilon).to(x.dtype)

    return [kernel, with_weight_afterwards, with_one_plus_weight, in_float32]


def _norms(model: nn.Module) -> Iterator[nn.Module]:
    """Yield the modules that may be norms: an epsilon, a 1-d weight, at most a bias of its shape, and no buffers."""
    for module in model.modules():
        parameters = dict(module.named_parameters())
        weight = parameters.get("weight")
        if (
            weight is not None
            and weight.ndim == 1
            and all(parameter.shape == weight.shape for parameter in parameters.values())
            and parameters.keys() <= {"weight", "bias"}
            and isinstance(epsilon_of(module), float)
            and next(module.buffers(), None) is None
            and not isinstance(module, (ParallelModule, StandIn, FusedNorm))
            and "forward" not in vars(module)
        ):
            yield module


def _matching_formula(norm: nn.Module, formulas: list[Kernel], dtype: torch.dtype) -> Kernel | None:
    """Return the formula whose results are nearest to a norm's; None if all differ by more than rounding.

    Both compute with random weights on a trial input; the norm itself is not changed.

    Args:
        norm: a module of `_norms`.
        formulas: the candidates.
        dtype: format of the computation, in which they are compared.
    """
    weight = norm.get_parameter("weight")
    device = torch.device("cpu") if weight.is_meta else weight.device
    random = partial(torch.randn, generator=torch.Generator("cpu").manual_seed(0), device="cpu")
    features = weight.shape[0]
    trial: Any = copy.copy(norm)
    trial._parameters = {
        name: None if parameter is None else Parameter(random(features).to(device, dtype))
        for name, parameter in norm._parameters.items()
    }
    # Rows of several magnitudes, shifted from zero: small ones show the epsilon, the shifts a subtracted mean and its
    # precision. In float16 gradients of rows near 1e-6 are infinite.
    smallest_size = 1e-3 if dtype is torch.float16 else 1e-6
    sizes = torch.tensor([smallest_size, 1e-3, 1.0, 30.0]).view(4, 1, 1, 1)
    shifts = torch.tensor([0.5, 0.5, 16.0, 0.5]).view(4, 1, 1, 1)
    x = ((random(4, 3, 2, features) + shifts) * sizes).to(device, dtype)
    arguments = dict(weight=trial.weight, bias=trial._parameters.get("bias"), epsilon=epsilon_of(trial))
    parameters = list(trial.parameters())
    try:
        # `forward` skips the user's hooks, which must not see trials.
        expected, first_row = _output_and_gradients(trial.forward, x, parameters), trial.forward(x[0])
        # Other modules may mix the rows.
        if expected[0].shape != x.shape or not torch.equal(expected[0][0], first_row.double()):
            return None
        results = [
            _output_and_gradients(partial(formula, **arguments), x, parameters) for formula in formulas
        ]
    except (RuntimeError, ValueError, TypeError, IndexError, AttributeError):
        return None  # its inputs are not those of a norm over the last dimension
    distances = [_relative_error(result, expected, x.dtype) for result in results]
    smallest = min(distances)
    return formulas[distances.index(smallest)] if smallest <= 1 else None


@torch.enable_grad()
def _output_and_gradients(
    norm: Callable[[Tensor], Tensor], x: Tensor, parameters: list[Tensor]
) -> list[Tensor]:
    """Return a norm's output for x, and the gradients of x and the parameters for a fixed output gradient.

    All are converted to float64.
    """
    x = x.detach().requires_grad_()
    out = norm(x)
    gradient = torch.arange(out.shape[-1], device=out.device).cos().to(out.dtype).expand_as(out)
    gradients = torch.autograd.grad(out, [x, *parameters], gradient)
    return [tensor.detach().double() for tensor in (out, *gradients)]


def _relative_error(results: list[Tensor], expected: list[Tensor], dtype: torch.dtype) -> float:
    """Return the largest error of the results, as a multiple of the allowed rounding error: up to 1 is equal.

    Args:
        results, expected: as of `_output_and_gradients`.
        dtype: the format in which they were computed.
    """
    # Allowed error, in roundings (eps) of the largest entry of a row.
    of_output, of_gradients = (32, 32) if dtype is torch.float32 else (2, 4)
    errors = []
    for index, (result, target) in enumerate(zip(results, expected, strict=True)):
        num_roundings = of_output if index == 0 else of_gradients
        allowed = num_roundings * torch.finfo(dtype).eps * target.abs().amax(-1, keepdim=True)
        errors.append(((result - target).abs() / allowed).max().item())
    return max(errors)


class FusedNorm(nn.Module):
    """A norm that computes with a fused kernel; its subclasses also inherit from the original class."""

    _compute: Kernel

    def forward(self, *args: Tensor, **kwargs: Tensor) -> Tensor:
        """Norm x (..., H) over H, in the dtype of x; the only argument, whatever its name in the original class."""
        (x,) = (*args, *kwargs.values())
        weight: Any = self.weight
        bias: Any = getattr(self, "bias", None)
        return self._compute(x, weight, bias, epsilon_of(self))


@cache
def _fused_class(kind: type[nn.Module]) -> type[nn.Module]:
    """Return a subclass of a norm's class with the forward of `FusedNorm`."""
    return type(f"Fused{kind.__name__}", (FusedNorm, kind), {})
