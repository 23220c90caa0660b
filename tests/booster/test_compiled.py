"""torch.compile and `generate` with boosted models: supported calls, and refusals with advice."""

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
    shard_model,
)
from echelon.verify.model_choice import ModelChoice

from ..pool import Pool
from ..shardformer.compare import named

CHOICE = ModelChoice(model_type="llama", num_layers=2)
IDS = torch.arange(5, 11)[None]
# Without inductor, whose compiler takes seconds.
HOW: dict[str, Any] = {"backend": "eager"}


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


def refuse_what_torch_compile_returned() -> None:
    for name, plugin in PLUGINS.items():
        compiled = torch.compile(CHOICE.build(), **HOW)
        with (
            named(name),
            pytest.raises(ValueError, match=r"the model is wrapped by torch\.compile, which renames"),
        ):
            Booster(plugin=plugin()).boost(compiled)
    with pytest.raises(
        ValueError, match=r"give the plain model, and call model\.compile\(\) on the returned one"
    ):
        shard_model(torch.compile(CHOICE.build(), **HOW))


def refuse_to_compile_layers_that_talk() -> None:
    message = "with a tp_size, sp_size, wp_size or ep_size above 1: .*compile_layers=True"
    booster, whole = boosted(hybrid())
    with pytest.raises(ValueError, match=r"not torch\.compile's wrapper of it: call model\.compile\(\)"):
        booster.execute_pipeline(iter([{"input_ids": IDS}]), torch.compile(whole, **HOW))
    model = CHOICE.build()
    model.compile(**HOW)
    with pytest.raises(ValueError, match=message):
        Booster(plugin=hybrid(tp_size=2)).boost(model)
    _, split = boosted(hybrid(tp_size=2))
    with pytest.raises(RuntimeError, match=message):
        split.compile(**HOW)
    with pytest.raises(RuntimeError, match=message):
        torch.compile(split, **HOW)(IDS)


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


def refuse_to_generate() -> None:
    message = r"model\.generate needs pp_size, sp_size, wp_size and ep_size of 1: save the model by booster\.save_model"
    settings: tuple[dict[str, Any], ...] = (
        {"pp_size": 2},
        {"wp_size": 2},
        {"sp_size": 2, "enable_sequence_parallelism": True},
    )
    for each in settings:
        _, model = boosted(hybrid(**each))
        with named(str(each)), pytest.raises(RuntimeError, match=message):
            model.generate(IDS)
    _, split = boosted(hybrid(tp_size=2))
    with pytest.raises(ValueError, match=r"the inputs of rank\(s\) \[1\] of axis tp differ"):
        split.generate(IDS + torch.distributed.get_rank(), max_new_tokens=1)


@pytest.mark.parametrize(
    "function",
    [
        refuse_what_torch_compile_returned,
        refuse_to_compile_layers_that_talk,
        pytest.param(compile_in_place, marks=pytest.mark.slow),  # torch traces the whole forward
        generate_as_the_plain_model,
        refuse_to_generate,
    ],
)
def test_compiled_models_and_generating(pool: Pool, function: Callable[[], None]) -> None:
    pool.run(2, function)
