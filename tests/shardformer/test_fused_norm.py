"""Norms by fused kernels: recognized by trial runs; other modules are not changed."""

import copy
import logging
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import Parameter

from echelon.shardformer.fused import FusedKernels
from echelon.shardformer.fused_norm import FusedNorm, fuse_norms, fused_kernels

from ..models.stand_ins import installed

H = 24


class Norm(nn.Module):
    """transformers' usual norm."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = Parameter(torch.randn(H))
        self.variance_epsilon = 1e-6

    def normalized(self, x: Tensor) -> Tensor:
        wide = x.float()
        return wide * torch.rsqrt(wide.pow(2).mean(-1, keepdim=True) + self.variance_epsilon)

    def forward(self, x: Tensor) -> Tensor:
        return self.weight * self.normalized(x).to(x.dtype)


class RoundedLate(Norm):
    def forward(self, x: Tensor) -> Tensor:
        return (self.weight * self.normalized(x)).to(x.dtype)


class BesideOne(Norm):
    def forward(self, x: Tensor) -> Tensor:
        return (self.normalized(x) * (1.0 + self.weight.float())).to(x.dtype)


class Centered(Norm):
    def forward(self, x: Tensor) -> Tensor:
        centered = x.float() - x.float().mean(-1, keepdim=True)
        return (self.weight.float() * self.normalized(centered)).to(x.dtype)


class EpsilonOutside(Norm):
    def forward(self, x: Tensor) -> Tensor:
        return self.weight * x / (x.pow(2).mean(-1, keepdim=True).sqrt() + self.variance_epsilon)


class Clipped(Norm):
    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x).clamp(-2.0, 2.0)


class OverTwoDims(Norm):
    def forward(self, x: Tensor) -> Tensor:
        return self.weight * x * torch.rsqrt(x.pow(2).mean((-1, -2), keepdim=True) + self.variance_epsilon)


class BesideTwo(Norm):
    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x) * (2.0 + self.weight) / self.weight


class OfTwoInputs(Norm):
    def forward(self, x: Tensor, gate: Tensor) -> Tensor:
        return super().forward(x) * gate


class ChannelsFirst(nn.LayerNorm):
    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x.movedim(1, -1)).movedim(-1, 1)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("kind", [Norm, RoundedLate, BesideOne, Centered])
def test_a_fused_norm_computes_the_same(kind: type[Norm], dtype: torch.dtype) -> None:
    torch.manual_seed(0)
    model = nn.Sequential(kind()).to(dtype)
    names, parameters = list(model.state_dict()), list(model.parameters())
    seen: list[Tensor] = []
    model[0].register_forward_hook(lambda module, args, output: seen.append(output))
    x = (torch.randn(2, 5, H) * torch.tensor([1e-3, 1.0]).view(2, 1, 1) + 0.1).to(dtype)

    def run(model: nn.Module) -> list[Tensor]:
        inputs = x.clone().requires_grad_()
        out = model(inputs)
        (out.float() * torch.arange(H).cos()).sum().backward()
        tensors = [out, inputs.grad, *(parameter.grad for parameter in model.parameters())]
        model.zero_grad()
        return [tensor for tensor in tensors if tensor is not None]

    expected = run(model)
    assert fuse_norms(model, dtype) == ({kind.__name__: 1}, {})
    assert isinstance(model[0], FusedNorm) and isinstance(model[0], kind)
    fused = run(model)
    assert len(seen) == 2 and len(fused) == len(expected) == 3
    for one, other in zip(fused, expected, strict=True):  # means and sums have terms of both signs
        scale = other.abs().max().item()
        torch.testing.assert_close(
            one, other, rtol=0.0, atol=scale * (1e-5 if dtype is torch.float32 else 2**-6)
        )
    assert list(model.state_dict()) == names
    assert all(one is other for one, other in zip(model.parameters(), parameters, strict=True))


@pytest.mark.parametrize(
    "build",
    [EpsilonOutside, Clipped, OverTwoDims, BesideTwo, OfTwoInputs, lambda: ChannelsFirst(H)],
    ids=lambda build: getattr(build, "__name__", "?"),
)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_norms_that_match_no_formula_stay_and_are_reported(
    build: Any, dtype: torch.dtype, caplog: pytest.LogCaptureFixture
) -> None:
    norm = build().to(dtype)
    model = nn.Sequential(norm, Norm().to(dtype))
    kind = type(norm)
    assert fuse_norms(copy.deepcopy(model), dtype)[1] == {kind.__name__: 1}
    with caplog.at_level(logging.WARNING, "echelon"):
        FusedKernels(normalization=True).fuse(model, dtype)
    assert type(norm) is kind and f"1 × {kind.__name__}" in caplog.text


def test_the_generator_is_left_as_it_was() -> None:
    model = nn.Sequential(Norm())
    torch.manual_seed(3)
    expected = torch.rand(4)
    torch.manual_seed(3)
    fuse_norms(model, torch.float32)
    assert torch.equal(torch.rand(4), expected)


def rms(x: Tensor, weight: Tensor, epsilon: float) -> Tensor:
    return weight * x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + epsilon)


def liger_rms_norm(
    X: Any, W: Any, eps: Any, offset: Any = 0.0, casting_mode: Any = "llama", in_place: Any = True
) -> Any:
    assert (offset, casting_mode, in_place) == (0.0, "gemma", False)
    return rms(X, W, eps)


LIGER = {
    "liger_rms_norm": liger_rms_norm,
    "liger_layer_norm": lambda X, W, B, eps: nn.functional.layer_norm(X, W.shape, W, B, eps),
}
APEX = {
    "fused_rms_norm_affine": lambda x, weight, shape, eps=1e-6, memory_efficient=False: rms(x, weight, eps),
    "fused_layer_norm_affine": lambda x, weight, bias, shape, eps=1e-6, memory_efficient=False: (
        nn.functional.layer_norm(x, shape, weight, bias, eps)
    ),
}


@pytest.mark.parametrize(
    ("modules", "on_cuda"),
    [
        ({}, "torch"),
        ({"liger_kernel__transformers__functional": LIGER}, "liger_kernel"),
        ({"apex__normalization__fused_layer_norm": APEX}, "torch"),  # built without its kernels
        ({"apex__normalization__fused_layer_norm": APEX, "fused_layer_norm_cuda": {}}, "apex"),
    ],
)
def test_installed_kernels_compute_norms_on_cuda_alone(modules: dict[str, Any], on_cuda: str) -> None:
    x, weight = torch.randn(3, H), torch.randn(H)
    expected = rms(x, weight, 1e-6), nn.functional.layer_norm(x, (H,), weight, None, 1e-6)
    with installed(**modules):
        for device, library in (("cuda", on_cuda), ("cpu", "torch")):
            name, root_mean_square, layer = fused_kernels(torch.device(device))
            assert name == library
            torch.testing.assert_close(root_mean_square(x, weight, None, 1e-6), expected[0])
            torch.testing.assert_close(root_mean_square(x, None, None, 1e-6) * weight, expected[0])
            torch.testing.assert_close(layer(x, weight, None, 1e-6), expected[1])
