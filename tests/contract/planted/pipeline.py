"""Faults in the pipeline: weights shared between stages, modules around the layers, collected outputs of layers."""

from collections.abc import Callable
from dataclasses import replace
from functools import partial
from typing import Any

import torch
from torch import Tensor
from torch.utils._pytree import tree_leaves

from echelon.pipeline.host_masks import TensorWithHostCopy
from echelon.verify.layout_choice import Layout
from echelon.verify.model_choice import ModelChoice

from ...pipeline.test_host_masks import (
    test_a_change_in_place_is_seen,
    test_mask_functions_that_are_compiled_get_plain_masks,
    test_microbatches_have_answers_of_their_own,
    test_transformers_reads_no_mask_and_computes_the_same,
)
from ..mutations import Mutation, around, fault, returning

PP2 = Layout(pp=2)


def detached_inputs(self: Any, stage: int, microbatch: int) -> tuple[Tensor, ...]:
    """Detach the stages' inputs, as in evaluation."""
    return self._stage_outputs.pop((stage - 1, microbatch)).wait()


def of_the_first_tensor_alone(
    send: Callable[..., None], self: Any, action: Any, tensors: tuple[Tensor, ...]
) -> None:
    send(self, action, (tensors[0], *map(torch.zeros_like, tensors[1:])))


def of_known_kind(args: Any, kwargs: Any) -> bool:
    """Answer masks that were changed in place as before."""
    tensors = [leaf for leaf in tree_leaves((args, kwargs)) if isinstance(leaf, Tensor)]
    return all(isinstance(tensor, TensorWithHostCopy) for tensor in tensors)


def at_the_start(of: Callable[..., Tensor], tensor: Any, host: Any) -> Any:
    """Answer a slice of a mask by the numbers of the first one."""
    return of(tensor, host.as_strided(host.shape, host.stride(), 0))


def answered(target: str, change: Any, check: Callable[..., None], **further: Any) -> Mutation:
    """Make a fault in the host's answers about masks, which a test of them notices."""
    further = {"num_ranks": 1, "notice": "^AssertionError", **further}
    return fault(f"pipeline.host_masks:{target}", change, check, **further)


ASK = partial(test_transformers_reads_no_mask_and_computes_the_same, "LlamaForCausalLM", "sdpa")
LAYERS_OF = "pipeline.stage_plan:StagePlan.layers_of"
TIES = "pipeline.stage_manager:PipelineStageManager.tie_group"

# fmt: off
FAULTS = {
    "a tie is forgotten": fault(TIES, returning(None), ModelChoice(model_type="gpt2", tied=True), PP2),
    "gradients of weights on all stages of a vision model are not summed": fault(TIES, returning(None), "sam", PP2),
    "shared layers count on one stage only": fault(LAYERS_OF, around(lambda layers_of, *args: layers_of(*args)[:1]),
        "albert", PP2),
    "shared biases count on one stage only": fault(LAYERS_OF, around(lambda layers_of, *args: layers_of(*args)[:1]),
        ModelChoice(model_type="beit", head="masked_image"), PP2),
    "collected layers return the last arrival": fault("pipeline.stand_ins:Recalled.forward",
        lambda self, *_, **__: self.inbox.take()[-1], ModelChoice(model_type="beit", head="segmentation"), PP2),
    "a module before the layers is expected to keep the shape": fault(
        "pipeline.stage_plan:StagePlan.with_modules_before",
        around(lambda after, self, **before: replace(after(self, **before), derives_entry_shapes=False)), "gemma3", PP2,
        notice="normalized_shape"),
    "deferred weight gradients are forgotten": fault("pipeline.runner:WeightGradientQueue.compute", returning(None),
        "llama", Layout(pp=2, schedule="zbh1"), quick=True),
    "the weight gradients of a microbatch replace those before it": fault(
        "shardformer.layers.deferred_linear:add_product", lambda total, a, b: total.copy_(a @ b), "llama", PP2),
    "autograd adds a weight gradient that was added": fault("pipeline.runner:WeightGradientQueue.add",
        around(lambda add, self, gradient: add(self, gradient) and False), "gpt2",
        Layout(pp=2, schedule="interleaved", chunks=2)),
    "a stage's inputs have no graph": fault("pipeline.runner:ScheduleRun._take_inputs", detached_inputs, "llama", PP2),
    "the encoder's output has no gradient from later stages": fault("pipeline.transport:Transport.send_gradients",
        around(of_the_first_tensor_alone), "t5", Layout(pp=2, schedule="interleaved", chunks=2)),
    "the position bias is not borrowed": fault("pipeline.stage:_lend_repeated_modules", returning([]), "t5",
        Layout(pp=2, schedule="interleaved", chunks=2), notice="^step|RankHung"),
    "stages of one rank do not exchange their stand-ins": fault("pipeline.stage:_StandIns.seats", returning([]),
        "llama", Layout(pp=2, schedule="zbv")),
    "masks are answered as if nothing were padding": answered("TensorWithHostCopy.of",
        around(lambda of, tensor, host: of(tensor, torch.ones_like(host))), ASK, notice="^AssertionError: padded"),
    "masks are read from the device": answered("_READS", frozenset(), ASK),
    "operands of a read of a mask are only computed on the device": answered("_REPEATED_ON_HOST", frozenset(), ASK),
    "a microbatch's mask is answered by the first one's": answered("TensorWithHostCopy.of", around(at_the_start),
        test_microbatches_have_answers_of_their_own),
    "a mask is answered as before a change in place": answered("_have_host_copies", of_known_kind,
        test_a_change_in_place_is_seen),
    "compiled mask functions get masks that the host knows": answered("compiles_masks", returning(False),
        test_mask_functions_that_are_compiled_get_plain_masks),
}
# fmt: on
