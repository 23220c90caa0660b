"""Adapters as peft saves them. Writing them is checkpoints.py, what they are called plugins/lora.py."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from pathlib import Path

import torch

from .held import HeldTensor
from .model_files import FileNames
from .placing import Replaced

SAFETENSORS = FileNames("adapter_model.safetensors", "", "")
TORCH = FileNames("adapter_model.bin", "", "")
REPLACED = Replaced(entries=("adapter_config.json",), others=(SAFETENSORS.one, TORCH.one))


@dataclass(frozen=True, kw_only=True)
class Adapter:
    """One adapter of a model, as it is saved.

    Args:
        folder: where it is saved, seen from the folder that is given; "" is that one.
        names: of its tensors in the model, by those in the file.
        write_config: writes its configuration into a folder.
    """

    folder: str
    names: Mapping[str, str]
    write_config: Callable[[Path], None]

    def describe(self, _: torch.dtype, folder: Path) -> None:
        """Write its configuration, which says nothing of formats."""
        self.write_config(folder)

    def held(self, tensors: Mapping[str, HeldTensor]) -> dict[str, HeldTensor]:
        """Its tensors by the names in the file, of which this rank holds something."""
        return {key: replace(tensors[name], name=key) for key, name in self.names.items() if name in tensors}
