"""`inspect`, `diff` and `verify` of step folders: errors and differences are named with file and tensor."""

import json
from collections.abc import Callable
from math import inf, nan
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import LlamaForCausalLM

from echelon.checkpoint import difference
from echelon.checkpoint.difference import Comparison, Difference, Distance, chunks_of, distance_between
from echelon.checkpoint.inspection import Findings, examine, open_folder
from echelon.checkpoint.step_folders import commit_step, manifest_of
from echelon.checkpoint.tensor_file import write_small
from echelon.cluster.box import Box

from .failures import flip_every_file
from .handmade import Handmade, columns, small_config, write_tensors

NORM = "model.layers.0.input_layernorm.weight"
EMBEDDING, HEAD = "model.embed_tokens.weight", "lm_head.weight"
Change = Callable[[Handmade], Any]


def examined(folder: Path) -> Findings:
    return examine(folder, progress=lambda _: None)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_sound_checkpoint_has_no_errors_and_its_layout_makes_no_difference(
    tmp_path: Path, dtype: torch.dtype
) -> None:
    made, read = Handmade.of(small_config(), dtype=dtype), []
    a = made.write(tmp_path / "a")
    assert examine(a, progress=read.append) == Findings(errors=(), notes=())
    files = [path for path in a.rglob("*") if path.is_file() and path.name != "manifest.json"]
    assert sorted(read) == sorted(path.stat().st_size for path in files)
    made.cut, made.ranks, made.max_bytes = columns, 3, 10**6
    made.layout = {"pp": 1, "dp": 1, "sp": 1, "tp": 1}
    b = made.write(tmp_path / "b")
    assert examined(b) == Findings(errors=(), notes=())
    assert differing(a, b) == []
    notes = ["written by other ranks: their random states are not compared"]
    assert Comparison(open_folder(a), open_folder(b)).notes == notes


FILES = (
    "model/config.json",
    "model/model.safetensors.index.json",
    "model/model-00002-of-00003.safetensors",
    "optimizer/index.json",
    "optimizer/groups.pt",
    "optimizer/rank-00001.safetensors",
    "training.pt",
    "random/rank-00001.pt",
)


@pytest.mark.parametrize("positions", [2, pytest.param(100, marks=pytest.mark.slow)])
def test_a_flipped_bit_is_reported_with_its_file_and_tensor(tmp_path: Path, positions: int) -> None:
    folder, count = Handmade.of(small_config()).write(tmp_path), 0
    for path, place in flip_every_file(folder, positions):
        first = examined(folder).errors[0]
        assert str(path) in first and (place in first or path.name == "manifest.json"), (place, first)
        count += 1
    assert count > 2 * len(FILES) and examined(folder) == Findings(errors=(), notes=())


def test_a_file_that_is_missing_cut_short_or_unknown_is_reported(tmp_path: Path) -> None:
    folder = Handmade.of(small_config()).write(tmp_path)
    (folder / "notes.txt").write_text("mine")
    assert examined(folder) == Findings(errors=(), notes=("notes.txt is not in the manifest",))
    for name in FILES:
        path, content = folder / name, (folder / name).read_bytes()
        path.write_bytes(content[:-1])
        assert any(str(path) in error for error in examined(folder).errors)
        path.unlink()
        assert f"{path} is missing" in examined(folder).errors
        path.write_bytes(content)


# The following errors have correct hashes: they are errors of the writer.


def of_index(change: Callable[[Any], Any], name: str = "optimizer/index.json") -> Callable[[Path], Path]:
    """Make a step with a changed JSON file, and the hash of the change in the manifest."""

    def written(directory: Path) -> Path:
        folder = Handmade.of(small_config()).write(directory)
        listing = json.loads((folder / name).read_text())
        change(listing)
        content = json.dumps(listing).encode()
        records = manifest_of(folder)["files"] | {name: write_small(folder / name, content)}
        return commit_step(folder.rename(directory / ".step-00000100.writing"), directory, 100, records)

    return written


def of_change(change: Change) -> Callable[[Path], Path]:
    def written(directory: Path) -> Path:
        made = Handmade.of(small_config())
        change(made)
        return made.write(directory)

    return written


def boxes(listing: Any, name: str = f"exp_avg/{HEAD}") -> list[dict[str, Any]]:
    return listing["tensors"][name]["boxes"]


def misplace(listing: Any) -> None:
    places = listing["weight_map"]
    places[HEAD] = places["nonesuch"] = places.pop(EMBEDDING)


def regroup(made: Handmade) -> None:
    first, second = (group["parameters"] for group in made.groups["groups"])
    first.remove(EMBEDDING)
    first.append(second[0])


def of_other_ranks(made: Handmade) -> None:
    made.training["step"] = 99
    made.layout["tp"] = 2


def place(**ranks: int) -> dict[str, int]:
    return dict.fromkeys(("pp", "dp", "sp", "tp"), 0) | ranks


def tie(made: Handmade) -> None:
    """Store a tied weight under one of its names only, which is not an error."""
    made.config.tie_word_embeddings = True
    made.groups["groups"][1]["parameters"].remove(HEAD)
    for names in (made.model, made.groups["scalars"]):
        del names[HEAD]
    for state in ("exp_avg", "master"):
        del made.states[f"{state}/{HEAD}"]


# The writer of a step, and words of its errors, one per error.
# fmt: off
WRONG: dict[str, tuple[Any, ...]] = {
    "a box is nowhere": (of_index(lambda listing: boxes(listing).pop()),
        f"index.json: exp_avg/{HEAD}: 320 of its 640 entries are missing"),
    "a box is listed twice": (of_index(lambda listing: boxes(listing).append(boxes(listing)[0])),
        f"exp_avg/{HEAD}: [0:20, 0:16] and [0:20, 0:16] overlap"),
    "a box has another key": (of_index(lambda listing: boxes(listing)[0].update(key="none")),
        "rank-00000.safetensors has no none that is float32 (20, 16)"),
    "a box is in another file": (of_index(lambda listing: boxes(listing)[0].update(file="rank-00009.safetensors")),
        "rank-00009.safetensors"),
    "a tensor has another format": (
        of_index(lambda listing: listing["tensors"][f"exp_avg/{NORM}"].update(dtype="int32")),
        *(f"has no exp_avg/{NORM}@{at} that is int32 (8,)" for at in (0, 8))),
    "a box has other dimensions": (of_index(lambda listing: boxes(listing, f"exp_avg/{NORM}")[0].update(size=[8, 1])),
        f"exp_avg/{NORM} has boxes of other dimensions than (16,)"),
    "the index of the model names other files": (of_index(misplace, "model/model.safetensors.index.json"),
        f"has {HEAD} in model-00001-of-00003.safetensors, and it is in model-00003-of-00003.safetensors",
        f"has {EMBEDDING} in no file, and it is in model-00001-of-00003.safetensors",
        "has nonesuch in model-00001-of-00003.safetensors, and it is in no file"),
    "the config is of another model": (of_change(lambda made: setattr(made.config, "vocab_size", 41)),
        *(f"{name} has shape (40, 16) in the file and (41, 16) in" for name in (EMBEDDING, HEAD))),
    "a weight is missing": (of_change(lambda made: made.model.pop(NORM)),
        f"does not fit its config.json: {NORM} is missing", f"names {NORM}, which is not in the model"),
    "a parameter is in two groups, another in none": (of_change(regroup), f"groups.pt has no group for {EMBEDDING}",
        "in several groups"),
    "step and ranks are others": (of_change(of_other_ranks), "training.pt is of step 99, and manifest.json of step 100",
        f"rank-00001.pt is of the rank {place(dp=1)}, by ",
        *(f"rank-0000{rank}.pt is missing: 4 ranks wrote the checkpoint" for rank in (2, 3))),
    "nothing but a tied name": (of_change(tie),),
}
# fmt: on


@pytest.mark.parametrize("name", WRONG)
def test_files_that_do_not_fit_together_are_reported(tmp_path: Path, name: str) -> None:
    write, *expected = WRONG[name]
    errors = examined(write(tmp_path)).errors
    assert len(errors) == len(expected), errors
    for words in expected:
        assert len([error for error in errors if words in error]) == 1, (words, errors)


def test_a_config_that_makes_no_model_is_noted(tmp_path: Path) -> None:
    findings = examined(of_change(lambda made: setattr(made.config, "hidden_act", "nonesuch"))(tmp_path))
    (note,) = findings.notes
    assert "cannot build a LlamaForCausalLM on the meta device, so it is not compared" in note
    assert findings.errors == ()


def test_a_hugging_face_folder_is_examined_without_hashes(tmp_path: Path) -> None:
    LlamaForCausalLM(small_config()).save_pretrained(tmp_path, max_shard_size="8KB")
    assert examined(tmp_path) == Findings((), ("without manifest.json there are no hashes to compare",))
    first = min(tmp_path.glob("*.safetensors"))
    write_tensors(first, {"nonesuch": torch.zeros(1)})
    assert f"nonesuch in no file, and it is in {first.name}" in "\n".join(examined(tmp_path).errors)


def differing(a: Path, b: Path, tolerance: float = 0.0) -> list[Difference]:
    """Return all differences, and check that progress gets all compared bytes."""
    comparison = Comparison(open_folder(a), open_folder(b), tolerance)
    read: list[int] = []
    differences = list(comparison.differences(read.append))
    assert sum(read) == comparison.total_bytes > 0
    return differences


def move_parameter(made: Handmade) -> None:
    first, second = (group["parameters"] for group in made.groups["groups"])
    second.append(first.pop())


def assign(*path: Any, to: Any) -> Change:
    """Set the value at a path of attributes and keys."""

    def change(made: Handmade) -> None:
        place: Any = getattr(made, path[0])
        for key in path[1:-1]:
            place = place[key]
        if isinstance(place, dict | list | torch.Tensor):
            place[path[-1]] = to
        else:
            setattr(place, path[-1], to)

    return change


@pytest.fixture(scope="module")
def unchanged(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return Handmade.of(small_config()).write(tmp_path_factory.mktemp("unchanged"))


STATE = f"exp_avg/{NORM}"
# A change of a checkpoint, and its differences from the unchanged one: part, name, and the difference.
# fmt: off
CHANGED: tuple[tuple[Any, ...], ...] = (
    (lambda made: made.model[HEAD][3].add_(1), ("model", HEAD, "values")),
    (assign("states", STATE, 15, to=nan), ("optimizer", STATE, "values")),
    (lambda made: made.model.pop(HEAD), ("model", HEAD, "only in A")),
    (assign("states", f"new/{HEAD}", to=torch.zeros(2)), ("optimizer", f"new/{HEAD}", "only in B")),
    (assign("states", STATE, to=torch.zeros(17)), ("optimizer", STATE, "shape [16] in A, [17] in B")),
    (lambda made: made.model.update({NORM: made.model[NORM].half()}), ("model", NORM, "bfloat16 in A, float16 in B")),
    (assign("groups", "scalars", HEAD, "step", to=torch.tensor(4.0)),
        ("scalars", f"{HEAD}.step", "3.0 in A, 4.0 in B")),
    (assign("groups", "groups", 1, "options", "betas", to=(0.9, 0.999)),
        ("groups", "groups.1.options.betas.1", "0.95 in A, 0.999 in B")),
    (assign("groups", "optimizer", to="SGD"), ("groups", "optimizer", "'AdamW' in A, 'SGD' in B")),
    (assign("training", "scheduler", "_last_lr", 1, to=2e-4),
        ("training", "scheduler._last_lr.1", "0.0001 in A, 0.0002 in B")),
    (assign("training", "data", "samples", to=321), ("training", "data.samples", "320 in A, 321 in B")),
    (assign("training", "user", to={"note": "by hand", "worst": 1}), ("training", "user.best", "only in A"),
        ("training", "user.worst", "only in B")),
    (assign("config", "rms_norm_eps", to=0.5), ("config", "rms_norm_eps", "1e-06 in A, 0.5 in B")),
    (move_parameter, ("groups", "groups.0.parameters.2", "only in A"),
        ("groups", "groups.1.parameters.9", "only in B")),
    (lambda made: setattr(made, "has_optimizer", False), ("optimizer", "optimizer", "only in A")),
)
# fmt: on


@pytest.mark.parametrize("row", CHANGED)
def test_what_was_changed_is_reported_and_nothing_else(
    unchanged: Path, tmp_path: Path, row: tuple[Any, ...]
) -> None:
    change, *expected = row
    changed = of_change(change)(tmp_path)
    assert [difference[:3] for difference in differing(unchanged, changed)] == expected
    if expected[0][0] == "optimizer" == expected[0][1]:
        assert [difference.what for difference in differing(changed, unchanged)] == ["only in B"]


def test_distances_are_those_of_the_unsharded_tensor(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(difference, "chunks_of", lambda shape: chunks_of(shape, 7))
    made = Handmade.of(small_config())
    made.model[HEAD].fill_(2.0)
    a = made.write(tmp_path / "a")
    made.model[HEAD][3, 5] = 1.0
    made.model[HEAD][39, 15] = 1.5
    made.states[f"exp_avg/{NORM}"][15] = torch.nan
    weight, state = (difference.distance for difference in differing(a, made.write(tmp_path / "b")))
    assert weight is not None and state is not None
    assert (weight.absolute, weight.relative, weight.differing, weight.entries) == (1.0, 0.5, 2, 640)
    assert (state.absolute, state.differing, state.entries) == (inf, 1, 16)


def test_a_tolerance_ignores_differences_small_beside_the_tensor(tmp_path: Path) -> None:
    made = Handmade.of(small_config())
    made.model[HEAD].fill_(2.0)
    a = made.write(tmp_path / "a")
    made.model[HEAD][3, 5] = 1.75
    made.training["scheduler"]["_last_lr"][1] *= 1.1
    b = made.write(tmp_path / "b")
    assert len(differing(a, b)) == 2
    assert [difference.name for difference in differing(a, b, 0.11)] == [HEAD]
    assert differing(a, b, 0.13) == []
    for left, right in ((a, b / "model"), (a / "model", b), (a / "model", b / "model")):
        assert [difference.name for difference in differing(left, right)] == [HEAD]
        notes = Comparison(open_folder(left), open_folder(right)).notes
        assert notes == ["a Hugging Face folder has no optimizer: only models are compared"]


def test_random_states_of_equal_ranks_are_compared(unchanged: Path, tmp_path: Path) -> None:
    b = Handmade.of(small_config()).write(tmp_path)
    state = torch.load(b / "random" / "rank-00001.pt", weights_only=True)
    state["cpu"][100] ^= 1
    torch.save(state, b / "random" / "rank-00001.pt")
    ((kind, name, *_),) = differing(unchanged, b)
    assert (kind, name) == ("random", "pp 0, dp 1, sp 0, tp 0.cpu")


def test_equal_tensors_are_at_no_distance_whatever_they_hold() -> None:
    for dtype in (torch.float32, torch.bfloat16, torch.float16, torch.float64):
        tensor = torch.tensor([0.0, -0.0, 1.5, nan, inf, -inf], dtype=dtype)
        distance = distance_between(tensor, tensor.clone())
        numbers = (distance.absolute, distance.relative, distance.differing, distance.entries)
        assert numbers == (0.0, 0.0, 0, 6)
    for dtype in (torch.int64, torch.uint8, torch.bool):
        assert distance_between(torch.ones(3, dtype=dtype), torch.ones(3, dtype=dtype)).differing == 0


NEAR = 1 + 2**-10


@pytest.mark.parametrize(
    ("a", "b", "expected"),  # absolute, relative, magnitude, differing
    [
        (torch.tensor([1.0, 2, 4, 0]), torch.tensor([1.0, 2.5, 3, 0]), (1.0, 0.25, 4.0, 2)),
        (torch.tensor([1, 0]).bfloat16(), torch.tensor([1, -0.0]).bfloat16(), (0.0, 0.0, 1.0, 1)),
        (torch.tensor([2**60]), torch.tensor([2**60 + 1]), (0.0, 0.0, 2.0**60, 1)),  # the same in float64
        (torch.tensor([1.0, NEAR]), torch.ones(2).bfloat16(), (NEAR - 1, (NEAR - 1) / NEAR, NEAR, 1)),
        *(
            (torch.tensor([left, 1.0]), torch.tensor([right, 1.0]), (inf, inf, 1.0, 1))
            for left, right in ((nan, 1.0), (1.0, nan), (inf, 1.0), (inf, -inf), (nan, inf), (0.0, inf))
        ),
    ],
)
def test_the_largest_differences_and_the_differing_entries_are_found(
    a: torch.Tensor, b: torch.Tensor, expected: tuple[float, float, float, int]
) -> None:
    distance = distance_between(a, b)
    assert (distance.absolute, distance.relative, distance.magnitude, distance.differing) == expected
    assert distance.exceeds(0.0) and distance.exceeds(1e6) == (distance.absolute == inf)


def test_chunks_cover_a_tensor_in_order_and_join_to_its_distance() -> None:
    a, b = torch.randn(3, 5, 7), torch.randn(3, 5, 7)
    b[0] = a[0]
    parts = [box.within(Box.full(a.shape)) for box in chunks_of(a.shape, 16)]
    assert torch.equal(torch.cat([a[chunk].reshape(-1) for chunk in parts]), a.reshape(-1))
    joined = Distance()
    for chunk in parts:
        assert a[chunk].numel() <= 16
        joined = joined.joined(distance_between(a[chunk], b[chunk]))
    assert joined == distance_between(a, b)
    assert list(chunks_of((), 16)) == [Box((), ())] and list(chunks_of((0, 3), 16)) == []
