"""`loss.backward()` instead of `booster.backward(loss, optimizer)`, under every plugin."""

from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

from echelon.verify.batch import make_batch

from ..pool import Pool, on_ranks
from .training import SMALL, boosted, booster_of, full, refused, sgd, share


def made(kind: str, precision: str) -> tuple[Any, Any, Any]:
    """Return a booster by its plugin's name, the model and the optimizer."""
    scale = {} if kind in ("ddp", "fsdp") else {"initial_scale": 2.0**8}
    sizes = {"tp_size": 2} if kind == "hybrid" else {}
    booster = booster_of(kind, precision=precision, **scale, **sizes)
    return booster, *boosted(booster, SMALL, sgd)


def trained(kind: str, precision: str, *, by_booster: bool) -> dict[str, Tensor]:
    """Return the full weights after two steps of two backwards each."""
    booster, model, optimizer = made(kind, precision)
    for step in range(2):
        for number in range(2):
            loss = model(**next(share(booster, SMALL, 2 * step + number))).loss / 2
            booster.backward(loss, optimizer) if by_booster else loss.backward()
        optimizer.step()
        optimizer.zero_grad()
    return {name: full(parameter).float() for name, parameter in model.unwrap().named_parameters()}


def compare(kinds: tuple[str, ...], precision: str) -> None:
    tolerances = {"rtol": 1e-4, "atol": 1e-5} if precision == "fp32" else {"rtol": 2e-2, "atol": 1e-2}
    for kind in kinds:
        plain, expected = (trained(kind, precision, by_booster=by_booster) for by_booster in (False, True))
        torch.testing.assert_close(plain, expected, **tolerances)


def test_without_a_loss_scale_it_trains_as_the_boosters_does(pool: Pool) -> None:
    pool.run(2, compare, ("zero1", "zero2"), "fp32")
    pool.run(2, compare, ("zero2",), "bf16")


def local(model: Any) -> dict[str, Tensor]:
    """Return this rank's shards of the weights."""
    parameters = model.unwrap().named_parameters()
    return {name: getattr(parameter, "_local_tensor", parameter).detach() for name, parameter in parameters}


@pytest.mark.parametrize("kind", ["hybrid", "zero1", "zero2", "fsdp", "ddp"])
@on_ranks(2)
def test_under_fp16_the_step_and_clipping_refuse_it(kind: str) -> None:
    """Call a plain backward alone, before and after one of the booster, and after dropping the booster's gradients."""
    booster, model, optimizer = made(kind, "fp16")
    before = {name: shard.clone() for name, shard in local(model).items()}

    def backward(how: str) -> None:
        loss = model(**next(share(booster, SMALL, 0))).loss
        loss.backward() if how == "plain" else booster.backward(loss, optimizer)
        if how == "dropped":
            optimizer.zero_grad()

    for order in (("plain",), ("plain", "scaled"), ("scaled", "plain"), ("dropped", "plain")):
        for end in (optimizer.step, lambda: optimizer.clip_grad_by_norm(1.0)):
            with pytest.raises(RuntimeError, match=r"call booster\.backward\(loss, optimizer\)"):
                for how in order:
                    backward(how)
                end()
            optimizer.zero_grad()
            dist.barrier()
    for name, parameter in local(model).items():
        assert torch.equal(parameter, before[name]), (kind, name)
    backward("scaled")  # later calls work
    optimizer.step()


@pytest.mark.parametrize("kind", ["zero2", "fsdp", "ddp"])
@on_ranks(2)
def test_under_fp16_it_is_refused_inside_of_no_sync_too(kind: str) -> None:
    """torch's FSDP stores such gradients elsewhere until a later backward adds them to its own."""
    booster, model, optimizer = made(kind, "fp16")

    def step_after(how: str) -> None:
        with booster.no_sync(model, optimizer):
            loss = model(**next(share(booster, SMALL, 0))).loss
            booster.backward(loss, optimizer) if how == "scaled" else loss.backward()
        booster.backward(model(**next(share(booster, SMALL, 0))).loss, optimizer)
        optimizer.step()

    with pytest.raises(RuntimeError, match=r"call booster\.backward\(loss, optimizer\)"):
        step_after("plain")
    optimizer.zero_grad()
    dist.barrier()
    step_after("scaled")


@pytest.mark.parametrize("kind", ["zero1", "zero2", "ddp"])
@on_ranks(2)
def test_under_fp16_gradients_that_a_script_assigns_are_refused(kind: str) -> None:
    booster, model, optimizer = made(kind, "fp16")
    parameters = [*model.parameters()]
    gradients = torch.autograd.grad(model(**next(share(booster, SMALL, 0))).loss, parameters)
    for parameter, gradient in zip(parameters, gradients, strict=True):
        parameter.grad = gradient
    message = refused(optimizer.step)
    assert "call booster.backward(loss, optimizer)" in message, message
    optimizer.zero_grad()
    dist.barrier()
    booster.backward(model(**next(share(booster, SMALL, 0))).loss, optimizer)
    optimizer.step()


@pytest.mark.parametrize("kind", ["zero1", "fsdp", "ddp"])
@on_ranks(2)
def test_a_step_computes_the_gradients_by_a_closure(kind: str) -> None:
    """A step of the plain optimizer is refused."""
    booster, model, optimizer = made(kind, "fp16")
    plain = getattr(optimizer, "inner", None) or optimizer.optim
    before = {name: shard.clone() for name, shard in local(model).items()}

    def closure() -> Tensor:
        optimizer.zero_grad()
        loss: Tensor = model(**next(share(booster, SMALL, 0))).loss
        booster.backward(loss, optimizer)
        return loss

    assert optimizer.step(closure).item() > 0
    assert any(not torch.equal(shard, before[name]) for name, shard in local(model).items())
    closure()
    assert "step the one that boost returned" in refused(plain.step)


@on_ranks(2)
def test_gradients_are_right_after_another_models_loss_reached_the_parameters() -> None:
    """A generator's loss goes through the discriminator, whose gradients are dropped before its own."""
    for kind in ("zero0", "zero2"):
        booster = booster_of(kind, precision="fp16", initial_scale=2.0**8)
        models, optimizers = zip(*(boosted(booster, SMALL, sgd) for _ in range(2)), strict=True)
        batch = make_batch(SMALL, num_samples=2, seed=0)
        booster.backward(models[0](**batch).loss + models[1](**batch).loss, optimizers[0])
        optimizers[0].step()
        optimizers[1].zero_grad()
        booster.backward(models[1](**batch).loss, optimizers[1])
        optimizers[1].step()
        assert optimizers[1].last_norm == pytest.approx(optimizers[0].last_norm, rel=1e-2)
        booster.backward(models[0](**batch).loss + models[1](**batch).loss, optimizers[0])
        with pytest.raises(RuntimeError, match=r"call booster\.backward"):
            optimizers[1].step()
        dist.barrier()
