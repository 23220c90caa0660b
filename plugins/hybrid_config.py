"""Arguments of HybridParallelPlugin as frozen data, validated together: all errors at once."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, fields
from functools import cached_property
from typing import Any

import torch

from ..cluster.device import default_device
from ..cluster.layout import SUB_AXES, MeshLayout, layout_errors
from ..cluster.mesh import ParallelMesh
from ..pipeline.action import Schedule
from ..pipeline.schedules import (
    UserSchedule,
    build_schedule,
    build_stage_ranks,
    splits_backward,
    style_errors,
)
from ..pipeline.stage_manager import PipelineStageManager
from ..shardformer.fused import switch_errors
from ..shardformer.fused_code import compiler_errors
from ..shardformer.policy import Policy
from ..shardformer.recompute import PipelineGradientCheckpointConfig
from ..shardformer.refusals import policy_errors
from ..shardformer.sequence.config import SequenceParallelism, double_ring
from ..shardformer.shard_config import ShardConfig, ShardOptions
from ..shardformer.tables.table import Table
from ..zero.precision import DTYPES, PrecisionConfig, precision_errors
from .loss import LOSS_REDUCTIONS, LossReduction


@dataclass(frozen=True, kw_only=True)
class HybridConfig(ShardOptions):
    """Arguments of `HybridParallelPlugin`; its docstring describes them."""

    tp_size: int = 1
    pp_size: int = 1
    sp_size: int | None = None
    dp_size: int | None = None
    precision: str = "fp32"
    zero_stage: int = 0
    zero_size: int = -1
    num_microbatches: int | None = None
    microbatch_size: int | None = None
    gradient_accumulation_steps: int = 1
    pp_style: str | UserSchedule = "1f1b"
    num_layers_per_stage: Sequence[int] | None = None
    num_model_chunks: int = 1
    gradient_checkpoint_config: PipelineGradientCheckpointConfig | None = None
    activation_offload: bool = False
    overlap_p2p: bool = True
    inner_ring_size: int | None = None
    wp_size: int = 1
    wp_overlap: bool = True
    ep_size: int = 1
    parallel_output: bool = True
    initial_scale: float = 2**16
    min_scale: float = 1
    growth_factor: float = 2
    growth_interval: int = 1000
    backoff_factor: float = 0.5
    hysteresis: int = 2
    max_scale: float = 2**32
    max_norm: float = 0
    zero_bucket_size_in_m: float | None = None
    overlap_communication: bool = True
    overlap_allgather: bool = False
    communication_dtype: torch.dtype | str | None = None
    cpu_offload: bool = False
    loss_reduction: LossReduction = "global"
    check_every: int = 100
    compile_layers: bool = False
    custom_policy: Policy | Table | None = None

    @cached_property
    def sequence(self) -> SequenceParallelism:
        """The sharding of sequences over the tensor or the sequence axis."""
        return self.sequence_over(self.sp_size, inner_ring_size=self.inner_ring_size)

    @property
    def sp(self) -> int:
        """The size of the sequence axis."""
        return self.sequence.own_axis(sp_size=self.sp_size, tp_size=self.tp_size)

    @property
    def sizes(self) -> dict[str, Any]:
        """The sizes of axes, as the arguments of `MeshLayout.of`."""
        axes = (field.name for field in fields(MeshLayout) if field.name != "rank")
        return {axis: getattr(self, f"{axis}_size") for axis in axes} | {"sp": self.sp}

    def shard_config(self, mesh: ParallelMesh, stage_manager: PipelineStageManager) -> ShardConfig:
        """Return ShardFormer's options, with the groups of a mesh. Collective over the world: rings create groups."""
        return ShardConfig(
            tensor_parallel_process_group=mesh.group("tp"),
            pipeline_stage_manager=stage_manager,
            sequence_parallel_process_group=mesh.group("sp"),
            sequence_parallel_rings=double_ring(mesh, self.inner_ring_size),
            axis_groups={axis: mesh.group(axis) for axis in SUB_AXES if mesh.size(axis) > 1},
            parallel_output=self.parallel_output,
            **{each.name: getattr(self, each.name) for each in fields(ShardOptions)},
        )

    @property
    def precision_settings(self) -> dict[str, Any]:
        """The arguments of `PrecisionConfig`."""
        return {each.name: getattr(self, each.name) for each in fields(PrecisionConfig)}

    @cached_property
    def dtype(self) -> torch.dtype:
        """The format of weights and activations."""
        return DTYPES[self.precision]

    @property
    def wire_dtype(self) -> torch.dtype:
        """`communication_dtype` as a torch.dtype."""
        given = self.communication_dtype
        return torch.float32 if given is None else DTYPES[given] if isinstance(given, str) else given

    @property
    def bucket_size(self) -> int | None:
        """`zero_bucket_size_in_m` in elements."""
        millions = self.zero_bucket_size_in_m
        return None if millions is None else int(millions * 2**20)

    @property
    def cutting(self) -> dict[str, int | None]:
        """The arguments of `pipeline.microbatch`; one microbatch by default."""
        number = 1 if self.num_microbatches is self.microbatch_size is None else self.num_microbatches
        return {"num_microbatches": number, "microbatch_size": self.microbatch_size}

    @cached_property
    def stage_ranks(self) -> tuple[int, ...]:
        """The pipeline rank of each stage."""
        return build_stage_ranks(*self._style, self.num_microbatches)

    @property
    def splits_backward(self) -> bool:
        """True if the schedule has separate actions for weight gradients."""
        style, num_ranks, _ = self._style
        return splits_backward(style, num_ranks, self.num_microbatches)

    def schedule(self, num_microbatches: int) -> Schedule:
        """Return the computations of every rank, without sends and receives."""
        style, num_ranks, chunks = self._style
        return build_schedule(
            style, num_ranks, num_microbatches, chunks, required_stage_ranks=self.stage_ranks
        )

    @property
    def _style(self) -> tuple[str | UserSchedule, int, int]:
        """Style, number of ranks and number of chunks; a single rank always runs "1f1b" with one chunk."""
        return ("1f1b", 1, 1) if self.pp_size == 1 else (self.pp_style, self.pp_size, self.num_model_chunks)

    def errors(self, world_size: int) -> list[str]:
        """List all errors for this world size, each with a value that works."""
        # With a wrong type, only the rules that do not read it can be checked.
        if found := self._type_errors():
            wrong = {error.partition("=")[0] for error in found}
            settings = {name: value for name, value in self.precision_settings.items() if name not in wrong}
            return found + policy_errors("custom_policy", self.custom_policy) + precision_errors(**settings)
        dtype = DTYPES.get(str(self.precision))
        return [
            *layout_errors(world_size, **self.sizes),
            *(message for is_wrong, message in (*self._rules(), *self._compile_rules()) if is_wrong),
            *self.fused.errors(default_device(), dtype),
            *(compiler_errors("compile_layers=True", default_device()) if self.compile_layers else ()),
            *self.sequence.errors(tp_size=self.tp_size, sp_size=self.sp),
            *policy_errors("custom_policy", self.custom_policy),
            *(self._stage_errors() if self.pp_size >= 1 else ()),
            *precision_errors(**self.precision_settings),
        ]

    def _type_errors(self) -> list[str]:
        """List values whose type is not that of their field; checks whole numbers and switches only."""
        given = [(each.type, each.name, getattr(self, each.name)) for each in fields(self)]
        allowed: dict[Any, tuple[type, ...]] = {int: (int,), int | None: (int, type(None))}
        return [
            f"{name}={value!r} must be an integer"
            for kind, name, value in given
            if kind in allowed and type(value) not in allowed[kind]
        ] + switch_errors({name: value for kind, name, value in given if kind in (bool, bool | str)})

    def _rules(self) -> Iterator[tuple[bool, str]]:
        """Yield conditions that are errors if true, with their messages."""
        yield (
            self.zero_stage not in (0, 1, 2),
            f"zero_stage={self.zero_stage} is not available: use TorchFSDPPlugin, which shards parameters too, or "
            "zero_stage 0, 1 or 2",
        )
        allowed = (None, *DTYPES, *DTYPES.values())
        yield (
            self.communication_dtype not in allowed,
            f"communication_dtype={self.communication_dtype!r} must be one of {', '.join(map(str, allowed))}",
        )
        yield (
            self.overlap_allgather and self.zero_stage == 0,
            "overlap_allgather=True with zero_stage=0, where every rank updates all parameters and gathers none: "
            "use zero_stage 1 or 2, or leave it out",
        )
        yield (
            not (_is_number(self.max_norm) and self.max_norm >= 0),
            f"max_norm={self.max_norm!r} must be a number of at least 0: use 0 for no clipping",
        )
        yield (
            self.loss_reduction not in LOSS_REDUCTIONS,
            f"loss_reduction={self.loss_reduction!r} must be one of {LOSS_REDUCTIONS}",
        )
        bucket = self.zero_bucket_size_in_m
        yield (
            bucket is not None and not (_is_number(bucket) and 2**-20 <= bucket < 2**20),
            f"zero_bucket_size_in_m={bucket!r} must be a number from 2**-20 (one element) to below 2**20, or None",
        )
        yield (
            self.activation_offload and self.gradient_checkpoint_config is None,
            "activation_offload=True offloads the inputs of recomputed layers, but none are recomputed: give "
            "gradient_checkpoint_config=PipelineGradientCheckpointConfig(gradient_checkpointing_ratio=1.0), "
            "or leave it out",
        )
        names = ("make_vocab_size_divisible_by", "gradient_accumulation_steps", "check_every")
        for name in (*names, "num_microbatches", "microbatch_size"):
            value = getattr(self, name)
            yield value is not None and value < 1, f"{name}={value} must be at least 1"
        number, size = self.num_microbatches, self.microbatch_size
        yield (
            number is not None and size is not None,
            f"num_microbatches={number} and microbatch_size={size} are both given: give one of them",
        )
        yield (
            self.pp_size > 1 and number is size is None,
            f"pp_size={self.pp_size} needs num_microbatches (at least pp_size keeps the stages busy) or "
            "microbatch_size",
        )

    def _compile_rules(self) -> Iterator[tuple[bool, str]]:
        """List the options that cannot be combined with compiled layers."""
        yield (
            self.compile_layers and self.overlap_allgather,
            "compile_layers=True with overlap_allgather=True: compiled code does not wait for parameters in "
            "flight. Leave one of them out",
        )
        yield (
            self.compile_layers and self.fused.jit,
            "compile_layers=True with enable_jit_fused=True (which enable_all_optimization=True turns on): "
            "both compile the same code. Leave enable_jit_fused out, and name the other optimizations one by "
            "one",
        )
        yield (
            self.compile_layers and self.enable_sequence_regather,
            "compile_layers=True with enable_sequence_regather=True: a compiled layer gathers nothing again "
            "in backward. Leave one of them out, or recompute layers (gradient_checkpoint_config)",
        )

    def _stage_errors(self) -> list[str]:
        """List errors of the schedule and of the arguments with one value per stage."""
        number = self.num_microbatches if (self.num_microbatches or 0) >= 1 else None
        found = [
            f"pp_style: {error}"
            for error in style_errors(self.pp_style, self.num_model_chunks, self.pp_size, number)
        ]
        if not found and self.compile_layers and self.splits_backward:
            found.append(
                f"pp_style={self.pp_style!r} with compile_layers=True: a compiled layer cannot defer its "
                "weight gradients. Use '1f1b', or leave compile_layers out"
            )
        num_stages = None if found or number != self.num_microbatches else len(self.stage_ranks)
        counts, recomputed = self.num_layers_per_stage, self.gradient_checkpoint_config
        are_counts = isinstance(counts, Sequence) and all(type(each) is int and each >= 1 for each in counts)
        if counts is not None and not (are_counts and num_stages in (None, len(counts))):
            many = (
                "each stage"
                if num_stages is None
                else f"each of {num_stages} stages (pp_size times those of a rank)"
            )
            found.append(
                f"num_layers_per_stage={counts!r} must be a list of positive integers, one for {many}"
            )
        if isinstance(recomputed, PipelineGradientCheckpointConfig):
            found += recomputed.errors(num_stages)
            if self.compile_layers and recomputed.recompute_modules is not None:
                found.append(
                    f"recompute_modules={recomputed.recompute_modules!r} with compile_layers=True: modules "
                    "within a compiled layer cannot be recomputed. Leave recompute_modules out to recompute "
                    "whole layers"
                )
        elif recomputed is not None:
            found.append(
                f"gradient_checkpoint_config={recomputed!r} must be a PipelineGradientCheckpointConfig: "
                "PipelineGradientCheckpointConfig(gradient_checkpointing_ratio=0.5), for example"
            )
        return found


def _is_number(value: object) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool)
