"""Arguments of ColossalAI's plugins without a counterpart in Echelon: accepted if they change nothing, else refused."""

from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

from ..cluster.errors import ErrorList, unknown_arguments


class Unavailable(NamedTuple):
    """An argument of ColossalAI 0.5.

    Args:
        accepted: the accepted values, which need nothing that Echelon lacks.
        instead: advice in the error for any other value.
    """

    accepted: tuple[Any, ...]
    instead: str


_OFF = (False,)
_NONE = (None,)
_FP8 = {
    "fp8_communication": Unavailable(_OFF, "leave it out; nothing is communicated in 8 bits"),
    "use_fp8": Unavailable(_OFF, "leave it out and use precision='bf16'"),
}
HYBRID = {
    **_FP8,
    # Echelon's data parallelism does not use torch's DDP.
    "broadcast_buffers": Unavailable((True, False), ""),
    "ddp_bucket_cap_mb": Unavailable((25,), "use zero_bucket_size_in_m"),
    "find_unused_parameters": Unavailable(_OFF, "leave it out; unused parameters need no search here"),
    "check_reduction": Unavailable(_OFF, "leave it out; a step waits for its reductions"),
    "gradient_as_bucket_view": Unavailable(_OFF, "leave it out; gradients are added up in buckets anyway"),
    "static_graph": Unavailable(_OFF, "leave it out; the graph may change between steps"),
    "scheduler_nodes": Unavailable(
        _NONE, "leave it out with 'zbv', and give a schedule of your own as pp_style"
    ),
    "enable_metadata_cache": Unavailable((True, False), ""),
    # An argument of older versions of Echelon; torch's allocator manages this memory now.
    "wp_memory_pool": Unavailable((True, False), ""),
    "dp_outside": Unavailable(_OFF, "leave it out; ranks are ordered as pp, dp, sp, tp"),
}
ZERO = {
    **_FP8,
    "norm_type": Unavailable(
        (2.0,), "leave it out and call optimizer.clip_grad_by_norm(max_norm, norm_type)"
    ),
    "master_weights": Unavailable((True,), "leave it out; 16-bit weights always have float32 masters"),
    "verbose": Unavailable(_OFF, "leave it out; optimizer.skipped_steps counts overflows"),
    "cast_inputs": Unavailable((True,), "leave it out; floating inputs are cast to the precision"),
    "extra_dp_size": Unavailable((1,), "use zero_size, the number of ranks that share the states"),
}
DDP = {"fp8_communication": _FP8["fp8_communication"]}
_NO_SCALE = (
    "leave it out, since torch's GradScaler, which scales the loss here, has none; or use another plugin"
)
FSDP = {
    **dict.fromkeys(("hysteresis", "min_scale", "max_scale"), Unavailable(_NONE, _NO_SCALE)),
    "fp8_communication": _FP8["fp8_communication"],
    "process_group": Unavailable(_NONE, "leave it out; shard_size divides the ranks"),
    "sharding_strategy": Unavailable(_NONE, "use shard_size and reshard_after_forward"),
    "auto_wrap_policy": Unavailable(_NONE, "leave it out; transformer layers are wrapped one by one"),
    "backward_prefetch": Unavailable(_NONE, "leave it out; torch prefetches the next layer"),
    "mixed_precision": Unavailable(_NONE, "use precision='bf16' or 'fp16'"),
    "ignored_modules": Unavailable(_NONE, "leave it out; all parameters are sharded"),
    "param_init_fn": Unavailable(_NONE, "build the model in a LazyInitContext"),
    "sync_module_states": Unavailable(_OFF, "leave it out; boost refuses models that differ between ranks"),
}


def unavailable_errors(
    init: Callable[..., None], unavailable: Mapping[str, Unavailable], arguments: Mapping[str, Any]
) -> list[str]:
    """Return an error for each of ColossalAI's arguments whose value asks for what Echelon lacks.

    Args:
        init: the constructor of the plugin; an error of an unknown argument suggests similar names in its signature.
        unavailable: by name, ColossalAI's arguments that are not in this signature.
        arguments: the user's arguments that are not in this signature.

    Raises:
        TypeError: an argument is in neither of both; the message also has the errors of the other arguments.
    """
    errors = [
        f"{name}={value!r} of ColossalAI is not available: {unavailable[name].instead}"
        for name, value in arguments.items()
        if name in unavailable
        and not any(_is_same(value, accepted) for accepted in unavailable[name].accepted)
    ]
    if unknown := unknown_arguments(init, arguments, unavailable):
        raise TypeError(str(ErrorList(*unknown, *errors)))
    return errors


def _is_same(value: Any, accepted: Any) -> bool:
    """Compare a value with an accepted one. Numbers may differ in type (25 and 25.0), but True is not 1."""
    return value is accepted or (type(value) in (int, float) and bool(value == accepted))
