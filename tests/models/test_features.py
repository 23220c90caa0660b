"""Every model type that has a table with every fused kernel, under tp2 beside one process that has none of them.

Some rows are quick, the others are `slow`. Lazy initialization is tests/checkpoint.
"""

from contextlib import ExitStack
from dataclasses import dataclass
from typing import Any
from unittest import mock

import pytest
import torch
from torch import nn
from transformers import CONFIG_MAPPING

from echelon.shardformer import fused, model_types
from echelon.verify.layout import Layout
from echelon.verify.matrix import FeatureCase
from echelon.verify.models import ModelChoice
from echelon.verify.parity import parity

from ..pool import Pool
from .stand_ins import installed_xformers

OPTIONS = {
    "flash attention": "enable_flash_attention",
    "xFormers": "enable_xformers",
    "fused operators": "enable_jit_fused",
    "fused norm": "enable_fused_normalization",
}
# Model types whose own code computes attention, and no other.
OWN_ATTENTION = {"bloom", "gemma2", "gpt_neo", "gptj", "swinv2"}
# Those that choose between their own and sdpa when they are built.
BUILT_ATTENTION = {"falcon", "sam", "sam_vision_model"}
REFUSED = {
    "flash attention": OWN_ATTENTION,
    "xFormers": OWN_ATTENTION | BUILT_ATTENTION,
}
# Those without biases in front of activations, and without dropout.
NOTHING_TO_COMPILE = {
    *(
        "cohere",
        "cohere2",
        "deepseek_v3",
        "gemma2",
        "gemma3_text",
        "glm",
        "glm4",
        "granite",
        "llama",
        "mistral",
    ),
    *("mixtral", "olmo2", "qwen2", "qwen2_moe", "qwen3", "qwen3_moe"),
}
NOTHING = (
    "no bias in front of an activation and no sum behind a dropout, so nothing is compiled, which is logged"
)
QUICK = {("llama", "flash attention"), ("gemma3_text", "xFormers"), ("qwen3", "fused norm")}


@dataclass(frozen=True, kw_only=True)
class EagerChoice(ModelChoice):
    """A small model that computes attention by the plain code of transformers, where it can be told to."""

    def build(self, seed: int = 0) -> nn.Module:
        """The model; see `ModelChoice.build`."""
        model: Any = super().build(seed)
        if self.model_type not in BUILT_ATTENTION:
            model.set_attn_implementation("eager")
        return model


def cases() -> list[object]:
    return [
        pytest.param(
            FeatureCase(model_type=model_type, feature=feature),
            id=f"{model_type}-{feature.replace(' ', '_')}",
            marks=() if (model_type, feature) in QUICK else pytest.mark.slow,
        )
        for feature in OPTIONS
        for model_type in filter(CONFIG_MAPPING.__contains__, model_types())
    ]


# torch's own: when it first compiles, and where it hides a warning that is an error here, or causes one.
@pytest.mark.filterwarnings("ignore:`torch.jit.script:DeprecationWarning")
@pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor:UserWarning")
@pytest.mark.filterwarnings("ignore:<class 'torch.autograd.function.Function'> should not:DeprecationWarning")
@pytest.mark.parametrize("case", cases())
def test_a_model_trains_as_without_the_feature(pool: Pool, case: FeatureCase, record_property: Any) -> None:
    verdicts = pool.run(2, train_with, case, timeout=240.0)
    assert len(set(verdicts)) == 1, "ranks disagree on the verdict"
    refusal, departure, was_used = verdicts[0]
    assert (refusal is not None) == (case.model_type in REFUSED.get(case.feature, ()))
    if refusal is not None:
        reasons = [line for line in refusal.splitlines() if OPTIONS[case.feature] in line]
        assert reasons
        return record_property("refused", "; ".join(line.partition(": ")[2] for line in reasons))
    assert departure is None
    has_nothing = case.feature == "fused operators" and case.model_type in NOTHING_TO_COMPILE
    assert was_used != has_nothing
    if has_nothing:
        record_property("refused", NOTHING)


def train_with(case: FeatureCase) -> tuple[str | None, str | None, bool]:
    """Why it is refused, what departs, and whether the feature did anything."""
    choice = EagerChoice(model_type=case.model_type)
    layout = Layout(tp=2, options=(OPTIONS[case.feature],))
    with ExitStack() as stack:
        uses = _uses(case.feature, stack)
        try:
            report = parity(choice, layout)
        except ValueError as error:
            return str(error), None, False
        return None, report.departure, uses()


def _uses(feature: str, stack: ExitStack) -> Any:
    """What tells, in the end, whether a feature was used."""
    if feature == "xFormers":
        attention = stack.enter_context(installed_xformers())
        return lambda: attention.call_count > 0
    if feature == "flash attention":
        functional = torch.nn.functional
        sdpa = mock.Mock(wraps=functional.scaled_dot_product_attention)
        stack.enter_context(mock.patch.object(functional, "scaled_dot_product_attention", sdpa))
        return lambda: sdpa.call_count > 0
    name = "fuse_norms" if feature == "fused norm" else "compile_elementwise"
    found: list[Any] = []
    original = getattr(fused, name)

    def recorded(*args: Any) -> Any:
        found.append(original(*args))
        return found[-1]

    stack.enter_context(mock.patch.object(fused, name, recorded))
    if feature == "fused norm":
        return lambda: bool(found[0].fused or found[0].native)
    torch._dynamo.reset()  # of rows before
    return lambda: bool(found[0])
