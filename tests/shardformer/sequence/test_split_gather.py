"""Sequences sharded between regions: communication, memory, overlap and dropout. tests/contract compares training."""

from collections.abc import Callable
from copy import deepcopy
from typing import Any
from unittest.mock import patch

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.autograd.graph import saved_tensors_hooks
from torch.utils._python_dispatch import TorchDispatchMode

from echelon.cluster import collectives
from echelon.cluster.mesh import ParallelMesh
from echelon.cluster.traffic import Traffic
from echelon.shardformer.layers.deferred_linear import Regather
from echelon.shardformer.layers.sequence_axis import CommonRandom, ShardRandom

from ...pool import Pool
from ...slow import slow
from ..compare import (
    build,
    pieces,
    recompute_layers,
    require_equal,
    require_equal_on_ranks,
    require_same_training,
    split,
    text,
)

BATCH, LENGTH, HIDDEN = 2, 24, 32
SEQUENCE_BYTES = BATCH * LENGTH * HIDDEN * 4  # bytes of the hidden states of a full sequence
GATHER = {"enable_sequence_parallelism": True, "sequence_parallelism_mode": "split_gather"}
REGATHER = {**GATHER, "enable_sequence_regather": True}
OVERLAP = {"enable_sequence_overlap": True}


def ids() -> Tensor:
    return torch.randint(3, 100, (BATCH, LENGTH), generator=torch.Generator().manual_seed(1))


def llama(style: dict[str, Any], *, layers: int = 1) -> nn.Module:
    return split(build("LlamaForCausalLM", num_hidden_layers=layers, use_cache=False), **style)


def doubled(layer: nn.Module) -> None:
    """Let the first layer of the MLP get another tensor than the region's input."""
    layer.mlp.gate_proj.register_forward_pre_hook(lambda module, args: (2 * args[0],))


def written(layer: nn.Module) -> None:
    """Let the region change its input in place."""
    layer.mlp.gate_proj.register_forward_pre_hook(lambda module, args: (args[0].mul_(2),))


def change_what_entered(is_stale: bool) -> None:
    with patch.object(Regather, "is_of", (lambda self, x: True) if is_stale else Regather.is_of):
        for change in (doubled, written):
            model = build("LlamaForCausalLM")
            copied = split(deepcopy(model), **REGATHER)
            for module in (model, copied):
                change(module.model.layers[0])
            batch = {**text(), "labels": text()["input_ids"]}
            model(**batch).loss.backward()
            copied(**batch).loss.backward()
            expected, gradient = (
                module.get_parameter("model.layers.0.mlp.gate_proj.weight").grad for module in (model, copied)
            )
            torch.testing.assert_close(gradient, expected.chunk(2)[dist.get_rank()], rtol=1e-4, atol=1e-6)


@pytest.mark.parametrize("is_stale", [False, True])
def test_a_region_may_change_what_entered_it_before_it_multiplies(pool: Pool, is_stale: bool) -> None:
    if not is_stale:
        pool.run(2, change_what_entered, False)
        return
    with pytest.raises(AssertionError):  # a layer mistakes any tensor for the region's input
        pool.run(2, change_what_entered, True)


def layers_of_other_kinds() -> None:
    """Test a layer that flattens samples, and one with experts."""
    opt = {"dropout": 0.0, "ffn_dim": 48, "word_embed_proj_dim": HIDDEN}
    for name, settings, style in (
        ("OPTForCausalLM", opt, GATHER),
        ("MixtralForCausalLM", {"num_key_value_heads": 2}, REGATHER | OVERLAP),
    ):
        model = build(name, **settings)
        require_same_training(model, {**text(), "labels": text()["input_ids"]}, **style)


def test_layers_that_flatten_or_have_experts_train_like_one_process(pool: Pool) -> None:
    pool.run(2, layers_of_other_kinds)


def of_a_layer(measure: Callable[[nn.Module], float], style: dict[str, Any]) -> float:
    """Return the difference that one more layer makes."""
    one, two = (measure(llama(style, layers=count)) for count in (1, 2))
    return two - one


def bytes_sent(model: nn.Module) -> float:
    model(ids(), labels=ids()).loss.backward()  # the first call has one-time communication
    with Traffic(ParallelMesh(tp=dist.get_world_size())) as traffic:
        model(ids(), labels=ids()).loss.backward()
    return sum(count.sent for count in traffic.counts.values())


def bytes_kept(model: nn.Module) -> float:
    kept: dict[int, Tensor] = {}

    def pack(tensor: Tensor) -> Tensor:
        kept[tensor.untyped_storage().data_ptr()] = tensor
        return tensor

    weight_storages = {parameter.untyped_storage().data_ptr() for parameter in model.parameters()}
    with saved_tensors_hooks(pack, lambda tensor: tensor):
        loss = model(ids(), labels=ids()).loss
    del loss
    return sum(kept[storage].untyped_storage().nbytes() for storage in kept.keys() - weight_storages)


@pytest.mark.parametrize("ranks", [2, *slow(4)])
def test_a_layer_sends_as_much_with_sharded_sequences_as_without(pool: Pool, ranks: int) -> None:
    # Unsharded sequences: two regions, each with an entry and an end, forward and backward. An all-reduce sends as
    # much as an all-gather and a reduce-scatter.
    counts = [({}, 8), (GATHER, 8), (GATHER | OVERLAP, 8), (REGATHER, 10), (REGATHER | OVERLAP, 10)]
    for style, count in counts:
        expected = count * SEQUENCE_BYTES * (ranks - 1) / ranks
        assert pool.run(ranks, of_a_layer, bytes_sent, style) == [expected] * ranks


@pytest.mark.parametrize("ranks", [2, *slow(4)])
def test_a_layer_saves_shards_between_regions_and_with_regathering_no_full_input(
    pool: Pool, ranks: int
) -> None:
    plain, gathered, regathered = (
        set(pool.run(ranks, of_a_layer, bytes_kept, style)) for style in ({}, GATHER, REGATHER)
    )
    others = SEQUENCE_BYTES - SEQUENCE_BYTES // ranks
    assert {num_bytes - 2 * others for num_bytes in gathered} == regathered  # for two regions
    ((most,), (less,)) = plain, gathered
    assert most - less >= 4 * others  # norms keep their inputs and outputs


_NAMES = {"_allgather_base_": "gather", "_reduce_scatter_base_": "sum", "mm": "mm", "addmm": "mm"}


class Log(TorchDispatchMode):
    """Record calls in order: "mm" for products, else names of communication and "wait" for its end."""

    def __init__(self) -> None:
        super().__init__()
        self.events: list[str] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if (name := _NAMES.get(func._schema.name.split("::")[1])) is not None:
            self.events.append(name)
        return func(*args, **(kwargs or {}))


def order(style: dict[str, Any]) -> tuple[str, str]:
    """Return the events of an MLP, in forward and in backward."""
    model = llama(style)
    mlp = model.model.layers[0].mlp
    inputs: list[Tensor] = []
    mlp.register_forward_pre_hook(lambda module, args: inputs.append(args[0]), prepend=True)
    model(ids())
    shard = inputs[0].detach().requires_grad_()
    wait, log = collectives.InFlight.wait, Log()

    def logged(in_flight: Any) -> Any:
        if in_flight.handle is not None:
            log.events.append("wait")
        return wait(in_flight)

    with log, patch.object(collectives.InFlight, "wait", logged):
        output = mlp(shard)
        num_forward = len(log.events)
        output.sum().backward()
    return " ".join(log.events[:num_forward]), " ".join(log.events[num_forward:])


# Backward, from the end: the gradient of the output and its two products (for the input and the weight); then the
# input gradients of gate and up, whose sum is in flight during the products of the two weights.
BACKWARD = [
    (GATHER, "gather wait mm mm mm mm sum mm mm wait"),
    (GATHER | OVERLAP, "gather mm wait mm mm mm mm mm sum mm mm wait"),
    (REGATHER, "gather wait mm mm mm mm sum gather wait mm mm wait"),
    (REGATHER | OVERLAP, "gather mm wait mm mm mm gather mm mm sum wait mm mm wait"),
]


@pytest.mark.parametrize(("style", "expected"), BACKWARD)
def test_products_are_computed_while_something_is_in_flight(
    pool: Pool, style: dict[str, Any], expected: str
) -> None:
    assert pool.run(2, order, style) == [("gather wait mm mm mm sum wait", expected)] * 2


# Dropout.


class SampleDropPath(nn.Module):
    """Drop entire samples; models use this suffix for such modules."""

    def __init__(self) -> None:
        super().__init__()
        self.drop_prob = 0.5

    def forward(self, x: Tensor) -> Tensor:
        return x * torch.bernoulli(torch.full((x.shape[0], 1, 1), 1 - self.drop_prob))


def drop(break_it: Any = None) -> None:
    """Dropped entries differ between ranks, dropped samples do not, and recomputation drops the same of both."""
    with patch.object(break_it or Log, "from_native_module", lambda module, group, **_: module, create=True):
        runs = []
        for is_recomputed in (False, True):
            model = build("BertForMaskedLM", hidden_dropout_prob=0.5, num_hidden_layers=1)
            model.bert.encoder.layer[0].output.dropout = SampleDropPath()
            model = split(model, **GATHER)
            layer, masks = model.bert.encoder.layer[0], []
            for path in ("attention.output.dropout", "output.dropout"):
                layer.get_submodule(path).register_forward_hook(
                    lambda module, args, output, masks=masks: masks.append((output != 0).to(torch.uint8))
                )
            if is_recomputed:
                recompute_layers(model, {"use_reentrant": False})
            torch.manual_seed(7)
            for _ in range(4):
                model(ids(), labels=ids()).loss.backward()
            runs.append([parameter.grad for parameter in model.parameters()])
            for entries, samples in zip(masks[::2], masks[1::2], strict=True):
                assert not torch.equal(*pieces(entries)), "both ranks dropped the same"
                require_equal_on_ranks(samples.amax((1, 2)).float(), "which samples are left")
            require_equal_on_ranks(torch.rand(8), "what is drawn afterwards")
        require_equal(*runs)


def test_ranks_drop_different_entries_and_equal_samples(pool: Pool) -> None:
    pool.run(2, drop)


@pytest.mark.parametrize("target", [ShardRandom, CommonRandom])
def test_a_random_state_that_is_not_switched_is_found(pool: Pool, target: Any) -> None:
    with pytest.raises(AssertionError):
        pool.run(2, drop, target)
