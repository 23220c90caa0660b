"""Parity rows of optimizers that need full parameters, which owners step."""

from collections.abc import Iterator
from contextlib import AbstractContextManager, ExitStack
from dataclasses import replace
from unittest.mock import patch

from torch import Tensor, nn
from torch.optim import Optimizer

from echelon.verify.layout_choice import Layout, Training
from echelon.verify.model_choice import ModelChoice

from ..zero.owners import Lamb
from .row import ParityRow, as_quick

LLAMA, FUSED = ModelChoice(model_type="llama", tied=True), ModelChoice(model_type="gpt2")
MIXTRAL = ModelChoice(model_type="mixtral")
MUON, ADAFACTOR = Training(optimizer="muon"), Training(optimizer="adafactor")
LAYOUTS = (
    Layout(dp=2),
    Layout(tp=2),
    Layout(pp=2),
    Layout(dp=2, zero=2),
    Layout(dp=4, zero=1, zero_size=2, overlap_allgather=True),
    Layout(tp=2, dp=2, zero=1, options=("cpu_offload",)),
    Layout(tp=2, pp=2, dp=2, zero=1, max_norm=0.1),
)
OF_MIXTURES = (Layout(dp=2, ep=2), Layout(dp=2, ep=2, tp=2, zero=1), Layout(dp=2, zero=1, precision="bf16"))
QUICK = Layout(tp=2, dp=2, zero=2)


def orthogonalized(
    gradient: Tensor, coefficients: tuple[float, float, float], steps: int, eps: float
) -> Tensor:
    """Compute torch's Newton-Schulz iterations in float32."""
    a, b, c = coefficients
    is_tall = gradient.size(0) > gradient.size(1)
    x = gradient.T if is_tall else gradient
    x = x / x.norm().clamp(min=eps)
    for _ in range(steps):
        gram = x @ x.T
        x = a * x + (b * gram + c * gram @ gram) @ x
    return x.T if is_tall else x


def in_float32() -> AbstractContextManager[object]:
    """Let Muon compute in float32, within float32's tolerance."""
    stack = ExitStack()
    stack.enter_context(patch("torch.optim._muon._zeropower_via_newtonschulz", orthogonalized))
    stack.enter_context(patch("echelon.verify.parity.rounding_of", lambda *_: {}))
    return stack


def with_lamb() -> AbstractContextManager[object]:
    def lamb(model: nn.Module, *_: object, **__: object) -> list[Optimizer]:
        return [Lamb(model.parameters(), lr=1e-3)]

    return patch("echelon.verify.parity.optimizers_of", lamb)


def owner_rows() -> Iterator[ParityRow]:
    """Yield every row."""
    yield as_quick(ParityRow(choice=LLAMA, layout=QUICK, training=MUON, name="Muon"))
    for layout in LAYOUTS:
        for name, training, within in (
            ("Muon in float32", MUON, in_float32),
            ("Muon", MUON, ExitStack),
            ("Adafactor", ADAFACTOR, ExitStack),
            ("LAMB", ADAFACTOR, with_lamb),
        ):
            choice = FUSED if layout.tp > 1 else LLAMA
            row = ParityRow(choice=choice, layout=layout, training=training, within=within, num_steps=5)
            yield replace(row, name=f"{name}, {choice.model_type}, {layout}")
    for name, training in (("Muon", MUON), ("Adafactor", ADAFACTOR)):
        for layout in OF_MIXTURES:
            row = ParityRow(choice=MIXTRAL, layout=layout, training=training, num_steps=5)
            yield replace(row, name=f"{name}, mixtral, {layout}")
