"""The printed script: its batch is one that the model computes, of any head, with a loss."""

import textwrap
from typing import Any

import pytest
import torch
import transformers

from echelon.cluster.gpus import GPUS
from echelon.planning.meta_model import build_on_meta, length_errors
from echelon.planning.script import script
from echelon.planning.search import Job, Planner
from echelon.verify.layout_choice import Layout

SIZES: dict[str, Any] = dict(
    hidden_size=32, intermediate_size=64, num_hidden_layers=2, num_attention_heads=4, num_key_value_heads=2
)
TEXT: dict[str, Any] = dict(SIZES, vocab_size=512, max_position_embeddings=64)
IMAGE: dict[str, Any] = dict(
    hidden_size=32,
    intermediate_size=64,
    num_hidden_layers=2,
    num_attention_heads=4,
    image_size=32,
    patch_size=8,
)
CONFIGS: tuple[tuple[str, str, dict[str, Any]], ...] = (
    ("llama", "LlamaForCausalLM", TEXT),
    ("llama", "LlamaForSequenceClassification", TEXT),
    ("bert", "BertForQuestionAnswering", TEXT),
    ("bert", "BertForTokenClassification", TEXT),
    ("bert", "BertModel", TEXT),
    ("vit", "ViTForImageClassification", IMAGE),
    (
        "t5",
        "T5ForConditionalGeneration",
        dict(vocab_size=512, d_model=32, d_ff=64, num_layers=2, num_heads=4, d_kv=8),
    ),
    (
        "llava",
        "LlavaForConditionalGeneration",
        dict(
            text_config=dict(TEXT, model_type="llama", vocab_size=33_000),
            vision_config=dict(IMAGE, model_type="clip_vision_model"),
            image_token_index=32_000,
        ),
    ),
)
SAMPLES, MICROBATCHES, LENGTH = 2, 2, 48


@pytest.mark.parametrize(("kind", "name", "settings"), CONFIGS, ids=[name for _, name, _ in CONFIGS])
def test_the_script_computes_a_loss_of_its_batch(kind: str, name: str, settings: dict[str, Any]) -> None:
    config = transformers.CONFIG_MAPPING[kind](**settings)
    model, task = build_on_meta(config, name)
    job = Job(world=1, memory=80, global_batch=4, device=GPUS["h100"], precision="fp32")
    planner = Planner(model, task, LENGTH, job)
    plan = planner.predict(Layout(microbatches=MICROBATCHES), SAMPLES)
    text = script(plan, kind, name, planner.example())

    names: dict[str, Any] = {"torch": torch, "config": config}
    exec("\n".join(line for line in text.splitlines() if line.startswith("config.")), names)
    exec(textwrap.dedent(text.partition("for step in range(10):\n")[2].partition("    output =")[0]), names)
    batch = names["batch"]
    assert {len(value) for value in batch.values()} == {SAMPLES * MICROBATCHES}
    outputs = getattr(transformers, name)(config)(**batch)
    assert ("criterion" in text) is (outputs.get("loss") is None)
    if "criterion" in text:
        exec(text[text.index("def criterion") : text.index("launch_from_torch(")], names)
    loss = names["criterion"](outputs, batch) if "criterion" in names else outputs.loss
    loss.backward()
    assert torch.isfinite(loss)


@pytest.mark.parametrize(
    ("kind", "settings", "most"),
    [
        ("gpt2", dict(n_embd=32, n_layer=2, n_head=4, n_positions=64), 64),
        (
            "opt",
            dict(TEXT, word_embed_proj_dim=32, ffn_dim=64),
            64,
        ),  # its table has two more rows
        ("roberta", TEXT, 62),  # positions begin after that of padding
        ("llama", TEXT, None),  # rotary positions are computed for any length
    ],
)
def test_texts_beyond_learned_positions_are_refused(
    kind: str, settings: dict[str, Any], most: int | None
) -> None:
    model, _ = build_on_meta(transformers.CONFIG_MAPPING[kind](**settings), None)
    if most is None:
        assert length_errors(model, 10_000) == []
    else:
        assert length_errors(model, most) == []
        (error,) = length_errors(model, most + 1)
        assert f"has {most} learned positions" in error
