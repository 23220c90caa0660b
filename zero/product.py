"""A product of matrices that is added to memory, without being made whole first."""

import torch
from torch import Tensor

# Of a part of the product, which is read again at once: it is to stay in a core's own cache.
_PART_BYTES = 2**19

# R, C rows and columns of the product, N what is summed over


def add_product(total_RC: Tensor, left_RN: Tensor, right_NC: Tensor, *, is_first: bool) -> None:
    """Add a product to `total_RC`, or with `is_first` write it there. Its rows are made a few at a time.

    Every entry is the sum that a whole product gives, then added: equal to the bit. A kernel that adds on its own
    (`addmm`) rounds otherwise.
    """
    if is_first and total_RC.dtype == left_RN.dtype:
        torch.mm(left_RN, right_NC, out=total_RC)
        return
    for rows, left in zip(
        *(each.split(_rows_at_a_time(total_RC)) for each in (total_RC, left_RN)), strict=True
    ):
        product = left.mm(right_NC)
        rows.copy_(product) if is_first else rows.add_(product)


def _rows_at_a_time(total_RC: Tensor) -> int:
    num_rows, num_columns = total_RC.shape
    if total_RC.device.type != "cpu":  # a kernel's start costs more
        return num_rows
    return max(16, _PART_BYTES // (total_RC.element_size() * num_columns))
