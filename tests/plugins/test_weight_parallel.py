"""Whole models whose linear layers share out their weights, under the sharded optimizer, against one process."""

from collections.abc import Iterator
from copy import deepcopy
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from safetensors.torch import load_file
from torch import Tensor, nn

from echelon import Booster, HybridParallelPlugin
from echelon.checkpoint.checkpoints import Checkpoints
from echelon.checkpoint.local import LocalModel
from echelon.cluster.mesh import ParallelMesh
from echelon.cluster.placement import Shard, placement_of
from echelon.lazy import LazyInitContext, materialize
from echelon.pipeline.stage_manager import PipelineStageManager
from echelon.plugins.hybrid_parallel import Ledger
from echelon.plugins.state import ParameterNames, local_tensors, managed_parameters
from echelon.shardformer.recompute import recomputable_layers
from echelon.shardformer.weight_sharding import apply_weight_sharding
from echelon.verify.batch import loss_of as batch_loss
from echelon.verify.batch import make_batch
from echelon.verify.models import ModelChoice
from echelon.verify.parity import gather_whole
from echelon.zero.optimizer import ShardedOptimizer
from echelon.zero.precision import PrecisionConfig

from ..pool import Pool
from ..shardformer.compare import build, integers
from .training import BERT

# Odd widths: neither 2 nor 4 ranks divide all of them.
MODELS: dict[str, dict[str, Any]] = {
    "LlamaForCausalLM": dict(intermediate_size=45, num_key_value_heads=2, tie_word_embeddings=False),
    "GPT2LMHeadModel": dict(n_inner=47, n_embd=36, bos_token_id=1, eos_token_id=2),
}
VOCABULARY, LENGTH, STEPS, MICROBATCHES, RATE, MAX_NORM = 97, 7, 3, 2, 1e-3, 0.5


class Trained:
    """A model of this rank, its linear layers shared out, and its optimizer."""

    def __init__(self, class_name: str, *, wp: int, **arguments: Any) -> None:
        self.mesh = ParallelMesh(wp=wp)
        self.model = build_model(class_name)
        self.names = ParameterNames.of(self.model)
        apply_weight_sharding(self.model, recomputable_layers(self.model), self.mesh.group("weight"))
        self.held = self.names.local(self.model)
        self.optimizer = ShardedOptimizer(
            make_optimizer(self.model),
            managed_parameters(
                self.held,
                [],
                mesh=self.mesh,
                stage_manager=PipelineStageManager(self.mesh),
                stages={0: list(self.model.parameters())},
            ),
            mesh=self.mesh,
            **{"precision": PrecisionConfig(), "bucket_size": 4000, **arguments},
        )
        self.placements = {name: placement_of(parameter) for name, parameter in self.held.items()}

    def train(self) -> Iterator[tuple[float, dict[str, Tensor], float, dict[str, Tensor]]]:
        """Of each step loss, gradients, norm and weights, whole on rank 0."""
        for step in range(STEPS):
            loss = torch.zeros(())
            for microbatch in range(MICROBATCHES):
                part = loss_of(self.model, step, dist.get_rank(), microbatch)
                self.optimizer.backward(part)
                loss += part.detach() / dist.get_world_size()
            dist.all_reduce(loss)
            self.optimizer.reduce_gradients()
            gradients = self.whole(self.optimizer.gradients())
            self.optimizer.step()
            norm = self.optimizer.get_grad_norm()
            assert norm is not None
            self.optimizer.zero_grad()
            yield loss.item(), gradients, norm, self.whole(self.optimizer.masters())

    def saved(self) -> LocalModel:
        return LocalModel(
            module=self.model,
            names=self.names.state,
            tensors=local_tensors(self.held, self.mesh),
            loaded=self.optimizer.refresh_masters,
        )

    def whole(self, tensors: dict[str, Tensor]) -> dict[str, Tensor]:
        return gather_whole(tensors, {name: self.placements[name] for name in tensors}, self.mesh)


def build_model(class_name: str) -> nn.Module:
    return build(class_name, vocab_size=VOCABULARY, **MODELS[class_name])


def make_optimizer(model: nn.Module) -> torch.optim.Optimizer:
    """Two groups, so that buckets of both kinds are in each."""
    parameters = list(model.parameters())
    return torch.optim.AdamW(
        [{"params": parameters[::2]}, {"params": parameters[1::2], "weight_decay": 0.0}], lr=RATE, eps=1e-5
    )


def loss_of(model: nn.Module, step: int, rank: int, microbatch: int) -> Tensor:
    """A share of the mean over all microbatches of a rank."""
    seed = 100 * step + 10 * rank + microbatch
    tokens = integers(3, VOCABULARY, 2 + microbatch, LENGTH, seed=seed)
    loss: Tensor = model(input_ids=tokens, labels=tokens).loss / MICROBATCHES
    return loss


def train_alone(class_name: str) -> Iterator[tuple[float, dict[str, Tensor], float, dict[str, Tensor]]]:
    """What all ranks compute together, in plain torch."""
    model, size = build_model(class_name), dist.get_world_size()
    optimizer = make_optimizer(model)
    for step in range(STEPS):
        total = 0.0
        for rank in range(size):
            for microbatch in range(MICROBATCHES):
                loss = loss_of(model, step, rank, microbatch) / size
                loss.backward()
                total += loss.item()
        gradients = {
            name: each.grad.clone() for name, each in model.named_parameters() if each.grad is not None
        }
        norm = nn.utils.clip_grad_norm_(model.parameters(), MAX_NORM)
        optimizer.step()
        optimizer.zero_grad()
        yield (
            total,
            gradients,
            norm.item(),
            {name: each.detach().clone() for name, each in model.named_parameters()},
        )


def check_training(wp: int, stages: tuple[int, ...], zero_size: int = -1) -> None:
    for class_name in MODELS:
        expected = list(train_alone(class_name)) if dist.get_rank() == 0 else []
        for stage in stages:
            trained = Trained(class_name, wp=wp, stage=stage, zero_size=zero_size, max_norm=MAX_NORM)
            found = list(trained.train())
            for step, (own, other) in enumerate(zip(found, expected, strict=False)):
                try:
                    require_equal(own, other)
                except AssertionError as error:
                    raise AssertionError(f"{class_name}, stage {stage}, step {step}: {error}") from error


def require_equal(own: tuple, other: tuple) -> None:
    """In float32, of sums in another order; AdamW makes that much of its rate of small gradients."""
    assert own[0] == pytest.approx(other[0], abs=1e-6 * max(1, other[0]))
    assert own[2] == pytest.approx(other[2], rel=1e-5)
    largest = max(each.abs().max().item() for each in other[1].values())
    for index, absolute in ((1, 1e-6 * largest), (3, 1e-1 * RATE)):
        assert own[index].keys() == other[index].keys()
        for name, tensor in other[index].items():
            tolerance = 1e-5 * tensor.abs().max().item() + absolute
            torch.testing.assert_close(
                own[index][name],
                tensor,
                rtol=0,
                atol=tolerance,
                msg=lambda text, name=name: f"{name}: {text}",
            )


def test_models_train_as_one_process_does(pool: Pool) -> None:
    pool.run(2, check_training, 2, (1,))


@pytest.mark.slow
@pytest.mark.parametrize(
    ("ranks", "wp", "zero_size"), [(2, 2, -1), (4, 4, -1), (4, 2, -1), (4, 2, 2), (3, 3, -1)]
)
def test_models_train_as_one_process_does_under_every_stage(
    pool: Pool, ranks: int, wp: int, zero_size: int
) -> None:
    pool.run(ranks, check_training, wp, (0, 1, 2), zero_size)


def run_unevenly() -> None:
    model = BERT.build()
    booster = Booster(
        plugin=HybridParallelPlugin(wp_size=2, precision="fp32", num_microbatches=None, microbatch_size=2)
    )
    wrapped, optimizer, *_ = booster.boost(model, make_optimizer(model))
    batch = make_batch(BERT, num_samples=4 + 2 * dist.get_rank(), seed=0)
    booster.execute_pipeline(iter([batch]), wrapped, batch_loss, optimizer)


def test_ranks_with_other_numbers_of_microbatches_are_refused(pool: Pool) -> None:
    for error in pool.run_failing(2, run_unevenly):
        assert isinstance(error, ValueError)
        assert "with wp_size=2 every rank must run equally many microbatches" in str(error)
        assert "2 for 4 samples, 3 for 6 samples" in str(error)


def build_lazily() -> None:
    """A rank makes its pieces, of a model that has no memory before."""
    expected = Trained("GPT2LMHeadModel", wp=2, stage=0).model
    with LazyInitContext():
        model = build_model("GPT2LMHeadModel")
    apply_weight_sharding(model, recomputable_layers(model), dist.group.WORLD)
    materialize(model)
    for (name, own), other in zip(model.named_parameters(), expected.parameters(), strict=True):
        assert placement_of(own) == placement_of(other), name
        assert torch.equal(own, other), name


def test_a_lazy_model_is_made_in_pieces(pool: Pool) -> None:
    pool.run(2, build_lazily)


def measure(stage: int, wp: int) -> tuple[dict[str, int], dict[tuple[str, str], float], int, int]:
    """What is held and sent in a step, and how many elements are shared out and are not."""
    trained = Trained("LlamaForCausalLM", wp=wp, stage=stage, bucket_size=10**6)
    shared = sum(
        placement.blocks[0] * parameter[0].numel()
        for name, parameter in trained.held.items()
        if isinstance(placement := trained.placements[name], Shard)
    )
    whole = sum(parameter.numel() for name, parameter in trained.held.items() if not trained.placements[name])
    for step in range(2):
        with Ledger(trained.mesh, trained.optimizer) as ledger:
            trained.optimizer.backward(loss_of(trained.model, step, dist.get_rank(), 0))
            trained.optimizer.step()
    assert ledger.held is not None
    sent = {key: count.sent for key, count in ledger.traffic.items() if key[0] == "weight"}
    return dict(ledger.held.items()), sent, shared, whole


def test_weights_at_rest_and_their_states_are_shared_out(pool: Pool) -> None:
    for held, sent, shared, whole in pool.run(2, measure, 0, 2):
        # Padding aside: of rows that 2 does not divide, and of buckets.
        assert held["parameters"] == pytest.approx(4 * (shared / 2 + whole), rel=0.03)
        assert held["gradients"] == held["parameters"] and held["states"] == pytest.approx(
            2 * held["parameters"], rel=0.03
        )
        gathered = sent["weight", "all_gather"] + sent.get(("weight", "small all_gather"), 0)
        scattered = sent["weight", "reduce_scatter"] + sent.get(("weight", "small reduce_scatter"), 0)
        assert gathered == pytest.approx(2 * scattered)
        assert gathered + scattered == pytest.approx(3 * 4 * shared / 2, rel=0.03)


@pytest.mark.slow
def test_states_are_shared_out_over_the_ranks_that_hold_the_same_weight(pool: Pool) -> None:
    for held, _, shared, whole in pool.run(4, measure, 1, 2):
        assert held["parameters"] == pytest.approx(4 * (shared / 2 + whole), rel=0.03)
        assert held["states"] == pytest.approx(8 * (shared + whole) / 4, rel=0.03)


def save_and_load(folder: str, wp: int) -> None:
    """The file is the whole model's, whatever the layout; loading gives every rank its piece and its masters."""
    path = Path(folder) / "model.safetensors"
    first = Trained("GPT2LMHeadModel", wp=wp, stage=1)
    list(first.train())
    Checkpoints(first.mesh).save_model(
        first.saved(), path, shard=False, size_per_shard=1, use_safetensors=True, use_async=False
    )
    masters = first.whole(first.optimizer.masters())
    if dist.get_rank() == 0:
        saved = load_file(path)
        assert saved.keys() == masters.keys()
        for name, tensor in saved.items():
            assert torch.equal(tensor, masters[name]), name
            assert tensor.shape == build_model("GPT2LMHeadModel").get_parameter(name).shape
    dist.barrier()
    second = Trained("GPT2LMHeadModel", wp=wp, stage=1)
    Checkpoints(second.mesh).load_model(second.saved(), path, strict=True)
    for name, parameter in second.held.items():
        assert torch.equal(parameter, first.held[name]), name
    second.optimizer.load_state_dict(deepcopy(first.optimizer.local_state()))
    for own, other in zip(first.train(), second.train(), strict=True):
        assert own[0] == other[0] and own[2] == other[2]


def test_files_hold_whole_weights(pool: Pool, tmp_path: Path) -> None:
    pool.run(2, save_and_load, str(tmp_path), 2)


@pytest.mark.slow
def test_files_hold_whole_weights_on_four_ranks(pool: Pool, tmp_path: Path) -> None:
    pool.run(4, save_and_load, str(tmp_path), 2)


def overflow() -> list[int]:
    """One rank's infinity, in a weight that is shared out, skips the step on all."""
    trained = Trained(
        "LlamaForCausalLM", wp=2, stage=1, precision=PrecisionConfig(precision="fp16", initial_scale=256.0)
    )
    before = {name: master.clone() for name, master in trained.optimizer.masters().items()}
    loss = loss_of(trained.model, 0, dist.get_rank(), 0)
    if dist.get_rank() == 1:
        loss.register_hook(lambda gradient: gradient * float("inf"))
    trained.optimizer.backward(loss)
    trained.optimizer.step()
    for name, master in trained.optimizer.masters().items():
        assert torch.equal(master, before[name]), name
    return [trained.optimizer.skipped_steps]


def test_an_overflow_on_one_rank_skips_the_step_on_all(pool: Pool) -> None:
    assert pool.run(2, overflow) == [[1], [1]]


def boost_shared(choice: ModelChoice) -> set[str]:
    """The parameters of which each rank has a piece."""
    booster = Booster(plugin=HybridParallelPlugin(wp_size=2, precision="fp32", num_microbatches=1))
    model = choice.build()
    wrapped, *_ = booster.boost(model, make_optimizer(model))
    return {
        name for name, parameter in wrapped.local_parameters.items() if placement_of(parameter) is not None
    }


def boost_what_cannot_be() -> None:
    booster = Booster(plugin=HybridParallelPlugin(wp_size=2, precision="fp32", num_microbatches=1))
    model = replace(BERT, settings=(("layerdrop", 0.1),)).build()
    booster.boost(model, make_optimizer(BERT.build()))


@pytest.mark.parametrize(
    ("model_type", "shared"),
    [
        ("gpt2", ("c_attn.weight", "attn.c_proj.weight", "c_fc.weight", "mlp.c_proj.weight")),
        (
            "falcon",
            ("query_key_value.weight", "dense.weight", "dense_h_to_4h.weight", "dense_4h_to_h.weight"),
        ),
    ],
)
def test_a_booster_shares_out_the_linear_weights_of_all_layers(
    pool: Pool, model_type: str, shared: tuple[str, ...]
) -> None:
    names = {name for name, _ in ModelChoice(model_type=model_type).build_on_meta().named_parameters()}
    expected = {name for name in names if name.endswith(shared)}
    assert len(expected) == 4 * len(shared)
    assert pool.run(2, boost_shared, ModelChoice(model_type=model_type)) == [expected, expected]


def test_what_speaks_against_sharing_is_told_beside_all_else(pool: Pool) -> None:
    for error in pool.run_failing(2, boost_what_cannot_be):
        assert "layerdrop=0.1 in the model's config" in str(error)
        assert "parameters that are not the model's" in str(error)
