"""What ShardFormer is asked to do. How it is done is policy.py and sharder.py."""

from dataclasses import dataclass

import torch.distributed as dist

from ..pipeline.stage_manager import PipelineStageManager
from .fused import FusedKernels


@dataclass(frozen=True, kw_only=True)
class ShardConfig:
    """How a model is to be split.

    Args:
        tensor_parallel_process_group: the tensor axis; None splits nothing.
        pipeline_stage_manager: which stages this rank holds; None, or one stage in all, cuts nothing.
        parallel_output: leave logits split over the vocabulary after training calls with labels, as
            `VocabParallelLogits`; False gathers them. The loss is the same.
        make_vocab_size_divisible_by: the vocabulary is padded to a multiple of this times the ranks.
        enable_tensor_parallelism: False ignores the group.
        enable_flash_attention: attention by flash-attn on CUDA, elsewhere by torch's fused kernels; see docs/fused.md.
        enable_xformers: attention by xFormers.
        enable_fused_normalization: norms by apex or Liger where installed on CUDA, else by torch's fused kernels.
        enable_jit_fused: bias + activation and dropout + addition compiled by torch.
        enable_all_optimization: all of these but xFormers, which would take flash attention's place.
    """

    tensor_parallel_process_group: dist.ProcessGroup | None = None
    pipeline_stage_manager: PipelineStageManager | None = None
    parallel_output: bool = True
    make_vocab_size_divisible_by: int = 64
    enable_tensor_parallelism: bool = True
    enable_flash_attention: bool = False
    enable_xformers: bool = False
    enable_fused_normalization: bool = False
    enable_jit_fused: bool = False
    enable_all_optimization: bool = False

    def __post_init__(self) -> None:
        if self.make_vocab_size_divisible_by < 1:
            raise ValueError(
                f"make_vocab_size_divisible_by={self.make_vocab_size_divisible_by} must be at least 1"
            )

    @property
    def tensor_parallel_size(self) -> int:
        """How many ranks the tensor axis has."""
        group = self.tensor_parallel_process_group
        return group.size() if group is not None and self.enable_tensor_parallelism else 1

    @property
    def fused(self) -> FusedKernels:
        """The fused kernels that are asked for."""
        return FusedKernels.asked(
            flash_attention=self.enable_flash_attention,
            xformers=self.enable_xformers,
            normalization=self.enable_fused_normalization,
            jit=self.enable_jit_fused,
            everything=self.enable_all_optimization,
        )

    @property
    def num_stages(self) -> int:
        """How many stages the pipeline has."""
        return self.pipeline_stage_manager.num_stages if self.pipeline_stage_manager is not None else 1
