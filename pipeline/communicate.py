"""Adding sends and receives to a schedule of computations. Whether a schedule can run is validate.py."""

from collections.abc import Mapping

from .action import TRAVELS, Action, Schedule, inputs, stage_rank


def with_communication(compute: Schedule, num_stages: int) -> Schedule:
    """Add to each rank's computations the sends of their results and the receives of their inputs.

    [Note: an order that cannot deadlock]
    The computations of all ranks are laid out in one common order in which each comes after what it needs.
    Right after a computation stand its send and the matching receive, side by side; each rank's list is its
    part of that common order. So both ends of every pair have their transfers in the same order, as NCCL
    needs, and even if every send and receive blocked until its peer arrived, the earliest item of the common
    order that is not done could always go on. The order goes round the ranks, one computation at a time,
    which is close to the order in time: a receive stands about where its tensor is ready, and is posted
    before the computations that run while it arrives.

    Args:
        compute: forwards and backwards of every rank, in order. Neighbouring stages on one rank exchange
            nothing.
        num_stages: stages of the whole pipeline.

    Raises:
        ValueError: computations wait for each other in a circle, or for one that nobody does.
    """
    num_ranks = len(compute)
    ordered: Schedule = [[] for _ in compute]
    position = [0] * num_ranks
    done: set[Action] = set()
    left = sum(map(len, compute))
    while left:
        before = left
        for rank, actions in enumerate(compute):
            if position[rank] == len(actions) or not done.issuperset(
                inputs(actions[position[rank]], num_stages)
            ):
                continue
            action = actions[position[rank]]
            position[rank] += 1
            left -= 1
            done.add(action)
            ordered[rank].append(action)
            _exchange(action, rank, ordered, num_stages)
        if left == before:
            heads = {rank: compute[rank][at] for rank, at in enumerate(position) if at < len(compute[rank])}
            raise ValueError(f"the schedule deadlocks: {_explain(heads, compute, done, num_stages)}")
    return ordered


def _exchange(action: Action, rank: int, ordered: Schedule, num_stages: int) -> None:
    """Append the send and the receive of a result, where another rank needs it."""
    travel = TRAVELS[action.op]
    target = action.stage + travel.step
    target_rank = stage_rank(target, len(ordered))
    if 0 <= target < num_stages and target_rank != rank:
        ordered[rank].append(action._replace(op=travel.send))
        ordered[target_rank].append(Action(travel.receive, target, action.microbatch))


def _explain(heads: Mapping[int, Action], compute: Schedule, done: set[Action], num_stages: int) -> str:
    holders = {action: rank for rank, actions in enumerate(compute) for action in actions}
    parts = []
    for rank, head in heads.items():
        missing = [need for need in inputs(head, num_stages) if need not in done]
        waits = [
            f"{need} (later on rank {holders[need]})" if need in holders else f"{need} (on no rank)"
            for need in missing
        ]
        parts.append(f"rank {rank} stands at {head}, which needs {' and '.join(waits)}")
    return "; ".join(parts)
