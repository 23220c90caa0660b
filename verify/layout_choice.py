"""A parallel layout to verify and the settings of its training, as data."""

from dataclasses import dataclass
from math import prod
from typing import Any, Literal

from torch import nn

from ..cluster import layout
from ..plugins.hybrid_config import HybridConfig
from ..shardformer.recompute import PipelineGradientCheckpointConfig
from .batch import loss_of
from .reference import Criterion

AXES = (*layout.AXES[-1:], *layout.AXES[:-1])  # in the order of a layout's name: tp first


@dataclass(frozen=True, kw_only=True)
class Layout:
    """A parallel layout and the options of its training.

    Args:
        tp, pp, dp, sp: sizes of the axes; their product is the number of processes.
        zero: the ZeRO stage.
        zero_size: the number of replicas over which it shards.
        overlap_allgather: overlap the all-gather of updated parameters with the next forward.
        precision: "fp32", "bf16" or "fp16".
        schedule: a name of the pipeline's schedules.
        chunks: stages per rank, if the schedule takes any number.
        microbatches: the number of microbatches; of unequal size with the batches of batch.py.
        max_norm: clip gradients to this norm; 0 disables clipping.
        recompute: the fraction of each stage's layers that is recomputed in backward.
        recompute_modules: the modules of these layers that are recomputed; empty for the full layers.
        sequence: the mode of sequence parallelism; None for unsharded sequences.
        wp: neighbours on the data axis over which the weights of linear layers are sharded.
        ep: neighbours on the data axis over which experts are distributed.
        inner_ring: ranks of the inner of two rings; 0 for one ring.
        options: names of further options of the plugin that are enabled.
    """

    tp: int = 1
    pp: int = 1
    dp: int = 1
    sp: int = 1
    zero: int = 0
    zero_size: int = -1
    overlap_allgather: bool = False
    precision: str = "fp32"
    schedule: str = "1f1b"
    chunks: int = 1
    microbatches: int = 3
    max_norm: float = 0.0
    recompute: float = 0.0
    recompute_modules: tuple[str, ...] = ()
    sequence: str | None = None
    inner_ring: int = 0
    wp: int = 1
    ep: int = 1
    options: tuple[str, ...] = ()

    @property
    def world_size(self) -> int:
        """The number of processes."""
        return prod(getattr(self, axis) for axis in AXES)

    @property
    def arguments(self) -> dict[str, Any]:
        """The equivalent arguments of HybridParallelPlugin."""
        return {
            **{f"{axis}_size": getattr(self, axis) for axis in (*AXES, *layout.SUB_AXES)},
            "zero_stage": self.zero,
            "zero_size": self.zero_size,
            "overlap_allgather": self.overlap_allgather,
            "precision": self.precision,
            "num_microbatches": self.microbatches,
            "pp_style": self.schedule,
            "num_model_chunks": self.chunks,
            "gradient_checkpoint_config": PipelineGradientCheckpointConfig(
                gradient_checkpointing_ratio=self.recompute, recompute_modules=self.recompute_modules or None
            )
            if self.recompute
            else None,
            "max_norm": self.max_norm,
            "enable_sequence_parallelism": self.sequence is not None,
            "sequence_parallelism_mode": self.sequence,
            "inner_ring_size": self.inner_ring or None,
            **dict.fromkeys(self.options, True),
        }

    @property
    def config(self) -> HybridConfig:
        """The options of the plugin."""
        return HybridConfig(**self.arguments)

    def errors(self) -> list[str]:
        """List all errors of the layout, each with a value that works."""
        return self.config.errors(self.world_size)

    def __str__(self) -> str:
        sizes = [f"{name}{size}" for name in AXES if (size := getattr(self, name)) > 1]
        chunks = f"×{self.chunks}" if self.chunks > 1 else ""
        schedule = [f"{self.schedule}{chunks}"] if self.pp > 1 and self.schedule != "1f1b" else []
        rest = [self.sequence or ""] * bool(self.sequence)
        rest += [f"inner{self.inner_ring}"] * bool(self.inner_ring)
        rest += [f"{axis}{size}" for axis in layout.SUB_AXES if (size := getattr(self, axis)) > 1]
        rest += [f"zero{self.zero}"] * bool(self.zero)
        rest += [f"of{self.zero_size}"] * (self.zero_size > 0)
        rest += ["late"] * self.overlap_allgather
        modules = "".join(f",{module}" for module in self.recompute_modules)
        rest += [f"recompute{self.recompute:g}{modules}"] * bool(self.recompute)
        return "·".join([*sizes, *schedule, *rest, *self.options, self.precision])


LEARNING_RATE = 1e-3
EPSILON = 1e-5


@dataclass(frozen=True, kw_only=True)
class Training:
    """Settings of the training, besides forward, backward and update.

    Args:
        vector_rate: the learning rate of biases and norms, which have a separate parameter group.
        frozen: the frozen parameters: none, the lower half of the model (with the embedding), or every second one.
        overflow_step: the step, from 0, in which the gradients of one rank are not finite; None is no step.
        extra_samples: samples of a replica's batch beyond two for each microbatch, used in turn, by step + replica.
            1 makes microbatches of unequal size.
        criterion: of outputs and microbatch, the loss or (loss_sum, weight).
        optimizer: "adamw", "adafactor", or "muon" for hidden matrices beside AdamW for other parameters.
        num_batches: the number of different batches, which the steps take in turn; None if all are different.
    """

    vector_rate: float = LEARNING_RATE
    frozen: Literal["none", "lower half", "every second"] = "none"
    overflow_step: int | None = None
    extra_samples: tuple[int, ...] = (1,)
    criterion: Criterion = loss_of
    optimizer: str = "adamw"
    num_batches: int | None = None

    def freeze(self, model: nn.Module) -> None:
        """Disable the gradients of frozen parameters."""
        parameters = list(model.parameters())
        chosen = {
            "none": [],
            "lower half": parameters[: len(parameters) // 2],
            "every second": parameters[::2],
        }
        for parameter in chosen[self.frozen]:
            parameter.requires_grad_(False)

    def num_samples(self, *, step: int, replica: int, microbatches: int) -> int:
        """Return the number of samples of a replica's batch."""
        return 2 * microbatches + self.extra_samples[(step + replica) % len(self.extra_samples)]
