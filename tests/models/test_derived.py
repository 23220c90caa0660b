"""Model types without a table, by the plans that transformers has for them, beside one process."""

from dataclasses import replace

import pytest
import transformers
from transformers import CONFIG_MAPPING, MixtralConfig

from echelon.shardformer import Policy, policy_for, table_for
from echelon.shardformer.derived import derived_table
from echelon.shardformer.sharder import split_errors
from echelon.verify.layout import Layout
from echelon.verify.models import ModelChoice
from echelon.verify.parity import parity

from ..pool import Pool

LAYOUTS = (Layout(tp=2), Layout(pp=2), Layout(tp=2, pp=2), Layout(tp=2, dp=2, zero=1))
QUICK_LAYOUT = Layout(tp=2, pp=2)
# Experts, latent attention, and gathered projections beside plain ones; one that older releases know too.
_NEWEST = ("exaone_moe", "minicpm3", "qwen3_5_text")
QUICK = tuple(filter(CONFIG_MAPPING.__contains__, _NEWEST[:2])) or ("apertus",)  # the last takes 11 s
TYPES = (
    *_NEWEST,
    "apertus",
    "arcee",
    "cwm",
    "deepseek_v2",
    "ernie4_5",
    "ernie4_5_moe",
    "exaone4",
    "gemma",
    "glm",
    "glm4",
    "glm4_moe",
    "granite_swa",
    "helium",
    "hy_v3",
    "hyperclovax",
    "internlm3",
    "iquestcoder",
    "jais2",
    "laguna",
    "mellum",
    "ministral",
    "ministral3",
    "olmo",
)
# What of a type with a table must be derived alike.
WRITTEN = ("gemma2", "granite", "llama", "mistral", "mixtral", "qwen2", "qwen3")
# Older releases have other plans for experts, which contradict each other from model to model and are refused, and
# layers that return tuples.
ARE_PLANS_OLDER = "moe_tp_experts" not in MixtralConfig.base_model_tp_plan.values()


def known(model_type: str) -> tuple[pytest.MarkDecorator, ...]:
    """A mark that passes over a model type with the reason, where the installed transformers has no plan for it."""
    release = f"transformers {transformers.__version__}"
    if model_type not in CONFIG_MAPPING:
        return (pytest.mark.skip(reason=f"{release} knows no {model_type}"),)
    plan = CONFIG_MAPPING[model_type].base_model_tp_plan or {}
    if ARE_PLANS_OLDER and "gather" in plan.values():
        return (pytest.mark.skip(reason=f"{release} has an older plan for the experts of {model_type}"),)
    return ()


def rows() -> list[object]:
    """Model and layout of every row."""
    return [
        pytest.param(
            ModelChoice(model_type=name),
            layout,
            id=f"{name}-{layout}",
            marks=(
                *known(name),
                *(() if name in QUICK and layout == QUICK_LAYOUT else (pytest.mark.slow,)),
            ),
        )
        for name in TYPES
        if table_for(name) is None
        for layout in LAYOUTS
    ]


@pytest.mark.parametrize(("choice", "layout"), rows())
def test_a_model_without_a_table_trains_as_one_process_does(
    pool: Pool, choice: ModelChoice, layout: Layout
) -> None:
    reports = pool.run(layout.world_size, parity, choice, layout, timeout=120.0)
    assert len({report.departure for report in reports}) == 1, "ranks disagree on the verdict"
    assert reports[0].departure is None


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
