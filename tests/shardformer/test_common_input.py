"""A tensor that the regions of several layers are given beside their first input enters once, and is let go."""

import weakref
from unittest.mock import patch

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from transformers import T5Config, T5ForConditionalGeneration

from echelon.cluster import collectives
from echelon.shardformer import ShardConfig, ShardFormer
from echelon.shardformer.layers.region import CommonInput
from echelon.shardformer.recompute import (
    PipelineGradientCheckpointConfig,
    checkpoint_layers,
    recomputable_layers,
)

from ..pool import Pool

STATES = (2, 5, 16)  # samples, length of the encoder's text, width


def common(num_regions: int) -> CommonInput:
    made = CommonInput()
    made.num_regions = num_regions
    return made


def test_a_tensor_is_known_to_the_regions_after_the_first_and_to_nobody_after_the_last() -> None:
    made, x = common(3), torch.ones(2, requires_grad=True)
    assert made.known(x) is None
    entered = x.view_as(x)
    made.keep(x, entered)
    assert made.known(torch.ones(2, requires_grad=True)) is None
    assert made.known(x) is entered
    assert made.known(x) is entered
    assert made.known(x) is None


def test_nothing_is_kept_after_the_last_region_nor_where_there_is_one_or_no_gradient() -> None:
    for num_regions, needs_gradient in ((2, True), (1, True), (2, False)):
        made, x = common(num_regions), torch.ones(2, requires_grad=needs_gradient)
        entered = x.view_as(x)
        made.keep(x, entered)
        if num_regions == 2 and needs_gradient:
            assert made.known(x) is entered
        gone = weakref.ref(entered)
        del entered
        assert gone() is None


def test_what_was_written_to_enters_again_and_so_does_what_needs_no_graph() -> None:
    made, leaf = common(4), torch.ones(2, requires_grad=True)
    x = leaf * 2
    made.keep(x, x.view_as(x))
    with torch.no_grad():
        assert made.known(x) is None
    x.add_(1)
    assert made.known(x) is None


def reductions(recomputes: bool) -> tuple[int, int]:
    """Sums of gradients in the shape of the encoder's states: of the encoder, and of all."""
    torch.manual_seed(1)
    sizes = {"d_model": 16, "d_ff": 24, "d_kv": 8, "num_heads": 2, "vocab_size": 64, "dropout_rate": 0.0}
    config = T5Config(**sizes, num_layers=2, num_decoder_layers=3, decoder_start_token_id=0)
    native = T5ForConditionalGeneration(config)
    whole = T5ForConditionalGeneration(config)
    whole.load_state_dict(native.state_dict())
    model, _ = ShardFormer(ShardConfig(tensor_parallel_process_group=dist.group.WORLD)).optimize(native)
    if recomputes:
        every = PipelineGradientCheckpointConfig(gradient_checkpointing_ratio=1.0)
        checkpoint_layers({0: recomputable_layers(model)}, every)
    batch = {"input_ids": torch.arange(10).view(2, 5), "labels": torch.arange(6).view(2, 3)}
    begin, shapes = collectives.begin_all_reduce, []

    def counted(gradient: Tensor, group: dist.ProcessGroup) -> collectives.InFlight[Tensor]:
        shapes.append(tuple(gradient.shape))
        return begin(gradient, group)

    for each in (model, whole):
        loss = each.train()(**batch, use_cache=False).loss
        with (
            patch.object(
                collectives, "all_reduce", lambda x, group: begin(x, group).wait()
            ),  # recomputed forwards
            patch.object(collectives, "begin_all_reduce", counted),
        ):
            loss.backward()
    require_equal(model, whole)
    of_encoder = 2 * config.num_layers  # attention and feed-forward
    return of_encoder, shapes.count(STATES)


def require_equal(model: nn.Module, whole: nn.Module) -> None:
    """Gradients of the norms, which are whole on every rank; those of the encoder come through the sum."""
    expected = dict(whole.named_parameters())
    norms = [(name, each.grad) for name, each in model.named_parameters() if "layer_norm" in name]
    assert len(norms) == 15  # two in each layer of the encoder, three in each of the decoder, two at the ends
    for name, gradient in norms:
        torch.testing.assert_close(gradient, expected[name].grad, rtol=1e-4, atol=1e-6, msg=name)


@pytest.mark.parametrize("recomputes", [False, True])
def test_the_gradient_of_the_encoders_states_is_summed_once_for_all_layers_of_the_decoder(
    pool: Pool, recomputes: bool
) -> None:
    for of_encoder, found in pool.run(2, reductions, recomputes):
        assert found == of_encoder + 1
