"""Configuration of ShardFormer. policy.py and sharder.py apply it."""

from collections.abc import Mapping
from dataclasses import dataclass, field

import torch.distributed as dist

from ..cluster.errors import raise_errors
from ..cluster.options import AT_LEAST_ONE, Check, option, option_errors
from ..cluster.ring import Rings
from ..pipeline.stage_manager import PipelineStageManager
from .fused import FusedKernels
from .layers.attention_kernels import KERNELS
from .sequence.config import SequenceParallelism, SequenceSplit

_AXES = ("tensor_parallel", "data_parallel")  # each with an argument `_size` and one `_process_group`
_GROUP = Check(
    lambda group: group is None or callable(getattr(group, "size", None)),
    "must be a process group that this rank is in, as dist.new_group returns, or None",
)


@dataclass(frozen=True, kw_only=True)
class ShardOptions:
    """Options that ShardConfig and HybridParallelPlugin have in common.

    Args:
        make_vocab_size_divisible_by: the vocabulary is padded to a multiple of this times the ranks of the tensor axis.
        enable_sequence_parallelism: shard the sequences within layers over ranks; docs/sequence.md says which mode to
            choose.
        sequence_parallelism_mode: mode of sequence parallelism: "split_gather" or "ring" over the tensor axis,
            "all_to_all" or "ring_attn" over the sequence axis. None is "all_to_all" if there is a sequence axis, else
            "split_gather".
        enable_sequence_overlap: for "split_gather" and "ring": overlap the gather in backward with the gradients.
        enable_sequence_regather: for "split_gather": save only the local shard of a gathered activation, and gather it
            again in backward.
        enable_flash_attention: attention by the flash-attn package on CUDA, elsewhere by torch's fused kernels, or the
            kernel's name: "flash_attention_3", "sdpa_cudnn", "flex_attention" and others of docs/fused.md.
        enable_xformers: attention by xFormers, which must be installed.
        enable_fused_normalization: norms by apex or Liger if installed on CUDA, else by torch's fused kernels.
        enable_jit_fused: activation formulas and dropout + addition compiled by torch.
        enable_fused_loss: compute the causal loss in chunks of tokens from the input of the head. float32 logits of a
            full microbatch are never materialized, and training calls with labels return no logits; see docs/fused.md.
        enable_all_optimization: turn on enable_fused_normalization, enable_flash_attention and enable_jit_fused; see
            docs/fused.md.
    """

    make_vocab_size_divisible_by: int = option(64, AT_LEAST_ONE)
    enable_sequence_parallelism: bool = False
    sequence_parallelism_mode: str | None = None
    enable_sequence_overlap: bool = False
    enable_sequence_regather: bool = False
    enable_flash_attention: bool | str = option(
        False,
        Check(
            lambda value: isinstance(value, bool) or value in tuple(KERNELS),
            f"must be {', '.join(map(repr, (True, *KERNELS)))} or False",
        ),
    )
    enable_xformers: bool = False
    enable_fused_normalization: bool = False
    enable_jit_fused: bool = False
    enable_fused_loss: bool = False
    enable_all_optimization: bool = False

    @property
    def fused(self) -> FusedKernels:
        """The requested fused kernels. `enable_all_optimization` turns on all but xFormers and the loss."""
        return FusedKernels(
            flash_attention=self.enable_flash_attention or self.enable_all_optimization,
            xformers=self.enable_xformers,
            normalization=self.enable_fused_normalization or self.enable_all_optimization,
            jit=self.enable_jit_fused or self.enable_all_optimization,
            loss=self.enable_fused_loss,
            is_ring=self.enable_sequence_parallelism and self.sequence_parallelism_mode == "ring_attn",
        )

    def sequence_over(
        self, sp_size: int | None, *, inner_ring_size: int | None = None
    ) -> SequenceParallelism:
        """Return the requested mode and options of sequence parallelism.

        Args:
            sp_size: size of the sequence axis, by which the default mode is chosen; None or 1 if there is none.
            inner_ring_size: for "ring_attn": ranks of an inner ring of a double ring; None is one ring.
        """
        return SequenceParallelism.from_options(
            enable=self.enable_sequence_parallelism,
            mode=self.sequence_parallelism_mode,
            sp_size=sp_size,
            regathers=self.enable_sequence_regather,
            overlaps=self.enable_sequence_overlap,
            inner_ring_size=inner_ring_size,
        )


@dataclass(frozen=True, kw_only=True)
class ShardConfig(ShardOptions):
    """Axes and options for sharding a model.

    A missing size follows from its group: after the constructor every size is a number.

    Args:
        tensor_parallel_process_group: the tensor axis; without it and without a size nothing is sharded.
        tensor_parallel_size: its number of ranks; None is the size of the group, or 1. Without a group,
            `ShardFormer.init_distributed` makes one.
        data_parallel_process_group: the ranks with equal shards and different batches.
        data_parallel_size: its number of ranks; None is the size of the group, or 1. Without a group as above.
        pipeline_stage_manager: assigns stages to this rank; None, or a single stage, does not cut the model.
        parallel_output: leave logits sharded over the vocabulary after training calls with labels, as
            `VocabParallelLogits`; False gathers them. The loss is the same. None is True.
        gather_output: the inverse of `parallel_output`, a name of older ColossalAI drafts: True gathers. Without
            labels, and in evaluation, logits are always gathered. Give only one of the two.
        inference_only: do not train: `ShardFormer` sets evaluation mode and turns gradients off.
        enable_tensor_parallelism: False ignores the group of the tensor axis.
        sequence_parallel_process_group: the sequence axis.
        sequence_parallel_rings: for "ring_attn": the rings of a double ring (`double_ring`); None is one ring.
        axis_groups: the groups of further axes by their names, by which policies may shard modules.

    Raises:
        ValueError: arguments contradict each other; all contradictions at once.
    """

    tensor_parallel_process_group: dist.ProcessGroup | None = option(None, _GROUP)
    tensor_parallel_size: int = option(None, AT_LEAST_ONE)  # type: ignore[assignment]  # a number once constructed
    data_parallel_process_group: dist.ProcessGroup | None = option(None, _GROUP)
    data_parallel_size: int = option(None, AT_LEAST_ONE)  # type: ignore[assignment]
    pipeline_stage_manager: PipelineStageManager | None = None
    parallel_output: bool = None  # type: ignore[assignment]  # True or False once constructed
    gather_output: bool = None  # type: ignore[assignment]
    inference_only: bool = False
    enable_tensor_parallelism: bool = True
    sequence_parallel_process_group: dist.ProcessGroup | None = option(None, _GROUP)
    sequence_parallel_rings: Rings | None = None
    axis_groups: Mapping[str, dist.ProcessGroup] = field(default_factory=dict)

    def __post_init__(self) -> None:
        raise_errors(option_errors(self))
        errors = [*self._axis_errors(), *self._switch_errors()]
        tp_size, sp_size = self._size("tensor_parallel"), self.sequence_parallel_size
        raise_errors(errors or self.sequence.errors(tp_size=tp_size, sp_size=sp_size))
        gathers = self.parallel_output is False if self.gather_output is None else self.gather_output
        resolved = {
            **{f"{axis}_size": self._size(axis) for axis in _AXES},
            "gather_output": gathers,
            "parallel_output": not gathers,
        }
        for name, value in resolved.items():
            object.__setattr__(self, name, value)

    @property
    def sequence(self) -> SequenceParallelism:
        """The requested sequence parallelism."""
        return self.sequence_over(self.sequence_parallel_size)

    @property
    def sequence_split(self) -> SequenceSplit | None:
        """The requested sequence parallelism with its group; None if sequences stay unsharded."""
        settings = self.sequence
        group = self.active_group if settings.is_on_tensor_axis else self.sequence_parallel_process_group
        if settings.mode is None or group is None:
            return None
        return SequenceSplit(
            settings=settings,
            group=group,
            tp_size=self._size("tensor_parallel"),
            rings=self.sequence_parallel_rings,
        )

    @property
    def num_stages(self) -> int:
        """Number of pipeline stages."""
        return self.pipeline_stage_manager.num_stages if self.pipeline_stage_manager is not None else 1

    @property
    def has_groups(self) -> bool:
        """True if every size above 1 has a group; `ShardFormer.init_distributed` makes them."""
        return all(self._size(axis) == 1 or self._group(axis) is not None for axis in _AXES)

    @property
    def active_group(self) -> dist.ProcessGroup | None:
        """The tensor axis; None if it has no group, or enable_tensor_parallelism=False turns it off."""
        return self._group("tensor_parallel")

    @property
    def groups(self) -> dict[str, dist.ProcessGroup]:
        """The groups of all axes that a policy may name."""
        groups = {"tp": self.active_group, "sp": self.sequence_parallel_process_group, **self.axis_groups}
        return {axis: group for axis, group in groups.items() if group is not None}

    @property
    def split_group(self) -> dist.ProcessGroup | None:
        """The tensor axis; None if it has one rank."""
        return self.active_group if self.tensor_parallel_size > 1 else None

    @property
    def replica_group(self) -> dist.ProcessGroup | None:
        """The data axis; None if it has one rank."""
        return self._group("data_parallel") if self.data_parallel_size > 1 else None

    def _group(self, axis: str) -> dist.ProcessGroup | None:
        """Return the group of an axis; None if it has none, or enable_tensor_parallelism=False turns it off."""
        is_ignored = axis == "tensor_parallel" and not self.enable_tensor_parallelism
        return None if is_ignored else getattr(self, f"{axis}_process_group")

    def _size(self, axis: str) -> int:
        """Return the number of ranks of an axis: of its group, or as requested; 1 if neither is given."""
        group = self._group(axis)
        return group.size() if group is not None else getattr(self, f"{axis}_size") or 1

    def _axis_errors(self) -> list[str]:
        """List errors of sizes and groups that contradict each other."""
        groups = {axis: self._group(axis) for axis in _AXES}
        errors = []
        if all(groups.values()):
            ranks = (set(dist.get_process_group_ranks(group)) for group in groups.values())
            if len(common := set.intersection(*ranks)) > 1:
                errors.append(
                    "tensor_parallel_process_group and data_parallel_process_group have the ranks "
                    f"{sorted(common)} in common: give groups that have only this rank in common"
                )
        for axis, other_axis in (_AXES, _AXES[::-1]):
            size, group = getattr(self, f"{axis}_size"), groups[axis]
            if size is not None and group is not None and group.size() != size:
                errors.append(
                    f"{axis}_size={size} is not the size of {axis}_process_group, which has {group.size()} ranks: "
                    "leave the size out, or give a group of as many"
                )
            if group is None and (size or 1) > 1 and groups[other_axis] is not None:
                errors.append(
                    f"{axis}_size={size} needs a group beside the {other_axis}_process_group: give "
                    f"{axis}_process_group too, or sizes alone and call ShardFormer.init_distributed()"
                )
        return errors

    @property
    def sequence_parallel_size(self) -> int:
        """Number of ranks of the sequence axis."""
        group = self.sequence_parallel_process_group
        return 1 if group is None else group.size()

    def _switch_errors(self) -> list[str]:
        """List errors of options that contradict each other; called before None is replaced by the defaults."""
        gathers, parallel, tp_size = self.gather_output, self.parallel_output, self.tensor_parallel_size
        has_data = self.data_parallel_process_group is not None or self.data_parallel_size not in (None, 1)
        rows = (
            (
                not self.enable_tensor_parallelism and tp_size not in (None, 1),
                f"tensor_parallel_size={tp_size} needs tensor parallelism, which "
                "enable_tensor_parallelism=False turns off: leave one of them out",
            ),
            (
                gathers is not None and parallel == gathers,
                f"parallel_output={parallel} and gather_output={gathers} contradict each other (sharded or "
                "gathered logits): give one of them",
            ),
            (
                self.num_stages > 1 and has_data,
                f"a data axis with a pipeline of {self.num_stages} stages averages no gradients without a "
                "booster: use HybridParallelPlugin",
            ),
        )
        return [message for is_wrong, message in rows if is_wrong]
