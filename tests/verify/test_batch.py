"""Batches for small models have the inputs of their heads."""

import torch
from transformers import T5Config

from echelon.verify.batch import loss_of, make_batch
from echelon.verify.model_choice import ModelChoice

GEMMA3 = ModelChoice(model_type="gemma3")


def test_a_batch_of_an_encoder_decoder_has_two_lengths_and_an_untied_head_its_own_weight() -> None:
    choice = ModelChoice(model_type="t5", num_layers=1)
    batch = make_batch(choice, num_samples=7, seed=0)
    assert (batch["input_ids"].shape, batch["labels"].shape) == ((7, 13), (7, 9))
    assert (batch["labels"] == -100).any()
    assert (batch["attention_mask"] == 0).any()
    model = choice.build()
    assert (len(model.encoder.block), len(model.decoder.block)) == (1, 1)
    assert model.lm_head.weight is not model.shared.weight
    tied = ModelChoice(model_type="t5", tied=True, num_layers=1).build()
    assert tied.lm_head.weight is tied.shared.weight
    assert tied.config.scale_decoder_outputs
    # Older releases of transformers also scale before an untied head.
    untied = T5Config(tie_word_embeddings=False)
    assert model.config.scale_decoder_outputs == untied.scale_decoder_outputs


def test_image_tokens_attend_to_each_other() -> None:
    model = GEMMA3.build()
    batch = make_batch(GEMMA3, num_samples=3, seed=0)
    causal = {**batch, "token_type_ids": torch.zeros_like(batch["token_type_ids"])}
    of_places = batch["token_type_ids"] == 1
    first = of_places.cumsum(1) == 1
    moved = (model(**batch).logits - model(**causal).logits).abs().amax(-1)
    assert moved[first & of_places].min() > 1e-3  # it attends to later ones
    assert moved[(of_places.cumsum(1) == 0)].max() == 0


def test_a_loss_of_outputs_counts_numbers_and_one_number_for_each_sample() -> None:
    rows, samples = torch.randn(3, 4), torch.randn(3)
    outputs = {"rows": rows, "samples": samples, "number": torch.tensor(5.0)}
    expected = (rows * torch.arange(4.0).cos()).mean() + samples.mean() + 5
    assert torch.allclose(loss_of(outputs, None), expected)


def test_a_loss_of_outputs_leaves_out_what_has_no_gradients() -> None:
    outputs = {"rows": torch.randn(3, 4, requires_grad=True), "mask": None}
    loss = loss_of(outputs, None)
    assert torch.equal(loss_of(outputs | {"mask": torch.ones(3, 4)}, None), loss)
    assert loss.requires_grad
