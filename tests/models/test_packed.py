"""Packed texts in one process have the loss of the plain call. Under layouts they are rows of the contract."""

from typing import Any

from echelon import Booster, HybridParallelPlugin
from echelon.verify.batch import loss_of
from echelon.verify.models import ModelChoice
from echelon.verify.parity import make_optimizer

from ..contract.variant_rows import packed
from ..pool import Pool

# What a user says of the cache: nothing, in the config, in the call.
CACHES: dict[str, tuple[dict[str, object], dict[str, Any]]] = {
    "as by default": ({}, {}),
    "none in the config": ({"use_cache": False}, {}),
    "none in the call": ({}, {"use_cache": False}),
}


def test_one_process_gives_the_loss_of_the_plain_call(pool: Pool) -> None:
    pool.run(1, compare_calls)


def compare_calls() -> None:
    choice = ModelChoice(model_type="llama")
    model, batch = choice.build(), packed(choice, num_samples=3, seed=0)
    expected = {cache: model(**batch, **given).loss.item() for cache, (_, given) in CACHES.items()}
    assert expected["as by default"] != expected["none in the call"]
    booster = Booster(plugin=HybridParallelPlugin(precision="fp32", num_microbatches=1))
    boosted, optimizer, *_ = booster.boost(model, make_optimizer(model))
    for cache, (_, given) in CACHES.items():
        assert boosted(**batch, **given).loss.item() == expected[cache]
        found = booster.execute_pipeline(
            iter([batch | given]), boosted, loss_of, optimizer, return_outputs=True
        )
        assert float(found["loss"]) == expected[cache]
        assert found["outputs"].past_key_values is None
