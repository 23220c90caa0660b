"""Choices of types that general rules build: each setting is kept, or refused by its name."""

from typing import Any

import pytest

from echelon.verify.model_choice import ModelChoice


def test_a_model_of_general_rules_has_the_chosen_settings() -> None:
    settings = (("hidden_size", 32), ("ffn_dim", 1000))
    model: Any = ModelChoice(model_type="xglm", num_layers=2, tied=True, settings=settings).build()
    assert len(model.model.layers) == 2
    assert (model.config.d_model, model.model.layers[0].fc1.out_features) == (32, 1000)
    assert model.lm_head.weight is model.model.embed_tokens.weight


@pytest.mark.parametrize(
    ("choice", "words"),
    [
        (
            ModelChoice(model_type="xglm", num_layers=9),
            "layers=9 of a 'xglm', which is built by general rules",
        ),
        (ModelChoice(model_type="llava", num_layers=2), "its config has no number of layers"),
        (ModelChoice(model_type="xglm", settings=(("width", 3),)), "the config of a 'xglm' has no width"),
        (ModelChoice(model_type="clip_text_model", tied=True), "has no tie_word_embeddings"),
        (ModelChoice(model_type="xglm", settings=(("use_cache", True),)), "has use_cache=False"),
    ],
)
def test_a_setting_that_general_rules_do_not_take_is_refused_by_its_name(
    choice: ModelChoice, words: str
) -> None:
    (error,) = choice.errors()
    assert words in error
    with pytest.raises(ValueError, match=r"has (no |use_cache)|layers="):
        choice.build()
