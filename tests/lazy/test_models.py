"""Models of every type with a table, and of derived ones, built lazily beside the same built as ever: equal to the bit.

`test_a_lazily_built_model_is_split_as_an_eager_one` shows for each type that it can be built lazily: under tp2·pp2 all
ranks' parts are then equal. Quick are a type of each table in one process, and a few on four ranks.
"""

from pathlib import Path

import pytest
import torch
from torch import nn
from transformers import CONFIG_MAPPING, AutoModelForCausalLM

from echelon import Booster, HybridParallelPlugin, LazyInitContext
from echelon.lazy import materialize
from echelon.lazy.tensor import LazyTensor
from echelon.plugins.hybrid_model import HybridParallelModule
from echelon.shardformer import model_types, table_for
from echelon.verify.models import ModelChoice, heads_of

from ..contract.matrix_rows import DERIVED
from ..matrix import FeatureCase
from ..models.chatglm import register_chatglm
from ..models.small_timm import VisionTransformer
from ..pool import Pool
from .compare import built_in_both_ways, differences

WITH_TABLE = (*model_types(), "timm")
QUICK = ("llama",)


def build(model_type: str, head: str | None = None, *, tied: bool = False, seed: int = 3) -> nn.Module:
    """A small model of any type, of the usual head where none is given."""
    if model_type == "timm":
        torch.manual_seed(seed)
        return VisionTransformer()
    if model_type == "chatglm":
        register_chatglm()
    return ModelChoice(model_type=model_type, head=head, tied=tied).build(seed)


def one_of_each_table() -> list[str]:
    """The model types of the first test, each the first of its table."""
    names = model_types()
    tables = [table_for(name) for name in names]
    return [name for index, name in enumerate(names) if tables.index(tables[index]) == index]


def heads(model_type: str) -> list[str | None]:
    """The heads of a type, each class once."""
    if model_type not in CONFIG_MAPPING:
        return [None]
    return list({kind: head for head, kind in heads_of(model_type).items()}.values())


@pytest.mark.parametrize("model_type", [*one_of_each_table(), "timm"])
def test_a_lazily_built_model_is_the_eager_one(model_type: str) -> None:
    lazy, eager, *drawn = built_in_both_ways(lambda: build(model_type))
    assert differences(materialize(lazy), eager) == []
    assert torch.equal(*drawn)


@pytest.mark.slow
@pytest.mark.parametrize("model_type", [*WITH_TABLE, *DERIVED])
def test_a_lazily_built_model_of_any_head_is_the_eager_one(model_type: str) -> None:
    for head in heads(model_type):
        for tied in (False, True):
            lazy, eager, *drawn = built_in_both_ways(lambda: build(model_type, head, tied=tied))  # noqa: B023
            assert (head, tied, differences(materialize(lazy), eager)) == (head, tied, [])
            assert torch.equal(*drawn)


def split_in_both_ways(model_type: str, tp_size: int, pp_size: int) -> list[str]:
    """In what this rank's part of a lazily built model differs from that of an eager one."""
    boosted = []
    for is_lazy in (False, True):
        model = built_in_both_ways(lambda: build(model_type))[not is_lazy]
        plugin = HybridParallelPlugin(
            tp_size=tp_size, pp_size=pp_size, precision="fp32", num_microbatches=2 if pp_size > 1 else None
        )
        boosted.append(Booster(plugin=plugin).boost(model, torch.optim.AdamW(model.parameters()))[0])
    eager, lazy = boosted
    assert isinstance(eager, HybridParallelModule) and isinstance(lazy, HybridParallelModule)
    left = [name for name, tensor in lazy.tensors().items() if isinstance(tensor, LazyTensor)]
    placed = [
        name
        for name in eager.local_parameters
        if vars(eager.local_parameters[name]) != vars(lazy.local_parameters[name])
    ]
    return [*differences(lazy.module, eager.module), *left, *placed]


@pytest.mark.parametrize(
    "case",
    [
        pytest.param(
            FeatureCase(model_type=name, feature="lazy initialization"),
            id=name,
            marks=() if name in QUICK else pytest.mark.slow,
        )
        for name in (*WITH_TABLE, *DERIVED)
    ],
)
def test_a_lazily_built_model_is_split_as_an_eager_one(pool: Pool, case: FeatureCase) -> None:
    assert pool.run(4, split_in_both_ways, case.model_type, 2, 2) == [[]] * 4


def test_the_matrix_has_a_row_for_each_type() -> None:
    assert len(WITH_TABLE) > 45 and len(DERIVED) > 20


def test_a_model_is_built_as_its_users_build_it_and_generates() -> None:
    config = ModelChoice(model_type="llama").config()
    torch.manual_seed(0)
    with LazyInitContext():
        model = AutoModelForCausalLM.from_config(config)
    ids = torch.tensor([[1, 5, 7]])
    found = materialize(model).eval().generate(ids, max_new_tokens=4, do_sample=False)
    torch.manual_seed(0)
    expected = (
        AutoModelForCausalLM.from_config(config).eval().generate(ids, max_new_tokens=4, do_sample=False)
    )
    assert torch.equal(found, expected)


def test_a_checkpoint_that_is_read_inside_of_the_block_is_real(tmp_path: Path) -> None:
    saved = build("bert", "base")
    saved.save_pretrained(tmp_path)
    torch.manual_seed(7)
    expected = heads_of("bert")["classification"].from_pretrained(tmp_path)
    torch.manual_seed(7)
    with LazyInitContext():
        found = heads_of("bert")["classification"].from_pretrained(tmp_path)
    assert differences(materialize(found), expected) == []
