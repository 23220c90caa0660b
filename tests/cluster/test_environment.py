"""Environment variables that launching sets, and those that it asks the user to set."""

import resource
import socket
import warnings

import pytest

from echelon.cluster import environment as module
from echelon.cluster.environment import CUDA_VARIABLES, LAUNCH_ORDER, file_advice, prepare_environment

OF_TWO_RANKS = {"WORLD_SIZE": "2", "LOCAL_WORLD_SIZE": "2", "RANK": "0", "LOCAL_RANK": "0"}
ON_TWO_NODES = OF_TWO_RANKS | {"LOCAL_WORLD_SIZE": "1"}


@pytest.fixture
def cuda(monkeypatch: pytest.MonkeyPatch) -> dict[str, bool]:
    """A build of torch for CUDA, with a driver of today, before CUDA has begun."""
    state = {"built": True, "begun": False, "orders": True}
    monkeypatch.setattr(module, "is_cuda_built", lambda: state["built"])
    monkeypatch.setattr(module, "cuda_has_begun", lambda: state["begun"])
    monkeypatch.setattr(module, "orders_launches", lambda: state["orders"])
    return state


def test_variables_of_cuda_are_set_where_the_user_has_not(cuda: dict[str, bool]) -> None:
    environment = dict(OF_TWO_RANKS)
    prepare_environment(environment)
    assert environment == OF_TWO_RANKS | CUDA_VARIABLES | {LAUNCH_ORDER: "1"}
    by_user = OF_TWO_RANKS | dict.fromkeys([*CUDA_VARIABLES, LAUNCH_ORDER], "of the user")
    environment = dict(by_user)
    prepare_environment(environment)
    assert environment == by_user


@pytest.mark.parametrize("state", [{"built": False}, {"orders": False}])
def test_nothing_is_set_that_would_not_help(cuda: dict[str, bool], state: dict[str, bool]) -> None:
    cuda |= state
    environment = dict(OF_TWO_RANKS)
    prepare_environment(environment)
    assert environment == OF_TWO_RANKS | (CUDA_VARIABLES if cuda["built"] else {})
    environment = {"WORLD_SIZE": "1"}
    prepare_environment(environment)
    assert environment == {"WORLD_SIZE": "1"}


def test_one_warning_says_what_comes_too_late_and_what_nodes_need(
    cuda: dict[str, bool], monkeypatch: pytest.MonkeyPatch
) -> None:
    cuda["begun"] = True
    monkeypatch.setattr(socket, "gethostname", lambda: "node-7")
    monkeypatch.setattr(socket, "gethostbyname", lambda name: "127.0.1.1")
    with pytest.warns(UserWarning) as caught:
        prepare_environment(ON_TWO_NODES | {"NCCL_SOCKET_IFNAME": "ib0"})
    assert [str(warning.message) for warning in caught] == [
        "before starting the processes: export CUDA_MODULE_LOADING=EAGER, since CUDA was initialized before; export "
        "CUDA_DEVICE_MAX_CONNECTIONS=32, since CUDA was initialized before; "
        "export GLOO_SOCKET_IFNAME=ib0, since the address of node-7 is 127.0.1.1 (docs/cuda.md)"
    ]
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        # The first rank of a node speaks.
        prepare_environment(ON_TWO_NODES | {"LOCAL_RANK": "1", "RANK": "1"})


@pytest.mark.parametrize(
    ("variables", "address"),
    [
        (ON_TWO_NODES, "10.0.0.7"),
        (ON_TWO_NODES | {"GLOO_SOCKET_IFNAME": "ib0"}, "127.0.0.1"),
        (OF_TWO_RANKS, ""),
    ],
)
def test_nodes_that_reach_each_other_are_not_warned(
    monkeypatch: pytest.MonkeyPatch, variables: dict[str, str], address: str
) -> None:
    monkeypatch.setattr(module, "is_cuda_built", lambda: False)
    monkeypatch.setattr(socket, "gethostbyname", lambda name: address)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        prepare_environment(dict(variables))


@pytest.mark.parametrize(
    ("limits", "world_size", "set_to", "advice"),
    [
        ((1024, 4096), 100, None, []),
        ((1024, 4096), 1000, 2254, []),
        ((1024, resource.RLIM_INFINITY), 4000, 8254, []),
        ((resource.RLIM_INFINITY, resource.RLIM_INFINITY), 4000, None, []),
        ((1024, 2048), 1000, 2048, ["ulimit -n 2254, for 1000 ranks and a limit of 2048"]),
    ],
)
def test_the_limit_of_open_files_rises_with_the_ranks(
    monkeypatch: pytest.MonkeyPatch,
    limits: tuple[int, int],
    world_size: int,
    set_to: int | None,
    advice: list[str],
) -> None:
    calls: list[tuple[int, int]] = []
    monkeypatch.setattr(resource, "getrlimit", lambda kind: limits)
    monkeypatch.setattr(resource, "setrlimit", lambda kind, both: calls.append(both))
    assert file_advice(world_size) == advice
    assert calls == ([] if set_to is None else [(set_to, limits[1])])
