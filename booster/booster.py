"""Booster: the user's face of all plugins."""

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager
from pathlib import Path
from typing import Any, Literal

import torch
from torch import nn
from torch.optim import Optimizer
from torch.optim.lr_scheduler import LRScheduler
from torch.utils.data import DataLoader

from ..checkpoint.background import Save
from ..checkpoint.calls import save_errors
from ..checkpoint.step import Resume, Resumed
from ..cluster.errors import raise_errors
from ..plugins.base import Boosted, Plugin, Returned
from ..plugins.lora import enable_lora, unwrapped
from ..plugins.torch_ddp import TorchDDPPlugin


class Booster:
    """Wraps what a training script has, so that the same script trains under any plugin.

    Example:
        booster = Booster(plugin=HybridParallelPlugin(tp_size=2, pp_size=2, num_microbatches=4))
        model, optimizer, criterion, dataloader, scheduler = booster.boost(model, optimizer, criterion, dataloader)
        outputs = booster.execute_pipeline(iter(dataloader), model, criterion, optimizer)
        optimizer.step()

    Args:
        plugin: how to train; None is `TorchDDPPlugin()`.
        mixed_precision: "fp32", "bf16" or "fp16", for TorchDDPPlugin; the others take their own `precision`. None is
            the same under all: fp32 on a CPU, bf16 on a GPU that computes in it, else fp16.
        device: ColossalAI's; None alone.

    Raises:
        ValueError: `plugin` is no plugin, `mixed_precision` is unknown, or given beside a plugin with a precision of
            its own.
    """

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
                f"plugin={plugin!r} is no plugin: make one first, as in HybridParallelPlugin(tp_size=2), or leave it "
                "out for TorchDDPPlugin()"
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
        dataloader: DataLoader | None = None,
        lr_scheduler: LRScheduler | None = None,
    ) -> Boosted:
        """Wrap model, optimizer, criterion, dataloader and scheduler, and return them in that order.

        Collective over the world: every rank calls with an equal model. The scheduler may have been built
        on the optimizer before. A model alone is for evaluation, inference and saving: over several ranks its
        `backward` raises, but under TorchDDPPlugin and TorchFSDPPlugin, where torch averages its gradients.

        A plain DataLoader is sharded over the replicas: each takes `batch_size` samples of its own, in the order that
        its sampler has for all of them together. One of `plugin.prepare_dataloader`, or with a DistributedSampler, is
        returned as it is.

        Raises:
            ValueError: on every rank, before anything changes: arguments of other types; then all reasons why no
                checkpoint could be written; then a dataloader that cannot be sharded; then all reasons why model and
                optimizer do not fit each other or the plugin.
        """
        raise_errors(_type_errors(optimizer, criterion, lr_scheduler))
        if isinstance(model, nn.Module):
            raise_errors(save_errors(unwrapped(model).model, optimizer, lr_scheduler))
        dataloader = self.plugin.shard_dataloader(dataloader)
        boosted = self.plugin.configure(model, optimizer, criterion, dataloader, lr_scheduler)
        self.plugin.announce_precision()
        return boosted

    def backward(self, loss: torch.Tensor, optimizer: Optimizer) -> None:
        """Compute gradients of a loss that `model(**batch)` gave; the loss is scaled as the precision needs."""
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
        """Take the next batch and run it through the pipeline; see `HybridParallelPlugin.execute_pipeline`."""
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
        """Inside the block gradients accumulate without being reduced over the data-parallel ranks."""
        return self.plugin.no_sync(model, optimizer)

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
        """Write the model in files that Hugging Face reads, each rank its share of them. Collective over the world.

        No rank gathers the model: the one that writes a tensor is sent the shards of it. Of a model with adapters the
        weights have the model's own names, and adapters stand beside them under peft's.

        Args:
            model: what `boost` returned.
            checkpoint: the file, or with `shard` the folder, in which `from_pretrained` finds the config, too.
            shard: write a folder, with files of at most `size_per_shard` and their index.
            size_per_shard: in MiB.
            use_safetensors: safetensors, or torch's own format (`.bin`), where a file is in memory until written.
            use_async: copy what is to be written, and return while it is being written.
            prefix: of the names of the files of a folder, `PREFIX.model.safetensors`: `from_pretrained` finds none,
                `load_model` takes the file or the index of several.
            gather_dtensor: True alone: files hold whole tensors, though nothing is gathered.

        Returns:
            The save; `wait()` lets one with `use_async` end, and raises what went wrong.

        Raises:
            OSError: it could not be written; on every rank. What was there stands.
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
        """Read a file, or a folder, of any Hugging Face model into a boosted one; each rank reads what it holds.

        Collective over the world. Masters of an optimizer follow.

        Args:
            model: what `boost` returned.
            checkpoint: what `save_model` or `save_pretrained` wrote.
            strict: refuse tensors that are missing or extra; else those stay as they are, and are left out.

        Raises:
            ValueError: tensors are missing or do not fit; lists all of them, and changes nothing.
            FileNotFoundError: there is nothing of that name.
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
        """Write an optimizer's state into a folder, each rank what it holds. Collective over the world.

        Whatever layout loads it: tensors are stored in the coordinates of whole parameters.

        Args:
            optimizer: what `boost` returned.
            checkpoint: the folder.
            use_async: as of `save_model`.
            shard, gather_dtensor: True alone: it is a folder of whole tensors in boxes, and nothing is gathered.

        Raises:
            OSError: it could not be written; on every rank.
        """
        return self.plugin.checkpoints.save_optimizer(
            self.plugin.trained(optimizer),
            checkpoint,
            use_async=use_async,
            shard=shard,
            gather_dtensor=gather_dtensor,
        )

    def load_optimizer(self, optimizer: Optimizer, checkpoint: str | Path) -> None:
        """Let an optimizer go on from what `save_optimizer` wrote under any layout. Collective over the world.

        Raises:
            ValueError: it is of another optimizer, other parameters or other groups; all of it.
        """
        self.plugin.checkpoints.load_optimizer(self.plugin.trained(optimizer), checkpoint)

    def save_lr_scheduler(self, lr_scheduler: LRScheduler, checkpoint: str | Path) -> None:
        """Write a scheduler's state to a file, on the first rank. Collective over the world."""
        self.plugin.checkpoints.save_lr_scheduler(lr_scheduler, checkpoint)

    def load_lr_scheduler(self, lr_scheduler: LRScheduler, checkpoint: str | Path) -> None:
        """Let a scheduler go on from what `save_lr_scheduler` wrote. Collective over the world."""
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
        """Write all that a run needs to go on, under any layout, as `directory/step-…`. Collective over the world.

        The folder appears under its name once all of it is on the disk. Weights in it are a Hugging Face folder,
        `step-…/model`. A failure to write does not end training: the first rank reports it through `logging`, the save
        knows it on every rank, and the checkpoints that are there stand.

        Args:
            directory: of all checkpoints of the run, seen by all ranks.
            step: its number.
            model, optimizer, lr_scheduler: as `boost` returned them.
            dataloader: of `plugin.prepare_dataloader`, whose position is saved.
            user: plain values to be saved with it, equal on all ranks, or given on the first alone.
            keep_last: then keep so many of the newest checkpoints alone; None keeps all.
            use_async: copy what is to be written, and write while training goes on; the next save, or load, waits.
            size_per_shard: of files of weights, in MiB.

        Returns:
            The save: `failure`, `done`, and `wait()`, which raises what went wrong.

        Raises:
            ValueError: what is given cannot be saved, or ranks ask for different saves; on every rank, nothing written.
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
        """Go on from a checkpoint of any layout, once every file equals its hash. Collective over the world.

        Random generators go on where they were under the same layout, and under another one where those of the nearest
        rank were.

        Args:
            directory: of all checkpoints of the run.
            model, optimizer, lr_scheduler, dataloader: what goes on, as it was given to `save_checkpoint`.
            resume: "auto" for the newest that is sound, reported where a damaged one is passed over, or where there is
                none at all; "must" for the same, which has to be there; the number of a step; None where `directory` is
                the folder of the step itself.
            strict: as of `load_model`.

        Returns:
            Which one it is; None where "auto" found none at all.

        Raises:
            ValueError: it is damaged, with which file and tensor, or does not fit; on every rank, before anything
                changed.
            FileNotFoundError: there is no such step, or with "must" none at all; on every rank.
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
        """Put adapters into a model by peft, so that they alone are trained. Before `boost`; every rank calls.

        Args:
            model: a plain transformers model; changed in place.
            pretrained_dir: a folder with saved adapters, to go on training, under any layout.
            lora_config: a `peft.LoraConfig`, for new adapters.
            bnb_quantization_config, quantize: not offered.

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

        `adapter_model.safetensors` and `adapter_config.json`, whole, by rank 0. Collective over the world.

        Args:
            model: what `boost` returned, of what `enable_lora` returned.
            checkpoint: the folder; made where missing.
            use_safetensors: or `adapter_model.bin` in torch's format.

        Raises:
            OSError: rank 0 could not write; on every rank.
            ValueError: the model has no adapters.
        """
        self.plugin.checkpoints.save_adapters(
            self.plugin.local_model(model), checkpoint, use_safetensors=use_safetensors
        )


def _type_errors(optimizer: object, criterion: object, lr_scheduler: object) -> list[str]:
    """List what `boost` is given beside the model that cannot be what its name says."""
    given = (
        ("optimizer", optimizer, "param_groups", "a torch optimizer over model.parameters()"),
        ("criterion", criterion, "__call__", "a function of (outputs, inputs)"),
        ("lr_scheduler", lr_scheduler, "step", "a scheduler built on the optimizer"),
    )
    return [
        f"{name}={value!r} is none: give {expected}, or leave it out"
        for name, value, attribute, expected in given
        if value is not None and not hasattr(value, attribute)
    ]
