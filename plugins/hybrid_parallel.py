"""HybridParallelPlugin: the arguments and calls of tensor, pipeline and data parallelism, ZeRO and mixed precision.

`hybrid_model.boost` parallelizes the model, and `engine.PipelineEngine` runs the batches. See docs/design.md.
"""

from collections.abc import Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch._dynamo import OptimizedModule
from torch.optim import Optimizer

from ..checkpoint.local import LocalModel
from ..checkpoint.optimizer import Trained
from ..cluster.agree import require_equal
from ..cluster.errors import raise_errors
from ..cluster.failures import naming_failures
from ..cluster.mesh import ParallelMesh
from ..cluster.traffic import Count, Traffic
from ..pipeline.runner import Criterion
from ..pipeline.schedules import UserSchedule
from ..pipeline.stage_manager import PipelineStageManager
from ..shardformer.policy import Policy
from ..shardformer.recompute import PipelineGradientCheckpointConfig
from ..shardformer.tables.table import Table
from ..zero.optimizer import ShardedOptimizer
from .base import (
    PipelineLoss,
    Plugin,
    Returned,
    given_precision,
    own_arguments,
    require_boosted,
    require_process_group,
)
from .colossalai import HYBRID, unavailable_errors
from .hybrid_config import HybridConfig
from .hybrid_model import HybridParallelModule, boost, refuse_pipeline
from .internevo import in_its_words, plugin_arguments
from .loss import LossReduction
from .state import local_shards, trained_shards

_MEBI = 2**20


class HybridParallelPlugin(Plugin):
    """Training of a transformers model over tp × pp × sp × dp processes, with ZeRO and mixed precision.

    Args:
        tp_size: ranks over which each layer is sharded.
        pp_size: pipeline ranks; each has one stage of the layers, or several with `num_model_chunks`.
        sp_size: ranks over which sequences are sharded, by "all_to_all" and "ring_attn"; None is 1.
        dp_size: replicas, each with different batches; None is the world size divided by the other sizes.
        zero_stage: 0 replicates optimizer states, 1 shards them over the replicas, 2 shards gradients too:
            they are reduced in every backward, and each rank keeps only its shard.
        zero_size: the number of neighbouring replicas over which `zero_stage` shards, for example those of a node. -1
            or 0: all of them; 1: no sharding. Gradients are averaged over all replicas in any case.
        precision: "fp32", "bf16" or "fp16"; 16-bit weights keep float32 masters. None is fp32 on a CPU, bf16 on a GPU
            that computes in it, else fp16.
        num_microbatches, microbatch_size: the split of a batch into microbatches; a pipeline needs one of them.
        gradient_accumulation_steps: calls of `execute_pipeline`, or of `booster.backward`, before each step, which
            uses the mean of their gradients. With 1, any number of calls is allowed, and the step uses their sum.
        pp_style: the schedule: "gpipe", "1f1b", "interleaved", "zbh1", "zbv" (docs/pipeline.md says which to
            choose), or your own: a list of the `Action`s of each rank, or a function that returns one for given
            numbers of ranks and microbatches.
        num_model_chunks: stages per rank, for "interleaved" and "gpipe"; "zbv" always has 2.
        num_layers_per_stage: layers of each stage, in the order of the stages of all chunks. None distributes them
            evenly if their number is divisible, else so that the largest stage has as few parameters as possible.
        gradient_checkpoint_config: layers that are recomputed in backward, or modules in them by name.
        activation_offload: keep the inputs of recomputed layers in host memory until backward; on CUDA the copies
            overlap with computation. See docs/cuda.md.
        overlap_p2p: compute while tensors are in flight between stages.
        enable_sequence_parallelism: shard the sequences within layers over ranks; docs/sequence.md says which mode
            to choose.
        sequence_parallelism_mode: "split_gather" or "ring" over the tensor axis, "all_to_all" or "ring_attn" over the
            sequence axis of sp_size ranks. None is "all_to_all" for sp_size above 1, else "split_gather".
        enable_sequence_overlap: for "split_gather" and "ring": overlap the gather in backward with the gradients.
        enable_sequence_regather: for "split_gather": save only the local shard of a gathered activation, and gather
            it again in backward.
        inner_ring_size: for "ring_attn": ranks of the inner of two rings, for example those of a node.
        wp_size: neighbours on the data axis (dp and sp together) over which the weights of linear layers are
            sharded, and all-gathered layer by layer (InternEvo's isp, arXiv:2401.09149).
        wp_overlap: prefetch the next layer's weights during the computation of a layer.
        ep_size: neighbours on the data axis over which the experts of a mixture are distributed; tokens travel to
            their experts and back. See docs/experts.md.
        parallel_output: leave logits sharded over the vocabulary after training calls with labels (see
            `VocabParallelLogits`); the loss is computed from sharded logits in any case.
        make_vocab_size_divisible_by: pad the vocabulary to a multiple of this times tp_size.
        initial_scale, min_scale, growth_factor, growth_interval, backoff_factor, hysteresis, max_scale: the
            loss scale of fp16; see `zero.precision.PrecisionConfig`.
        max_norm: clip gradients to this norm; 0 disables clipping.
        zero_bucket_size_in_m: bucket size in millions (2**20) of gradient elements. None is 12 on CPUs; on CUDA 40,
            or the number of replicas if that is larger.
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
        enable_all_optimization: turn on the three below. See docs/fused.md for them.
        enable_fused_normalization: norms by apex or Liger if installed on CUDA, else by torch's fused kernels.
        enable_flash_attention: attention by the flash-attn package on CUDA, elsewhere by torch's fused kernels, or the
            kernel's name: "flash_attention_3", "sdpa_cudnn", "flex_attention" and others of docs/fused.md.
        enable_jit_fused: activation formulas and dropout + addition compiled by torch.
        enable_fused_loss: compute the causal loss in chunks of tokens from the input of the head. float32 logits of a
            full microbatch are never materialized, and training calls with labels return no logits.
        enable_xformers: attention by xFormers, which must be installed.
        compile_layers: compile each layer as a separate graph, collectives included; see docs/fused.md.
        custom_policy: the sharding of the model, as a policy or a table, for models without a registered one.
        others: further arguments of ColossalAI's plugin, accepted if they change nothing (see `colossalai.HYBRID`).

    Raises:
        RuntimeError: no process group was started.
        ValueError: arguments are invalid or do not fit together; all errors at once, on every rank, before any
            communication.
    """

    _unavailable = HYBRID

    def __init__(  # a list of arguments, passed to a config by name
        self,
        tp_size: int = 1,
        pp_size: int = 1,
        sp_size: int | None = None,
        precision: str | None = None,
        zero_stage: int = 0,
        *,
        zero_size: int = -1,
        dp_size: int | None = None,
        num_microbatches: int | None = None,
        microbatch_size: int | None = None,
        gradient_accumulation_steps: int = 1,
        pp_style: str | UserSchedule = "1f1b",
        num_layers_per_stage: Sequence[int] | None = None,
        num_model_chunks: int = 1,
        gradient_checkpoint_config: PipelineGradientCheckpointConfig | None = None,
        activation_offload: bool = False,
        overlap_p2p: bool = True,
        enable_all_optimization: bool = False,
        enable_fused_normalization: bool = False,
        enable_flash_attention: bool | str = False,
        enable_jit_fused: bool = False,
        enable_fused_loss: bool = False,
        enable_xformers: bool = False,
        enable_sequence_parallelism: bool = False,
        enable_sequence_overlap: bool = False,
        sequence_parallelism_mode: str | None = None,
        inner_ring_size: int | None = None,
        enable_sequence_regather: bool = False,
        wp_size: int = 1,
        wp_overlap: bool = True,
        ep_size: int = 1,
        parallel_output: bool = True,
        make_vocab_size_divisible_by: int = 64,
        initial_scale: float = 2**16,
        min_scale: float = 1,
        growth_factor: float = 2,
        growth_interval: int = 1000,
        backoff_factor: float = 0.5,
        hysteresis: int = 2,
        max_scale: float = 2**32,
        max_norm: float = 0,
        zero_bucket_size_in_m: float | None = None,
        overlap_communication: bool = True,
        overlap_allgather: bool = False,
        communication_dtype: torch.dtype | str | None = None,
        cpu_offload: bool = False,
        loss_reduction: LossReduction = "global",
        check_every: int = 100,
        compile_layers: bool = False,
        custom_policy: Policy | Table | None = None,
        **others: Any,
    ) -> None:
        self.config = HybridConfig(**own_arguments(locals()) | {"precision": given_precision(precision)})
        unavailable = unavailable_errors(HybridParallelPlugin.__init__, self._unavailable, others)
        require_process_group()
        raise_errors([*unavailable, *self.config.errors(dist.get_world_size())])
        require_equal(self.config, what="the plugin")
        self.has_default_precision = precision is None
        self.mesh = ParallelMesh(**self.config.sizes)
        self.stage_manager = PipelineStageManager(self.mesh, self.config.stage_ranks, num_layers_per_stage)
        self.shard_config = self.config.shard_config(self.mesh, self.stage_manager)

    @classmethod
    def from_config(cls, config: Mapping[str, Any] | str | Path, **others: Any) -> "HybridParallelPlugin":
        """Make a plugin from an InternEvo configuration; see docs/coming-from-internevo.md.

        Args:
            config: the configuration, its `parallel` section alone, or the path of a .py or .json file.
            others: arguments of the plugin, which override those of the configuration, or further sections.

        Raises:
            ValueError: keys or values are unknown or unsupported; all errors at once.
        """
        arguments = plugin_arguments(config, **others)
        try:
            return cls(**arguments)
        except ValueError as error:
            configured = {name: value for name, value in arguments.items() if name not in others}
            raise ValueError(in_its_words(str(error), configured)) from None

    @property
    def sp_size(self) -> int:
        """Number of ranks over which sequences are sharded."""
        return self.mesh.size("sp")

    @property
    def zero_stage(self) -> int:
        """ZeRO's stage: 0 shards nothing over the replicas, 1 optimizer states, 2 gradients too."""
        return self.config.zero_stage

    @property
    def precision(self) -> str:
        """The precision of weights and activations."""
        return self.config.precision

    def _wrap(self, model: nn.Module, optimizer: Optimizer | None) -> tuple[nn.Module, Optimizer | None]:
        boosted = boost(
            model,
            optimizer,
            config=self.config,
            mesh=self.mesh,
            stage_manager=self.stage_manager,
            shard_config=self.shard_config,
        )
        return boosted, boosted.optimizer

    def backward(self, loss: Tensor, optimizer: Optimizer) -> None:
        """Compute gradients of a loss from `model(**batch)`, for pp_size=1.

        Raises:
            RuntimeError: the model has a pipeline, where no rank has the full graph; or the loss is from
                `execute_pipeline`, which has computed its gradients already.
            ValueError: the loss has no graph, or the optimizer is not the one that `booster.boost` returned.
        """
        refuse_pipeline("booster.backward(loss, optimizer)", self.mesh)
        sharded = require_boosted(optimizer, ShardedOptimizer, "booster.backward")
        if not isinstance(loss, Tensor):
            raise ValueError(f"booster.backward takes a loss tensor, not a {type(loss).__name__}")
        if isinstance(loss, PipelineLoss):
            loss.backward()  # raises, with the reason
        if not loss.requires_grad:
            raise ValueError(
                "booster.backward got a loss without a graph: compute it from the outputs of model(**batch), without "
                "detach(), item() or torch.no_grad()"
            )
        averages = sharded.reducer.may_launch  # without it, replicas may run different numbers of backwards
        with naming_failures("backward", None if averages else self.mesh.replica_stage_ranks()):
            sharded.backward(loss)

    def no_sync(self, model: nn.Module, optimizer: Optimizer | None = None) -> AbstractContextManager[None]:
        """Accumulate gradients without reducing them: for all but the last of several `backward` before a step.

        Of several `execute_pipeline`, the first one of a step is not reduced; see `gradient_accumulation_steps`.

        Raises:
            ValueError: model or optimizer are not the ones that `booster.boost` returned.
        """
        self._boosted(model, optimizer, "booster.no_sync")
        return optimizer.no_sync() if isinstance(optimizer, ShardedOptimizer) else nullcontext()

    def execute_pipeline(
        self,
        data_iter: Iterator,
        model: nn.Module,
        criterion: Criterion | None = None,
        optimizer: ShardedOptimizer | None = None,
        return_loss: bool = True,
        return_outputs: Returned = False,
        *,
        average_loss: bool = True,
    ) -> dict[str, Any]:
        """Run the next batch through the pipeline: forward, and backward if gradients are enabled.

        At pp_size=1 it accumulates gradients over the microbatches. Under `torch.no_grad()` it evaluates.
        Collective over the world, with equal batches within a replica; this is checked.

        Args:
            data_iter: yields batches: dicts (passed to the model by name), tuples or lists, or tensors.
            model: the one that `boost` returned.
            criterion: a function of (outputs, inputs) of a microbatch that returns its loss, or (loss_sum, weight).
                None uses `outputs.loss`, or `outputs["loss"]` of a dictionary. This very tensor weighs as much as it
                counted, another mean as much as the microbatch's samples; see docs/decisions/loss.md.
            optimizer: the one that `boost` returned; required if gradients are enabled.
            return_loss: return the loss, on every rank.
            return_outputs: return the outputs of the full batch. True: on the ranks of the last stage; "all_ranks":
                on all ranks, where the other stages receive a copy.
            average_loss: return the loss over all replicas, the one that gradients are computed of. False
                returns the loss of this replica's batch.

        Returns:
            "loss": the loss of the global batch, equal on all ranks; None without `return_loss`. "outputs": None
            without `return_outputs`; with True also None on all stages but the last.

        Raises:
            StopIteration: the iterator has ended on every rank.
            ValueError: a batch cannot be split or requires gradients, the iterator ended on some ranks only, batches
                differ within a replica, or gradients are enabled on some ranks only; raised on every rank.
            RankFailure: another rank failed; names it.
        """
        boosted = self._boosted(model, optimizer, "execute_pipeline")
        boosted.engine.check_open()
        trains = torch.is_grad_enabled()
        if trains and optimizer is None:
            with naming_failures("execute_pipeline"):
                raise ValueError(
                    "execute_pipeline needs the optimizer while gradients are on: give it, or evaluate under no_grad()"
                )
        if return_outputs not in (True, False, "all_ranks"):
            raise ValueError(f"return_outputs={return_outputs!r} must be True, False or 'all_ranks'")
        calls = optimizer.accumulate_and_reduce() if trains and optimizer is not None else nullcontext()
        with naming_failures("execute_pipeline"), calls:
            return boosted.engine.run(
                data_iter,
                criterion,
                optimizer,
                return_loss=return_loss,
                return_outputs=return_outputs,
                average_loss=average_loss,
            )

    def _boosted(self, model: nn.Module, optimizer: Optimizer | None, call: str) -> HybridParallelModule:
        """Return the model; require that this plugin boosted it, together with the optimizer if one is given."""
        if isinstance(model, OptimizedModule):
            raise ValueError(
                f"{call} takes the model that booster.boost returned, not torch.compile's wrapper of it: "
                "call model.compile(), which compiles in place"
            )
        if not isinstance(model, HybridParallelModule) or model.mesh is not self.mesh:
            raise ValueError(f"{call} takes the model that booster.boost returned")
        if optimizer is not None and optimizer is not model.optimizer:
            raise ValueError(
                f"{call} takes the optimizer that booster.boost returned with this model, not the one that was given "
                "to it or another model's"
            )
        return model

    def ledger(self, optimizer: ShardedOptimizer | None = None) -> "Ledger":
        """Return a context that counts communication by axis and kind, and reports the memory of `optimizer`."""
        return Ledger(self.mesh, optimizer)

    def local_model(self, model: nn.Module) -> LocalModel:
        """Return this rank's shard of a boosted model."""
        boosted = self._boosted(model, None, "saving and loading")
        return LocalModel(
            module=boosted.module,
            names=boosted.state_names,
            tensors=local_shards(boosted.tensors(), self.mesh),
            adapters=boosted.adapters,
            random=boosted.random,
            loaded=lambda: None if boosted.optimizer is None else boosted.optimizer.refresh_masters(),
        )

    def trained(self, optimizer: Optimizer) -> Trained:
        """Return the tensors that a boosted optimizer updates on this rank."""
        return trained_shards(require_boosted(optimizer, ShardedOptimizer, "saving and loading"), self.mesh)


class Ledger(Traffic):
    """Count of the communication inside a `with` block, and of local memory.

        with plugin.ledger(optimizer) as ledger:
            booster.execute_pipeline(...)
            optimizer.step()
        if rank == 0:
            print(ledger.table())

    Counting adds some microseconds to every operation: measure times without it.

    Args:
        mesh: the axes by which messages are counted.
        optimizer: the one that `boost` returned; None leaves memory out.
    """

    def __init__(self, mesh: ParallelMesh, optimizer: ShardedOptimizer | None) -> None:
        super().__init__(mesh)
        self._optimizer = optimizer

    @property
    def traffic(self) -> dict[tuple[str, str], Count]:
        """Messages of this rank by axis and kind, see `cluster.traffic.Traffic`."""
        return dict(self.counts)

    @property
    def held(self) -> dict[str, int] | None:
        """Bytes of local memory, without activations; None without an optimizer."""
        return None if self._optimizer is None else self._optimizer.held_bytes()

    def table(self) -> str:
        """Return communication and memory as a text table."""
        lines = [f"{'axis':8}{'kind':24}{'calls':>8}{'MiB':>12}{'MiB sent':>12}"]
        lines += [
            f"{axis:8}{kind:24}{count.calls:8}{count.nbytes / _MEBI:12.3f}{count.sent / _MEBI:12.3f}"
            for (axis, kind), count in sorted(self.counts.items())
        ]
        if (held := self.held) is not None:
            lines += ["", f"{'local memory':32}{'MiB':>20}"]
            lines += [f"{name:32}{nbytes / _MEBI:20.3f}" for name, nbytes in held.items()]
        return "\n".join(lines)
