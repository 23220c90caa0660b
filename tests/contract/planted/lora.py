"""Faults in LoRA's adapters under tensor parallelism."""

from collections.abc import Callable
from functools import partial
from typing import Any

from echelon.cluster.placement import Replicated
from echelon.verify.layout_choice import Layout

from ...booster.adapters import GPT2, LLAMA
from ..mutations import around, fault, returning

TP2 = Layout(tp=2)
LORA = "shardformer.layers.lora"


def unsummed(split_inputs: Callable[..., None], module: Any, base: Any, group: Any) -> None:
    """Leave the product of A and a local part of its inputs unsummed."""
    split_inputs(module, base, group)
    for layer in module.lora_A.values():
        layer._summed_product = partial(layer._product, bias=None)


# fmt: off
FAULTS = {
    "the gradient of A is partial": fault(f"{LORA}:PartialGrad", Replicated, LLAMA, TP2),
    "partial products of A are not summed": fault(f"{LORA}:_split_inputs", around(unsummed), LLAMA, TP2),
    "rows of B are sharded as one block": fault(f"{LORA}:_cut_arguments", returning({}), GPT2, TP2),
}
# fmt: on
