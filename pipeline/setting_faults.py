"""Settings of a model or a batch that mean something else where each stage sees its own layers alone."""

from collections.abc import Mapping
from typing import Any

# What collects over all layers, and would silently be partial where a rank has some of them, or parts of sequences.
COLLECTING = (
    "output_hidden_states",
    "output_attentions",
    "output_router_logits",
    "use_weighted_layer_sum",  # of hidden states, in heads for sound
)


def settings_of(model: Any) -> dict[str, Mapping[str, Any]]:
    """The settings of a model's config, and of those inside it, by what messages call them."""
    config = getattr(model, "config", None)
    if config is None:
        return {}
    settings = config.to_dict() if hasattr(config, "to_dict") else vars(config)  # a user's own has none
    inside = {name: settings.get(name) for name in getattr(config, "sub_configs", ())}
    of_parts = {f"the model's config, {name}": part for name, part in inside.items() if part is not None}
    return {"the model's config": settings, **of_parts}


def setting_faults(settings: Mapping[str, Any], source: str) -> list[str]:
    """Why these settings (a batch, a config) would give other results under a pipeline; empty when none do."""
    found = [
        f"{name}={settings[name]!r} in {source} collects over all layers, and a pipeline stage sees its own alone: "
        f"leave it out or use pp_size=1"
        for name in COLLECTING
        if settings.get(name)
    ]
    return found + layer_drop_faults(
        settings, source, who="the stages of a pipeline", instead="use pp_size=1"
    )


def layer_drop_faults(settings: Mapping[str, Any], source: str, *, who: str, instead: str) -> list[str]:
    """Why these settings would let ranks that must run the same layers run others; empty when they do not."""
    return [
        f"{name}={value!r} in {source} leaves out layers at random, and {who} would not leave out the same: set it to "
        f"0 or {instead}"
        for name, value in settings.items()
        if name.endswith("layerdrop") and value
    ]
