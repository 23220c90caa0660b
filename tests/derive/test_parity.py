"""Models without a table train in derived pipeline stages as in one process."""

import pytest

from echelon.verify.layout_choice import Layout
from echelon.verify.model_choice import ModelChoice
from echelon.verify.parity import parity

from ..pool import Pool
from ..slow import slow


@pytest.mark.filterwarnings("ignore:Version v4.12.0:FutureWarning")  # of encoder-decoder's forward
@pytest.mark.parametrize(
    ("model_type", "layout"),
    [
        ("mamba", Layout(pp=2)),  # layers without attention
        *slow(
            ("blip", Layout(pp=2)),  # states of an encoder travel with the hidden states
            ("qwen2_5_vl", Layout(pp=3)),  # the vision model's layers are cut, too
            ("glm_ocr", Layout(pp=2, schedule="interleaved", chunks=3, microbatches=4)),
            ("idefics3", Layout(tp=2, pp=2)),  # the split is of one of the two lists
            ("qwen3_vl", Layout(pp=3)),  # computes between layers, with features of several vision layers
            ("hy_v4", Layout(pp=2)),  # layers pass on more than hidden states
            ("olmoe", Layout(pp=2, dp=2, zero=1)),
            ("m2m_100", Layout(pp=2, precision="bf16")),  # tables of positions
            ("ctrl", Layout(pp=2)),  # reads the embedding's weight outside of the module
            ("encoder-decoder", Layout(pp=2)),  # an encoder's pooler, which nothing reads, gets no gradient
            ("deberta", Layout(pp=2, schedule="interleaved", chunks=2, microbatches=4)),
        ),
    ],
)
def test_a_derived_pipeline_trains_as_one_process_does(pool: Pool, model_type: str, layout: Layout) -> None:
    reports = pool.run(layout.world_size, parity, ModelChoice(model_type=model_type), layout, timeout=120.0)
    assert [report.departure for report in reports] == [None] * layout.world_size
