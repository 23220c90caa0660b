"""Faults in the tensor-parallel layers: sums over the tensor ranks, heads, and their local shards."""

from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial
from typing import Any
from unittest.mock import patch

import torch
import torch.distributed as dist
from torch import Tensor, nn

from echelon.cluster.collectives import InFlight, all_reduce, gather_from, gather_to
from echelon.cluster.placement import Replicated, place
from echelon.shardformer.layers import Linear1D_Col, linear
from echelon.shardformer.tables.heads import Cut, Heads
from echelon.verify.layout_choice import Layout
from echelon.verify.model_choice import ModelChoice

from ...shardformer.compare import batch_for, build, require_same_training
from ...shardformer.test_dropout import by_modules, checkpointing
from ..mutations import around, fault, returning

LAYERS = "shardformer.layers"
TP2, TP4 = Layout(tp=2), Layout(tp=4)
CHUNKED = Layout(tp=2, options=("enable_fused_loss",))
LLAMA, BLOOM, T5 = (ModelChoice(model_type=name, num_layers=2) for name in ("llama", "bloom", "t5"))
MIXTRAL, QWEN3, WHISPER, SAM = (
    ModelChoice(model_type=name) for name in ("mixtral", "qwen3", "whisper", "sam")
)
SIX_HEADS = ModelChoice(
    model_type="llama",
    num_layers=2,
    settings=(("num_attention_heads", 6), ("num_key_value_heads", 2), ("hidden_size", 48), ("head_dim", 8)),
)


def same(x: Any, *_: object, **__: object) -> Any:
    """Return the input: replaces a sum or a layer replacement."""
    return x


def without_second_row(sums_2N: Tensor, group: dist.ProcessGroup) -> Tensor:
    """Sum only the first row, and forget that of the label's logit."""
    return torch.stack([all_reduce(sums_2N[0], group), sums_2N[1]])


def first_heads(x: Tensor, dim: int, num_heads: int, local: Sequence[int]) -> Tensor:
    return x.unflatten(dim, (-1, num_heads)).narrow(dim + 1, 0, len(local)).flatten(dim, dim + 1)


def outermost_heads(x: Tensor, dim: int, num_heads: int, local: Sequence[int]) -> Tensor:
    """Treat the first dimension as heads instead of heads within samples."""
    return x.chunk(num_heads // len(local), dim)[local[0] // len(local)]


class _First:
    """A group of which this rank is the first."""

    def __init__(self, group: dist.ProcessGroup) -> None:
        self.group = group

    def size(self) -> int:
        return self.group.size()

    def rank(self) -> int:
        return 0


def attending_with_the_first_head(forward: Callable[[Any, Tensor], Tensor], self: Any, x: Tensor) -> Tensor:
    group, self.group = self.group, _First(self.group)
    with patch.object(
        linear, "gather_to", lambda parts, first_group, dim: gather_to(parts, first_group.group, dim)
    ):
        out = forward(self, x)
    self.group = group
    return out


def keeping_padded_heads(forward: Callable[[Any, Tensor], Tensor], self: Any, x: Tensor) -> Tensor:
    self._is_unpadded = None
    return forward(self, x)


def padded_at_the_end(self: Heads, features: int, *, num_blocks: int = 1) -> Cut:
    return Cut(blocks=(features,), padded=(features // self.query * self.padded_query,))


def without_entry_at_single_layers(
    region: Callable[..., nn.Module], module: nn.Module, group: Any, **settings: Any
) -> nn.Module:
    return module if isinstance(module, Linear1D_Col) else region(module, group, **settings)


def without_entry_in_vision(
    region: Callable[..., nn.Module], module: nn.Module, group: Any, **settings: Any
) -> nn.Module:
    is_vision = type(module).__name__.startswith("Siglip")
    return module if is_vision else region(module, group, **settings)


def with_partial_gradients(scatter_to: Callable[..., Tensor], x: Tensor, group: Any, dim: int) -> Tensor:
    """Leave the gradient of a slice partial between processes; the trial of a plan, on threads, would refuse it."""
    is_real = isinstance(group, dist.ProcessGroup)
    return x.chunk(group.size(), dim)[group.rank()].contiguous() if is_real else scatter_to(x, group, dim)


def compare_layers() -> None:
    """Compare a Llama sharded over the world with the unsharded one, by layer classes only: no plugin, no optimizer."""
    model = build("LlamaForCausalLM", num_key_value_heads=2, tie_word_embeddings=False)
    require_same_training(model, batch_for(model))


ENTRY = f"{LAYERS}.region:enter"
SUMS = f"{LAYERS}.linear:reduce_from"
REGION = f"{LAYERS}.region:Region.from_native_module"
PARTIAL = "shardformer.layer_split:PartialGrad"

# fmt: off
FAULTS = {
    "gradients at a region's entry are not summed": fault(ENTRY, same, LLAMA, TP2, quick=True),
    "the comparison of layers sees no entry": fault(ENTRY, same, compare_layers, notice="is not that of rank|departs"),
    "shared layers have no entry": fault(ENTRY, same, "albert", TP2),
    "a column that is a region has no entry": fault(ENTRY, same, ModelChoice(model_type="opt", num_layers=2), TP2),
    "experts have no entry": fault(ENTRY, same, MIXTRAL, TP2),
    "outputs of a row layer are not summed": fault(SUMS, same, LLAMA, TP2),
    "outputs of the embedding are not summed": fault(f"{LAYERS}.embedding:reduce_from", same, LLAMA, TP2),
    "logits of the labels are not summed": fault(f"{LAYERS}.vocabulary_loss:all_reduce", without_second_row, LLAMA,
        TP2),
    "gradients of the head's inputs are not summed": fault(f"{LAYERS}.chunked_loss:copy_to", same, LLAMA, CHUNKED),
    "a chunk's sum of exponentials is local": fault(f"{LAYERS}.chunked_loss:begin_gather",
        lambda tensor, group: InFlight(None, torch.stack([tensor] * group.size())), LLAMA, CHUNKED),
    "a module that is recomputed does not know that its region was entered": fault(
        "cluster.forward_random:SplitRandom.restorer", returning(lambda: None), partial(checkpointing, by_modules),
        num_ranks=2, notice="a region was left that was not entered"),
    "the embedding's scale is lost": fault(f"{LAYERS}.embedding:scale_of", returning(None), "gemma2", TP2),
    "position biases are those of the first rank's heads": fault(f"{LAYERS}.region:place",
        lambda parameter, placement, rank: place(parameter, placement, 0), T5, TP2),
    "position biases are not sharded": fault(f"{LAYERS}.region:SplitParameter.from_native_module", same, T5, TP2,
        notice=r"relative_attention_bias\.weight .*does not place it over the axis 'tp'"),
    "slopes are those of other heads": fault(f"{LAYERS}.region:select_heads", first_heads, BLOOM, TP2),
    "slopes are those of other samples": fault(f"{LAYERS}.region:select_heads", outermost_heads, BLOOM, TP2),
    "gradients of shared keys are partial": fault(f"{LAYERS}.linear:gather_to", gather_from,
        ModelChoice(model_type="falcon", num_layers=2), TP2),
    "every rank attends with the first key-value head": fault(f"{LAYERS}.linear:SharedKeyValueLinear1D_Col.forward",
        around(attending_with_the_first_head),
        ModelChoice(model_type="phi3", num_layers=2, settings=(("num_key_value_heads", 2),)), TP4),
    "groups of heads are sharded over all ranks": fault("shardformer.tables.heads:Heads.fused_cut",
        around(lambda cut, *arguments: replace(cut(*arguments), stretches=1)),
        ModelChoice(model_type="falcon", num_layers=2,
            settings=(("new_decoder_architecture", True), ("num_kv_heads", 2))),
        TP4, notice="is invalid for input of size"),
    "padded heads learn": fault(f"{LAYERS}.linear:Linear1D_Row.forward", around(keeping_padded_heads), SIX_HEADS, TP4),
    "heads are padded after all instead of after each group": fault("shardformer.tables.heads:Heads.query_cut",
        padded_at_the_end, SIX_HEADS, TP4),
    "experts are not summed": fault(f"{LAYERS}.region:reduce_from", same, MIXTRAL, TP2),
    "experts of latent attention's model are not summed": fault(f"{LAYERS}.region:reduce_from", same, "deepseek_v3",
        TP2),
    "partial gradients of latent attention are not summed": fault(PARTIAL, Replicated, "deepseek_v3", TP2),
    "partial gradients of norms of heads are not summed": fault(PARTIAL, Replicated, QWEN3, TP2),
    "partial gradients of relative positions are not summed": fault(PARTIAL, Replicated, SAM, TP2),
    "the mean of squares is local": fault(f"{LAYERS}.norm:reduce_from", same, "olmo2", TP2),
    "the gradient of a mean of squares is partial": fault(f"{LAYERS}.norm:copy_to", same, "olmo2", TP2),
    "the gradient of a slice is partial": fault(f"{LAYERS}.linear:scatter_to", around(with_partial_gradients), "olmo3",
        TP2),
    "single layers of Whisper have no entry": fault(REGION, around(without_entry_at_single_layers), WHISPER, TP2),
    "single layers of SAM have no entry": fault(REGION, around(without_entry_at_single_layers), SAM, TP2),
    "the vision model has no entry": fault(REGION, around(without_entry_in_vision), "gemma3", TP2),
}
# fmt: on
