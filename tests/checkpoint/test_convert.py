"""Checkpoints written again are the same, or what was asked for; complete, or not there."""

import json
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from torch import Tensor
from transformers import AutoModelForCausalLM, LlamaForCausalLM

from echelon.checkpoint import convert
from echelon.checkpoint.box import Box
from echelon.checkpoint.convert import Export, Resharding
from echelon.checkpoint.damage import Findings, examine_checkpoint, examine_pretrained
from echelon.checkpoint.difference import Comparison
from echelon.checkpoint.opened import open_folder
from echelon.checkpoint.stored import Stored

from .handmade import Handmade, columns, small_config

HEAD = "lm_head.weight"
MASTER = f"master/{HEAD}"


def written(conversion: Resharding | Export) -> Path:
    """Where it is; progress tells of all bytes."""
    told: list[int] = []
    conversion.write(told.append)
    assert sum(told) == conversion.total_bytes > 0
    return conversion.out


def resharded(folder: Path, out: Path, *, max_bytes: int = 10**6, files: int = 1, dtype=None) -> Path:
    opened = open_folder(folder)
    return written(
        Resharding(opened=opened, out=out, max_bytes=max_bytes, optimizer_files=files, dtype=dtype)
    )


def exported(folder: Path, out: Path, *, max_bytes: int = 10**6, dtype=None, masters: bool = False) -> Path:
    opened = open_folder(folder)
    return written(Export(opened=opened, out=out, max_bytes=max_bytes, dtype=dtype, masters=masters))


def whole(stored: Stored, name: str) -> Tensor:
    return stored.read(name, Box.whole(stored.shape(name)))


def sound(folder: Path) -> bool:
    return examine_checkpoint(folder, progress=lambda _: None) == Findings(faults=(), notes=())


@pytest.mark.parametrize(("max_bytes", "files"), [(10**6, 1), (3000, 3), (1, 50)])
def test_a_checkpoint_in_other_files_is_the_same(tmp_path: Path, max_bytes: int, files: int) -> None:
    made = Handmade.of(small_config())
    made.cut, made.ranks = columns, 3
    folder = made.write(tmp_path)
    out = resharded(folder, tmp_path / "out", max_bytes=max_bytes, files=files)
    assert sound(out)
    assert list(Comparison(a=open_folder(folder), b=open_folder(out)).differences(lambda _: None)) == []
    weights = list((out / "model").glob("*.safetensors"))
    assert len(weights) == {10**6: 1, 3000: 3, 1: len(made.model)}[max_bytes]
    assert len(list((out / "optimizer").glob("*.safetensors"))) == min(files, len(made.states))
    for name in ("training.pt", "random/rank-00001.pt", "optimizer/groups.pt", "model/config.json"):
        assert (out / name).read_bytes() == (folder / name).read_bytes()
    assert open_folder(out).manifest["step"] == 100
    assert {path.name for path in tmp_path.iterdir()} == {"step-00000100", "out"}


def test_a_checkpoint_without_optimizer_is_written_without(tmp_path: Path) -> None:
    made = Handmade.of(small_config())
    made.has_optimizer = False
    folder = made.write(tmp_path)
    out = resharded(folder, tmp_path / "out")
    assert sound(out) and not (out / "optimizer").exists()
    assert list(Comparison(a=open_folder(folder), b=open_folder(out)).differences(lambda _: None)) == []


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_weights_turned_to_16_bits_get_the_masters_that_they_were(tmp_path: Path, dtype: torch.dtype) -> None:
    made = Handmade.of(small_config(), dtype=torch.float32)
    out = resharded(made.write(tmp_path), tmp_path / "out", dtype=dtype)
    opened = open_folder(out)
    assert sound(out) and opened.optimizer is not None
    for name, tensor in made.model.items():
        assert torch.equal(whole(opened.model, name), tensor.to(dtype))
        assert torch.equal(whole(opened.optimizer, f"master/{name}"), tensor)
    assert opened.config["dtype"] == str(dtype).removeprefix("torch.")


def test_weights_turned_to_32_bits_are_their_masters(tmp_path: Path) -> None:
    made = Handmade.of(small_config())
    out = resharded(made.write(tmp_path), tmp_path / "out", dtype=torch.float32)
    opened = open_folder(out)
    assert sound(out) and opened.optimizer is not None
    for name in made.model:
        assert torch.equal(whole(opened.model, name), made.states[f"master/{name}"])
    assert set(opened.optimizer.names) == {name for name in made.states if name.startswith("exp_avg/")}
    back = open_folder(resharded(out, tmp_path / "back", dtype=torch.bfloat16))
    same = Comparison(a=open_folder(tmp_path / "step-00000100"), b=back)
    assert list(same.differences(lambda _: None)) == []


def test_numbers_that_a_format_cannot_hold_are_refused(tmp_path: Path) -> None:
    made = Handmade.of(small_config())
    made.states[MASTER][3, 4] = 1e5
    folder = made.write(tmp_path)
    with pytest.raises(
        ValueError, match=r"lm_head.weight has numbers up to 1e\+05, which float16 cannot hold"
    ):
        resharded(folder, tmp_path / "out", dtype=torch.float16)
    with pytest.raises(ValueError, match="float16 cannot hold"):
        exported(folder, tmp_path / "out", dtype=torch.float16, masters=True)
    assert {path.name for path in tmp_path.iterdir()} == {"step-00000100"}


def test_what_is_no_number_stays_none(tmp_path: Path) -> None:
    made = Handmade.of(small_config())
    made.model[HEAD][0, :2] = torch.tensor([torch.nan, torch.inf])
    opened = open_folder(exported(made.write(tmp_path), tmp_path / "out", dtype=torch.float16))
    assert whole(opened.model, HEAD)[0, :2].isfinite().sum() == 0


def logits(model: LlamaForCausalLM) -> Tensor:
    with torch.no_grad():
        return model(torch.arange(12).view(2, 6)).logits


@pytest.mark.parametrize(
    ("max_bytes", "dtype", "masters"),
    [
        (10**6, None, False),
        (3000, torch.float16, True),
        pytest.param(3000, None, False, marks=pytest.mark.slow),
        pytest.param(10**6, torch.float32, False, marks=pytest.mark.slow),
        pytest.param(10**6, torch.float16, False, marks=pytest.mark.slow),
        pytest.param(10**6, None, True, marks=pytest.mark.slow),
    ],
)
def test_transformers_reads_what_was_exported(
    tmp_path: Path, max_bytes: int, dtype: torch.dtype | None, masters: bool
) -> None:
    made = Handmade.of(small_config())
    made.states = {name: each / 8 for name, each in made.states.items()}
    made.model = {name: made.states[f"master/{name}"].bfloat16() for name in made.model}
    made.cut = columns
    out = exported(made.write(tmp_path), tmp_path / "out", max_bytes=max_bytes, dtype=dtype, masters=masters)
    wanted = dtype or (torch.float32 if masters else torch.bfloat16)
    read = AutoModelForCausalLM.from_pretrained(out)
    assert type(read) is LlamaForCausalLM and read.dtype == wanted
    expected = LlamaForCausalLM(made.config).to(wanted)
    source = {name: made.states[f"master/{name}"] for name in made.model} if masters else made.model
    expected.load_state_dict({name: each.to(wanted) for name, each in source.items()})
    assert torch.equal(logits(read), logits(expected))
    assert examine_pretrained(out).faults == ()


def test_a_hugging_face_folder_is_exported_with_all_that_is_no_weight(tmp_path: Path) -> None:
    model = LlamaForCausalLM(small_config())
    model.save_pretrained(tmp_path / "a", max_shard_size="4KB")
    (tmp_path / "a" / "tokenizer.json").write_text("{}")
    (tmp_path / "a" / "training_args.bin").write_text("")
    out = exported(tmp_path / "a", tmp_path / "b")
    expected = {"config.json", "generation_config.json", "model.safetensors", "tokenizer.json"}
    assert {path.name for path in out.iterdir()} == expected
    read = AutoModelForCausalLM.from_pretrained(out)
    assert torch.equal(logits(read), logits(model))


def test_a_folder_of_torch_files_is_exported(tmp_path: Path) -> None:
    model = LlamaForCausalLM(small_config(tie_word_embeddings=True))
    (tmp_path / "a").mkdir()
    model.config.architectures = ["LlamaForCausalLM"]
    model.config.save_pretrained(tmp_path / "a")
    torch.save(model.state_dict(), tmp_path / "a" / "pytorch_model.bin")
    read = AutoModelForCausalLM.from_pretrained(exported(tmp_path / "a", tmp_path / "b"))
    assert torch.equal(logits(read), logits(model))


def test_the_formats_of_all_parts_of_a_config_are_told(tmp_path: Path) -> None:
    made = Handmade.of(small_config())
    folder = made.write(tmp_path) / "model"
    config = json.loads((folder / "config.json").read_text())
    del config["dtype"]
    config |= {"torch_dtype": "bfloat16", "vision_config": {"dtype": "bfloat16", "hidden_size": 3}}
    (folder / "config.json").write_text(json.dumps(config))
    out = exported(folder, tmp_path / "out", dtype=torch.float32)
    found = json.loads((out / "config.json").read_text())
    assert (found["torch_dtype"], found["vision_config"]) == (
        "float32",
        {"dtype": "float32", "hidden_size": 3},
    )
    assert "dtype" not in found


def test_nothing_is_written_from_what_is_damaged(tmp_path: Path) -> None:
    folder = Handmade.of(small_config()).write(tmp_path)
    path = folder / "optimizer" / "rank-00001.safetensors"
    content = bytearray(path.read_bytes())
    content[-1] ^= 1
    path.write_bytes(content)
    for conversion in (
        Resharding(opened=open_folder(folder), out=tmp_path / "out", max_bytes=9, optimizer_files=1),
        Export(opened=open_folder(folder), out=tmp_path / "out", max_bytes=9),
    ):
        with pytest.raises(
            ValueError, match=r"damaged checkpoint: .*rank-00001.safetensors is damaged: master/"
        ):
            conversion.write(lambda _: None)
    assert {path.name for path in tmp_path.iterdir()} == {"step-00000100"}


def stops(after: int) -> Iterator[None]:
    yield from [None] * after
    raise OSError(28, "No space left on device")


@pytest.mark.parametrize("after", [0, 5, 14, 30])
def test_what_was_interrupted_is_not_there(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, after: int
) -> None:
    """After so many tensors or small files."""
    folder = Handmade.of(small_config()).write(tmp_path)
    left = stops(after)

    def progress(_: int) -> None:
        next(left)

    with pytest.raises(OSError, match="No space left"):
        Resharding(opened=open_folder(folder), out=tmp_path / "out", max_bytes=9, optimizer_files=1).write(
            progress
        )
    assert {path.name for path in tmp_path.iterdir()} == {"step-00000100"}


def test_what_a_killed_run_left_is_removed_by_the_next(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = Handmade.of(small_config()).write(tmp_path)
    with monkeypatch.context() as patch, pytest.raises(RuntimeError, match="killed"):
        patch.setattr(convert.shutil, "rmtree", lambda *_: None)  # nobody clears up
        patch.setattr(convert, "commit_step", killed)
        resharded(folder, tmp_path / "out")
    (left,) = {path.name for path in tmp_path.iterdir()} - {"step-00000100"}
    assert left.startswith(".out.writing-")
    assert sound(resharded(folder, tmp_path / "out"))
    assert {path.name for path in tmp_path.iterdir()} == {"step-00000100", "out"}


def killed(*_: object) -> Path:
    raise RuntimeError("killed")
