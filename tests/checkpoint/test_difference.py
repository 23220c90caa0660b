"""Two checkpoints differ where they differ, whatever layouts wrote them."""

from collections.abc import Callable
from math import inf
from pathlib import Path

import pytest
import torch

from echelon.checkpoint import difference
from echelon.checkpoint.difference import Comparison, Difference, chunks_of
from echelon.checkpoint.inspect import open_folder

from .handmade import Handmade, columns, small_config

NORM = "model.layers.0.input_layernorm.weight"
HEAD = "lm_head.weight"


def found(a: Path, b: Path, tolerance: float = 0.0) -> list[Difference]:
    """All differences; progress tells of all bytes that are compared."""
    comparison = Comparison(a=open_folder(a), b=open_folder(b), tolerance=tolerance)
    read: list[int] = []
    differences = list(comparison.differences(read.append))
    assert sum(read) == comparison.total_bytes > 0
    return differences


def test_checkpoints_of_other_layouts_with_equal_tensors_are_equal(tmp_path: Path) -> None:
    made = Handmade.of(small_config())
    a = made.write(tmp_path / "a")
    made.cut, made.ranks, made.max_bytes = columns, 3, 10**6
    made.layout = {"pp": 1, "dp": 1, "sp": 1, "tp": 1}
    b = made.write(tmp_path / "b")
    assert found(a, b) == []
    assert Comparison(a=open_folder(a), b=open_folder(b)).notes == [
        "written by other ranks: their random states are not compared"
    ]


@pytest.fixture(scope="module")
def unchanged(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return Handmade.of(small_config()).write(tmp_path_factory.mktemp("unchanged"))


def change_weight(made: Handmade) -> None:
    made.model[HEAD][3, 5] += 1.0


def change_state(made: Handmade) -> None:
    made.states[f"exp_avg/{NORM}"][15] = torch.nan


def drop_weight(made: Handmade) -> None:
    del made.model[HEAD]


def add_state(made: Handmade) -> None:
    made.states[f"max_exp_avg_sq/{HEAD}"] = torch.zeros(2)


def reshape_state(made: Handmade) -> None:
    made.states[f"exp_avg/{NORM}"] = torch.zeros(17)


def recast_weight(made: Handmade) -> None:
    made.model[NORM] = made.model[NORM].half()


def change_scalar(made: Handmade) -> None:
    made.groups["scalars"][HEAD]["step"] = torch.tensor(4.0)


def change_option(made: Handmade) -> None:
    made.groups["groups"][1]["options"]["betas"] = (0.9, 0.999)


def move_parameter(made: Handmade) -> None:
    first, second = (group["parameters"] for group in made.groups["groups"])
    second.append(first.pop())


def change_class(made: Handmade) -> None:
    made.groups["optimizer"] = "SGD"


def change_rate(made: Handmade) -> None:
    made.training["scheduler"]["_last_lr"][1] = 2e-4


def change_position(made: Handmade) -> None:
    made.training["data"]["samples"] = 321


def change_user(made: Handmade) -> None:
    made.training["user"] = {"note": "by hand", "worst": 1}


def change_config(made: Handmade) -> None:
    made.config.rms_norm_eps = 0.5


@pytest.mark.parametrize(
    ("change", "told"),
    [
        (change_weight, [("model", HEAD, "values")]),
        (change_state, [("optimizer", f"exp_avg/{NORM}", "values")]),
        (drop_weight, [("model", HEAD, "only in A")]),
        (add_state, [("optimizer", f"max_exp_avg_sq/{HEAD}", "only in B")]),
        (reshape_state, [("optimizer", f"exp_avg/{NORM}", "shape [16] in A, [17] in B")]),
        (recast_weight, [("model", NORM, "bfloat16 in A, float16 in B")]),
        (change_scalar, [("scalars", f"{HEAD}.step", "3.0 in A, 4.0 in B")]),
        (change_option, [("groups", "groups.1.options.betas.1", "0.95 in A, 0.999 in B")]),
        (change_class, [("groups", "optimizer", "'AdamW' in A, 'SGD' in B")]),
        (change_rate, [("training", "scheduler._last_lr.1", "0.0001 in A, 0.0002 in B")]),
        (change_position, [("training", "data.samples", "320 in A, 321 in B")]),
        (change_user, [("training", "user.best", "only in A"), ("training", "user.worst", "only in B")]),
        (change_config, [("config", "rms_norm_eps", "1e-06 in A, 0.5 in B")]),
    ],
)
def test_what_was_changed_is_told_and_nothing_else(
    unchanged: Path, tmp_path: Path, change: Callable[[Handmade], None], told: list[tuple[str, str, str]]
) -> None:
    made = Handmade.of(small_config())
    change(made)
    differences = found(unchanged, made.write(tmp_path))
    assert [(each.part, each.name, each.what) for each in differences] == told


def test_a_parameter_in_another_group_is_told(unchanged: Path, tmp_path: Path) -> None:
    made = Handmade.of(small_config())
    move_parameter(made)
    names = [(each.part, each.name) for each in found(unchanged, made.write(tmp_path))]
    assert names == [("groups", "groups.0.parameters"), ("groups", "groups.1.parameters")]


def test_distances_are_those_of_the_whole_tensor(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(difference, "chunks_of", lambda shape: chunks_of(shape, 7))
    made = Handmade.of(small_config())
    made.model[HEAD].fill_(2.0)
    a = made.write(tmp_path / "a")
    made.model[HEAD][3, 5] = 1.0
    made.model[HEAD][39, 15] = 1.5
    made.states[f"exp_avg/{NORM}"][15] = torch.nan
    weight, state = (each.distance for each in found(a, made.write(tmp_path / "b")))
    assert weight is not None and state is not None
    assert (weight.absolute, weight.relative, weight.differing, weight.entries) == (1.0, 0.5, 2, 640)
    assert (state.absolute, state.differing, state.entries) == (inf, 1, 16)


def test_a_tolerance_passes_over_what_is_small_beside_the_tensor(tmp_path: Path) -> None:
    made = Handmade.of(small_config())
    made.model[HEAD].fill_(2.0)
    a = made.write(tmp_path / "a")
    made.model[HEAD][3, 5] = 1.75
    made.training["scheduler"]["_last_lr"][1] *= 1.1
    b = made.write(tmp_path / "b")
    assert len(found(a, b)) == 2
    assert [each.name for each in found(a, b, 0.11)] == [HEAD]
    assert found(a, b, 0.13) == []


def test_random_states_of_equal_ranks_are_compared(tmp_path: Path) -> None:
    made = Handmade.of(small_config())
    a, b = made.write(tmp_path / "a"), made.write(tmp_path / "b")
    state = torch.load(b / "random" / "rank-00001.pt", weights_only=True)
    state["cpu"][100] ^= 1
    torch.save(state, b / "random" / "rank-00001.pt")
    (only,) = found(a, b)
    assert (only.part, only.name) == ("random", "pp 0, dp 1, sp 0, tp 0.cpu")


def test_of_hugging_face_folders_models_alone_are_compared(tmp_path: Path) -> None:
    made = Handmade.of(small_config())
    a = made.write(tmp_path / "a")
    change_weight(made)
    change_position(made)
    b = made.write(tmp_path / "b")
    for left, right in ((a, b / "model"), (a / "model", b), (a / "model", b / "model")):
        assert [each.name for each in found(left, right)] == [HEAD]
        notes = Comparison(a=open_folder(left), b=open_folder(right)).notes
        assert notes == ["a Hugging Face folder has no optimizer: models alone are compared"]


def test_a_checkpoint_without_optimizer_differs_from_one_with_it(tmp_path: Path) -> None:
    made = Handmade.of(small_config())
    a, b = made.write(tmp_path / "a"), made.write(tmp_path / "b")
    for path in (b / "optimizer").iterdir():
        path.unlink()
    (b / "optimizer").rmdir()
    assert [(each.part, each.what) for each in found(a, b)] == [("optimizer", "only in A")]
    assert [(each.part, each.what) for each in found(b, a)] == [("optimizer", "only in B")]
