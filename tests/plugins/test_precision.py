"""The default precision, and the line that logs it."""

import warnings

import pytest
import torch

from echelon.zero.precision import default_precision

from ..log_lines import logged
from ..pool import Pool
from .training import SMALL, boosted, booster_of, sgd

PLUGINS = ("hybrid", "zero", "fsdp", "ddp")


def said_at_boost(kind: str, precision: str | None) -> tuple[str, list[str], list[str]]:
    """Return the chosen precision, and the log lines and warnings of two boosts by one plugin."""
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        booster = booster_of(kind, precision=precision)
        with logged() as lines:
            for _ in range(2):
                boosted(booster, SMALL, sgd)
    texts = [str(warning.message) for warning in caught if warning.category is UserWarning]
    return booster.plugin.precision, lines, texts


@pytest.mark.parametrize("kind", PLUGINS)
def test_the_default_precision_is_the_devices_and_logged_once_on_one_rank(pool: Pool, kind: str) -> None:
    first, second = pool.run(2, said_at_boost, kind, None)
    option = "mixed_precision" if kind == "ddp" else "precision"
    assert first[0] == second[0] == "fp32"
    assert len(first[1]) == 1 and f"{option}='fp32'" in first[1][0], first
    assert first[2] == second[1] == second[2] == []


@pytest.mark.parametrize("kind", PLUGINS)
def test_fp16_on_a_cpu_warns_once_on_one_rank_and_a_given_precision_is_not_logged(
    pool: Pool, kind: str
) -> None:
    (chosen, lines, caught), second = pool.run(2, said_at_boost, kind, "fp16")
    assert (chosen, lines) == ("fp16", [])
    assert len(caught) == 1 and "fp16 on a CPU is 10 to 20 times slower" in caught[0], caught
    assert second == ("fp16", [], [])


@pytest.mark.parametrize(("has_bf16", "expected"), [(True, "bf16"), (False, "fp16")])
def test_on_a_gpu_it_is_bf16_where_it_is_not_emulated(
    monkeypatch: pytest.MonkeyPatch, has_bf16: bool, expected: str
) -> None:
    monkeypatch.setattr(
        torch.cuda, "is_bf16_supported", lambda including_emulation=True: including_emulation or has_bf16
    )
    assert default_precision(torch.device("cuda", 0)) == expected
