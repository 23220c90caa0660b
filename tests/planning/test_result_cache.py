"""Kept results of operations on fake tensors: traces from them are those from torch's own results."""

from typing import Any
from unittest import mock

import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensorMode

from echelon.planning.result_cache import ResultCache
from echelon.planning.tracer import Tracer
from echelon.verify.layout_choice import Layout

from .test_search import planner, planner_of_images

_aten = torch.ops.aten
MIXTURE = Layout(dp=4, ep=2, microbatches=1, precision="bf16")
SPLIT = Layout(tp=2, sequence="split_gather", microbatches=1, precision="bf16")
LAYOUTS = (
    ("mixtral", MIXTURE),
    pytest.param("gpt_oss", MIXTURE, marks=pytest.mark.slow),
    ("llama", SPLIT),
    pytest.param("qwen2_5_vl", Layout(dp=2, microbatches=1, precision="bf16"), marks=pytest.mark.slow),
    pytest.param("gemma2", SPLIT, marks=pytest.mark.slow),
    pytest.param("t5", Layout(dp=2, microbatches=1, precision="bf16"), marks=pytest.mark.slow),
)


def tracer_of(kind: str) -> Tracer:
    if kind == "qwen2_5_vl":
        return planner_of_images(kind, 512)._tracer
    return planner(1.0, kind=kind)._tracer


def direct(_: ResultCache, func: Any, args: Any, kwargs: Any) -> Any:
    return func(*args, **kwargs)


@pytest.mark.parametrize(("kind", "layout"), LAYOUTS, ids=str)
def test_a_trace_from_kept_results_is_the_full_trace(kind: str, layout: Layout) -> None:
    tracer = tracer_of(kind)
    tracer.trace(layout.config, 1)
    num_known = len(tracer._results._known)
    kept = tracer._record(layout.config, 1)
    assert len(tracer._results._known) == num_known > 50
    with mock.patch.object(ResultCache, "run", direct):
        assert tracer._record(layout.config, 1) == kept


def test_kept_results_are_new_tensors_and_views() -> None:
    cache = ResultCache()
    with FakeTensorMode():
        for _ in range(2):
            x, table = torch.empty(4, 6), torch.empty(9, 6)
            total = cache.run(_aten.add.Tensor, (x, 1), {})
            assert total.untyped_storage() is not x.untyped_storage()
            left, right = cache.run(_aten.split.Tensor, (x.t(), 3), {})
            assert left.untyped_storage() is right.untyped_storage() is x.untyped_storage()
            assert (right.shape, right.stride(), right.storage_offset()) == ((3, 4), (1, 6), 3)
            assert cache.run(_aten.alias.default, (table,), {}) is not table
            changed = cache.run(_aten.add_.Tensor, (x, 1), {})
            assert changed is x
    assert len(cache._known) == 3


def test_numbers_of_other_types_have_other_results() -> None:
    cache = ResultCache()
    with FakeTensorMode():
        x = torch.empty(4, dtype=torch.long)
        dtypes = [cache.run(_aten.add.Tensor, (x, value), {}).dtype for value in (1, 1.0, True, 1)]
    assert dtypes == [torch.long, torch.float, torch.long, torch.long]
