"""Weight gradients that are held back. Whole steps with them are test_runner.py."""

import pytest
import torch
from torch import Tensor, nn
from transformers.pytorch_utils import Conv1D

from echelon.shardformer.layers.weight_gradient import defer_weight_gradients

# B batch, S sequence
PLACE = (0, 0)


def make_model() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(
        nn.Linear(5, 7), nn.LayerNorm(7), Conv1D(6, 7), nn.Tanh(), nn.Linear(6, 3, bias=False)
    )


def loss_of(model: nn.Module, x: Tensor) -> Tensor:
    return model(x).square().mean()


@pytest.mark.parametrize("shape", [(4, 5), (2, 3, 5), (5,)])
def test_held_gradients_are_those_of_a_whole_backward_to_the_bit(shape: tuple[int, ...]) -> None:
    model, expected = make_model(), make_model()
    x, other_x = (torch.randn(shape, generator=torch.Generator().manual_seed(1)) for _ in range(2))
    store = defer_weight_gradients(model)
    for _ in range(2):
        loss_of(expected, other_x.requires_grad_()).backward()
        with store.deferring(PLACE):
            loss_of(model, x.requires_grad_()).backward()
        assert torch.equal(x.grad, other_x.grad)
        store.compute(PLACE)
    for (name, own), other in zip(model.named_parameters(), expected.parameters(), strict=True):
        assert torch.equal(own.grad, other.grad), name


def test_only_the_weights_of_linear_layers_wait() -> None:
    model = make_model()
    store = defer_weight_gradients(model)
    with store.deferring(PLACE):
        loss_of(model, torch.ones(2, 5)).backward()
    waiting = {name for name, parameter in model.named_parameters() if parameter.grad is None}
    assert waiting == {"0.weight", "2.weight", "4.weight"}
    store.compute(PLACE)
    assert all(parameter.grad is not None for parameter in model.parameters())


def test_what_follows_may_write_in_place() -> None:
    """As the ReLU of SwinV2's position bias does."""
    gradients = []
    for is_held in (False, True):
        torch.manual_seed(0)
        model = nn.Sequential(nn.Linear(5, 7), nn.ReLU(inplace=True), nn.Linear(7, 3))
        if is_held:
            store = defer_weight_gradients(model)
            with store.deferring(PLACE):
                loss_of(model, torch.ones(4, 2, 5)).backward()
            store.compute(PLACE)
        else:
            loss_of(model, torch.ones(4, 2, 5)).backward()
        gradients.append([parameter.grad for parameter in model.parameters()])
    assert all(torch.equal(*pair) for pair in zip(*gradients, strict=True))


def test_places_do_not_mix() -> None:
    model, expected = make_model(), make_model()
    store = defer_weight_gradients(model)
    for microbatch in range(2):
        with store.deferring((0, microbatch)):
            loss_of(model, torch.full((2, 5), microbatch + 1.0)).backward()
    store.compute((0, 1))
    loss_of(expected, torch.full((2, 5), 2.0)).backward()
    assert torch.equal(model[0].weight.grad, expected[0].weight.grad)


def test_a_backward_outside_holds_nothing_back() -> None:
    model = make_model()
    defer_weight_gradients(model)
    loss_of(model, torch.ones(2, 5)).backward()
    assert all(parameter.grad is not None for parameter in model.parameters())


def test_a_user_s_hooks_see_every_gradient_once() -> None:
    model = make_model()
    seen: list[str] = []

    def halve(gradient: Tensor) -> Tensor:
        seen.append("hook")
        return gradient / 2

    model[0].weight.register_hook(halve)
    model[4].weight.register_post_accumulate_grad_hook(lambda p: seen.append(str(p.grad is not None)))
    store = defer_weight_gradients(model)
    with store.deferring(PLACE):
        loss_of(model, torch.ones(2, 5)).backward()
    store.compute(PLACE)
    assert sorted(seen) == ["True", "hook"]
    expected = make_model()
    loss_of(expected, torch.ones(2, 5)).backward()
    assert torch.equal(model[0].weight.grad, expected[0].weight.grad / 2)


def test_a_subclass_of_a_linear_layer_is_left_alone() -> None:
    class Doubling(nn.Linear):
        def forward(self, x: Tensor) -> Tensor:
            return 2 * super().forward(x)

    layer = Doubling(3, 3)
    store = defer_weight_gradients(nn.Sequential(layer))
    assert type(layer) is Doubling
    with store.deferring(PLACE):
        layer(torch.ones(1, 3)).sum().backward()
    assert layer.weight.grad is not None


def test_a_frozen_weight_gets_nothing_and_passes_gradients_on() -> None:
    model = make_model()
    model[4].weight.requires_grad_(False)
    store = defer_weight_gradients(model)
    with store.deferring(PLACE):
        loss_of(model, torch.ones(2, 5)).backward()
    store.compute(PLACE)
    assert model[4].weight.grad is None
    assert model[0].weight.grad.abs().sum() > 0


def test_a_weight_that_is_computed_from_others_is_not_held_back() -> None:
    model, expected = make_model(), make_model()
    for each in (model, expected):
        torch.nn.utils.parametrizations.weight_norm(each[0])
    store = defer_weight_gradients(model)
    with store.deferring(PLACE):
        loss_of(model, torch.ones(2, 5)).backward()
    store.compute(PLACE)
    loss_of(expected, torch.ones(2, 5)).backward()
    for own, other in zip(model.parameters(), expected.parameters(), strict=True):
        assert torch.equal(own.grad, other.grad)
