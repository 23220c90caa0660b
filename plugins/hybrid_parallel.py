"""HybridParallelPlugin: the arguments and calls of tensor, pipeline and data parallelism, ZeRO and mixed precision.

`hybrid_model.boost` parallelizes the model, and `engine.PipelineEngine` runs the batches. See docs/design.md.
"""

from collections.abc import Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch._dynamo import OptimizedModule
from torch.optim import Optimizer

from ..checkpoint.local_tensors import LocalModel
from ..checkpoint.optimizer_state import Trained
from ..cluster.errors import raise_errors
from ..cluster.failures import naming_failures
from ..cluster.gathering import require_equal
from ..cluster.mesh import ParallelMesh
from ..cluster.traffic import Count, Traffic
from ..pipeline.runner import Criterion
from ..pipeline.stage_manager import PipelineStageManager
from ..zero.memory import explaining_out_of_memory, memory_of
from ..zero.optimizer import ShardedOptimizer
from .base import PipelineLoss, Plugin, Returned, init_from_options, refuse_pipeline, require_boosted
from .colossalai import HYBRID
from .hybrid_config import HybridConfig
from .hybrid_model import HybridParallelModule, boost
from .internevo import plugin_arguments, with_configuration_keys
from .memory_report import memory_in_call
from .state import local_shards, trained_shards

_MEBI = 2**20


class HybridParallelPlugin(Plugin):
    """Training of a transformers model over tp × pp × sp × dp processes, with ZeRO and mixed precision.

    Its arguments are the options of `HybridConfig`, documented there and by `help(HybridParallelPlugin.__init__)`.
    Further arguments of ColossalAI's plugin are accepted if they change nothing (see `colossalai.HYBRID`).

    Raises:
        RuntimeError: no process group was started.
        ValueError: arguments are invalid or do not fit together; all errors at once, on every rank, before any
            communication.
    """

    @init_from_options(HybridConfig, HYBRID)
    def __init__(self, config: HybridConfig, errors: list[str]) -> None:
        self._configure(config, errors)

    def _configure(self, config: HybridConfig, errors: Sequence[str]) -> None:
        """Check the options, create the mesh, and set the plugin's attributes. Collective over the world.

        Args:
            config: the options as the user gave them.
            errors: errors of arguments that are not options, raised together with those of the options.
        """
        self.has_default_precision = config.precision is None
        self.config = config = replace(config, precision=config.used_precision)
        raise_errors([*errors, *config.errors(dist.get_world_size())])
        require_equal(config, what="the plugin")
        self.mesh = ParallelMesh(**config.sizes)
        self.stage_manager = PipelineStageManager(self.mesh, config.stage_ranks, config.num_layers_per_stage)
        self.shard_config = config.shard_config(self.mesh, self.stage_manager)

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
            raise ValueError(with_configuration_keys(str(error), configured)) from None

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
        return self.config.used_precision

    def _wrap(self, model: nn.Module, optimizer: Optimizer | None) -> tuple[nn.Module, Optimizer | None]:
        """Parallelize the model; see `boost` in hybrid_model.py."""
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
        reduces = sharded.reducer.may_launch  # if not, replicas may run different numbers of backwards
        with (
            naming_failures("backward", None if reduces else self.mesh.replica_stage_ranks()),
            explaining_out_of_memory(lambda: memory_of(sharded)),
        ):
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
                differ within a replica, or gradients are enabled on some ranks only. Raised on every rank in calls that
                ranks compare: the first three, every `check_every`-th, and evaluations. In other calls a batch that
                cannot be run raises where it is, and batches that differ raise in `optimizer.step`.
            RankFailure: another rank failed, perhaps by the error of its batch, or makes another call; names it.
        """
        boosted = self._boosted(model, optimizer, "execute_pipeline")
        boosted.engine.check_open()
        trains = torch.is_grad_enabled()
        with naming_failures("execute_pipeline"):
            if trains and optimizer is None:
                place = " as optimizer=, the criterion comes before it" * hasattr(criterion, "param_groups")
                raise ValueError(
                    f"execute_pipeline needs the optimizer while gradients are on: give it{place}, or evaluate under "
                    "no_grad()"
                )
            if return_outputs not in (True, False, "all_ranks"):
                raise ValueError(f"return_outputs={return_outputs!r} must be True, False or 'all_ranks'")
            if criterion is not None and not callable(criterion):
                raise TypeError(
                    f"criterion={criterion!r} is not callable: give a function of (outputs, inputs), or None for the "
                    "model's own loss"
                )
            reducing = (
                optimizer.accumulate_and_reduce() if trains and optimizer is not None else nullcontext()
            )
            with explaining_out_of_memory(lambda: memory_in_call(boosted.engine, optimizer)), reducing:
                return boosted.engine.run(
                    data_iter,
                    criterion,
                    optimizer,
                    return_loss=return_loss,
                    return_outputs=return_outputs,
                    average_loss=average_loss,
                )

    def _boosted(self, model: nn.Module, optimizer: Optimizer | None, call: str) -> HybridParallelModule:
        """Return the model, which must be one that this plugin boosted, with this optimizer if one is given.

        Args:
            model, optimizer: the user's arguments.
            call: the user's call, for the error.

        Raises:
            ValueError: they are others.
        """
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
        boosted = self._boosted(model, None, "this call")
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
        if self.held is not None:
            lines += ["", f"{'local memory':32}{'MiB':>20}"]
            lines += [f"{name:32}{nbytes / _MEBI:20.3f}" for name, nbytes in self.held.items()]
        return "\n".join(lines)
