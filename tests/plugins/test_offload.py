"""`cpu_offload` of the plugins: the same losses, other memory."""

from typing import Any

import pytest

from ..pool import Pool
from . import training


def refuse_offload() -> str:
    return training.refused(lambda: training.hybrid(cpu_offload="yes"))


def held(settings: dict[str, Any]) -> dict[str, int]:
    booster = training.hybrid(**settings)
    model, optimizer = training.boosted(booster)
    booster.execute_pipeline(training.share(booster, training.BERT, 0), model, training.loss_of, optimizer)
    optimizer.step()
    return dict(booster.plugin.ledger(optimizer).held.items())


@pytest.mark.parametrize(
    ("kind", "settings"),
    [
        ("hybrid", {"tp_size": 2, "zero_stage": 1}),
        ("hybrid", {"pp_size": 2, "zero_stage": 2}),
        ("zero", {"stage": 2, "precision": "bf16"}),
    ],
    ids=str,
)
def test_losses_are_those_without_offload(pool: Pool, kind: str, settings: dict[str, Any]) -> None:
    plain, offloaded = (
        pool.run(4, training.train, kind, settings | {"cpu_offload": offload}, training.LLAMA)
        for offload in (False, True)
    )
    # Offload takes AdamW's fused kernel, which rounds otherwise; in bf16 a weight's last bit may turn.
    assert offloaded[0] == pytest.approx(plain[0], rel=1e-3 if "precision" in settings else 1e-6)


def test_masters_and_states_are_on_the_cpu(pool: Pool) -> None:
    figures = pool.run(2, held, {"zero_stage": 1, "cpu_offload": True})[0]
    assert figures["masters"] == figures["states"] == 0
    assert figures["offloaded_states"] == 2 * figures["offloaded_masters"] > 0


def test_another_value_is_refused(pool: Pool) -> None:
    assert pool.run(1, refuse_offload) == ["cpu_offload='yes' must be True or False"]
