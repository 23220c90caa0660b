"""Texts for the Llama example: a tokenizer trained on them, and their tokens packed into sequences.

Packing is deterministic: processes that read equal files get equal sequences.
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
MIN_VOCABULARY = 257  # every byte, and the end-of-text token
MAX_BYTES = 2_000_000  # of the default data
CHARACTERS_PER_PIECE = 2**16
BATCH = 64  # pieces or sequences that are processed at once
IGNORED_LABEL = -100  # excluded from the loss by transformers


@dataclass(frozen=True, kw_only=True)
class Facts:
    """Figures of packed texts.

    Args:
        documents: number of files.
        tokens: number of tokens, with an end-of-text token for each document.
        sequences: number of packed sequences.
        left_over: number of last tokens, too few for another sequence.
        vocabulary: size of the tokenizer's vocabulary.
        unigram_entropy: entropy of the sequences' tokens in nats: the loss of a model that ignores the context.
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
        vocabulary: maximum size of the tokenizer's vocabulary.
        sequence_length: number of tokens in a sequence.
    """

    files: tuple[Path, ...]
    vocabulary: int
    sequence_length: int

    def digest(self) -> str:
        """Return a hash of the files' contents, the settings and the library versions."""
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
    """Return the files in the given order, a folder's *.txt sorted, and their errors."""
    files: list[Path] = []
    errors: list[str] = []
    for path in paths:
        found = sorted(path.rglob("*.txt")) if path.is_dir() else [path]
        if not found:
            errors.append(f"--data {path}: the folder has no *.txt below it: name its files")
        files += found
    return tuple(files), errors + [error for path in files for error in file_errors(path)]


def file_errors(path: Path) -> list[str]:
    """Return an error if a file is missing, empty, unreadable or not UTF-8."""
    if not path.is_file():
        return [f"--data {path}: there is no such file"]
    try:
        with path.open("rb") as file:
            if file.read(len(codecs.BOM_UTF8) + 1) in (b"", codecs.BOM_UTF8):  # a byte-order mark is no text
                return [f"--data {path}: the file is empty"]
            file.seek(0)
            for number, line in enumerate(file, start=1):  # in UTF-8, b"\n" occurs in no other character
                if wrong := decoding_error(line):
                    return [f"--data {path}, line {number}: not UTF-8: {wrong}"]
    except OSError as error:
        return [f"--data {path}: cannot be read: {error.strerror}"]
    return []


def decoding_error(line: bytes) -> str | None:
    """Return the decoding error of a line that is not UTF-8, else None."""
    try:
        line.decode()
    except UnicodeDecodeError as error:
        return str(error)
    return None


def library_files(max_bytes: int = MAX_BYTES) -> tuple[tuple[Path, ...], list[str]]:
    """Return modules of Python's standard library, of at most `max_bytes` together, and errors.

    They are ordered by a hash of their names, so a part of them is a random sample. Tests, installed packages and files
    that are not UTF-8 are left out.
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
    """Pack the texts into a folder, unless it exists.

    The folder is created atomically, so several processes may call at once.
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
    """Yield the documents in pieces that fit into memory; `ends` marks the last piece of a document."""
    for path in files:
        # newline="" keeps carriage returns.
        with path.open(encoding="utf-8-sig", newline="") as file:
            text = file.read(CHARACTERS_PER_PIECE)
            while text:
                following = file.read(CHARACTERS_PER_PIECE)
                yield {"text": text, "ends": not following}
                text = following


def train_tokenizer(files: Sequence[Path], vocabulary: int) -> Tokenizer:
    """Train a byte-level BPE tokenizer on the texts: lossless, and with equal ids for equal texts."""
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
    # A text that spells the end-of-text token is encoded as plain text.
    tokenizer.encode_special_tokens = True
    return tokenizer


class Packer:
    """Cut a stream of tokens, given in batches, into sequences of equal length; `rest` has the remaining tokens."""

    def __init__(self, length: int) -> None:
        self.length = length
        self.rest: list[int] = []

    def __call__(self, rows: dict[str, list]) -> dict[str, list]:
        for ids in rows["ids"]:
            self.rest += ids
        end = len(self.rest) // self.length * self.length
        sequences = [self.rest[start : start + self.length] for start in range(0, end, self.length)]
        self.rest = self.rest[end:]
        return {"input_ids": sequences}


def unigram_entropy(sequences: Dataset, vocabulary: int) -> float:
    """Return the entropy of the token frequencies, in nats."""
    counts = np.zeros(vocabulary)
    for rows in sequences.with_format("numpy").iter(1000):
        counts += np.bincount(np.asarray(rows["input_ids"]).ravel(), minlength=vocabulary)
    shares = counts[counts > 0] / max(counts.sum(), 1)
    return float(-(shares * np.log(shares)).sum())


def facts_of(place: Path) -> Facts:
    """Read the facts of a folder that `prepare` made."""
    return Facts(**json.loads((place / "facts.json").read_text()))


def sequences_of(place: Path) -> Dataset:
    """Read the sequences, at least one, of a folder that `prepare` made."""
    return datasets.load_from_disk(str(place / "sequences")).with_format("torch")


def tokenizer_of(place: Path) -> PreTrainedTokenizerFast:
    """Read the tokenizer of a folder that `prepare` made, as a transformers tokenizer."""
    ends = dict.fromkeys(("bos_token", "eos_token"), END_OF_TEXT)
    return PreTrainedTokenizerFast(tokenizer_file=str(place / "tokenizer.json"), **ends)


class Examples(torch.utils.data.Dataset):
    """Inputs and labels of a causal model, padded with blank sequences that are excluded from the loss.

    Args:
        sequences: rows of `input_ids`.
        multiple: the number of samples is rounded up to a multiple of it.
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
