"""The reference knows when the loss of a microbatch is one mean. No processes."""

from typing import Any

import pytest
import torch
from torch import Tensor

from echelon.verify.batch import loss_of, make_batch
from echelon.verify.model_choice import ModelChoice
from echelon.verify.parity import make_optimizer
from echelon.verify.reference import is_one_mean, train

BERT = ModelChoice(model_type="bert", num_layers=1)
LLAMA = ModelChoice(model_type="llama", num_layers=1)
AUXILIARY = ModelChoice(model_type="mixtral", num_layers=1, settings=(("output_router_logits", True),))


@pytest.mark.parametrize(
    ("choice", "further", "expected"),
    [
        (BERT, {}, True),
        (ModelChoice(model_type="bert", head="pretraining", num_layers=1), {}, False),
        (ModelChoice(model_type="electra", head="pretraining", num_layers=1), {}, True),
        (ModelChoice(model_type="wav2vec2", num_layers=1), {}, False),
        (LLAMA, {}, True),
        (LLAMA, {"num_items_in_batch": 40}, False),
        (AUXILIARY, {}, False),
    ],
    ids=str,
)
def test_sums_and_losses_of_several_terms_are_not_one_mean(
    choice: ModelChoice, further: dict[str, Any], expected: bool
) -> None:
    batch = make_batch(choice, num_samples=3, seed=0) | further
    assert is_one_mean(choice.build(), batch, loss_of) is expected


def halves(outputs: Any, inputs: Any) -> tuple[Tensor, Tensor]:
    """Return the sum of a criterion that counts every second sample."""
    count = torch.tensor(len(inputs["labels"]) / 2)
    return outputs.loss * count, count


# Connectionist temporal classification: a sum by default.
SPEECH = ModelChoice(model_type="wav2vec2", num_layers=1)


@pytest.mark.parametrize(
    ("choice", "criterion", "weigh"),
    [
        (BERT, halves, None),
        (BERT, halves, lambda *_: 1.0),
        (SPEECH, loss_of, None),
        (SPEECH, loss_of, lambda *_: 3.0),
    ],
    ids=["weighed, at once", "weighed, in turn", "sums, at once", "sums, in turn"],
)
def test_criterions_weights_and_sums_count_at_once_and_one_by_one(
    choice: ModelChoice, criterion: Any, weigh: Any
) -> None:
    batch = make_batch(choice, num_samples=5, seed=0)
    microbatches = [
        {name: tensor[rows] for name, tensor in batch.items()} for rows in (slice(2), slice(2, 5))
    ]
    (record,) = train(
        model := choice.build(),
        [[microbatches]],
        make_optimizers=lambda model: [make_optimizer(model)],
        criterion=criterion,
        dtypes=[torch.float32],
        weigh=weigh,
    )
    loss = model(**batch).loss
    loss.backward()
    assert record.loss == pytest.approx(loss.item(), rel=1e-6)
    for name, parameter in model.named_parameters():
        if parameter.grad is not None:
            torch.testing.assert_close(record.gradients[name], parameter.grad)


def test_gradients_are_clipped_by_an_exact_norm() -> None:
    torch.manual_seed(0)
    model = torch.nn.Linear(2**21, 1, bias=False)  # torch's float32 norm of its gradient is off by 1e-6
    inputs = torch.rand(1, 2**21) + 0.5
    (record,) = train(
        model,
        [[[{"input": inputs}]]],
        make_optimizers=lambda model: [torch.optim.SGD(model.parameters(), lr=1.0)],
        criterion=lambda outputs, _: outputs.sum(),
        dtypes=[torch.float32],
        max_norm=1000.0,
    )
    exact = inputs.double() * (1000.0 / inputs.double().norm())
    update = (model.weight.detach() - record.weights["weight"]).double()
    assert float((update - exact).abs().max()) < 3e-7
