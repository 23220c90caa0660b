"""A training script of a layout, which runs as it is printed: random inputs of the forms that the trace had."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from ..plugins.hybrid_config import HybridConfig
from .search import Plan
from .tracer import Example

_LABELS = {"labels", "start_positions", "mask_labels", "next_sentence_label", "return_loss"}
_CRITERION = """
def criterion(outputs, inputs):  # the batch has no labels: replace it with your loss
    return outputs[0].float().square().mean()


"""
_TOKENS = 100  # numbers of tokens and classes are drawn below it


def script(plan: Plan, model: str, class_name: str, example: Example) -> str:
    """Return a script that trains under a layout, with the command that starts it.

    Args:
        plan: the layout, and the samples of a microbatch.
        model: folder, file or model type.
        class_name: of the model, in transformers.
        example: a batch, and settings that the config lacks.
    """
    layout, size = plan.layout, plan.samples * plan.layout.microbatches
    path = Path(model).expanduser()
    config = f"AutoConfig.from_pretrained({str(path)!r})" if path.exists() else f"CONFIG_MAPPING[{model!r}]()"
    settings = "".join(f"config.{name} = 0\n" for name in example.unset)
    has_loss = not _LABELS.isdisjoint(example.batch)
    batch = "\n".join(f"    {line}" for line in _batch_lines(example.batch, example.samples, size))
    return f"""# torchrun --nnodes NODES --nproc_per_node GPUS train.py, on {layout.world_size} GPUs in all
import torch
from transformers import CONFIG_MAPPING, AutoConfig, {class_name}

from echelon import Booster, HybridParallelPlugin, LazyInitContext, PipelineGradientCheckpointConfig, launch_from_torch

{"" if has_loss else _CRITERION}launch_from_torch(seed=0)
plugin = HybridParallelPlugin(
{chr(10).join(_argument_lines(plan))}
)
booster = Booster(plugin=plugin)
config = {config}
{settings}with LazyInitContext():
    model = {class_name}(config)
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4, fused=True)
model, optimizer, *_ = booster.boost(model, optimizer)
for step in range(10):
{batch}
    output = booster.execute_pipeline(iter([batch]), model{"" if has_loss else ", criterion"}, optimizer=optimizer)
    optimizer.step()
    optimizer.zero_grad()
    print(f"step {{step}}: loss {{output['loss']:.4f}}")"""


def _argument_lines(plan: Plan) -> list[str]:
    """Return the arguments of the plugin that are not its defaults."""
    layout, default = plan.layout, HybridConfig()
    arguments = {
        name: value
        for name, value in layout.arguments.items()
        if value != getattr(default, name) and name != "gradient_checkpoint_config"
    }
    lines = [f"    {name}={value!r}," for name, value in arguments.items()]
    if layout.recompute:
        lines += [
            "    gradient_checkpoint_config=PipelineGradientCheckpointConfig(",
            f"        gradient_checkpointing_ratio={layout.recompute:g}",
            "    ),",
        ]
    return lines


def _batch_lines(batch: Mapping[str, Any], samples: int, size: int) -> list[str]:
    """Return lines that make a batch of `size` samples like one of `samples`."""
    lines, values = [], {name: _expression(value, samples, size) for name, value in batch.items()}
    ids = batch.get("input_ids")
    if isinstance(ids, Tensor):
        lines.append(f"tokens = {values['input_ids']}")
        values["input_ids"] = "tokens"
        marks = _constant_columns(ids)
        lines += [f"tokens[:, {first}:{stop}] = {token}" for first, stop, token in marks]
        of_ids = torch.isin(ids, torch.tensor([token for *_, token in marks], dtype=ids.dtype))
        mask = " | ".join(f"(tokens == {token})" for token in dict.fromkeys(token for *_, token in marks))
        for name, value in batch.items():
            if name == "input_ids" or not isinstance(value, Tensor) or value.shape != ids.shape:
                continue
            if torch.equal(value, ids):
                values[name] = "tokens"
            elif marks and torch.equal(value, ids.masked_fill(of_ids, -100)):
                values[name] = f"tokens.masked_fill({mask}, -100)"
            elif marks and torch.equal(value, of_ids.to(value.dtype)):
                values[name] = f"({mask}).long()"
    arguments = [f"    {name}={value}," for name, value in values.items()]
    return [*lines, "batch = dict(  # of this replica", *arguments, ")"]


def _constant_columns(ids: Tensor) -> list[tuple[int, int, int]]:
    """Return the stretches of columns (first, stop, token) in which all rows have one token, as images have."""
    stretches: list[tuple[int, int, int]] = []
    if ids.dim() != 2:
        return stretches
    for column in (ids == ids[:1]).all(0).nonzero().flatten().tolist():
        token = int(ids[0, column])
        if stretches and stretches[-1][1:] == (column, token):
            stretches[-1] = (stretches[-1][0], column + 1, token)
        else:
            stretches.append((column, column + 1, token))
    return stretches


def _expression(value: Any, samples: int, size: int) -> str:
    """Return code that makes a value like this one, for `size` samples instead of `samples`."""
    if isinstance(value, Tensor):
        return _tensor_expression(value, (len(value) * size // samples, *value.shape[1:]))
    if isinstance(value, list) and len(value) == samples:
        return f"[{_expression(value[0], 1, 1)} for _ in range({size})]"
    if isinstance(value, dict):
        return f"dict({', '.join(f'{name}={_expression(inner, 1, 1)}' for name, inner in value.items())})"
    return repr(value)


def _tensor_expression(tensor: Tensor, shape: tuple[int, ...]) -> str:
    if tensor.is_floating_point():
        return f"torch.rand{'n' if (tensor < 0).any() else ''}({shape})"
    if tensor.dim() > 1 and len(tensor) > 1 and (tensor == tensor[:1]).all():
        return f"torch.tensor({tensor[0].tolist()}).expand{(shape[0], *[-1] * (tensor.dim() - 1))}"
    low, high = int(tensor.min()), int(tensor.max())
    if low == high:
        return f"torch.full({shape}, {low})"
    return f"torch.randint({low if low < _TOKENS // 2 else 0}, {min(high + 1, _TOKENS)}, {shape})"
