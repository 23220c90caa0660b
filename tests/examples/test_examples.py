"""Every example: it runs, its loss falls, and its numbers under a layout are those of one process."""

import ast
import re
from pathlib import Path

import pytest

from ..pool import Pool
from .scripts import EXAMPLES, FP32, numbers_of, records_of, run

# By script: arguments of a tiny run, and those of layouts of 2 and of 4 processes.
TINY = {
    "language/bert/finetune.py": (
        f"--num_pairs 608 --epochs 1 {FP32}",
        "--tp_size 2",
        "--tp_size 2 --pp_size 2",
    ),
    "language/llama/pretrain.py": (
        f"--steps 3 --sequence_length 32 --batch_size 8 --data {EXAMPLES}/language/llama/pretrain.py {FP32}",
        "--pp_size 2 --num_microbatches 2",
        "--tp_size 2 --zero_stage 1",
    ),
    "language/llama/sft_lora.py": ("--batch_size 128", "--tp_size 2", "--tp_size 2 --pp_size 2"),
    "language/llama/long_context.py": (
        "--sequence_length 128 --steps 3",
        "",
        "--sequence_parallelism_mode all_to_all --sp_size 2 --zero_stage 1",
    ),
    "language/mixtral/pretrain.py": (
        "--steps 2 --sequence_length 32 --batch_size 4 --router_loss 0.02",
        "--ep_size 2",
        "--ep_size 2 --pp_size 2 --num_microbatches 1",
    ),
    "language/t5/finetune.py": ("--num_samples 192 --epochs 1", "--pp_size 2", "--tp_size 2 --pp_size 2"),
    "images/vit/finetune.py": (
        "--epochs 1 --batch_size 176",
        "--plugin low_level_zero --zero_stage 2",
        "--tp_size 2 --zero_stage 1",
    ),
    "audio/whisper/finetune.py": ("--num_samples 64 --epochs 1", "--tp_size 2", "--tp_size 2 --pp_size 2"),
    "custom/pretrain.py": (
        "--num_samples 192 --epochs 1",
        "--tp_size 2",
        "--tp_size 2 --pp_size 2 --num_microbatches 4",
    ),
    "shardformer/finetune.py": (
        "--steps 3 --key_value_heads 1",
        "--tp_size 2",
        "--tp_size 2 --model_type llama",
    ),
}
# By script: arguments of a longer run of two processes, and the loss that it falls to.
LONGER = {
    "language/bert/finetune.py": (f"--epochs 1 --pp_size 2 --target_f1 0.86 {FP32}", 0.2),
    "language/llama/pretrain.py": ("--steps 40 --precision fp32", 3.5),
    "language/llama/sft_lora.py": ("--epochs 1", 4.8),
    "language/llama/long_context.py": ("--sequence_length 512 --steps 20", 4.0),
    "language/mixtral/pretrain.py": ("--steps 20 --ep_size 2 --sequence_length 64", 3.8),
    "language/t5/finetune.py": ("--num_samples 3200 --epochs 1", 1.6),
    "images/vit/finetune.py": ("--epochs 3 --target_accuracy 0.6", 1.3),
    "audio/whisper/finetune.py": ("--epochs 2 --num_samples 768", 1.9),
    "custom/pretrain.py": ("--epochs 4", 3.0),
    "shardformer/finetune.py": ("--steps 80", 0.5),
}
SCRIPTS = sorted(str(path.relative_to(EXAMPLES)) for path in EXAMPLES.rglob("*.py"))
TRAINER = "trainer/finetune.py"


def test_each_example_is_in_the_tables() -> None:
    assert sorted([*TINY, TRAINER]) == sorted([*LONGER, TRAINER]) == SCRIPTS


@pytest.mark.parametrize("script", SCRIPTS)
def test_an_example_is_one_short_file(script: str) -> None:
    source = (EXAMPLES / script).read_text()
    assert source.count("\n") <= 150
    tree = ast.parse(source)
    imported = [node.module or "." for node in ast.walk(tree) if isinstance(node, ast.ImportFrom)]
    imported += [name.name for node in ast.walk(tree) if isinstance(node, ast.Import) for name in node.names]
    beside = {path.stem for path in (EXAMPLES / script).parent.iterdir()}
    assert not beside & {name.split(".")[0] for name in imported} and "sys.path" not in source
    assert "optimizer.step()" in source or script == TRAINER


def test_the_readme_lists_every_example_with_its_commands() -> None:
    text = (EXAMPLES / "README.md").read_text()
    assert sorted(re.findall(r"\]\(([\w/]+\.py)\)", text)) == SCRIPTS
    for script in SCRIPTS:
        assert f"examples/{script} --" in text and f"examples/{script} " in (EXAMPLES / script).read_text()


# A script of each kind of model and plugin: what the others use is proven elsewhere.
QUICK = (
    "language/bert/finetune.py",
    "language/llama/pretrain.py",
    "language/mixtral/pretrain.py",
    "images/vit/finetune.py",
    "shardformer/finetune.py",
)


@pytest.mark.parametrize(
    "script", [pytest.param(script, marks=[pytest.mark.slow] * (script not in QUICK)) for script in TINY]
)
def test_its_numbers_are_those_of_one_process(pool: Pool, tmp_path: Path, script: str) -> None:
    words, two, _ = TINY[script]
    compare(pool, tmp_path, script, words, two, processes=2)


@pytest.mark.slow
@pytest.mark.parametrize("script", TINY)
def test_its_numbers_on_four_processes_are_those_of_one(pool: Pool, tmp_path: Path, script: str) -> None:
    words, _, four = TINY[script]
    compare(pool, tmp_path, script, words, four, processes=4)


def compare(pool: Pool, folder: Path, script: str, words: str, layout: str, *, processes: int) -> None:
    alone, together = folder / "alone.jsonl", folder / "together.jsonl"
    run(pool, script, *words.split(), "--metrics", str(alone))
    run(pool, script, *words.split(), *layout.split(), "--metrics", str(together), processes=processes)
    expected = numbers_of(alone)
    assert len(expected) >= 2
    assert numbers_of(together) == pytest.approx(expected, rel=1e-4)  # sums in another order, over few steps


@pytest.mark.slow
@pytest.mark.parametrize("script", LONGER)
def test_its_loss_falls(pool: Pool, tmp_path: Path, script: str) -> None:
    words, reached = LONGER[script]
    log = tmp_path / "log.jsonl"
    run(pool, script, *words.split(), "--metrics", str(log), processes=2)
    losses = [record["loss"] for record in records_of(log) if "loss" in record]
    assert losses[-1] < reached < losses[0]


def evaluated(pool: Pool, folder: Path, *layout: str, processes: int = 1) -> float:
    """Return the last loss of a short run of the Trainer example."""
    words = f"--output_dir {folder} --use_cpu True --max_steps 6 --learning_rate 1e-3 --save_strategy no"
    printed = run(pool, TRAINER, *words.split(), "--disable_tqdm", "True", *layout, processes=processes)
    return float(printed.rpartition("eval_loss=")[2])


def test_trainer_takes_its_own_flags(pool: Pool, tmp_path: Path) -> None:
    assert evaluated(pool, tmp_path) < 5.2  # ln(256) is 5.55


@pytest.mark.slow
def test_trainer_takes_those_of_the_plugin_with_the_same_numbers(pool: Pool, tmp_path: Path) -> None:
    layout = ("--tp_size", "2", "--pp_size", "2")
    expected = evaluated(pool, tmp_path)
    assert evaluated(pool, tmp_path, *layout, processes=4) == pytest.approx(
        expected, abs=1.1e-4
    )  # as printed


PRETRAIN = "language/llama/pretrain.py"


def test_a_run_that_is_stopped_resumes_under_another_layout(pool: Pool, tmp_path: Path) -> None:
    words, other, _ = TINY[PRETRAIN]
    words = words.replace("--steps 3", "--steps 12")
    alone, log = tmp_path / "alone.jsonl", tmp_path / "log.jsonl"
    run(pool, PRETRAIN, *words.split(), "--metrics", str(alone))
    saved = ("--checkpoints", str(tmp_path / "checkpoints"), "--metrics", str(log))
    run(pool, PRETRAIN, *words.split(), *saved, stop_after=10)
    assert [path.name for path in (tmp_path / "checkpoints").iterdir()] == ["step-00000010"]
    run(pool, PRETRAIN, *words.split(), *other.split(), *saved, processes=2)
    expected, resumed = ([record for record in records_of(path) if "loss" in record] for path in (alone, log))
    assert [record["step"] for record in resumed] == [10, 12]
    assert [record["loss"] for record in resumed] == pytest.approx(
        [record["loss"] for record in expected], rel=1e-5
    )


def test_the_imbalance_of_every_layer_is_plotted(pool: Pool, tmp_path: Path) -> None:
    pytest.importorskip("matplotlib")
    picture = tmp_path / "imbalance.svg"
    words = "--steps 1 --sequence_length 16 --batch_size 2 --ep_size 2 --imbalance"
    run(pool, "language/mixtral/pretrain.py", *words.split(), str(picture), processes=2)
    assert "</svg>" in picture.read_text()


BERT = "language/bert/finetune.py"


@pytest.mark.slow
@pytest.mark.parametrize("plugin", ("torch_ddp", "torch_fsdp"))
def test_bert_trains_under_torch_s_own_wrappers(pool: Pool, tmp_path: Path, plugin: str) -> None:
    compare(pool, tmp_path, BERT, TINY[BERT][0], f"--plugin {plugin}", processes=2)


def test_a_missed_target_is_status_1_and_bad_flags_are_2(pool: Pool) -> None:
    words = "--num_pairs 544 --epochs 1 --batch_size 32 --plugin low_level_zero --target_f1 1.1"
    printed = run(pool, BERT, *words.split(), status=1)
    assert printed.splitlines()[-1].startswith("f1=")
    reported = run(pool, BERT, "--tp_size", "3", "--pp_style", "sideways", processes=2, status=2)
    assert reported.count("finetune.py: error: ") == 2 and "there is no schedule 'sideways'" in reported


def test_bert_reads_the_files_of_mrpc_and_a_pretrained_model(pool: Pool, tmp_path: Path) -> None:
    header = "Quality\t#1 ID\t#2 ID\t#1 String\t#2 String"
    rows = [f'{number % 2}\t1\t2\tthe "cat {number} sat\tthe cat {number} sat down' for number in range(16)]
    for name in ("train.tsv", "test.tsv"):
        (tmp_path / name).write_text("\ufeff" + "\n".join([header, *rows]), encoding="utf-8")
    folder = tmp_path / "model"
    words = f"--data_dir {tmp_path} --epochs 1 --batch_size 8"
    run(pool, BERT, *words.split(), "--save_model", str(folder))
    assert (folder / "tokenizer.json").exists()
    run(pool, BERT, *words.split(), "--model", str(folder), "--lr", "1e-4")


@pytest.mark.slow
def test_adapters_are_saved_for_peft(pool: Pool, tmp_path: Path) -> None:
    words = f"--epochs 1 --batch_size 64 --tp_size 2 --save_adapters {tmp_path}"
    run(pool, "language/llama/sft_lora.py", *words.split(), processes=2)
    assert {"adapter_model.safetensors", "adapter_config.json"} <= {path.name for path in tmp_path.iterdir()}
