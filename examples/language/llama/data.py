"""Texts for the Llama example: a tokenizer trained on them, and their tokens packed into sequences.

All of it is deterministic, so that every process that reads equal files gets equal sequences.
"""

import codecs
import hashlib
import json
import shutil
import sysconfig
import tempfile
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

import datasets
import numpy as np
import tokenizers
import torch
from datasets import Dataset, Features, List, Value
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
from torch import Tensor
from transformers import PreTrainedTokenizerFast

END_OF_TEXT = "<|endoftext|>"
END_OF_TEXT_ID = 0
MIN_VOCABULARY = 257  # every byte, and the end of a text
MAX_BYTES = 2_000_000  # of the default data
CHARACTERS_PER_PIECE = 2**16
BATCH = 64  # pieces, or sequences, that are worked on at once
IGNORED_LABEL = -100  # transformers takes no loss for it


@dataclass(frozen=True, kw_only=True)
class Facts:
    """Figures of packed texts.

    Args:
        documents: how many files.
        tokens: of all of them, one at the end of each document included.
        sequences: how many they make.
        left_over: how many tokens are in none: the last ones, too few for another.
        vocabulary: how many different tokens the tokenizer knows.
        unigram_entropy: of the sequences' tokens, in nats: the loss of a model that only counts tokens.
    """

    documents: int
    tokens: int
    sequences: int
    left_over: int
    vocabulary: int
    unigram_entropy: float


@dataclass(frozen=True, kw_only=True)
class Recipe:
    """Sources and settings of packed texts.

    Args:
        files: the documents, in order.
        vocabulary: the tokenizer's size at most.
        sequence_length: tokens of a sequence.
    """

    files: tuple[Path, ...]
    vocabulary: int
    sequence_length: int

    def digest(self) -> str:
        """A hash of all that the packed texts depend on."""
        settings = (
            self.vocabulary,
            self.sequence_length,
            [path.stat().st_size for path in self.files],
            tokenizers.__version__,
            datasets.__version__,
        )
        found = hashlib.sha256(repr(settings).encode())
        for path in self.files:
            with path.open("rb") as file:
                while block := file.read(2**20):
                    found.update(block)
        return found.hexdigest()[:32]


def files_of(paths: Sequence[Path]) -> tuple[tuple[Path, ...], list[str]]:
    """The files in the order given, a folder's *.txt sorted, and what is wrong with them."""
    files: list[Path] = []
    errors: list[str] = []
    for path in paths:
        found = sorted(path.rglob("*.txt")) if path.is_dir() else [path]
        if not found:
            errors.append(f"--data {path}: the folder has no *.txt below it: name its files")
        files += found
    return tuple(files), errors + [error for path in files for error in file_errors(path)]


def file_errors(path: Path) -> list[str]:
    """Why this is no text to train on."""
    if not path.is_file():
        return [f"--data {path}: there is no such file"]
    try:
        with path.open("rb") as file:
            if file.read(len(codecs.BOM_UTF8) + 1) in (b"", codecs.BOM_UTF8):  # which is no part of the text
                return [f"--data {path}: the file is empty"]
            file.seek(0)
            for number, line in enumerate(file, start=1):  # b"\n" is a part of no other character
                if wrong := decoding_error(line):
                    return [f"--data {path}, line {number}: not UTF-8: {wrong}"]
    except OSError as error:
        return [f"--data {path}: cannot be read: {error.strerror}"]
    return []


def decoding_error(line: bytes) -> str | None:
    """Why this is not UTF-8, or None."""
    try:
        line.decode()
    except UnicodeDecodeError as error:
        return str(error)
    return None


def library_files(max_bytes: int = MAX_BYTES) -> tuple[tuple[Path, ...], list[str]]:
    """Modules of Python's own library, together at most so large, and what is wrong with that.

    In the order of a hash of their names, so that a part is a mixture. Left out: tests, what was installed
    beside the library, and the few that are not UTF-8.
    """
    root = Path(sysconfig.get_paths()["stdlib"])
    left_out = {"site-packages", "dist-packages", "test", "tests", "idle_test", "__pycache__"}
    names = [path.relative_to(root) for path in root.rglob("*.py")]
    names = [name for name in names if not left_out & set(name.parts)]
    names.sort(key=lambda name: hashlib.sha256(name.as_posix().encode()).digest())
    files: list[Path] = []
    total = 0
    for path in (root / name for name in names):
        size = path.stat().st_size
        if total + size <= max_bytes and not file_errors(path):
            files.append(path)
            total += size
    if not files:
        return (), [f"no module of Python's library in {root} fits --max_bytes {max_bytes}: give --data"]
    return tuple(files), []


def prepare(recipe: Recipe, place: Path) -> None:
    """Make the packed texts, where they are not there yet, in a folder that appears whole or not at all.

    So several processes may call at once.
    """
    if place.is_dir():
        return
    place.parent.mkdir(parents=True, exist_ok=True)
    work = Path(tempfile.mkdtemp(dir=place.parent, prefix="unfinished-"))
    try:
        pack(recipe, work)
        (work / "packed").replace(place)
    except OSError:
        if not place.is_dir():  # another process was first
            raise
    finally:
        shutil.rmtree(work, ignore_errors=True)


def pack(recipe: Recipe, work: Path) -> None:
    """Write the sequences, the tokenizer and the facts to `work / "packed"`."""
    tokenizer = train_tokenizer(recipe.files, recipe.vocabulary)
    texts = Dataset.from_generator(
        pieces,
        features=Features({"text": Value("string"), "ends": Value("bool")}),
        gen_kwargs={"files": list(recipe.files)},
        cache_dir=str(work / "cache"),
    )

    def encode(rows: dict[str, list]) -> dict[str, list]:
        encoded = tokenizer.encode_batch(rows["text"])
        ends = [[END_OF_TEXT_ID] if is_end else [] for is_end in rows["ends"]]
        return {"ids": [part.ids + end for part, end in zip(encoded, ends, strict=True)]}

    packer = Packer(recipe.sequence_length)
    settings = {"batched": True, "batch_size": BATCH, "load_from_cache_file": False}
    tokens = texts.map(
        encode,
        remove_columns=texts.column_names,
        features=Features({"ids": List(Value("int32"))}),
        **settings,
    )
    sequences = tokens.map(
        packer,
        remove_columns=tokens.column_names,
        features=Features({"input_ids": List(Value("int32"))}),
        **settings,
    )
    facts = Facts(
        documents=len(recipe.files),
        tokens=len(sequences) * recipe.sequence_length + len(packer.rest),
        sequences=len(sequences),
        left_over=len(packer.rest),
        vocabulary=tokenizer.get_vocab_size(),
        unigram_entropy=unigram_entropy(sequences, tokenizer.get_vocab_size()),
    )
    sequences.save_to_disk(str(work / "packed" / "sequences"))
    tokenizer.save(str(work / "packed" / "tokenizer.json"))
    (work / "packed" / "facts.json").write_text(json.dumps(asdict(facts)))


def pieces(files: list[Path]) -> Iterator[dict]:
    """The documents, cut into pieces that fit into memory, each with whether its document ends with it."""
    for path in files:
        # newline="": carriage returns stay what they are.
        with path.open(encoding="utf-8-sig", newline="") as file:
            text = file.read(CHARACTERS_PER_PIECE)
            while text:
                following = file.read(CHARACTERS_PER_PIECE)
                yield {"text": text, "ends": not following}
                text = following


def train_tokenizer(files: Sequence[Path], vocabulary: int) -> Tokenizer:
    """A byte-level BPE of these texts, which loses no character; equal texts give equal ids."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=vocabulary,
        special_tokens=[END_OF_TEXT],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator((piece["text"] for piece in pieces(list(files))), trainer)
    # What a text says is text, also where it spells the token that ends one.
    tokenizer.encode_special_tokens = True
    return tokenizer


class Packer:
    """Cuts a stream of tokens, which comes in batches, into sequences of one length; `rest` is what is left."""

    def __init__(self, length: int) -> None:
        self.length = length
        self.rest: list[int] = []

    def __call__(self, rows: dict[str, list]) -> dict[str, list]:
        for ids in rows["ids"]:
            self.rest += ids
        whole = len(self.rest) // self.length * self.length
        sequences = [self.rest[start : start + self.length] for start in range(0, whole, self.length)]
        self.rest = self.rest[whole:]
        return {"input_ids": sequences}


def unigram_entropy(sequences: Dataset, vocabulary: int) -> float:
    """The entropy of single tokens, in nats."""
    counts = np.zeros(vocabulary)
    for rows in sequences.with_format("numpy").iter(1000):
        counts += np.bincount(np.asarray(rows["input_ids"]).ravel(), minlength=vocabulary)
    shares = counts[counts > 0] / max(counts.sum(), 1)
    return float(-(shares * np.log(shares)).sum())


def facts_of(place: Path) -> Facts:
    """The facts that `prepare` left there."""
    return Facts(**json.loads((place / "facts.json").read_text()))


def sequences_of(place: Path) -> Dataset:
    """The sequences that `prepare` left there, of which there must be one at least."""
    return datasets.load_from_disk(str(place / "sequences")).with_format("torch")


def tokenizer_of(place: Path) -> PreTrainedTokenizerFast:
    """The tokenizer that `prepare` left there, as transformers has it."""
    ends = dict.fromkeys(("bos_token", "eos_token"), END_OF_TEXT)
    return PreTrainedTokenizerFast(tokenizer_file=str(place / "tokenizer.json"), **ends)


class Examples(torch.utils.data.Dataset):
    """Sequences as a causal model takes them, filled up with sequences that count for nothing.

    Args:
        sequences: rows of `input_ids`.
        multiple: the length is the next multiple of it.
    """

    def __init__(self, sequences: Dataset, *, multiple: int = 1) -> None:
        self.sequences = sequences
        self._length = -(-len(sequences) // multiple) * multiple

    def __len__(self) -> int:
        return self._length

    def __getitem__(self, index: int) -> dict[str, Tensor]:
        ids = self.sequences[index % len(self.sequences)]["input_ids"].long()
        is_blank = index >= len(self.sequences)
        return {"input_ids": ids, "labels": torch.full_like(ids, IGNORED_LABEL) if is_blank else ids}
