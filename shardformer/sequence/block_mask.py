"""Attention masks evaluated block by block: no rank materializes a full mask. kernels.py uses the blocks."""

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable
from enum import Enum, auto
from typing import Any

import torch
from torch import Tensor
from torch._dynamo._trace_wrapped_higher_order_op import TransformGetItemToIndex
from torch.nn.functional import pad

from ...cluster.errors import raise_errors
from ...cluster.transformers_api import bidirectional_mask_function, causal_mask_function

# B batch, N heads, Q queries, K keys, S sequence

# Takes indices of batch, head, query and key, which broadcast; returns True where the query sees the key.
MaskFunction = Callable[[Tensor, Tensor, Tensor, Tensor], Tensor]


class BlockKind(Enum):
    """Kind of a block of a mask."""

    NOTHING = auto()
    ALL = auto()
    TRIANGLE = auto()  # equal ranges: each query sees the keys up to itself
    SOME = auto()  # internal: `Mask.block` returns a tensor instead


class Mask(ABC):
    """Visible keys of each query of a sequence.

    Args:
        lengths: numbers of queries and of keys.

    Attributes:
        is_plain: True if no block of equal or disjoint ranges needs a tensor.
    """

    is_plain = False

    def __init__(self, lengths: tuple[int, int]) -> None:
        self.lengths = lengths
        # The kind of each block of queries and keys. All layers, and their backwards, use the same blocks; evaluating
        # one again would synchronize with the GPU.
        self._kinds: dict[tuple[range, range], BlockKind] = {}

    def classify(self, blocks: Iterable[tuple[range, range]]) -> None:
        """Determine the kinds of blocks of queries and keys: one host read for all blocks that must be evaluated."""
        new_blocks = dict.fromkeys(block for block in blocks if block not in self._kinds)
        inferred = {
            block: kind for block in new_blocks if (kind := self._kind_by_positions(*block)) is not None
        }
        visibilities = {block: self._visibility(*block) for block in new_blocks if block not in inferred}
        self._kinds |= inferred
        if visibilities:
            rows = torch.stack(list(visibilities.values())).tolist()
            self._kinds |= {
                block: _kind_of(*block, *row) for block, row in zip(visibilities, rows, strict=True)
            }

    def block(self, queries: range, keys: range) -> BlockKind | Tensor:
        """Return the kind of a block, or if that is SOME its tensor.

        Returns:
            (B or 1, N or 1, Q, K): booleans, True at visible keys, or numbers to add to the scores.
        """
        if (queries, keys) not in self._kinds:
            self.classify([(queries, keys)])
        kind = self._kinds[queries, keys]
        return self._block_tensor(queries, keys) if kind is BlockKind.SOME else kind

    def uniform_queries(self, queries: range) -> Tensor | None:
        """Return the queries that see no key and get the mean of all values, (B or 1, 1, Q); None without any."""
        return None

    @abstractmethod
    def _kind_by_positions(self, queries: range, keys: range) -> BlockKind | None:
        """Return the kind of a block if its positions determine it, otherwise None."""

    @abstractmethod
    def _visibility(self, queries: range, keys: range) -> Tensor:
        """Return three booleans on the device: a query sees a key, all see all, and each sees the keys up to itself."""

    @abstractmethod
    def _block_tensor(self, queries: range, keys: range) -> Tensor:
        """Return a block as a tensor."""


class BlockMask(Mask):
    """A mask function of positions with optional padding, as transformers has it before it makes a tensor.

    Args:
        function: mask function of positions.
        lengths: numbers of queries and of keys.
        padding_BS: False at keys that no query sees.
        batch_size: number of rows.
        device: where tensors are made.
        takes_single_positions: True if the function takes only single positions; vmap then maps it over tensors.
        is_eager: True if a query that sees no key gets the mean of all values, as by eager attention, instead of 0.

    Attributes:
        flex_masks: cached masks of flex.py, by the rank of the keys.
    """

    def __init__(
        self,
        function: MaskFunction,
        lengths: tuple[int, int],
        *,
        padding_BS: Tensor | None = None,
        batch_size: int = 1,
        device: torch.device | str = "cpu",
        takes_single_positions: bool = False,
        is_eager: bool = False,
    ) -> None:
        super().__init__(lengths)
        self._function = function
        self._padding_BS = None if padding_BS is None or bool(padding_BS.all()) else padding_BS
        self._batch_size, self._device, self._takes_single_positions = (
            batch_size,
            device,
            takes_single_positions,
        )
        self.is_plain = self._padding_BS is None and function in _KINDS_OF_FUNCTIONS
        self.is_eager = is_eager and not self.is_plain
        self._uniform_queries: dict[range, Tensor | None] = {}  # (B, 1, Q) by range of queries
        self.flex_masks: dict[int, Any] = {}

    def classify(self, blocks: Iterable[tuple[range, range]]) -> None:
        """Determine the kinds of blocks, and the uniform queries: one more host read if `is_eager`."""
        blocks = list(blocks)
        super().classify(blocks)
        self._find_uniform_queries([queries for queries, _ in blocks])

    def uniform_queries(self, queries: range) -> Tensor | None:
        """Mark uniform queries, which see no key and get the mean of all values, (B, 1, Q); None without any."""
        self._find_uniform_queries([queries])
        return self._uniform_queries.get(queries)

    def at_positions(self, queries: Tensor, keys: Tensor) -> MaskFunction:
        """Return the mask as a function of indices into two tensors of positions, of queries and keys, on the device.

        Positions beyond the sequence are padding: as queries they see no key, and no query sees them.
        """
        function, length = self._function, self.lengths[1]
        is_query, is_key_BK = queries < length, (keys < length).expand(self._batch_size, -1)
        queries, keys = queries.clamp(max=length - 1), keys.clamp(max=length - 1)
        if self._padding_BS is not None:
            is_key_BK = is_key_BK & self._padding_BS[:, keys]

        def visible_at(batch: Tensor, head: Tensor, query: Tensor, key: Tensor) -> Tensor:
            return function(batch, head, queries[query], keys[key]) & is_query[query] & is_key_BK[batch, key]

        return visible_at

    def evaluate(self, visible_at: MaskFunction, queries: Tensor, keys: Tensor) -> Tensor:
        """Return the values of a function of `at_positions` at these indices of queries and keys, (B, 1, Q, K)."""
        batch, head = (torch.arange(size, device=self._device) for size in (self._batch_size, 1))
        return _mapped(visible_at)(batch, head, queries, keys)

    def _kind_by_positions(self, queries: range, keys: range) -> BlockKind | None:
        kind = self._kind_without_padding(queries, keys)
        is_final = kind is BlockKind.NOTHING or (kind is not BlockKind.SOME and self._padding_BS is None)
        return kind if is_final else None

    def _kind_without_padding(self, queries: range, keys: range) -> BlockKind:
        """Return the kind of a block of the mask function; SOME if its values must be evaluated."""
        kind_of = _KINDS_OF_FUNCTIONS.get(self._function)
        return BlockKind.SOME if kind_of is None else kind_of(queries, keys)

    def _visibility(self, queries: range, keys: range) -> Tensor:
        seen = self._block_tensor(queries, keys)
        triangle = seen == seen.new_ones(seen.shape[-2:]).tril()
        return torch.stack([seen.any(), seen.all(), triangle.all()])

    def _find_uniform_queries(self, ranges: Iterable[range]) -> None:
        """Add the uniform queries of ranges of queries to `_uniform_queries`, if `is_eager`; one host read for all."""
        new_ranges = [queries for queries in ranges if self.is_eager and queries not in self._uniform_queries]
        if not new_ranges:
            return
        are_uniform = [self._sees_no_key(queries) for queries in new_ranges]  # (B, 1, Q) each
        have_any = torch.stack([is_uniform_B1Q.any() for is_uniform_B1Q in are_uniform]).tolist()
        for queries, is_uniform_B1Q, has_any in zip(new_ranges, are_uniform, have_any, strict=True):
            self._uniform_queries[queries] = is_uniform_B1Q if has_any else None

    def _block_tensor(self, queries: range, keys: range) -> Tensor:
        """Return the mask of a block, (B, 1, Q, K): True where a query sees a key."""
        numbers = [
            torch.arange(indices.start, indices.stop, device=self._device)
            for indices in (range(self._batch_size), range(1), queries, keys)
        ]
        function = _mapped(self._function) if self._takes_single_positions else _broadcast(self._function)
        seen = function(*numbers)
        if self._padding_BS is not None:
            seen = seen & self._padding_BS[:, None, None, keys.start : keys.stop]
        return seen.expand(-1, -1, len(queries), len(keys))

    def _sees_no_key(self, queries: range) -> Tensor:
        """Mark queries that see no key at all, (B, 1, Q)."""
        sees_no_key = torch.ones(self._batch_size, 1, len(queries), dtype=torch.bool, device=self._device)
        for start in range(0, self.lengths[1], len(queries)):
            keys = range(start, min(start + len(queries), self.lengths[1]))
            if self._kind_without_padding(queries, keys) is not BlockKind.NOTHING:
                sees_no_key &= ~self._block_tensor(queries, keys).any(-1)
        return sees_no_key


class TensorMask(Mask):
    """A mask that was given as a full tensor.

    Args:
        mask: (B or 1, N or 1, S or 1, S): booleans, True at visible keys, or numbers to add to the scores.

    Raises:
        ValueError: the mask has another shape or dtype, or a row of numbers that hides all keys.
    """

    def __init__(self, mask: Tensor, length: int) -> None:
        super().__init__((length, length))
        raise_errors(_tensor_mask_errors(mask, length))
        self._mask = mask

    def _kind_by_positions(self, queries: range, keys: range) -> BlockKind | None:
        return None

    def _visibility(self, queries: range, keys: range) -> Tensor:
        block = self._block_tensor(queries, keys)
        hidden = ~block if block.dtype == torch.bool else is_hidden(block)
        unchanged = block if block.dtype == torch.bool else block == 0
        return torch.stack([~hidden.all(), unchanged.all(), hidden.new_zeros(())])

    def _block_tensor(self, queries: range, keys: range) -> Tensor:
        rows = slice(None) if self._mask.shape[2] == 1 else slice(queries.start, queries.stop)
        block = self._mask[:, :, rows, keys.start : keys.stop]
        return block.expand(-1, -1, len(queries), -1)


def _kind_of(
    queries: range, keys: range, any_visible: bool, all_visible: bool, is_triangle: bool
) -> BlockKind:
    """Return the kind of a block by its `Mask._visibility`."""
    if is_triangle and not all_visible and queries == keys:
        return BlockKind.TRIANGLE
    return BlockKind.ALL if all_visible else BlockKind.SOME if any_visible else BlockKind.NOTHING


def is_hidden(bias: Tensor) -> Tensor:
    """Mark the keys that additive masks hide: by minus infinity, or by the dtype's least number."""
    return bias <= torch.finfo(bias.dtype).min


def block_mask(
    batch_size: int,
    q_length: int = 0,
    kv_length: int = 0,
    q_offset: int | Tensor = 0,
    kv_offset: int = 0,
    mask_function: MaskFunction = causal_mask_function,
    attention_mask: Tensor | None = None,
    local_size: int | None = None,
    allow_is_causal_skip: bool = True,
    allow_is_bidirectional_skip: bool = False,
    use_vmap: bool = False,
    device: torch.device | str = "cpu",
    is_eager: bool = False,
    **_: Any,
) -> BlockMask:
    """Return a `BlockMask`; called by transformers, with the signature that `register_attention` asks for.

    Args:
        batch_size: number of rows.
        q_length, kv_length: numbers of queries and keys.
        q_offset, kv_offset: positions of the first query and key, 0 without a cache.
        mask_function: visibility of positions, without padding.
        attention_mask: (B, S), False at padding; keys beyond its end are padding.
        local_size: window size of the mask function, or None.
        allow_is_causal_skip, allow_is_bidirectional_skip: True if the mask function, apart from the window, is causal
            or sees all keys.
        use_vmap: True if the mask function takes only single positions.
        device: where tensors are made.
        is_eager: see `BlockMask`.

    Raises:
        ValueError: a cache contains keys.
    """
    if int(q_offset) or int(kv_offset):
        raise ValueError(
            f"queries begin at position {int(q_offset)} and keys at {int(kv_offset)}: ring attention "
            "supports no key-value cache, so pass use_cache=False"
        )
    if local_size is None or kv_length < local_size:  # no window, or one that covers the sequence
        if allow_is_causal_skip:
            mask_function = causal_mask_function
        elif allow_is_bidirectional_skip:
            mask_function = bidirectional_mask_function
    padding = None
    if attention_mask is not None:
        padding = pad(attention_mask.bool(), (0, max(0, kv_length - attention_mask.shape[-1])))[:, :kv_length]
    return BlockMask(
        mask_function,
        (q_length, kv_length),
        padding_BS=padding,
        batch_size=batch_size,
        device=device,
        takes_single_positions=use_vmap,
        is_eager=is_eager,
    )


def _causal(queries: range, keys: range) -> BlockKind:
    """Return the kind of a block of the causal mask."""
    if keys.start >= queries.stop:
        return BlockKind.NOTHING
    if keys.stop - 1 <= queries.start:
        return BlockKind.ALL
    return BlockKind.TRIANGLE if queries == keys else BlockKind.SOME


# Added numbers up to this hide a key. In a row without a greater one scores lose their last digits, and kernels that
# save the lse, torch's too, compute wrong gradients.
_HIDING = -100.0

# Mask functions whose blocks are known without evaluating each position.
_KINDS_OF_FUNCTIONS: dict[MaskFunction, Callable[[range, range], BlockKind]] = {
    causal_mask_function: _causal,
    bidirectional_mask_function: lambda queries, keys: BlockKind.ALL,
}


def _broadcast(function: MaskFunction) -> MaskFunction:
    """Return a function of 1-d index tensors, from a mask function that broadcasts."""
    return lambda batch, head, query, key: function(
        batch[:, None, None, None],
        head[None, :, None, None],
        query[None, None, :, None],
        key[None, None, None, :],
    )


def _mapped(function: MaskFunction) -> MaskFunction:
    """Return a function of 1-d index tensors, from a mask function of single positions."""
    for dim in (3, 2, 1, 0):
        in_dims: list[int | None] = [None] * 4
        in_dims[dim] = 0
        function = torch.vmap(function, in_dims=tuple(in_dims))

    def mapped(*numbers: Tensor) -> Tensor:
        with TransformGetItemToIndex():  # vmap alone cannot index a tensor by a mapped position
            return function(*numbers)

    return mapped


def _tensor_mask_errors(mask: Tensor, length: int) -> list[str]:
    """List the errors of a mask tensor for a sequence of this length; empty if it is valid."""
    errors = []
    if mask.ndim != 4 or mask.shape[-1] != length or mask.shape[-2] not in (1, length):
        errors.append(
            f"an attention mask of shape {tuple(mask.shape)} for a sequence of {length}: give one of (batch, "
            f"{length}), False at padding, or of (batch, 1, {length}, {length})"
        )
    if mask.dtype != torch.bool and not mask.is_floating_point():
        errors.append(
            f"an attention mask of {mask.dtype} with {mask.ndim} dimensions: give booleans, True where a key is seen, "
            "or floating-point numbers that are added to the scores"
        )
    elif mask.is_floating_point() and not bool((mask.amax(-1) > _HIDING).all()):
        errors.append(
            f"the additive attention mask hides all keys in some rows, down to {mask.amin():.4g}: give a "
            f"mask of (batch, {length}), 0 at padding, or let each query see a key"
        )
    if mask.requires_grad:
        errors.append(
            "the attention mask requires gradients, which ring attention does not compute: use "
            "sequence_parallelism_mode='all_to_all'"
        )
    return errors
