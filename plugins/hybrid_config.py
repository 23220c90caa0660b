"""Arguments of HybridParallelPlugin as frozen data, validated together: all errors at once."""

from collections.abc import Iterator, Sequence
from dataclasses import KW_ONLY, dataclass, fields, replace
from functools import cached_property
from typing import Any

import torch

from ..cluster.device import default_device
from ..cluster.layout import SUB_AXES, MeshLayout, layout_errors
from ..cluster.mesh import ParallelMesh
from ..cluster.options import AT_LEAST_ONE, Check, one_of, option, option_errors, type_errors
from ..pipeline.action import Schedule
from ..pipeline.schedules import (
    UserSchedule,
    build_schedule,
    build_stage_ranks,
    splits_backward,
    style_errors,
)
from ..pipeline.stage_manager import PipelineStageManager
from ..shardformer.fused_code import compiler_errors
from ..shardformer.policy import Policy
from ..shardformer.recompute import PipelineGradientCheckpointConfig
from ..shardformer.refusals import policy_errors
from ..shardformer.sequence.config import SequenceParallelism, double_ring
from ..shardformer.shard_config import ShardConfig, ShardOptions
from ..shardformer.tables.table import Table
from ..zero.precision import DTYPES, PRECISION, PrecisionConfig, ScaleOptions, precision_or_default
from .loss_reducer import LOSS_REDUCTIONS, LossReduction

_RECOMPUTED = Check(
    lambda value: isinstance(value, PipelineGradientCheckpointConfig),
    "must be a PipelineGradientCheckpointConfig: PipelineGradientCheckpointConfig(gradient_checkpointing_ratio=0.5), "
    "for example",
)
_STAGES = Check(
    lambda stage: stage in (0, 1, 2),
    "is not available: use TorchFSDPPlugin, which shards parameters too, or zero_stage 0, 1 or 2",
)
_NORM = Check(lambda norm: norm >= 0, "must be a number of at least 0: use 0 for no clipping")
_BUCKET = Check(
    lambda millions: 2**-20 <= millions < 2**20,
    "must be a number from 2**-20 (one element) to below 2**20, or None",
)


@dataclass(frozen=True, kw_only=True)
class DataOptions(ScaleOptions):
    """Options of data parallelism and ZeRO, which LowLevelZeroPlugin has too.

    Args:
        zero_size: the number of neighbouring replicas over which `zero_stage` shards, for example those of a node. -1
            or 0: all of them; 1: no sharding. Gradients are averaged over all replicas in any case.
        num_microbatches: number of microbatches of a batch. A pipeline needs it, or microbatch_size.
        microbatch_size: samples of a microbatch, in the place of their number. Without both there is one.
        gradient_accumulation_steps: calls of `execute_pipeline`, or of `booster.backward`, before each step, which uses
            the mean of their gradients. With 1, any number of calls is allowed, and the step uses their sum.
        max_norm: clip gradients to this norm; 0 disables clipping.
        overlap_communication: average gradients over the replicas during the last backward, or during every one at
            `zero_stage` 2.
        overlap_allgather: let `optimizer.step()` return before updated parameters are all-gathered, at `zero_stage` 1
            and 2; a module that uses one waits for it. See docs/zero.md.
        communication_dtype: the format in which gradients are averaged, for example "bf16" or torch.bfloat16; None is
            float32.
        cpu_offload: keep master weights and optimizer states on the CPU, and update them there; see docs/zero.md.
        loss_reduction: "global": losses and gradients are those of the global batch, whatever its microbatches.
            "microbatch_mean": the mean over replicas of the mean over microbatches, as in ColossalAI.
        check_every: compare batches and calls of all ranks in full, with a message, in the first three calls and in
            every call of this interval. Other calls compare checksums, which are reduced with the gradient norm.
    """

    zero_size: int = -1
    num_microbatches: int | None = option(None, AT_LEAST_ONE)
    microbatch_size: int | None = option(None, AT_LEAST_ONE)
    gradient_accumulation_steps: int = option(1, AT_LEAST_ONE)
    max_norm: float = option(0, _NORM)
    overlap_communication: bool = True
    overlap_allgather: bool = False
    communication_dtype: torch.dtype | str | None = option(None, one_of(None, *DTYPES, *DTYPES.values()))
    cpu_offload: bool = False
    loss_reduction: LossReduction = option("global", one_of(*LOSS_REDUCTIONS))
    check_every: int = option(100, AT_LEAST_ONE)


@dataclass(frozen=True)
class HybridConfig(ShardOptions, DataOptions):
    """Options of HybridParallelPlugin.

    Args:
        tp_size: ranks over which each layer is sharded.
        pp_size: pipeline ranks; each has one stage of the layers, or several with `num_model_chunks`.
        sp_size: ranks over which sequences are sharded, by "all_to_all" and "ring_attn"; None is 1.
        precision: "fp32", "bf16" or "fp16"; 16-bit weights keep float32 masters. None is fp32 on a CPU, bf16 on a GPU
            that computes in it, else fp16.
        zero_stage: 0 replicates optimizer states, 1 shards them over the replicas, 2 shards gradients too: they are
            reduced in every backward, and each rank keeps only its shard.
        dp_size: replicas, each with different batches; None is the world size divided by the other sizes.
        zero_bucket_size_in_m: bucket size in millions (2**20) of gradient elements. None is 12 on CPUs; on CUDA 40, or
            the number of replicas if that is larger.
        pp_style: the schedule: "gpipe", "1f1b", "interleaved", "zbh1", "zbv" (docs/pipeline.md says which to choose),
            or your own: a list of the `Action`s of each rank, or a function that returns one for given numbers of ranks
            and microbatches.
        num_model_chunks: stages per rank, for "interleaved" and "gpipe"; "zbv" always has 2.
        num_layers_per_stage: layers of each stage, in the order of the stages of all chunks. None distributes them
            evenly if their number is divisible, else so that the largest stage has as few parameters as possible.
        gradient_checkpoint_config: layers that are recomputed in backward, or modules in them by name.
        activation_offload: keep the inputs of recomputed layers in host memory until backward; on CUDA the copies
            overlap with computation. See docs/cuda.md.
        overlap_p2p: compute while tensors are in flight between stages.
        inner_ring_size: for "ring_attn": ranks of the inner of two rings, for example those of a node.
        wp_size: neighbours on the data axis (dp and sp together) over which the weights of linear layers are sharded,
            and all-gathered layer by layer (InternEvo's isp, arXiv:2401.09149).
        wp_overlap: prefetch the next layer's weights during the computation of a layer.
        ep_size: neighbours on the data axis over which the experts of a mixture are distributed; tokens travel to their
            experts and back. See docs/experts.md.
        parallel_output: leave logits sharded over the vocabulary after training calls with labels (see
            `VocabParallelLogits`); the loss is computed from sharded logits in any case.
        compile_layers: compile each layer as a separate graph, collectives included; see docs/fused.md.
        custom_policy: the sharding of the model, as a policy or a table, for models without a registered one.
    """

    tp_size: int = 1
    pp_size: int = 1
    sp_size: int | None = None
    precision: str | None = option(None, PRECISION)
    zero_stage: int = option(0, _STAGES)
    _: KW_ONLY
    dp_size: int | None = None
    zero_bucket_size_in_m: float | None = option(None, _BUCKET)
    pp_style: str | UserSchedule = "1f1b"
    num_model_chunks: int = 1
    num_layers_per_stage: Sequence[int] | None = None
    gradient_checkpoint_config: PipelineGradientCheckpointConfig | None = option(None, _RECOMPUTED)
    activation_offload: bool = False
    overlap_p2p: bool = True
    inner_ring_size: int | None = None
    wp_size: int = 1
    wp_overlap: bool = True
    ep_size: int = 1
    parallel_output: bool = True
    compile_layers: bool = False
    custom_policy: Policy | Table | None = None

    @cached_property
    def sequence(self) -> SequenceParallelism:
        """The sharding of sequences over the tensor or the sequence axis."""
        return self.sequence_over(self.sp_size, inner_ring_size=self.inner_ring_size)

    @property
    def sp(self) -> int:
        """The size of the sequence axis."""
        return self.sequence.sequence_axis_size(sp_size=self.sp_size, tp_size=self.tp_size)

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
            **{option.name: getattr(self, option.name) for option in fields(ShardOptions)},
        )

    @property
    def precision_settings(self) -> dict[str, Any]:
        """The arguments of `PrecisionConfig`."""
        arguments = {field.name: getattr(self, field.name) for field in fields(PrecisionConfig)}
        return arguments | {"precision": self.used_precision}

    @property
    def used_precision(self) -> str:
        """The precision, the device's default for None."""
        return precision_or_default(self.precision)

    @cached_property
    def dtype(self) -> torch.dtype:
        """The format of weights and activations."""
        return DTYPES[self.used_precision]

    @property
    def wire_dtype(self) -> torch.dtype:
        """`communication_dtype` as a torch.dtype."""
        dtype = self.communication_dtype
        return torch.float32 if dtype is None else DTYPES[dtype] if isinstance(dtype, str) else dtype

    @property
    def bucket_size(self) -> int | None:
        """`zero_bucket_size_in_m` in elements."""
        millions = self.zero_bucket_size_in_m
        return None if millions is None else int(millions * 2**20)

    @property
    def cutting(self) -> dict[str, int | None]:
        """The arguments of `pipeline.microbatch`; one microbatch by default."""
        number = (
            1 if self.num_microbatches is None and self.microbatch_size is None else self.num_microbatches
        )
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
        """List all errors for this world size, each with a value that works. No communication."""
        errors = [
            *option_errors(self),
            *policy_errors("custom_policy", self.custom_policy),
            *self.bound_errors(),
        ]
        if type_errors(self):  # the rules below read the values
            return errors
        dtype = DTYPES.get(str(self.used_precision))
        return [
            *layout_errors(world_size, **self.sizes),
            *(message for is_wrong, message in (*self._rules(), *self._compile_rules()) if is_wrong),
            *self.fused.errors(default_device(), dtype),
            *(compiler_errors("compile_layers=True", default_device()) if self.compile_layers else ()),
            *self.sequence.errors(tp_size=self.tp_size, sp_size=self.sp),
            *(self._stage_errors() if self.pp_size >= 1 else ()),
            *errors,
        ]

    def _rules(self) -> Iterator[tuple[bool, str]]:
        """Yield (is_wrong, message) for each rule between two options."""
        yield (
            self.overlap_allgather and self.zero_stage == 0,
            "overlap_allgather=True with zero_stage=0, where every rank updates all parameters and gathers none: "
            "use zero_stage 1 or 2, or leave it out",
        )
        yield (
            self.activation_offload and self.gradient_checkpoint_config is None,
            "activation_offload=True offloads the inputs of recomputed layers, but none are recomputed: give "
            "gradient_checkpoint_config=PipelineGradientCheckpointConfig(gradient_checkpointing_ratio=1.0), "
            "or leave it out",
        )
        number, size = self.num_microbatches, self.microbatch_size
        yield (
            number is not None and size is not None,
            f"num_microbatches={number} and microbatch_size={size} are both given: give one of them",
        )
        yield (
            self.pp_size > 1 and number is None and size is None,
            f"pp_size={self.pp_size} needs num_microbatches (at least pp_size keeps the stages busy) or "
            "microbatch_size",
        )

    def _compile_rules(self) -> Iterator[tuple[bool, str]]:
        """Yield (is_wrong, message) for each rule between `compile_layers` and another option."""
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
        """List errors of the schedule, and of `num_layers_per_stage` and recomputation, which depend on its stages."""
        config = self
        if self.num_microbatches is not None and self.num_microbatches < 1:  # `option_errors` reports it
            config = replace(self, num_microbatches=None)
        errors = [
            f"pp_style: {error}"
            for error in style_errors(
                self.pp_style, self.num_model_chunks, self.pp_size, config.num_microbatches
            )
        ]
        if not errors and self.compile_layers and config.splits_backward:
            errors.append(
                f"pp_style={self.pp_style!r} with compile_layers=True: a compiled layer cannot defer its "
                "weight gradients. Use '1f1b', or leave compile_layers out"
            )
        num_stages = None if errors else len(config.stage_ranks)
        return [*errors, *self._layer_count_errors(num_stages), *self._recompute_errors(num_stages)]

    def _layer_count_errors(self, num_stages: int | None) -> list[str]:
        """List the error of `num_layers_per_stage` for this many stages; None is an unknown number."""
        counts = self.num_layers_per_stage
        are_counts = isinstance(counts, Sequence) and all(
            type(count) is int and count >= 1 for count in counts
        )
        if counts is None or (are_counts and num_stages in (None, len(counts))):
            return []
        per_stage = "each stage"
        if num_stages is not None:
            per_stage = f"each of {num_stages} stages (pp_size times those of a rank)"
        return [f"num_layers_per_stage={counts!r} must be a list of positive integers, one for {per_stage}"]

    def _recompute_errors(self, num_stages: int | None) -> list[str]:
        """List errors of `gradient_checkpoint_config` for this many stages; None is an unknown number."""
        recomputed = self.gradient_checkpoint_config
        if not isinstance(recomputed, PipelineGradientCheckpointConfig):
            return []  # None, or reported by `option_errors`
        errors = recomputed.errors(num_stages)
        if self.compile_layers and recomputed.recompute_modules is not None:
            errors.append(
                f"recompute_modules={recomputed.recompute_modules!r} with compile_layers=True: modules "
                "within a compiled layer cannot be recomputed. Leave recompute_modules out to recompute "
                "whole layers"
            )
        return errors
