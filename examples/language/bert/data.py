"""Paraphrase data for the BERT example: generated, from MRPC's files or from the hub; and a tokenizer for it."""

import codecs
import itertools
import random
from pathlib import Path

from datasets import Dataset, DatasetDict, load_dataset
from pretrained import hub_is_reachable
from tokenizers import Tokenizer, models, normalizers, pre_tokenizers, processors, trainers
from transformers import PreTrainedTokenizerBase, PreTrainedTokenizerFast

NUM_PAIRS = 7000
NUM_TEST_PAIRS = 1000
VOCABULARY = 8000
MAX_LENGTH = 128

ADJECTIVES = ("young", "old", "tall", "kind")
TITLES = ("doctor", "captain", "judge", "coach")
NAMES = ("ann", "bob", "carl", "dora", "emma", "frank", "grace", "henry", "iris", "jack")
VERBS = """
    praised helped called visited followed blamed thanked invited ignored warned hired painted teased chased kissed
    hugged tricked defended trusted admired feared rescued copied joined watched surprised pushed greeted questioned
    consulted
""".split()  # noqa: SIM905 (a list of thirty literals)
HEADER = ["Quality", "#1 ID", "#2 ID", "#1 String", "#2 String"]


def paraphrases(*, num_pairs: int = NUM_PAIRS, seed: int = 0) -> list[dict]:
    """Generate sentence pairs about one person acting on another; half are paraphrases, half swap the two people.

    One sentence of a pair is active and the other passive, in either order. The sentences of both classes have the
    same words, so a bag of words does not separate them: a model must read the word order.

    Returns:
        Dicts of sentence1, sentence2 and label (1 for a paraphrase), without duplicates, with balanced classes.
    """
    drawn = random.Random(seed)
    seen, pairs = set(), []
    while len(pairs) < num_pairs:
        label = len(pairs) % 2
        actor, other = (
            " ".join(words)
            for words in zip(
                drawn.sample(ADJECTIVES, 2), drawn.sample(TITLES, 2), drawn.sample(NAMES, 2), strict=True
            )
        )
        verb = drawn.choice(VERBS)
        first = f"{actor} {verb} {other}"
        actor, other = (actor, other) if label else (other, actor)
        sentences = [first, f"{other} was {verb} by {actor}"]
        if drawn.random() < 0.5:
            sentences.reverse()
        if tuple(sentences) not in seen:
            seen.add(tuple(sentences))
            pairs.append({"sentence1": sentences[0], "sentence2": sentences[1], "label": label})
    drawn.shuffle(pairs)
    return pairs


def generated_data(seed: int) -> DatasetDict:
    """Generate the paraphrase task with training and test splits."""
    pairs = paraphrases(seed=seed)
    return DatasetDict(
        train=Dataset.from_list(pairs[NUM_TEST_PAIRS:]), test=Dataset.from_list(pairs[:NUM_TEST_PAIRS])
    )


def read_mrpc(path: Path) -> list[dict]:
    """Read the pairs of one of MRPC's tab-separated files; quotes in it are literal.

    Raises:
        FileNotFoundError: there is no such file.
        ValueError: the header or a line is not in MRPC's format; names file and line.
    """
    if not path.is_file():
        raise FileNotFoundError(
            f"there is no {path}: --data_dir takes a folder with MRPC's train.tsv and test.tsv"
        )
    # Lines end at b"\n" only: sentences may have other characters at which str.splitlines splits.
    lines = path.read_bytes().removeprefix(codecs.BOM_UTF8).rstrip(b"\r\n").split(b"\n")
    pairs = []
    for number, line in enumerate(lines, start=1):
        try:
            row = line.decode().rstrip("\r").split("\t")
        except UnicodeDecodeError as error:
            raise ValueError(f"{path}, line {number}: not UTF-8: {error}") from error
        if number == 1 and row != HEADER:
            raise ValueError(f"{path}, line 1: expected the columns {HEADER}, tab-separated, found {row}")
        if number == 1:
            continue
        if len(row) != len(HEADER) or row[0] not in ("0", "1"):
            raise ValueError(
                f"{path}, line {number}: expected {len(HEADER)} tab-separated fields that begin with 0 or 1, "
                f"found {len(row)}: {row}"
            )
        pairs.append({"sentence1": row[3], "sentence2": row[4], "label": int(row[0])})
    return pairs


def mrpc_files(folder: Path) -> DatasetDict:
    """Read MRPC from a folder with train.tsv and test.tsv."""
    return DatasetDict(
        train=Dataset.from_list(read_mrpc(folder / "train.tsv")),
        test=Dataset.from_list(read_mrpc(folder / "test.tsv")),
    )


def mrpc_from_hub() -> DatasetDict:
    """Load MRPC from the Hugging Face hub.

    Raises:
        ConnectionError: the hub cannot be reached.
    """
    if not hub_is_reachable():
        raise ConnectionError(
            "--task mrpc loads the data set from the Hugging Face hub, which cannot be reached from here: give "
            "--data_dir with MRPC's train.tsv and test.tsv, or leave --task out for generated data"
        )
    found = load_dataset("nyu-mll/glue", "mrpc")
    return DatasetDict(train=found["train"], test=found["validation"])


def train_tokenizer(data: DatasetDict) -> PreTrainedTokenizerFast:
    """Train a word-level tokenizer on the training sentences, for pairs in BERT's format.

    A tokenizer of word pieces would get different ids in each training, but all processes and all runs with the same
    seed need equal ids.
    """
    tokenizer = Tokenizer(models.WordLevel(unk_token="[UNK]"))  # type: ignore[call-arg]
    tokenizer.normalizer = normalizers.BertNormalizer()
    tokenizer.pre_tokenizer = pre_tokenizers.BertPreTokenizer()
    trainer = trainers.WordLevelTrainer(
        vocab_size=VOCABULARY, special_tokens=["[PAD]", "[UNK]", "[CLS]", "[SEP]"], show_progress=False
    )
    sentences = itertools.chain(data["train"]["sentence1"], data["train"]["sentence2"])
    tokenizer.train_from_iterator(sentences, trainer)
    tokenizer.post_processor = processors.TemplateProcessing(
        single="[CLS] $A [SEP]",
        pair="[CLS] $A [SEP] $B:1 [SEP]:1",
        special_tokens=[(token, tokenizer.token_to_id(token)) for token in ("[CLS]", "[SEP]")],
    )
    return PreTrainedTokenizerFast(
        tokenizer_object=tokenizer, unk_token="[UNK]", pad_token="[PAD]", cls_token="[CLS]", sep_token="[SEP]"
    )


def tokenize(data: DatasetDict, tokenizer: PreTrainedTokenizerBase) -> DatasetDict:
    """Encode pairs as tensors of token ids, token types and labels, padded to the longest pair."""

    def encode(rows: dict, **padding: object) -> dict:
        return tokenizer(
            rows["sentence1"], rows["sentence2"], truncation=True, max_length=MAX_LENGTH, **padding
        )

    lengths = [len(ids) for split in data.values() for ids in split.map(encode, batched=True)["input_ids"]]
    padding = {"padding": "max_length", "max_length": max(lengths)}
    encoded = data.map(
        lambda rows: tokenizer(rows["sentence1"], rows["sentence2"], truncation=True, **padding), batched=True
    )
    columns = [
        name
        for name in ("input_ids", "attention_mask", "token_type_ids")
        if name in encoded["train"].features
    ]
    encoded = encoded.rename_column("label", "labels")
    return encoded.with_format("torch", columns=[*columns, "labels"])
