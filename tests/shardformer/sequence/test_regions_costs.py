"""Messages and memory of sequences sharded between regions, and the products computed while messages are in flight."""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any
from unittest.mock import patch

import pytest
import torch.distributed as dist
from torch import Tensor, nn
from torch.autograd.graph import saved_tensors_hooks
from torch.utils._python_dispatch import TorchDispatchMode

from echelon.cluster import collectives
from echelon.cluster.mesh import ParallelMesh
from echelon.cluster.traffic import Traffic

from ...pool import Pool
from ..compare import numbers
from .layers import BATCH, HIDDEN, built, inputs_of, sequence_sharded, world_sequence

LENGTH = 24  # divides by the ranks of all tests here
WHOLE = BATCH * LENGTH * HIDDEN * 4  # bytes of the hidden states of a whole sequence
# Whole sequences that a rank sends, by style, as the factor of (T-1)/T: each of two regions has an entry and an end,
# forward and backward; an all-reduce sends as much as a gather and a reduce-scatter.
SENT = {None: 8, "gather": 8, "regather": 10}


def made(name: str, style: Any, *, overlap: bool = False) -> tuple[nn.Module, Tensor, dict[str, Any]]:
    """A layer that is sequence-sharded (of no style: only split), and what it is called with."""
    layer_of = built(name)
    sequence = None if style is None else world_sequence(style, overlap=overlap)
    layer, x = sequence_sharded(layer_of, sequence), numbers(BATCH, LENGTH, HIDDEN)
    if sequence is not None:
        sequence.axis.length = LENGTH
        x = sequence.axis.own(x, 1)
    return layer, x.requires_grad_(), inputs_of(name, layer_of[2], LENGTH)


def sent(name: str, style: Any, overlap: bool) -> float:
    """Bytes that this rank sends for one forward and backward."""
    layer, x, inputs = made(name, style, overlap=overlap)
    layer(x, **inputs).sum().backward()  # what processes ask each other once comes first
    with Traffic(ParallelMesh(tp=dist.get_world_size())) as traffic:
        layer(x, **inputs).sum().backward()
    return sum(count.sent for count in traffic.counts.values())


@pytest.mark.parametrize("name", ["llama", pytest.param("bert", marks=pytest.mark.slow)])
@pytest.mark.parametrize("ranks", [2, *(pytest.param(each, marks=pytest.mark.slow) for each in (3, 4))])
def test_a_layer_sends_as_much_with_spread_sequences_as_without(pool: Pool, ranks: int, name: str) -> None:
    for style, factor in SENT.items():
        for overlap in (False, True):
            expected = factor * WHOLE * (ranks - 1) / ranks
            for found in pool.run(ranks, sent, name, style, overlap):
                assert found == pytest.approx(expected), (style, overlap)


def kept(style: Any) -> tuple[int, int]:
    """Bytes that autograd keeps of a llama layer between its regions, and inside of them."""
    layer, x, inputs = made("llama", style)
    own = {parameter.untyped_storage().data_ptr() for parameter in layer.parameters()}
    given = {x, inputs["attention_mask"], *inputs["position_embeddings"]}
    own |= {tensor.untyped_storage().data_ptr() for tensor in given - {x}}
    storages: dict[bool, dict[int, Tensor]] = {False: {}, True: {}}
    inside = False

    def turn(is_inside: bool) -> None:
        nonlocal inside
        inside = is_inside

    def pack(tensor: Tensor) -> Tensor:
        storages[inside][tensor.untyped_storage().data_ptr()] = tensor
        return tensor

    for path in ("self_attn", "mlp"):
        region = layer.get_submodule(path)
        region.register_forward_pre_hook(lambda module, args: turn(True), prepend=True)
        region.register_forward_hook(lambda module, args, output: turn(False))
    with saved_tensors_hooks(pack, lambda tensor: tensor):
        output = layer(x, **inputs)
    del output
    between = {key: each for key, each in storages[False].items() if key not in own}
    within = {key: each for key, each in storages[True].items() if key not in own | between.keys()}
    return tuple(  # type: ignore[return-value]
        sum(each.untyped_storage().nbytes() for each in found.values()) for found in (between, within)
    )


@pytest.mark.parametrize("ranks", [2, pytest.param(4, marks=pytest.mark.slow)])
def test_between_regions_a_rank_keeps_its_part_alone_and_regathering_keeps_no_whole_input(
    pool: Pool, ranks: int
) -> None:
    plain, gathered, regathered = (
        set(pool.run(ranks, kept, style)) for style in (None, "gather", "regather")
    )
    ((plain_between, plain_within),) = plain
    ((between, within),) = gathered
    assert between * ranks == plain_between
    assert within == plain_within
    assert regathered == {(between, within - 2 * (WHOLE - WHOLE // ranks))}


_NAMES = {
    "_allgather_base_": "gather",
    "_reduce_scatter_base_": "sum",
    "mm": "mm",
    "addmm": "mm",
}


class Log(TorchDispatchMode):
    """The calls in their order: "mm" for products, else names of communication and "wait" for its end."""

    def __init__(self) -> None:
        super().__init__()
        self.events: list[str] = []
        self._wait = collectives.InFlight.wait

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if (name := _NAMES.get(func._schema.name.split("::")[1])) is not None:
            self.events.append(name)
        return func(*args, **(kwargs or {}))

    def wait(self, in_flight: collectives.InFlight) -> Tensor:
        if in_flight.handle is not None:
            self.events.append("wait")
        return self._wait(in_flight)


@contextmanager
def logged() -> Iterator[Log]:
    """Log what happens inside."""
    with (
        Log() as log,
        patch.object(collectives.InFlight, "wait", lambda in_flight: log.wait(in_flight)),
    ):
        yield log


def order(style: Any, overlap: bool) -> tuple[list[str], list[str]]:
    """The events of a llama layer's MLP, in forward and in backward."""
    layer, x, _ = made("llama", style, overlap=overlap)
    mlp = layer.get_submodule("mlp")
    with logged() as log:
        output = mlp(x)
    with logged() as backward_log:
        output.sum().backward()
    return log.events, backward_log.events


# Backward, from the end: the gradient of the output and two products with it (of the input, of the weight); then the
# input gradients of gate and up, the sum of both under way beside the products of the two weights.
PRODUCTS = ["mm", "mm"]
FORWARD = ["gather", "wait", "mm", "mm", "mm", "sum", "wait"]
BACKWARD = {
    ("gather", False): ["gather", "wait", "mm", "mm", *PRODUCTS, "sum", *PRODUCTS, "wait"],
    ("gather", True): ["gather", "mm", "wait", "mm", "mm", "mm", *PRODUCTS, "sum", *PRODUCTS, "wait"],
    ("regather", False): [
        "gather",
        "wait",
        "mm",
        "mm",
        *PRODUCTS,
        "sum",
        "gather",
        "wait",
        *PRODUCTS,
        "wait",
    ],
    ("regather", True): [
        *("gather", "mm", "wait", "mm", "mm", "mm"),
        *("gather", *PRODUCTS, "sum", "wait", *PRODUCTS, "wait"),
    ],
}


@pytest.mark.parametrize(("style", "overlap"), BACKWARD)
def test_products_are_computed_while_something_is_under_way(pool: Pool, style: Any, overlap: bool) -> None:
    for forward, backward in pool.run(2, order, style, overlap):
        assert forward == FORWARD
        assert backward == BACKWARD[style, overlap]
