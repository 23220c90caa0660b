"""All that Echelon knows of transformers' internals: names and signatures that differ between releases.

A release that renames or moves one of them changes this file alone; a test finds the names elsewhere. The public names
of the package itself (`transformers.PreTrainedModel`) are used everywhere. Names of a model's modules are in tables.
"""

import inspect
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from functools import cache
from typing import Any
from unittest.mock import patch

from torch import Tensor, nn
from transformers import AttentionInterface, DynamicCache, initialization, modeling_utils
from transformers.conversion_mapping import get_model_conversion_mapping
from transformers.core_model_loading import (
    WeightConverter,
    WeightRenaming,
    dot_natural_key,
    rename_source_key,
)
from transformers.dynamic_module_utils import custom_object_save
from transformers.loss.loss_utils import ForCausalLMLoss
from transformers.masking_utils import (
    AttentionMaskInterface,
    bidirectional_mask_function,
    causal_mask_function,
)
from transformers.modeling_layers import GradientCheckpointingLayer
from transformers.modeling_outputs import BaseModelOutput
from transformers.models.auto import modeling_auto
from transformers.pytorch_utils import Conv1D
from transformers.utils import CONFIG_NAME, GENERATION_CONFIG_NAME, import_utils

__all__ = [
    "CONFIG_NAME",
    "GENERATION_CONFIG_NAME",
    "AttentionInterface",
    "AttentionMaskInterface",
    "BaseModelOutput",
    "Conv1D",
    "ForCausalLMLoss",
    "GradientCheckpointingLayer",
    "WeightConverter",
    "WeightRenaming",
    "bidirectional_mask_function",
    "causal_mask_function",
    "custom_object_save",
    "dot_natural_key",
    "get_model_conversion_mapping",
    "modeling_auto",
    "rename_source_key",
]

# The key-value cache as an argument of models and layers. 5.24 has the first name; the others are those of older
# releases, and of models with code of their own.
CACHE_NAMES = ("cache", "past_key_values", "cache_params", "layer_past")


class EmptyCache(DynamicCache):
    """A cache that saves nothing: a recomputed layer would append its keys and values a second time."""

    def update(self, key_states: Tensor, value_states: Tensor, *_: Any, **__: Any) -> tuple[Tensor, Tensor]:
        """Return the keys and values of this call only."""
        return key_states, value_states


# Substrings in names of layers' inputs that are no tensors or have no gradients: masks, rotations, caches, routes.
WITHOUT_GRADIENT = ("mask", "position", "past", "cache", "seq", "index", "output_", "layer_type")
# The mask (B, heads or 1, queries, keys) as an argument of attention modules.
MASK_NAMES = ("attention_mask", "mask")
# The cosines and sines of rotary embeddings as an argument of layers and attention modules.
ROTATIONS = "position_embeddings"
# Arguments of layers with an entry for each position, besides hidden states, and their sequence dimension.
LAYER_POSITIONS = {ROTATIONS: -2, "position_ids": -1, "cache_position": -1}

# Arguments that layers pass to attention functions: settings,
ATTENTION_SETTINGS = frozenset(("scaling", "dropout", "is_causal", "softcap"))
# those that repeat the mask or describe heads,
ATTENTION_BY_HEADS = frozenset(
    (
        *("sliding_window", "position_bias", "s_aux", "deterministic"),
        *("cu_seq_lens_q", "cu_seq_lens_k", "max_length_q", "max_length_k"),
    )
)
# and those that the mask covers, or that do not concern attention.
BESIDES_ATTENTION = frozenset(
    (
        *("sliding_window", "position_ids", "cache_position", "use_cache"),
        *("output_router_logits", "output_hidden_states", "return_dict"),
        *("num_items_in_batch", "shift_labels"),  # of the loss
    )
)
# Names in a model's file: its eager attention, and the table of the others.
EAGER_FUNCTION, ATTENTION_TABLE = "eager_attention_forward", "ALL_ATTENTION_FUNCTIONS"
# Attributes of a model's class: True if it supports the kernel.
SUPPORTS_SDPA, SUPPORTS_FLASH, SUPPORTS_FLEX = (
    "_supports_sdpa",
    "_supports_flash_attn",
    "_supports_flex_attn",
)
# The setting of a config that names its attention.
ATTENTION = "_attn_implementation"


def attention_name(config: Any) -> str:
    """Return the name of the attention of models with this config."""
    name: str = getattr(config, ATTENTION)
    return name


def set_attention_name(config: Any, name: str) -> None:
    """Set the attention to a registered name; `set_attn_implementation` imports a package for some names."""
    setattr(config, ATTENTION, {"": name})


def can_set_attention(model: Any) -> bool:
    """Return True if the attention of a model can be changed after its construction."""
    return bool(model._can_set_attn_implementation())


def register_attention(name: str, attend: Callable[..., Any], masks: str | Callable[..., Any]) -> None:
    """Register an attention function, and the function that makes its masks.

    Args:
        name: the name in both interfaces of transformers.
        attend: the attention function.
        masks: the name of an attention that has the same masks, or a function with the signature that the newest
            release calls: with `q_length`, `q_offset` and `device`.
    """
    AttentionInterface.register(name, attend)
    make_masks = AttentionMaskInterface()[masks] if isinstance(masks, str) else _accepting_positions(masks)
    AttentionMaskInterface.register(name, make_masks)


def _accepting_positions(make_mask: Callable[..., Any]) -> Callable[..., Any]:
    """Wrap a mask function for older releases, which give positions of queries, not their length, offset and device."""

    def make(*args: Any, cache_position: Tensor | None = None, **kwargs: Any) -> Any:
        if cache_position is not None:
            first, device = cache_position[0], cache_position.device
            kwargs |= {"q_length": len(cache_position), "q_offset": first, "device": device}
        return make_mask(*args, **kwargs)

    return make


def is_recomputed(layer: nn.Module) -> bool:
    """Return True if a layer is recomputed in backward. From 5.24 on it is not in a forward without gradients."""
    return bool(getattr(layer, "gradient_checkpointing", False))


def checkpoint_function(layer: nn.Module) -> Any:
    """Return the function by which a layer is recomputed; None if it has none."""
    return getattr(layer, "_gradient_checkpointing_func", None)


def set_recomputed(layer: nn.Module, *, is_on: bool) -> None:
    """Turn the recomputation of a layer on or off."""
    layer.gradient_checkpointing = is_on  # type: ignore[assignment]


def set_checkpoint_function(layer: nn.Module, checkpoint: Callable[..., Any]) -> None:
    """Set the function by which a layer is recomputed."""
    layer._gradient_checkpointing_func = checkpoint  # type: ignore[assignment]


def grouped_width(module: nn.Module) -> int | None:
    """Return the inner width of experts that torch's grouped product computes; None for another module."""
    implementation = getattr(getattr(module, "config", None), "_experts_implementation", None)
    weight, is_transposed = getattr(module, "down_proj", None), getattr(module, "is_transposed", None)
    if implementation != "grouped_mm" or is_transposed is None or not isinstance(weight, Tensor):
        return None
    return weight.shape[1 if is_transposed else 2]


def is_experts(module: nn.Module) -> bool:
    """Return True for experts in one module: (tokens, indices, weights) in, parameters with a row for each expert."""
    return hasattr(module, "is_transposed") and isinstance(getattr(module, "num_experts", None), int)


# The auxiliary loss of mixtures: its function in the files of models, and the setting that adds it to the loss.
ROUTER_LOSS, ROUTER_LOGITS = "load_balancing_loss_func", "output_router_logits"
_ROUTER_LOSS_INPUTS = ["gate_logits", "num_experts", "top_k", "attention_mask"]


def router_loss_file(model: Any) -> dict[str, Any] | None:
    """Return the names of the file whose auxiliary loss a model's forward calls; None for other models and losses.

    All files with these four inputs compute the same function of all their tokens.
    """
    return _router_loss_names(model.__class__)


@cache  # every batch of a pipeline asks
def _router_loss_names(model_class: type) -> dict[str, Any] | None:
    """Return the globals of the forward that calls the router loss; None if none calls it with the known inputs."""
    for kind in model_class.__mro__:
        forward: Any = inspect.unwrap(vars(kind).get("forward", lambda: None))
        called = getattr(getattr(forward, "__code__", None), "co_names", ())
        if ROUTER_LOSS in called:
            names: dict[str, Any] = forward.__globals__
            inputs = inspect.signature(names[ROUTER_LOSS]).parameters
            return names if list(inputs) == _ROUTER_LOSS_INPUTS else None
    return None


def adds_router_loss(model: Any) -> bool:
    """Return True if the config of a model with an auxiliary loss adds it to the loss."""
    configs = (model.config, model.config.get_text_config())
    return any(getattr(config, ROUTER_LOGITS, False) for config in configs)


def routing_sizes(model: Any) -> tuple[int, int]:
    """Return the numbers of experts and of those of a token, as the model gives them to its auxiliary loss."""
    owner = model if hasattr(model, "num_experts_per_tok") else model.config.get_text_config()
    return owner.num_experts, owner.num_experts_per_tok


def routers_of(model: nn.Module) -> dict[nn.Module, int]:
    """Return the routers whose logits the auxiliary loss gets, with the index of the logits in their outputs."""
    index_of: dict[nn.Module, int] = {}
    for owner in model.modules():
        recorders = (getattr(owner, "_can_record_outputs", None) or {}).get("router_logits", [])
        for recorder in recorders if isinstance(recorders, list) else [recorders]:
            for path, module in owner.named_modules():
                if isinstance(module, recorder.target_class) and (recorder.layer_name or "") in path:
                    index_of[module] = recorder.index
    return index_of


# The setting of a config by which some routers (Switch, NLLB-MoE) cast their own weights, in place, in each forward.
ROUTER_FORMAT = "router_dtype"


# The plans of a config, for the names of its base model's modules: how each is sharded, and in which order they run.
TP_PLAN, PP_PLAN = "base_model_tp_plan", "base_model_pp_plan"
# The module that computes rotary embeddings for all layers; plans do not name it.
ROTARY = "rotary_emb"
# Styles without an effect: replicated modules need none, parameters have entries of their own, and activations
# outside regions are never sharded, whatever the plan proposes for norms.
IGNORED_STYLES = ("replicate", "local_params", "sequence_parallel")
# For modules: the field of a table, by style.
MODULE_STYLES = {
    "colwise": "column",
    "packed_colwise": "column",
    "rowwise": "row",
    "colwise_gather_output": "gathered",
    "colwise_rep": "gathered",
    "rowwise_split_input": "scattered",
    "rowwise_rep": "scattered",
    "replicated_with_grad_allreduce": "partial",
    "mla_kv_a_proj": "partial",
    "moe_tp_experts": "exits",
    "all_reduce": "exits",
}
# For parameters: the sharded dimension and the least number of dimensions, by style.
PARAMETER_STYLES = {
    "colwise": (-2, 1),
    "packed_colwise": (-2, 2),
    "rowwise": (-1, 2),
    "packed_rowwise": (-1, 2),
}


def creation_on_meta() -> AbstractContextManager[Any]:
    """Return a context in which models can be built on the meta device. Releases before 5.1 need none."""
    make = getattr(initialization, "meta_device_safe_creation_ops", nullcontext)
    context: AbstractContextManager[Any] = make()
    return context


def converted(converter: Any, target: str, model: Any) -> dict[str, Any]:
    """Run a `WeightConverter` on the tensors that it has collected, and return the results by name."""
    made = converter.convert(target, model=model, config=model.config)
    return made[0] if isinstance(made, tuple) else made  # 5.0 returns errors too


def file_readers() -> tuple[Callable[..., Any], Callable[..., Any]]:
    """Return the functions by which `from_pretrained` opens safetensors files, and loads others."""
    return modeling_utils.safe_open, modeling_utils.load_state_dict


def reading_files(
    safe_open: Callable[..., Any], load_state_dict: Callable[..., Any]
) -> AbstractContextManager[Any]:
    """Let `from_pretrained` read files by other functions within the block."""
    return patch.multiple(modeling_utils, safe_open=safe_open, load_state_dict=load_state_dict)


def as_untraced() -> AbstractContextManager[Any]:
    """Return a context in which models treat fake tensors as others, and look if masks hide anything."""
    return patch.object(import_utils, "is_fake_tensor", lambda _: False, create=True)
