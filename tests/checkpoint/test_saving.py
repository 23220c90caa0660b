"""Saves go on beside training, one after the other, and keep what went wrong."""

import logging
import threading
from pathlib import Path
from unittest.mock import patch

import pytest

from echelon.checkpoint.saving import Saver

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

    first = saver.begin(slow, PATH)
    assert not first.done
    threading.Timer(0.05, may_end.set).start()
    saver.begin(lambda: order.append("second"), PATH).wait()
    assert order == ["first", "second"] and first.done


def test_a_failure_beside_training_is_told_and_kept(caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.ERROR):
        save = Saver().begin(full, PATH)
        with pytest.raises(OSError, match="no space left"):
            save.wait()
    assert isinstance(save.failure, OSError)
    assert "saving to somewhere failed: no space left" in caplog.text


def test_a_full_disk_ends_neither_training_nor_the_next_save(caplog: pytest.LogCaptureFixture) -> None:
    saver = Saver()
    assert isinstance(saver.run_and_tell(full, PATH).failure, OSError)
    assert saver.run_and_tell(lambda: None, PATH).failure is None
    with pytest.raises(OSError):
        saver.run(full, PATH)
