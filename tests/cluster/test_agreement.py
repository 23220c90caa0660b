"""Shares of codes add up to exactly 0 where ranks agree."""

from typing import Any
from unittest.mock import Mock

import pytest
import torch

from echelon.cluster.agreement import Agreement


@pytest.mark.parametrize("deviation", [None, torch.tensor(0.0)], ids=("plain", "float32"))
@pytest.mark.parametrize("kind", [int, torch.tensor])
def test_shares_of_four_equal_ranks_are_0(
    monkeypatch: pytest.MonkeyPatch, kind: Any, deviation: torch.Tensor | None
) -> None:
    code = 2**24 - 5  # times 3 it is no float32
    monkeypatch.setattr("echelon.cluster.agreement.batch_code", lambda batch: kind(code))
    shares = []
    for rank in range(4):
        mesh = Mock(global_rank=rank, world_size=4, replica_ranks=lambda: [0, 1, 2, 3])
        agreement = Agreement(mesh)
        agreement.note("a batch")
        if deviation is not None:
            agreement.require_zero(deviation, "why", waits=False)
        shares.append(float(agreement.checksum_term))
    assert sum(shares) == 0
