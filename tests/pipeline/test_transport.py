"""Sends between stages: the lifetime of their tensors."""

from types import SimpleNamespace
from typing import Any
from unittest.mock import patch

import torch
import torch.distributed as dist
from torch.multiprocessing.reductions import StorageWeakRef

from echelon.pipeline import transport
from echelon.pipeline.action import Action, Op


class Send:
    """A send that reports its completion, like those of NCCL."""

    def __init__(self, *_: Any, **__: Any) -> None:
        self.is_over, self.waits = False, 0

    def is_completed(self) -> bool:
        return self.is_over

    def wait(self) -> None:
        self.waits += 1


def test_a_tensor_is_free_once_its_send_is_over() -> None:
    mesh: Any = SimpleNamespace(
        device=torch.device("cpu"), group=lambda _: None, global_ranks=lambda _: [0, 1]
    )
    works: list[Send] = []

    def isend(*_: Any, **__: Any) -> Send:
        works.append(Send())
        return works[-1]

    storages: list[StorageWeakRef] = []
    with patch.object(dist, "isend", isend), patch.object(transport, "backend_of", lambda *_: "gloo"):
        channel = transport._Channel(mesh, None, 1, sends=True)  # type: ignore[arg-type]
        for number in range(4):
            tensor = torch.ones(8)
            storages.append(StorageWeakRef(tensor.untyped_storage()))
            channel.send(Action(Op.SEND_FORWARD, 0, number), (tensor,))
            del tensor
            if number == 1:
                works[0].is_over = works[1].is_over = True
    assert [storage.expired() for storage in storages] == [True, True, False, False]
    assert [work.waits for work in works] == [1, 1, 0, 0], "a send that is over is waited for, once"
    channel.flush()
    assert all(storage.expired() for storage in storages) and all(work.waits == 1 for work in works)
