"""Saves go on beside training, one after the other, keep what went wrong, and write from copies."""

import logging
import threading
from pathlib import Path
from unittest.mock import patch

import pytest
import torch

from echelon.checkpoint.background import Copies, Saver

PATH = Path("somewhere")


def full() -> None:
    raise OSError("no space left")


@pytest.fixture(autouse=True)
def _first_rank() -> object:
    with patch("torch.distributed.get_rank", return_value=0):
        yield


def test_a_save_begins_when_the_one_before_has_ended() -> None:
    saver, order, may_end = Saver(), [], threading.Event()

    def slow() -> None:
        may_end.wait()
        order.append("first")

    first = saver.run(slow, PATH, use_async=True)
    assert not first.done
    threading.Timer(0.05, may_end.set).start()
    saver.run(lambda: order.append("second"), PATH, use_async=True).wait()
    assert order == ["first", "second"] and first.done


def test_a_failure_beside_training_is_told_and_kept(caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.ERROR):
        save = Saver().run(full, PATH, use_async=True)
        with pytest.raises(OSError, match="no space left"):
            save.wait()
    assert isinstance(save.failure, OSError)
    assert "saving to somewhere failed: no space left" in caplog.text


def test_a_full_disk_ends_neither_training_nor_the_next_save(caplog: pytest.LogCaptureFixture) -> None:
    saver = Saver()
    assert isinstance(saver.run(full, PATH, is_reporting=True).failure, OSError)
    assert saver.run(lambda: None, PATH, is_reporting=True).failure is None
    with pytest.raises(OSError):
        saver.run(full, PATH)


def tensors(seed: int) -> list[torch.Tensor]:
    drawn = torch.Generator().manual_seed(seed)
    return [
        torch.randn(5, 3, generator=drawn),
        torch.randn(7, 4, generator=drawn).t(),  # does not lie end to end
        torch.tensor(3.0),
        torch.randn(3, generator=drawn).bfloat16(),
        torch.empty(0, 2),
        torch.randn(2**24 + 1, generator=drawn),  # more than a chunk
        torch.randn(9, generator=drawn).double(),
    ]


def test_copies_stay_as_they_were_and_their_memory_is_used_again() -> None:
    copies = Copies(torch.device("cpu"))
    sizes = []
    for seed in range(3):
        live = tensors(seed)
        with copies.keeping() as keep:
            copied = [keep(each) for each in live]
        for each in live:
            each.fill_(-1.0)
        for found, expected in zip(copied, tensors(seed), strict=True):
            assert torch.equal(found, expected) and found.is_contiguous() and found.dtype == expected.dtype
        sizes.append(sum(chunk.nbytes for chunk in copies._chunks))
    assert sizes[0] == sizes[1] == sizes[2] > 2**26
