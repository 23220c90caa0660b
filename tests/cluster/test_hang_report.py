"""A run that hangs says where every rank is, for how long, and the likely cause; see echelon/cluster/hang_report.py."""

import gc
import sys
import time
from dataclasses import replace
from threading import get_ident
from unittest.mock import patch
from weakref import ref

import pytest
import torch
import torch.distributed as dist

from echelon.cluster import whereabouts
from echelon.cluster.collectives import reduce_from
from echelon.cluster.errors import RankFailure
from echelon.cluster.failures import naming_failures
from echelon.cluster.hang_report import hang_report, likely_cause, named
from echelon.cluster.heartbeats import Event, Heartbeat
from echelon.cluster.whereabouts import Place, _locals, place_of

from ..pool import Pool
from .helpers import with_short_timeout

TIMEOUT = 3.0  # of the process groups, in seconds


def beat(action: str | None, *, calls: int = 1, place: Place | None = None, ended: int = -1) -> Heartbeat:
    group = "0,1" if action else ""
    return Heartbeat(
        beat=0, action=action, calls=calls, group=group, joined={"0,1": calls}, recent={"0,1": ["run"] * calls},
        data_ended=ended, place=place, waited=7.0,
    )  # fmt: skip


def reduces(sizes: str, name: str = "all_reduce") -> Place:
    return Place(
        waits_for=(0, 1), collective=f"{name} over tp, ranks 0, 1", sizes=sizes, line="train.py:9 in main"
    )


WAITS = beat("run", calls=2, place=reduces("float32[4, 8]"))


@pytest.mark.parametrize(
    ("other", "cause"),
    [
        (beat(None, ended=1), "rank 1 ran out of batches"),
        (beat("save"), "rank 1 is in another call, save"),
        (beat(None, place=Place(line="train.py:40 in main", is_in_data=True)), "in its dataloader, at train.py:40"),
        (beat("run", calls=2, place=reduces("float32[4, 9]")), "rank 1 has float32[4, 9]: shapes and dtypes"),
        (beat("run", calls=2, place=reduces("float32[4, 8]", "all_gather")), "rank 1 in another collective, all_ga"),
        (beat("run", calls=2, place=Place(("F stage 1 microbatch 0",))), "rank 1 does not join all_reduce over tp"),
        (
            beat("run", calls=2, place=Place(("receiving the activations of microbatch 0",), waits_for=(0,))),
            "rank 1 cannot join all_reduce over tp, ranks 0, 1, in which rank 0 waits at train.py:9 in main, and is",
        ),
        (WAITS, "all ranks wait in the same call"),
        (None, "rank 1 has not started"),
    ],
)  # fmt: skip
def test_the_likely_cause_follows_from_the_heartbeats(other: Heartbeat | None, cause: str) -> None:
    assert cause in likely_cause(0, {0: WAITS, 1: other}, [])


def test_a_failed_rank_is_the_cause_before_all_others() -> None:
    beats = {0: WAITS, 1: beat(None, ended=1)}
    assert likely_cause(0, beats, [Event(rank=1, kind="gone")]) == "rank 1 died: its process is gone"


def test_a_rank_that_computes_is_the_cause_before_collectives_of_its_neighbours() -> None:
    every = Place(waits_for=(0, 1, 2), collective="all_reduce over ranks 0, 1, 2", sizes="float32[6]")
    pair = Place(waits_for=(1, 2), collective="all_reduce over sp, ranks 1, 2", sizes="float[]")
    asleep = Place(("F stage 0 microbatch 0",), line="train.py:9 in hook")
    places = (every, pair, asleep)
    beats = {rank: beat("run", calls=2, place=place) for rank, place in enumerate(places)}
    assert likely_cause(0, beats, []).startswith(
        "rank 2 does not join all_reduce over ranks 0, 1, 2, and is at F"
    )
    beats[2] = beat("run", calls=2, place=pair._replace(sizes="float[]"))
    assert (
        "rank 0 is in all_reduce over ranks 0, 1, 2 and rank 1 in another collective, all_reduce over sp"
        in (likely_cause(0, beats, []))
    )


def test_ranks_of_one_place_share_a_line() -> None:
    beats = {0: WAITS, 1: replace(WAITS, waited=9.0), 2: WAITS, 4: beat(None)}
    report = hang_report(0, beats).splitlines()
    assert report[1].startswith(
        "- ranks 0-2, for 9 s: in run, call 2, all_reduce over tp, ranks 0, 1 of float32"
    )
    assert report[2] == "- rank 4, for 7 s: outside of Echelon, after call 1"
    assert named([0, 1, 2, 5]) == "ranks 0-2, 5"


def test_no_garbage_is_collected_while_the_stack_of_a_thread_is_read() -> None:
    collects: list[bool] = []
    with patch.object(whereabouts, "_place", lambda _: collects.append(gc.isenabled())):
        place_of(get_ident())
    assert collects == [False]
    assert gc.isenabled()


def test_a_stack_that_was_read_keeps_no_tensor() -> None:
    def kept() -> bool:
        tensor = torch.ones(2)
        reference = ref(tensor)
        frame = sys._getframe()
        assert _locals(frame)["tensor"] is tensor
        del tensor
        return reference() is not None

    assert not kept()


def sleep_in_a_script() -> None:
    time.sleep(TIMEOUT + 3)


def all_reduce_alone() -> float:
    """Rank 2 is elsewhere for longer than the timeout; return the time that the others waited."""
    with_short_timeout(TIMEOUT)
    start = time.monotonic()
    if dist.get_rank() == 2:
        sleep_in_a_script()
        return 0.0
    with pytest.raises(RankFailure) as raised, naming_failures("execute_pipeline"):
        dist.all_reduce(torch.zeros(3, 5))
    waited, text = time.monotonic() - start, str(raised.value)
    assert "timed out in execute_pipeline (call 1) and no rank has failed" in text, text
    assert (
        "likely cause: rank 2 has not made this call, and is outside of Echelon, at test_hang_report.py:"
        in text
    ), text
    assert (
        "in execute_pipeline, call 1, all_reduce over ranks 0, 1, 2 of float32[3, 5] (test_hang_report.py:"
        in text
    )
    assert "in sleep_in_a_script" in text, text
    return waited


def test_every_waiting_rank_raises_the_report_soon_after_the_timeout(pool: Pool) -> None:
    waited = pool.run(3, all_reduce_alone, timeout=60)
    assert max(waited) < TIMEOUT + 5, waited


class _PlaceOfWait:
    """A communication in flight; `place` is that of a thread that waits for it."""

    place = Place()

    def wait(self) -> None:
        self.place = place_of(get_ident())


def wait_for_the_sum_of_a_layer() -> Place:
    work = _PlaceOfWait()
    with patch.object(dist.ProcessGroup, "allreduce", lambda *_: work):
        reduce_from(torch.zeros(3, 5), dist.group.WORLD)
    return work.place


def test_a_rank_that_waits_for_the_sum_of_a_layer_names_its_collective(pool: Pool) -> None:
    for place in pool.run(2, wait_for_the_sum_of_a_layer):
        assert (place.collective, place.sizes) == ("all_reduce over ranks 0, 1", "float32[3, 5]")
        assert place.waits_for == (0, 1)
