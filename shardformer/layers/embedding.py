"""Embedding and language-model head split over the vocabulary; gradients of embeddings, row by row.

[Note: gradients of rows] In every backward autograd makes of an embedding a gradient as large as the whole table: zeros
but for the rows that the microbatch looked up. It is filled, and read again to be added to the accumulated gradient.
Here only those rows are added. Each is summed over the microbatch first, as autograd does: equal to the bit.
"""

# B batch, S sequence, H hidden, V vocabulary, P vocabulary padded to a multiple of T, T size of the group
# N entries that are looked up

import copy
from dataclasses import dataclass
from typing import Any, cast

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn
from torch.autograd import Function
from torch.nn import Parameter

from ...cluster.collectives import gather_from, reduce_from
from ...cluster.placement import Shard, place, placement_of
from ...pipeline.weight_gradients import Owner
from .linear import ProductLayer, enter
from .parallel_module import ParallelModule, native_faults, require_all, require_native, take_hooks
from .weight_gradient import is_transformed

_SCALE = "embed_scale"
# All names that the forward of an embedding with a scale may read.
_READ = {"super", "forward", _SCALE, "to", "weight", "dtype"}


@dataclass(frozen=True, kw_only=True)
class VocabRange:
    """Which entries of the vocabulary this rank holds.

    Args:
        vocab_size: entries in all, V.
        first: the first that is held here.
        width: how many rows are held here, padding included: P / T.
        valid: how many of them are entries.
    """

    vocab_size: int
    first: int
    width: int
    valid: int


def vocab_shard(vocab_size: int, num_ranks: int, make_vocab_size_divisible_by: int) -> Shard:
    """How V rows are cut: padded to a multiple of ranks × `make_vocab_size_divisible_by`."""
    multiple = make_vocab_size_divisible_by * num_ranks
    padded = -(-vocab_size // multiple) * multiple
    return Shard(size=num_ranks, dim=0, blocks=(vocab_size,), padded=(padded,))


def vocab_range(shard: Shard, rank: int) -> VocabRange:
    """The entries that a rank holds under `vocab_shard`."""
    (vocab_size,) = shard.blocks
    width = sum(shard.padded or shard.blocks) // shard.size
    valid = min(max(vocab_size - rank * width, 0), width)
    return VocabRange(vocab_size=vocab_size, first=rank * width, width=width, valid=valid)


def embedding_faults(native: nn.Embedding) -> list[str]:
    """Why an embedding cannot be split by its entries and look up the same; empty when it can."""
    found = native_faults(native, *_kinds(native))
    if needs_all_uses(native):
        found.append("has max_norm, scale_grad_by_freq or sparse gradients, which need all of a row's uses")
    return found


def _kinds(native: nn.Embedding) -> tuple[type[nn.Module], ...]:
    return (nn.Embedding, type(native)) if is_scaled(native) else (nn.Embedding,)


class VocabParallelEmbedding1D(ParallelModule):
    """An embedding split by its entries: each rank looks up its own, one all-reduce adds them up.

    One that multiplies with a scale goes on doing so.

    Raises:
        ValueError: the native embedding renormalizes (max_norm) or scales gradients by frequency, both of
            which need all of a row's uses.
    """

    gradient_owner: Owner | None = None  # see [Note: gradients of rows]

    def __init__(
        self,
        native: nn.Embedding,
        process_group: dist.ProcessGroup,
        *,
        make_vocab_size_divisible_by: int = 64,
    ) -> None:
        require_native(native, *_kinds(native))
        if faults := embedding_faults(native):
            raise ValueError(f"this embedding {faults[0]}")
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

    @staticmethod
    def from_native_module(
        module: nn.Module, process_group: dist.ProcessGroup, **kwargs: Any
    ) -> "VocabParallelEmbedding1D":
        """See the class for the arguments; takes an nn.Embedding."""
        return VocabParallelEmbedding1D(cast(nn.Embedding, module), process_group, **kwargs)

    def forward(self, ids_BS: Tensor) -> Tensor:
        """(B, S) of entries, equal on all ranks; (B, S, H) out, equal on all ranks. Forward all-reduce.

        Raises:
            ValueError: an entry that the vocabulary does not have.
        """
        is_entry_BS = (ids_BS >= 0) & (ids_BS < self.num_embeddings)
        require_all(
            is_entry_BS,
            lambda: (
                f"entry {ids_BS[~is_entry_BS][0].item()} is outside the vocabulary of {self.num_embeddings}"
            ),
        )
        first, valid = self.range.first, self.range.valid
        elsewhere_BS = (ids_BS < first) | (ids_BS >= first + valid)
        local_ids_BS = (ids_BS - first).masked_fill(elsewhere_BS, 0)
        padding = self.padding_idx
        local_padding = padding - first if padding is not None and first <= padding < first + valid else None
        found_BSH = embedding(local_ids_BS, self.weight, local_padding, owner=self.gradient_owner)
        found_BSH = reduce_from(found_BSH.masked_fill(elsewhere_BS.unsqueeze(-1), 0.0), self.group)
        scale = self.embed_scale
        if scale is None:
            return found_BSH
        return found_BSH * (scale.to(found_BSH.dtype) if isinstance(scale, Tensor) else scale)

    def extra_repr(self) -> str:
        return f"{self.num_embeddings}, {self.embedding_dim}, held={self.range}"


class VocabParallelLMHead1D(ProductLayer):
    """A language-model head split by the vocabulary.

    `gather_output` is True at rest: all logits on all ranks. The loss route (loss.py) sets it to False for
    a call whose loss is computed from split logits.
    """

    def __init__(
        self, native: nn.Linear, process_group: dist.ProcessGroup, *, make_vocab_size_divisible_by: int = 64
    ) -> None:
        require_native(native, nn.Linear)
        super().__init__()
        self.group = process_group
        self.gather_output = True
        self.in_features = native.in_features
        tied = placement_of(native.weight)
        # Not by the attribute, which older releases of transformers forget when they resize a tied head.
        self.out_features = sum(tied.blocks) if isinstance(tied, Shard) else len(native.weight)
        size, rank = process_group.size(), process_group.rank()
        shard = vocab_shard(self.out_features, size, make_vocab_size_divisible_by)
        self.range = vocab_range(shard, rank)
        self.weight: Parameter = native.weight  # type: ignore[assignment]
        self.bias: Parameter | None = native.bias
        place(self.weight, shard, rank)
        if self.bias is not None:
            place(self.bias, shard, rank)
        self.train(native.training)

    @staticmethod
    def from_native_module(
        module: nn.Module, process_group: dist.ProcessGroup, **kwargs: Any
    ) -> "VocabParallelLMHead1D":
        """See the class for the arguments; takes an nn.Linear."""
        return VocabParallelLMHead1D(cast(nn.Linear, module), process_group, **kwargs)

    def forward(self, hidden_BSH: Tensor) -> Tensor:
        """(B, S, H) in, equal on all ranks; (B, S, V) out, or this rank's (B, S, P/T) without `gather_output`."""
        (hidden_BSH,) = enter([hidden_BSH], self.group, [self])
        logits_BSP = self._product(hidden_BSH, self.bias)
        return self.gathered(logits_BSP) if self.gather_output else logits_BSP

    def gathered(self, logits_BSP: Tensor) -> Tensor:
        """All logits (B, S, V) from every rank's own; forward all-gather, backward slice."""
        return gather_from(logits_BSP, self.group, -1)[..., : self.out_features]

    def extra_repr(self) -> str:
        return f"{self.in_features}, {self.out_features}, held={self.range}"


def is_scaled(native: nn.Module) -> bool:
    """Whether this is an nn.Embedding whose class looks up as one and multiplies with its `embed_scale`.

    Seen in the names that its forward reads, and tried with a scale and a weight of our own.
    """
    code = getattr(type(native).forward, "__code__", None)
    is_known = code is not None and _SCALE in code.co_names and set(code.co_names) <= _READ
    if not isinstance(native, nn.Embedding) or not is_known:
        return False
    trial = copy.copy(native)
    with torch.no_grad(), torch.device("cpu"):
        trial._parameters = {"weight": Parameter(torch.tensor([[1.0, 2.0], [3.0, 5.0]]))}
        trial._buffers, trial.padding_idx = {}, None
        vars(trial)[_SCALE] = torch.tensor(7.0)
        return trial(torch.tensor([1, 0])).tolist() == [[21.0, 35.0], [7.0, 14.0]]


def scale_of(native: nn.Module) -> Tensor | float | None:
    """What an embedding multiplies with, or None for a plain one."""
    return getattr(native, _SCALE) if is_scaled(native) else None


def embedding(ids: Tensor, weight: Tensor, padding_idx: int | None, *, owner: Owner | None) -> Tensor:
    """`torch.nn.functional.embedding`, whose backward adds rows where they are taken.

    Args:
        ids: which rows, in any shape.
        weight: (V, H).
        padding_idx: a row that gets no gradient, counted from 0.
        owner: of the weight's gradient; None leaves it to autograd.

    Returns:
        (*ids.shape, H).
    """
    # As many entries as the table has rows win nothing. A weight that is computed from others has a graph.
    is_own = isinstance(weight, Parameter) and weight.requires_grad and torch.is_grad_enabled()
    is_taken = is_own and not is_transformed() and ids.numel() < weight.shape[0]
    if owner is None or owner() is None or not is_taken:
        return F.embedding(ids, weight, padding_idx)
    out: Tensor = _RowEmbedding.apply(ids, weight, padding_idx, owner)
    return out


class _RowEmbedding(Function):
    @staticmethod
    def forward(ctx: Any, ids: Tensor, weight: Parameter, padding_idx: int | None, owner: Owner) -> Tensor:
        ctx.save_for_backward(ids)
        ctx.parameter, ctx.owner = weight, owner
        ctx.padding_idx = -1 if padding_idx is None else padding_idx
        return F.embedding(ids, weight, padding_idx)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[None, Tensor | None, None, None]:
        (ids,) = ctx.saved_tensors
        parameter = ctx.parameter
        owner = None if torch.is_grad_enabled() else ctx.owner.of(parameter)
        if owner is None:
            num_rows = parameter.shape[0]
            whole = torch.ops.aten.embedding_dense_backward(gradient, ids, num_rows, ctx.padding_idx, False)
            return None, whole, None, None
        if ids.numel():
            owner.add_rows(parameter, *summed_by_row(ids.flatten().long(), gradient, ctx.padding_idx))
        return None, None, None, None


def summed_by_row(ids_N: Tensor, gradient: Tensor, padding_idx: int) -> tuple[Tensor, Tensor]:
    """The rows that were looked up, and the sum of each one's gradients, in the order in which autograd sums.

    The host does not wait for the device: there are as many results as entries, and those left over are zeros
    for row 0.

    Args:
        ids_N: int64, at least one: which row each gradient belongs to.
        gradient: (..., H), N × H elements.
        padding_idx: a row that gets zeros; -1 for none.

    Returns:
        rows (N), values (N, H).
    """
    count = ids_N.numel()
    sorted_N, order_N = ids_N.sort()
    is_new_N = torch.ones_like(sorted_N)
    is_new_N[1:] = sorted_N[1:] != sorted_N[:-1]
    place_N = is_new_N.cumsum(0) - 1
    rows_N = torch.zeros_like(ids_N).scatter_(0, place_N, sorted_N)
    places_N = torch.empty_like(ids_N).scatter_(0, order_N, place_N)
    values_NH = torch.ops.aten.embedding_dense_backward(
        gradient.reshape(count, -1), places_N, count, -1, False
    )
    if padding_idx >= 0:
        values_NH = values_NH.masked_fill_((rows_N == padding_idx).unsqueeze(1), 0.0)
    return rows_N, values_NH


def needs_all_uses(module: nn.Embedding) -> bool:
    """Whether an embedding changes a row, or its gradient, by all uses of it in a batch."""
    return module.max_norm is not None or module.scale_grad_by_freq or module.sparse


class _RowwiseEmbedding(nn.Embedding):
    gradient_owner: Owner | None = None

    def forward(self, ids: Tensor) -> Tensor:
        return embedding(ids, self.weight, self.padding_idx, owner=self.gradient_owner)


def own_embeddings(model: nn.Module) -> None:
    """Let a model's embeddings look up their rows through `embedding`.

    Plain ones change their class for a subclass of it, with an attribute `gradient_owner` that parallel ones have too.
    """
    for module in model.modules():
        if type(module) is nn.Embedding and not needs_all_uses(module):
            module.__class__ = _RowwiseEmbedding
