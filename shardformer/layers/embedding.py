"""Embedding and language-model head sharded over the vocabulary."""

# B batch, S sequence, H hidden, V vocabulary, P vocabulary padded to a multiple of T, T size of the group

import copy
from dataclasses import dataclass

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn import Parameter

from ...cluster.collectives import gather_from, reduce_from
from ...cluster.placement import Shard, place, round_up, shard_on
from .deferred_linear import needs_all_uses
from .linear import ProductLayer, enter
from .parallel_module import (
    ParallelModule,
    native_errors,
    require_all,
    require_native,
    require_none,
    take_hooks,
)

_SCALE = "embed_scale"
# All names that the forward of an embedding with a scale may read.
_READ = {"super", "forward", _SCALE, "to", "weight", "dtype"}


@dataclass(frozen=True, kw_only=True)
class VocabRange:
    """The entries of the vocabulary that are local to a rank.

    Args:
        vocab_size: number of all entries, V.
        first: the first local entry.
        width: number of local rows, padding included: P / T.
        valid: number of local rows without padding.
    """

    vocab_size: int
    first: int
    width: int
    valid: int


def vocab_shard(vocab_size: int, num_ranks: int, make_vocab_size_divisible_by: int) -> Shard:
    """Return the sharding of V rows, padded to a multiple of ranks × `make_vocab_size_divisible_by`."""
    padded = round_up(vocab_size, make_vocab_size_divisible_by * num_ranks)
    return Shard(size=num_ranks, dim=0, blocks=(vocab_size,), padded=(padded,))


def vocab_range(shard: Shard, rank: int) -> VocabRange:
    """Return the local entries of a rank under `vocab_shard`."""
    (vocab_size,) = shard.blocks
    width = sum(shard.padded or shard.blocks) // shard.size
    valid = min(max(vocab_size - rank * width, 0), width)
    return VocabRange(vocab_size=vocab_size, first=rank * width, width=width, valid=valid)


def embedding_errors(native: nn.Embedding) -> list[str]:
    """Return the reasons why an embedding cannot be sharded over the vocabulary; empty if it can."""
    kinds = (nn.Embedding, type(native)) if is_scaled(native) else (nn.Embedding,)
    errors = native_errors(native, *kinds)
    if needs_all_uses(native):
        errors.append(
            "has max_norm, scale_grad_by_freq or sparse gradients, which a sharded vocabulary does not "
            "support"
        )
    return errors


class VocabParallelEmbedding1D(ParallelModule):
    """An embedding sharded over the vocabulary: each rank looks up its local entries, one all-reduce sums the results.

    The scale of a scaled embedding is kept.

    Raises:
        TypeError: the native embedding renormalizes (max_norm) or scales gradients by frequency, which depend on all
            uses of a row; or its class computes more than an embedding.
    """

    def __init__(
        self,
        native: nn.Embedding,
        process_group: dist.ProcessGroup,
        *,
        make_vocab_size_divisible_by: int = 64,
    ) -> None:
        require_none(native, embedding_errors(native))
        super().__init__()
        self.group = process_group
        self.num_embeddings = native.num_embeddings
        self.embedding_dim = native.embedding_dim
        self.padding_idx = native.padding_idx
        scale = scale_of(native)
        if isinstance(scale, Tensor):
            self.register_buffer("embed_scale", scale, persistent=False)
        else:
            self.embed_scale = scale
        shard = vocab_shard(native.num_embeddings, process_group.size(), make_vocab_size_divisible_by)
        self.range = vocab_range(shard, process_group.rank())
        self.weight: Parameter = native.weight  # type: ignore[assignment]
        place(self.weight, shard, process_group.rank())
        self.train(native.training)
        take_hooks(self, native)

    def forward(self, ids_BS: Tensor) -> Tensor:
        """Look up (B, S) entries, equal on all ranks: (B, S, H), equal on all ranks. Forward all-reduce.

        Raises:
            ValueError: an entry is outside the vocabulary.
        """
        is_entry_BS = (ids_BS >= 0) & (ids_BS < self.num_embeddings)
        require_all(
            is_entry_BS,
            lambda: (
                f"entry {ids_BS[~is_entry_BS][0].item()} is outside the vocabulary of {self.num_embeddings}: use the "
                "tokenizer of this model, or model.resize_token_embeddings before boost"
            ),
        )
        first, valid = self.range.first, self.range.valid
        is_elsewhere_BS = (ids_BS < first) | (ids_BS >= first + valid)
        local_ids_BS = (ids_BS - first).masked_fill(is_elsewhere_BS, 0)
        padding = self.padding_idx
        local_padding = padding - first if padding is not None and first <= padding < first + valid else None
        out_BSH = F.embedding(local_ids_BS, self.weight, local_padding)
        out_BSH = reduce_from(out_BSH.masked_fill(is_elsewhere_BS.unsqueeze(-1), 0.0), self.group)
        scale = self.embed_scale
        if scale is None:
            return out_BSH
        return out_BSH * (scale.to(out_BSH.dtype) if isinstance(scale, Tensor) else scale)

    def extra_repr(self) -> str:
        return f"{self.num_embeddings}, {self.embedding_dim}, local={self.range}"


class VocabParallelLMHead1D(ProductLayer):
    """A language-model head sharded over the vocabulary.

    `gather_output` is True by default: all logits on all ranks. The loss route (vocabulary_loss.py) sets it to False
    for a call whose loss is computed from sharded logits. Likewise `makes_logits` is False while the loss is computed
    from the head's inputs (chunked_loss.py); forward then returns its inputs.
    """

    makes_logits = True

    def __init__(
        self, native: nn.Linear, process_group: dist.ProcessGroup, *, make_vocab_size_divisible_by: int = 64
    ) -> None:
        require_native(native, nn.Linear)
        super().__init__()
        self.group = process_group
        self.gather_output = True
        self.in_features = native.in_features
        tied = shard_on(native.weight, "tp")
        # Not from the attribute, which older releases of transformers do not update when they resize a tied head.
        self.out_features = len(native.weight) if tied is None else sum(tied.blocks)
        size, rank = process_group.size(), process_group.rank()
        shard = vocab_shard(self.out_features, size, make_vocab_size_divisible_by)
        self.range = vocab_range(shard, rank)
        self.weight: Parameter = native.weight  # type: ignore[assignment]
        self.bias: Parameter | None = native.bias
        place(self.weight, shard, rank)
        if self.bias is not None:
            place(self.bias, shard, rank)
        self.train(native.training)

    def forward(self, hidden_BSH: Tensor) -> Tensor:
        """(B, S, H) in, equal on all ranks; (B, S, V) out, or this rank's (B, S, P/T) without `gather_output`."""
        if not self.makes_logits:
            return hidden_BSH
        (hidden_BSH,) = enter([hidden_BSH], self.group, [self])
        logits_BSP = self._product(hidden_BSH, self.bias)
        return self.gathered(logits_BSP) if self.gather_output else logits_BSP

    def gathered(self, logits_BSP: Tensor) -> Tensor:
        """Gather all logits (B, S, V) from the local ones; forward all-gather, backward slice."""
        return gather_from(logits_BSP, self.group, -1)[..., : self.out_features]

    def extra_repr(self) -> str:
        return f"{self.in_features}, {self.out_features}, local={self.range}"


def is_scaled(native: nn.Module) -> bool:
    """Return True for an nn.Embedding whose class multiplies the result of the look-up by `embed_scale`.

    Detected from the names that its forward reads, and verified with a test scale and weight.
    """
    code = getattr(type(native).forward, "__code__", None)
    reads_only_scale = code is not None and _SCALE in code.co_names and set(code.co_names) <= _READ
    if not isinstance(native, nn.Embedding) or not reads_only_scale:
        return False
    trial = copy.copy(native)
    with torch.no_grad(), torch.device("cpu"):
        trial._parameters = {"weight": Parameter(torch.tensor([[1.0, 2.0], [3.0, 5.0]]))}
        trial._buffers, trial.padding_idx = {}, None
        vars(trial)[_SCALE] = torch.tensor(7.0)
        return trial(torch.tensor([1, 0])).tolist() == [[21.0, 35.0], [7.0, 14.0]]


def scale_of(native: nn.Module) -> Tensor | float | None:
    """Return the scale of an embedding, or None for a plain one."""
    return getattr(native, _SCALE) if is_scaled(native) else None
