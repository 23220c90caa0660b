"""Files are dealt out evenly, and every box comes from one rank that holds it."""

import pytest
import torch

from echelon.checkpoint.box import Box
from echelon.checkpoint.exchange import FilePlan, Offer, Source, entries_of, plan_files, split_into_files
from echelon.checkpoint.tensor_file import Entry


def entry(name: str, rows: int) -> Entry:
    return Entry(name, (rows, 2), torch.float32)


def holding(rows: int, start: int, stop: int) -> Offer:
    return Offer((rows, 2), torch.float32, (Box((start, 0), (stop - start, 2)),))


def test_files_are_filled_in_order_and_a_large_tensor_has_its_own() -> None:
    entries = [entry("a", 1), entry("b", 2), entry("large", 9), entry("c", 1), entry("d", 1)]
    files = split_into_files(entries, 3 * 8)
    assert [[each.name for each in file] for file in files] == [["a", "b"], ["large"], ["c", "d"]]


def test_every_rank_writes_where_all_hold_all() -> None:
    names = [f"w{number}" for number in range(8)]
    offers = [{name: holding(4, 0, 4) for name in names}] * 4
    files = {name: [entry(name, 4)] for name in names}
    plans = plan_files(files, offers)
    assert sorted(plan.writer for plan in plans) == [0, 0, 1, 1, 2, 2, 3, 3]
    assert all(source.rank == plan.writer for plan in plans for source in sources_of(plan))


def test_a_box_is_sent_once_and_by_whoever_sent_least() -> None:
    # Two tensor ranks with two replicas each: ranks 0 and 2 hold the upper half, 1 and 3 the lower.
    offers = [
        {name: holding(4, half * 2, half * 2 + 2) for name in ("a", "b", "c", "d")} for half in (0, 1, 0, 1)
    ]
    plans = plan_files({name: [entry(name, 4)] for name in "abcd"}, offers)
    assert [plan.writer for plan in plans] == [0, 1, 2, 3]
    for plan in plans:
        upper, lower = sources_of(plan)
        assert (upper.box, lower.box) == (Box((0, 0), (2, 2)), Box((2, 0), (2, 2)))
        assert plan.writer in (upper.rank, lower.rank), "a writer sends itself nothing"
    sent = [source.rank for plan in plans for source in sources_of(plan) if source.rank != plan.writer]
    assert sorted(sent) == [0, 1, 2, 3]


def test_a_tensor_that_nobody_holds_whole_is_refused() -> None:
    with pytest.raises(AssertionError, match="a has 8 entries, and the ranks have 6"):
        plan_files({"file": [entry("a", 4)]}, [{"a": holding(4, 0, 3)}])


def test_tensors_come_in_the_order_of_the_model() -> None:
    offers = [{"late": holding(1, 0, 1)}, {"first": holding(1, 0, 1), "other": holding(1, 0, 1)}]
    assert [each.name for each in entries_of(offers, ["first", "late"])] == ["first", "late", "other"]


def sources_of(plan: FilePlan) -> tuple[Source, ...]:
    (written,) = plan.tensors
    return written.sources
