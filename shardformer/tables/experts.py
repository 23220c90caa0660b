"""Experts of model types without the common interface: how they are called, or why they are not distributed.

To add a class, write a row of `INTERFACES` by its name.
"""

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from ...cluster.transformers_api import is_experts
from ..layers.expert_parallel import COMMON, ExpertCall, Interface, Rows


def _llama4_call(inputs: dict[str, Any], count: int) -> ExpertCall:
    """Return the call of Llama 4's experts, from one section of all tokens for each expert.

    The tokens of a section are multiplied by the score of the expert, which is zero if it was not chosen.
    """
    (hidden_NH,) = inputs.values()
    section_N = torch.arange(count, device=hidden_NH.device).repeat_interleave(len(hidden_NH) // count)
    index_N = section_N.masked_fill((hidden_NH.detach() == 0).all(-1), count)
    return ExpertCall(hidden_NH, index_N[:, None], hidden_NH.new_ones(len(hidden_NH), 1))


def _llama4_inputs(experts: Any, call: ExpertCall, rows: Rows) -> tuple[tuple[Tensor, ...], Tensor]:
    """Return the input of Llama 4's experts: the rows of each expert as sections of equal length, padded with zeros.

    Also return the index of each row in the result.
    """
    hidden_RH, expert_R, length = call.hidden_NH, call.index_NK[:, 0], max(rows.max_received, 1)
    counts_E = rows.counts_PE.sum(0)
    order = torch.argsort(expert_R, stable=True)
    # Position of each row in the order by expert, and of the first row of each expert.
    sorted_position = torch.empty_like(order).scatter_(
        0, order, torch.arange(len(order), device=order.device)
    )
    first_position_E = counts_E.cumsum(0) - counts_E
    in_output = expert_R * length + sorted_position - first_position_E[expert_R]
    sections = hidden_RH.new_zeros(len(counts_E) * length, hidden_RH.shape[1])
    return (sections.index_copy(0, in_output, hidden_RH),), in_output


def _longcat_inputs(experts: Any, call: ExpertCall, rows: Rows) -> tuple[tuple[Tensor, ...], None]:
    """Return the inputs of LongCat-Flash's experts, which need at least two choices of each row.

    The second is an expert without parameters, with weight 0.
    """
    last = torch.full_like(call.index_NK, experts.total_experts - 1)
    weights_NK = torch.cat([call.weights_NK, torch.zeros_like(call.weights_NK)], 1)
    return (call.hidden_NH, torch.cat([call.index_NK, last], 1), weights_NK), None


def _switch_call(inputs: dict[str, Any], count: int) -> ExpertCall:
    """Return the call of Switch's experts, from one-hot indices (N, 1, E): all zeros if the expert is full."""
    hidden_NH, chosen_N1E, weights_N1 = inputs.values()
    index_N1 = chosen_N1E.argmax(-1).masked_fill(chosen_N1E.sum(-1) == 0, count)
    return ExpertCall(hidden_NH, index_N1, weights_N1)


def _switch_inputs(experts: Any, call: ExpertCall, rows: Rows) -> tuple[tuple[Tensor, ...], None]:
    """Return the inputs of Switch's experts, with one-hot indices (R, 1, E)."""
    one_hot_R1E = F.one_hot(call.index_NK, experts.num_experts)
    return (call.hidden_NH, one_hot_R1E, call.weights_NK), None


def _nllb_call(inputs: dict[str, Any], count: int) -> ExpertCall:
    """Return the call of NLLB-MoE's experts: E choices of each token, most of them with weight 0.

    Its forward takes the mask of first choices for indices.
    """
    hidden_NH, mask_NE, weights_NE = inputs.values()
    return ExpertCall(hidden_NH, mask_NE.masked_fill(weights_NE == 0, count), weights_NE)


INTERFACES = {
    "Step3p7Experts": COMMON,
    "DbrxExperts": COMMON,
    "LongcatFlashExperts": Interface(
        counts=("num_routed_experts", "total_experts"), is_identity_above=True, inputs=_longcat_inputs
    ),
    "SwitchTransformersExperts": Interface(
        has_module_per_expert=True, call=_switch_call, inputs=_switch_inputs
    ),
    "NllbMoeExperts": Interface(has_module_per_expert=True, call=_nllb_call),
    "Llama4TextExperts": Interface(call=_llama4_call, inputs=_llama4_inputs),
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


def modules_of_experts(model: nn.Module) -> dict[str, tuple[nn.Module, Interface]]:
    """Return the modules of experts that are distributed, by path, with the interface of their class."""
    return {
        path: (module, interface)
        for path, module in model.named_modules()
        if (interface := interface_of(module))
    }
