"""Options of HybridParallelPlugin as frozen data, with all of their errors at once."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any

import torch

from ..cluster.launch import default_device
from ..cluster.mesh import mesh_errors
from ..pipeline.action import Schedule
from ..pipeline.schedules import (
    UserSchedule,
    build_schedule,
    splits_backward,
    stage_placement,
    style_errors,
)
from ..shardformer.fused import FusedKernels, switch_errors
from ..shardformer.policy import Policy
from ..shardformer.recompute import PipelineGradientCheckpointConfig
from ..shardformer.refusals import policy_errors
from ..shardformer.sequence.config import WHOLE, SequenceParallelism
from ..shardformer.tables.table import Table
from ..shardformer.weight_sharding import weight_errors
from ..zero.partition import zero_size_errors
from ..zero.precision import DTYPES, PrecisionConfig, default_precision, precision_faults

# Arguments of the plugin by the names that they have in the configs; those that are not listed keep theirs.
_PIPELINE = {
    "pp_style": "style",
    "num_model_chunks": "num_model_chunks",
    "num_microbatches": "num_microbatches",
    "microbatch_size": "microbatch_size",
    "num_layers_per_stage": "num_layers_per_stage",
    "overlap_p2p": "overlap_p2p",
    "gradient_checkpoint_config": "checkpoint",
}
_PRECISION = {
    name: name
    for name in (
        *("precision", "initial_scale", "min_scale", "growth_factor", "growth_interval", "backoff_factor"),
        *("hysteresis", "max_scale"),
    )
}
_FUSED = {
    "enable_flash_attention": "flash_attention",
    "enable_xformers": "xformers",
    "enable_fused_normalization": "normalization",
    "enable_jit_fused": "jit",
    "enable_all_optimization": "everything",
}
_SEQUENCE = {
    "enable_sequence_parallelism": "enable",
    "sequence_parallelism_mode": "mode",
    "enable_sequence_regather": "regathers",
    "enable_sequence_overlap": "overlaps",
    "inner_ring_size": "inner_ring_size",
}
_RENAMED = {
    "tp_size": "tp",
    "pp_size": "pp",
    "dp_size": "dp",
    "wp_size": "wp",
    "zero_bucket_size_in_m": "bucket_size_in_m",
}


def _taken(arguments: dict[str, Any], names: Mapping[str, str]) -> dict[str, Any]:
    """Take these arguments out, under their other names."""
    return {name: arguments.pop(argument) for argument, name in names.items()}


@dataclass(frozen=True, kw_only=True)
class PipelineConfig:
    """Options of the pipeline.

    Args:
        style: a name in `pipeline.schedules.SCHEDULES`, or a schedule of the user's own.
        num_model_chunks: how many stages each rank holds, where the style takes any number.
        num_microbatches, microbatch_size: into how many parts a batch is split, or of how many samples each;
            one of them under a pipeline, and neither means one part.
        num_layers_per_stage: how many layers each stage gets; None deals them out.
        overlap_p2p: compute while tensors are in flight between stages.
        checkpoint: which layers are recomputed in backward; None for none.
    """

    style: str | UserSchedule = "1f1b"
    num_model_chunks: int = 1
    num_microbatches: int | None = None
    microbatch_size: int | None = None
    num_layers_per_stage: Sequence[int] | None = None
    overlap_p2p: bool = True
    checkpoint: PipelineGradientCheckpointConfig | None = None

    @property
    def cutting(self) -> dict[str, int | None]:
        """The arguments of `pipeline.microbatch`: one microbatch where nothing is given."""
        is_given = self.num_microbatches is not None or self.microbatch_size is not None
        return {
            "num_microbatches": self.num_microbatches if is_given else 1,
            "microbatch_size": self.microbatch_size,
        }

    def errors(self, pp_size: int) -> list[str]:
        """List all errors for a pipeline of so many ranks, each with what would work."""
        found = self._number_errors(pp_size)
        style = self._style_errors(pp_size)
        num_stages = None  # not known where the schedule is not
        if not found and not style:
            num_stages = len(self.placement(pp_size))
        found += [*style, *switch_errors({"overlap_p2p": self.overlap_p2p})]
        return found + self._layer_errors(num_stages) + self._checkpoint_errors(num_stages)

    def _style_errors(self, pp_size: int) -> list[str]:
        """Errors of the schedule, for any number of microbatches where that number is an error itself."""
        if whole_number_errors({"num_model_chunks": self.num_model_chunks}):
            return []
        number = self.num_microbatches
        is_known = number is not None and not whole_number_errors({"": number}) and not is_below_one(number)
        found = style_errors(self.style, self.num_model_chunks, pp_size, number if is_known else None)
        return [f"pp_style: {error}" for error in found]

    def _number_errors(self, pp_size: int) -> list[str]:
        parts = {"num_microbatches": self.num_microbatches, "microbatch_size": self.microbatch_size}
        given = {name: value for name, value in parts.items() if value is not None}
        numbers = given | {"num_model_chunks": self.num_model_chunks}
        found = whole_number_errors(numbers)
        found += [
            f"{name}={value} must be at least 1" for name, value in given.items() if is_below_one(value)
        ]
        if len(given) == 2:
            found.append(
                f"num_microbatches={self.num_microbatches} and microbatch_size={self.microbatch_size} are both given: "
                "each follows from the other and the batch, so give one"
            )
        if pp_size > 1 and not given:
            found.append(
                f"pp_size={pp_size} needs num_microbatches (at least pp_size keeps the stages busy) or microbatch_size"
            )
        return found

    def _checkpoint_errors(self, num_stages: int | None) -> list[str]:
        if self.checkpoint is None:
            return []
        if not isinstance(self.checkpoint, PipelineGradientCheckpointConfig):
            return [
                f"gradient_checkpoint_config={self.checkpoint!r} must be a PipelineGradientCheckpointConfig: "
                "PipelineGradientCheckpointConfig(gradient_checkpointing_ratio=0.5), for example"
            ]
        return self.checkpoint.faults(num_stages)

    def placement(self, pp_size: int) -> tuple[int, ...]:
        """The pipeline rank of each stage."""
        return stage_placement(*self._style(pp_size), self.num_microbatches)

    def splits_backward(self, pp_size: int) -> bool:
        """Return True for a schedule with weight gradients as actions of their own."""
        style, num_ranks, _ = self._style(pp_size)
        return splits_backward(style, num_ranks, self.num_microbatches)

    def schedule(self, pp_size: int, num_microbatches: int) -> Schedule:
        """The computations of every rank."""
        style, num_ranks, num_chunks = self._style(pp_size)
        return build_schedule(
            style, num_ranks, num_microbatches, num_chunks, usual_placement=self.placement(pp_size)
        )

    def _style(self, pp_size: int) -> tuple[str | UserSchedule, int, int]:
        """Style, ranks and chunks; a single rank has nothing to gain from several stages or from waiting work."""
        return ("1f1b", 1, 1) if pp_size == 1 else (self.style, pp_size, self.num_model_chunks)

    def _layer_errors(self, num_stages: int | None) -> list[str]:
        given = self.num_layers_per_stage
        if given is None:
            return []
        is_list = isinstance(given, Sequence) and all(
            isinstance(count, int) and not isinstance(count, bool) and count >= 1 for count in given
        )
        if is_list and num_stages in (None, len(given)):
            return []
        many = (
            "each stage"
            if num_stages is None
            else f"each of {num_stages} stages (pp_size times those of a rank)"
        )
        return [f"num_layers_per_stage={given!r} must be a list of positive whole numbers, one for {many}"]


@dataclass(frozen=True, kw_only=True)
class HybridConfig:
    """Options of a HybridParallelPlugin.

    Args:
        tp, pp, sp: sizes of the tensor, pipeline and sequence axes.
        sequence: how sequences are sharded over the tensor or the sequence axis.
        wp: the number of neighbours on the data axis over which the weights of linear layers are sharded.
        wp_overlap, wp_memory_pool: see `shardformer.layers.weight_sharding.WeightPool`.
        dp: size of the data axis; None is what the world size leaves.
        zero_stage: 0 plain data parallelism, 1 optimizer states sharded over it, 2 gradients too.
        zero_size: the number of replicas over which they are sharded; -1 or 0 is all of them.
        overlap_communication: whether gradients are averaged while backward runs.
        overlap_allgather: whether parameters are gathered while the next forward runs.
        communication_dtype: the format in which gradients are averaged over the replicas; None is float32.
        cpu_offload: whether masters and optimizer states are on the CPU.
        gradient_accumulation_steps: of how many calls a step takes the mean; 1 is the sum of any number.
        pipeline: how a batch goes through it.
        precision_settings: the arguments of `zero.precision.PrecisionConfig`.
        max_norm: gradients are clipped to this norm; 0 does not clip.
        bucket_size_in_m: millions (2**20) of gradient elements that are reduced together.
        parallel_output, make_vocab_size_divisible_by: see `shardformer.ShardConfig`.
        fused: the fused kernels that the model is to use.
        custom_policy: the policy or table that splits the model; None takes the table of its type.
    """

    tp: int = 1
    pp: int = 1
    sp: int = 1
    dp: int | None = None
    sequence: SequenceParallelism = WHOLE
    wp: int = 1
    wp_overlap: bool = True
    wp_memory_pool: bool = True
    zero_stage: int = 0
    zero_size: int = -1
    overlap_communication: bool = True
    overlap_allgather: bool = False
    communication_dtype: torch.dtype | str | None = None
    cpu_offload: bool = False
    gradient_accumulation_steps: int = 1
    pipeline: PipelineConfig
    precision_settings: Mapping[str, Any]
    max_norm: float = 0.0
    bucket_size_in_m: float = 12
    parallel_output: bool = True
    make_vocab_size_divisible_by: int = 64
    check_every: int = 100
    fused: FusedKernels = field(default_factory=FusedKernels)
    custom_policy: Policy | Table | None = None

    @classmethod
    def of(cls, arguments: Mapping[str, Any]) -> "HybridConfig":
        """The options that all arguments of the plugin together ask for, by name."""
        rest = dict(arguments)
        sp_size, tp_size = rest.pop("sp_size"), rest["tp_size"]
        sequence = SequenceParallelism.asked(sp_size=sp_size, **_taken(rest, _SEQUENCE))
        precision = _taken(rest, _PRECISION)
        if precision["precision"] is None:
            precision["precision"] = default_precision(default_device())
        return cls(
            sp=sequence.own_axis(sp_size=sp_size, tp_size=tp_size),
            sequence=sequence,
            pipeline=PipelineConfig(**_taken(rest, _PIPELINE)),
            precision_settings=precision,
            fused=FusedKernels.asked(**_taken(rest, _FUSED)),
            **{_RENAMED.get(name, name): value for name, value in rest.items()},
        )

    @cached_property
    def precision(self) -> PrecisionConfig:
        """The precision, once its settings are known to be sound."""
        return PrecisionConfig(**self.precision_settings)

    @property
    def wire_dtype(self) -> torch.dtype:
        """`communication_dtype` as torch's object."""
        given = self.communication_dtype
        return torch.float32 if given is None else DTYPES[given] if isinstance(given, str) else given

    def errors(self, world_size: int) -> list[str]:
        """List all errors in a world of this size, each with what would work."""
        sizes = {"tp_size": self.tp, "pp_size": self.pp, "sp_size": self.sp, "wp_size": self.wp}
        sizes |= {} if self.dp is None else {"dp_size": self.dp}
        sizes |= {
            "zero_stage": self.zero_stage,
            "zero_size": self.zero_size,
            "make_vocab_size_divisible_by": self.make_vocab_size_divisible_by,
            "gradient_accumulation_steps": self.gradient_accumulation_steps,
            "check_every": self.check_every,
        }
        if found := whole_number_errors(sizes):
            return found
        found = mesh_errors(world_size=world_size, pp=self.pp, dp=self.dp, sp=self.sp, tp=self.tp, wp=self.wp)
        if not found:
            data_size = world_size // (self.pp * self.tp)
            found += zero_size_errors(self.zero_size, data_size)
            found += weight_errors(wp_size=self.wp, tp_size=self.tp)
        if self.zero_stage not in (0, 1, 2):
            found.append(
                f"zero_stage={self.zero_stage} is not available: use TorchFSDPPlugin, which shards parameters too, or "
                "zero_stage 0, 1 or 2"
            )
        if self.communication_dtype not in (None, *DTYPES, *DTYPES.values()):
            allowed = ", ".join(map(str, (*map(repr, DTYPES), *DTYPES.values())))
            found.append(f"communication_dtype={self.communication_dtype!r} must be None or one of {allowed}")
        switches = (
            *("overlap_communication", "overlap_allgather", "cpu_offload"),
            *("wp_overlap", "wp_memory_pool"),
        )
        found += switch_errors({name: getattr(self, name) for name in switches})
        found += self._fused_errors()
        found += self.sequence.faults(tp_size=self.tp, sp_size=self.sp)
        if self.overlap_allgather is True and self.zero_stage == 0:
            found.append(
                "overlap_allgather=True with zero_stage=0, where every rank updates all parameters and gathers none: "
                "use zero_stage 1 or 2, or leave it out"
            )
        if not (isinstance(self.max_norm, (int, float)) and self.max_norm >= 0):
            found.append(f"max_norm={self.max_norm!r} must be a number of at least 0: use 0 for no clipping")
        if not (isinstance(self.bucket_size_in_m, (int, float)) and 2**-20 <= self.bucket_size_in_m < 2**20):
            found.append(f"zero_bucket_size_in_m={self.bucket_size_in_m!r} must be a positive number")
        if self.make_vocab_size_divisible_by < 1:
            found.append(
                f"make_vocab_size_divisible_by={self.make_vocab_size_divisible_by} must be at least 1"
            )
        found += [
            f"{name}={getattr(self, name)} must be at least 1"
            for name in ("gradient_accumulation_steps", "check_every")
            if getattr(self, name) < 1
        ]
        found += policy_errors("custom_policy", self.custom_policy)
        pipeline_errors = self.pipeline.errors(self.pp) if self.pp >= 1 else []
        return found + pipeline_errors + precision_faults(**self.precision_settings)

    def _fused_errors(self) -> list[str]:
        fused = self.fused
        options = {
            "enable_flash_attention": fused.flash_attention,
            "enable_xformers": fused.xformers,
            "enable_fused_normalization": fused.normalization,
            "enable_jit_fused": fused.jit,
        }
        dtype = DTYPES.get(str(self.precision_settings.get("precision")))
        return switch_errors(options) or fused.errors(default_device(), dtype)


def whole_number_errors(given: Mapping[str, Any]) -> list[str]:
    """List values that are not whole numbers."""
    return [
        f"{name}={value!r} must be a whole number"
        for name, value in given.items()
        if isinstance(value, bool) or not isinstance(value, int)
    ]


def is_below_one(value: Any) -> bool:
    """Return True for a number below 1."""
    return isinstance(value, (int, float)) and value < 1
