"""Formats besides the plugin's precision: of routers (`config.router_dtype`), and of tables that no file contains.

Parity rows are in tests/contract and tests/derive.
"""

from dataclasses import replace

import pytest
import torch

from echelon import Booster, TorchFSDPPlugin
from echelon.verify.batch import loss_of, make_batch
from echelon.verify.model_choice import ModelChoice

from ..pool import Pool
from .training import hybrid, sgd, share, steps

SWITCH = ModelChoice(
    model_type="switch_transformers",
    num_layers=2,
    settings=(("num_sparse_encoder_layers", 1), ("num_sparse_decoder_layers", 1)),
)
ROUNDED, OTHER = (
    replace(SWITCH, settings=(*SWITCH.settings, ("router_dtype", name))) for name in ("bfloat16", "float16")
)
ROUTER = "router.classifier"


def formats(choice: ModelChoice, is_frozen: bool) -> set[tuple[bool, torch.dtype]]:
    """Train one step in bf16; return the formats of parameters, and if they are a router's."""
    booster, plain = hybrid(precision="bf16", ep_size=2), choice.build()
    for name, parameter in plain.named_parameters():
        parameter.requires_grad_(not (is_frozen and ROUTER in name))
    before = {
        name: parameter.detach().clone() for name, parameter in plain.named_parameters() if ROUTER in name
    }
    model, optimizer, *_ = booster.boost(plain, sgd(plain), loss_of)
    booster.execute_pipeline(share(booster, choice, 0), model, loss_of, optimizer)
    optimizer.step()
    for name, weight in before.items():
        after = plain.get_parameter(name)
        assert torch.equal(after, weight.to(after.dtype)) == is_frozen
    return {(ROUTER in name, parameter.dtype) for name, parameter in plain.named_parameters()}


@pytest.mark.parametrize("is_frozen", [False, True])
@pytest.mark.parametrize(("choice", "dtype"), [(SWITCH, torch.float32), (ROUNDED, torch.bfloat16)])
def test_weights_of_routers_have_the_format_of_the_config(
    pool: Pool, choice: ModelChoice, dtype: torch.dtype, is_frozen: bool
) -> None:
    for dtypes in pool.run(2, formats, choice, is_frozen):
        assert dtypes == {(True, dtype), (False, torch.bfloat16)}


@pytest.mark.parametrize(
    ("model_type", "table", "dtype"),
    [
        ("m2m_100", "encoder.embed_positions.weights", torch.bfloat16),  # added to hidden states
        ("gptj", "embed_positions", torch.float32),  # cast where it is used
        ("llama", "rotary_emb.inv_freq", torch.float32),
    ],
)
def test_tables_have_the_format_that_transformers_builds(
    pool: Pool, model_type: str, table: str, dtype: torch.dtype
) -> None:
    assert pool.run(1, format_of, ModelChoice(model_type=model_type), table) == [dtype]


def format_of(choice: ModelChoice, buffer: str) -> torch.dtype:
    """Return the format of a buffer of a model in float32 that is boosted in bf16."""
    booster, model = hybrid(precision="bf16"), choice.build()
    booster.boost(model, sgd(model))
    return next(tensor.dtype for name, tensor in model.named_buffers() if name.endswith(buffer))


def losses_under_fsdp(precision: str) -> list[float]:
    """Return the losses of a rank in two steps of a model whose routers cast their weights to float32."""
    plain = SWITCH.build()
    booster = Booster(plugin=TorchFSDPPlugin(precision=precision))
    model, optimizer, *_ = booster.boost(plain, sgd(plain))
    batch = make_batch(SWITCH, num_samples=2, seed=0)  # equal: all ranks must use the same experts
    return [*steps(booster, model, optimizer, [batch] * 2, by_calls=True)]


@pytest.mark.filterwarnings("ignore:FSDP2-wrapped module")  # torch's, about blocks that return views
def test_routers_compute_in_float32_under_fsdp(pool: Pool) -> None:
    for in_bf16, in_fp32 in zip(
        pool.run(2, losses_under_fsdp, "bf16"), pool.run(2, losses_under_fsdp, "fp32"), strict=True
    ):
        assert in_bf16 == pytest.approx(in_fp32, rel=0.01)
        assert in_fp32[1] < in_fp32[0]
