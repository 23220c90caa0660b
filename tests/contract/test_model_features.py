"""Every model type that has a table with every fused kernel and every mode of sequence parallelism, on two ranks.

Each run is compared with one process without the feature. A refused feature passes, with its reason in the stored
matrix. Lazy initialization is tested in tests/lazy.
"""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any
from unittest import mock

import pytest
import torch

from echelon.cli.models import SEQUENCE_MODES
from echelon.shardformer import fused
from echelon.verify.layout_choice import Layout
from echelon.verify.model_choice import ModelChoice
from echelon.verify.parity import parity

from ..matrix import FeatureCase
from ..models.stand_ins import installed_xformers
from ..pool import Pool
from .matrix_rows import types_with_tables
from .models import BUILT_ATTENTION, OWN_ATTENTION, REFUSED_MODES, EagerChoice

OPTIONS = {
    "flash attention": "enable_flash_attention",
    "xFormers": "enable_xformers",
    "fused operators": "enable_jit_fused",
    "fused norm": "enable_fused_normalization",
}
REFUSED = {
    "flash attention": OWN_ATTENTION,
    "xFormers": OWN_ATTENTION | BUILT_ATTENTION,
    **REFUSED_MODES,
}
# Model types without elementwise activations to fuse, or without dropout.
NOTHING_TO_COMPILE = {
    *("cohere", "cohere2", "deepseek_v3", "gemma2", "gemma3_text", "glm", "glm4", "granite", "llama"),
    *("mistral", "mixtral", "olmo2", "qwen2", "qwen2_moe", "qwen3", "qwen3_moe"),
    *("beit", "gemma3", "sam", "sam_vision_model", "starcoder2", "swin", "swinv2"),
}
NOTHING = "no elementwise activation function and no dropout followed by a sum, so nothing is compiled, which is logged"
# Modes of sequence parallelism are in the covering array too.
QUICK = {
    *(("llama", "flash attention"), ("llama", "xFormers")),
    *(("qwen3", "fused norm"), ("t5", "ring_attn")),
}


# Warnings of torch at its first compilation, and where it hides or causes a warning that is an error here.
@pytest.mark.filterwarnings("ignore:`torch.jit.script:DeprecationWarning")
@pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor:UserWarning")
@pytest.mark.filterwarnings("ignore:<class 'torch.autograd.function.Function'> should not:DeprecationWarning")
@pytest.mark.parametrize(
    "case",
    [
        pytest.param(
            FeatureCase(model_type=model_type, feature=feature),
            id=f"{model_type}-{feature.replace(' ', '_')}",
            marks=() if (model_type, feature) in QUICK else pytest.mark.slow,
        )
        for feature in (*OPTIONS, *SEQUENCE_MODES)
        for model_type in types_with_tables()
    ],
)
def test_a_model_trains_as_without_the_feature(pool: Pool, case: FeatureCase, record_property: Any) -> None:
    verdicts = pool.run(2, train_with, case, timeout=240.0)
    assert len(set(verdicts)) == 1, "ranks disagree on the verdict"
    refusal, departure, was_used = verdicts[0]
    assert (refusal is not None) == (case.model_type in REFUSED.get(case.feature, ())), refusal
    if refusal is not None:
        argument = OPTIONS.get(case.feature, "sequence_parallelism")
        reasons = [line.partition(": ")[2] for line in refusal.splitlines() if argument in line]
        assert reasons
        told = reasons if case.feature in OPTIONS else reasons[:1]  # one for each part of a model
        return record_property("refused", "; ".join(told))
    assert departure is None
    has_nothing = case.feature == "fused operators" and case.model_type in NOTHING_TO_COMPILE
    assert was_used != has_nothing
    if has_nothing:
        record_property("refused", NOTHING)


def train_with(case: FeatureCase) -> tuple[str | None, str | None, bool]:
    """Return the reason of a refusal, the difference from the reference, and True if the feature had an effect."""
    if case.feature in OPTIONS:
        choice: ModelChoice = EagerChoice(model_type=case.model_type)
        layout = Layout(tp=2, options=(OPTIONS[case.feature],))
    else:
        sizes = {"tp": 2} if case.feature in ("split_gather", "ring") else {"sp": 2}
        choice = ModelChoice(model_type=case.model_type)
        layout = Layout(**sizes, sequence=case.feature)
    with watched(case.feature) as was_used:
        try:
            report = parity(choice, layout)
        except ValueError as error:
            return str(error), None, False
        return None, report.departure, was_used()


@contextmanager
def watched(feature: str) -> Iterator[Callable[[], bool]]:
    """Yield a function that reports if a feature was used."""
    if feature == "xFormers":
        with installed_xformers() as attention:
            yield lambda: attention.call_count > 0
    elif feature == "flash attention":
        functional = torch.nn.functional
        sdpa = mock.Mock(wraps=functional.scaled_dot_product_attention)
        with mock.patch.object(functional, "scaled_dot_product_attention", sdpa):
            yield lambda: sdpa.call_count > 0
    elif feature == "fused norm":
        with recorded("fuse_norms") as records:
            yield lambda: bool(records[0][0])
    elif feature == "fused operators":
        torch._dynamo.reset()  # graphs of previous rows
        with recorded("compile_elementwise") as records:
            yield lambda: bool(records[0])
    else:
        yield lambda: True


@contextmanager
def recorded(name: str) -> Iterator[list[Any]]:
    """Record the results of a function of `fused`."""
    records: list[Any] = []
    original = getattr(fused, name)

    def recorded(*args: Any) -> Any:
        records.append(original(*args))
        return records[-1]

    with mock.patch.object(fused, name, recorded):
        yield records
