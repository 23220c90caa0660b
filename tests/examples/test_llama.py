"""The Llama example: texts, refusals, records, and losses of a layout equal to those of one process."""

import json
import math
import re
from pathlib import Path

import pytest
import torch
from tokenizers import Tokenizer
from transformers import LlamaConfig

from ..pool import Pool
from .scripts import EXAMPLES, load, records_of, run

EXAMPLE = EXAMPLES / "language" / "llama"
SCRIPT = EXAMPLE / "pretrain.py"
data = load(EXAMPLE / "data.py")
metrics = load(EXAMPLES / "metrics.py")
training = load(EXAMPLES / "training.py")
models = load(EXAMPLE / "models.py")

# A small run: a small vocabulary, short sequences, little text.
SIZES = (
    *("--vocab_size", "300", "--sequence_length", "16", "--batch_size", "8"),
    *("--eval_sequences", "21"),  # no multiple of 16, the default batch size of evaluations
)
SMALL = (*SIZES, "--max_bytes", "60000")
QUICK = ("llama", "gpt2")


def packed(files: list[Path], place: Path, *, vocabulary: int = 300, length: int = 16) -> Path:
    data.prepare(data.Recipe(files=tuple(files), vocabulary=vocabulary, sequence_length=length), place)
    return place


@pytest.fixture
def files(tmp_path: Path) -> list[Path]:
    """Documents with a byte-order mark, carriage returns, multi-byte characters and more than one piece."""
    contents = [
        "\ufeffone\r\ntwo\r\n",
        "Ünïcödé 文字 😀\n" * 30,
        "the end <|endoftext|> of a text is text here\n",
        "".join(f"line {number} of a long document\n" for number in range(6000)),
    ]
    found = []
    for number, content in enumerate(contents):
        path = tmp_path / f"{number}.txt"
        path.write_bytes(content.encode())
        found.append(path)
    assert len(contents[-1]) > 2 * data.CHARACTERS_PER_PIECE
    return found


def test_packing_loses_and_repeats_no_token(files: list[Path], tmp_path: Path) -> None:
    place = packed(files, tmp_path / "packed")
    sequences, facts = data.sequences_of(place), data.facts_of(place)
    rows = list(sequences["input_ids"])
    assert {len(row) for row in rows} == {16}
    stream = torch.cat(rows).tolist()
    tokenizer = Tokenizer.from_file(str(place / "tokenizer.json"))
    tokenizer.encode_special_tokens = True
    expected = []
    for piece in data.pieces(files):
        ids = tokenizer.encode(piece["text"]).ids
        expected += ids + [data.END_OF_TEXT_ID] * piece["ends"]
    assert stream == expected[: len(stream)]
    assert (facts.tokens, facts.left_over) == (len(expected), len(expected) % 16)


def test_the_packer_carries_remaining_tokens_into_the_next_batch() -> None:
    packer = data.Packer(4)
    batches = [[[1, 2], [3]], [[4, 5, 6, 7, 8, 9]], [[]], [[10], [11, 12, 13]]]
    found = [packer({"ids": batch})["input_ids"] for batch in batches]
    assert found == [[], [[1, 2, 3, 4], [5, 6, 7, 8]], [], [[9, 10, 11, 12]]]
    assert packer.rest == [13]


def test_texts_are_made_once_and_leave_nothing_unfinished(files: list[Path], tmp_path: Path) -> None:
    place = packed(files, tmp_path / "cache" / "digest")
    made = (place / "facts.json").stat().st_mtime_ns
    packed(files, place)
    assert (place / "facts.json").stat().st_mtime_ns == made
    assert list(place.parent.iterdir()) == [place]


def test_the_digest_follows_contents_and_settings(files: list[Path]) -> None:
    recipe = data.Recipe(files=tuple(files), vocabulary=300, sequence_length=16)
    digests = {recipe.digest()}
    digests.add(data.Recipe(files=tuple(files), vocabulary=301, sequence_length=16).digest())
    digests.add(data.Recipe(files=tuple(files), vocabulary=300, sequence_length=17).digest())
    digests.add(data.Recipe(files=tuple(reversed(files)), vocabulary=300, sequence_length=16).digest())
    files[0].write_bytes(files[0].read_bytes().replace(b"one", b"eno"))
    digests.add(recipe.digest())
    assert len(digests) == 5


@pytest.mark.slow
def test_the_default_texts_are_bounded_and_reproducible() -> None:
    chosen, errors = data.library_files(200_000)
    assert errors == []
    assert 100_000 < sum(path.stat().st_size for path in chosen) <= 200_000
    assert (chosen, errors) == data.library_files(200_000)
    assert not [path for path in chosen if {"site-packages", "test"} & set(path.parts)]
    assert "fits --max_bytes 1" in data.library_files(1)[1][0]


def test_errors_of_all_files_are_reported(tmp_path: Path) -> None:
    (tmp_path / "empty.txt").touch()
    (tmp_path / "marked.txt").write_bytes(b"\xef\xbb\xbf")  # a byte-order mark only
    (tmp_path / "bytes.txt").write_bytes(b"fine\nnot \xff fine\n")
    (tmp_path / "folder").mkdir()
    (tmp_path / "good.txt").write_text("good")
    _, errors = data.files_of([tmp_path, tmp_path / "nowhere", tmp_path / "folder"])
    assert len(errors) == 5
    reported = "\n".join(errors)
    assert "marked.txt: the file is empty" in reported
    assert "bytes.txt, line 2: not UTF-8" in reported
    assert "empty.txt: the file is empty" in reported
    assert "nowhere: there is no such file" in reported
    assert "folder: the folder has no *.txt" in reported
    assert data.files_of([tmp_path / "good.txt"]) == ((tmp_path / "good.txt",), [])


def test_blank_sequences_fill_up_and_have_no_labels(files: list[Path], tmp_path: Path) -> None:
    sequences = data.sequences_of(packed(files, tmp_path / "packed"))
    examples = data.Examples(sequences.select(range(5)), multiple=4)
    assert len(examples) == 8
    counted = [bool((examples[index]["labels"] != data.IGNORED_LABEL).all()) for index in range(8)]
    assert counted == [True] * 5 + [False] * 3


@pytest.mark.parametrize(
    "model_type",
    [pytest.param(each, marks=() if each in QUICK else pytest.mark.slow) for each in models.causal_types()],
)
def test_every_type_is_built_in_the_requested_size(model_type: str) -> None:
    config = models.sized_config(model_type, "tiny", vocabulary=300, sequence_length=16)
    model = models.make_model(config, end_of_text=0, seed=0)
    ids = torch.arange(32).view(2, 16)
    first, second = (model(input_ids=ids, labels=ids).loss for _ in range(2))
    assert torch.equal(first, second)  # without dropout
    assert first.item() == pytest.approx(math.log(300), abs=0.5)
    assert model.get_input_embeddings().weight.shape == (300, 128)
    assert models.layout_errors(config, tp_size=2, num_stages=2) == []


def test_a_model_that_cannot_be_sharded_is_refused_without_its_weights() -> None:
    config = models.sized_config("llama", "7b", vocabulary=300, sequence_length=16)
    layers, *widths = models.layout_errors(config, tp_size=3, num_stages=33)
    assert "32 layers and the pipeline 33 stages" in layers
    assert any("11008 entries along dim 0 are not divisible by 3 ranks" in width for width in widths)


def test_the_learning_rate_rises_then_falls_to_its_fraction() -> None:
    optimizer = torch.optim.SGD([torch.nn.Parameter(torch.zeros(1))], lr=2.0)
    scheduler = models.make_scheduler(optimizer, num_steps=20, warmup_steps=4, min_lr_fraction=0.1)
    rates = []
    for _ in range(21):
        rates.append(scheduler.get_last_lr()[0])
        optimizer.step()
        scheduler.step()
    assert rates[:5] == pytest.approx([0.4, 0.8, 1.2, 1.6, 2.0])
    assert rates[4:] == sorted(rates[4:], reverse=True)
    assert rates[12] == pytest.approx(1.1)  # half way
    assert rates[20] == pytest.approx(0.2)


def test_numbers_that_json_cannot_represent_become_null(tmp_path: Path) -> None:
    with metrics.JsonLines(tmp_path / "log.jsonl") as log:
        log.write({"loss": float("nan"), "grad_norm": float("inf"), "step": 1})
    assert records_of(tmp_path / "log.jsonl") == [{"loss": None, "grad_norm": None, "step": 1}]


def test_all_bad_arguments_are_reported_at_once(pool: Pool, tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    reported = run(
        pool,
        SCRIPT,
        *("--data", str(tmp_path / "nowhere"), "--max_bytes", "5", "--steps", "0", "--epochs", "1"),
        *("--metrics", str(tmp_path / "no" / "log.jsonl"), "--curve", str(tmp_path / "curve.jpg")),
        *("--precision", "fp8", "--pp_style", "sideways", "--warmup_fraction", "2"),
        *("--gradient_checkpoint_ratio", "1.5", "--cache_dir", str(tmp_path / "file" / "texts")),
        status=2,
    )
    for error in (
        "nowhere: there is no such file",
        "--data and --max_bytes exclude each other",
        "--steps 0 must be at least 1",
        "--steps and --epochs exclude each other",
        "there is no folder",
        "must end in one of .png",
        "precision='fp8'",
        "there is no schedule 'sideways'",
        "--warmup_fraction 2.0 must be from 0 to 1",
        "file is no folder that can be written to",
        "1.5 must be",  # and not also by the plugin's name
    ):
        assert reported.count(error) == 1, error


def test_one_rank_reports_the_errors_of_a_layout(pool: Pool) -> None:
    words = ("--tp_size", "4", "--size", "tiny", "--model_type", "llama", "--batch_size", "2")
    layout = ("--pp_size", "1", "--num_layers_per_stage", "1", "2")
    printed = run(pool, SCRIPT, *words, *layout, processes=2, status=2)
    reported = [line for line in printed.splitlines() if line.startswith("pretrain.py: error: ")]
    assert ["tp_size" in reported[0], "num_layers_per_stage" in reported[1]] == [True, True]
    assert len(reported) == len(set(reported)) == 2
    assert "training:" not in printed


@pytest.mark.parametrize(
    ("settings", "reported"),
    [
        ({"model_type": "bert"}, "model_type 'bert' must be one of"),
        ({"hidden_size": 8}, 'names no "model_type"'),
        (
            {"model_type": "llama", "vocab_size": 280},
            "--vocab_size 300 is more than the config's vocab_size 280",
        ),
        (
            {"model_type": "llama", "max_position_embeddings": 8},
            "--sequence_length 16 is more than the config's 8 positions",
        ),
    ],
)
def test_a_config_that_does_not_fit_is_refused(tmp_path: Path, settings: dict, reported: str) -> None:
    path = tmp_path / "config.json"
    path.write_text(json.dumps(settings))
    config, errors = models.config_from_file(path, None)
    if config is not None:
        errors = models.config_errors(config, sequence_length=16, vocabulary=300)
    assert [reported in error for error in errors] == [True]


@pytest.mark.slow
def test_a_config_file_trains_for_epochs_and_too_short_a_text_is_refused(pool: Pool, tmp_path: Path) -> None:
    config = LlamaConfig(
        vocab_size=300,
        hidden_size=16,
        intermediate_size=16,
        num_hidden_layers=2,
        num_attention_heads=2,
        num_key_value_heads=2,
        pad_token_id=0,
    )
    config.to_json_file(tmp_path / "config.json")
    text = tmp_path / "text.txt"
    text.write_text("".join(f"{number} sheep, " for number in range(300)))
    words = ("--config", str(tmp_path / "config.json"), "--data", str(text), "--sequence_length", "8")
    log = tmp_path / "log.jsonl"
    output = run(pool, SCRIPT, *words, "--epochs", "2", "--eval_sequences", "4", "--metrics", str(log))
    num_sequences = int(output.partition(" sequences")[0].rpartition(", ")[2])
    assert len(records_of(log)) == 2 * ((num_sequences - 4) // 16)
    text.write_text("one sheep")
    reported = run(pool, SCRIPT, *words, status=2)
    assert "sequences of 8 tokens, and --eval_sequences 64 with one --batch_size 16 need 80" in reported


@pytest.mark.slow
def test_records_and_picture_are_written_and_the_loss_falls_below_the_unigram_entropy(
    pool: Pool, tmp_path: Path
) -> None:
    pytest.importorskip("matplotlib")
    log, curve = tmp_path / "log.jsonl", tmp_path / "curve.png"
    text = tmp_path / "text.txt"
    text.write_text("".join(f"{number} sheep jumped over fence {number % 7}.\n" for number in range(2000)))
    words = ("--data", str(text), "--steps", "40", "--eval_every", "15")
    output = run(pool, SCRIPT, *words, *SIZES, "--metrics", str(log), "--curve", str(curve))
    records = records_of(log)
    assert [record["step"] for record in records] == list(range(1, 41))
    assert [record["step"] for record in records if "eval_loss" in record] == [15, 30, 40]
    names = {"step", "loss", "lr", "grad_norm", "tokens_per_second", "peak_memory_bytes", "peak_memory_of"}
    names |= {"skipped_steps"}
    assert all(names <= record.keys() for record in records)
    assert records[0]["peak_memory_of"] == ("cuda" if torch.cuda.is_available() else "process")
    assert len(re.findall(r"\bstep \d+/40, loss ", output)) == 40
    assert curve.read_bytes().startswith(b"\x89PNG")
    entropy = float(output.rpartition("unigram_entropy=")[2].split()[0])
    assert records[0]["loss"] == pytest.approx(math.log(300), abs=0.3)
    assert records[-1]["eval_loss"] < 0.6 * entropy
    assert records[-1]["eval_perplexity"] == pytest.approx(math.exp(records[-1]["eval_loss"]))


MIXTURE = ("--model_type", "mixtral", "--eval_every", "0", "--tp_size", "1", "--pp_size", "1")


def test_the_imbalance_of_every_layer_is_recorded_and_plotted(pool: Pool, tmp_path: Path) -> None:
    pytest.importorskip("matplotlib")
    log, picture = tmp_path / "log.jsonl", tmp_path / "imbalance.svg"
    words = ("--max_bytes", "60000", "--ep_size", "2", "--steps", "2", "--precision", "fp32")
    files = ("--metrics", str(log), "--imbalance", str(picture))
    run(pool, SCRIPT, *SIZES, *MIXTURE, *words, *files, processes=2)
    for record in records_of(log):
        assert list(record["imbalance"]) == [f"model.layers.{layer}.mlp.experts" for layer in range(4)]
        assert all(1 < each <= 4 for each in record["imbalance"].values())  # 2 of 8 experts for a token
    assert "</svg>" in picture.read_text()


def test_an_imbalance_needs_experts(pool: Pool, tmp_path: Path) -> None:
    words = ("--max_bytes", "60000", "--imbalance", str(tmp_path / "imbalance.svg"))
    reported = run(pool, SCRIPT, *SIZES, *words, status=2)
    assert reported.count("--imbalance is of a mixture of experts") == 1


def losses(pool: Pool, log: Path, *words: str, processes: int = 1) -> tuple[list[float], list[float]]:
    """Return the losses of six steps of a small run, and of its two evaluations."""
    steps = ("--steps", "6", "--eval_every", "3", "--metrics", str(log))
    run(pool, SCRIPT, *SMALL, *steps, *words, processes=processes)
    records = records_of(log)
    found = [row["loss"] for row in records], [row["eval_loss"] for row in records if "eval_loss" in row]
    assert tuple(map(len, found)) == (6, 2)
    return found


@pytest.fixture(scope="module")
def alone(pool: Pool, tmp_path_factory: pytest.TempPathFactory) -> tuple[list[float], list[float]]:
    """The losses of one process."""
    return losses(pool, tmp_path_factory.mktemp("alone") / "log.jsonl", "--precision", "fp32")


@pytest.mark.parametrize(
    ("processes", "words"),
    [
        pytest.param(
            4,
            "--tp_size 2 --pp_size 2 --precision fp32 --gradient_checkpoint_ratio 0.5",
            marks=pytest.mark.slow,
        ),
        pytest.param(
            2,
            "--plugin low_level_zero --precision fp32 --eval_batch_size 10 --num_microbatches 2",
            marks=pytest.mark.slow,
        ),
        pytest.param(2, "--plugin torch_ddp", marks=pytest.mark.slow),
        *(
            pytest.param(
                4,
                f"--precision fp32 --enable_sequence_parallelism --sequence_parallelism_mode {words}",
                marks=pytest.mark.slow,
            )
            for words in (
                "split_gather --enable_sequence_regather --tp_size 2 --pp_size 2",
                "ring --enable_sequence_overlap --tp_size 4 --pp_size 1",
                "all_to_all --sp_size 2 --tp_size 1 --pp_size 1 --wp_size 4 --zero_stage 1",
                "ring_attn --sp_size 2 --pp_size 2",
            )
        ),
    ],
    ids=["tp2pp2", "dp2zero1", "ddp2", "split_gather", "ring", "all_to_all", "ring_attn"],
)
def test_the_first_losses_of_a_layout_are_those_of_one_process(
    pool: Pool, tmp_path: Path, alone: tuple[list[float], list[float]], processes: int, words: str
) -> None:
    training, evaluation = losses(pool, tmp_path / "log.jsonl", *words.split(), processes=processes)
    # The tolerance is for six steps of float32 sums in another order.
    assert training == pytest.approx(alone[0], abs=1e-4)
    assert evaluation == pytest.approx(alone[1], abs=1e-4)
