import pytest
import torch
import torch.distributed as dist
from torch import nn

from echelon.zero.precision import DynamicScaler, PrecisionConfig

from ..pool import Pool
from .helpers import assert_same_bits, shard, weights_of


def scaler(**arguments: float) -> DynamicScaler:
    return DynamicScaler(PrecisionConfig(precision="fp16", **arguments))


# Steps: - overflows, + does not.
SCALES: dict[str, tuple[dict[str, float], str, list[float]]] = {
    "shrinks at the hysteresis and every overflow after it": ({}, "-+--", [64, 64, 32, 16]),
    "grows after an interval, which resets the hysteresis": (
        {"growth_interval": 3, "max_scale": 128},
        "-++-+++-++++++",
        [64, 64, 64, 32, 32, 32, 64, 64, 64, 64, 128, 128, 128, 128],
    ),
    "one overflow at the minimum is no error": ({"min_scale": 64}, "-+-+-+", [64] * 6),
}


@pytest.mark.parametrize("name", SCALES)
def test_the_scale_follows_overflows(name: str) -> None:
    settings, steps, expected = SCALES[name]
    fp16, scales = scaler(**{"initial_scale": 64, "hysteresis": 2, **settings}), []
    for step in steps:
        fp16.update(step == "-")
        scales.append(fp16.scale)
    assert scales == expected


def test_overflow_in_a_row_at_the_minimum_is_an_error_with_advice() -> None:
    fp16 = scaler(initial_scale=2, hysteresis=2)
    fp16.update(True)
    fp16.update(True)
    assert fp16.scale == 1
    with pytest.raises(RuntimeError, match=r"min_scale=1.*precision='bf16'"):
        fp16.update(True)


def test_scaler_continues_from_its_state() -> None:
    arguments = {"initial_scale": 64, "hysteresis": 2, "growth_interval": 3}
    fp16, other = scaler(**arguments), scaler(**arguments)
    for overflow in (True, False, False):
        fp16.update(overflow)
    other.load_state_dict(fp16.state_dict())
    for loss_scaler in (fp16, other):
        loss_scaler.update(False)
        loss_scaler.update(True)
    assert other.state_dict() == fp16.state_dict()


def test_a_model_beyond_fp16_is_an_error_on_every_rank_at_the_minimum_scale(pool: Pool) -> None:
    by_rank = pool.run(2, train_beyond_fp16)
    assert by_rank[0] == by_rank[1]
    text, skipped, scale = by_rank[0]
    # The scale falls from 64 to 1 in six overflows after the first; hysteresis 2.
    assert (skipped, scale) == (8, 1.0)
    assert "min_scale=1" in text and "8 steps in a row" in text and "precision='bf16'" in text


def train_beyond_fp16() -> tuple[str, int, float]:
    """Return the error, the skipped steps and the scale; only rank 0 has gradients beyond fp16."""
    torch.manual_seed(0)
    model = nn.Linear(8, 8, bias=False)
    with torch.no_grad():
        model.weight.mul_(1e-3)
    optimizer = shard(model, precision="fp16")
    before, size = weights_of(model), 500.0 if dist.get_rank() == 0 else 1.0
    for _ in range(20):
        # The loss is small and finite. A weight's gradient is size * 300: 150,000 is beyond fp16 at any scale.
        loss = model(torch.full((1, 8), size, dtype=torch.float16)).float().sum() * 300
        assert loss.isfinite()
        try:
            optimizer.backward(loss)
            optimizer.step()
        except RuntimeError as error:
            assert_same_bits(weights_of(model), before)
            return str(error), optimizer.skipped_steps, optimizer.loss_scale
        optimizer.zero_grad()
    return "", optimizer.skipped_steps, optimizer.loss_scale
