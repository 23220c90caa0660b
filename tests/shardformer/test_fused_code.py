"""Compiled elementwise code: the same results and dropped entries, with uncompiled modules for all weights."""

import copy
import logging
from collections.abc import Iterator
from typing import Any
from unittest import mock

import pytest
import torch
from torch import Tensor, nn
from transformers.activations import GELUActivation, NewGELUActivation
from transformers.pytorch_utils import Conv1D

from echelon.shardformer import fused_code
from echelon.shardformer.fused import FusedKernels
from echelon.shardformer.fused_code import compile_elementwise
from echelon.shardformer.layers.deferred_linear import track_weight_gradients
from echelon.verify.layout_choice import Layout
from echelon.verify.model_choice import ModelChoice
from echelon.verify.parity import parity

from ..pool import Pool
from .compare import batch_for, build, loss_of, require_same_gradients, split

H = 8
HIDDEN_BY_TORCH = pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor:UserWarning")


class Output(nn.Module):
    """As in BERT: a linear layer, dropout and a sum."""

    def __init__(self) -> None:
        super().__init__()
        self.dense, self.dropout, self.norm = nn.Linear(H, H), nn.Dropout(0.5), nn.LayerNorm(H)

    def forward(self, x: Tensor, residual: Tensor) -> Tensor:
        x = self.dense(x)
        x = self.dropout(x)
        return self.norm(x + residual)


class MLP(nn.Module):
    """As in GPT-2: linear layers of transformers' own class around an activation of several kernels."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.act, self.second = Conv1D(3 * H, H), NewGELUActivation(), Conv1D(H, 3 * H)

    def forward(self, x: Tensor) -> Tensor:
        return self.second(self.act(self.first(x)))


class Model(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.mlp, self.output = MLP(), Output()

    def forward(self, x: Tensor) -> Tensor:
        return self.output(self.mlp(x), x)


class Layer(nn.Module):
    """As in OPT: dropout as a function and a sum, around an MLP of another class."""

    def __init__(self) -> None:
        super().__init__()
        self.mlp = MLP()

    def forward(self, x: Tensor) -> Tensor:
        residual = x
        x = self.mlp(x)
        x = nn.functional.dropout(x, p=0.5, training=self.training)
        return x + residual


@pytest.fixture
def graphs() -> Iterator[list[list[str]]]:
    """Record the names of the operations of every compiled graph; the graphs run uncompiled."""
    recorded: list[list[str]] = []

    def backend(graph: torch.fx.GraphModule, inputs: list[Tensor], **options: Any) -> Any:
        calls = [node.target for node in graph.graph.nodes if node.op.startswith("call")]
        recorded.append([str(getattr(target, "__name__", target)) for target in calls])
        return graph.forward

    torch._dynamo.reset()
    fused_code._compiled_class.cache_clear()
    with mock.patch.object(fused_code, "inductor", backend):
        yield recorded
    fused_code._compiled_class.cache_clear()


def train(model: nn.Module, *, seed: int = 5) -> dict[str, Tensor]:
    torch.manual_seed(seed)
    x = torch.randn(3, 5, H)
    model.zero_grad()
    out = model(x)
    (out * torch.arange(H).cos()).sum().backward()
    return {"out": out.detach(), "next draw": torch.rand(2)} | {
        name: parameter.grad.clone()
        for name, parameter in model.named_parameters()
        if parameter.grad is not None
    }


@HIDDEN_BY_TORCH
@pytest.mark.parametrize(("kind", "outer"), [(Model, "Output"), (Layer, "Layer")])
def test_formulas_and_dropout_with_its_sum_are_compiled_once(
    graphs: list[list[str]], kind: type[nn.Module], outer: str
) -> None:
    model = kind()
    expected, names = [train(model.eval()), train(model.train())], list(model.state_dict())
    assert not torch.allclose(expected[0]["out"], expected[1]["out"])
    assert compile_elementwise(model) == {"NewGELUActivation": 1, outer: 1}
    runs = [train(model.eval()), train(model.train())]
    assert list(model.state_dict()) == names
    torch.testing.assert_close(runs, expected, rtol=1e-5, atol=1e-6)
    dropped = [graph for graph in graphs if "dropout" in graph]
    assert any("add" in graph[graph.index("dropout") :] for graph in dropped)
    assert sum("tanh" in graph for graph in graphs) == 1
    assert not any(name in graph for graph in graphs for name in ("linear", "addmm", "matmul", "layer_norm"))
    number = len(graphs)
    train(model)
    assert len(graphs) == number, "compiled again"


@torch.compiler.set_stance("force_eager")
def test_weight_gradients_are_still_deferred() -> None:
    model = Model()
    expected = train(model)
    store = track_weight_gradients(model)
    assert compile_elementwise(model)
    weights = {"mlp.first.weight", "mlp.second.weight", "output.dense.weight"}
    with store.deferring((0, 0)):
        local = train(model)
    assert expected.keys() - local.keys() == weights  # gradients of biases are not deferred
    store.compute((0, 0))
    for name, parameter in model.named_parameters():
        torch.testing.assert_close(parameter.grad, expected[name], rtol=1e-5, atol=1e-6)


@torch.compiler.set_stance("force_eager")
def test_a_copy_computes_with_its_own_weights() -> None:
    model = Model().eval()
    compile_elementwise(model)
    copied = copy.deepcopy(model)
    before = train(model)["out"]
    nn.init.zeros_(copied.output.norm.weight)
    assert torch.equal(train(model)["out"], before) and not torch.equal(train(copied)["out"], before)


class DroppedAndReplaced(Output):
    def forward(self, x: Tensor, residual: Tensor) -> Tensor:
        y = self.dropout(x)
        y = self.dense(x)
        return y + residual


class SumBefore(Output):
    def forward(self, x: Tensor, residual: Tensor) -> Tensor:
        return self.dropout(self.dense(x) + residual)


class WithItsOwnMethod(Output):
    def turned(self, x: Tensor) -> Tensor:
        return x.roll(1, 0)

    def forward(self, x: Tensor, residual: Tensor) -> Tensor:
        return self.turned(self.dropout(self.dense(x)) + residual)


class WithItsOwnWeight(Output):
    def __init__(self) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.ones(H))


class OneKernel(MLP):
    def __init__(self) -> None:
        super().__init__()
        self.act = GELUActivation()


@pytest.mark.parametrize(
    "kind", [DroppedAndReplaced, SumBefore, WithItsOwnMethod, WithItsOwnWeight, OneKernel]
)
def test_a_model_with_nothing_to_fuse_is_unchanged_and_logged(
    kind: type[nn.Module], caplog: pytest.LogCaptureFixture
) -> None:
    model = kind()
    with caplog.at_level(logging.WARNING, "echelon"):
        FusedKernels(jit=True).fuse(model, torch.float32)
    assert type(model) is kind and f"{kind.__name__} has no elementwise activation function" in caplog.text


def test_a_missing_compiler_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PATH", "/nowhere")
    monkeypatch.delenv("CXX", raising=False)
    (error,) = FusedKernels(jit=True).errors(torch.device("cpu"), torch.float32)
    assert "C++ compiler" in error
    with mock.patch("echelon.shardformer.fused_code.find_spec", return_value=None):
        (error,) = FusedKernels(jit=True).errors(torch.device("cuda"), torch.float32)
    assert "package triton" in error


def dropout_of_split_models() -> None:
    """One process without torch's compiler, and two ranks with it, drop the same entries of hidden states."""
    for name, setting in (("BertForMaskedLM", "hidden_dropout_prob"), ("OPTForCausalLM", "dropout")):
        model = build(name, **{setting: 0.1})
        copied, losses = split(copy.deepcopy(model)), []
        assert compile_elementwise(copied)
        for module in (model, copied):
            torch.manual_seed(11)
            losses.append([loss_of(module(**batch_for(module))) for _ in range(2)])
            sum(losses[-1]).backward()
        assert losses[0][0] != losses[0][1], "no dropout"
        torch.testing.assert_close(losses[1], losses[0], rtol=1e-6, atol=1e-6)
        require_same_gradients(copied, model)


def parity_with(layout: Layout) -> None:
    assert parity(ModelChoice(model_type="bert"), layout).departure is None


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore:`torch.jit.script:DeprecationWarning")
@HIDDEN_BY_TORCH
@pytest.mark.parametrize(
    ("check", "args"),
    [
        (dropout_of_split_models, ()),
        (parity_with, (Layout(pp=2, schedule="zbv", options=("enable_jit_fused",)),)),
        (
            parity_with,
            (Layout(tp=2, recompute=0.5, options=("enable_jit_fused", "enable_fused_normalization")),),
        ),
        (parity_with, (Layout(dp=2, zero=2, overlap_allgather=True, options=("enable_all_optimization",)),)),
    ],
)
def test_compiled_code_goes_with_all_other_machinery(
    pool: Pool, check: Any, args: tuple[Layout, ...]
) -> None:
    pool.run(2, check, *args, timeout=240.0)


def watch_dropout(model: Model) -> None:
    model.output.dropout.register_forward_hook(lambda module, args, out: out * 3)


def watch_activation(model: Model) -> None:
    model.mlp.act.register_forward_pre_hook(lambda module, args: (args[0] * 2,))


def replace_norm(model: Model) -> None:
    model.output.norm = nn.LayerNorm(H, elementwise_affine=False)


def replace_dropout(model: Model) -> None:
    model.output.dropout = nn.Tanh()  # type: ignore[assignment]


@pytest.mark.parametrize("change", [watch_dropout, watch_activation, replace_norm, replace_dropout])
@pytest.mark.parametrize(
    "has_run",
    [pytest.param(True, id="after a call"), pytest.param(False, id="before any", marks=pytest.mark.slow)],
)
@torch.no_grad()
def test_changes_made_afterwards_count(graphs: list[list[str]], change: Any, has_run: bool) -> None:
    torch.manual_seed(3)
    plain = Model().eval()
    model, x = copy.deepcopy(plain), torch.randn(2, H)
    compile_elementwise(model)
    if has_run:
        torch.testing.assert_close(model(x), plain(x))
        assert graphs
    change(plain)
    change(model)
    torch.testing.assert_close(model(x), plain(x))
