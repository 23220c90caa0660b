"""Vision-language models in derived stages of both their lists of layers, with images in some texts only."""

from typing import Any

import pytest
import torch
from torch import Tensor

from echelon.derive.inputs import tensors_in
from echelon.verify.batch import loss_of

from ..plugins.training import hybrid, sgd
from ..pool import Pool
from ..slow import slow
from .copies import copy_of


def batch_of(texts: int, with_images: int) -> tuple[Any, dict[str, Tensor]]:
    """Return a model and texts, of which the first ones have an image each."""
    copy = copy_of("qwen2_5_vl")
    inputs = copy.inputs.make(samples=texts)
    ids, token = inputs["input_ids"], copy.model.config.image_token_id
    ids[with_images:] = ids[with_images:].masked_fill(ids[with_images:] == token, 5)
    grid = inputs["image_grid_thw"]
    patches = int(grid[:with_images].prod(1).sum())
    images = {"pixel_values": inputs["pixel_values"][:patches], "image_grid_thw": grid[:with_images]}
    kept = {name: inputs[name] for name in ("input_ids", "attention_mask", "labels") if name in inputs}
    return copy.model, kept | (images if with_images else {})


def trained(sizes: dict[str, Any], with_images: int, replicas: int = 1) -> dict[str, float]:
    """Return the loss of the batch, and the norm of all gradients; only the first replica has images."""
    model, batch = batch_of(4 * replicas, with_images)
    booster = hybrid(num_microbatches=4, max_norm=1.0, **sizes)
    boosted, optimizer, *_ = booster.boost(model, sgd(model), loss_of)
    rank, size = booster.plugin.data_rank
    if size > 1:
        texts = ("input_ids", "attention_mask", "labels")
        local = {name: batch[name].chunk(size)[rank] for name in texts if name in batch}
        batch = local if rank else batch | local
    loss = booster.execute_pipeline(iter([batch]), boosted, loss_of, optimizer)["loss"]
    optimizer.step()
    return {"loss": float(loss), "norm": float(optimizer.get_grad_norm())}


CUT_IN_VISION = [2, 6]


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("layers", [CUT_IN_VISION, *slow([4, 4])])
@pytest.mark.parametrize("with_images", [2, *slow(0)])
def test_some_microbatches_have_images(pool: Pool, layers: list[int], with_images: int) -> None:
    expected = pytest.approx(pool.run(1, trained, {}, with_images)[0], rel=1e-5)
    sizes = {"pp_size": 2, "num_layers_per_stage": layers}
    assert pool.run(2, trained, sizes, with_images, timeout=120.0) == [expected] * 2


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore")
def test_one_of_two_replicas_has_images(pool: Pool) -> None:
    expected = pool.run(1, trained, {}, 2, 2)[0]
    sizes = {"pp_size": 2, "num_layers_per_stage": CUT_IN_VISION, "zero_stage": 1}
    results = pool.run(4, trained, sizes, 2, 2, timeout=120.0)
    assert [result["norm"] for result in results] == [pytest.approx(expected["norm"], rel=1e-5)] * 4


def outputs_of(model_type: str, sizes: dict[str, Any]) -> dict[str, Any]:
    """Return the outputs of an evaluation, on every rank."""
    copy = copy_of(model_type)
    booster = hybrid(num_microbatches=2, **sizes)
    boosted, *_ = booster.boost(copy.model)
    with torch.no_grad():
        results = booster.execute_pipeline(iter([copy.batch]), boosted, return_outputs="all_ranks")
    return dict(results["outputs"])


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize(
    ("model_type", "layers"), [("paligemma", [5, 3]), ("paligemma", [2, 6]), ("llava", None)]
)
def test_outputs_are_those_of_one_process_or_none_for_features_of_images(
    pool: Pool, model_type: str, layers: list[int] | None
) -> None:
    expected = pool.run(1, outputs_of, model_type, {})[0]
    sizes = {"pp_size": 2, "num_layers_per_stage": layers}
    for outputs in pool.run(2, outputs_of, model_type, sizes, timeout=120.0):
        absent = expected.keys() - outputs.keys()
        assert all(name.startswith("image_") for name in absent)
        assert bool(absent) == (layers != [2, 6])  # the last stage has the end of the vision model, or not
        whole = tensors_in([expected[name] for name in outputs])
        torch.testing.assert_close([*tensors_in(outputs)], [*whole], rtol=1e-5, atol=1e-5)
