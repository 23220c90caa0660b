"""Elementwise code that is compiled: the same numbers, the same entries dropped, and all that has weights as ever."""

import copy
import logging
from collections.abc import Iterator
from typing import Any
from unittest import mock

import pytest
import torch
from torch import Tensor, nn
from transformers.pytorch_utils import Conv1D

from echelon.shardformer import fused_code
from echelon.shardformer.fused import FusedKernels
from echelon.shardformer.fused_code import compile_elementwise
from echelon.shardformer.layers.weight_gradient import defer_weight_gradients
from echelon.verify.layout import Layout
from echelon.verify.models import ModelChoice
from echelon.verify.parity import parity

from ..pool import Pool
from .compare import batch_for, build, loss_of, require_same_gradients, split

H = 8


class Output(nn.Module):
    """BERT's: a linear layer, dropout and a sum."""

    def __init__(self) -> None:
        super().__init__()
        self.dense, self.dropout, self.norm = nn.Linear(H, H), nn.Dropout(0.5), nn.LayerNorm(H)

    def forward(self, x: Tensor, residual: Tensor) -> Tensor:
        x = self.dense(x)
        x = self.dropout(x)
        return self.norm(x + residual)


class MLP(nn.Module):
    """GPT-2's: linear layers of transformers' own class around an activation."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.act, self.second = Conv1D(3 * H, H), nn.GELU(), Conv1D(H, 3 * H)

    def forward(self, x: Tensor) -> Tensor:
        return self.second(self.act(self.first(x)))


class Model(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.mlp, self.output = MLP(), Output()

    def forward(self, x: Tensor) -> Tensor:
        return self.output(self.mlp(x), x)


@pytest.fixture
def graphs() -> Iterator[list[list[str]]]:
    """The names of the operations of every graph that is compiled; they run as they are."""
    found: list[list[str]] = []

    def backend(graph: torch.fx.GraphModule, inputs: list[Tensor]) -> Any:
        calls = [node.target for node in graph.graph.nodes if node.op.startswith("call")]
        found.append([str(getattr(target, "__name__", target)) for target in calls])
        return graph.forward

    torch._dynamo.reset()
    fused_code._compiled_class.cache_clear()
    with mock.patch.object(fused_code, "_inductor", backend):
        yield found
    fused_code._compiled_class.cache_clear()


def train(model: nn.Module, *, seed: int = 5) -> dict[str, Tensor]:
    torch.manual_seed(seed)
    x = torch.randn(3, 5, H)
    model.zero_grad()
    out = model(x)
    (out * torch.arange(H).cos()).sum().backward()
    return {"out": out.detach(), "next draw": torch.rand(2)} | {
        name: each.grad.clone() for name, each in model.named_parameters() if each.grad is not None
    }


@pytest.mark.filterwarnings(
    "ignore:The .grad attribute of a Tensor:UserWarning"
)  # hidden by torch, an error here
def test_bias_and_activation_are_one_graph_and_dropout_and_sum_another(graphs: list[list[str]]) -> None:
    model = Model()
    expected, names = train(model), list(model.state_dict())
    seen: list[Any] = []
    model.mlp.register_forward_hook(lambda module, args, output: seen.append(output))
    assert compile_elementwise(model) == {"MLP": 1, "Output": 1}
    found = train(model)
    assert expected.keys() == found.keys() and list(model.state_dict()) == names and len(seen) == 1
    for name, each in expected.items():
        torch.testing.assert_close(found[name], each, rtol=1e-5, atol=1e-6, msg=name)
    activations = [graph for graph in graphs if "gelu" in graph]
    assert activations and all(graph.index("add") < graph.index("gelu") for graph in activations)
    (dropped,) = [graph for graph in graphs if "dropout" in graph]
    assert dropped.index("dropout") < len(dropped) - 1 - dropped[::-1].index("add")
    assert not any(name in graph for graph in graphs for name in ("linear", "addmm", "matmul", "layer_norm"))


class Layer(nn.Module):
    """OPT's: dropout as a function and a sum, around an MLP of its own class."""

    def __init__(self) -> None:
        super().__init__()
        self.mlp = MLP()

    def forward(self, x: Tensor) -> Tensor:
        residual = x
        x = self.mlp(x)
        x = nn.functional.dropout(x, p=0.5, training=self.training)
        return x + residual


@pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor:UserWarning")
def test_what_lies_in_a_compiled_layer_is_compiled_too(graphs: list[list[str]]) -> None:
    model = Layer()
    expected = train(model)
    assert compile_elementwise(model) == {"Layer": 1, "MLP": 1}
    found = train(model)
    for name, each in expected.items():
        torch.testing.assert_close(found[name], each, rtol=1e-5, atol=1e-6, msg=name)
    assert sorted(name for graph in graphs for name in graph if name in ("gelu", "dropout")) == [
        "dropout",
        "gelu",
    ]


@pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor:UserWarning")
@pytest.mark.parametrize("kind", [Model, Layer])
def test_training_and_evaluation_are_told_apart(kind: type[nn.Module], graphs: list[list[str]]) -> None:
    model = kind()
    expected = [train(model.eval()), train(model.train())]
    compile_elementwise(model)
    for each, found in zip(expected, [train(model.eval()), train(model.train())], strict=True):
        torch.testing.assert_close(found["out"], each["out"], rtol=1e-5, atol=1e-6)
    assert not torch.allclose(expected[0]["out"], expected[1]["out"])


@torch.compiler.set_stance("force_eager")
def test_weight_gradients_are_still_held_back() -> None:
    model = Model()
    expected = train(model)
    store = defer_weight_gradients(model)
    assert compile_elementwise(model)
    weights = {"mlp.first.weight", "mlp.second.weight", "output.dense.weight"}
    with store.deferring((0, 0)):
        held = train(model)
    assert expected.keys() - held.keys() == weights  # the biases have theirs
    store.compute((0, 0))
    for name, each in model.named_parameters():
        torch.testing.assert_close(each.grad, expected[name], rtol=1e-5, atol=1e-6)


@torch.compiler.set_stance("force_eager")
def test_a_copy_computes_with_its_own_weights() -> None:
    model = Model().eval()
    compile_elementwise(model)
    copied = copy.deepcopy(model)
    before = train(model)["out"]
    nn.init.zeros_(copied.output.norm.weight)
    nn.init.zeros_(copied.mlp.second._parameters["bias"])  # type: ignore[arg-type]
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


class WithoutBias(MLP):
    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(H, H, bias=False), nn.Linear(H, H, bias=False)


class WithSoftmax(MLP):
    def __init__(self) -> None:
        super().__init__()
        self.act = nn.Softmax(-1)  # type: ignore[assignment]


@pytest.mark.parametrize(
    "kind", [DroppedAndReplaced, SumBefore, WithItsOwnMethod, WithItsOwnWeight, WithoutBias, WithSoftmax]
)
def test_where_there_is_nothing_to_fuse_nothing_changes_and_it_is_told(
    kind: type[nn.Module], caplog: pytest.LogCaptureFixture
) -> None:
    model = kind()
    with caplog.at_level(logging.WARNING, "echelon"):
        FusedKernels(jit=True).fuse(model, torch.float32)
    assert type(model) is kind and f"{kind.__name__} has no bias in front of an activation" in caplog.text


def test_a_layer_that_somebody_watches_keeps_its_bias() -> None:
    model = MLP()
    for layer in (model.first, model.second):
        layer.register_forward_hook(lambda module, args, output: None)
    assert compile_elementwise(model) == {}


def test_a_missing_compiler_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PATH", "/nowhere")
    monkeypatch.delenv("CXX", raising=False)
    (fault,) = FusedKernels(jit=True).faults(torch.device("cpu"), torch.float32)
    assert "C++ compiler" in fault
    with mock.patch("echelon.shardformer.fused.find_spec", return_value=None):
        (fault,) = FusedKernels(jit=True).faults(torch.device("cuda"), torch.float32)
    assert "package triton" in fault


def dropout_of_split_models() -> None:
    """With torch's compiler: one process without it, and two ranks with it, drop the same entries of hidden states."""
    settings: dict[str, dict[str, float]] = dict(
        BertForSequenceClassification=dict(hidden_dropout_prob=0.1, classifier_dropout=0.1),
        OPTForCausalLM=dict(dropout=0.1),
    )
    for name, given in settings.items():
        model = build(name, **given)
        copied = split(copy.deepcopy(model))
        assert compile_elementwise(copied)
        losses = []
        for each in (model, copied):
            torch.manual_seed(11)
            losses.append([])
            for _ in range(2):
                loss = loss_of(each(**batch_for(each)))
                loss.backward()
                losses[-1].append(loss.item())
        assert losses[0][0] != losses[0][1], "no dropout"
        torch.testing.assert_close(torch.tensor(losses[1]), torch.tensor(losses[0]), rtol=1e-6, atol=1e-6)
        require_same_gradients(copied, model)


COMPILING = (
    pytest.mark.slow,
    pytest.mark.filterwarnings("ignore:`torch.jit.script:DeprecationWarning"),
    pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor:UserWarning"),
)


@pytest.mark.parametrize("check", [pytest.param(dropout_of_split_models, marks=COMPILING)])
def test_compiled_code_drops_the_same_entries(pool: Pool, check: Any) -> None:
    pool.run(2, check, timeout=240.0)


@pytest.mark.parametrize(
    "layout",
    [
        pytest.param(layout, id=str(layout), marks=COMPILING)
        for layout in (
            Layout(pp=2, schedule="zbv", options=("enable_jit_fused",)),
            Layout(tp=2, recompute=0.5, options=("enable_jit_fused", "enable_fused_normalization")),
            Layout(dp=2, zero=2, overlap_allgather=True, options=("enable_all_optimization",)),
        )
    ],
)
def test_fused_kernels_go_with_all_other_machinery(pool: Pool, layout: Layout) -> None:
    report = pool.run(layout.world_size, parity, ModelChoice(model_type="bert"), layout, timeout=240.0)[0]
    assert report.departure is None


def watch_dropout(model: Model) -> None:
    model.output.dropout.register_forward_hook(lambda module, args, out: out * 3)


def watch_activation(model: Model) -> None:
    model.mlp.act.register_forward_pre_hook(lambda module, args: (args[0] * 2,))


def watch_product(model: Model) -> None:
    model.mlp.first.register_forward_hook(lambda module, args, out: out * 0)


def replace_activation(model: Model) -> None:
    model.mlp.act = nn.ReLU()


def replace_product(model: Model) -> None:
    torch.manual_seed(5)
    model.mlp.first = Conv1D(3 * H, H)
    nn.init.normal_(model.mlp.first.bias)


@pytest.mark.parametrize(
    "change",
    [
        watch_dropout,
        watch_activation,
        watch_product,
        replace_activation,
        replace_product,
    ],
)
@pytest.mark.parametrize("has_run", [True, False], ids=["after a call", "before any"])
@torch.no_grad()
def test_what_is_changed_afterwards_is_as_without_compiling(
    graphs: list[list[str]], change: Any, has_run: bool
) -> None:
    torch.manual_seed(3)
    plain = Model().eval()
    nn.init.normal_(plain.mlp.first.bias)
    model, x = copy.deepcopy(plain), torch.randn(2, H)
    compile_elementwise(model)
    if has_run:
        torch.testing.assert_close(model(x), plain(x))
        assert graphs
    change(plain)
    change(model)
    torch.testing.assert_close(model(x), plain(x))
