"""Encoder-decoders cut into stages, in one process: loss and gradients of the whole model, names unchanged."""

import itertools
from typing import Any

import pytest
import torch
import transformers as T
from torch import Tensor, nn

from echelon.pipeline.plan import StagePlan
from echelon.pipeline.stage_manager import deal_layers, layer_bounds

from .stages import Ranks, cut, plan_of, require_same

LABELS = 3
VOCABULARY = 100
PADDING, END = 0, 1
BOTH = ["T5ForConditionalGeneration", "T5Model", "T5ForSequenceClassification", "T5ForQuestionAnswering"]
ENCODERS = ["T5EncoderModel", "T5ForTokenClassification"]


def build(
    name: str, *, tied: bool = True, layers: int = 4, decoder_layers: int = 4, **settings: Any
) -> nn.Module:
    """A small model in training mode without dropout; untied, every embedding and head is its own."""
    config = T.T5Config(
        vocab_size=VOCABULARY,
        d_model=32,
        d_kv=8,
        d_ff=48,
        num_layers=layers,
        num_decoder_layers=decoder_layers,
        num_heads=4,
        num_labels=2 if "QuestionAnswering" in name else LABELS,
        relative_attention_num_buckets=8,
        relative_attention_max_distance=16,
        decoder_start_token_id=PADDING,
        pad_token_id=PADDING,
        eos_token_id=END,
        **{"dropout_rate": 0.0, "classifier_dropout": 0.0} | settings,
    )
    torch.manual_seed(0)
    model = getattr(T, name)(config)
    for module in model.modules():
        if not tied and isinstance(module, (nn.Linear, nn.Embedding)):
            module.weight = nn.Parameter(module.weight.detach().clone())
    for parameter in model.parameters():  # norms start at 1, and some biases of T5 all alike
        parameter.data += 0.05 * torch.randn(parameter.shape)
    return model.train()


def batch_for(model: nn.Module) -> dict[str, Tensor]:
    """Two rows, the second padded, with another length for the decoder."""
    name, generator = type(model).__name__, torch.Generator().manual_seed(1)
    ids = torch.randint(3, VOCABULARY, (2, 11), generator=generator)
    mask = torch.ones_like(ids)
    mask[1, 8:] = 0
    ids[0, -1] = ids[1, 7] = END
    ids *= mask
    batch = {"input_ids": ids, "attention_mask": mask}
    target = torch.randint(3, VOCABULARY, (2, 7), generator=generator)
    target[0, 5:] = -100
    if name == "T5ForConditionalGeneration":
        return batch | {"labels": target}
    if name == "T5Model":
        return batch | {"decoder_input_ids": target.clamp(min=0)}
    if name == "T5ForSequenceClassification":
        return batch | {"labels": torch.tensor([0, 2])}
    if name == "T5ForTokenClassification":
        return batch | {"labels": ids % LABELS}
    if name == "T5ForQuestionAnswering":
        return batch | {"start_positions": torch.tensor([1, 2]), "end_positions": torch.tensor([3, 4])}
    return batch


# Gradients of the encoder's output and of the position bias are summed in another order.
TOLERANCE = 1e-6


def require_names(model: nn.Module, ranks: Ranks, plan: StagePlan, bounds: list[int]) -> None:
    """Every rank has the names of the checkpoint, and holds what the plan says of its stages."""
    whole = dict(model.named_parameters(remove_duplicate=False))
    held_by: dict[str, set[int]] = {name: set() for name in whole}
    for rank, part in enumerate(ranks.parts):
        names = [name for name, _ in part.named_parameters(remove_duplicate=False)]
        assert len(set(names)) == len(names)
        assert set(part.state_dict()) == set(names)
        own = [stage for stage in ranks.stages if stage.model is part]
        for name in names:
            held_by[name].add(rank)
        for stage in own:
            expected = {name for name in whole if stage.index in plan.stages_of(model, name, bounds)}
            by_parameter = {
                parameter: name for name, parameter in part.named_parameters(remove_duplicate=False)
            }
            uses = {by_parameter[parameter] for parameter in stage.parameters()}
            assert uses <= set(names)
            assert {id(part.get_parameter(name)) for name in expected} == set(map(id, stage.parameters()))
            assert len(stage.parameters()) == len(set(map(id, stage.parameters())))
    assert all(held_by.values()), [name for name, ranks_ in held_by.items() if not ranks_]


SPLITS = [(2, 1), (3, 1), (4, 1), (5, 1), (8, 1), (4, 2), (6, 2), (8, 2)]  # stages, stages per rank


def placement_of(num_stages: int, per_rank: int) -> tuple[int, ...]:
    ranks = num_stages // per_rank
    return tuple(stage % ranks for stage in range(num_stages))


@pytest.mark.parametrize(("num_stages", "per_rank"), SPLITS)
@pytest.mark.parametrize("tied", [True, False])
@pytest.mark.parametrize("name", [*BOTH, *ENCODERS])
def test_stages_have_loss_and_gradients_of_the_whole_model_and_its_names(
    name: str, tied: bool, num_stages: int, per_rank: int
) -> None:
    model = build(name, tied=tied, layers=8 if name in ENCODERS else 4)
    plan = plan_of(model)
    bounds = layer_bounds(deal_layers(8, num_stages))
    ranks = cut(model, plan, placement_of(num_stages, per_rank), bounds)
    require_names(model, ranks, plan, bounds)
    require_same(model, ranks, batch_for(model), tolerance=TOLERANCE)


@pytest.mark.parametrize("placement", [(0, 1, 1, 0), (0, 0, 0, 0), (1, 0, 1, 1)])
@pytest.mark.parametrize("bounds", [[0, 1, 2, 3, 8], [0, 2, 3, 5, 8], [0, 3, 4, 6, 8], [0, 5, 6, 7, 8]])
def test_a_stage_may_end_anywhere_and_a_rank_hold_any_of_them(
    placement: tuple[int, ...], bounds: list[int]
) -> None:
    model = build("T5ForConditionalGeneration", layers=3, decoder_layers=5)
    plan = plan_of(model)
    ranks = cut(model, plan, placement, bounds)
    require_names(model, ranks, plan, bounds)
    require_same(model, ranks, batch_for(model), tolerance=TOLERANCE)


def test_stages_of_the_decoder_send_two_tensors_and_those_of_the_encoder_one() -> None:
    model = build("T5ForConditionalGeneration")
    batch = batch_for(model)
    ranks = cut(model, plan_of(model), (0, 1, 2, 3, 4), [0, 2, 4, 5, 6, 8])
    received: tuple[Tensor, ...] = ()
    shapes = []
    for stage in ranks.stages[:-1]:
        received = stage.forward(batch, received)
        shapes.append([tuple(tensor.shape) for tensor in received])
    encoded, hidden = (2, 11, 32), (2, 7, 32)
    assert shapes == [[encoded], [encoded], [hidden, encoded], [hidden, encoded]]
    whole = model.encoder(batch["input_ids"], attention_mask=batch["attention_mask"])[0]
    torch.testing.assert_close(received[-1], whole, rtol=1e-6, atol=1e-6)


def test_a_position_bias_is_one_parameter_on_every_stage_of_its_stack() -> None:
    model = build("T5ForConditionalGeneration")
    plan = plan_of(model)
    name = "{}.block.0.layer.0.SelfAttention.relative_attention_bias.weight"
    assert plan.stages_of(model, name.format("encoder"), [0, 2, 5, 6, 8]) == [0, 1]
    assert plan.stages_of(model, name.format("decoder"), [0, 2, 5, 6, 8]) == [1, 2, 3]
    ranks = cut(model, plan, (0, 1, 0, 1), [0, 2, 5, 6, 8])
    for part in ranks.parts:
        assert sum("relative_attention_bias" in key for key in part.state_dict()) == 2
        for _, parameter in part.named_parameters():
            parameter.data.mul_(1.25)
    larger = build("T5ForConditionalGeneration")
    for parameter in larger.parameters():
        parameter.data.mul_(1.25)
    require_same(larger, ranks, batch_for(larger), tolerance=TOLERANCE)


def test_another_module_in_the_place_of_a_borrowed_one_is_called() -> None:
    model = build("T5EncoderModel", layers=3)
    (part,), stages = cut(model, plan_of(model), (0, 0), [0, 1, 3])
    path = "encoder.block.0.layer.0.SelfAttention.relative_attention_bias"
    calls = []
    replaced = nn.Embedding.from_pretrained(part.get_submodule(path).weight.detach())  # type: ignore[arg-type]
    replaced.register_forward_hook(lambda *_: calls.append(1))
    part.set_submodule(path, replaced)
    received = stages[0].forward(batch_for(model), ())
    stages[1].forward(batch_for(model), received)
    assert len(calls) == 2


def test_sizes_of_stages_count_a_tied_or_repeated_parameter_once() -> None:
    model = build("T5ForConditionalGeneration")
    plan = plan_of(model)
    size = plan.stage_size(model)
    for bounds in ([0, 1, 3, 8], [0, 4, 8], [0, 5, 6, 8], [0, 8]):
        ranks = cut(model, plan, tuple(range(len(bounds) - 1)), bounds) if len(bounds) > 2 else None
        for index, (start, stop) in enumerate(itertools.pairwise(bounds)):
            stage = model if ranks is None else ranks.stages[index]
            assert size(start, stop) == sum(parameter.numel() for parameter in stage.parameters())


def test_a_batch_without_what_the_decoder_needs_is_refused_as_ever() -> None:
    model = build("T5ForConditionalGeneration")
    batch = batch_for(model)
    del batch["labels"]
    ranks = cut(model, plan_of(model), (0, 1), [0, 4, 8])
    (encoded,) = ranks.stages[0].forward(batch, ())
    with pytest.raises(ValueError, match=r"input_ids or \w*inputs_embeds"):
        ranks.stages[1].forward(batch, (encoded,))


def test_an_encoder_and_its_decoder_need_their_modules_named() -> None:
    encoder = StagePlan(layers="encoder.block", entry=())
    with pytest.raises(ValueError, match="needs the module of both"):
        StagePlan(layers="decoder.block", entry=(), module="decoder", encoder=encoder)


def test_names_of_a_plan_that_match_nothing_are_told() -> None:
    model = build("T5ForConditionalGeneration", layers=2, decoder_layers=2)
    plan = StagePlan(
        layers="decoder.block",
        entry=(),
        module="decoders",
        repeated={"layer.0.bias": "layer.0.has_bias"},
        encoder=StagePlan(layers="encoder.layers", entry=("shared",), module="encoder"),
    )
    told = "\n".join(plan.path_errors(model))
    assert "names 'decoders'" in told
    assert "names 'encoder.layers'" in told
    assert "repeats 'layer.0.bias' of the first layer, and decoder.block.0 has no such module" in told
