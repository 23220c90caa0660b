"""Embeddings of transformers that multiply what they look up with a number of their own. Splitting is embedding.py."""

import copy

import torch
from torch import Tensor, nn
from torch.nn import Parameter

_SCALE = "embed_scale"
# All that the forward of such a class may read.
_READ = {"super", "forward", _SCALE, "to", "weight", "dtype"}


def is_scaled(native: nn.Module) -> bool:
    """Whether this is an nn.Embedding whose class looks up as one and multiplies with its `embed_scale`.

    Seen in the names that its forward reads, and tried with a scale and a weight of our own.
    """
    code = getattr(type(native).forward, "__code__", None)
    is_known = code is not None and _SCALE in code.co_names and set(code.co_names) <= _READ
    if not isinstance(native, nn.Embedding) or not is_known:
        return False
    trial = copy.copy(native)
    with torch.no_grad(), torch.device("cpu"):
        trial._parameters = {"weight": Parameter(torch.tensor([[1.0, 2.0], [3.0, 5.0]]))}
        trial._buffers, trial.padding_idx = {}, None
        vars(trial)[_SCALE] = torch.tensor(7.0)
        return trial(torch.tensor([1, 0])).tolist() == [[21.0, 35.0], [7.0, 14.0]]


def scale_of(native: nn.Module) -> Tensor | float | None:
    """What an embedding multiplies with, or None for a plain one."""
    return getattr(native, _SCALE) if is_scaled(native) else None
