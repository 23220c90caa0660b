"""Copies are what was copied, lie apart, and take the memory of the ones before."""

import torch

from echelon.checkpoint.copies import Copies


def tensors(seed: int) -> list[torch.Tensor]:
    drawn = torch.Generator().manual_seed(seed)
    return [
        torch.randn(5, 3, generator=drawn),
        torch.randn(7, 4, generator=drawn).t(),  # does not lie end to end
        torch.tensor(3.0),
        torch.randn(3, generator=drawn).bfloat16(),
        torch.empty(0, 2),
        torch.randn(2**24 + 1, generator=drawn),  # more than a chunk
        torch.randn(9, generator=drawn).double(),
    ]


def test_copies_stay_as_they_were_and_their_memory_is_used_again() -> None:
    copies = Copies(torch.device("cpu"))
    sizes = []
    for seed in range(3):
        copies.forget()
        live = tensors(seed)
        copied = [copies.copy(each) for each in live]
        copies.finish()
        for each in live:
            each.fill_(-1.0)
        for found, expected in zip(copied, tensors(seed), strict=True):
            assert torch.equal(found, expected) and found.is_contiguous() and found.dtype == expected.dtype
        sizes.append(copies.nbytes)
    assert sizes[0] == sizes[1] == sizes[2] > 2**26
