"""TRL's script for fine-tuning with two changed lines, under tp 2, pp 2 and dp 2, logs the numbers of one process."""

import json
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

from .runs import WORDS, llama, tokenizer

trl = pytest.importorskip("trl")
ROOT = Path(__file__).parents[2]
SETTINGS = """
--model_name_or_path model --dataset_name data --gradient_accumulation_steps 2 --num_train_epochs 1 --optim sgd
--learning_rate 0.1 --logging_steps 1 --eval_strategy epoch --use_cpu True --bf16 False --report_to none
--save_strategy no --dtype float32 --gradient_checkpointing False
"""
LOGGED = re.compile(r"'(loss|grad_norm|eval_loss|num_tokens)': '([0-9.]+)'")


def logged(folder: Path, script: str, batch_size: int, *launcher: str) -> list[tuple[str, str]]:
    """Run a script, and return what its first rank logs, to four digits."""
    sizes = f"--per_device_train_batch_size {batch_size} --per_device_eval_batch_size {batch_size}"
    command = [sys.executable, *launcher, script, "--output_dir", script.replace(".py", ""), *sizes.split()]
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1", "PYTHONPATH": str(ROOT)}
    run = [*command, *SETTINGS.split()]
    done = subprocess.run(run, env=environment, cwd=folder, capture_output=True, text=True, timeout=500)
    assert done.returncode == 0, done.stderr[-4000:]
    return LOGGED.findall(done.stdout)


@pytest.mark.slow
def test_trls_own_script_trains_under_a_layout_as_on_one_process(tmp_path: Path) -> None:
    llama().save_pretrained(tmp_path / "model")
    tokenizer().save_pretrained(tmp_path / "model")
    (tmp_path / "data").mkdir()
    for split, number in (("train", 30), ("test", 11)):
        rows = [
            dict(
                prompt=" ".join(WORDS[i : i + 3 + i % 5]) + " ",
                completion=" ".join(WORDS[i + 9 : i + 13 + i % 3]),
            )
            for i in range(number)
        ]
        (tmp_path / "data" / f"{split}.jsonl").write_text("\n".join(map(json.dumps, rows)))
    native = (Path(trl.__file__).parent / "scripts" / "sft.py").read_text()
    plugin = "plugin=dict(tp_size=2, pp_size=2, zero_stage=1, num_microbatches=2)"
    moved = native.replace(
        "from trl import SFTTrainer, ", "from echelon.trainer import SFTTrainer\n    from trl import "
    )
    moved = moved.replace("trainer = SFTTrainer(\n", f"trainer = SFTTrainer(\n        {plugin},\n")
    (tmp_path / "one.py").write_text(native)
    (tmp_path / "eight.py").write_text(moved)
    one = logged(tmp_path, "one.py", 8)
    torchrun = ("-m", "torch.distributed.run", "--standalone", "--nproc_per_node", "8")
    assert len(one) == 7 and logged(tmp_path, "eight.py", 4, *torchrun) == one
    assert (tmp_path / "one" / "config.json").exists() and (tmp_path / "eight" / "config.json").exists()
