"""Booster: one training interface for all plugins."""

import logging
from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager
from pathlib import Path
from typing import Any, Literal

import torch
import torch.distributed as dist
from torch import nn
from torch.optim import Optimizer
from torch.optim.lr_scheduler import LRScheduler
from torch.profiler import profile
from torch.utils.data import DataLoader

from ..checkpoint.background import Save
from ..checkpoint.call_checks import save_errors
from ..checkpoint.full_state import Resume, Resumed
from ..cluster.coordinator import DistCoordinator
from ..cluster.errors import naming_arguments, raise_errors
from ..cluster.gathering import checked_together
from ..plugins.adapters import enable_lora, unwrapped
from ..plugins.base import Boosted, Dataloaders, Plugin, Returned
from ..plugins.torch_ddp import TorchDDPPlugin
from .traces import save_trace

_LOG = logging.getLogger("echelon")


class Booster:
    """Wrapper of model, optimizer and data, so that the same script trains with any plugin.

        booster = Booster(plugin=HybridParallelPlugin(tp_size=2, pp_size=2, num_microbatches=4))
        model, optimizer, criterion, dataloader, scheduler = booster.boost(model, optimizer, criterion, dataloader)
        outputs = booster.execute_pipeline(iter(dataloader), model, criterion, optimizer)
        optimizer.step()

    Args:
        plugin: the way of training; None is `TorchDDPPlugin()`.
        mixed_precision: "fp32", "bf16" or "fp16", for TorchDDPPlugin; the other plugins have an argument `precision`.
            None is the same for all: fp32 on a CPU, bf16 on a GPU that computes in it, else fp16.
        device: an argument of ColossalAI; must be None.

    Raises:
        ValueError: `plugin` is no plugin, `mixed_precision` is unknown, or it is given with a plugin that has its own
            argument `precision`.
    """

    @naming_arguments
    def __init__(
        self,
        plugin: Plugin | None = None,
        mixed_precision: Literal["fp32", "bf16", "fp16"] | None = None,
        device: str | None = None,
    ) -> None:
        if device is not None:
            raise ValueError(
                f"device={device!r} of ColossalAI is not available: leave it out, and give it to the call that "
                "starts the process group, as in launch_from_torch(device='cuda:1')"
            )
        self.plugin = plugin if plugin is not None else TorchDDPPlugin()
        if not isinstance(self.plugin, Plugin):
            raise ValueError(
                f"plugin={plugin!r} is not a plugin: create one first, as in "
                "HybridParallelPlugin(tp_size=2), or leave it out for TorchDDPPlugin()"
            )
        if mixed_precision is not None:
            if not isinstance(self.plugin, TorchDDPPlugin):
                raise ValueError(
                    f"mixed_precision={mixed_precision!r} is for TorchDDPPlugin: "
                    f"give {type(self.plugin).__name__} precision={mixed_precision!r} instead"
                )
            self.plugin.set_mixed_precision(mixed_precision)

    def boost(
        self,
        model: nn.Module,
        optimizer: Optimizer | None = None,
        criterion: Callable | None = None,
        dataloader: Dataloaders = None,
        lr_scheduler: LRScheduler | None = None,
    ) -> Boosted:
        """Wrap model, optimizer, criterion, dataloader and scheduler, and return them in that order.

        Collective over the world; the model must be equal on all ranks. The scheduler may be built on the optimizer
        before. A model without an optimizer is for evaluation, inference and saving: on several ranks its `backward`
        raises, except with TorchDDPPlugin and TorchFSDPPlugin, where torch averages its gradients.

        A plain DataLoader is sharded over the replicas: each gets `batch_size` samples of its own per step, in the
        global order of its sampler. A dataloader of `plugin.prepare_dataloader`, or one with a DistributedSampler, is
        returned unchanged. A list or tuple of dataloaders, as `[train, evaluation]`, is returned as such.

        Raises:
            ValueError: on every rank, before anything changes. Checks in this order, each with all of its errors: types
                of the arguments; objects that a checkpoint cannot save; the dataloader; model and optimizer, with each
                other and with the plugin.
        """

        def check() -> None:
            raise_errors(_type_errors(optimizer, criterion, lr_scheduler))
            if isinstance(model, nn.Module):
                raise_errors(save_errors(unwrapped(model).model, optimizer, lr_scheduler))

        checked_together("boost", check)
        dataloader = self.plugin.shard_dataloader(dataloader)
        boosted = self.plugin.configure(model, optimizer, criterion, dataloader, lr_scheduler)
        self.plugin.log_releases_and_precision()
        return boosted

    def backward(self, loss: torch.Tensor, optimizer: Optimizer) -> None:
        """Compute gradients of a loss of `model(**batch)`; the loss is scaled if the precision needs it."""
        self.plugin.backward(loss, optimizer)

    def execute_pipeline(
        self,
        data_iter: Iterator,
        model: nn.Module,
        criterion: Callable | None = None,
        optimizer: Optimizer | None = None,
        return_loss: bool = True,
        return_outputs: Returned = False,
        *,
        average_loss: bool = True,
    ) -> dict[str, Any]:
        """Run the next batch through the pipeline; see `HybridParallelPlugin.execute_pipeline`.

        Raises:
            RuntimeError: the plugin is TorchDDPPlugin, the default, or TorchFSDPPlugin: they have no pipeline.
        """
        return self.plugin.execute_pipeline(
            data_iter,
            model,
            criterion,
            optimizer,
            return_loss=return_loss,
            return_outputs=return_outputs,
            average_loss=average_loss,
        )

    def no_sync(self, model: nn.Module, optimizer: Optimizer | None = None) -> AbstractContextManager[None]:
        """Accumulate gradients within the block, without reducing them over the data-parallel ranks."""
        return self.plugin.no_sync(model, optimizer)

    def gather_for_metrics(self, values: Any) -> Any:
        """Return the values of all replicas' last batches, each sample of the data set once, in its order.

        Samples that were repeated to fill the last batches of an epoch are left out. The same on every rank. Collective
        over the world; with a pipeline, `execute_pipeline(..., return_outputs="all_ranks")` returns outputs for it.

        Args:
            values: tensors whose first dimension is the samples, or structures of them; or a list of an object for each
                sample. Of the batch that was last taken from a dataloader of `boost` or `prepare_dataloader`.

        Raises:
            ValueError: shapes differ between replicas; raised on every rank.
        """
        return self.plugin.gather_for_metrics(values)

    @property
    def device(self) -> torch.device:
        """The device of this process. Calls of the model and `execute_pipeline` move their inputs to it."""
        return self.plugin.mesh.device

    @property
    def mixed_precision(self) -> str:
        """The precision of the plugin: "fp32", "bf16" or "fp16"."""
        return self.plugin.precision

    def accumulate(self, *models: nn.Module) -> AbstractContextManager[None]:
        """Return a block around each batch in which `step` and `zero_grad` do nothing before the last call of a step.

        As in Accelerate's loops, which call both for every batch: the plugin's `gradient_accumulation_steps` says how
        many calls a step has. The scheduler that was given to `boost` steps with the optimizer.

        Args:
            models: the ones that `boost` returned.
        """
        return self.plugin.accumulate(*models)

    def naming_nonfinite(self, model: nn.Module) -> AbstractContextManager[None]:
        """Return a block around a step that raises if a module computes a NaN or an infinity in it.

            with booster.naming_nonfinite(model):
                booster.execute_pipeline(batches, model, criterion, optimizer)

        The error names the first module, the rank and the microbatch, on every rank. For a few steps after a loss has
        become NaN: the block waits for the device at its end. Collective over the world.

        Args:
            model: the one that `boost` returned.

        Raises:
            FloatingPointError: at the end of the block.
        """
        return self.plugin.naming_nonfinite(model)

    def save_trace(self, profiler: profile, path: str | Path) -> None:
        """Write the profiles of all ranks as one trace on one clock, which https://ui.perfetto.dev opens.

            with torch.profiler.profile() as profiler:
                booster.execute_pipeline(batches, model, criterion, optimizer)
            booster.save_trace(profiler, "trace.json")

        Actions of the pipeline's schedule, calls, layers, collectives and waits have names. Collective over the world;
        the first rank writes.

        Args:
            profiler: of this rank, after its block.
            path: a .json file.
        """
        save_trace(profiler, path, self.plugin.mesh)

    def print(self, *values: Any, **settings: Any) -> None:
        """Print on the first rank, as Python's `print`."""
        if dist.get_rank() == 0:
            print(*values, **settings)

    def log(self, values: Mapping[str, Any], step: int | None = None) -> None:
        """Write numbers as one line of the logger "echelon", on the first rank. Reads tensors: waits for the device."""
        if dist.get_rank() == 0:
            numbers = ", ".join(f"{name} {float(value):.6g}" for name, value in values.items())
            _LOG.info(numbers if step is None else f"step {step}: {numbers}")

    def main_process_first(self) -> AbstractContextManager[None]:
        """Return a block that the first rank runs before the others, which may read what it prepared. Two barriers."""
        return DistCoordinator().priority_execution()

    def seed(self, model: nn.Module, seed: int) -> None:
        """Begin anew with the random numbers of a model's training forwards (dropout), as `torch.manual_seed` does.

        They are the model's own: equal seeds and calls have equal masks, and the generators of torch, NumPy and Python
        are neither read nor changed. Without this call the seed follows from torch's at boost. Collective over the
        world. See docs/random.md.

        Args:
            model: the one that `boost` returned.
            seed: equal on all ranks.

        Raises:
            ValueError: the seed differs between ranks, or it is no integer.
        """
        self.plugin.seed(model, seed)

    def save_model(
        self,
        model: nn.Module,
        checkpoint: str | Path,
        shard: bool = False,
        size_per_shard: float = 1024,
        use_safetensors: bool = True,
        use_async: bool = False,
        prefix: str | None = None,
        gather_dtensor: bool = True,
    ) -> Save:
        """Write the model in Hugging Face's format; each rank writes a part of the files. Collective over the world.

        No rank gathers the full model: the rank that writes a tensor receives its shards. For a model with adapters,
        the weights are saved under the model's own names, and the adapters next to them in peft's format.

        Args:
            model: the one that `boost` returned.
            checkpoint: the file, or with `shard` the folder, which then has the config for `from_pretrained` too.
            shard: write a folder, with files of at most `size_per_shard` and their index.
            size_per_shard: in MiB.
            use_safetensors: write safetensors; else torch's format (`.bin`), where a file is in memory until written.
            use_async: copy the tensors, and return while they are being written.
            prefix: prefix of file names in a folder, `PREFIX.model.safetensors`. `from_pretrained` does not find them;
                `load_model` takes the file, or the index of several.
            gather_dtensor: must be True: files hold full tensors, although no rank gathers the model.

        Returns:
            The save; with `use_async`, `wait()` waits for its end and raises its error.

        Raises:
            OSError: writing failed; raised on every rank. Existing files are unchanged.
        """
        return self.plugin.checkpoints.save_model(
            self.plugin.local_model(model),
            checkpoint,
            shard=shard,
            size_per_shard=size_per_shard,
            use_safetensors=use_safetensors,
            use_async=use_async,
            prefix=prefix,
            gather_dtensor=gather_dtensor,
        )

    def load_model(self, model: nn.Module, checkpoint: str | Path, strict: bool = True) -> None:
        """Load any Hugging Face model from a file or a folder into a boosted one; each rank reads only its shards.

        Collective over the world. An optimizer's master weights are updated too.

        Args:
            model: the one that `boost` returned.
            checkpoint: the result of `save_model` or `save_pretrained`.
            strict: refuse missing and extra tensors. Otherwise missing ones stay unchanged, and extra ones are ignored.

        Raises:
            ValueError: tensors are missing or do not fit; lists all of them, and nothing is changed.
            FileNotFoundError: the path does not exist.
        """
        self.plugin.checkpoints.load_model(self.plugin.local_model(model), checkpoint, strict=strict)

    def save_optimizer(
        self,
        optimizer: Optimizer,
        checkpoint: str | Path,
        use_async: bool = False,
        shard: bool = True,
        gather_dtensor: bool = True,
    ) -> Save:
        """Write an optimizer's state to a folder; each rank writes its shards. Collective over the world.

        Any layout can load it: shards are stored with their position in the full tensors.

        Args:
            optimizer: the one that `boost` returned.
            checkpoint: the folder.
            use_async: see `save_model`.
            shard, gather_dtensor: must be True: the result is always a folder of shards, and nothing is gathered.

        Raises:
            OSError: writing failed; raised on every rank.
        """
        return self.plugin.checkpoints.save_optimizer(
            self.plugin.trained(optimizer),
            checkpoint,
            use_async=use_async,
            shard=shard,
            gather_dtensor=gather_dtensor,
        )

    def load_optimizer(self, optimizer: Optimizer, checkpoint: str | Path) -> None:
        """Load an optimizer's state that `save_optimizer` wrote under any layout. Collective over the world.

        Raises:
            ValueError: the optimizer, its parameters or its groups differ; all differences at once.
            FileNotFoundError: the folder has no optimizer state.
        """
        self.plugin.checkpoints.load_optimizer(self.plugin.trained(optimizer), checkpoint)

    def save_lr_scheduler(self, lr_scheduler: LRScheduler, checkpoint: str | Path) -> None:
        """Write a scheduler's state to a file, on the first rank. Collective over the world."""
        self.plugin.checkpoints.save_lr_scheduler(lr_scheduler, checkpoint)

    def load_lr_scheduler(self, lr_scheduler: LRScheduler, checkpoint: str | Path) -> None:
        """Load a scheduler's state that `save_lr_scheduler` wrote. Collective over the world."""
        self.plugin.checkpoints.load_lr_scheduler(lr_scheduler, checkpoint)

    def save_checkpoint(
        self,
        directory: str | Path,
        step: int,
        *,
        model: nn.Module,
        optimizer: Optimizer | None = None,
        lr_scheduler: LRScheduler | None = None,
        dataloader: DataLoader | None = None,
        user: Any = None,
        keep_last: int | None = None,
        use_async: bool = False,
        size_per_shard: float = 1024,
    ) -> Save:
        """Save the complete state of a run as `directory/step-…`, loadable under any layout. Collective over the world.

        The folder gets its name once all files are on the disk. Its weights are a Hugging Face folder, `step-…/model`.
        A failed write does not end training: the first rank reports it through `logging`, `Save.failure` has it on
        every rank, and existing checkpoints are unchanged.

        Args:
            directory: the folder of all checkpoints of the run, visible to all ranks.
            step: the number of the step.
            model, optimizer, lr_scheduler: the ones that `boost` returned.
            dataloader: the one of training, from `boost` or `plugin.prepare_dataloader`; its position is saved.
            user: further plain values to save, equal on all ranks, or given on the first rank only.
            keep_last: delete older checkpoints, and keep this number of the newest complete ones; None keeps all.
            use_async: copy the tensors, and write them during training; the next save or load waits for it.
            size_per_shard: maximum size of a file of weights, in MiB.

        Returns:
            The save: `failure`, `done`, and `wait()`, which raises its error.

        Raises:
            ValueError: an argument cannot be saved, or arguments differ between ranks; on every rank, nothing written.
        """
        return self.plugin.checkpoints.save_step(
            directory,
            step,
            model=self.plugin.local_model(model),
            optimizer=None if optimizer is None else self.plugin.trained(optimizer),
            lr_scheduler=lr_scheduler,
            dataloader=dataloader,
            user=user,
            keep_last=keep_last,
            size_per_shard=size_per_shard,
            use_async=use_async,
        )

    def load_checkpoint(
        self,
        directory: str | Path,
        *,
        model: nn.Module,
        optimizer: Optimizer | None = None,
        lr_scheduler: LRScheduler | None = None,
        dataloader: DataLoader | None = None,
        resume: Resume = "auto",
        strict: bool = True,
    ) -> Resumed | None:
        """Resume from a checkpoint of any layout, after checking the hash of every file. Collective over the world.

        Random generators, and the random numbers of the model's forwards, are restored. Under another layout a rank
        gets those of the nearest rank.

        Args:
            directory: the folder of all checkpoints of the run.
            model, optimizer, lr_scheduler, dataloader: the objects to restore, as for `save_checkpoint`.
            resume: "auto": the newest valid checkpoint; skipped damaged ones, and finding none, are logged. "must": the
                same, but one has to exist. A number: that step. None: `directory` is the folder of a step.
            strict: see `load_model`.

        Returns:
            The loaded checkpoint; None if "auto" found none.

        Raises:
            ValueError: it is damaged (names file and tensor) or does not fit; on every rank, before anything changes.
            FileNotFoundError: the step does not exist, or "must" found none; on every rank.
        """
        return self.plugin.checkpoints.load_step(
            directory,
            model=self.plugin.local_model(model),
            optimizer=None if optimizer is None else self.plugin.trained(optimizer),
            lr_scheduler=lr_scheduler,
            dataloader=dataloader,
            resume=resume,
            strict=strict,
        )

    def enable_lora(
        self,
        model: nn.Module,
        pretrained_dir: str | Path | None = None,
        lora_config: Any = None,
        bnb_quantization_config: Any = None,
        quantize: bool = False,
    ) -> nn.Module:
        """Add LoRA adapters to a model by peft, and freeze all other weights. Call it before `boost`, on every rank.

        Args:
            model: a plain transformers model; changed in place.
            pretrained_dir: a folder with saved adapters, to continue their training, under any layout.
            lora_config: a `peft.LoraConfig`, for new adapters.
            bnb_quantization_config, quantize: not available.

        Returns:
            A `peft.PeftModel`, for the optimizer and for `boost`.

        Raises:
            ImportError: peft is not installed.
            ValueError: the arguments, or the adapters and the model, do not fit each other; all reasons at once.
        """
        return enable_lora(model, pretrained_dir, lora_config, bnb_quantization_config, quantize)

    def save_lora_as_pretrained(
        self, model: nn.Module, checkpoint: str | Path, use_safetensors: bool = True
    ) -> None:
        """Write the adapters of a boosted model to a folder that `PeftModel.from_pretrained` reads.

        Rank 0 writes unsharded `adapter_model.safetensors` and `adapter_config.json`. Collective over the world.

        Args:
            model: the boosted result of `enable_lora`.
            checkpoint: the folder; created if missing.
            use_safetensors: write safetensors; otherwise `adapter_model.bin` in torch's format.

        Raises:
            OSError: rank 0 failed to write; raised on every rank.
            ValueError: the model has no adapters.
        """
        self.plugin.checkpoints.save_adapters(
            self.plugin.local_model(model), checkpoint, use_safetensors=use_safetensors
        )


def _type_errors(optimizer: object, criterion: object, lr_scheduler: object) -> list[str]:
    """List arguments of `boost` that lack the methods of their kind."""
    expectations = (
        ("optimizer", optimizer, "param_groups", "a torch optimizer over model.parameters()"),
        ("criterion", criterion, "__call__", "a function of (outputs, inputs)"),
        ("lr_scheduler", lr_scheduler, "step", "a scheduler built on the optimizer"),
    )
    return [
        f"{name}={repr(value) if isinstance(value, str) else type(value).__name__} is not valid: give {expected}, or "
        "leave it out"
        for name, value, attribute, expected in expectations
        if value is not None and not hasattr(value, attribute)
    ]
