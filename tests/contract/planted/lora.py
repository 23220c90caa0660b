"""Faults in LoRA's adapters under tensor parallelism."""

from collections.abc import Callable
from functools import partial
from typing import Any

from torch import nn

from echelon.verify.layout import Layout

from ...booster.adapters import GPT2, LLAMA
from ..mutations import Mutation

TP2 = Layout(tp=2)
LORA = "echelon.shardformer.layers.lora"


def unplaced(parameter: nn.Parameter, placement: Any, rank: int) -> None:
    """A gradient that is a part of a sum is left so."""


def unsummed(split_inputs: Callable[..., None]) -> Callable[..., None]:
    """The product of A and a part of its inputs stays that."""

    def split(module: Any, base: Any, group: Any) -> None:
        split_inputs(module, base, group)
        for layer in module.lora_A.values():
            layer._summed_product = partial(layer._product, bias=None)

    return split


def one_block(shard: Any) -> dict[str, Any]:
    return {}


FAULTS = {
    "the gradient of A is a rank's own": Mutation(
        target=f"{LORA}:place", replacement=unplaced, row=(LLAMA, TP2)
    ),
    "products of A with a part are not summed": Mutation(
        target=f"{LORA}:_split_inputs", wrapper=unsummed, row=(LLAMA, TP2)
    ),
    "rows of B are cut as one block": Mutation(
        target=f"{LORA}:_sizes", replacement=one_block, row=(GPT2, TP2)
    ),
}
