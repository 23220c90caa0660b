"""Faults in the pipeline: what several stages hold, what runs around the layers, what collects their outputs."""

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor, nn

from echelon.verify.layout import Layout
from echelon.verify.models import ModelChoice

from ..mutations import Mutation

PP2 = Layout(pp=2)


def only_the_first(layers_of: Callable[..., list[int]]) -> Callable[..., list[int]]:
    def first(self: Any, model: nn.Module, name: str) -> list[int]:
        return layers_of(self, model, name)[:1]

    return first


def what_arrived_last(self: Any, *args: object, **kwargs: object) -> object:
    return self.inbox.take()[-1]


def no_group(self: Any, ranks: object) -> None:
    return None


def with_entries_like_layers(after: Callable[..., Any]) -> Callable[..., Any]:
    def unreckoned(self: Any, **before: Any) -> Any:
        return replace(after(self, **before), are_entries_reckoned=False)

    return unreckoned


def do_nothing(self: object, *args: object) -> None:
    return None


def nothing(*args: object) -> list[object]:
    return []


def detached_inputs(self: Any, stage: int, microbatch: int) -> tuple[Tensor, ...]:
    """The stages' inputs have no graph, as in evaluation."""
    return self._handed_on.pop((stage - 1, microbatch)).wait()


def of_the_first_tensor_alone(send: Callable[..., None]) -> Callable[..., None]:
    def sent(self: Any, action: Any, tensors: tuple[Tensor, ...]) -> None:
        send(self, action, (tensors[0], *map(torch.zeros_like, tensors[1:])))

    return sent


LAYERS_OF = "echelon.pipeline.plan:StagePlan.layers_of"
TIES = "echelon.pipeline.stage_manager:PipelineStageManager.tie_group"

FAULTS = {
    "a tie is forgotten": Mutation(
        target=TIES,
        replacement=no_group,
        row=(ModelChoice(model_type="gpt2", tied=True), PP2),
        notice=r"^step 1: gradient of ",
        quick=True,
    ),
    "what all stages of a vision model hold is not summed": Mutation(
        target=TIES,
        replacement=no_group,
        row=(ModelChoice(model_type="sam"), PP2),
        notice=r"^step 1: (gradient|copy) of ",
    ),
    "shared layers count on one stage alone": Mutation(
        target=LAYERS_OF, wrapper=only_the_first, row=(ModelChoice(model_type="albert"), PP2)
    ),
    "shared biases count on one stage alone": Mutation(
        target=LAYERS_OF,
        wrapper=only_the_first,
        row=(ModelChoice(model_type="beit", head="masked_image"), PP2),
    ),
    "collected layers return what arrived last": Mutation(
        target="echelon.pipeline.stand_ins:Recalled.forward",
        replacement=what_arrived_last,
        row=(ModelChoice(model_type="beit", head="segmentation"), PP2),
    ),
    "what runs before the layers is taken for one of their shape": Mutation(
        target="echelon.pipeline.plan:StagePlan.after",
        wrapper=with_entries_like_layers,
        row=(ModelChoice(model_type="gemma3"), PP2),
        notice="normalized_shape",
    ),
    "deferred weight gradients are forgotten": Mutation(
        target="echelon.pipeline.runner:WeightGradients.compute",
        replacement=do_nothing,
        row=(ModelChoice(model_type="llama"), Layout(pp=2, schedule="zbh1")),
        notice=r"^step 1: (gradient|norm) ",
        quick=True,
    ),
    "a stage's inputs have no graph": Mutation(
        target="echelon.pipeline.runner:ScheduleRun._take_inputs",
        replacement=detached_inputs,
        row=(ModelChoice(model_type="llama"), PP2),
        notice=r"^step 1: (gradient|norm) ",
    ),
    "the encoder's output has no gradient from later stages": Mutation(
        target="echelon.pipeline.transport:Transport.send_gradients",
        wrapper=of_the_first_tensor_alone,
        row=(ModelChoice(model_type="t5"), Layout(pp=2, schedule="interleaved", chunks=2)),
        notice=r"^step 1: (gradient|norm) ",
    ),
    "the position bias is not borrowed": Mutation(
        target="echelon.pipeline.stage:_borrow",
        replacement=nothing,
        row=(ModelChoice(model_type="t5"), Layout(pp=2, schedule="interleaved", chunks=2)),
    ),
    "stages of one rank do not exchange their stand-ins": Mutation(
        target="echelon.pipeline.stage:_Casting.seats",
        replacement=nothing,
        row=(ModelChoice(model_type="llama"), Layout(pp=2, schedule="zbv")),
    ),
}
