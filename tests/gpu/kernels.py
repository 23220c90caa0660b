"""Optional kernels by name: attention compared with a plain loop, and FlexAttention in ring attention."""

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass
from functools import partial
from importlib.util import find_spec
from itertools import product
from typing import Any
from unittest.mock import patch

import torch

from echelon.cluster.device import default_device
from echelon.plugins.hybrid_config import HybridConfig
from echelon.shardformer.fused_code import compiler_errors
from echelon.shardformer.layers.attention_kernels import FLEX_ATTENTION, KERNELS, SDPA_FA
from echelon.shardformer.sequence import flex
from echelon.verify.batch import make_batch
from echelon.verify.layout_choice import Layout
from echelon.verify.model_choice import ModelChoice

from ..contract.row import ParityRow
from ..contract.variant_rows import packed_without_a_cache, with_unseen_keys
from .results import Unavailable

# Heads of a width that flash kernels support, and texts of several of FlexAttention's blocks of 128.
WIDE = (("hidden_size", 256), ("intermediate_size", 512), ("head_dim", 64))
LLAMA = ModelChoice(model_type="llama", num_layers=2, settings=WIDE)
LENGTH = 300
LONG = ModelChoice(model_type="llama", num_layers=2, settings=(*WIDE, ("max_position_embeddings", LENGTH)))
PRECISIONS = ("fp32", "bf16", "fp16")
# Kernels of KERNELS that take no mask, and the one that returns the mean of all values for a query without keys; the
# plain loop returns 0 for it.
TAKE_NO_MASK = (SDPA_FA,)
MEAN_OF_NOTHING = "eager"


def require_available(arguments: Mapping[str, Any]) -> None:
    """Check that this machine has the packages and kernels of a plugin's arguments. No communication.

    Raises:
        Unavailable: a package, a kernel or a compiler is missing; all reasons at once.
    """
    config, device = HybridConfig(**arguments), default_device()
    errors = config.fused.errors(device, config.dtype)
    errors += compiler_errors("compile_layers=True", device) if config.compile_layers else []
    if errors:
        raise Unavailable("; ".join(errors))


# Attention by name.


@dataclass(frozen=True, kw_only=True)
class KernelLayout(Layout):
    """A layout whose attention is computed by a named kernel.

    Args:
        attention: a key of KERNELS.
    """

    attention: str
    options: tuple[str, ...] = ("enable_flash_attention",)

    @property
    def arguments(self) -> dict[str, Any]:
        """Return the equivalent arguments of HybridParallelPlugin."""
        return {**super().arguments, "enable_flash_attention": self.attention}


def unpadded(choice: ModelChoice, **size: Any) -> dict[str, Any]:
    """Make texts of equal length, without a mask."""
    batch: dict[str, Any] = make_batch(choice, **size)
    del batch["attention_mask"]
    return batch


def packed(choice: ModelChoice, *, num_samples: int, seed: int) -> dict[str, Any]:
    """Make rows of two texts, in microbatches of one row: flash attention packages separate texts only then."""
    return packed_without_a_cache(choice, num_samples=3, seed=seed)


BATCHES: dict[str, Callable[..., dict[str, Any]]] = {
    "padded": make_batch,
    "padded left": with_unseen_keys,
    "packed": packed,
    "whole": unpadded,
}


@contextmanager
def new_graphs() -> Iterator[None]:
    """Clear compiled graphs: torch compiles at most 8 graphs of a function, and then runs it uncompiled."""
    import torch._dynamo

    torch._dynamo.reset()
    yield


def attention_rows() -> dict[str, ParityRow]:
    """Return every kernel by name: in each supported precision, and in bf16 on each supported kind of batch."""
    rows = {}
    for name, kernel in KERNELS.items():
        kinds = ["whole"] if name in TAKE_NO_MASK else list(BATCHES)
        if name == MEAN_OF_NOTHING:
            kinds.remove("padded left")
        for precision, kind in product(PRECISIONS[1:] if kernel.is_16_bit_only else PRECISIONS, kinds):
            if kind == kinds[0] or precision == "bf16":
                rows[f"attention by {name}, {kind}, {precision}"] = ParityRow(
                    choice=LLAMA,
                    layout=KernelLayout(attention=name, precision=precision),
                    batch=BATCHES[kind],
                    within=new_graphs if name == FLEX_ATTENTION else nullcontext,
                )
    return rows


# FlexAttention in ring attention: padded and packed texts, which no other kernel supports there.

TRAINS_FLEX = torch.cuda.is_available() and find_spec("triton") is not None
RINGS = (
    *(Layout(sp=2, sequence="ring_attn", precision=precision) for precision in ("fp32", "bf16")),
    Layout(sp=2, tp=2, sequence="ring_attn", precision="bf16"),
    Layout(sp=4, inner_ring=2, sequence="ring_attn", precision="bf16"),
)


def long(batch: Callable[..., dict[str, Any]], choice: ModelChoice, **size: Any) -> dict[str, Any]:
    """Make a batch of texts of LENGTH tokens."""
    with patch("echelon.verify.batch.LENGTH", LENGTH):
        return batch(choice, **size)


KINDS = {"padded": with_unseen_keys, "packed": packed_without_a_cache}


@contextmanager
def flex_attention() -> Iterator[None]:
    """Check that FlexAttention computes blocks within the block, forward and backward.

    Raises:
        AssertionError: on exit, if it was not called.
    """
    with (
        patch.object(flex, "attend_to_block", wraps=flex.attend_to_block) as forward,
        patch.object(flex, "attend_to_block_backward", wraps=flex.attend_to_block_backward) as backward,
    ):
        yield
    counts = forward.call_count, backward.call_count
    assert all(counts), (
        f"FlexAttention was asked {counts} times, forward and backward: other kernels computed"
    )


def ring_rows() -> Iterator[ParityRow]:
    """Yield padded and packed texts in ring attention, compared with one process."""
    for layout, kind in product(RINGS, KINDS):
        yield ParityRow(
            name=f"FlexAttention {kind}",
            choice=LONG,
            layout=layout,
            num_steps=2,
            batch=partial(long, KINDS[kind]),
            within=flex_attention,
            quick=True,
            missing="" if TRAINS_FLEX else "FlexAttention trains on CUDA alone, with triton",
        )
