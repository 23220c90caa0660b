"""The auxiliary loss of mixtures in direct calls and under refusals; parity rows are in tests/contract."""

import torch
import torch.distributed as dist

from echelon.verify.batch import make_batch
from echelon.verify.models import ModelChoice

from ..pool import Pool
from .training import hybrid, sgd

MIXTRAL = ModelChoice(model_type="mixtral", num_layers=2, settings=(("output_router_logits", True),))


def directly_called() -> tuple[float, float]:
    """Return the distances of loss and router gradients by `booster.backward` from one process."""
    booster, plain, model = hybrid(), MIXTRAL.build(), MIXTRAL.build()
    batch = make_batch(MIXTRAL, num_samples=6, seed=3)
    wanted = plain(**batch).aux_loss
    wanted.backward()
    boosted, optimizer, *_ = booster.boost(model, sgd(model))
    rank, size = booster.plugin.data_rank
    loss = boosted(**{name: each.tensor_split([2])[rank] for name, each in batch.items()}).aux_loss
    booster.backward(loss, optimizer)
    optimizer.reduce_gradients()
    name = "model.layers.1.mlp.gate.weight"
    found, expected = optimizer.gradients()[name], plain.get_parameter(name).grad
    assert size == 2 and expected is not None
    return abs(float(loss.detach() / wanted.detach()) - 1), float((found - expected).norm() / expected.norm())


def test_direct_calls_have_the_loss_of_all_ranks(pool: Pool) -> None:
    for of_loss, of_gradients in pool.run(2, directly_called):
        assert of_loss < 1e-6 and of_gradients < 1e-5


def evaluated_alone() -> float:
    """Return the distance of a call without gradients on one rank from the plain model's."""
    plain, model = MIXTRAL.build(), MIXTRAL.build()
    hybrid().boost(model, sgd(model))
    if dist.get_rank() == 1:
        return 0.0
    batch = make_batch(MIXTRAL, num_samples=3, seed=3)
    with torch.no_grad():
        return abs(float(model(**batch).aux_loss / plain(**batch).aux_loss) - 1)


def test_calls_without_gradients_compute_their_own_tokens(pool: Pool) -> None:
    assert max(pool.run(2, evaluated_alone)) < 1e-6
