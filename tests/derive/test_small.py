"""Small copies of models: they keep the kinds of layers, train, and need nothing of Echelon."""

import ast
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers

from echelon.derive.build import Copy, small_copy
from echelon.derive.inputs import Inputs
from echelon.derive.small import LAYERS, small_configs
from echelon.derive.tasks import task_of

from ..slow import slow
from .copies import copy_of

ROOT = Path(__file__).parents[2]


def small_config(model_type: str, **settings: Any) -> Any:
    """Return the first small config of a type."""
    return next(small_configs(transformers.CONFIG_MAPPING[model_type](**settings)))


def copy_of_class(name: str) -> Copy:
    kind = getattr(transformers, name)
    return small_copy(kind, kind.config_class(), task_of(kind))


@pytest.mark.parametrize("name", ["small", "inputs", "build", "tasks"])
def test_the_denominator_imports_of_echelon_only_these_files_and_the_names_of_transformers(name: str) -> None:
    tree = ast.parse((ROOT / "derive" / f"{name}.py").read_text())
    relative = {
        (node.level, node.module)
        for node in ast.walk(tree)
        if isinstance(node, ast.ImportFrom) and node.level
    }
    names = (2, "cluster.transformers_api")
    assert relative <= {(1, "small"), (1, "inputs"), (1, "tasks"), names}


def test_a_small_config_has_a_layer_of_every_kind() -> None:
    kinds = ["full_attention"] * 9 + ["linear_attention", "full_attention", "full_attention"]
    config = transformers.CONFIG_MAPPING["qwen3_next"](num_hidden_layers=12, layer_types=kinds)
    small = next(small_configs(config))
    assert isinstance(small, transformers.PreTrainedConfig)
    assert small.num_hidden_layers == len(small.layer_types) == LAYERS
    assert set(small.layer_types) == set(kinds)
    assert config.num_hidden_layers == 12


def test_a_small_config_keeps_periods_within_its_layers() -> None:
    small = small_config("jamba")
    assert (small.attn_layer_period, small.attn_layer_offset) == (2, 1)
    assert len(set(small.layers_block_type)) == 2


def test_depths_of_groups_are_small_in_a_config_that_counts_its_groups_as_layers() -> None:
    small = small_config("swin2sr")
    assert small.num_layers == LAYERS and small.depths == [2] * LAYERS


def test_a_setting_is_small_under_the_name_of_the_class_or_of_the_config() -> None:
    small = small_config("bailing_hybrid")
    assert (small.num_experts, small.num_experts_per_token) == (4, 2)


def test_sizes_of_images_are_small_where_the_class_takes_them_among_other_keywords() -> None:
    tracker = small_config("sam3_video").tracker_config
    assert tracker.image_size == tracker.vision_config.backbone_config.image_size == 32


def test_a_small_config_of_a_small_config_has_the_same_outputs_of_a_backbone() -> None:
    small = small_config("maskformer")
    again: Any = next(small_configs(small))
    assert again.backbone_config.out_indices == small.backbone_config.out_indices == [1, 2, 3, 4]


@pytest.mark.parametrize(
    "model_type",
    [
        *("cvt", "zoedepth", "lilt"),
        *slow("sam2_video", "fun_asr_nano", "align", "lw_detr_vit", "donut-swin", "layoutlmv3"),
    ],
)
def test_widths_that_depend_on_each_other_are_divided_by_one_number(model_type: str) -> None:
    copy = copy_of(model_type)
    assert sum(parameter.numel() for parameter in copy.model.parameters()) < 2e7
    copy.loss().backward()


@pytest.mark.parametrize(
    ("name", "shape"),
    [
        ("DistilBertForMultipleChoice", (2, 2, 16)),
        ("FNetForNextSentencePrediction", (2, 16)),
        ("PLBartForSequenceClassification", (2, 16)),  # takes the state of the token of the end
    ],
)
def test_a_batch_has_the_form_of_the_task(name: str, shape: tuple[int, ...]) -> None:
    batch = copy_of_class(name).batch
    assert batch["input_ids"].shape == shape and batch["labels"].shape == (2,)


@pytest.mark.parametrize(
    ("name", "argument", "shape"),
    [
        ("SplinterForPreTraining", "question_positions", (2, 2)),
        ("VideoMAEForPreTraining", "bool_masked_pos", (2, 128)),
        ("TimesformerModel", "pixel_values", (2, 8, 3, 32, 32)),  # as many frames as it has positions
        ("UniSpeechSatForXVector", "input_values", (2, 8000)),  # long enough for its convolutions
        ("BlipForQuestionAnswering", "labels", (2, 8)),  # tokens
        ("SpeechT5ForTextToSpeech", "labels", (2, 16, 16)),  # a spectrogram
    ],
)
def test_a_class_gets_the_inputs_that_it_asks_for(name: str, argument: str, shape: tuple[int, ...]) -> None:
    copy = copy_of_class(name)
    assert copy.batch[argument].shape == shape
    copy.loss().backward()


@pytest.mark.parametrize(
    "name",
    [
        "ConvNextBackbone",  # takes lists, where its config has tuples
        "HieraForPreTraining",  # takes sizes that are None
        "T5GemmaEncoderModel",  # takes a config of an encoder alone
        "Llama4VisionModel",  # whose pixels become channels
        "Data2VecVisionForSemanticSegmentation",  # as many outputs of layers as its decoder takes
    ],
)
def test_a_class_gets_the_config_that_it_asks_for(name: str) -> None:
    copy_of_class(name).loss().backward()


@pytest.mark.parametrize("model_type", ["llama", "t5", "vit", "mixtral", "qwen2_vl", "wav2vec2", "mamba"])
def test_a_small_copy_trains_and_is_the_same_each_time(model_type: str) -> None:
    copies = [copy_of(model_type) for _ in range(2)]
    losses = [copy.loss() for copy in copies]
    assert torch.equal(*losses)
    losses[0].backward()
    named = copies[0].model.named_parameters()
    unused = [name for name, parameter in named if parameter.grad is None]
    assert all("masked_spec_embed" in name for name in unused)  # used only with masks drawn at random
    assert sum(parameter.numel() for parameter in copies[0].model.parameters()) < 5e6


def test_features_of_an_image_get_their_places_in_the_text() -> None:
    batch = copy_of("qwen2_vl").batch
    assert batch["pixel_values"].shape[0] == 32
    assert batch["input_ids"].shape[1] > 16


def test_an_error_that_no_other_batch_answers_is_left() -> None:
    model = copy_of("llama").model
    assert not Inputs(model, "CAUSAL_LM").adapt(ValueError("the model is broken"))


def test_a_class_that_no_small_config_builds_is_refused_with_all_errors() -> None:
    class Broken(transformers.LlamaForCausalLM):
        def __init__(self, config: Any) -> None:
            raise TypeError("this class is broken")

    with pytest.raises(ValueError, match=r"TypeError: this class is broken"):
        small_copy(Broken, transformers.LlamaConfig(), "CAUSAL_LM")


def test_tokens_of_a_config_without_a_vocab_size_are_in_every_embedding() -> None:
    class OwnConfig(transformers.PreTrainedConfig):
        model_type, entries = "own_names", 40

    class Own(transformers.PreTrainedModel):
        config_class = OwnConfig

        def __init__(self, config: Any) -> None:
            super().__init__(config)
            self.words, self.head = torch.nn.Embedding(config.entries, 8), torch.nn.Linear(8, config.entries)

        def forward(self, input_ids: torch.Tensor, labels: torch.Tensor) -> dict[str, torch.Tensor]:
            return {"loss": torch.nn.functional.cross_entropy(self.head(self.words(input_ids)).mT, labels)}

    batch = small_copy(Own, OwnConfig(), "").batch
    assert all(int(values.min()) >= 0 and int(values.max()) < 40 for values in batch.values())


def test_a_config_with_a_constructor_of_its_own_keeps_its_settings() -> None:
    class OwnConfig(transformers.PreTrainedConfig):
        model_type = "own_constructor"

        def __init__(
            self, hidden_size: int = 512, kind: str = "plain", switch: bool | None = None, **others: Any
        ) -> None:
            self.hidden_size, self.kind, self.switch = hidden_size, kind, switch
            super().__init__(**others)

    config = OwnConfig(hidden_size=1024, kind="gated", switch=True, chunk_size_feed_forward=4)
    config.later = "a script's own"
    small = next(small_configs(config))
    assert isinstance(small, OwnConfig)
    assert (small.hidden_size, small.kind, small.switch) == (64, "gated", True)
    assert (small.chunk_size_feed_forward, small.later) == (4, "a script's own")


def test_the_task_of_a_class_is_that_of_its_base_class() -> None:
    class Own(transformers.BertForMaskedLM):
        pass

    assert task_of(Own) == "MASKED_LM"
    assert task_of(torch.nn.Linear) == ""
