"""Refused losses, batches and calls of training on two ranks, and words of each message."""

from functools import partial
from typing import Any
from unittest.mock import patch

import torch
import torch.distributed as dist
from torch import nn
from transformers.models.bert.modeling_bert import BertEmbeddings

from echelon.pipeline.action import Schedule
from echelon.pipeline.schedules import gpipe, one_f_one_b
from echelon.shardformer.layers.gathered_linear import ShardedLinear
from echelon.verify.batch import loss_of, make_batch
from echelon.verify.parity import make_optimizer

from ..plugins.test_dropout_masks import Run
from ..plugins.test_entering_gradients import LAYOUTS, compare, rotations, scores
from ..plugins.test_entering_gradients import LLAMA as TRAINED
from ..plugins.test_loss_terms import TwoTerms, Wrong, two_batch
from ..plugins.test_whole_batch import RATE
from ..plugins.test_whole_batch import share as share_of
from ..plugins.training import BERT, LLAMA, boosted, hybrid, share
from ..shardformer.test_layers import look_up
from ..shardformer.test_loss import check_local
from .rows import Row, table


def add_losses(*kinds: str | int) -> None:
    """Train on losses of two kinds: a criterion's with a weight, a plain one, or one over a number of items."""
    booster = hybrid()
    kind, (model, optimizer) = kinds[dist.get_rank()], boosted(booster, LLAMA)
    batch = next(share(booster, LLAMA, 0)) | ({"num_items_in_batch": kind} if isinstance(kind, int) else {})

    def criterion(outputs: Any, inputs: Any) -> Any:
        return (outputs.loss, torch.tensor(1.0)) if kind == "weighted" else outputs.loss

    booster.execute_pipeline(iter([batch]), model, criterion, optimizer)


def train_with_the_optimizer_in_the_place_of_the_criterion() -> None:
    booster = hybrid()
    model, optimizer = boosted(booster, LLAMA)
    booster.execute_pipeline(share(booster, LLAMA, 0), model, optimizer)


def boost_with_a_scheduler_in_the_place_of_the_optimizer() -> None:
    model = LLAMA.build()
    hybrid().boost(model, torch.optim.lr_scheduler.LambdaLR(make_optimizer(model), lambda step: 1.0))


def name_nonfinite_of_another_model() -> None:
    with hybrid().naming_nonfinite(LLAMA.build()):
        pass


def boost_unequal_models(frozen: bool) -> None:
    model = BERT.build(seed=dist.get_rank()).requires_grad_(not frozen)
    hybrid(tp_size=2).boost(model, None if frozen else make_optimizer(model))


def boost_other_code() -> None:
    forward = BertEmbeddings.forward

    def scaled(self: Any, *args: Any, **kwargs: Any) -> Any:
        return 2 * forward(self, *args, **kwargs)

    with patch.object(BertEmbeddings, "forward", scaled if dist.get_rank() else forward):
        boosted(hybrid(zero_stage=1))


def call_a_pipeline() -> None:
    boosted(hybrid(pp_size=2))[0](**make_batch(BERT, num_samples=4, seed=0))


def seed_apart() -> None:
    run = Run("zero", {})
    run.booster.seed(run.model, dist.get_rank())


def call_in_two_modes() -> None:
    model, _ = boosted(hybrid(tp_size=2), LLAMA)
    model.train(dist.get_rank() == 0)
    model(**make_batch(LLAMA, num_samples=4, seed=0))


def run_different_schedules() -> None:
    def schedule(num_ranks: int, num_microbatches: int) -> Schedule:
        return (one_f_one_b if dist.get_rank() else gpipe)(num_ranks, num_microbatches)

    booster = hybrid(pp_size=2, pp_style=schedule)
    model, optimizer = boosted(booster, LLAMA)
    booster.execute_pipeline(share(booster, LLAMA, 0), model, loss_of, optimizer)


def run_unevenly() -> None:
    booster = hybrid(wp_size=2, num_microbatches=None, microbatch_size=2)
    model, optimizer = boosted(booster)
    batch = make_batch(BERT, num_samples=4 + 2 * dist.get_rank(), seed=0)
    booster.execute_pipeline(iter([batch]), model, loss_of, optimizer)


def under_autocast() -> None:
    layer = ShardedLinear.from_native_module(nn.Linear(3, 4), dist.group.WORLD)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        layer(torch.ones(2, 3))


def mix_calls(is_pipeline_first: bool) -> None:
    booster = hybrid(gradient_accumulation_steps=2)
    model, optimizer = boosted(booster)
    for is_pipeline in (is_pipeline_first, not is_pipeline_first):
        if is_pipeline:
            booster.execute_pipeline(share(booster, BERT, 0), model, None, optimizer)
        else:
            booster.backward(model(**next(share(booster, BERT, 0))).loss, optimizer)


def train_terms(model: nn.Module, *, trains: bool = True, criterion: Any = None, **settings: Any) -> None:
    """Train one step of a loss of terms."""
    booster = hybrid(**{"num_microbatches": 4, **settings})
    trained = [parameter for parameter in model.parameters() if parameter.requires_grad]
    boosted, optimizer, *_ = booster.boost(model, torch.optim.SGD(trained, lr=RATE))
    batches = iter([share_of(two_batch(), booster.plugin)])
    with torch.set_grad_enabled(trains):
        booster.execute_pipeline(batches, boosted, criterion, optimizer=optimizer)
    optimizer.step()


def terms(*kinds: str, **settings: Any) -> None:
    train_terms(TwoTerms(kinds[dist.get_rank() % len(kinds)]), **settings)


def without_a_graph(kind: str, **settings: Any) -> None:
    model = TwoTerms(kind)
    model.body.requires_grad_(False)  # the scales, which these losses do not use, are trained
    train_terms(model, **settings)


def change_terms_of_one_replica() -> None:
    booster, model = hybrid(num_microbatches=4), TwoTerms("scaled")
    boosted, optimizer, *_ = booster.boost(model, torch.optim.SGD(model.parameters(), lr=0.0))
    for call in range(5):
        model.kind = "the first" if call == 4 and booster.plugin.data_rank[0] else "scaled"
        booster.execute_pipeline(iter([share_of(two_batch(), booster.plugin)]), boosted, optimizer=optimizer)
        optimizer.step()
        optimizer.zero_grad()


ITEMS = "one over num_items_in_batch=7 on replica 0"
COUNTED, GRAPH = "counted other labels than those of the batch", "no graph to differentiate"
OUTSIDE = "is outside the vocabulary of 10"
# fmt: off
TRAINING: dict[str, Row] = {
    **table("losses of replicas",
        (partial(add_losses, "weighted", "plain"), "(a weighted one on replica 0, a plain one on replica 1)"),
        (partial(add_losses, 7, "plain"), f"cannot be added ({ITEMS}, a plain one on replica 1): let every criterion"),
        (partial(add_losses, 7, 5), f"cannot be added ({ITEMS}, one over num_items_in_batch=5 on replica 1)"),
    ),
    **table("losses of terms",
        *((lambda trains=trains: train_terms(Wrong("scaled"), trains=trains, zero_stage=1), COUNTED)
            for trains in (True, False)),
        (change_terms_of_one_replica, COUNTED),
        *((partial(terms, "a factor of the batch", num_microbatches=number), "factors that depend on the microbatch")
            for number in (1, 4)),
        (partial(terms, "the first", "scaled", num_microbatches=2), "differ between replicas"),
        *((partial(without_a_graph, kind, criterion=criterion), GRAPH) for kind in ("scaled", "the first")
            for criterion in (None, lambda outputs, inputs: outputs["loss"] * 2)),
    ),
    **table("calls of training",
        (train_with_the_optimizer_in_the_place_of_the_criterion, "give it as optimizer=, the criterion comes before"),
        (boost_with_a_scheduler_in_the_place_of_the_optimizer, "optimizer=LambdaLR is not valid: give a torch opti"),
        (name_nonfinite_of_another_model, "this call takes the model that booster.boost returned"),
        (call_a_pipeline, "booster.execute_pipeline(data_iter, model, criterion, optimizer)"),
        (seed_apart, "seed is 0 on rank(s) [0] and 1 on rank(s) [1]"),
        (call_in_two_modes, "the modes (training or evaluation) of rank(s) [1]"),
        (run_different_schedules, "for 2 microbatches on pipeline rank(s) [1] differs from that on the first"),
        (run_unevenly, "wp_size=2 needs equally many microbatches on every rank", "2 for 4 samples, 3 for 6 samples"),
        (under_autocast, "give the plugin precision='bf16'"),
        *((partial(mix_calls, first), "execute_pipeline and backward were both called for one step")
            for first in (True, False)),
        *((partial(boost_unequal_models, frozen), "the model of rank(s) [1] differs from that of rank 0")
            for frozen in (True, False)),
        (boost_other_code, "the code of the model's classes on rank(s) [1] differs", "the same files of a model with"),
        *((partial(look_up, [1, entry, 3]), f"entry {entry} {OUTSIDE}", "before boost") for entry in (10, 15, 16, -1)),
        *((partial(check_local, torch.tensor([1, label]), multiple=8), f"label {label} {OUTSIDE}")
            for label in (10, 15, 16, -1)),
        *((partial(compare, rotations, TRAINED, **LAYOUTS[layout][1]), "a LlamaDecoderLayer was called outside of its")
            for layout in ("ring_attn", "all_to_all", "split_gather")),
        (partial(compare, scores, **LAYOUTS["ring_attn"][1]), "the attention mask requires gradients", "ring attent"),
    ),
}
# fmt: on
