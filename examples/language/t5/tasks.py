"""A generated text-to-text task, operations on digits as words, and a tokenizer for it.

    sort 3 1 4 1      → 1 1 3 4
    reverse 3 1 4 1   → 1 4 1 3
    sum 3 1 4 1       → 9

No test text has the digits of a training text, in any order or task, so a model that only memorizes answers nothing.
"""

# B batch, S tokens of a text, A tokens of an answer

import itertools
import random
import zlib
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from tokenizers import Tokenizer, models, pre_tokenizers, processors
from torch import Tensor
from transformers import PreTrainedTokenizerBase, PreTrainedTokenizerFast

PAD, END, UNKNOWN = "<pad>", "</s>", "<unk>"
DIGITS = "0123456789"
TEST_SHARE = 8  # one of this number of digit multisets is for testing
IGNORED_LABEL = -100  # excluded from the loss by transformers

TASKS: dict[str, Callable[[Sequence[str]], Sequence[str]]] = {
    "sort": sorted,
    "reverse": lambda digits: digits[::-1],
    "sum": lambda digits: str(sum(map(int, digits))),
}


@dataclass(frozen=True, kw_only=True)
class Pair:
    """A question and its answer.

    Args:
        task: one of TASKS.
        text: the task and the digits, separated by spaces.
        answer: digits, separated by spaces.
    """

    task: str
    text: str
    answer: str


def make_pairs(*, num_train: int, num_test: int, longest: int, seed: int) -> tuple[list[Pair], list[Pair]]:
    """Generate distinct training and test pairs; tasks and numbers of digits (from 2) are equally likely."""
    drawn = random.Random(seed)
    wanted = {False: num_train, True: num_test}
    found: dict[bool, dict[str, Pair]] = {False: {}, True: {}}
    while any(len(found[is_test]) < wanted[is_test] for is_test in found):
        task = drawn.choice(list(TASKS))
        digits = drawn.choices(DIGITS, k=drawn.randint(2, longest))
        pairs, num = found[is_for_test(digits)], wanted[is_for_test(digits)]
        if len(pairs) < num:
            text = " ".join([task, *digits])
            pairs[text] = Pair(task=task, text=text, answer=" ".join(TASKS[task](digits)))
    return list(found[False].values()), list(found[True].values())


def number_of_texts(longest: int) -> tuple[int, int]:
    """Return the numbers of distinct training and test texts, counting only texts of up to five digits."""
    numbers = {False: 0, True: 0}
    for length in range(2, min(longest, 5) + 1):
        for digits in itertools.product(DIGITS, repeat=length):
            numbers[is_for_test(digits)] += len(TASKS)
    return numbers[False], numbers[True]


def is_for_test(digits: Sequence[str]) -> bool:
    """Return True if these digits, in any order, are for testing."""
    return zlib.crc32("".join(sorted(digits)).encode()) % TEST_SHARE == 0


def make_tokenizer() -> PreTrainedTokenizerFast:
    """Make a tokenizer of the task's words; texts end with `</s>`, as T5's do."""
    words = [PAD, END, UNKNOWN, *TASKS, *DIGITS]
    tokenizer = Tokenizer(models.WordLevel({word: number for number, word in enumerate(words)}, UNKNOWN))
    tokenizer.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    tokenizer.post_processor = processors.TemplateProcessing(
        single=f"$A {END}", special_tokens=[(END, words.index(END))]
    )
    return PreTrainedTokenizerFast(
        tokenizer_object=tokenizer, pad_token=PAD, eos_token=END, unk_token=UNKNOWN
    )


def encode(pairs: Sequence[Pair], tokenizer: PreTrainedTokenizerBase) -> list[dict[str, Tensor]]:
    """Encode pairs as token ids, mask and labels, padded to the longest."""
    texts = tokenizer([pair.text for pair in pairs], padding=True, return_tensors="pt")
    answers = tokenizer([pair.answer for pair in pairs], padding=True, return_tensors="pt")
    labels = answers["input_ids"].masked_fill(answers["attention_mask"] == 0, IGNORED_LABEL)
    columns = {
        "input_ids": texts["input_ids"],
        "attention_mask": texts["attention_mask"],
        "labels": labels,
    }
    return [dict(zip(columns, row, strict=True)) for row in zip(*columns.values(), strict=True)]


def with_numbers(samples: Sequence[dict[str, Tensor]], pairs: Sequence[Pair]) -> list[dict[str, Tensor]]:
    """Add the number of each pair's task to its sample."""
    numbers = {task: torch.tensor(number) for number, task in enumerate(TASKS)}
    return [sample | {"task": numbers[pair.task]} for sample, pair in zip(samples, pairs, strict=True)]
