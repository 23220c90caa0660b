"""Faults in sequence parallelism: parts of a sequence, their positions, and their shares of the gradient."""

from collections.abc import Callable
from typing import Any

import torch.nn.functional as F
from torch import Tensor

from echelon.cluster.collectives import InFlight
from echelon.verify.layout import Layout
from echelon.verify.models import ModelChoice

from ..models import EagerChoice
from ..mutations import Mutation

LLAMA, GPT2, BERT = (ModelChoice(model_type=name) for name in ("llama", "gpt2", "bert"))
ULYSSES, RING_ATTENTION = Layout(sp=2, sequence="all_to_all"), Layout(sp=2, sequence="ring_attn")


def no_parts(table: object, layer: object) -> list[object]:
    return []


def of_one_rank(gradient: Tensor, axis: Any) -> Tensor:
    """[Note: gradients over the sequence axis]: behind the last layer, or where the loss is computed on parts."""
    return gradient


def positions_of_the_first(own: Callable[..., Tensor]) -> Callable[..., Tensor]:
    return _of_the_first(own, is_meant=lambda given: "position_ids" in given)


def tokens_of_the_first(own: Callable[..., Tensor]) -> Callable[..., Tensor]:
    return _of_the_first(own, is_meant=lambda given: "position_ids" not in given)


def _of_the_first(own: Callable[..., Tensor], is_meant: Callable[[Any], bool]) -> Callable[..., Tensor]:
    def first(self: Any, whole: Tensor) -> Tensor:
        assert self._given is not None
        return self._axis.order.own(whole, -1, 0) if is_meant(self._given[1]) else own(self, whole)

    return first


def labels_cut_before_they_are_shifted(own: Callable[..., Tensor]) -> Callable[..., Tensor]:
    def late(self: Any, x: Tensor, dim: int, *, padding: int = 0) -> Tensor:
        if padding != -100:
            return own(self, x, dim, padding=padding)
        unshifted = F.pad(x, (1, 0), value=padding)[..., :-1]
        cut = own(self, unshifted, dim, padding=padding)
        return F.pad(cut, (0, 1), value=padding)[..., 1:].contiguous()

    return late


def own_rows_alone(rows: Tensor, group: Any) -> InFlight[Tensor]:
    """What a region ends with is scattered without its sum."""
    return InFlight(None, rows[group.rank()].contiguous())


def from_the_end(self: Any, kept: Tensor) -> Tensor:
    """A region's input is gathered again in another order."""
    whole: Tensor = self._begin(kept).wait()
    return whole.flip(1).flatten(0, 1)


def halved(product: Callable[..., Tensor]) -> Callable[..., Tensor]:
    return lambda x, weight: product(x, weight) / 2


def of_the_first_rank(own: Callable[..., Tensor]) -> Callable[..., Tensor]:
    return lambda self, x, dim, rank: own(self, x, dim, 0)


def as_if_equally_heavy(add: Callable[..., None]) -> Callable[..., None]:
    return lambda self, rows, out, lse: add(self, rows, out, 0 * lse)


SEQUENCE = "echelon.shardformer.sequence"
SPLIT_GATHER = "echelon.shardformer.layers.split_gather"
REGATHER = Layout(tp=2, sequence="split_gather", options=("enable_sequence_regather",))
OVERLAP = Layout(tp=2, sequence="split_gather", options=("enable_sequence_overlap",))
PARTS = "echelon.shardformer.layer_split:parameters_of_parts"
OWN = f"{SEQUENCE}.before_layers:PartsAlone._own"

FAULTS = {
    "a region's end is scattered without its sum": Mutation(
        target=f"{SPLIT_GATHER}:begin_sum_of_rows",
        replacement=own_rows_alone,
        row=(LLAMA, Layout(tp=2, sequence="split_gather")),
        notice=r"^step 1: ",
    ),
    "a region's input is gathered again in another order": Mutation(
        target="echelon.shardformer.layers.weight_gradient:Regather.rows",
        replacement=from_the_end,
        row=(LLAMA, REGATHER),
    ),
    "overlapped products at a region's end are halved": Mutation(
        target=f"{SPLIT_GATHER}:linear", wrapper=halved, row=(LLAMA, OVERLAP)
    ),
    "gradients of norms are not summed": Mutation(
        target=PARTS,
        replacement=no_parts,
        row=(LLAMA, Layout(tp=2, sequence="split_gather")),
        notice=r"^step 1: ",
        quick=True,
    ),
    "gradients of norms are not summed under ring, another name of split_gather": Mutation(
        target=PARTS, replacement=no_parts, row=(BERT, Layout(tp=2, sequence="ring"))
    ),
    "a part counts once": Mutation(
        target="echelon.shardformer.layers.sequence_axis:of_all_ranks",
        replacement=of_one_rank,
        row=(GPT2, ULYSSES),
    ),
    "a share of the loss counts once": Mutation(
        target=f"{SEQUENCE}.loss:of_all_ranks", replacement=of_one_rank, row=(LLAMA, RING_ATTENTION)
    ),
    "positions are those of the first rank": Mutation(
        target=OWN, wrapper=positions_of_the_first, row=(LLAMA, ULYSSES)
    ),
    "tokens are those of the first rank": Mutation(
        target=OWN, wrapper=tokens_of_the_first, row=(LLAMA, RING_ATTENTION)
    ),
    "labels are cut before they are shifted": Mutation(
        target="echelon.shardformer.layers.sequence_axis:SequenceAxis.own",
        wrapper=labels_cut_before_they_are_shifted,
        row=(LLAMA, ULYSSES),
    ),
    "sinks are those of the first rank's heads": Mutation(
        target=f"{SEQUENCE}.ulysses:HeadShare.own",
        wrapper=of_the_first_rank,
        row=(EagerChoice(model_type="gpt_oss"), ULYSSES),
    ),
    "parts of attention are merged as if equally heavy": Mutation(
        target=f"{SEQUENCE}.ring_attention:OnlineSoftmax.add",
        wrapper=as_if_equally_heavy,
        row=(LLAMA, RING_ATTENTION),
        notice=r"^step 1: loss",
    ),
}
