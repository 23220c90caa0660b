"""Tables: the registry, and models that a table fits."""

import pytest

from echelon.shardformer import model_types, register, table_for
from echelon.shardformer.table_policy import TablePolicy
from echelon.shardformer.tables import table as table_module
from echelon.shardformer.tables.decoders import LLAMA

from ..refusals.split_rows import GROUPED, UNPADDED, changed, errors, llama, on_meta, with_adapters


def test_a_registered_table_is_found_and_listed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(table_module, "_TABLES", dict(table_module._TABLES))
    register(LLAMA, "my_llama", "other_llama")
    assert table_for("my_llama") is LLAMA
    assert {"my_llama", "other_llama"} <= set(model_types())
    model = on_meta("LlamaForCausalLM")
    model.config.model_type = "my_llama"
    assert errors(model, tp_size=2, num_stages=2) == []
    assert table_for("unheard_of") is None


def test_a_model_that_only_tensor_ranks_refuse_is_cut_into_stages() -> None:
    assert errors(changed(with_adapters)(), num_stages=2) == []
    assert errors(llama(**GROUPED), TablePolicy(UNPADDED), tp_size=6) == []


def test_layers_of_several_widths_are_split_each_by_its_own() -> None:
    model = on_meta("GPT2LMHeadModel")
    model.transformer.h[1] = on_meta("GPT2LMHeadModel", n_inner=64).transformer.h[1]
    assert errors(model, tp_size=2) == []
