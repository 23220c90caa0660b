"""The layout of ranks as a value: coordinates, lines of ranks, and errors of sizes. No process group exists."""

from pathlib import Path
from typing import Any

import pytest

from echelon.cluster.layout import AXES, MeshLayout, layout_errors


def lines_of(rank: int, **sizes: int) -> dict[str, tuple[int, ...]]:
    layout = MeshLayout(**sizes, rank=rank)
    return {axis: layout.line(axis) for axis in (*AXES, "data", "wp")}


def test_tensor_ranks_are_neighbors_and_stages_are_farthest() -> None:
    expected = {"pp": (1, 5), "dp": (5, 7), "sp": (5,), "tp": (4, 5), "data": (5, 7), "wp": (5,)}
    assert lines_of(5, pp=2, dp=2, tp=2) == expected
    expected = {"pp": (6,), "dp": (2, 6), "sp": (4, 6), "tp": (6, 7), "data": (0, 2, 4, 6), "wp": (4, 6)}
    assert lines_of(6, dp=2, sp=2, tp=2, wp=2) == expected


def test_the_order_of_names_is_the_order_of_a_line() -> None:
    layout = MeshLayout.of(8, 6, pp=2, tp=2)
    assert layout.line("pp", "tp") == (2, 3, 6, 7) and layout.line("tp", "pp") == (2, 6, 3, 7)
    assert layout.coordinate("pp", "tp") == 2 and layout.coordinate("tp", "pp") == 1
    assert layout.size("pp", "tp") == 4 and layout.size("data") == 2


@pytest.mark.parametrize("axes", [("pp",), ("dp",), ("data",), ("wp",), ("pp", "sp", "tp"), AXES])
def test_lines_are_disjoint_and_contain_every_rank_at_its_coordinate(axes: tuple[str, ...]) -> None:
    layout = MeshLayout(pp=2, dp=2, sp=3, tp=4, wp=3)
    lines = layout.lines(*axes)
    assert sorted(rank for line in lines for rank in line) == list(range(48))
    for line in lines:
        for coordinate, rank in enumerate(line):
            there = layout.at(rank)
            assert (there.coordinate(*axes), there.line(*axes)) == (coordinate, line)
    assert {len(line) for line in lines} == {layout.size(*axes)}


def test_a_layout_is_a_value() -> None:
    layout = MeshLayout.of(4, 3, tp=2)
    assert layout == MeshLayout(dp=2, tp=2, rank=3) and len({layout, layout.at(3), layout.at(2)}) == 2


# Sizes, and their errors.
SIZES: tuple[tuple[Any, ...], ...] = (
    ({"world_size": 4, "tp": 2, "pp": 2},),
    ({"world_size": 8, "tp": 2, "pp": 2, "dp": 2},),
    ({"world_size": 8, "pp": 2, "sp": 2, "wp": 4},),
    ({"world_size": 8, "tp": 2, "zero": 2},),
    ({"world_size": 8, "tp": 2, "zero": 0},),
    (
        {"world_size": 4, "tp": 3},
        "tp_size=3 * pp_size=1 * sp_size=1 = 3 does not divide the world size 4: start a multiple of 3 processes, or "
        "use sizes whose product is one of [1, 2, 4]",
    ),
    (
        {"world_size": 4, "tp": 2, "dp": 4},
        "tp_size=2 * pp_size=1 * sp_size=1 * dp_size=4 = 8 is not the world size 4: start 8 processes, or use "
        "dp_size=2",
    ),
    (
        {"world_size": 4, "tp": 3, "dp": 1},
        "tp_size=3 * pp_size=1 * sp_size=1 * dp_size=1 = 3 is not the world size 4: start 3 processes, or use sizes "
        "whose product is 4",
    ),
    (
        {"world_size": 1, "tp": 2, "pp": 2},
        "tp_size=2 * pp_size=2 * sp_size=1 * dp_size=1 = 4 needs 4 processes, and this is the only one: start it by "
        "`torchrun --standalone --nproc_per_node 4 train.py --lr 1e-3`",
    ),
    (
        {"world_size": 8, "pp": 2, "wp": 3},
        "wp_size=3 does not divide the 4 ranks whose gradients are averaged (dp_size * sp_size): use one of "
        "wp_size=[1, 2, 4]",
    ),
    (
        {"world_size": 4, "zero": 3},
        "zero_size=3 must divide the 4 data-parallel ranks: use one of 1, 2, 4, or -1 for all of them",
    ),
    (
        {"world_size": 4, "tp": 2, "zero": -2, "wp": 2},
        "zero_size=-2 must divide the 2 data-parallel ranks: use one of 1, 2, or -1 for all of them",
        "wp_size=2 does not combine with tp_size=2: use tp_size=1, and sp_size with "
        "sequence_parallelism_mode='all_to_all' where activations are too large",
    ),
    (
        {"world_size": 4, "tp": 0, "pp": -1, "dp": 0},
        *(f"{name} must be at least 1" for name in ("pp_size=-1", "dp_size=0", "tp_size=0")),
    ),
)


@pytest.mark.parametrize("row", SIZES)
def test_errors_of_sizes_name_sizes_that_fit(
    row: tuple[Any, ...], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    (tmp_path / "train.py").touch()
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr("sys.argv", ["train.py", "--lr", "1e-3"])
    sizes, *expected = row
    assert layout_errors(**sizes) == expected
