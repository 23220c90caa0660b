"""Faults in the dry run: constraints that nobody enforces, and a plan that changes the model."""

from collections.abc import Callable
from typing import Any

from torch import Tensor, nn
from transformers import PretrainedConfig

from echelon.shardformer import policy_for
from echelon.shardformer.sequence.config import SequenceParallelism
from echelon.shardformer.sharder import split_errors

from ...shardformer.compare import build
from ...shardformer.test_refusals import ROWS, departure
from ...shardformer.test_shard_model import QWEN3, train
from ..mutations import Mutation

SPLIT = "echelon.shardformer.layer_split"


def nothing(*args: Any, **kwargs: Any) -> None:
    """Enforce nothing."""


def no_errors(*args: Any) -> list[str]:
    return []


def as_it_is(tensor: Tensor) -> Tensor:
    return tensor


def shared(value: Any, configs: dict[int, Any]) -> Any:
    return value


def sharing_configs(own: Callable[..., Any]) -> Callable[..., Any]:
    return lambda value, configs: value if isinstance(value, PretrainedConfig) else own(value, configs)


def refused(name: str) -> str | None:
    """Return the departure from a row of refusals; None where the model is refused as the row says."""
    return departure(ROWS[name])


def one(*args: Any) -> int:
    return 1


def in_parts() -> str | None:
    """Return what departs where two ranks hold different pieces."""
    return train("Qwen3ForCausalLM", 2, 1, QWEN3, "sizes")


def in_replicas() -> str | None:
    """Return what departs where two ranks hold equal pieces."""
    return train("LlamaForCausalLM", 1, 2, {}, "sizes")


def unchanged() -> str | None:
    """Return the first tensor, hook or setting that a dry run changed."""
    model = build("LlamaForCausalLM")
    before = _state(model)
    sequence = SequenceParallelism(mode="ring_attn")
    split_errors(model, policy_for(model), tp_size=2, sp_size=2, sequence=sequence)
    after = _state(model)
    return next((name for name, each in before.items() if after[name] != each), None)


def _state(model: nn.Module) -> dict[str, Any]:
    hooks = {path: len(module._forward_pre_hooks) for path, module in model.named_modules()}
    shapes = {name: each.shape for name, each in model.named_parameters()}
    return {**shapes, **hooks, "attention": model.config._attn_implementation}


def _row(target: str, name: str, replacement: Any = no_errors, *, quick: bool = False) -> Mutation:
    return Mutation(
        target=target, replacement=replacement, check=refused, args=(name,), num_ranks=1, quick=quick
    )


FAULTS = {
    "ties are not looked for": _row(
        "echelon.shardformer.sharder:_report_ties", "a second head", nothing, quick=True
    ),
    "whole parameters among split ones are let be": _row(f"{SPLIT}:LayerSplit._unnamed", "whole among split"),
    "names that match nothing are passed over": _row(f"{SPLIT}:LayerSplit._missing", "a module is missing"),
    "inputs are not looked at": _row(f"{SPLIT}:LayerSplit._require_input", "another second input", nothing),
    "counts need not be divisible": _row(f"{SPLIT}:require_divisible", "heads of a part", nothing),
    "kinds of tensors are not told apart": _row(
        "echelon.shardformer.sharder:_meta_tensor", "a special tensor", nn.Parameter
    ),
    "the copy has the model's parameters": Mutation(
        target="echelon.shardformer.sharder:_meta_tensor", replacement=as_it_is, check=unchanged, num_ranks=1
    ),
    "parts of gradients are not summed without a booster": Mutation(
        target="echelon.shardformer.gradients:_num_parts",
        replacement=one,
        check=in_parts,
        notice="^step 1: gradient of ",
    ),
    "replicas do not average without a booster": Mutation(
        target="echelon.shardformer.gradients:DataAverage._average",
        replacement=nothing,
        check=in_replicas,
        notice="^step 1: gradient of ",
    ),
    "the copy has the model's hooks": Mutation(
        target="echelon.shardformer.sharder:_own_value",
        replacement=shared,
        check=unchanged,
        num_ranks=1,
        quick=True,
    ),
    "the copy has the model's configs": Mutation(
        target="echelon.shardformer.sharder:_own_value",
        wrapper=sharing_configs,
        check=unchanged,
        num_ranks=1,
        notice="attention",
    ),
}
