"""Objects are broadcast with their tensors as tensors, whatever contains them."""

from typing import Any, NoReturn

import pytest
import torch
import torch.distributed as dist
from torch import Tensor
from transformers import DynamicCache
from transformers.modeling_outputs import CausalLMOutput

from echelon.cluster.objects import broadcast_object

from ..pool import Pool


def never_pickled(*_: Any) -> NoReturn:
    raise AssertionError("a tensor was pickled")


def outputs_of_a_model() -> dict[str, Any]:
    cache, shared = DynamicCache(), torch.arange(6.0).view(2, 3)
    cache.update(torch.full((1, 2, 3, 4), 5.0), torch.full((1, 2, 3, 4), 6.0), 0)
    dtypes = (torch.bool, torch.uint8, torch.int64, torch.bfloat16, torch.float16, torch.complex64)
    return {
        "model": CausalLMOutput(logits=shared, attentions=None),
        "cache": cache,
        "twice": (shared, [shared, "text", 3]),
        "transposed": shared.t(),
        "with gradient": shared.clone().requires_grad_() * 2,
        "scalar": torch.tensor(7.0),
        "empty": torch.empty(0, 4),
        "formats": [torch.ones(3, dtype=dtype) for dtype in dtypes],
        "many": [torch.full((number % 3,), number) for number in range(300)],
    }


def broadcast_from_the_last() -> None:
    expected, root = outputs_of_a_model(), dist.get_world_size() - 1
    is_root = dist.get_rank() == root
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Tensor, "__reduce_ex__", never_pickled)
        arrived = broadcast_object(expected if is_root else None, root, None)
    assert is_root == (arrived is expected)
    model, (layer,) = arrived["model"], arrived["cache"].layers
    assert type(model) is CausalLMOutput and list(model) == ["logits"]
    assert (layer.keys == 5).all() and (layer.values == 6).all()
    assert arrived["twice"][0] is model.logits is arrived["twice"][1][0]
    for name in expected.keys() - {"model", "cache"}:
        torch.testing.assert_close(_plain(arrived[name]), _plain(expected[name]), rtol=0, atol=0)
    for value in (None, 3, "text"):
        assert broadcast_object(value if is_root else 0, root, None) == value


def _plain(tree: Any) -> Any:
    """Return the tree without strings, which torch's comparison does not take."""
    if isinstance(tree, list | tuple):
        return [_plain(entry) for entry in tree if not isinstance(entry, str)]
    return tree


def test_no_tensor_of_a_broadcast_object_is_pickled(pool: Pool) -> None:
    pool.run(2, broadcast_from_the_last)
