"""Experts of model types without the common interface: how they are called, or why they are not distributed.

To add a class, write a row of `INTERFACES` by its name.
"""

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from ...cluster.transformers_api import is_experts
from ..layers.expert_parallel import COMMON, Call, Interface, Rows


def _rows_of_experts(inputs: dict[str, Any], count: int) -> Call:
    """Llama 4: a section of all tokens for each expert, multiplied by a score that is zero if it was not chosen."""
    (hidden_NH,) = inputs.values()
    section_N = torch.arange(count, device=hidden_NH.device).repeat_interleave(len(hidden_NH) // count)
    index_N = section_N.masked_fill((hidden_NH.detach() == 0).all(-1), count)
    return Call(hidden_NH, index_N[:, None], hidden_NH.new_ones(len(hidden_NH), 1))


def _equal_sections(experts: Any, call: Call, rows: Rows) -> tuple[tuple[Tensor, ...], Tensor]:
    """Llama 4: sections of equal length, filled up with zeros."""
    hidden_RH, expert_R, length = call.hidden_NH, call.index_NK[:, 0], max(rows.max_received, 1)
    counts_E = rows.counts_PE.sum(0)
    order = torch.argsort(expert_R, stable=True)
    sorted_place = torch.empty_like(order).scatter_(0, order, torch.arange(len(order), device=order.device))
    first_place_E = counts_E.cumsum(0) - counts_E
    in_output = expert_R * length + sorted_place - first_place_E[expert_R]
    sections = hidden_RH.new_zeros(len(counts_E) * length, hidden_RH.shape[1])
    return (sections.index_copy(0, in_output, hidden_RH),), in_output


def _two_choices(experts: Any, call: Call, rows: Rows) -> tuple[tuple[Tensor, ...], None]:
    """LongCat-Flash: two choices of a token at least. The second is an expert without parameters, weighted by 0."""
    last = torch.full_like(call.index_NK, experts.total_experts - 1)
    weights_NK = torch.cat([call.weights_NK, torch.zeros_like(call.weights_NK)], 1)
    return (call.hidden_NH, torch.cat([call.index_NK, last], 1), weights_NK), None


def _one_choice(inputs: dict[str, Any], count: int) -> Call:
    """Switch: one-hot indices (N, 1, E), without a one where the expert's capacity is used up."""
    hidden_NH, chosen_N1E, weights_N1 = inputs.values()
    index_N1 = chosen_N1E.argmax(-1).masked_fill(chosen_N1E.sum(-1) == 0, count)
    return Call(hidden_NH, index_N1, weights_N1)


def _one_hot(experts: Any, call: Call, rows: Rows) -> tuple[tuple[Tensor, ...], None]:
    one_hot_R1E = F.one_hot(call.index_NK, experts.num_experts)
    return (call.hidden_NH, one_hot_R1E, call.weights_NK), None


def _weighted_choices(inputs: dict[str, Any], count: int) -> Call:
    """NLLB-MoE: E choices, most of them with weight 0. Its forward takes the mask of first choices for indices."""
    hidden_NH, mask_NE, weights_NE = inputs.values()
    return Call(hidden_NH, mask_NE.masked_fill(weights_NE == 0, count), weights_NE)


INTERFACES = {
    "Step3p7Experts": COMMON,
    "DbrxExperts": COMMON,
    "LongcatFlashExperts": Interface(
        counts=("num_routed_experts", "total_experts"), is_identity_above=True, inputs=_two_choices
    ),
    "SwitchTransformersExperts": Interface(is_apart=True, call=_one_choice, inputs=_one_hot),
    "NllbMoeExperts": Interface(is_apart=True, call=_weighted_choices),
    "Llama4TextExperts": Interface(call=_rows_of_experts, inputs=_equal_sections),
}
# Classes that are not distributed, with the reason.
REFUSED = {
    "JetMoeParallelExperts": "it also chooses experts for attention, whose results return to the queries of the tokens",
    "DogeCDMoE": "its experts are rows of two embeddings, of which a token chooses several",
    "VitPoseNaiveMoe": "an image chooses its expert by the index of its dataset",
}


def interface_of(module: nn.Module) -> Interface | None:
    """Return the interface of experts that are distributed; None for another module."""
    return INTERFACES.get(type(module).__name__, COMMON if is_experts(module) else None)
