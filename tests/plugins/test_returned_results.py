"""The loss and the outputs that `execute_pipeline` returns: their use and misuse in scripts."""

import copy
import io
import pickle
from dataclasses import replace
from typing import Any

import pytest
import torch
import torch.distributed as dist

from echelon.verify.batch import loss_of, make_batch

from ..pool import Pool, on_ranks
from .training import BERT, LLAMA, boosted, calls_of, hybrid, refused, share

RETURNED = "loss.backward() after execute_pipeline, which has computed the gradients already: leave it out"

FOUR_LAYERS = replace(LLAMA, num_layers=4)  # two ranks of zbv have four stages


def test_a_backward_of_the_returned_loss_raises(pool: Pool) -> None:
    ((returned, by_booster, detached, norm),) = pool.run(1, go_back_again)
    assert returned == by_booster
    assert returned.startswith(RETURNED)
    assert detached.startswith("booster.backward got a loss without a graph")
    assert norm > 0


def go_back_again() -> tuple[str, str, str, float]:
    booster = hybrid(precision="fp16", initial_scale=2.0)
    model, optimizer = boosted(booster)
    loss = booster.execute_pipeline(share(booster, BERT, 0), model, loss_of, optimizer)["loss"]
    errors = [
        refused(loss.backward),
        refused(lambda: booster.backward(loss, optimizer)),
        refused(lambda: booster.backward(loss * 2, optimizer)),  # a plain tensor
    ]
    optimizer.step()
    return errors[0], errors[1], errors[2], optimizer.last_norm


@on_ranks(1)
def test_the_returned_loss_is_used_as_any_tensor() -> None:
    booster = hybrid()
    model, optimizer = boosted(booster)
    loss = booster.execute_pipeline(share(booster, BERT, 0), model, loss_of, optimizer)["loss"]
    number = loss.item()
    assert isinstance(loss, torch.Tensor) and not loss.requires_grad and loss.shape == ()
    assert f"{loss:.4f}" == f"{number:.4f}" and float(loss) == loss.tolist() == number
    assert repr(loss) == str(loss) == repr(torch.tensor(number))
    assert loss.numpy() == number and loss.double().numpy() == number
    plain = (loss + 1, 2 * loss, loss.clone(), loss.detach(), torch.stack([loss, loss]), loss.float() / 2)
    assert {type(tensor) for tensor in plain} == {torch.Tensor}
    buffer = io.BytesIO()
    torch.save({"loss": loss}, buffer)
    buffer.seek(0)
    copies = [torch.load(buffer)["loss"], pickle.loads(pickle.dumps(loss))]
    copies += [copy.deepcopy(loss), copy.copy(loss)]
    assert [(type(tensor), tensor.item()) for tensor in copies] == [(torch.Tensor, number)] * 4


@pytest.mark.parametrize("sizes", [{"pp_size": 2, "tp_size": 2}, {"pp_size": 2, "pp_style": "zbv"}], ids=str)
def test_outputs_are_on_the_last_stage_and_on_all_ranks_if_asked(pool: Pool, sizes: dict[str, Any]) -> None:
    by_rank = pool.run(4, evaluate_for_outputs, sizes)
    for is_last, on_last, everywhere, mixed, expected in by_rank:
        assert (on_last is not None) == is_last
        for logits in (on_last, mixed) if is_last else ():
            torch.testing.assert_close(logits, expected)
        torch.testing.assert_close(everywhere, expected)
    for rank, (is_last, _, _, mixed, _) in enumerate(by_rank):
        assert (mixed is not None) == (is_last or rank == 0)  # only the first rank requests them


def evaluate_for_outputs(sizes: dict[str, Any]) -> tuple[bool, Any, Any, Any, Any]:
    """Return this rank's logits for each kind of request, and those of the model alone."""
    booster = hybrid(precision="fp32", **sizes)
    model, _ = boosted(booster, FOUR_LAYERS)
    model.eval()
    asked = (True, "all_ranks", "all_ranks" if dist.get_rank() == 0 else True)
    logits = []
    with torch.no_grad():
        for request in asked:
            batches = share(booster, FOUR_LAYERS, 0)
            returned = booster.execute_pipeline(batches, model, loss_of, return_outputs=request)
            logits.append(returned["outputs"] and returned["outputs"].logits)
        expected = FOUR_LAYERS.build().eval()(**next(share(booster, FOUR_LAYERS, 0))).logits
    return booster.plugin.stage_manager.is_last_stage(), *logits, expected


def test_outputs_travel_as_tensors_of_the_shapes_of_this_replica(pool: Pool) -> None:
    for on_this_stage, traffic, expected in pool.run(4, evaluate_uneven_replicas):
        assert on_this_stage is not None
        torch.testing.assert_close(on_this_stage, expected)
        broadcasts = {key: calls for key, calls in traffic.items() if "broadcast" in key[1]}
        assert broadcasts == {("pp", "small broadcast"): 2, ("pp", "broadcast"): 1}  # loss, logits


def evaluate_uneven_replicas() -> tuple[Any, dict[tuple[str, str], int], Any]:
    """Evaluate batches of another size and length for every replica; pickling their outputs would raise.

    Returns: this rank's logits, the calls of its second evaluation by axis and kind, and the logits of the model alone.
    """
    booster = hybrid(pp_size=2, num_microbatches=None, microbatch_size=2)
    model, _ = boosted(booster, LLAMA)
    replica, _ = booster.plugin.data_rank
    batch = make_batch(LLAMA, num_samples=5 - 2 * replica, seed=1)
    batch = {name: tensor[:, replica:] for name, tensor in batch.items()}
    model.eval()
    with torch.no_grad(), pytest.MonkeyPatch.context() as patch:
        patch.setattr(torch.Tensor, "__reduce_ex__", lambda *_: pytest.fail("a tensor was pickled"))
        for _ in range(2):
            with booster.plugin.ledger() as ledger:
                returned = booster.execute_pipeline(iter([batch]), model, return_outputs="all_ranks")
    expected = LLAMA.build().eval()(**batch).logits.detach()
    return returned["outputs"].logits, calls_of(ledger), expected
