"""The memory of a rank in a call of `execute_pipeline`, for the error when none is left."""

from collections.abc import Mapping

from ..cluster.device import allocated_bytes
from ..zero.memory import LAYOUT_ADVICE, described_bytes, memory_of
from ..zero.optimizer import ShardedOptimizer
from .engine import PipelineEngine
from .hybrid_config import HybridConfig

_RECOMPUTE = (
    "gradient_checkpoint_config=PipelineGradientCheckpointConfig(gradient_checkpointing_ratio=1.0) recomputes layers "
    "in backward"
)


def memory_in_call(engine: PipelineEngine, optimizer: ShardedOptimizer | None) -> tuple[list[str], list[str]]:
    """Return what holds memory in `execute_pipeline`, and what to change, in this order.

    Activations are what a device has allocated beyond all that the optimizer knows; a CPU does not count its memory.

    Args:
        engine: of the call.
        optimizer: the boosted one; None in an evaluation.
    """
    if optimizer is None:
        known = sum(parameter.nbytes for parameter in engine.module.parameters())
        held, advice = [f"parameters {described_bytes(known)}"], [LAYOUT_ADVICE]
    else:
        known = sum(optimizer.held_bytes().values())
        held, advice = memory_of(optimizer)
    allocated = allocated_bytes(engine.mesh.device)
    beyond = "" if allocated is None else f" {described_bytes(max(allocated - known, 0))}"
    stages = ", ".join(
        f"stage {stage} of {count} microbatch{'es' * (count > 1)} in flight"
        + (f" (its first one kept {described_bytes(kept)})" if (kept := engine.kept_bytes.get(stage)) else "")
        for stage, count in sorted(engine.in_flight.items())
    )
    held.insert(0, f"activations{beyond}: {stages or 'those of the microbatch that runs'}")
    return held, [*_advice_on_activations(engine.config, engine.in_flight), *advice]


def _advice_on_activations(config: HybridConfig, in_flight: Mapping[int, int]) -> list[str]:
    """Return what makes activations smaller."""
    number, size = config.num_microbatches, config.microbatch_size
    advice = []
    if size is None:
        advice.append(f"num_microbatches={2 * (number or 1)} halves each microbatch")
    elif size > 1:
        advice.append(f"microbatch_size={size // 2} halves each microbatch")
    if config.pp_style == "gpipe" and sum(in_flight.values()) > 1:
        advice.append('pp_style="1f1b" keeps fewer microbatches in flight')
    if config.gradient_checkpoint_config is None:
        advice.append(_RECOMPUTE)
    return advice
