"""Formats besides the plugin's precision: of routers (`config.router_dtype`), and of tables that no file contains.

Parity rows are in tests/contract and tests/derive.
"""

from dataclasses import replace

import pytest
import torch

from echelon.verify.batch import make_batch
from echelon.verify.model_choice import ModelChoice

from ..pool import Pool, on_ranks
from .training import boosted, booster_of, hybrid, sgd, share, steps

SWITCH = ModelChoice(
    model_type="switch_transformers",
    num_layers=2,
    settings=(("num_sparse_encoder_layers", 1), ("num_sparse_decoder_layers", 1)),
)
ROUNDED, OTHER = (
    replace(SWITCH, settings=(*SWITCH.settings, ("router_dtype", name))) for name in ("bfloat16", "float16")
)
ROUTER = "router.classifier"


@pytest.mark.parametrize("is_frozen", [False, True])
@pytest.mark.parametrize(("choice", "dtype"), [(SWITCH, torch.float32), (ROUNDED, torch.bfloat16)])
@on_ranks(2)
def test_weights_of_routers_have_the_format_of_the_config(
    choice: ModelChoice, dtype: torch.dtype, is_frozen: bool
) -> None:
    """They have it after a step in bf16."""
    booster, plain = hybrid(precision="bf16", ep_size=2), choice.build()
    for name, parameter in plain.named_parameters():
        parameter.requires_grad_(not (is_frozen and ROUTER in name))
    before = {
        name: parameter.detach().clone() for name, parameter in plain.named_parameters() if ROUTER in name
    }
    model, optimizer = boosted(booster, plain, sgd)
    next(steps(booster, model, optimizer, share(booster, choice, 0)))
    for name, weight in before.items():
        after = plain.get_parameter(name)
        assert torch.equal(after, weight.to(after.dtype)) == is_frozen
    dtypes = {(ROUTER in name, parameter.dtype) for name, parameter in plain.named_parameters()}
    assert dtypes == {(True, dtype), (False, torch.bfloat16)}, dtypes


@pytest.mark.parametrize(
    ("model_type", "table", "dtype"),
    [
        ("m2m_100", "encoder.embed_positions.weights", torch.bfloat16),  # added to hidden states
        ("gptj", "embed_positions", torch.float32),  # cast where it is used
        ("llama", "rotary_emb.inv_freq", torch.float32),
    ],
)
@on_ranks(1)
def test_tables_have_the_format_that_transformers_builds(
    model_type: str, table: str, dtype: torch.dtype
) -> None:
    """A model in float32 is boosted in bf16."""
    model = ModelChoice(model_type=model_type).build()
    boosted(hybrid(precision="bf16"), model, sgd)
    found = next(tensor.dtype for name, tensor in model.named_buffers() if name.endswith(table))
    assert found == dtype, found


def losses_under_fsdp(precision: str) -> list[float]:
    """Return the losses of a rank in two steps of a model whose routers cast their weights to float32."""
    booster = booster_of("fsdp", precision=precision)
    model, optimizer = boosted(booster, SWITCH, sgd)
    batch = make_batch(SWITCH, num_samples=2, seed=0)  # equal: all ranks must use the same experts
    return [*steps(booster, model, optimizer, [batch] * 2, by_calls=True)]


@pytest.mark.filterwarnings("ignore:FSDP2-wrapped module")  # torch's, about blocks that return views
def test_routers_compute_in_float32_under_fsdp(pool: Pool) -> None:
    for in_bf16, in_fp32 in zip(
        pool.run(2, losses_under_fsdp, "bf16"), pool.run(2, losses_under_fsdp, "fp32"), strict=True
    ):
        assert in_bf16 == pytest.approx(in_fp32, rel=0.01)
        assert in_fp32[1] < in_fp32[0]
