"""Stage cutting, in one process: stages in sequence have the full model's loss and gradients, and keep its names."""

import itertools
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from echelon.pipeline.stage import Stage, cut_stages, local_stages, takes
from echelon.pipeline.stage_plan import OutputStructure, StagePlan
from echelon.verify.batch import make_batch
from echelon.verify.model_choice import ModelChoice, heads_of

from ..models.small_timm import build_timm, timm_pixels
from ..slow import slow_except
from .stages import Ranks, cut, plan_of, require_same

LLAMA, T5 = ModelChoice(model_type="llama"), ModelChoice(model_type="t5")


def heads(model_type: str, *heads: str) -> list[ModelChoice]:
    """Return models of a type with these heads."""
    return [ModelChoice(model_type=model_type, head=head) for head in heads]


TEXTS = [
    choice
    for model_type in ("llama", "bert", "gpt2", "t5")
    for choice in heads(model_type, *{kind: head for head, kind in heads_of(model_type).items()}.values())
]
# Models whose layers change the shape, share biases, or have all their outputs read at the end.
IMAGES = [
    *heads("swin", "image_classification", "backbone"),
    *heads("swinv2", "image_classification"),
    *heads("beit", "masked_image", "segmentation"),
]
FURTHER_HEADS = [*heads("swin", "masked_image", "base"), *heads("swinv2", "backbone"), *heads("beit", "base")]
# Models with layers that run several times.
SHARED = [
    ModelChoice(model_type="albert", head="masked"),
    ModelChoice(model_type="albert", settings=(("num_hidden_groups", 2),)),
    ModelChoice(model_type="albert", num_layers=5, settings=(("num_hidden_groups", 3),)),
    ModelChoice(model_type="albert", num_layers=3, settings=(("inner_group_num", 2),)),
]
QUICK = (*heads("beit", "masked_image"), *SHARED[2:], replace(LLAMA, tied=True))
UNEQUAL = replace(T5, tied=True, settings=(("num_layers", 3), ("num_decoder_layers", 5)))


def is_bitwise(choice: ModelChoice) -> bool:
    """Return True if no sum has another order: biases of all layers, values of several stages, encoder outputs."""
    adds_up = ("albert", "t5"), ("backbone", "segmentation")
    is_shared = (choice.model_type, choice.head) == ("beit", "masked_image")
    return choice.model_type not in adds_up[0] and choice.head not in adds_up[1] and not is_shared


def check(
    model: nn.Module, batch: Any, stage_ranks: Sequence[int], bounds: list[int], *, bitwise: bool
) -> None:
    """Compare a cut model with the full one: names, parameters of each stage, loss and gradients."""
    plan = plan_of(model)
    ranks = cut(model, plan, stage_ranks, bounds)
    require_names(model, ranks, plan, bounds)
    require_same(model, ranks, batch, tolerance=0.0 if bitwise else 1e-6)
    size = plan.stage_size(model)
    for stage, (start, stop) in zip(ranks.stages, itertools.pairwise(bounds), strict=True):
        assert size(start, stop) == sum(parameter.numel() for parameter in stage.parameters())


def require_names(model: nn.Module, ranks: Ranks, plan: StagePlan, bounds: list[int]) -> None:
    """Require that every rank has the names of the checkpoint, and the modules of its stages according to the plan."""
    parameters = dict(model.named_parameters(remove_duplicate=False))
    local: set[str] = set()
    for rank_model in ranks.parts:
        names = [name for name, _ in rank_model.named_parameters(remove_duplicate=False)]
        assert len(set(names)) == len(names)
        assert set(names) <= set(rank_model.state_dict()) <= set(model.state_dict())
        local |= set(names)
    assert local == set(parameters)
    for stage in ranks.stages:
        expected = {name for name in parameters if stage.index in plan.stages_of(model, name, bounds)}
        used = stage.parameters()
        assert {id(stage.model.get_parameter(name)) for name in expected} == set(map(id, used))
        assert len(used) == len(set(map(id, used)))


def every_cut(count: int) -> list[tuple[tuple[int, ...], list[int]]]:
    """Return all cuts into two stages, and one stage per layer; on separate ranks, on one, on two."""
    bounds = [*([0, middle, count] for middle in range(1, count)), [*range(count + 1)]]
    return [
        (stage_ranks, stage_bounds)
        for stage_bounds in bounds
        for stages in [range(len(stage_bounds) - 1)]
        for stage_ranks in dict.fromkeys(
            [(*stages,), (0,) * len(stages), tuple(stage % 2 for stage in stages)]
        )
    ]


def name_of(choice: ModelChoice) -> str:
    settings = "-".join(f"{name}{value}" for name, value in choice.settings)
    return f"{choice.model_type}-{choice.head_name}-{choice.num_layers}-{settings}{'tied' * choice.tied}"


@pytest.mark.parametrize("choice", [*TEXTS, *FURTHER_HEADS], ids=name_of)
def test_stages_of_every_head_compute_as_the_whole_model(choice: ModelChoice) -> None:
    model, batch = choice.build(), make_batch(choice, num_samples=2, seed=0)
    last = plan_of(model).num_layers(model)
    check(model, batch, (0, 1, 2), [0, 1, 3, last], bitwise=is_bitwise(choice))


@pytest.mark.parametrize(
    "choice", slow_except(QUICK, (*IMAGES, UNEQUAL, *SHARED, replace(LLAMA, tied=True))), ids=name_of
)
def test_every_cut_computes_as_the_whole_model(choice: ModelChoice) -> None:
    model, batch = choice.build(), make_batch(choice, num_samples=2, seed=0)
    for stage_ranks, bounds in every_cut(plan_of(model).num_layers(model)):
        check(model, batch, stage_ranks, bounds, bitwise=is_bitwise(choice))


@pytest.mark.parametrize(
    "stage_ranks",
    [(0, 1, 1, 0), *(pytest.param(ranks, marks=pytest.mark.slow) for ranks in ((1, 0, 1, 1), (1, 0, 2, 0)))],
)
@pytest.mark.parametrize("choice", [replace(LLAMA, num_layers=8, tied=True), UNEQUAL], ids=name_of)
@pytest.mark.parametrize("bounds", [[0, 1, 2, 3, 8], [0, 2, 3, 5, 8], [0, 3, 4, 6, 8], [0, 5, 6, 7, 8]])
def test_a_stage_may_end_anywhere_and_a_rank_hold_any_of_them(
    choice: ModelChoice, stage_ranks: tuple[int, ...], bounds: list[int]
) -> None:
    batch = make_batch(choice, num_samples=2, seed=0)
    check(choice.build(), batch, stage_ranks, bounds, bitwise=is_bitwise(choice))


def test_parameters_of_the_model_itself_are_used_by_every_stage() -> None:
    model = build_timm()
    for stage_ranks, bounds in every_cut(plan_of(model).num_layers(model)):
        check(model, timm_pixels(2), stage_ranks, bounds, bitwise=True)


def test_stages_of_the_decoder_send_two_tensors_and_those_of_the_encoder_one() -> None:
    model, batch = T5.build(), make_batch(T5, num_samples=2, seed=0)
    ranks = cut(model, plan_of(model), (0, 1, 2, 3, 4), [0, 2, 4, 5, 6, 8])
    received: tuple[Tensor, ...] = ()
    shapes = []
    for stage in ranks.stages[:-1]:
        received = stage.forward(batch, received)
        shapes.append([tuple(tensor.shape) for tensor in received])
    encoded, hidden = (2, 13, 32), (2, 9, 32)
    assert shapes == [[encoded], [encoded], [hidden, encoded], [hidden, encoded]]


@pytest.mark.parametrize(
    ("bounds", "numbers"), [([0, 2, 4], [[2], [2, 2]]), ([0, 1, 3, 4], [[2], [2, 2], [2, 2]])]
)
def test_a_rank_of_the_encoder_alone_has_no_stack_of_the_decoder(
    bounds: list[int], numbers: list[list[int]]
) -> None:
    model = replace(T5, num_layers=2).build()
    parts, _ = cut(model, plan_of(model), range(len(numbers)), bounds)
    stacks = [plan_of(rank_model).stacks(rank_model) for rank_model in parts]
    assert [[len(stack.paths) for stack in of_rank] for of_rank in stacks] == numbers


def test_a_replacement_of_a_borrowed_module_is_called() -> None:
    model, batch = T5.build(), make_batch(T5, num_samples=2, seed=0)
    (rank_model,), stages = cut(model, plan_of(model), (0, 0), [0, 2, 8])
    path = "encoder.block.0.layer.0.SelfAttention.relative_attention_bias"
    calls = []
    replaced = nn.Embedding.from_pretrained(rank_model.get_parameter(f"{path}.weight").detach())
    replaced.register_forward_hook(lambda *_: calls.append(1))
    rank_model.set_submodule(path, replaced)
    received = stages[0].forward(batch, ())
    stages[1].forward(batch, received)
    assert len(calls) == 2


def two_stages(
    choice: ModelChoice = LLAMA, **settings: Any
) -> tuple[nn.Module, list[Stage], dict[str, Tensor]]:
    """Return a rank with both stages of a model, the stages, and a batch."""
    choice = replace(choice, settings=tuple(settings.items()))
    (rank_model,), stages = cut(model := choice.build(), plan_of(model), (0, 0), [0, 2, 4])
    return rank_model, stages, make_batch(choice, num_samples=2, seed=0)


def test_the_module_tree_is_restored_after_a_failed_stage() -> None:
    rank_model, stages, _ = two_stages()
    before = dict(rank_model.named_modules())
    with pytest.raises(ValueError, match="input_ids"):
        stages[0].forward({"input_ids": None}, ())
    assert dict(rank_model.named_modules()) == before


def test_modes_hooks_and_moves_reach_every_stage_of_a_rank() -> None:
    rank_model, stages, batch = two_stages(ModelChoice(model_type="gpt2"), resid_pdrop=0.5)
    called = []
    rank_model.transformer.h[3].register_forward_hook(lambda layer, *_: called.append(layer.training))
    expected = ModelChoice(model_type="gpt2").build().eval()(**batch).loss
    rank_model.eval()
    assert torch.equal(stages[1].forward(batch, stages[0].forward(batch, ())).loss, expected)
    assert called == [False]
    rank_model.double()
    assert {parameter.dtype for stage in stages for parameter in stage.parameters()} == {torch.float64}


def test_an_uncut_model_is_one_stage_without_a_cache() -> None:
    model, batch = LLAMA.build(), make_batch(LLAMA, num_samples=2, seed=0)
    model.config.use_cache = True
    (stage,) = local_stages(model).values()
    assert (stage.index, stage.num_stages, stage.is_first, stage.is_last) == (0, 1, True, True)
    assert stage.parameters() == list(model.parameters())
    assert model(**batch).past_key_values is not None
    assert stage.forward(batch, ()).past_key_values is None


@pytest.mark.parametrize(
    ("model_type", "head", "expected"),
    [("llama", "classification", True), ("t5gemma", "sequence_classification", False)],
    ids=["in keywords", "given by the model itself"],
)
def test_a_classifier_takes_the_keywords_of_its_base_that_it_does_not_give_itself(
    model_type: str, head: str, *, expected: bool
) -> None:
    model = ModelChoice(model_type=model_type, head=head).build_on_meta()
    assert takes(model, "use_cache") is expected


def test_a_stand_in_answers_attributes_and_computes_where_the_model_is_moved_next() -> None:
    model = LLAMA.build()
    cut_stages(model, plan_of(model), stages=[1], bounds=[0, 2, 4], device=torch.device("meta"))
    assert model.model.embed_tokens.embedding_dim == 32
    assert model.model.layers[0].self_attn.head_dim == 8
    assert model.model.layers[0].device == torch.device("meta")


STATES = OutputStructure.of(torch.empty(0))
ENCODER = StagePlan(layers="encoder.layers", entry=("shared",), module="encoder", returned=STATES)


def test_names_of_a_plan_that_match_nothing_are_reported() -> None:
    plan = StagePlan(
        layers="decoder.block",
        entry=(),
        module="decoders",
        repeated={"layer.0.bias": "layer.0.has_bias"},
        encoder=ENCODER,
        sent={"encoder": STATES},
    )
    errors = "\n".join(plan.path_errors(T5.build_on_meta()))
    assert "names 'decoders'" in errors and "names 'encoder.layers'" in errors
    assert "repeats 'layer.0.bias' of the first layer, and decoder.block.0 has no such module" in errors
    plan = StagePlan(layers="swin.encoder.layers.*.rows", entry=("swin.embeddings",))
    (error,) = plan.path_errors(ModelChoice(model_type="swin").build_on_meta())
    assert "there is no 'swin.encoder.layers.0.rows'" in error
