"""torch.compile and `generate` with boosted models. Refusals are in tests/refusals."""

from collections.abc import Callable
from typing import Any

import pytest
import torch

from echelon import (
    Booster,
    HybridParallelPlugin,
    LowLevelZeroPlugin,
    TorchDDPPlugin,
    TorchFSDPPlugin,
)
from echelon.verify.model_choice import ModelChoice

from ..pool import Pool
from ..shardformer.compare import named

CHOICE = ModelChoice(model_type="llama", num_layers=2)
IDS = torch.arange(5, 11)[None]


def hybrid(**settings: Any) -> HybridParallelPlugin:
    return HybridParallelPlugin(**{"precision": "fp32", "num_microbatches": 1, **settings})


PLUGINS: dict[str, Callable[[], Any]] = {
    "ddp": TorchDDPPlugin,
    "fsdp": TorchFSDPPlugin,
    "zero": lambda: LowLevelZeroPlugin(precision="fp32"),
    "tensor": lambda: hybrid(tp_size=2),
}


def boosted(plugin: Any) -> tuple[Booster, Any]:
    booster = Booster(plugin=plugin)
    return booster, booster.boost(CHOICE.build())[0]


def compile_in_place() -> None:
    """Compile a model in place; calls and `execute_pipeline` have the same loss, which counts labels."""
    labels = IDS.repeat(2, 1)
    labels[0, 3:] = -100
    batch = {"input_ids": IDS.repeat(2, 1), "labels": labels}
    booster, model = boosted(hybrid(zero_stage=1, num_microbatches=2))
    with torch.no_grad():
        expected = model(**batch).loss
        frames: list[Any] = []
        model.compile(backend=lambda graph, _: frames.append(graph) or graph.forward)
        torch.testing.assert_close(booster.execute_pipeline(iter([batch]), model)["loss"], expected)
        assert frames, "execute_pipeline ran the model as it was"
        torch.testing.assert_close(model(**batch).loss, expected)


def generate_as_the_plain_model() -> None:
    settings: dict[str, Any] = dict(max_new_tokens=4, do_sample=False, pad_token_id=0)
    expected = CHOICE.build().eval().generate(IDS, **settings)  # type: ignore[operator]
    for name, plugin in PLUGINS.items():
        _, model = boosted(plugin())
        with named(name):
            assert torch.equal(model.eval().generate(IDS, **settings), expected)
            assert torch.equal(model.generate(inputs=IDS, **settings), expected)


@pytest.mark.parametrize(
    "function",
    [
        pytest.param(compile_in_place, marks=pytest.mark.slow),  # torch traces the whole forward
        generate_as_the_plain_model,
    ],
)
def test_compiled_models_and_generating(pool: Pool, function: Callable[[], None]) -> None:
    pool.run(2, function)
