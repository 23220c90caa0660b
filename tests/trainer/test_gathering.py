"""Predictions are gathered without the rows that complete a batch."""

from types import SimpleNamespace

import pytest
import torch

from echelon.trainer.batches import ReplicaStream
from echelon.trainer.internals import ReplicaAccelerator

STREAM = ReplicaStream([], 8, rank=0, size=1, drop_last=False)


@pytest.mark.parametrize(
    ("dataset", "at_end", "remainder", "expected"),
    [
        (STREAM, False, 5, 5),  # the short last batch of a worker, before those of the others
        (STREAM, False, -1, 8),
        ([], False, 5, 8),
        ([], True, 5, 5),
    ],
)
def test_rows_that_complete_a_batch_are_left_out(
    dataset: object, at_end: bool, remainder: int, expected: int
) -> None:
    accelerator = ReplicaAccelerator.__new__(ReplicaAccelerator)
    accelerator.mesh = SimpleNamespace(size=lambda *_: 1)  # type: ignore[assignment]
    loader = SimpleNamespace(dataset=dataset, batch_size=8, total_batch_size=8)
    accelerator.gradient_state = SimpleNamespace(
        end_of_dataloader=at_end, remainder=remainder, active_dataloader=loader
    )
    assert len(accelerator.gather_for_metrics(torch.zeros(8, 3))) == expected
