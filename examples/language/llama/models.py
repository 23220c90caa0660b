"""Causal models of a chosen type and size, and their learning-rate schedule, for the Llama example."""

import json
import math
from pathlib import Path

import torch
from torch import nn
from torch.optim.lr_scheduler import LambdaLR
from transformers import AutoConfig, AutoModelForCausalLM, PretrainedConfig
from transformers.models.auto.modeling_auto import (
    MODEL_FOR_CAUSAL_LM_MAPPING_NAMES,
    MODEL_FOR_MASKED_LM_MAPPING_NAMES,
)
from transformers.utils import logging

from echelon.shardformer import policy_for
from echelon.shardformer.sharder import split_errors
from echelon.shardformer.tables.table import model_types

# hidden size, layers, heads, key-value heads, width of the MLP (the last two only for types that have them)
SIZES = {
    "tiny": (128, 4, 4, 2, 384),
    "small": (256, 6, 8, 4, 768),
    "32m": (512, 8, 8, 8, 1408),
    "125m": (768, 12, 12, 12, 2048),
    "350m": (1024, 24, 16, 16, 2816),
    "1b": (2048, 22, 32, 4, 5632),
    "3b": (2560, 32, 32, 32, 6912),
    "7b": (4096, 32, 32, 32, 11008),
}
DEFAULT_SIZE = "tiny"


def causal_types() -> list[str]:
    """Return the causal model types for which Shardformer has a table."""
    names = [
        name
        for name in model_types()
        if name in MODEL_FOR_CAUSAL_LM_MAPPING_NAMES and name not in MODEL_FOR_MASKED_LM_MAPPING_NAMES
    ]
    verbosity = logging.get_verbosity()
    logging.set_verbosity_error()  # some default configs warn about their token ids
    try:
        configs = {name: AutoConfig.for_model(name) for name in names}
    finally:
        logging.set_verbosity(verbosity)
    return [
        name
        for name, config in configs.items()
        if not config.is_encoder_decoder and config.get_text_config() is config
    ]


def sized_config(model_type: str, size: str, *, vocabulary: int, sequence_length: int) -> PretrainedConfig:
    """Make a config of a model type in one of SIZES, without dropout.

    Attributes that a type does not have are left out: GPT-2 has no key-value heads.
    """
    hidden, layers, heads, key_value_heads, width = SIZES[size]
    head = hidden // heads
    settings = {
        "vocab_size": vocabulary,
        "hidden_size": hidden,
        "num_hidden_layers": layers,
        "num_attention_heads": heads,
        "num_key_value_heads": key_value_heads,
        "head_dim": head,
        "intermediate_size": width,
        "max_position_embeddings": sequence_length,
        "attention_types": [[["global", "local"], layers // 2]],  # GPT-Neo lists it for every layer
        "rotary_dim": head,  # GPT-J's default is wider than small heads
        **dict.fromkeys(("num_experts", "num_local_experts", "n_routed_experts"), 8),
        "num_experts_per_tok": 2,
        "n_group": 1,
        "topk_group": 1,
        "first_k_dense_replace": 1,
        "moe_intermediate_size": width // 4,
        "shared_expert_intermediate_size": width // 4,
        "pad_token_id": None,  # the default id may exceed this vocabulary
    }
    usual = AutoConfig.for_model(model_type)
    if hasattr(usual, "kv_lora_rank"):  # multi-head latent attention
        settings |= {"num_key_value_heads": heads, "q_lora_rank": hidden // 2, "kv_lora_rank": hidden // 4}
        settings |= {"qk_nope_head_dim": head // 2, "qk_rope_head_dim": head // 2, "v_head_dim": head}
        settings["head_dim"] = head // 2  # the rotary part
    known = {
        name: value
        for name, value in settings.items()
        if hasattr(usual, name) and not isinstance(getattr(type(usual), name, None), property)
    }
    dropouts = {
        name: 0.0 for name, value in vars(usual).items() if "drop" in name and isinstance(value, float)
    }
    return AutoConfig.for_model(model_type, **known, **dropouts)


def config_from_file(path: Path, model_type: str | None) -> tuple[PretrainedConfig | None, list[str]]:
    """Read a config from a JSON file in transformers' format; return it or None, and errors."""
    try:
        settings = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        return None, [f"--config {path}: cannot be read as JSON: {error}"]
    if not isinstance(settings, dict) or not isinstance(settings.get("model_type"), str):
        return None, [f'--config {path}: names no "model_type"']
    own = settings.pop("model_type")
    if model_type not in (None, own):
        return None, [f"--config {path} is a {own}, and --model_type is {model_type}: leave one out"]
    if own not in causal_types():
        return None, [f"--config {path}: model_type {own!r} must be one of {', '.join(causal_types())}"]
    try:
        return AutoConfig.for_model(own, **settings), []
    except Exception as error:  # transformers raises many types, also of other libraries
        return None, [f"--config {path}: transformers does not take it: {error}"]


def config_errors(config: PretrainedConfig, *, sequence_length: int, vocabulary: int) -> list[str]:
    """Return errors if sequences or vocabulary are too large for a config."""
    errors = []
    longest = getattr(config, "max_position_embeddings", sequence_length)
    if sequence_length > longest:
        errors.append(f"--sequence_length {sequence_length} is more than the config's {longest} positions")
    if vocabulary > config.vocab_size:
        errors.append(f"--vocab_size {vocabulary} is more than the config's vocab_size {config.vocab_size}")
    return errors


def layout_errors(config: PretrainedConfig, *, tp_size: int, num_stages: int) -> list[str]:
    """Return errors if a model of this config cannot be built or sharded so; a dry run on the meta device."""
    try:
        with torch.device("meta"):
            model = AutoModelForCausalLM.from_config(config)
    except Exception as error:  # as above
        return [f"transformers cannot build a model of this config: {error}"]
    return split_errors(model, policy_for(model), tp_size=tp_size, num_stages=num_stages)


def make_model(config: PretrainedConfig, *, end_of_text: int, seed: int) -> nn.Module:
    """Make a float32 model with random weights, equal on every rank, and the tokenizer's special tokens."""
    config.bos_token_id = config.eos_token_id = end_of_text
    config.pad_token_id = None  # there is no padding, and its row of the embedding would not be trained
    torch.manual_seed(seed)
    return AutoModelForCausalLM.from_config(config, dtype=torch.float32).train()


def make_scheduler(
    optimizer: torch.optim.Optimizer, *, num_steps: int, warmup_steps: int, min_lr_fraction: float
) -> LambdaLR:
    """Schedule a linear warm-up from above 0, then half a cosine down to a fraction of the learning rate."""

    def factor(step: int) -> float:
        if step < warmup_steps:
            return (step + 1) / (warmup_steps + 1)
        progress = min((step - warmup_steps) / max(num_steps - warmup_steps, 1), 1.0)
        return min_lr_fraction + (1 - min_lr_fraction) * (1 + math.cos(math.pi * progress)) / 2

    return LambdaLR(optimizer, factor)
