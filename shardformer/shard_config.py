"""What ShardFormer is asked to do. How it is done is policy.py and sharder.py."""

from dataclasses import dataclass

import torch.distributed as dist

from ..pipeline.stage_manager import PipelineStageManager


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
    """

    tensor_parallel_process_group: dist.ProcessGroup | None = None
    pipeline_stage_manager: PipelineStageManager | None = None
    parallel_output: bool = True
    make_vocab_size_divisible_by: int = 64
    enable_tensor_parallelism: bool = True

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
    def num_stages(self) -> int:
        """How many stages the pipeline has."""
        return self.pipeline_stage_manager.num_stages if self.pipeline_stage_manager is not None else 1
