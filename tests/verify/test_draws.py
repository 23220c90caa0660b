"""Random numbers of the parity check that are equal for all samples."""

import torch
from torch.nn.functional import gumbel_softmax

from echelon.verify.draws import EqualDraws, equal_draws
from echelon.verify.model_choice import ModelChoice


def test_all_samples_draw_the_numbers_of_the_first_one() -> None:
    with EqualDraws():
        one, two = torch.rand(2, 5), torch.rand(3, 5)
        noise = torch.empty(4, 20).normal_()
        # In a function of torch that draws by itself.
        codes = gumbel_softmax(torch.zeros(3, 20))
    assert torch.equal(one, two[:2]) and torch.equal(two[0], two[2]) and len(one[0].unique()) == 5
    assert torch.equal(noise[0], noise[3]) and len(noise[0].unique()) == 20
    assert torch.equal(codes[0], codes[2]) and len(codes[0].unique()) == 20
    assert len(torch.rand(2, 5).unique()) == 10


def test_only_models_that_draw_get_equal_numbers() -> None:
    state = torch.get_rng_state()
    assert isinstance(equal_draws(ModelChoice(model_type="vit_mae")), EqualDraws)
    assert not isinstance(equal_draws(ModelChoice(model_type="smollm3")), EqualDraws)
    assert not isinstance(equal_draws(ModelChoice(model_type="llama")), EqualDraws)
    assert torch.equal(torch.get_rng_state(), state)
