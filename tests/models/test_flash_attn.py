"""Every model type that has a table with a stand-in for the package flash-attn, compared with one process.

The stand-in has the package's signatures and also computes in float32, so tolerances are as small as elsewhere. Some
rows are quick, the others are `slow`.
"""

import pytest
from transformers import CONFIG_MAPPING

from echelon.shardformer import model_types
from echelon.shardformer.layers.attention_kernels import FLASH_ATTENTION_2, SDPA, attention_errors
from echelon.verify.batch import make_batch
from echelon.verify.layout_choice import Layout
from echelon.verify.model_choice import ModelChoice
from echelon.verify.parity import parity

from ..contract.models import OWN_ATTENTION, EagerChoice
from ..pool import Pool
from ..slow import slow, slow_except
from .stand_ins import NO_FLASH_ATTN, installed_flash_attn

pytestmark = pytest.mark.skipif(bool(NO_FLASH_ATTN), reason=NO_FLASH_ATTN)
OPTIONS = ("enable_flash_attention",)
# Model types whose classes do not support it, with the needle of their refusal.
UNKNOWN = dict.fromkeys(
    (
        *("beit", "blip-2", "bloom", "mt5", "sam", "sam_vision_model", "swin", "swinv2", "t5", "umt5"),
        *("blip_2_vision_model",),
    ),
    "cannot compute attention with flash_attention_2",
)
# Model types whose result with it differs, with the needle of their refusal.
DEPARTING = {
    **dict.fromkeys(("bart", "marian", "mbart", "pegasus"), "the decoder's padding"),
    "gemma3": "the tokens of an image",
}
# Model types that choose their attention at construction, so one process also uses the stand-in; one of them with
# layers that attend to all tokens.
BUILT: dict[str, dict[str, object]] = {
    "falcon": {},
    "gpt_neo": {"attention_types": [[["global"], 4]]},
    **{model_type: {} for model_type in OWN_ATTENTION & {"gptj"}},
}
REFUSED = UNKNOWN | DEPARTING | dict.fromkeys(BUILT, "build it with attn_implementation='flash_attention_2'")
QUICK = ("llama", "bert", "bart")

GROUPED = {"num_key_value_heads": 2}
PADDED_HEADS = {"num_attention_heads": 6, "num_key_value_heads": 2, "hidden_size": 48, "head_dim": 8}


def with_settings(
    model_type: str, *, base: type[ModelChoice] = EagerChoice, **settings: object
) -> ModelChoice:
    return base(model_type=model_type, settings=tuple(settings.items()))


@pytest.mark.parametrize("model_type", slow_except(QUICK, filter(CONFIG_MAPPING.__contains__, model_types())))
def test_a_model_trains_under_tp2_as_with_its_plain_code_or_is_refused(pool: Pool, model_type: str) -> None:
    choice, layout = EagerChoice(model_type=model_type), Layout(tp=2, options=OPTIONS)
    if model_type in REFUSED:
        with pytest.raises(ValueError, match=f"enable_flash_attention: .*{REFUSED[model_type]}"):
            pool.run(2, train_with_flash_attn, choice, layout)
    else:
        check(pool, choice, layout)


@pytest.mark.parametrize("model_type", slow_except(["falcon"], BUILT))
def test_a_model_that_is_built_with_it_trains_under_tp2_as_in_one_process(
    pool: Pool, model_type: str
) -> None:
    settings = (("attn_implementation", "flash_attention_2"), *BUILT[model_type].items())
    check(pool, ModelChoice(model_type=model_type, settings=settings), Layout(tp=2, options=OPTIONS))


OTHER_LAYOUTS = (
    (with_settings("llama"), Layout(sp=2, sequence="all_to_all", options=OPTIONS)),  # this row is quick
    (with_settings("bert"), Layout(sp=2, sequence="all_to_all", options=OPTIONS)),
    (with_settings("llama", **GROUPED), Layout(tp=4, options=OPTIONS)),  # two ranks share a key-value head
    (with_settings("llama", **PADDED_HEADS), Layout(tp=4, options=OPTIONS)),
    (with_settings("gpt2", n_inner=48), Layout(tp=3, options=OPTIONS)),
    (with_settings("llama"), Layout(tp=2, pp=2, recompute=0.5, options=OPTIONS)),
    (with_settings("bert"), Layout(tp=2, sequence="split_gather", options=OPTIONS)),
    (with_settings("llama"), Layout(tp=2, precision="bf16", options=OPTIONS)),
    (with_settings("bert"), Layout(tp=2, precision="fp16", options=OPTIONS)),
)


@pytest.mark.parametrize(
    ("choice", "layout"),
    [OTHER_LAYOUTS[0], *slow(*OTHER_LAYOUTS[1:])],
    ids=lambda value: value.model_type if isinstance(value, ModelChoice) else str(value),
)
def test_a_model_trains_with_it_in_other_layouts(pool: Pool, choice: ModelChoice, layout: Layout) -> None:
    check(pool, choice, layout)


def check(pool: Pool, choice: ModelChoice, layout: Layout) -> None:
    runs = pool.run(layout.world_size, train_with_flash_attn, choice, layout, timeout=120.0)
    assert all(calls for _, calls in runs), "a rank did not call it"
    assert {departure for departure, _ in runs} == {None}


def train_with_flash_attn(choice: ModelChoice, layout: Layout) -> tuple[str | None, int]:
    """Return the difference, and this rank's number of calls of the package."""
    with installed_flash_attn() as called:
        return parity(choice, layout).departure, len(called)


@pytest.mark.parametrize(
    ("choice", "words"),
    [
        (ModelChoice(model_type="bart"), "applies the decoder's padding to the encoder's states"),
        (ModelChoice(model_type="gemma3"), "the tokens of an image see later ones"),
        (ModelChoice(model_type="falcon", settings=(("alibi", True),)), "adds ALiBi slopes"),
        (ModelChoice(model_type="gpt_neo"), "has layers with a local window"),
    ],
    ids=["encoder and decoder", "image tokens", "slopes", "windows"],
)
def test_a_model_whose_mask_would_be_lost_is_refused(choice: ModelChoice, words: str) -> None:
    model = choice.build_on_meta()
    errors = attention_errors(model, FLASH_ATTENTION_2, "enable_flash_attention")
    assert any(words in error and "leave enable_flash_attention out" in error for error in errors)
    assert not any(words in error for error in attention_errors(model, SDPA, "enable_flash_attention"))


@pytest.mark.parametrize("model_type", ["bart", "gemma3", "gpt_neo"])
def test_its_mask_is_lost_in_one_process(model_type: str) -> None:
    """If this fails, transformers has fixed it, and the model need not be refused."""
    choice = ModelChoice(model_type=model_type)
    if not choice.build_on_meta()._supports_flash_attn:
        pytest.skip("this release refuses flash attention for it")
    batch = make_batch(choice, num_samples=3, seed=1)
    with installed_flash_attn():
        expected, loss = (
            with_settings(model_type, attn_implementation=kernel, base=ModelChoice)
            .build()
            .eval()(**batch)
            .loss
            for kernel in ("eager", FLASH_ATTENTION_2)
        )
    assert abs((loss - expected).item()) > 1e-5
