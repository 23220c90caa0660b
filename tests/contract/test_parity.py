"""Models train under every layout as in one process: loss, gradients, norm, weights, loss scale, skipped steps."""

import pytest

from echelon.shardformer import table_for
from echelon.verify.layout_choice import Layout
from echelon.verify.model_choice import ModelChoice
from echelon.verify.parity import Report, parity

from ..models.chatglm import register_chatglm
from ..pool import Pool
from .matrix_rows import matrix_rows, missing
from .parity_rows import TIED_LLAMA, parity_rows
from .row import ParityRow, distinct


def run(choice: ModelChoice, layout: Layout) -> Report:
    """Compare on one rank of the pool."""
    if choice.model_type == "chatglm":  # its code comes with its checkpoints
        register_chatglm()
    return parity(choice, layout)


def _skip(reason: str) -> pytest.MarkDecorator:
    """Return a mark that skips a test if there is a reason."""
    return pytest.mark.skipif(bool(reason), reason=reason)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("choice", "layout"),
    [
        pytest.param(
            choice,
            layout,
            id=f"{choice.model_type}-{choice.head_name}{'-tied' * choice.tied}-{layout}",
            marks=_skip(missing(choice.model_type)) if table_for(choice.model_type) is None else (),
        )
        for choice, layout in dict.fromkeys(matrix_rows())
    ],
)
def test_a_row_of_the_matrix_trains_as_one_process_does(
    pool: Pool, choice: ModelChoice, layout: Layout
) -> None:
    _require_agreement(pool.run(layout.world_size, run, choice, layout, timeout=120.0))


@pytest.mark.parametrize(
    "row",
    [
        pytest.param(row, id=str(row), marks=(*[pytest.mark.slow] * (not row.quick), _skip(row.missing)))
        for row in distinct(parity_rows()).values()
    ],
)
def test_a_model_trains_as_one_process_does(pool: Pool, row: ParityRow) -> None:
    report = _require_agreement(
        pool.run(row.layout.world_size, row.run, timeout=120.0 if row.quick else 900.0)
    )
    if row.exact is not None:
        first = report.steps[0]
        assert first.measure("gradient").distance <= row.exact
        assert first.measure("loss").distance <= row.exact * first.reference_loss


@pytest.mark.slow
@pytest.mark.parametrize("layout", [Layout(tp=2, pp=2), Layout(dp=2, zero=1)], ids=str)
def test_200_steps_stay_on_the_reference_curve(pool: Pool, layout: Layout) -> None:
    row = ParityRow(choice=TIED_LLAMA, layout=layout, num_steps=200)
    report = pool.run(layout.world_size, row.run, timeout=600.0)[0]
    worst = max(abs(step.loss - step.reference_loss) / step.reference_loss for step in report.steps)
    assert worst < 1e-3


def _require_agreement(reports: list[Report]) -> Report:
    assert len({report.departure for report in reports}) == 1, "ranks disagree on the verdict"
    assert reports[0].departure is None
    return reports[0]
