"""Words in a secret writing, for the Shardformer example: generated, so that nothing is downloaded."""

import random

import torch
from torch import Tensor

LETTERS = "abcdefghijklmnopqrstuvwxyz"
END = len(LETTERS)  # of a word, and of its answer
VOCABULARY = len(LETTERS) + 1
SHIFT = 3  # letters further on in the alphabet, which begins again behind its end
IGNORED_LABEL = -100


def words(count: int, *, length: int, seed: int) -> Tensor:
    """Different words of so many letters, (count, length); the same for the same seed."""
    drawn = random.Random(seed)
    found: dict[tuple[int, ...], None] = {}
    while len(found) < count:
        found[tuple(drawn.randrange(len(LETTERS)) for _ in range(length))] = None
    return torch.tensor(list(found))


def prompts(words_BL: Tensor) -> Tensor:
    """Prompts of a model: a word and its end, (B, L + 1)."""
    return torch.cat([words_BL, torch.full_like(words_BL[:, :1], END)], dim=1)


def answers(words_BL: Tensor) -> Tensor:
    """The words with each letter moved on, (B, L)."""
    return (words_BL + SHIFT) % len(LETTERS)


def samples(words_BL: Tensor) -> list[dict[str, Tensor]]:
    """Prompt, answer and its end to train on; the prompt has no labels, since nobody can foresee it."""
    asked = prompts(words_BL)
    ids = torch.cat([asked, prompts(answers(words_BL))], dim=1)
    labels = ids.clone()
    labels[:, : asked.shape[1]] = IGNORED_LABEL
    return [{"input_ids": ids[row], "labels": labels[row]} for row in range(len(ids))]


def spelled(ids: Tensor) -> str:
    """Letters for ids, a dot for an end."""
    return "".join(LETTERS[index] if index < len(LETTERS) else "." for index in ids.tolist())
