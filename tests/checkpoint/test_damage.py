"""Whatever is wrong with a checkpoint is named: the file, and the tensor."""

import json
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from transformers import LlamaForCausalLM

from echelon.checkpoint.inspect import Findings, examine
from echelon.checkpoint.steps import commit_step, manifest_of

from .failures import flip_every_file
from .handmade import Handmade, columns, small_config, write_tensors

NORM = "model.layers.0.input_layernorm.weight"
HEAD = "lm_head.weight"


def examined(folder: Path) -> Findings:
    return examine(folder, progress=lambda _: None)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_sound_checkpoint_has_no_faults(tmp_path: Path, dtype: torch.dtype) -> None:
    made = Handmade.of(small_config(), dtype=dtype)
    assert examined(made.write(tmp_path / "a")) == Findings(errors=(), notes=())
    made.cut, made.ranks, made.max_bytes = columns, 3, 10**6
    assert examined(made.write(tmp_path / "b")) == Findings(errors=(), notes=())


def test_progress_is_told_of_every_file(tmp_path: Path) -> None:
    folder, read = Handmade.of(small_config()).write(tmp_path), []
    examine(folder, progress=read.append)
    sizes = (
        path.stat().st_size for path in folder.rglob("*") if path.is_file() and path.name != "manifest.json"
    )
    assert sorted(read) == sorted(sizes)


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
def test_a_flipped_bit_is_told_with_its_file_and_tensor(tmp_path: Path, positions: int) -> None:
    folder, count = Handmade.of(small_config()).write(tmp_path), 0
    for path, part in flip_every_file(folder, positions):
        first = examined(folder).errors[0]
        assert str(path) in first and (part in first or path.name == "manifest.json"), (part, first)
        count += 1
    assert count > 2 * len(FILES) and examined(folder) == Findings(errors=(), notes=())


@pytest.mark.parametrize("name", FILES)
def test_a_file_that_is_missing_or_cut_short_is_told(tmp_path: Path, name: str) -> None:
    path = Handmade.of(small_config()).write(tmp_path) / name
    path.write_bytes(path.read_bytes()[:-1])
    assert any(str(path) in fault for fault in examined(tmp_path / "step-00000100").errors)
    path.unlink()
    assert f"{path} is missing" in examined(tmp_path / "step-00000100").errors


def test_a_file_that_nobody_listed_is_noted(tmp_path: Path) -> None:
    folder = Handmade.of(small_config()).write(tmp_path)
    (folder / "notes.txt").write_text("mine")
    assert examined(folder) == Findings(errors=(), notes=("notes.txt is not in the manifest",))


# What follows has right hashes: a writer that was wrong.


def rewritten(tmp_path: Path, change: Callable[[Handmade], None]) -> tuple[Path, tuple[str, ...]]:
    made = Handmade.of(small_config())
    change(made)
    folder = made.write(tmp_path)
    return folder, examined(folder).errors


def resealed(folder: Path, tmp_path: Path, name: str, content: bytes) -> tuple[str, ...]:
    """The faults once a small file has other content and the manifest the hash of that."""
    from echelon.checkpoint.tensor_file import write_small

    records = manifest_of(folder)["files"] | {name: write_small(folder / name, content)}
    moved = folder.rename(tmp_path / ".step-00000100.writing")
    commit_step(moved, tmp_path, 100, records)
    return examined(folder).errors


def reindexed(tmp_path: Path, change: Callable[[dict], None]) -> tuple[str, ...]:
    folder = Handmade.of(small_config()).write(tmp_path)
    listing = json.loads((folder / "optimizer" / "index.json").read_text())
    change(listing["tensors"])
    return resealed(folder, tmp_path, "optimizer/index.json", json.dumps(listing).encode())


def test_a_box_that_is_nowhere_is_told(tmp_path: Path) -> None:
    faults = reindexed(tmp_path, lambda tensors: tensors[f"exp_avg/{HEAD}"]["boxes"].pop())
    assert [fault for fault in faults if f"exp_avg/{HEAD}: 320 of its 640 entries are nowhere" in fault]
    assert [fault for fault in faults if f"has exp_avg/{HEAD}@20,0, which is not in" in fault]
    assert len(faults) == 2


def test_a_box_that_is_listed_twice_is_told(tmp_path: Path) -> None:
    def twice(tensors: dict) -> None:
        tensors[f"exp_avg/{HEAD}"]["boxes"] += tensors[f"exp_avg/{HEAD}"]["boxes"][:1]

    (fault,) = reindexed(tmp_path, twice)
    assert fault.endswith(f"exp_avg/{HEAD}: [0:20, 0:16] and [0:20, 0:16] overlap")


def test_a_box_of_another_size_format_file_or_key_is_told(tmp_path: Path) -> None:
    def changed(tensors: dict) -> None:
        tensors[f"exp_avg/{NORM}"]["dtype"] = "int32"
        one, three = (
            tensors[f"exp_avg/model.layers.0.mlp.{each}_proj.weight"]["boxes"][0] for each in ("up", "down")
        )
        one["key"] = "nonesuch"
        three["file"] = "rank-00009.safetensors"
        tensors["exp_avg/model.norm.weight"]["boxes"][0]["size"] = [8, 1]

    faults = reindexed(tmp_path, changed)
    for told in (
        f"exp_avg/{NORM}@0 in rank-00000.safetensors is float32 (8,), and not int32 (8,)",
        "rank-00000.safetensors has no nonesuch",
        "rank-00009.safetensors is missing",
        "exp_avg/model.norm.weight has boxes of other dimensions than (16,)",
    ):
        assert [fault for fault in faults if told in fault], (told, faults)


def test_an_index_of_a_model_that_does_not_fit_is_told(tmp_path: Path) -> None:
    folder = Handmade.of(small_config()).write(tmp_path)
    index = folder / "model" / "model.safetensors.index.json"
    listing = json.loads(index.read_text())
    first = listing["weight_map"].pop("model.embed_tokens.weight")
    listing["weight_map"][HEAD] = first
    listing["weight_map"]["nonesuch"] = first
    listing["metadata"]["total_size"] += 2
    faults = resealed(folder, tmp_path, "model/model.safetensors.index.json", json.dumps(listing).encode())
    assert faults[:3] == (
        f"{index} lacks model.embed_tokens.weight, which is in {first}",
        f"{index} has {HEAD} in {first}, where it is not",
        f"{index} has nonesuch in {first}, where it is not",
    )
    assert f"{index} speaks of " in faults[3] and len(faults) == 4


def test_a_config_of_another_model_is_told(tmp_path: Path) -> None:
    def other(made: Handmade) -> None:
        made.config.vocab_size = 41

    folder, faults = rewritten(tmp_path, other)
    assert len(faults) == 2 and "lm_head.weight has shape (40, 16) in" in faults[0] + faults[1]
    assert f"and (41, 16) by {folder / 'model' / 'config.json'}" in faults[0]


def test_a_config_that_makes_no_model_is_noted(tmp_path: Path) -> None:
    made = Handmade.of(small_config())
    made.config.hidden_act = "nonesuch"
    findings = examined(made.write(tmp_path))
    assert findings.errors == () and len(findings.notes) == 1
    assert (
        "makes no LlamaForCausalLM without memory, so it is not compared: KeyError('nonesuch')"
        in findings.notes[0]
    )


def test_a_weight_that_the_config_asks_for_and_nobody_wrote_is_told(tmp_path: Path) -> None:
    def fewer(made: Handmade) -> None:
        del made.model[NORM]

    folder, faults = rewritten(tmp_path, fewer)
    assert faults[0] == f"{folder / 'model'} lacks {NORM}, which a LlamaForCausalLM has"
    assert faults[1] == f"{folder / 'optimizer' / 'groups.pt'} names {NORM}, which is not in the model"


def test_a_tied_weight_is_missing_under_one_name_without_harm(tmp_path: Path) -> None:
    def tie(made: Handmade) -> None:
        made.config.tie_word_embeddings = True
        made.groups["groups"][1]["parameters"].remove(HEAD)
        for names in (made.model, made.groups["scalars"]):
            del names[HEAD]
        for state in ("exp_avg", "master"):
            del made.states[f"{state}/{HEAD}"]

    assert rewritten(tmp_path, tie)[1] == ()


def test_a_parameter_in_two_groups_or_in_none_is_told(tmp_path: Path) -> None:
    def regroup(made: Handmade) -> None:
        first, second = (group["parameters"] for group in made.groups["groups"])
        first.remove("model.embed_tokens.weight")
        first.append(second[0])

    folder, faults = rewritten(tmp_path, regroup)
    path = folder / "optimizer" / "groups.pt"
    assert f"{path} has no group for model.embed_tokens.weight" in faults
    assert [
        fault
        for fault in faults
        if fault.startswith(f"{path} has model.") and fault.endswith("in several groups")
    ]
    assert len(faults) == 2


def place(**ranks: int) -> dict[str, int]:
    return dict.fromkeys(("pp", "dp", "sp", "tp"), 0) | ranks


def test_another_step_and_missing_random_states_are_told(tmp_path: Path) -> None:
    def change(made: Handmade) -> None:
        made.training["step"] = 99
        made.layout["tp"] = 2

    folder, faults = rewritten(tmp_path, change)
    training = folder / "training.pt"
    assert faults == (
        f"{training} is of step 99, and manifest.json of step 100",
        f"{folder / 'random' / 'rank-00001.pt'} is of the rank {place(dp=1)}, by {training} of {place(tp=1)}",
        f"{folder / 'random' / 'rank-00002.pt'} is missing: 4 ranks wrote the checkpoint",
        f"{folder / 'random' / 'rank-00003.pt'} is missing: 4 ranks wrote the checkpoint",
    )


def test_a_hugging_face_folder_is_examined_without_hashes(tmp_path: Path) -> None:
    LlamaForCausalLM(small_config()).save_pretrained(tmp_path, max_shard_size="8KB")
    findings = examine(tmp_path, progress=lambda _: None)
    assert findings == Findings(errors=(), notes=("without manifest.json there are no hashes to compare",))
    first = min(tmp_path.glob("*.safetensors"))
    write_tensors(first, {"nonesuch": torch.zeros(1)})
    assert f"{tmp_path / 'model.safetensors.index.json'} lacks nonesuch, which is in {first.name}" in (
        examine(tmp_path, progress=lambda _: None).errors
    )
