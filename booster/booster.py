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

from ..plugins.base import Boosted, Plugin
from ..plugins.lora_enable import enable_lora
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
        mixed_precision: "fp16" or "bf16", for TorchDDPPlugin; the others take their own `precision`.

    Raises:
        ValueError: `mixed_precision` is unknown, or given beside a plugin with a precision of its own.
    """

    def __init__(
        self, plugin: Plugin | None = None, mixed_precision: Literal["fp16", "bf16"] | None = None
    ) -> None:
        self.plugin = plugin if plugin is not None else TorchDDPPlugin()
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
        on the optimizer before.

        Raises:
            ValueError: model and optimizer do not fit each other or the plugin; all reasons at once, on
                every rank, before anything is communicated.
        """
        return self.plugin.configure(model, optimizer, criterion, dataloader, lr_scheduler)

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
        return_outputs: bool = False,
    ) -> dict[str, Any]:
        """Take the next batch and run it through the pipeline; see `HybridParallelPlugin.execute_pipeline`."""
        return self.plugin.execute_pipeline(
            data_iter, model, criterion, optimizer, return_loss=return_loss, return_outputs=return_outputs
        )

    def no_sync(self, model: nn.Module, optimizer: Optimizer | None = None) -> AbstractContextManager[None]:
        """Inside the block gradients accumulate without being reduced over the data-parallel ranks."""
        return self.plugin.no_sync(model, optimizer)

    def save_model(self, model: nn.Module, checkpoint: str | Path, *, use_safetensors: bool = True) -> None:
        """Write the whole model to one file that Hugging Face reads, on rank 0. Collective over the world."""
        self.plugin.save_model(model, Path(checkpoint), use_safetensors=use_safetensors)

    def load_model(self, model: nn.Module, checkpoint: str | Path) -> None:
        """Read a whole model's file into this rank's part of a boosted model. Every rank calls.

        Raises:
            ValueError: tensors are missing or do not fit; lists all of them, and changes nothing.
        """
        self.plugin.load_model(model, Path(checkpoint))

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
        self.plugin.save_lora(model, Path(checkpoint), use_safetensors=use_safetensors)
