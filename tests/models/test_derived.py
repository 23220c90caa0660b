"""Tables derived from the plans of transformers. That they train as one process does is contract/matrix_rows.py."""

from dataclasses import replace

import pytest
import transformers
from transformers import CONFIG_MAPPING

from echelon.shardformer import Policy, policy_for, table_for
from echelon.shardformer.derived import derived_table
from echelon.shardformer.sharder import split_errors
from echelon.verify.models import ModelChoice

from ..contract.matrix_rows import ARE_PLANS_OLDER, known

# What of a type with a table must be derived alike.
WRITTEN = ("gemma2", "granite", "llama", "mistral", "mixtral", "qwen2", "qwen3")


@pytest.mark.parametrize("model_type", WRITTEN)
def test_the_derived_table_of_a_type_is_the_written_one(model_type: str) -> None:
    derived = derived_table(ModelChoice(model_type=model_type).build_on_meta())
    written = table_for(model_type)
    assert written is not None
    if ARE_PLANS_OLDER and model_type in ("granite", "mixtral"):
        pytest.skip(f"transformers {transformers.__version__} has an older plan or layer for {model_type}")
    # A plan is for a whole family, so all that it names may be missing somewhere.
    assert replace(derived, optional=written.optional) == written


@pytest.mark.parametrize(
    ("model_type", "sizes", "reasons"),
    [
        (
            "doge",
            {"tp_size": 2},
            ["self_attn.A is whole among split", "'self_attn.dt_proj', 'self_attn.o_proj'"],
        ),
        ("longcat_flash", {"tp_size": 2}, ["'moe_identity_expert', which is not known"]),
        ("glm_moe_dsa", {"num_stages": 2}, ["hands on more than hidden states", "takes prev_topk_indices"]),
        ("olmoe", {"num_stages": 2}, ["has no base_model_pp_plan"]),
        ("gpt_oss", {"tp_size": 2}, ["has no base_model_tp_plan"]),
        ("phi4_multimodal", {"num_stages": 2}, ["does not say when embed_tokens_extend runs"]),
    ],
)
def test_what_a_plan_does_not_cover_is_refused(
    model_type: str, sizes: dict[str, int], reasons: list[str]
) -> None:
    if model_type not in CONFIG_MAPPING:
        pytest.skip(f"transformers {transformers.__version__} knows no {model_type}")
    try:
        told = "\n".join(errors_of_small(model_type, **sizes))
    except ValueError as error:  # there may be no plan at all
        told = str(error)
    assert told
    assert ARE_PLANS_OLDER or all(reason in told for reason in reasons), told


@pytest.mark.parametrize(
    "model_type", [pytest.param(name, marks=known(name)) for name in ("hrm_text", "codegen")]
)
def test_a_model_without_table_and_plan_is_refused(model_type: str) -> None:
    with pytest.raises(
        ValueError, match=r"no table says how to split a .*, nor does transformers: use tp_size=1"
    ):
        policy_for_small(model_type)


def errors_of_small(model_type: str, **sizes: int) -> list[str]:
    """Why a small model without memory cannot be split so."""
    model = ModelChoice(model_type=model_type).build_on_meta()
    return split_errors(model, policy_for(model), **sizes)  # type: ignore[arg-type]


def policy_for_small(model_type: str) -> Policy:
    """The policy of a small model without memory."""
    model = ModelChoice(model_type=model_type).build_on_meta()
    policy = policy_for(model)
    policy.set_model(model)
    return policy
