"""Each mechanism of the tables of experts, latents, norms and gathered layers: taken out, the parity row departs."""

from contextlib import ExitStack
from dataclasses import replace
from typing import Any
from unittest.mock import patch

import pytest
from torch import Tensor, nn

from echelon.shardformer import table as table_module
from echelon.shardformer.derived import derived_table
from echelon.shardformer.layer import embedding, linear, norm, region
from echelon.shardformer.table import table_for
from echelon.verify.layout import Layout
from echelon.verify.models import ModelChoice
from echelon.verify.parity import parity

from ..pool import Pool


def same(x: Any, *_: object) -> Any:
    return x


def own_part(x: Tensor, group: Any, dim: int) -> Tensor:
    """A slice whose backward leaves zeros where the other ranks' slices were."""
    return x.chunk(group.size(), dim)[group.rank()].contiguous()


def native(module: nn.Module, process_group: Any) -> nn.Module:
    return module


def unscaled(module: nn.Module) -> None:
    return None


# By name what is patched: the object, the attribute and what takes its place.
PATCHES: dict[str, tuple[Any, str, Any]] = {
    "experts are not summed": (region, "reduce_from", same),
    "a region has no entry": (region, "enter", same),
    "partial gradients are not summed": (region.PartialGradient, "from_native_module", staticmethod(native)),
    "the mean of squares is a rank's own": (norm, "reduce_from", same),
    "the mean's gradient is a rank's own": (norm, "copy_to", same),
    "the embedding's scale is lost": (embedding, "scale_of", unscaled),
    "a slice's gradient is a rank's own": (linear, "scatter_to", own_part),
}


def departure(model_type: str, mutation: str, changes: dict[str, Any]) -> str | None:
    """What departs under two tensor ranks with a patch, or with other fields in the table."""
    choice = ModelChoice(model_type=model_type)
    table = table_for(model_type) or derived_table(choice.build_on_meta())
    with ExitStack() as stack:
        stack.enter_context(patch.dict(table_module._TABLES, {model_type: replace(table, **changes)}))
        if mutation in PATCHES:
            stack.enter_context(patch.object(*PATCHES[mutation]))
        return parity(choice, Layout(tp=2), num_steps=1).departure


@pytest.mark.slow
@pytest.mark.parametrize(
    ("model_type", "mutation", "changes"),
    [
        ("mixtral", "experts are not summed", {}),
        ("mixtral", "a region has no entry", {}),
        ("mixtral", "the router's weights are no input", {"second_input": {}}),
        ("mixtral", "gate and up are cut as one", {"fused": {}}),
        ("deepseek_v3", "partial gradients are not summed", {}),
        ("deepseek_v3", "experts are not summed", {}),
        ("qwen3", "partial gradients are not summed", {}),
        ("olmo2", "the mean of squares is a rank's own", {}),
        ("olmo2", "the mean's gradient is a rank's own", {}),
        ("gemma2", "the embedding's scale is lost", {}),
        ("olmo3", "a slice's gradient is a rank's own", {}),
    ],
)
def test_a_mechanism_that_is_taken_out_shows(
    pool: Pool, model_type: str, mutation: str, changes: dict[str, Any]
) -> None:
    found = pool.run(2, departure, model_type, mutation, changes, timeout=120.0)
    assert found[0] is not None
