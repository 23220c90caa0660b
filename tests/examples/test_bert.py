"""The BERT example: data, refusals, and losses of a layout equal to those of one process."""

from pathlib import Path

import pytest
import transformers

from ..pool import Pool
from .scripts import EXAMPLES, load, records_of, run

EXAMPLE = EXAMPLES / "language" / "bert"
SCRIPT = EXAMPLE / "finetune.py"
data = load(EXAMPLE / "data.py")
pretrained = load(EXAMPLES / "pretrained.py")


def test_pairs_are_balanced_distinct_and_follow_the_seed() -> None:
    pairs = data.paraphrases(num_pairs=2000, seed=3)
    assert pairs == data.paraphrases(num_pairs=2000, seed=3)
    assert pairs != data.paraphrases(num_pairs=2000, seed=4)
    assert sum(pair["label"] for pair in pairs) == 1000
    assert len({(pair["sentence1"], pair["sentence2"]) for pair in pairs}) == 2000


def test_no_pair_of_the_test_split_is_in_the_training_split() -> None:
    splits = data.generated_data(0)
    train, test = (set(zip(split["sentence1"], split["sentence2"], strict=True)) for split in splits.values())
    assert (len(train), len(test)) == (6000, 1000)
    assert not train & test


def test_mrpc_is_read_with_literal_quotes_and_a_byte_order_mark(tmp_path: Path) -> None:
    header = "\t".join(data.HEADER)
    path = tmp_path / "train.tsv"
    path.write_text(
        f'\ufeff{header}\n1\t10\t11\tHe said "no.\tShe said no".\n0\t1\t2\tA\tB\n', encoding="utf-8"
    )
    assert data.read_mrpc(path) == [
        {"sentence1": 'He said "no.', "sentence2": 'She said no".', "label": 1},
        {"sentence1": "A", "sentence2": "B", "label": 0},
    ]


@pytest.mark.parametrize(
    ("text", "reported"),
    [
        ("wrong\theader\n", "train.tsv, line 1: expected the columns"),
        ("{header}\n1\t2\t3\tA\tB\n1\t2\tA\n", "train.tsv, line 3: expected 5 tab-separated fields"),
        (
            "{header}\nyes\t2\t3\tA\tB\n",
            "train.tsv, line 2: expected 5 tab-separated fields that begin with 0 or 1",
        ),
    ],
)
def test_a_malformed_line_is_named(tmp_path: Path, text: str, reported: str) -> None:
    path = tmp_path / "train.tsv"
    path.write_text(text.format(header="\t".join(data.HEADER)), encoding="utf-8")
    with pytest.raises(ValueError, match=reported):
        data.read_mrpc(path)
    path.write_bytes("\t".join(data.HEADER).encode() + b"\n1\t1\t2\ta\tb\n0\t1\t2\tc\xe9\td\n")
    with pytest.raises(ValueError, match=r"train\.tsv, line 3: not UTF-8"):
        data.read_mrpc(path)


def test_a_missing_folder_and_an_unreachable_hub_report_what_to_give(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with pytest.raises(FileNotFoundError, match=r"--data_dir takes a folder with MRPC's train\.tsv"):
        data.mrpc_files(tmp_path / "nowhere")
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    with pytest.raises(ConnectionError, match="hub, which cannot be reached from here: give --data_dir"):
        data.mrpc_from_hub()
    (error,) = pretrained.pretrained_errors("some/model")
    assert "some/model is no directory here, and the Hugging Face hub cannot be reached" in error
    assert pretrained.pretrained_errors(str(tmp_path)) == pretrained.pretrained_errors(None) == []


@pytest.mark.slow
def test_the_first_20_losses_of_tp2_pp2_are_those_of_one_process(pool: Pool, tmp_path: Path) -> None:
    common = ("--precision", "fp32", "--dropout", "0", "--epochs", "1", "--max_steps", "20")
    alone, sharded = tmp_path / "alone.jsonl", tmp_path / "sharded.jsonl"
    run(pool, SCRIPT, *common, "--log_losses", str(alone))
    output = run(
        pool, SCRIPT, *common, "--log_losses", str(sharded), "--plugin", "hybrid_parallel", processes=4
    )
    assert "f1=" in output.strip().splitlines()[-1]
    expected, found = ([record["loss"] for record in records_of(path)] for path in (alone, sharded))
    assert len(found) == 20
    assert found == pytest.approx(expected, abs=1e-4)


@pytest.mark.parametrize(
    "plugin",
    [
        "torch_ddp",
        *(pytest.param(each, marks=pytest.mark.slow) for each in ("torch_ddp_fp16", "low_level_zero")),
    ],
)
def test_every_other_plugin_runs_and_misses_a_target_with_status_1(pool: Pool, plugin: str) -> None:
    output = run(
        pool, SCRIPT, "--plugin", plugin, "--epochs", "1", "--max_steps", "2", "--target_f1", "1.01", status=1
    )
    assert "is below the target 1.01" in output
    assert "seconds=" in output.strip().splitlines()[-1]


def test_a_pretrained_directory_and_mrpc_files_train(pool: Pool, tmp_path: Path) -> None:
    rows = [f"{number % 2}\t1\t2\tthe cat {number} sat\tthe cat {number} sat down" for number in range(12)]
    for name in ("train.tsv", "test.tsv"):
        (tmp_path / name).write_text("\n".join(["\t".join(data.HEADER), *rows]), encoding="utf-8")
    tokenizer = data.train_tokenizer(data.mrpc_files(tmp_path))
    config = transformers.BertConfig(
        vocab_size=len(tokenizer),
        hidden_size=16,
        num_hidden_layers=2,
        num_attention_heads=2,
        intermediate_size=16,
    )
    folder = tmp_path / "model"
    transformers.BertForMaskedLM(config).save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    arguments = ("--data_dir", str(tmp_path), "--model_name_or_path", str(folder))
    output = run(pool, SCRIPT, *arguments, "--epochs", "1", "--batch_size", "4", "--num_microbatches", "2")
    assert "f1=" in output.strip().splitlines()[-1]
