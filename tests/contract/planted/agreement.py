"""Faults in the agreement of ranks on a step."""

from echelon.verify.layout_choice import Layout
from echelon.verify.model_choice import ModelChoice

from ...plugins.test_step_agreement import depart
from ..mutations import around, fault, made_from

LLAMA = ModelChoice(model_type="llama", num_layers=2)
NORM = "zero.reduced_gradients:norm_over_all_ranks"


def departing_batch() -> str | None:
    """Check that a batch that differs in a warm step is named, and that it changes nothing."""
    error, is_unchanged = depart("batch", {"tp_size": 2})
    return None if "rank(s) [1]" in error and is_unchanged else f"not named: {error or 'no error'}"


# fmt: off
FAULTS = {
    "the codes of a batch are not counted": fault("cluster.agreement:Agreement.checksum_term",
        made_from(lambda share: property(lambda self: 0.0)), departing_batch, notice="^not named: "),
    "the code of a replica's first rank is not subtracted": fault("cluster.agreement:Agreement.checksum_term",
        made_from(lambda share: property(lambda self: float(self._batch_code))), LLAMA, Layout(tp=2), num_steps=5,
        notice="AssertionError: checksums differ"),
    "the codes of batches are not reduced with the norm": fault(NORM,
        around(lambda norm, *args, **kwargs: norm(*args, **{**kwargs, "checksum_term": 0.0})), departing_batch,
        notice="^not named: ", quick=True),
}
# fmt: on
