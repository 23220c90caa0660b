"""Faults in the dry run: constraints that are not enforced, and a dry run that changes the model."""

from collections.abc import Callable
from functools import partial
from typing import Any

from torch import Tensor, nn
from transformers import PretrainedConfig

from echelon.cli.verify import sharding_errors
from echelon.plugins.hybrid_config import HybridConfig
from echelon.shardformer import policy_for
from echelon.shardformer.sequence.config import SequenceParallelism
from echelon.shardformer.sharder import split_errors
from echelon.verify.model_choice import ModelChoice

from ...refusals.rows import message_of, missing
from ...refusals.split_rows import SPLITS
from ...shardformer.compare import build
from ...shardformer.test_shard_model import QWEN3, train
from ..mutations import Mutation, around, fault, returning

SPLIT = "shardformer.layer_split"
NO_ERRORS, NOTHING = returning([]), returning(None)


def as_it_is(tensor: Tensor) -> Tensor:
    return tensor


def shared(value: Any, configs: dict[int, Any]) -> Any:
    return value


def sharing_configs(copied: Callable[..., Any], value: Any, configs: Any) -> Any:
    return value if isinstance(value, PretrainedConfig) else copied(value, configs)


def refused(name: str) -> str | None:
    """Return the words that are missing in the error of a row of refusals; None if it has them all."""
    return "\n".join(missing({name: SPLITS[name]}, {name: message_of(SPLITS[name])})) or None


def unchanged() -> str | None:
    """Return the first tensor, hook or setting that a dry run changed."""
    model = build("LlamaForCausalLM")
    before = _state(model)
    sequence = SequenceParallelism(mode="ring_attn")
    split_errors(model, policy_for(model), tp_size=2, sp_size=2, sequence=sequence)
    after = _state(model)
    return next((name for name, entry in before.items() if after[name] != entry), None)


def refused_sequences() -> str | None:
    """Return an error if the sequences of a state-space model are sharded."""
    config = HybridConfig(sp_size=2, enable_sequence_parallelism=True)
    return (
        None if sharding_errors(ModelChoice(model_type="mamba"), config) else "Mamba's sequences are sharded"
    )


def in_parts() -> str | None:
    """Return the difference for two ranks with different shards."""
    return train("Qwen3ForCausalLM", 2, 1, QWEN3, "sizes")


def in_replicas() -> str | None:
    """Return the difference for two ranks with equal shards."""
    return train("LlamaForCausalLM", 1, 2, {}, "sizes")


def _state(model: nn.Module) -> dict[str, Any]:
    hooks = {path: len(module._forward_pre_hooks) for path, module in model.named_modules()}
    shapes = {name: parameter.shape for name, parameter in model.named_parameters()}
    return {**shapes, **hooks, "attention": model.config._attn_implementation}


def unenforced(target: str, name: str, change: Any = NO_ERRORS, *, quick: bool = False) -> Mutation:
    """Make a fault that disables a constraint, noticed by a row of refusals."""
    return fault(target, change, partial(refused, name), num_ranks=1, quick=quick)


# fmt: off
FAULTS = {
    "departures of sharded sequences are not looked at": fault("shardformer.split_trial:split_departure", NOTHING,
        refused_sequences, num_ranks=1),
    "ties are not checked": unenforced("shardformer.sharder:_report_ties", "a second head", NOTHING),
    "unsharded parameters among sharded ones are accepted": unenforced(f"{SPLIT}:LayerSplit.replicas",
        "whole among split", returning({})),
    "names that match nothing are skipped": unenforced(f"{SPLIT}:LayerSplit._missing_names", "a module is missing"),
    "inputs are not checked": unenforced(f"{SPLIT}:LayerSplit._require_input", "another second input", NOTHING),
    "counts need not be divisible": unenforced(f"{SPLIT}:require_divisible", "heads of a part", NOTHING),
    "kinds of tensors are not distinguished": unenforced("shardformer.meta_copy:_meta_tensor", "a special tensor",
        nn.Parameter),
    "the copy has the model's parameters": fault("shardformer.meta_copy:_meta_tensor", as_it_is, unchanged,
        num_ranks=1),
    "the copy has the model's hooks": fault("shardformer.meta_copy:_copied_attribute", shared, unchanged, num_ranks=1,
        quick=True),
    "the copy has the model's configs": fault("shardformer.meta_copy:_copied_attribute", around(sharing_configs),
        unchanged, num_ranks=1, notice="attention"),
    "partial gradients are not summed without a booster": fault("shardformer.gradients:num_summands", returning(1),
        in_parts, notice="^step 1: gradient of "),
    "replicas do not average without a booster": fault("shardformer.gradients:DataAverage._average", NOTHING,
        in_replicas, notice="^step 1: gradient of "),
}
# fmt: on
