"""Words and their encryption by a Caesar cipher, for the Shardformer example: generated, so nothing is downloaded."""

import random

import torch
from torch import Tensor

LETTERS = "abcdefghijklmnopqrstuvwxyz"
END = len(LETTERS)  # the token that ends a word or an answer
VOCABULARY = len(LETTERS) + 1
SHIFT = 3  # positions in the alphabet, cyclic
IGNORED_LABEL = -100


def words(count: int, *, length: int, seed: int) -> Tensor:
    """Generate distinct words, (count, length), reproducible by the seed."""
    drawn = random.Random(seed)
    found: dict[tuple[int, ...], None] = {}
    while len(found) < count:
        found[tuple(drawn.randrange(len(LETTERS)) for _ in range(length))] = None
    return torch.tensor(list(found))


def prompts(words_BL: Tensor) -> Tensor:
    """Return the prompts of a model: each word and its end token, (B, L + 1)."""
    return torch.cat([words_BL, torch.full_like(words_BL[:, :1], END)], dim=1)


def answers(words_BL: Tensor) -> Tensor:
    """Return the encrypted words, (B, L)."""
    return (words_BL + SHIFT) % len(LETTERS)


def samples(words_BL: Tensor) -> list[dict[str, Tensor]]:
    """Return training samples of prompt, answer and end token; prompts are random and have no labels."""
    asked = prompts(words_BL)
    ids = torch.cat([asked, prompts(answers(words_BL))], dim=1)
    labels = ids.clone()
    labels[:, : asked.shape[1]] = IGNORED_LABEL
    return [{"input_ids": ids[row], "labels": labels[row]} for row in range(len(ids))]


def spelled(ids: Tensor) -> str:
    """Return ids as letters, with a dot for an end token."""
    return "".join(LETTERS[index] if index < len(LETTERS) else "." for index in ids.tolist())
