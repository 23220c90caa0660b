"""Weight gradients are computed while the sum of input gradients is under way."""

import copy
from collections.abc import Callable
from unittest.mock import patch

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from transformers import LlamaConfig, LlamaForCausalLM, T5Config, T5ForConditionalGeneration

from echelon.cluster import collectives
from echelon.cluster.placement import Shard, placement_of
from echelon.shardformer import ShardConfig, ShardFormer
from echelon.shardformer.layers import weight_gradient
from echelon.shardformer.layers.weight_gradient import linear

from ..pool import Pool


class Log:
    """The events of backward, in order: "begin" and "end" of sums over ranks, "product" for a weight that waited."""

    def __init__(self) -> None:
        self.events: list[str] = []
        self._begin, self._product = collectives.begin_all_reduce, weight_gradient._Later.backward

    def begin(self, x: Tensor, group: dist.ProcessGroup) -> collectives.InFlight[Tensor]:
        begun = self._begin(x, group)
        self.events.append("begin")

        def logged(total: Tensor) -> Tensor:
            self.events.append("end")
            return total

        return begun.then(logged)

    def product(self, ctx: object, gradient: Tensor | None) -> tuple[Tensor | None, None]:
        self.events.append("product")
        return self._product(ctx, gradient)


def llama() -> nn.Module:
    sizes = {"hidden_size": 16, "intermediate_size": 24, "num_attention_heads": 2, "vocab_size": 64}
    return LlamaForCausalLM(LlamaConfig(**sizes, num_key_value_heads=2, num_hidden_layers=1))


def t5() -> nn.Module:
    sizes = {
        "d_model": 16,
        "d_ff": 24,
        "d_kv": 8,
        "num_heads": 2,
        "vocab_size": 64,
        "num_layers": 1,
        "num_decoder_layers": 3,
        "dropout_rate": 0.0,
    }
    return T5ForConditionalGeneration(T5Config(**sizes, decoder_start_token_id=0, tie_word_embeddings=False))


def one(products: int) -> list[str]:
    return ["begin", *["product"] * products, "end"]


# From the last layer to the first: head, MLP, (cross-attention, which two tensors enter,) attention. The encoder's
# states enter in the first layer of the decoder, for all of them.
LLAMA = [*one(1), *one(2), *one(3)]
LATER_LAYER = [*one(1), *one(3), *one(3)]
FIRST_LAYER = [*one(1), "begin", "begin", *["product"] * 3, "end", "end", *one(3)]
DECODER = [*one(1), *LATER_LAYER, *LATER_LAYER, *FIRST_LAYER]
ENCODER = [*one(1), *one(3)]


@pytest.mark.parametrize("build, expected", [(llama, LLAMA), (t5, [*DECODER, *ENCODER])], ids=["llama", "t5"])
def test_products_run_between_beginning_and_end_of_the_sum(
    pool: Pool, build: Callable[[], nn.Module], expected: list[str]
) -> None:
    assert pool.run(2, check_order, build) == [expected] * 2


def check_order(build: Callable[[], nn.Module]) -> list[str]:
    torch.manual_seed(1)
    model = build()
    config = ShardConfig(tensor_parallel_process_group=dist.group.WORLD)
    model, _ = ShardFormer(config).optimize(model)
    ids = torch.arange(6).view(2, 3)
    model(input_ids=ids, labels=ids).loss.backward()
    expected = {name: each.grad.clone() for name, each in model.named_parameters()}
    model.zero_grad()
    log = Log()
    with patch.object(weight_gradient._Later, "backward", staticmethod(log.product)):
        loss = model(input_ids=ids, labels=ids).loss
        with patch.object(collectives, "begin_all_reduce", log.begin):
            loss.backward()
    for name, parameter in model.named_parameters():
        torch.testing.assert_close(parameter.grad, expected[name], rtol=1e-6, atol=1e-7)
    return log.events


@pytest.mark.parametrize("call", ["grad", "backward of inputs"])
def test_asking_for_gradients_of_inputs_first_adds_nothing_to_those_of_weights(pool: Pool, call: str) -> None:
    pool.run(2, check_inputs_first, call)


def check_inputs_first(call: str) -> None:
    torch.manual_seed(1)
    model = llama()
    embeds, labels = torch.randn(2, 3, 16, requires_grad=True), torch.arange(6).view(2, 3)
    whole = copy.deepcopy(model)
    whole(inputs_embeds=embeds, labels=labels).loss.backward()
    config = ShardConfig(tensor_parallel_process_group=dist.group.WORLD)
    model, _ = ShardFormer(config).optimize(model)
    loss = model(inputs_embeds=embeds, labels=labels).loss
    for _ in range(2):
        if call == "grad":
            torch.autograd.grad(loss, embeds, retain_graph=True)
        else:
            loss.backward(inputs=[embeds], retain_graph=True)
    loss.backward(retain_graph=True)
    loss.backward()
    expected = dict(whole.named_parameters())
    for name, parameter in model.named_parameters():
        placement = placement_of(parameter)
        if (own := expected[name].grad) is None:  # the embedding
            continue
        own = 2 * own
        if isinstance(placement, Shard):
            own = placement.local(own, dist.get_rank())
        torch.testing.assert_close(parameter.grad, own, rtol=1e-5, atol=1e-6)


def test_gradients_of_gradients_are_refused(pool: Pool) -> None:
    pool.run(2, check_double_backward)


def check_double_backward() -> None:
    model = ShardFormer(ShardConfig(tensor_parallel_process_group=dist.group.WORLD)).optimize(llama())[0]
    model.set_attn_implementation("eager")
    embeds = torch.randn(2, 3, 16, requires_grad=True)
    loss = model(inputs_embeds=embeds, labels=torch.arange(6).view(2, 3)).loss
    (gradient,) = torch.autograd.grad(loss, embeds, create_graph=True)
    with pytest.raises(RuntimeError, match="once_differentiable"):
        gradient.square().sum().backward()


def test_autocast_goes_backward_as_ever(pool: Pool) -> None:
    pool.run(2, check_autocast)


def check_autocast() -> None:
    torch.manual_seed(1)
    model = llama()
    ids = torch.arange(6).view(2, 3)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        expected = copy.deepcopy(model)(input_ids=ids, labels=ids).loss
        model = ShardFormer(ShardConfig(tensor_parallel_process_group=dist.group.WORLD)).optimize(model)[0]
        loss = model(input_ids=ids, labels=ids).loss
    loss.backward()
    torch.testing.assert_close(loss, expected, rtol=1e-2, atol=1e-2)
    assert all(parameter.grad is not None for parameter in model.parameters())


def test_a_weight_that_two_calls_use_and_one_that_none_does(pool: Pool) -> None:
    pool.run(2, check_uses)


def check_uses() -> None:
    """The second call of a layer in one region is not announced, and its product is added all the same."""
    weight = nn.Parameter(torch.randn(3, 2))
    x, y = torch.randn(2, 4, 2).unbind(0)
    later = weight_gradient.LaterProduct(weight)
    unused = weight_gradient.LaterProduct(nn.Parameter(torch.randn(3, 2)))
    first = linear(x, weight, None, later=later)
    second = linear(y, weight, None)
    (first.square().sum() + second.square().sum()).backward()
    expected = torch.autograd.grad(
        sum(nn.functional.linear(each, weight).square().sum() for each in (x, y)), [weight]
    )
    torch.testing.assert_close(weight.grad, expected[0])
    assert not unused.deferred
