"""Every model type that has a table with its sequences spread in every mode, over two ranks, beside one process.

What is refused is told with its reason. Some rows are quick, the others are `slow`.
"""

from typing import Any

import pytest
from transformers import CONFIG_MAPPING
from transformers.models.beit import modeling_beit

from echelon.shardformer import model_types
from echelon.shardformer.sequence.config import MODES, TENSOR_MODES
from echelon.verify.layout import Layout
from echelon.verify.matrix import FeatureCase
from echelon.verify.models import ModelChoice
from echelon.verify.parity import parity

from ..pool import Pool

# Layers that work on windows of images, or run several times, or know of all positions besides.
NEVER = {"albert", "sam", "sam_vision_model", "swin", "swinv2"}
# So does BEiT's since transformers 5.9; before that it is told the image's size.
KNOWS_POSITIONS = {"beit"} if hasattr(modeling_beit, "BeitMLP") else set()
# Attention to another sequence, and attention that computes by the model's own code alone.
CROSS = {"bart", "blip-2", "marian", "mbart", "mt5", "pegasus", "t5", "umt5", "whisper"}
OWN_ATTENTION = {"bloom", "falcon", "gpt_neo", "gptj"}
REFUSED = {
    "split_gather": NEVER | KNOWS_POSITIONS,
    "ring": NEVER | KNOWS_POSITIONS,
    "all_to_all": NEVER | CROSS | OWN_ATTENTION | {"beit"},
    "ring_attn": NEVER | CROSS | OWN_ATTENTION | {"beit"},
}
QUICK = {("mixtral", "split_gather"), ("t5", "ring"), ("qwen3", "all_to_all"), ("vit", "ring_attn")}


def cases() -> list[object]:
    return [
        pytest.param(
            FeatureCase(model_type=model_type, feature=mode),
            id=f"{model_type}-{mode}",
            marks=() if (model_type, mode) in QUICK else pytest.mark.slow,
        )
        for mode in MODES
        for model_type in filter(CONFIG_MAPPING.__contains__, model_types())
    ]


@pytest.mark.parametrize("case", cases())
def test_a_model_trains_as_with_whole_sequences(pool: Pool, case: FeatureCase, record_property: Any) -> None:
    verdicts = pool.run(2, train_with, case)
    assert len(set(verdicts)) == 1, "ranks disagree on the verdict"
    refusal, departure = verdicts[0]
    assert departure is None
    assert (refusal is not None) == (case.model_type in REFUSED[case.feature]), refusal
    if refusal is not None:
        reasons = [line for line in refusal.splitlines() if "sequence_parallelism_mode=" in line]
        assert reasons
        record_property("refused", reasons[0].partition(": ")[2])


def train_with(case: FeatureCase) -> tuple[str | None, str | None]:
    """Why it is refused, and what departs."""
    axis = {"tp": 2} if case.feature in TENSOR_MODES else {"sp": 2}
    try:
        return None, parity(
            ModelChoice(model_type=case.model_type), Layout(**axis, sequence=case.feature)
        ).departure
    except ValueError as error:
        return str(error), None
