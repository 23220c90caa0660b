"""Stage plans derived by running: right ones are accepted, and what a pipeline would compute otherwise is refused."""

import random
from collections.abc import Callable
from copy import deepcopy
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch
import transformers
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensorMode
from transformers import LlamaConfig, LlamaForCausalLM

from echelon.derive.build import small_copy
from echelon.derive.module_calls import ModuleCall
from echelon.derive.plans import isolated, stage_plan_of
from echelon.derive.stages import departure, derived_plan, sizes_of, stacks_of
from echelon.pipeline.stage_plan import OutputStructure, StagePlan
from echelon.pipeline.stand_ins import Inbox
from echelon.shardformer import Table
from echelon.shardformer.tables.table import table_for

from ..slow import slow
from .copies import copy_of, double_copy_of

SMALL: dict[str, Any] = {
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_attention_heads": 4,
    "vocab_size": 99,
}


def small_model(model_type: str) -> nn.Module:
    return copy_of(model_type).model


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize(
    "model_type",
    ["llama", "bert", "vit", *slow("gpt2", "opt", "bloom", "gpt_neox")],
)
def test_a_derived_plan_is_that_of_the_table(model_type: str) -> None:
    model: Any = small_model(model_type)
    table = table_for(model_type)
    assert isinstance(table, Table) and isinstance(table.stage, StagePlan)
    plan, written = stage_plan_of(model), table.stage.under(model.base_model_prefix).fitted(model)
    named = {name for name in written.entry if any(True for _ in model.get_submodule(name).parameters())}
    assert (plan.layers, {*plan.entry}) == (written.layers, named)


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize(
    ("model_type", "layers", "everywhere", "sent"),
    [
        ("mamba", "backbone.layers", (), ()),
        # Its weight is the head's, and read by a function.
        *slow(("ctrl", "transformer.h", ("transformer.w",), ())),
        ("bros", "bros.encoder.layer", (), ("bros.bbox_embeddings",)),  # read by every layer
        ("deberta", "deberta.encoder.layer", (), ()),  # layers return tuples
        *slow(("blip", "text_decoder.bert.encoder.layer", (), ("vision_model",))),
    ],
)
def test_types_without_a_table_have_a_plan(
    model_type: str, layers: str, everywhere: tuple[str, ...], sent: tuple[str, ...]
) -> None:
    plan = stage_plan_of(small_model(model_type))
    assert (plan.layers, plan.everywhere, (*plan.sent,)) == (layers, everywhere, sent)


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize(
    ("model_type", "sent", "num_carried"),
    [
        # Features from layers of the vision model are added between layers of the language model.
        *slow(("qwen3_vl", ("model.visual",), 1)),
        *slow(("lilt", (), 2)),  # hidden states of text and of layout
        ("openai-gpt", (), 1),  # layers return lists
    ],
)
def test_outputs_of_layers_travel_where_hidden_states_alone_depart(
    model_type: str, sent: tuple[str, ...], num_carried: int
) -> None:
    plan = stage_plan_of(small_model(model_type))
    assert plan.carried is not None
    assert ((*plan.sent,), plan.carried.num_tensors) == (sent, num_carried)


@pytest.mark.filterwarnings("ignore")
def test_a_derivation_leaves_the_process_as_it_is_and_is_the_same_in_any_context(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    model, logger = small_model("gpt2"), transformers.utils.logging.get_logger("transformers.own")
    expected, state = stage_plan_of(model), torch.get_rng_state()
    seeded: list[int] = []
    monkeypatch.setattr(torch, "manual_seed", seeded.append)  # would seed the generators of all devices
    with torch.inference_mode(), torch.autocast("cpu", dtype=torch.bfloat16), FakeTensorMode():
        assert stage_plan_of(model) == expected
        assert torch.is_autocast_enabled("cpu") and torch.is_inference_mode_enabled()
    assert not seeded and torch.equal(torch.get_rng_state(), state)
    with isolated():
        logger.warning_once("for the script")
    calls: list[str] = []
    monkeypatch.setattr(logger, "warning", calls.append)
    logger.warning_once("for the script")
    assert calls == ["for the script"]


@pytest.mark.filterwarnings("ignore")
def test_the_auxiliary_loss_of_experts_is_no_matter_of_the_stages() -> None:
    """It is of the outputs of all layers, which no stage has; shardformer/router_loss.py adds it up over the stages."""
    model = copy_of("gpt_oss", output_router_logits=True).model
    assert stage_plan_of(model).layers == "model.layers"
    assert model.config.output_router_logits


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize(
    ("model_type", "encoder", "layers", "read_later"),
    [
        ("m2m_100", "model.encoder.layers", "model.decoder.layers", True),
        *slow(
            ("qwen2_5_vl", "model.visual.blocks", "model.language_model.layers", True),
            ("paligemma", "model.vision_tower.encoder.layers", "model.language_model.layers", False),
        ),
    ],
)
def test_two_lists_of_layers_in_order_are_cut_and_texts_without_images_pass(
    model_type: str, encoder: str, layers: str, read_later: bool
) -> None:
    copy = copy_of(model_type)
    plan = stage_plan_of(copy.model)
    assert plan.encoder is not None
    assert (plan.encoder.layers, plan.layers) == (encoder, layers)
    assert (plan.encoder.module in plan.sent) == read_later  # otherwise its output goes to one stage only
    images = {"pixel_values", "image_grid_thw"}
    text = {name: value for name, value in copy.batch.items() if name not in images}
    if "input_ids" in text and len(text) < len(copy.batch):
        text["input_ids"] = torch.full_like(text["input_ids"], 5)
        of_the_images = "no gradient comes back to layer 3"
        assert departure(replace(copy, batch=text), plan) == of_the_images


def test_a_module_that_runs_twice_in_a_microbatch_is_refused() -> None:
    inbox = Inbox()
    inbox.record("visual", (torch.ones(1),))
    with pytest.raises(ValueError, match="visual runs twice in a microbatch, for images and for videos"):
        inbox.record("visual", (torch.ones(1),))


def test_a_module_that_returns_another_structure_than_the_copy_is_refused() -> None:
    structure = OutputStructure.of((torch.ones(2), [torch.ones(3)]))
    assert len(structure.tensors((torch.zeros(4), [torch.zeros(1)]), "visual")) == 2
    with pytest.raises(ValueError, match="visual returns another structure than its pipeline stages expect"):
        structure.tensors((torch.ones(2), [torch.ones(3), torch.ones(3)]), "visual")


def test_an_output_that_no_gradient_reaches_travels_without_graph() -> None:
    with isolated():  # its forward warns
        copy = double_copy_of("encoder-decoder")
        plan = stage_plan_of(copy.model, copy)
        encoder = plan.encoder
        assert encoder is not None and encoder.returned is not None
        assert encoder.returned.detached == {1}  # BERT's pooler
        with_graphs = replace(encoder.returned, detached=frozenset())
        plan = replace(plan, encoder=replace(encoder, returned=with_graphs), sent={"encoder": with_graphs})
        error = "encoder.pooler.dense.weight has a gradient, perhaps of zeros, in the stages alone"
        assert departure(copy, plan) == error


def derived(kind: type[nn.Module], **settings: Any) -> StagePlan:
    return stage_plan_of(kind(LlamaConfig(num_hidden_layers=2, **SMALL, **settings)))


def with_layers(change: Callable[[nn.Module, int], None]) -> type[LlamaForCausalLM]:
    """Return a Llama whose layers are changed when it is built."""

    class Changed(LlamaForCausalLM):
        def __init__(self, config: LlamaConfig) -> None:
            super().__init__(config)
            for index, layer in enumerate(self.model.layers):
                change(layer, index)

    return Changed


class Remembering(nn.Module):
    """A norm that adds what the norm of the first layer saw, which Python state passes on."""

    seen: Tensor | None = None

    def __init__(self, norm: nn.Module, index: int) -> None:
        super().__init__()
        self.norm, self.index = norm, index

    def forward(self, hidden: Tensor) -> Tensor:
        if self.index == 0:
            Remembering.seen = hidden
        assert Remembering.seen is not None
        return self.norm(hidden + Remembering.seen.tanh())


def remembering(layer: Any, index: int) -> None:
    layer.input_layernorm = Remembering(layer.input_layernorm, index)


def test_layers_that_python_state_connects_are_refused() -> None:
    with pytest.raises(ValueError, match=r"the gradient of .* departs by|fails|no gradient comes back"):
        derived(with_layers(remembering))


def test_layers_called_as_forward_are_refused_by_their_name() -> None:
    def direct(layer: nn.Module, index: int) -> None:
        call = {"__call__": lambda self, *args, **kwargs: self.forward(*args, **kwargs)}
        layer.__class__ = type("Direct", (type(layer),), call)

    with pytest.raises(ValueError, match=r"model.layers: layers \[0, 1\] were not called"):
        derived(with_layers(direct))


def test_layers_dropped_at_random_are_refused() -> None:
    def drop(layer: Any, index: int) -> None:
        layer.mlp.register_forward_hook(
            lambda module, args, output: output if torch.rand(()) > 0.5 else args[0]
        )

    with pytest.raises(ValueError, match=r"departs|the loss in stages"):
        derived(with_layers(drop))


def test_layers_that_run_in_another_order_are_refused() -> None:
    class Reversed(LlamaForCausalLM):
        def __init__(self, config: LlamaConfig) -> None:
            super().__init__(config)
            self.model.layers = nn.ModuleList(reversed(self.model.layers))
            self.model.register_forward_pre_hook(lambda module, args: None)
            layers = self.model.layers
            self.model.layers.__class__ = type(
                "Reversed",
                (nn.ModuleList,),
                {"__getitem__": lambda stack, index: [*nn.ModuleList.__iter__(stack)][::-1][index]},
            )
            assert layers[0] is not next(iter(layers))

    with pytest.raises(ValueError, match=r"model.layers: its layers do not run one after the other"):
        derived(Reversed)


def test_the_departure_of_a_wrong_plan_is_named() -> None:
    copy = small_copy(LlamaForCausalLM, LlamaConfig(), "CAUSAL_LM")
    right = derived_plan(copy, copy.model)
    assert departure(copy, right) is None
    wrong = StagePlan(layers=right.layers, entry=())
    assert ", which is on another stage: the model uses it" in str(departure(copy, wrong))
    with_a_tuple = StagePlan(layers=right.layers, entry=right.entry, arity=2)
    assert "the stage of layer" in str(departure(copy, with_a_tuple))


def test_deriving_leaves_the_script_as_it_is() -> None:
    model = LlamaForCausalLM(LlamaConfig(num_hidden_layers=2, **SMALL))
    before = deepcopy(dict(model.named_parameters()))

    def state() -> list[Any]:
        return [random.getstate(), str(np.random.get_state()), torch.get_rng_state().tolist()]

    start = state()
    torch.set_default_dtype(torch.bfloat16)
    try:
        with torch.no_grad(), torch.device("meta"):
            plans = [stage_plan_of(model) for _ in range(2)]
        assert torch.get_default_dtype() is torch.bfloat16
    finally:
        torch.set_default_dtype(torch.float32)
    assert plans[0] == plans[1]
    assert state() == start
    torch.testing.assert_close(dict(model.named_parameters()), before, rtol=0, atol=0)
    assert all(parameter.grad is None for parameter in model.parameters())


def called(*paths: str) -> list[ModuleCall]:
    """Return calls of modules one after the other."""
    return [ModuleCall(path, 2 * place, 2 * place + 1, (), None, {}) for place, path in enumerate(paths)]


@pytest.mark.parametrize(
    ("width", "paths", "error"),
    [
        (
            4,
            ["large.0", "large.0", "large.1", "small.0", "small.1"],
            r"its largest list .* \(large: its layers run",
        ),
        (4, ["small.0", "small.1"], r"its largest list .* \(large: layers \[0, 1\] were not called"),
        (None, [], "it has no list of several layers"),
    ],
)
def test_a_model_whose_largest_list_is_not_called_in_order_has_no_stages(
    width: int | None, paths: list[str], error: str
) -> None:
    model = nn.Module()
    if width is None:
        model.alone = nn.ModuleList([nn.Linear(2, 2)])
    else:
        model.large = nn.ModuleList([nn.Linear(width, width) for _ in range(2)])
        model.small = nn.ModuleList([nn.Linear(2, 2) for _ in range(2)])
    with pytest.raises(ValueError, match=error):
        stacks_of(model, called(*paths), sizes_of(model))
