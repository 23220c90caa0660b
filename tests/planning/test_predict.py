"""Predicted memory, messages and times beside those of real runs and of full simulations."""

import itertools
from typing import Any

import pytest
import torch
import transformers
from torch import nn

from echelon import Booster, HybridParallelPlugin
from echelon.cluster.gpus import GPUS
from echelon.pipeline.action import Op
from echelon.pipeline.schedules import build_schedule
from echelon.planning.cost import LiveBytes
from echelon.planning.predict import PipelineOrder
from echelon.planning.search import GIB, Job, Plan, Planner
from echelon.verify.layout_choice import Layout

from ..pool import Pool

LENGTH = 128
SIZES: dict[str, Any] = dict(vocab_size=512, hidden_size=128, intermediate_size=352, num_hidden_layers=6)
SIZES |= dict(num_attention_heads=4, num_key_value_heads=4)
GPT2: dict[str, Any] = dict(vocab_size=512, n_embd=128, n_layer=6, n_head=4, n_positions=LENGTH)
BYTES_APART = 0.05  # gloo completes no send before the end of a step, and keeps its tensors until then


def build(kind: str) -> nn.Module:
    if kind == "gpt2":  # with dropout and a tied head
        return transformers.GPT2LMHeadModel(transformers.GPT2Config(**GPT2, bos_token_id=0, eos_token_id=0))
    if kind == "mixtral":
        return transformers.MixtralForCausalLM(transformers.MixtralConfig(**SIZES, num_local_experts=4))
    return transformers.LlamaForCausalLM(transformers.LlamaConfig(**SIZES))


def planner_of(kind: str, layout: Layout, samples: int) -> Planner:
    with torch.device("meta"):
        model = build(kind)
    batch, h100 = samples * layout.microbatches * layout.dp, GPUS["h100"]
    job = Job(world=layout.world_size, memory=80, global_batch=batch, device=h100, precision=layout.precision)
    return Planner(model, "CAUSAL_LM", LENGTH, job)


def predicted(kind: str, layout: Layout, samples: int) -> Plan:
    planner = planner_of(kind, layout, samples)
    assert planner.errors(layout, samples) == []
    return planner.predict(layout, samples)


def measured_bytes(kind: str, layout: Layout, samples: int) -> tuple[int, int, dict[tuple[str, str], float]]:
    """Return what a rank holds between steps, the peak above it in a warm step, and the bytes that it sends."""
    torch.manual_seed(0)
    plugin = HybridParallelPlugin(**layout.arguments)
    booster, model = Booster(plugin=plugin), build(kind)
    boosted, optimizer, *_ = booster.boost(model, torch.optim.AdamW(model.parameters(), lr=1e-4, fused=True))
    tokens = torch.randint(3, 500, (samples * layout.microbatches, LENGTH))

    def compute() -> None:
        batch = {"input_ids": tokens, "labels": tokens.clone()}
        booster.execute_pipeline(iter([batch]), boosted, optimizer=optimizer)

    compute()
    optimizer.step()
    optimizer.zero_grad()
    held = sum(optimizer.held_bytes().values())
    with plugin.ledger(optimizer) as ledger, LiveBytes() as live:
        compute()
    return held, live.peak, {key: count.sent for key, count in ledger.traffic.items()}


QUICK = (
    ("llama", Layout(pp=2, schedule="zbv", microbatches=4)),
    ("llama", Layout(dp=2, zero=2, microbatches=2, recompute=1.0, precision="bf16")),
    ("mixtral", Layout(dp=2, ep=2, zero=1, microbatches=2, precision="bf16")),
)
SLOW = (
    ("gpt2", Layout(pp=2, microbatches=4, precision="bf16")),
    ("llama", Layout(sp=2, sequence="all_to_all", zero=1, microbatches=2)),
    ("gpt2", Layout(tp=2, pp=2, microbatches=4, precision="bf16")),
    ("llama", Layout(tp=2, pp=2, dp=2, zero=1, microbatches=4)),
    ("llama", Layout(pp=2, schedule="interleaved", chunks=2, microbatches=4)),
    ("llama", Layout(dp=2, wp=2, zero=1, microbatches=2)),
)


@pytest.mark.parametrize(
    ("kind", "layout"), [*QUICK, *(pytest.param(*row, marks=pytest.mark.slow) for row in SLOW)], ids=str
)
def test_predicted_bytes_are_those_of_a_step(pool: Pool, kind: str, layout: Layout) -> None:
    measured = pool.run(layout.world_size, measured_bytes, kind, layout, 2)
    require_bytes(predicted(kind, layout, 2), measured)


def require_bytes(plan: Plan, measured: list[Any]) -> None:
    layout = plan.layout
    for rank, (held, peak, _) in enumerate(measured):
        memory = plan.memory[rank * layout.pp // layout.world_size]
        assert memory.total - memory.activations == pytest.approx(held, rel=0.01)
        assert memory.total == pytest.approx(held + peak, rel=BYTES_APART), rank


def test_predicted_bytes_and_messages_of_layers_are_those_of_a_step(pool: Pool) -> None:
    layout = Layout(tp=2, sequence="split_gather", microbatches=2)
    plan, measured = predicted("llama", layout, 2), pool.run(2, measured_bytes, "llama", layout, 2)
    require_bytes(plan, measured)

    def of_layers(traffic: dict[tuple[str, str], float]) -> float:
        counted = ((axis, kind) for axis, kind in traffic if axis == "tp" and not kind.startswith("small"))
        return sum(traffic[key] for key in counted)

    directions = [
        direction for section in plan.prediction.stages[0] for direction in section.traffic.values()
    ]
    sent = sum(of_layers({key: count.sent for key, count in direction.items()}) for direction in directions)
    for _, _, traffic in measured:  # norms are summed once a step
        assert layout.microbatches * sent == pytest.approx(of_layers(traffic), rel=0.05)


def test_operations_are_those_of_torchs_counter() -> None:
    from torch.utils.flop_counter import FlopCounterMode

    model = build("llama")
    model.set_attn_implementation("eager")  # torch counts no fused attention of CPUs
    job = Job(world=1, memory=80, global_batch=2, device=GPUS["h100"], precision="fp32")
    plan = Planner(model.to("meta"), "CAUSAL_LM", LENGTH, job).predict(Layout(microbatches=1), 2)
    model, tokens = model.to_empty(device="cpu"), torch.zeros(2, LENGTH, dtype=torch.long)
    with FlopCounterMode(display=False) as counter:
        model(input_ids=tokens, labels=tokens, use_cache=False).loss.backward()
    assert plan.time.flops == counter.get_total_flops()


@pytest.mark.parametrize(("style", "chunks"), [("1f1b", 1), ("interleaved", 3), ("zbh1", 1), ("zbv", 2)])
def test_a_rank_is_fullest_at_one_of_few_moments(style: str, chunks: int) -> None:
    order = PipelineOrder(actions=build_schedule(style, 4, 8, chunks))
    kept = {stage: 100 + 7 * stage % 5 for stage in range(4 * chunks)}
    for actions, stages, moments in zip(order.actions, order.stages, order.fullest, strict=True):
        counts, walked = dict.fromkeys(stages, 0), dict.fromkeys(itertools.product((True, False), stages), 0)
        for op, stage, _ in actions:
            if op is not Op.BACKWARD_WEIGHT:
                now = sum(counts[other] * kept[other] for other in stages)
                walked[op is Op.FORWARD, stage] = max(walked[op is Op.FORWARD, stage], now)
            counts[stage] += (op is Op.FORWARD) - (op in (Op.BACKWARD, Op.BACKWARD_WEIGHT))
        fullest = dict.fromkeys(walked, 0)
        for is_forward, stage, num_kept in moments:
            now = sum(number * kept[other] for other, number in num_kept)
            fullest[is_forward, stage] = max(fullest[is_forward, stage], now)
        assert fullest == walked and len(moments) < len(actions)


@pytest.mark.parametrize("schedule", ["1f1b", "interleaved", "zbh1", "zbv"])
def test_a_schedule_of_few_microbatches_tells_the_time_and_memory_of_many(schedule: str) -> None:
    chunks = 2 if schedule == "interleaved" else 1
    layout = Layout(pp=3, schedule=schedule, chunks=chunks, microbatches=24)
    planner = planner_of("llama", layout, 1)
    few = planner.predict(layout, 1)
    planner.IN_FLIGHT = 100
    full = planner.predict(layout, 1)
    assert few.time.total == pytest.approx(full.time.total, rel=0.01)
    assert few.time.bubble == pytest.approx(full.time.bubble, abs=0.01)
    assert few.memory == full.memory
    assert full.peak * GIB == max(memory.total for memory in full.memory)
