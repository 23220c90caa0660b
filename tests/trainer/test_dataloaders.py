"""Options of a user's dataloader are kept or refused."""

from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch.utils.data import DataLoader

from echelon.trainer.internals import ReplicaAccelerator

from .runs import Stream


def accelerator() -> Any:
    """Return the accelerator of a replica of two, without a process group."""
    bare: Any = ReplicaAccelerator.__new__(ReplicaAccelerator)
    bare.mesh = SimpleNamespace(size=lambda *_: 2, rank=lambda *_: 1)
    bare.state = SimpleNamespace(device=torch.device("cpu"))
    bare.dataloader_config = SimpleNamespace(use_seedable_sampler=False, data_seed=None, non_blocking=False)
    bare.device_placement, bare.least = True, 1
    return bare


def test_a_stream_keeps_the_options_of_its_dataloader() -> None:
    generator = torch.Generator()
    loader = DataLoader(Stream([]), 8, generator=generator, num_workers=2, prefetch_factor=3, timeout=9.0)
    prepared = accelerator().prepare_data_loader(loader)
    assert prepared.base_dataloader.generator is generator
    assert (prepared.num_workers, prepared.prefetch_factor, prepared.timeout) == (2, 3, 9.0)


@pytest.mark.parametrize("dataset", [[1, 2], Stream([1, 2])])
def test_batches_in_any_order_are_refused(dataset: Any) -> None:
    with pytest.raises(
        ValueError, match="in_order=False would give the ranks of a replica different batches"
    ):
        accelerator().prepare_data_loader(DataLoader(dataset, num_workers=2, in_order=False))
