"""`echelon plan`: tables, pictures, refusals, and a script that runs as it is printed."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from .calls import call, require_refused

SMALL = {
    **dict(architectures=["LlamaForCausalLM"], model_type="llama"),
    **dict(vocab_size=512, hidden_size=64, intermediate_size=128),
    **dict(num_hidden_layers=2, num_attention_heads=4, num_key_value_heads=2),
}


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    (tmp_path / "config.json").write_text(json.dumps(SMALL))
    return tmp_path


def test_layouts_are_listed_with_memory_and_a_picture(folder: Path) -> None:
    picture = folder / "memory.svg"
    status, output = call(
        f"plan --model {folder} --world 2 --global-batch 4 --seq 32 --top 3 --plot {picture}"
    )
    assert status == 0, output
    assert "estimates" in output and "MFU" in output and "pipeline rank 0" in output
    assert "activations" in picture.read_text() and "76 GiB" in picture.read_text()


def test_where_nothing_fits_the_nearest_is_named(folder: Path) -> None:
    job = f"--model {folder} --world 2 --global-batch 2 --seq 64"
    status, output = call(f"plan {job} --memory 0.001 --reserve 0")
    assert status == 1
    assert "nothing fits into 0.001 GiB" in output and "the nearest" in output


def test_a_batch_that_no_layout_divides_is_refused_with_one_that_works(folder: Path) -> None:
    status, output = call(f"plan --model {folder} --world 7 --global-batch 8 --seq 32")
    assert status == 1 and "works with --global-batch 14" in output, output


def test_a_model_without_layers_has_no_pipeline(folder: Path) -> None:
    (folder / "config.json").write_text(json.dumps(SMALL | {"num_hidden_layers": 0}))
    status, output = call(f"plan --model {folder} --world 1 --global-batch 1 --seq 32")
    assert status == 0, output


def test_one_layout_is_checked_with_all_its_problems(folder: Path) -> None:
    job = f"--model {folder} --world 4 --global-batch 8 --seq 64"
    status, output = call(f"plan {job} --layout '--tp 3 --zero 7'")
    assert status == 1
    assert "tp_size=3" in output and "zero_stage=7" in output and "the nearest that fit" in output
    problems = "--tp 3 --pp 2 --chunks 2 --schedule interleaved --zero 7 --microbatches 3"
    status, output = call(f"plan --model {folder} --world 6 --global-batch 16 --seq 64 --layout '{problems}'")
    assert status == 1
    for words in ("zero_stage=7", "2 layers", "not divisible by 3 ranks", "use --global-batch 18"):
        assert words in output
    status, output = call(f"plan {job} --layout '--dp 0 --microbatches 0'")
    assert status == 1 and "must be at least 1" in output
    status, output = call(f"plan {job} --layout '--tp 2 --pp 2 --microbatches 4'")
    assert status == 0 and "tp2·pp2" in output and "4 × 2" in output


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        ("--gpu abacus", "--gpu 'abacus'"),
        ("--gpu H100", "did you mean h100"),
        ("--seq 0", "--seq 0"),
        ("--world 0", "--world 0 must be at least 1"),
        ("--memory 3", "smaller --reserve"),
        ("""--layout "--tp 'x" """, "No closing quotation"),
        ("--layout '--frobnicate 2'", "No such option"),
        ("--precision int8", "--precision 'int8'"),
        ("--model no-such", "--model 'no-such'"),
        ("--layout '--tp 2 --precision fp16'", "--precision is no size of a layout"),
        ("--layout '--tp 2 --model gpt2'", "--model is no size of a layout"),
    ],
)
def test_bad_arguments_are_refused(folder: Path, arguments: str, words: str) -> None:
    require_refused(f"plan --model {folder} --world 4 --global-batch 8 {arguments}", words)


@pytest.mark.slow
def test_the_printed_script_runs_as_it_is(folder: Path) -> None:
    job = f"--model {folder} --world 2 --global-batch 4 --seq 32 --precision fp32"
    status, output = call(f"plan {job} --layout '--pp 2 --microbatches 2 --recompute 1'")
    assert status == 0, output
    script = folder / "train.py"
    script.write_text(output[output.index("# torchrun") :])
    torchrun = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc_per_node", "2"]
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    ran = subprocess.run(
        [*torchrun, str(script)], capture_output=True, text=True, timeout=120, env=environment
    )
    assert ran.returncode == 0, ran.stderr[-2000:]
    assert "step 9: loss" in ran.stdout
