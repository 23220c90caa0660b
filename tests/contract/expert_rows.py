"""Parity rows of experts that are distributed over ranks (ep_size)."""

import os
import random
from collections.abc import Iterator
from contextlib import AbstractContextManager
from dataclasses import dataclass, replace
from datetime import date
from functools import partial
from itertools import product
from typing import Any
from unittest.mock import patch

import torch
from torch import Tensor, nn
from transformers import CONFIG_MAPPING

from echelon.verify.batch import make_batch
from echelon.verify.layout_choice import Layout, Training
from echelon.verify.model_choice import ModelChoice

from .models import LoopChoice
from .row import ParityRow, as_quick

MIXTRAL, QWEN, GPT_OSS, DEEPSEEK = (
    ModelChoice(model_type=model_type) for model_type in ("mixtral", "qwen3_moe", "gpt_oss", "deepseek_v3")
)
# Its router draws among experts whose scores differ by less than the noise, other numbers on every replica.
PHIMOE = ModelChoice(
    model_type="phimoe", settings=(("router_jitter_noise", 0.0), ("input_jitter_noise", 0.0))
)
EP2 = Layout(dp=2, ep=2)
LAYOUTS = (
    EP2,
    Layout(dp=4, ep=4),
    Layout(dp=2, ep=2, pp=2),
    Layout(dp=2, ep=2, pp=2, schedule="interleaved", chunks=2),
    Layout(dp=2, ep=2, pp=2, schedule="zbv", recompute=0.5),
    Layout(dp=4, ep=2, zero=1),
    Layout(dp=2, ep=2, zero=2, precision="bf16"),
)
# gpt_oss has no plan for tensor parallelism, and sinks of attention, which rings do not have.
NOT_OF_GPT_OSS = (
    Layout(sp=2, ep=2, sequence="ring_attn"),
    Layout(dp=2, ep=2, tp=2),
    Layout(dp=2, ep=2, tp=2, sequence="split_gather", recompute=1.0),
    Layout(sp=2, ep=2, tp=2, sequence="all_to_all", zero=1),
)
QUICK = (
    (MIXTRAL, Layout(dp=4, ep=2, zero=1, recompute=1.0)),
    (QWEN, Layout(dp=2, ep=2, tp=2, sequence="split_gather")),
    (GPT_OSS, Layout(dp=2, ep=2, pp=2, schedule="zbh1")),
    (DEEPSEEK, Layout(sp=2, dp=2, ep=4, sequence="all_to_all", zero=2)),
    (MIXTRAL, Layout(dp=2, ep=2, precision="fp16", max_norm=0.1)),
)

# Plain SGD: a gradient of another scale changes the weights, which AdamW would hide.

SGD_LAYOUTS = (
    *(EP2, Layout(dp=4, ep=4), Layout(dp=2, ep=2, pp=2)),
    Layout(dp=2, ep=2, pp=2, schedule="interleaved", chunks=2),
    Layout(dp=4, ep=2, zero=1),
    Layout(dp=8, ep=2, zero=1),
    Layout(dp=2, ep=2, zero=2),
    Layout(sp=2, ep=2, sequence="all_to_all"),
)
SGD_NOT_OF_GPT_OSS = (Layout(dp=2, ep=2, tp=2),)
SGD_OF_MIXTRAL = (Layout(dp=2, ep=2, tp=2, pp=2),)


def plain_sgd(model: nn.Module, *settings: Any, **further: Any) -> list[torch.optim.Optimizer]:
    """Return SGD with a learning rate of 0.1."""
    return [torch.optim.SGD(model.parameters(), lr=0.1)]


def by_sgd() -> AbstractContextManager[Any]:
    """Let the parity check train by plain SGD."""
    return patch("echelon.verify.parity.optimizers_of", plain_sgd)


# Model types with interfaces of their own.

OTHERS = ("dbrx", "llama4_text", "longcat_flash", "nllb-moe", "step3p7", "switch_transformers")
MISSING = "" if "step3p7" in CONFIG_MAPPING else "before 5.24, transformers calls them in another way"
# Switch's losses of routers, with a coefficient of the z-loss by which it decides the routers' gradients.
SWITCH = ModelChoice(
    model_type="switch_transformers",
    settings=(
        *(("num_sparse_encoder_layers", 2), ("num_sparse_decoder_layers", 2)),
        ("router_z_loss_coef", 0.5),
    ),
)
OTHERS_LAYOUTS = (EP2, Layout(dp=4, ep=2, zero=1, recompute=1.0))
# Experts that are modules: in some microbatches most of 16 get no token on a rank, or on any.
APART = tuple(
    ModelChoice(model_type=model_type, settings=(("num_experts", 16),))
    for model_type in ("nllb-moe", "switch_transformers")
)
# The same in one layer of the encoder and one of the decoder, of two each.
FEW_APART = ModelChoice(
    model_type="switch_transformers",
    settings=(("num_experts", 16), ("num_sparse_encoder_layers", 1), ("num_sparse_decoder_layers", 1)),
)
# In 16 bits their routers compute in float32, with float32 weights (`config.router_dtype`).
HALF_LAYOUTS = (
    Layout(dp=2, ep=2, zero=2, precision="bf16"),
    Layout(dp=4, ep=2, zero=1, precision="fp16", recompute=1.0),
)
APART_LAYOUTS = (Layout(dp=2, ep=2, zero=2), Layout(dp=4, ep=2, zero=2, recompute=1.0))


class Rounded(ModelChoice):
    """A model with buffers of bf16, as `from_pretrained(dtype=torch.bfloat16)` makes them: NLLB-MoE's positions."""

    def build(self, seed: int = 0) -> nn.Module:
        """Build the model; see `ModelChoice.build`."""
        model = super().build(seed)
        for buffer in model.buffers():
            buffer.data = buffer.data.to(torch.bfloat16)
        return model


# Edge cases of routing.


@dataclass(frozen=True, kw_only=True)
class Steered(ModelChoice):
    """A mixture whose tokens all choose among the first experts, or between experts of equal scores.

    Args:
        among: the number of experts that are chosen; 0 leaves the choice to the router.
        has_ties: experts 0 and 1 have equal scores, and so have 2 and 3.
    """

    among: int = 0
    has_ties: bool = False

    def build(self, seed: int = 0) -> nn.Module:
        """Build the model; see `ModelChoice.build`."""
        model: Any = super().build(seed)
        for layer in model.model.layers:
            if self.among:
                layer.mlp.gate.register_forward_hook(partial(_save_or_replay, self.among))
            if self.has_ties:
                with torch.no_grad():
                    layer.mlp.gate.weight[1::2] = layer.mlp.gate.weight[::2]
        return model


def _save_or_replay(among: int, router: nn.Module, args: Any, outputs: tuple[Tensor, Tensor, Tensor]) -> Any:
    logits, weights, index = outputs
    return logits, weights, index % among


def few_tokens(choice: ModelChoice, *, num_samples: int, seed: int) -> dict[str, Tensor]:
    """Return samples of three tokens without padding: of four ranks that share a sequence, one has none."""
    batch = make_batch(choice, num_samples=num_samples, seed=seed)
    cut = {name: tensor[:, :3] for name, tensor in batch.items()}
    return {**cut, "attention_mask": torch.ones_like(cut["input_ids"]), "labels": cut["input_ids"].clone()}


EDGES = {
    "one expert": (Steered(model_type="mixtral", among=1), EP2),
    "one expert of four ranks": (Steered(model_type="mixtral", among=1), Layout(dp=4, ep=4, recompute=1.0)),
    "experts without tokens": (Steered(model_type="mixtral", among=2), Layout(dp=2, ep=2, pp=2)),
    "equal scores": (Steered(model_type="mixtral", has_ties=True), EP2),
}
FEW = {
    "fewer tokens than ranks": (Layout(dp=4, ep=4, microbatches=1), Training(extra_samples=(-1,))),
    "a rank without tokens": (Layout(sp=4, ep=4, sequence="ring_attn"), Training()),
}


# Further types, drawn by the date.

DRAWN_TYPES = (
    *("afmoe", "aria_text", "axk1", "axk2", "cohere2_moe", "deepseek_v2", "deepseek_v32", "deepseek_v4"),
    *("dots1", "ernie4_5_moe", "exaone_moe", "flex_olmo", "glm4_moe", "glm4_moe_lite", "glm_moe_dsa"),
    *("granitemoe", "granitemoe_swa", "granitemoeshared", "hunyuan_v1_moe", "hy_v3", "hy_v4"),
    *("inkling2_loop_text", "inkling2_text", "inkling_text", "kolibri1", "laguna", "lara_mini", "mellum"),
    *("mimo_v2_flash", "minimax", "minimax_m2", "minimax_m3_vl_text", "nemotron_h", "olmoe", "qwen2_moe"),
    "solar_open",
)
# Its config has one expert by default.
HUNYUAN = ModelChoice(model_type="hunyuan_v1_moe", settings=(("num_experts", 4), ("moe_topk", 2)))
DRAWN_LAYOUTS = (
    *(EP2, Layout(dp=4, ep=4), Layout(dp=4, ep=2, zero=1), Layout(dp=2, ep=2, zero=2)),
    *(Layout(dp=2, ep=2, recompute=1.0), Layout(dp=4, ep=2, recompute=1.0, max_norm=0.1)),
)
# To repeat a draw, set this variable to the date in the names of its rows.
SEED = os.environ.get("ECHELON_DRAW") or date.today().isoformat()


def drawn_rows(seed: str) -> Iterator[ParityRow]:
    """Yield eight of the further types under two layouts."""
    draw = random.Random(seed)
    known = [model_type for model_type in DRAWN_TYPES if model_type in CONFIG_MAPPING]
    for model_type in draw.sample(known, 8):
        choice = HUNYUAN if model_type == HUNYUAN.model_type else ModelChoice(model_type=model_type)
        for layout in draw.sample(DRAWN_LAYOUTS, 2):
            yield ParityRow(choice=choice, layout=layout, name=f"drawn {seed} {model_type}")


def expert_rows() -> Iterator[ParityRow]:
    """Yield every row."""
    for choice, layout in QUICK:
        yield as_quick(ParityRow(choice=choice, layout=layout))
    for choice in (MIXTRAL, QWEN, GPT_OSS):
        for layout in (*LAYOUTS, *(NOT_OF_GPT_OSS if choice is not GPT_OSS else ())):
            yield ParityRow(choice=choice, layout=layout)
    yield ParityRow(choice=MIXTRAL, layout=Layout(dp=4, wp=2, ep=4))
    recomputed = replace(EP2, recompute=1.0)
    yield ParityRow(choice=LoopChoice(model_type="mixtral"), layout=recomputed, name="eager experts")
    yield ParityRow(choice=PHIMOE, layout=recomputed, name="phimoe without noise")
    yield from sgd_rows()
    yield from other_rows()
    yield from apart_rows()
    yield from half_rows()
    yield from edge_rows()
    yield from drawn_rows(SEED)


def sgd_rows() -> Iterator[ParityRow]:
    """Yield rows of plain SGD."""
    for choice in (MIXTRAL, QWEN, GPT_OSS):
        layouts = SGD_LAYOUTS + (SGD_NOT_OF_GPT_OSS if choice is not GPT_OSS else ())
        for layout in layouts + (SGD_OF_MIXTRAL if choice is MIXTRAL else ()):
            yield ParityRow(choice=choice, layout=layout, within=by_sgd, name=f"sgd {choice.model_type}")


def other_rows() -> Iterator[ParityRow]:
    """Yield the model types with interfaces of their own."""
    row = partial(ParityRow, missing=MISSING)
    for layout in OTHERS_LAYOUTS:
        yield row(choice=SWITCH, layout=layout, batch=with_router_losses, name="switch z-loss")
    for model_type, layout in product(OTHERS, OTHERS_LAYOUTS):
        yield row(choice=ModelChoice(model_type=model_type), layout=layout)
    yield row(choice=ModelChoice(model_type="switch_transformers"), layout=Layout(dp=2, wp=2))


def apart_rows() -> Iterator[ParityRow]:
    """Yield experts that are modules under ZeRO-2, which averages their gradients in backward; one row is quick."""
    yield as_quick(ParityRow(choice=FEW_APART, layout=APART_LAYOUTS[0], missing=MISSING))
    yield ParityRow(choice=APART[0], layout=Layout(dp=2, ep=2, pp=2, zero=2), missing=MISSING)
    for choice, layout in product(APART, APART_LAYOUTS):
        row = ParityRow(choice=choice, layout=layout, missing=MISSING)
        yield from (row, replace(row, within=by_sgd, name=f"sgd {choice.model_type}"))


def half_rows() -> Iterator[ParityRow]:
    """Yield routers in float32 in runs of 16 bits: trained, frozen, and by an optimizer of full matrices."""
    switch, rounded = ModelChoice(model_type="switch_transformers"), Rounded(model_type="nllb-moe")
    for layout in HALF_LAYOUTS:
        yield ParityRow(choice=switch, layout=layout, missing=MISSING)
    yield ParityRow(choice=rounded, layout=HALF_LAYOUTS[0], missing=MISSING)
    for layout, training in (
        (HALF_LAYOUTS[0], Training(frozen="every second")),
        (Layout(dp=2, zero=1, precision="bf16"), Training(optimizer="adafactor")),
    ):
        name = f"{training.optimizer} {training.frozen} {switch.model_type}"
        yield ParityRow(choice=switch, layout=layout, training=training, name=name, missing=MISSING)


def with_router_losses(choice: ModelChoice, *, num_samples: int, seed: int) -> dict[str, Any]:
    """Return a batch that asks for the losses of routers."""
    return {**make_batch(choice, num_samples=num_samples, seed=seed), "output_router_logits": True}


def edge_rows() -> Iterator[ParityRow]:
    """Yield the edge cases of routing, by SGD too."""
    for name, (choice, layout) in EDGES.items():
        yield ParityRow(choice=choice, layout=layout, name=name)
        yield ParityRow(choice=choice, layout=replace(layout, zero=1), within=by_sgd, name=f"sgd {name}")
    for name, (layout, training) in FEW.items():
        yield ParityRow(choice=MIXTRAL, layout=layout, training=training, batch=few_tokens, name=name)
