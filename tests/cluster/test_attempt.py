"""The ranks of one attempt agree on a part of torchrun's store, whatever earlier attempts left in it."""

import time
from collections.abc import Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from functools import partial

import pytest
import torch.distributed as dist

from echelon.cluster.attempt import attempt_store, may_restart
from echelon.cluster.errors import RankFailure

RANKS = 4


def start(
    pool: ThreadPoolExecutor,
    store: dist.Store,
    *ranks: int,
    delays: Mapping[int, float] | None = None,
    seconds: float = 20.0,
) -> dict[int, Future[dist.Store]]:
    """Start ranks of an attempt in threads, some later than others."""

    def join(rank: int) -> dist.Store:
        time.sleep((delays or {}).get(rank, 0.0))
        return attempt_store(store.clone(), rank, RANKS, timeout_seconds=seconds)

    return {rank: pool.submit(join, rank) for rank in ranks}


def agreed(joined: dict[int, Future[dist.Store]], key: str) -> bool:
    """Return True if all ranks see what rank 0 writes; then the key stays, for the next attempt to trip over."""
    stores = {rank: future.result(30) for rank, future in joined.items()}
    stores[0].set(key, "here")
    return all(store.check([key]) for store in stores.values())


@pytest.fixture(params=["hash", "tcp"])
def store(request: pytest.FixtureRequest) -> dist.Store:
    """The store of the agents, which lives on between attempts."""
    if request.param == "hash":
        return dist.HashStore()
    return dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)


@pytest.fixture
def pool() -> ThreadPoolExecutor:
    return ThreadPoolExecutor(4 * RANKS)


@pytest.mark.parametrize("late", range(RANKS))
def test_each_attempt_has_keys_of_its_own_whichever_rank_starts_last(
    store: dist.Store, pool: ThreadPoolExecutor, late: int
) -> None:
    names = ("first", "second", "third")
    for number, name in enumerate(names):
        joined = start(pool, store, *range(RANKS), delays={late: 0.1})
        assert agreed(joined, name)
        for future in joined.values():
            assert [future.result().check([earlier]) for earlier in names[:number]] == [False] * number


def test_a_rank_that_never_came_is_named_and_the_next_attempt_starts(
    store: dist.Store, pool: ThreadPoolExecutor
) -> None:
    for rank, future in start(pool, store, 0, 1, 3, seconds=0.5).items():
        with pytest.raises(RankFailure) as caught:
            future.result()
        absent = "rank 2 did not start within 0.5 s", 2
        message, culprit = absent if rank == 0 else (f"rank 0 did not start rank {rank}'s attempt", 0)
        assert message in str(caught.value) and caught.value.rank == culprit
    assert agreed(start(pool, store, *range(RANKS), delays={0: 0.1}), "key")


def test_ranks_that_wait_for_a_lost_rank_0_join_the_attempt_of_its_successor(
    store: dist.Store, pool: ThreadPoolExecutor
) -> None:
    with pytest.raises(RankFailure):
        start(pool, store, 0, seconds=0.01)[0].result()
    waiting = start(pool, store, 1, 2, 3)
    time.sleep(0.1)  # they have joined its attempt
    assert agreed({**start(pool, store, 0), **waiting}, "key")


def test_of_two_processes_of_one_rank_the_later_one_takes_part(
    store: dist.Store, pool: ThreadPoolExecutor
) -> None:
    others = start(pool, store, 0, 2)
    time.sleep(0.1)
    ending = start(pool, store, 1, seconds=1.0)[1]
    time.sleep(0.1)
    replaced = start(pool, store, 1)
    time.sleep(0.1)
    assert agreed({**others, **replaced, **start(pool, store, 3)}, "key")
    with pytest.raises(RankFailure, match="rank 0 did not start rank 1's attempt within 1 s"):
        ending.result()


def test_signals_of_nccl_do_not_outlive_an_attempt(store: dist.Store, pool: ThreadPoolExecutor) -> None:
    for key in ("exception_dump", "remote_error"):
        store.set(key, "3")
    assert agreed(start(pool, store, *range(RANKS)), "key")
    assert not any(store.check([key]) for key in ("exception_dump", "remote_error"))


def test_a_single_rank_waits_for_nobody(store: dist.Store) -> None:
    attempt_store(store, 0, 1, timeout_seconds=1).set("key", "here")
    assert not attempt_store(store, 0, 1, timeout_seconds=1).check(["key"])


def test_hundreds_of_ranks_agree(store: dist.Store) -> None:
    count = 200
    join = partial(attempt_store, timeout_seconds=60)
    with ThreadPoolExecutor(count) as threads:
        futures = [threads.submit(join, store.clone(), rank, count) for rank in range(count)]
    stores = [future.result() for future in futures]
    stores[0].set("key", "here")
    assert all(joined.check(["key"]) for joined in stores)


@pytest.mark.parametrize(
    ("environment", "expected"),
    [
        ({"TORCHELASTIC_USE_AGENT_STORE": "True", "TORCHELASTIC_MAX_RESTARTS": "2"}, True),
        ({"TORCHELASTIC_USE_AGENT_STORE": "False", "TORCHELASTIC_MAX_RESTARTS": "2"}, False),
        ({"TORCHELASTIC_USE_AGENT_STORE": "True", "TORCHELASTIC_MAX_RESTARTS": "0"}, False),
        ({}, False),
    ],
)
def test_only_torchrun_restarts_on_one_store(environment: dict[str, str], expected: bool) -> None:
    assert may_restart(environment) is expected
