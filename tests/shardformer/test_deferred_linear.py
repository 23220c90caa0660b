"""Deferred weight gradients: by a schedule, or until the all-reduce of input gradients is in flight."""

from collections.abc import Callable
from copy import deepcopy
from functools import partial
from typing import Any
from unittest.mock import patch

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from transformers.pytorch_utils import Conv1D

from echelon.cluster import collectives
from echelon.cluster.placement import shard_on
from echelon.shardformer.layers import deferred_linear, region
from echelon.shardformer.layers import linear as split_layers
from echelon.shardformer.layers.deferred_linear import enter_overlapped, linear, track_weight_gradients
from echelon.shardformer.recompute import (
    PipelineGradientCheckpointConfig,
    checkpoint_layers,
    recomputable_layers,
)

from ..pool import Pool
from .compare import build, gradients, require_equal, split

PLACE = (0, 0)  # stage and microbatch

# By a schedule, without processes.


class Doubling(nn.Linear):
    def forward(self, x: Tensor) -> Tensor:
        return 2 * super().forward(x)


def make_model(kind: str = "") -> Any:
    torch.manual_seed(0)
    layers = [nn.Linear(5, 7), nn.LayerNorm(7), Conv1D(6, 7), nn.Tanh(), nn.Linear(6, 3, bias=False)]
    if kind == "written in place":
        layers[3] = nn.ReLU(inplace=True)
    if kind == "subclass":
        layers[4] = Doubling(6, 3)
    if kind == "frozen":
        layers[4].requires_grad_(False)
    if kind == "twice":
        layers[4] = nn.Sequential(square := nn.Linear(6, 6), nn.Tanh(), square)
    if kind == "computed from others":
        nn.utils.parametrizations.weight_norm(layers[0])
    return nn.Sequential(*layers)


def loss_of(model: nn.Module, x: Tensor) -> Tensor:
    return model(x).square().mean()


@pytest.mark.parametrize("shape", [(4, 5), (2, 3, 5), (5,)])
@pytest.mark.parametrize(
    ("kind", "deferred"),
    [
        ("", {"0.weight", "2.weight", "4.weight"}),
        ("written in place", {"0.weight", "2.weight", "4.weight"}),
        ("subclass", {"0.weight", "2.weight"}),
        ("frozen", {"0.weight", "2.weight"}),
        ("computed from others", {"2.weight", "4.weight"}),
    ],
)
def test_deferred_gradients_are_bitwise_those_of_a_full_backward(
    kind: str, deferred: set[str], shape: tuple[int, ...]
) -> None:
    model, expected = make_model(kind), make_model(kind)
    x, other_x = (torch.randn(shape, generator=torch.Generator().manual_seed(1)) for _ in range(2))
    store = track_weight_gradients(model)
    for missing in (deferred, set()):
        loss_of(expected, other_x.requires_grad_()).backward()
        with store.deferring(PLACE):
            loss_of(model, x.requires_grad_()).backward()
        assert torch.equal(x.grad, other_x.grad)
        trained = {name for name, parameter in model.named_parameters() if parameter.requires_grad}
        assert {name for name in trained if model.get_parameter(name).grad is None} == missing
        store.compute(PLACE)
    require_equal(gradients(model), gradients(expected))


def test_each_stage_and_microbatch_has_a_queue_and_other_backwards_defer_nothing() -> None:
    model, expected = make_model(), make_model()
    store = track_weight_gradients(model)
    for microbatch in range(2):
        with store.deferring((0, microbatch)):
            loss_of(model, torch.full((2, 5), microbatch + 1.0)).backward()
    store.compute((0, 1))
    loss_of(expected, torch.full((2, 5), 2.0)).backward()
    assert torch.equal(model[0].weight.grad, expected[0].weight.grad)
    model.zero_grad()
    loss_of(model, torch.ones(2, 5)).backward()
    assert all(parameter.grad is not None for parameter in model.parameters())


def test_hooks_of_users_see_every_gradient_once() -> None:
    model, expected = make_model(), make_model()
    seen: list[str] = []

    def halve(gradient: Tensor) -> Tensor:
        seen.append("hook")
        return gradient / 2

    model[0].weight.register_hook(halve)
    model[4].weight.register_post_accumulate_grad_hook(lambda p: seen.append(str(p.grad is not None)))
    store = track_weight_gradients(model)
    with store.deferring(PLACE):
        loss_of(model, torch.ones(2, 5)).backward()
    store.compute(PLACE)
    assert sorted(seen) == ["True", "hook"]
    loss_of(expected, torch.ones(2, 5)).backward()
    assert torch.equal(model[0].weight.grad, expected[0].weight.grad / 2)


def backward(store: Any, model: nn.Module, x: Tensor, *, is_deferred: bool) -> None:
    with store.deferring(PLACE) if is_deferred else store.adding():
        loss_of(model, x).backward()
    if is_deferred:
        store.compute(PLACE)


@pytest.mark.parametrize("rows", [1, 4])
@pytest.mark.parametrize("is_deferred", [False, True])
@pytest.mark.parametrize("kind", ["", "twice", "subclass", "frozen", "computed from others"])
def test_products_are_added_without_a_temporary_from_the_second_microbatch_on(
    kind: str, is_deferred: bool, rows: int
) -> None:
    """The sums are bitwise those of autograd."""
    model, expected = make_model(kind), make_model(kind)
    store, compute = track_weight_gradients(model), deferred_linear.weight_gradient
    counts = []
    with patch.object(deferred_linear, "weight_gradient", wraps=compute) as computed:
        for microbatch in range(3):
            x = torch.randn(rows, 5, generator=torch.Generator().manual_seed(microbatch))
            loss_of(expected, x).backward()
            backward(store, model, x, is_deferred=is_deferred)
            counts.append(computed.call_count)
    assert counts[0] == counts[2] > 0
    # Autograd adds both uses before it adds them to the gradient.
    allowed = {"rtol": 1e-6, "atol": 1e-7} if kind == "twice" else {"rtol": 0, "atol": 0}
    torch.testing.assert_close(gradients(model), gradients(expected), **allowed)


def test_nothing_is_added_for_autograd_grad_and_for_weights_with_hooks() -> None:
    model, expected = make_model(), make_model()
    store, seen = track_weight_gradients(model), []
    model[0].weight.register_hook(lambda gradient: seen.append(gradient.clone()))
    for _ in range(3):
        with store.adding():
            loss_of(model, torch.ones(2, 5)).backward()
        loss_of(expected, torch.ones(2, 5)).backward()
        torch.autograd.grad(loss_of(model, torch.ones(2, 5)), [model[2].weight])
    assert len(seen) == 3
    require_equal(gradients(model), gradients(expected))


class Recomputing(nn.Module):
    """Computes its gradients by `autograd.grad` inside its backward, and halves those of the weight."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Linear(6, 6)

    def forward(self, x: Tensor) -> Tensor:
        return Recomputed.apply(x, self.inner, *self.inner.parameters())


class Recomputed(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, layer: nn.Linear, *_: Tensor) -> Tensor:
        ctx.layer = layer
        ctx.save_for_backward(x)
        return layer(x)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor | None, ...]:
        x = ctx.saved_tensors[0].detach().requires_grad_()
        with torch.enable_grad():
            out = ctx.layer(x)
        of_x, of_weight, of_bias = torch.autograd.grad(out, [x, *ctx.layer.parameters()], gradient)
        return of_x, None, of_weight / 2, of_bias


@pytest.mark.parametrize("is_deferred", [False, True])
def test_autograd_grad_inside_a_backward_returns_the_gradients(is_deferred: bool) -> None:
    model = nn.Sequential(nn.Linear(5, 6), Recomputing(), nn.Linear(6, 3))
    expected = deepcopy(model)
    store = track_weight_gradients(model)
    for _ in range(3):
        backward(store, model, torch.ones(2, 5), is_deferred=is_deferred)
        loss_of(expected, torch.ones(2, 5)).backward()
    require_equal(gradients(model), gradients(expected))


@pytest.mark.filterwarnings("ignore:The PyTorch API of nested tensors")
def test_nested_tensors_are_left_to_autograd() -> None:
    model = nn.Sequential(nn.Linear(5, 3))
    store = track_weight_gradients(model)
    x = torch.nested.nested_tensor([torch.ones(2, 5), torch.ones(4, 5)], layout=torch.jagged)
    for _ in range(2):
        with store.adding():
            model(x).values().sum().backward()
    assert torch.equal(model[0].weight.grad, torch.full((3, 5), 12.0))


def test_a_weight_that_two_calls_use_and_one_that_none_does() -> None:
    """A second call of a layer in one region is not announced; its product must still be added."""
    weight = nn.Parameter(torch.randn(3, 2))
    x, y = torch.randn(2, 4, 2).unbind(0)
    crossing = deferred_linear.Crossing(collectives.unchanged, partial(collectives.InFlight, None))
    (x,), later = enter_overlapped(
        [x.requires_grad_()], [crossing], [weight, unused := nn.Parameter(torch.randn(3, 2))]
    )
    first, second = linear(x, weight, None, later_product=later), linear(y, weight, None)
    (first.square().sum() + second.square().sum()).backward()
    expected = sum(nn.functional.linear(tensor, weight).square().sum() for tensor in (x, y))
    torch.testing.assert_close(weight.grad, *torch.autograd.grad(expected, [weight]))
    assert unused.grad is None and not later.deferred


def test_under_functorch_a_layer_computes_a_plain_product() -> None:
    weight, x = nn.Parameter(torch.randn(3, 2)), torch.randn(4, 2)
    crossing = deferred_linear.Crossing(collectives.unchanged, partial(collectives.InFlight, None))
    (entered,), later = enter_overlapped([x.clone().requires_grad_()], [crossing], [weight])
    out = torch.func.vmap(lambda row: linear(row, weight, None, later_product=later))(entered)
    out.square().sum().backward()
    expected = nn.functional.linear(x, weight).square().sum()
    torch.testing.assert_close(weight.grad, *torch.autograd.grad(expected, [weight]))


# Within one backward, over ranks.


def llama() -> Any:
    return build("LlamaForCausalLM", num_hidden_layers=1)


def t5() -> Any:
    return build("T5ForConditionalGeneration", num_layers=1, tie_word_embeddings=False)


IDS = {"input_ids": torch.arange(6).view(2, 3), "labels": torch.arange(6).view(2, 3)}


def order(build: Callable[[], nn.Module]) -> str:
    """Return the events of backward: "begin" and "end" of all-reduces, "product" for a deferred weight gradient."""
    model, events = split(build()), []
    model(**IDS).loss.backward()
    expected = {name: parameter.grad.clone() for name, parameter in model.named_parameters()}
    model.zero_grad()
    begin, compute = split_layers.begin_all_reduce, deferred_linear.weight_gradient

    def note(event: str, result: Any) -> Any:
        events.append(event)
        return result

    def begun(*args: Any, **kwargs: Any) -> Any:
        return note("begin", begin(*args, **kwargs)).finished_by(lambda total: note("end", total))

    def computed(*args: Any, **kwargs: Any) -> Any:
        return note("product", compute(*args, **kwargs))

    with (
        patch.object(deferred_linear, "weight_gradient", computed),
        patch.object(split_layers, "begin_all_reduce", begun),
    ):
        model(**IDS).loss.backward()
    for name, parameter in model.named_parameters():
        torch.testing.assert_close(parameter.grad, expected[name], rtol=1e-6, atol=1e-7)
    return " ".join(events)


def one(products: int) -> str:
    return " ".join(["begin", *["product"] * products, "end"])


# From the last layer to the first: head, MLP, (cross-attention, with two inputs,) attention. The encoder's states
# enter once, in the first layer of the decoder.
LLAMA = (one(1), one(2), one(3))
LATER_LAYER = (one(1), one(3), one(3))
FIRST_LAYER = (one(1), "begin", "begin", *["product"] * 3, "end", "end", one(3))
T5 = (one(1), *LATER_LAYER, *LATER_LAYER, *FIRST_LAYER, one(1), one(3))


@pytest.mark.parametrize(("build", "expected"), [(llama, LLAMA), (t5, T5)])
def test_products_run_between_beginning_and_end_of_the_sum(
    pool: Pool, build: Callable[[], nn.Module], expected: tuple[str, ...]
) -> None:
    assert pool.run(2, order, build) == [" ".join(expected)] * 2


def sums_with_recomputation() -> int:
    """Count all-reduces of gradients with the shape of the encoder's states."""
    model = split(t5())
    every = PipelineGradientCheckpointConfig(gradient_checkpointing_ratio=1.0)
    checkpoint_layers({0: recomputable_layers(model)}, every)
    batch = {"input_ids": torch.arange(10).view(2, 5), "labels": IDS["labels"]}
    with patch.object(split_layers, "begin_all_reduce", wraps=split_layers.begin_all_reduce) as begun:
        model(**batch, use_cache=False).loss.backward()
    return [call.args[0].shape for call in begun.call_args_list].count((2, 5, 32))


def test_the_gradient_of_the_encoders_states_is_summed_once_for_all_layers_of_the_decoder(pool: Pool) -> None:
    assert pool.run(2, sums_with_recomputation) == [3, 3]  # two more are of the encoder's attention and MLP


def ask_for_inputs_first(call: str) -> None:
    model = llama()
    embeds, labels = torch.randn(2, 3, 32, requires_grad=True), IDS["labels"]
    parallel = split(deepcopy(model))
    model(inputs_embeds=embeds, labels=labels).loss.backward()
    loss = parallel(inputs_embeds=embeds, labels=labels).loss
    for _ in range(2):
        if call == "grad":
            torch.autograd.grad(loss, embeds, retain_graph=True)
        else:
            loss.backward(inputs=[embeds], retain_graph=True)
    loss.backward(retain_graph=True)
    loss.backward()
    for (name, parameter), reference in zip(parallel.named_parameters(), model.parameters(), strict=True):
        if reference.grad is not None:  # None for the embedding
            placement, expected = shard_on(parameter, "tp"), 2 * reference.grad
            expected = expected if placement is None else placement.local(expected, dist.get_rank())
            torch.testing.assert_close(parameter.grad, expected, rtol=1e-5, atol=1e-6, msg=name)


@pytest.mark.parametrize("call", ["grad", "backward of inputs"])
def test_asking_for_gradients_of_inputs_first_adds_nothing_to_those_of_weights(pool: Pool, call: str) -> None:
    pool.run(2, ask_for_inputs_first, call)


def go_backward_otherwise() -> None:
    """Gradients of gradients are refused; backward works under autocast."""
    model = llama()
    parallel = split(deepcopy(model))
    with torch.autocast("cpu", dtype=torch.bfloat16):
        expected, parallel_loss = model(**IDS).loss, parallel(**IDS).loss
    parallel_loss.backward()
    torch.testing.assert_close(parallel_loss, expected, rtol=1e-2, atol=1e-2)
    assert all(parameter.grad is not None for parameter in parallel.parameters())
    parallel.set_attn_implementation("eager")
    embeds = torch.randn(2, 3, 32, requires_grad=True)
    loss = parallel(inputs_embeds=embeds, labels=IDS["labels"]).loss
    (gradient,) = torch.autograd.grad(loss, embeds, create_graph=True)
    with pytest.raises(RuntimeError, match="once_differentiable"):
        gradient.square().sum().backward()


def test_other_backwards_work_or_are_refused(pool: Pool) -> None:
    pool.run(2, go_backward_otherwise)


class Attention(nn.Module):
    def forward(self, hidden_states: Tensor, attention_mask: Tensor | None = None) -> Tensor:
        return hidden_states


def test_the_first_input_of_the_signature_enters_however_it_is_given() -> None:
    hidden, mask = torch.ones(2, requires_grad=True), torch.zeros(2)
    entered: list[Tensor] = []
    group: Any = None
    module = region.Region.from_native_module(Attention(), group)
    with patch.object(region, "enter", lambda xs, *_: (entered.extend(xs), xs)[1]):
        module(attention_mask=mask, hidden_states=hidden)
        module(hidden, attention_mask=mask)
    assert [x is hidden for x in entered] == [True, True]


def test_a_second_input_enters_once_and_again_where_it_was_written_to() -> None:
    common, sizes = region.CommonInput(), []

    def enter(xs: Any) -> list[Tensor]:
        sizes.append(len(xs))
        return [x.view_as(x) for x in xs]

    leaf = torch.ones(2, requires_grad=True)
    x, states = leaf * 2, leaf * 3
    entered = common.enter([x, states], enter)[1]
    assert common.enter([x, states], enter)[1] is entered
    states.add_(1)
    assert common.enter([x, states], enter)[1] is not entered
    with torch.no_grad():
        common.enter([x, states], enter)
    assert sizes == [2, 1, 2, 2]
