"""`echelon checkpoint`: its output, exit status, and choice of the folder."""

import json
from pathlib import Path
from typing import Any

import pytest

from ..checkpoint.handmade import Handmade, columns, small_config
from .calls import call, cells, require_refused

HEAD = "lm_head.weight"


def listed(arguments: object) -> dict[str, Any]:
    status, output = call(f"checkpoint inspect --json {arguments}")
    assert status == 0, output
    return json.loads(output[output.index("{") :])


@pytest.fixture
def step(tmp_path: Path) -> Path:
    return Handmade.of(small_config()).write(tmp_path / "run")


def test_inspect_shows_all_that_is_in_a_checkpoint(step: Path) -> None:
    status, output = call(f"checkpoint inspect {step}")
    assert status == 0
    for reported in (
        "step",
        "100",
        "LlamaForCausalLM",
        '{"pp": 1, "dp": 2, "sp": 1, "tp": 1}',
        "AdamW",
        '3 parameters, {"lr": 0.001, "betas": [0.9, 0.95]}',
        '9 parameters, {"lr": 0.0001, "betas": [0.9, 0.95]}',
        '{"last_epoch": 100, "_last_lr": [0.001, 0.0001]}',
        '{"epoch": 1, "samples": 320, "seed": 7, "size": 1000}',
        '{"note": "by hand", "best": 0.25}',
        "pp 0, dp 0, sp 0, tp 0; pp 0, dp 1, sp 0, tp 0",
        "optimizer/rank-00001.safetensors",
        "model/model-00003-of-00003.safetensors",
    ):
        assert reported in output
    assert HEAD not in output


def test_inspect_counts_tensors_entries_and_bytes(step: Path) -> None:
    made = Handmade.of(small_config())
    entries = sum(tensor.numel() for tensor in made.model.values())
    summary = listed(step)
    assert [(row["name"], row["tensors"], row["entries"], row["bytes"]) for row in summary["parts"]] == [
        ("model", 12, entries, 2 * entries),
        ("exp_avg", 12, entries, 4 * entries),
        ("master", 12, entries, 4 * entries),
    ]
    assert summary["parts"][0]["dtypes"] == {"bfloat16": 2 * entries}
    assert (summary["step"], summary["layout"]["dp"], summary["scaler"], summary["skipped_steps"]) == (
        100,
        2,
        None,
        0,
    )
    sizes = {str(path.relative_to(step)): path.stat().st_size for path in step.rglob("*") if path.is_file()}
    assert {file["path"]: file["bytes"] for file in summary["files"]} == sizes
    assert "tensors" not in summary


def test_inspect_lists_tensors_with_their_files(step: Path) -> None:
    lines = listed(f"{step} --tensors *embed_tokens*")["tensors"]
    assert [line["name"] for line in lines] == [
        f"{state}model.embed_tokens.weight" for state in ("", "exp_avg/", "master/")
    ]
    assert lines[0]["files"] == ["model/model-00001-of-00003.safetensors"]
    assert lines[1] == {
        "name": "exp_avg/model.embed_tokens.weight",
        "shape": [40, 16],
        "dtype": "float32",
        "files": ["optimizer/rank-00000.safetensors", "optimizer/rank-00001.safetensors"],
    }
    assert len(listed(f"{step} --tensors")["tensors"]) == 3 * 12
    status, output = call(f"checkpoint inspect {step} --tensors {HEAD}")
    assert status == 0 and output.count(HEAD) == 2 and "[40, 16]" in output  # the title, and the line


def test_the_newest_complete_step_of_a_folder_is_taken_and_reported(step: Path, tmp_path: Path) -> None:
    made = Handmade.of(small_config())
    made.step, made.training["step"] = 107, 107
    newest = made.write(tmp_path / "run")
    (tmp_path / "run" / "step-00000200").mkdir()
    (tmp_path / "run" / ".step-00000300.writing").mkdir()
    status, output = call(f"checkpoint verify {tmp_path}/run")
    assert status == 0 and f"{newest} is sound" in output
    assert "the newest complete step is step-00000107" in output
    assert listed(tmp_path / "run")["step"] == 107


def test_diff_ignores_layouts_and_reports_differences(step: Path, tmp_path: Path) -> None:
    made = Handmade.of(small_config())
    made.cut, made.ranks, made.layout = columns, 3, {"pp": 1, "dp": 1, "sp": 1, "tp": 3}
    status, output = call(f"checkpoint diff {step} {made.write(tmp_path / 'same')}")
    assert status == 0 and "equal to the bit" in output and "random states are not compared" in output
    made.model[HEAD].fill_(2.0)
    made.training["data"]["samples"] = 400
    a = made.write(tmp_path / "a")
    made.model[HEAD][0, 0] = 1.75
    made.training["data"]["samples"] = 401
    b = made.write(tmp_path / "b")
    status, output = call(f"checkpoint diff {a} {b}")
    assert status == 1 and "2 differences" in output
    assert cells(output) == [
        ["model", HEAD, "values", "0.25", "0.125", "1 of 640"],
        ["training", "data.samples", "400 in A, 401 in B", "", "", ""],
    ]
    status, output = call(f"checkpoint diff {a}/model {b}/model --tolerance 0.2")
    assert status == 0 and "no entry differs by more than 0.2 of its tensor" in output


def test_verify_names_the_damaged_tensor(step: Path) -> None:
    status, output = call(f"checkpoint verify {step}")
    assert (status, f"{step} is sound" in output) == (0, True)
    path = step / "model" / "model-00001-of-00003.safetensors"
    content = bytearray(path.read_bytes())
    content[-1] ^= 128
    path.write_bytes(content)
    status, output = call(f"checkpoint verify {step}")
    assert status == 1 and f"{step} is damaged" in output and f"{path} is damaged: " in output
    status, output = call(f"checkpoint verify {step}/model")
    assert status == 0 and "there are no hashes to compare" in output


@pytest.mark.parametrize(
    "name", ["manifest.json", "training.pt", "model/config.json", "optimizer/index.json"]
)
@pytest.mark.parametrize("command", ["inspect", "diff", "verify"])
def test_a_file_that_cannot_be_read_is_reported_with_status_1(step: Path, name: str, command: str) -> None:
    (step / name).write_bytes(b"{")
    status, output = call(f"checkpoint {command} {step} {step if command == 'diff' else ''}")
    assert status == 1 and str(step / name) in output


@pytest.mark.parametrize(
    ("command", "instead"),
    [("reshard", "booster.save_checkpoint(..., size_per_shard=MIB)"), ("export", 'precision="fp32"')],
)
def test_a_removed_command_names_its_replacement(step: Path, command: str, instead: str) -> None:
    require_refused(
        f"checkpoint {command} {step} out --size-per-shard 1", "there is no such command any more", instead
    )


@pytest.mark.parametrize(
    "row",
    [
        ("inspect nonesuch", "nonesuch is not a folder"),
        ("inspect .", "is not a complete checkpoint (it has no manifest.json), contains none (step-…)"),
        ("inspect STEP *norm*", "give --tensors too"),
        ("diff nonesuch missing", "nonesuch is not a folder", "missing is not a folder"),
        ("diff STEP STEP --tolerance -1", "tolerance=-1.0 must be a number of at least 0"),
        ("diff STEP STEP --tolerance nan", "tolerance=nan must be"),
        ("verify .", "is not a complete checkpoint"),
    ],
)
def test_bad_arguments_are_refused_all_at_once_with_status_2(
    step: Path, monkeypatch: pytest.MonkeyPatch, tmp_path: Path, row: tuple[str, ...]
) -> None:
    monkeypatch.chdir(tmp_path)
    command, *words = row
    require_refused(f"checkpoint {command.replace('STEP', str(step))}", *words)
