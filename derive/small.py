"""Small configs of any model class of transformers: the same structure, in dimensions for a CPU.

A config's settings are recognized by their names, since every model type has its own. What chooses between kinds of
layers (lists with an entry per layer, periods, positions of special layers) keeps every kind. Imports nothing of
Echelon.
"""

import dataclasses
import inspect
import re
from collections.abc import Callable, Collection, Iterator, Mapping
from typing import Any

from transformers import PreTrainedConfig

VOCABULARY, LAYERS, HEADS, HEAD_DIM, WIDTH, INNER, WINDOW = 256, 4, 4, 16, 64, 128, 8
_KEPT = re.compile(
    r"type_vocab_size|.*(spatial_merge|temporal_patch|merge_kernel)_size|num_channels|in_channels|patch_stride|model_type"
)
_DROPOUT = re.compile(
    r".*(dropout|drop_path|layerdrop|_pdrop|drop_rate|mask_time_prob|mask_feature_prob|jitter).*"
)
_TOKEN = re.compile(r"(.*_)?(token|blank|start|end|eos|bos|pad|sep|cls|mask)(_token)?_(id|ids|index)")
_DEPTH = re.compile(
    r"(.*_)?num_hidden_layers|n_layers?|(.*_)?num_layers|(num_)?(en|de)coder_layers"
    r"|(transformer|hidden|n_head)_layers|depth|num_blocks"
)
_PERIOD = re.compile(
    r".*(layer_period|layer_step|layer_interval|attention_interval|window_pattern|sparse_step)"
)
_OFFSET = re.compile(r".*layer_offset")
_PLACES = re.compile(
    r"deepstack.*|fullatt_block.*|global_attn_index.*|cross_attention_layers|mlp_only_layers"
)

# The largest value of a setting by a pattern of its name; the first match counts.
_LIMITS: tuple[tuple[re.Pattern[str], int], ...] = tuple(
    (re.compile(pattern), limit)
    for pattern, limit in (
        (r"(.*_)?vocab_size(_per_layer_input)?|codebook_size|n_vocab", VOCABULARY),
        (r"max_source_positions", WIDTH),
        (
            r"(.*_)?(max_.*position.*|n_positions|max_seq_len|max_sequence_length|max_.*length|seq_length)",
            INNER,
        ),
        (r"num_mel_bins|num_mels|feature_size|n_mels", 16),
        (r"(.*_)?(num_attention_heads|num_heads|attention_heads|n_heads?|linear_num_.*heads)", HEADS),
        (r"(.*_)?(head_dim|d_kv|head_size|kv_channels|attention_head_size|dim_head)", HEAD_DIM),
        (r"(mm_)?tokens_per_image", 4),
        (r"rotary_dim", HEAD_DIM // 2),
        (r"(.*_)?lora_rank", 32),
        (r"(.*_)?(num_experts|num_local_experts|n_routed_experts|num_routed_experts|moe_num_experts)", 4),
        (r"num_experts_per_(tok|token)|num_selected_experts|moe_topk|moe_k|top_k|moe_top_k|router_topk", 2),
        (r"n_group|topk_group|n_groups|mamba_n_groups", 1),
        (r"moe_intermediate_size|(.*_)?shared_expert_intermediate_size|expert_.*size", WIDTH),
        (
            r"(.*_)?(intermediate_size|ffn_dim|ffn_hidden_size|d_ff|mlp_dim|n_inner|intermediate_dim"
            r"|feedforward_dim|dim_feedforward|feed_forward_dim|d_inner)",
            INNER,
        ),
        (
            r"(.*_)?(hidden_size|d_model|n_embd|n_embed|embed_dim|emb_dim|hidden_dim|model_dim|embedding_size"
            r"|projection_dim|projector_(input_)?dim|word_embed_proj_dim|embedding_dim|output_dim|width|proj_dim|cross_dim"
            r"|dim_model|lru_width|attention_hidden_size|pooler_output_size|out_hidden_size|d_embed)|dim",
            WIDTH,
        ),
        (
            r"sliding_window(_size)?|local_attention|attention_window|window_size_left|local_window_size"
            r"|(.*_)?chunk_size|attention_chunk_size|block_size|num_queries|num_query_tokens|num_latents"
            r"|num_denoising|patch_size",
            WINDOW,
        ),
        (r"max_window_layers|first_k_dense_replace", 1),
        (r"index_(topk|kpool)", WINDOW),
        (r"num_nextn_predict_layers|mtp_num_hidden_layers|num_kv_shared_layers", 0),
        (r"train_num_points", 32),
        (r"upsample_groups|num_conv_pos_embedding_groups", 4),
        (r"num_conv_pos_embeddings|query_pre_attn_scalar", 16),
        (r"mask_ratio", 0),
        (r"context_length", INNER),
    )
)
_KEY_VALUE = re.compile(r"(.*_)?(num_key_value_heads|n_kv_heads?|num_kv_heads|multi_query_group_num)")
_QUERY = ("num_attention_heads", "n_head", "num_heads", "n_heads", "encoder_attention_heads")
_IMAGE = re.compile(r"(pretrain_)?image_size|img_size|spatial_size")
_FEATURE_SIZES = re.compile(r".*feat(ure)?_sizes")
# Widths of hidden states, of heads and of features inside a model, or lists of them.
_WIDTHS = re.compile(
    r"(?!.*(image|vocab|patch|window|projection)).*(hidden_sizes?|dims?|dim_per_stage|width|channels|channel_list|d_model"
    r"|d_ff|d_kv|n_embd|n_inner|intermediate_size|output_size|bottleneck_features|head_size|lora_rank"
    r"|coordinate_size|shape_size)"
)
_WIDTH_DIVISOR = 8
# Settings that some classes need and leave at None.
_FILLED = {
    "head_dim": HEAD_DIM,
    "num_attention_heads": HEADS,
    "num_key_value_heads": HEADS // 2,
    "vocab_size": VOCABULARY,
    "pad_token_id": 0,
    "n_routed_experts": 4,
    "n_shared_experts": 1,
    "num_experts_per_tok": 2,
    "n_group": 1,
    "topk_group": 1,
    "decoder_hidden_size": WIDTH,
    "decoder_depth": 2,
    "decoder_num_heads": HEADS,
    "backbone_out_indices": list(range(LAYERS)),
}
_FILLED_TOKEN = re.compile(r"(image|video|audio)_token_(id|index)")


def small_configs(
    config: PreTrainedConfig, kept: Collection[str] = ()
) -> Iterator[PreTrainedConfig | Exception]:
    """Yield small configs of a config's class, or the error of making one.

    The first has small values of the settings for which the class has a default. The others are for classes that it
    does not suit: see `_with_sections`, the arguments of `_Small`, and `_Proportional`.

    Args:
        config: a config of a model; it is not changed.
        kept: names of settings that keep their values.
    """
    attempts: tuple[Callable[[], PreTrainedConfig], ...] = (
        lambda: _Small(kept).config(config),
        lambda: _with_sections(_Small(kept).config(config)),
        lambda: _Small(kept, derived=True).config(config),
        lambda: _Small(kept, filled=True).config(config),
        lambda: _Proportional(kept, _WIDTH_DIVISOR, _divisor_of_images(config)).config(config),
        lambda: _Proportional(kept, _WIDTH_DIVISOR, 1).config(config),
        lambda: _Proportional(kept, 1, _divisor_of_images(config)).config(config),
        lambda: _DepthOnly(kept).config(config),
        lambda: _with_lists(_Proportional(kept, _WIDTH_DIVISOR, _divisor_of_images(config)).config(config)),
    )
    for attempt in attempts:
        try:
            yield _trainable(attempt())
        except Exception as error:  # of any config class: validators, and code that the sizes do not suit
            yield error


class _Small:
    """Replacement of the settings of configs by small values.

    Args:
        kept: names of settings that keep their values.
        derived: also give settings that the class derives from others.
        filled: give some settings that are None a value.
    """

    def __init__(self, kept: Collection[str], *, derived: bool = False, filled: bool = False) -> None:
        self.kept, self.derived, self.filled = kept, derived, filled
        self.tokens: dict[str, int] = {}

    def config(self, config: PreTrainedConfig) -> PreTrainedConfig:
        """Return a small config of the same class."""
        defaults, values, chosen = _defaults(type(config)), _settings(config), dict[str, Any]()
        aliases = {name: alias for alias, name in config.attribute_map.items() if alias in defaults}
        values = {name if name in defaults else aliases.get(name, name): values[name] for name in values}
        layers = _chosen_layers(config)
        for name, value in values.items():
            if name in self.kept:
                chosen[name] = value
            elif isinstance(value, PreTrainedConfig):
                chosen[name] = self.config(value)
            elif self.filled and value is None and name in defaults and _FILLED_TOKEN.fullmatch(name):
                chosen[name] = self.token(name, 0)
            elif self.filled and value is None and name in _FILLED and name in defaults:
                chosen[name] = _FILLED[name]
            elif layers and isinstance(value, (list, tuple)) and len(value) == _depth(config):
                chosen[name] = self.entries(name, [value[layer] for layer in layers])
            elif (
                isinstance(value, (list, tuple))
                and len(value) > LAYERS
                and len(value) in depths_of(config).values()
            ):
                chosen[name] = value[:LAYERS]  # of an encoder or a decoder
            elif (
                self.derived
                or _IMAGE.fullmatch(name)
                or (
                    name in defaults
                    and (
                        defaults[name] is not None
                        or isinstance(value, (bool, str))
                        or _TOKEN.fullmatch(name)
                        or _PLACES.fullmatch(name)
                    )
                )
            ):
                small = self.value(name, value, config)
                if small != value or value != defaults.get(name):  # otherwise the class has this default
                    chosen[name] = small
        stages = getattr(config, "_out_indices", None)  # of a backbone, which counts its stem
        if stages:
            shifted = list(range(1, LAYERS + 1))[-len(stages) :]
            chosen["out_indices"] = shifted if max(stages) > LAYERS else stages
        _fit_state_space(config, chosen)
        if "hidden_size" in chosen and (ratio := getattr(config, "pixel_shuffle_ratio", None)):
            chosen["intermediate_size"] = int(chosen["hidden_size"] / ratio**2)  # pixels become channels
        small = type(config)(**chosen)
        for name, inner in chosen.items():
            if isinstance(inner, PreTrainedConfig) and not hasattr(small, name):
                setattr(small, name, inner)  # a class of older releases, which takes it as a dictionary alone
        for name in values.keys() - defaults.keys() - vars(small).keys() - {*config.attribute_map.values()}:
            # Set by a script, and a model may read it.
            setattr(small, name, self.value(name, values[name], config))
        return small

    def value(self, name: str, value: Any, config: PreTrainedConfig) -> Any:
        """Return a small value of a setting; the same if its name says nothing about a size."""
        if isinstance(value, (bool, str)) or value is None or _KEPT.fullmatch(name):
            return value
        if _DROPOUT.fullmatch(name):
            return type(value)(0) if isinstance(value, (int, float)) else value
        if _TOKEN.fullmatch(name) and not isinstance(value, dict):
            return self.token(name, value)
        if isinstance(value, dict):
            small = {
                key: inner if key in _KEPT_INSIDE else self.value(key, inner, config)
                for key, inner in value.items()
            }
            if value.get("mrope_section"):
                small["mrope_section"] = _sections(HEAD_DIM, value)
            return small
        if isinstance(value, (list, tuple)):
            return self.sequence(name, value)
        if name == "depth_coefficient":
            return min(value, 1.0)
        return self.number(name, value, config) if isinstance(value, int) else value

    def token(self, name: str, value: Any) -> Any:
        """Return a token of the small vocabulary, the same for all settings of a name."""
        if isinstance(value, (list, tuple)):
            return [self.token(f"{name}{place or ''}", token) for place, token in enumerate(value)]
        key = re.sub(r"(_token)?(_ids?|_index)(\d*)$", r"\3", name)
        known = {
            "pad": 0,
            "bos": 1,
            "eos": 2,
            "decoder_start": min(value, 2) if isinstance(value, int) else 0,
        }
        return known[key] if key in known else self.tokens.setdefault(key, 3 + len(self.tokens))

    def entries(self, name: str, value: list[Any]) -> Any:
        """Return a list with an entry for each layer, small if these are depths or widths."""
        if name in _DEPTHS:
            return self.sequence(name, value)
        return _divided(value, _WIDTH_DIVISOR) if name == "hidden_sizes" else value

    def sequence(self, name: str, value: Any) -> Any:
        """Return a small list: depths of groups of layers, places of layers, sides of an image."""
        if name in _DEPTHS:
            return [min(depth, 2) if isinstance(depth, int) else depth for depth in value]
        if name == "backbone_out_indices" and max(value) >= LAYERS:
            return list(range(LAYERS))[-len(value) :]
        if name == "out_indices" and max(value) > LAYERS:  # counted from 1
            return list(range(1, LAYERS + 1))[-len(value) :]
        if _PLACES.fullmatch(name):
            # A deepstack has a feature for each place, and a pipeline sends as many as the small copy has.
            keeps_number = name.startswith("deepstack") and len(value) > LAYERS // 2
            return list(range(1, LAYERS, 1 if keeps_number else 2))[: len(value)]
        if _IMAGE.fullmatch(name) and all(isinstance(side, int) for side in value):
            return type(value)(min(side, 32) for side in value)
        return value

    def number(self, name: str, value: int, config: PreTrainedConfig) -> int:
        """Return a small number."""
        if _DEPTH.fullmatch(name):
            return min(value, LAYERS)
        if _PERIOD.fullmatch(name):
            return min(value, 2)
        if _OFFSET.fullmatch(name):
            return min(value, 1)
        has_groups = any(  # of layers
            isinstance(getattr(config, key, None), (list, tuple)) for key in ("depths", "hidden_sizes")
        )
        if _IMAGE.fullmatch(name):
            is_merged = has_groups and getattr(config, "patch_size", None) != 1  # further from group to group
            return min(value, 64 if is_merged else 32)
        if _KEY_VALUE.fullmatch(name):
            query_heads = next(
                (heads for key in _QUERY if isinstance(heads := getattr(config, key, None), int)), value
            )
            if value <= 1:
                return value
            return min(value, HEADS if value == query_heads else HEADS // 2)  # grouped queries stay grouped
        limit = next((limit for pattern, limit in _LIMITS if pattern.fullmatch(name)), value)
        group_heads = getattr(config, "num_heads", None)  # perhaps a number for each group of layers
        if limit == WIDTH and isinstance(group_heads, (list, tuple)) and isinstance(group_heads[0], int):
            limit = HEAD_DIM * group_heads[0]
        return min(value, limit)


class _DepthOnly(_Small):
    """All sizes but those of lists of layers and vocabularies are kept."""

    def entries(self, name: str, value: list[Any]) -> Any:
        return value

    def sequence(self, name: str, value: Any) -> Any:
        return value if name in _DEPTHS or _IMAGE.fullmatch(name) else super().sequence(name, value)

    def number(self, name: str, value: int, config: PreTrainedConfig) -> int:
        if _DEPTH.fullmatch(name):
            return min(value, LAYERS)
        return min(value, VOCABULARY) if name.endswith("vocab_size") else value


class _Proportional(_DepthOnly):
    """All widths are divided by one number, and all sides of images by another: equal ones stay equal.

    Args:
        kept: names of settings that keep their values.
        width_divisor, image_divisor: 1 keeps the widths or the images.
    """

    def __init__(self, kept: Collection[str], width_divisor: int, image_divisor: int) -> None:
        super().__init__(kept, derived=True)
        self.width_divisor, self.image_divisor = width_divisor, image_divisor

    def entries(self, name: str, value: list[Any]) -> Any:
        return self.sequence(name, value)

    def sequence(self, name: str, value: Any) -> Any:
        if name in _DEPTHS:
            # CvT reads the entry of a group's place from a list with an entry for each layer of the group.
            return [
                min(depth, max(2, group + 1)) if isinstance(depth, int) else depth
                for group, depth in enumerate(value)
            ]
        divisor = self.divisor(name)
        return super().sequence(name, value) if divisor is None else _divided(value, divisor)

    def number(self, name: str, value: int, config: PreTrainedConfig) -> int:
        divisor = self.divisor(name)
        return super().number(name, value, config) if divisor is None else _divided(value, divisor)

    def divisor(self, name: str) -> int | None:
        """Return the divisor of a setting; None if it has none."""
        if _IMAGE.fullmatch(name) or _FEATURE_SIZES.fullmatch(name):
            return self.image_divisor
        return self.width_divisor if _WIDTHS.fullmatch(name) else None


def _divided(value: Any, divisor: int) -> Any:
    """Divide the numbers of nested lists by a divisor; the same if that is not possible for all of them."""
    if isinstance(value, (list, tuple)):
        small = [_divided(entry, divisor) for entry in value]
        return value if any(a == b for a, b in zip(small, value, strict=True)) else type(value)(small)
    return value // divisor if isinstance(value, int) and value % divisor == 0 and value > 32 else value


def _divisor_of_images(config: PreTrainedConfig) -> int:
    """Return the power of 2 by which the largest image has a side of 64 to 127."""
    sizes = [
        size for inner in configs_in(config) for name, size in vars(inner).items() if _IMAGE.fullmatch(name)
    ]
    sides = [side for size in sizes for side in (size if isinstance(size, (list, tuple)) else [size])]
    largest = max((side for side in sides if isinstance(side, int)), default=64)
    return 1 << max(0, (largest // 64).bit_length() - 1)


_KEPT_INSIDE = (
    "rope_type",
    "rope_theta",
    "factor",
    "original_max_position_embeddings",
    "partial_rotary_factor",
)
_DEPTHS = (
    "depths", "num_layers", "stage_numb_of_layers", "layers_per_stage", "blocks_per_stage", "depth", "layers",
    "num_block_repeats",
)  # fmt: skip


def configs_in(config: PreTrainedConfig) -> list[PreTrainedConfig]:
    """Return a config and all configs inside it."""
    inner_configs = [value for value in vars(config).values() if isinstance(value, PreTrainedConfig)]
    return [config, *(nested for inner in inner_configs for nested in configs_in(inner))]


def _defaults(kind: type[PreTrainedConfig]) -> dict[str, Any]:
    """Return the settings that a config class takes, with their defaults: arguments of its `__init__`, and fields."""
    taken = inspect.signature(kind).parameters.values()
    named = (inspect.Parameter.POSITIONAL_OR_KEYWORD, inspect.Parameter.KEYWORD_ONLY)
    defaults = {argument.name: argument.default for argument in taken if argument.kind in named}
    if dataclasses.is_dataclass(kind):
        takes_any = any(argument.kind is argument.VAR_KEYWORD for argument in taken)
        defaults |= {
            field.name: field.default
            if field.default_factory is dataclasses.MISSING
            else field.default_factory()
            for field in dataclasses.fields(kind)
            if takes_any or field.name in defaults
        }
    return defaults


def _settings(config: PreTrainedConfig) -> dict[str, Any]:
    hidden = ("transformers_version", "architectures", "dtype", "model_type")
    return {name: value for name, value in vars(config).items() if name[0] != "_" and name not in hidden}


def depths_of(config: PreTrainedConfig) -> dict[str, int]:
    """Return the numbers of layers in a config, without the configs inside it, by name."""
    settings = _settings(config).items()
    return {name: value for name, value in settings if _DEPTH.fullmatch(name) and isinstance(value, int)}


def _depth(config: PreTrainedConfig) -> int | None:
    names = ("num_hidden_layers", "n_layer", "n_layers", "num_layers")
    return next((depth for name in names if isinstance(depth := vars(config).get(name), int)), None)


def _chosen_layers(config: PreTrainedConfig) -> list[int]:
    """Return the layers whose kinds a small config has: the first of each kind, then further ones; sorted.

    Empty if the config has no list with an entry for each layer. The kind of a layer is its entry in all such lists.
    """
    depth = _depth(config)
    lists = [
        value
        for value in _settings(config).values()
        if isinstance(value, (list, tuple)) and len(value) == depth
    ]
    if depth is None or depth < 2 or not lists:
        return []
    firsts: dict[str, int] = {}
    for layer in range(depth):
        firsts.setdefault(repr([listed[layer] for listed in lists]), layer)
    chosen = sorted(firsts.values())[:LAYERS]
    others = [layer for layer in range(depth) if layer not in chosen]
    return sorted([*chosen, *others[: max(0, min(LAYERS, depth) - len(chosen))]])


def _fit_state_space(config: PreTrainedConfig, chosen: dict[str, Any]) -> None:
    """Set the heads of a state-space mixer, whose width is a multiple of the hidden size."""
    for heads, size, expand in (
        ("num_heads", "head_dim", "expand"),
        ("mamba_n_heads", "mamba_d_head", "mamba_expand"),
        ("mamba_num_heads", "mamba_head_dim", "expand"),
    ):
        if all(isinstance(vars(config).get(name), int) for name in (heads, size, expand)):
            width = chosen.get("hidden_size", getattr(config, "hidden_size", WIDTH))
            chosen[size] = HEAD_DIM
            chosen[heads] = max(1, getattr(config, expand) * width // HEAD_DIM)


def _with_sections(config: PreTrainedConfig) -> PreTrainedConfig:
    """Give every config with rotary embeddings sections of three axes, of which some classes have a default."""
    for inner in configs_in(config):
        if isinstance(rope := getattr(inner, "rope_parameters", None), dict):
            rope.setdefault("mrope_section", [])
    return config


def _with_lists(config: PreTrainedConfig) -> PreTrainedConfig:
    """Make lists of all tuples, as they are in the config of a checkpoint."""
    for inner in configs_in(config):
        for name, value in _settings(inner).items():
            if isinstance(value, tuple):
                setattr(inner, name, list(value))
    return config


def _trainable(config: PreTrainedConfig) -> PreTrainedConfig:
    """Complete a config: tokens that a loss needs, no cache, rotary sections that fit the heads."""
    if (
        getattr(config, "is_encoder_decoder", False)
        and getattr(config, "decoder_start_token_id", None) is None
    ):
        config.decoder_start_token_id = 0
    for inner in configs_in(config):
        rope = getattr(inner, "rope_parameters", None)
        ropes = [rope, *rope.values()] if isinstance(rope, dict) else []  # one, or one for each kind of layer
        for settings in ropes:
            if isinstance(settings, dict) and "mrope_section" in settings:
                settings["mrope_section"] = _sections(_head_dim(inner), settings)
    if getattr(config, "use_cache", False):
        config.use_cache = False
    for with_tokens in (config, config.get_text_config()):
        if getattr(with_tokens, "pad_token_id", None) is None:
            with_tokens.pad_token_id = 0
    return config


def _head_dim(config: Any) -> int:
    return getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads


def _sections(head_dim: int, rope: Mapping[str, Any]) -> list[int]:
    """Return sections of three axes for half of the rotated dimensions of a head."""
    half = int(head_dim * (rope.get("partial_rotary_factor") or 1.0)) // 2
    return [half - 2 * (half // 3), half // 3, half // 3]
