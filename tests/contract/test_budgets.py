"""Communication and host reads of a warm step equal those in docs/cuda.md, for a small Llama on every rank."""

from collections import Counter
from dataclasses import replace
from typing import Any, NamedTuple

import pytest
import torch
from transformers import LlamaConfig, LlamaForCausalLM, MixtralConfig, MixtralForCausalLM

from echelon import Booster, HybridParallelPlugin
from echelon.verify.layout_choice import Layout

from ..cuda_page import table, value
from ..host_reads import Places, host_reads
from ..pool import Pool

COMPARED = 3  # the first calls, which compare batches by messages between CPUs
MICROBATCHES, SAMPLES, LENGTH, HIDDEN = 3, 2, 32, 64
RING = Layout(sp=2, sequence="ring_attn")
QUICK = (
    Layout(tp=2, pp=2),
    Layout(dp=2, zero=2),
    Layout(tp=2, sequence="split_gather"),
    RING,
)
SLOW = (
    Layout(sp=2, sequence="all_to_all"),
    Layout(dp=2, wp=2),
    Layout(pp=2, dp=2, zero=1),
    Layout(tp=2, dp=2, zero=2),
    Layout(dp=4, zero=1),
    Layout(tp=4, sequence="split_gather"),
)


Traffic = dict[tuple[str, str], tuple[int, int]]  # calls and bytes, by axis and kind


class Measured(NamedTuple):
    """Measurements of one rank's warm step: calls and bytes by axis and kind, host reads, and terms of the formulas."""

    traffic: Traffic
    reads: Places
    terms: dict[str, Any]


def measure_warm_step(
    layout: Layout,
    *,
    lengthens: bool = False,
    padding: int = 0,
    num_experts: int = 0,
    make: Any = torch.optim.AdamW,
) -> Measured:
    """Measure a warm step on one rank of the pool.

    Args:
        lengthens: every batch is longer than the previous one.
        padding: masked tokens at the end of every row; 0 is a batch without a mask.
        num_experts: of a Mixtral; 0 is a Llama.
        make: builds the optimizer.
    """
    torch.manual_seed(0)
    sizes = dict(vocab_size=128, hidden_size=HIDDEN, intermediate_size=192, num_hidden_layers=2)
    heads = dict(num_attention_heads=4, num_key_value_heads=4)
    model: Any = LlamaForCausalLM(LlamaConfig(**sizes, **heads))
    if num_experts:
        model = MixtralForCausalLM(MixtralConfig(**sizes, **heads, num_local_experts=num_experts))
    plugin = HybridParallelPlugin(**layout.arguments)
    booster = Booster(plugin=plugin)
    boosted, stepped, *_ = booster.boost(model, make(model.parameters()))
    for step in range(COMPARED + 1):
        generator = torch.Generator().manual_seed(10 * step + plugin.data_rank[0])
        length = LENGTH + lengthens * (step - COMPARED)
        ids = torch.randint(128, (MICROBATCHES * SAMPLES, length), generator=generator)
        batch = {"input_ids": ids, "labels": ids}
        if padding:
            seen = torch.arange(length) < length - padding
            batch["attention_mask"] = seen.long().expand_as(ids).contiguous()
        with plugin.ledger(stepped) as ledger, host_reads() as reads:
            booster.execute_pipeline(iter([batch]), boosted, optimizer=stepped)
            stepped.step()
            stepped.zero_grad()
    traffic: Traffic = {}
    for (axis, kind), count in ledger.traffic.items():
        _add(traffic, axis, kind if lengthens else kind.removeprefix("small "), count.calls, count.nbytes)
    terms = terms_of(layout, dict(boosted.named_parameters()), plugin.mesh.rank("pp"))
    return Measured(traffic, reads, {**terms, "padded": padding > 0, "offload": False})


def terms_of(layout: Layout, parameters: dict[str, torch.Tensor], stage: int) -> dict[str, Any]:
    """Return the terms of docs/cuda.md on a rank."""
    sharded = [
        parameter.numel() for name, parameter in parameters.items() if layout.wp > 1 and "_proj" in name
    ]
    return {
        **{axis: getattr(layout, axis) for axis in ("tp", "pp", "dp", "sp", "wp", "zero")},
        **{mode: layout.sequence == mode for mode in ("split_gather", "ring_attn", "all_to_all")},
        **dict(m=MICROBATCHES, b=SAMPLES, S=LENGTH, H=HIDDEN, w=2, x=2 * SAMPLES * LENGTH * HIDDEN),
        **dict(first=stage == 0, last=stage == layout.pp - 1),
        **dict(n=1, d=layout.dp * layout.sp, B=1, P=len(parameters)),
        "L": sum("input_layernorm" in name for name in parameters),
        "Ψ": sum(parameter.numel() for parameter in parameters.values()) - sum(sharded),
        "W": sum(sharded) * layout.wp,
    }


def budget(terms: dict[str, Any]) -> tuple[Traffic, Places]:
    """Return the page's budget of a rank: calls and bytes, and host reads."""
    wide = [axis for axis in ("tp", "pp", "dp", "sp") if terms[axis] > 1]
    names = {"data": "dp" if terms["dp"] > 1 else "sp", "world": wide[0] if len(wide) == 1 else "world"}
    traffic: Traffic = {}
    for axis, kind, where, _, calls, nbytes in table("What a step communicates"):
        if value(where, terms):
            _add(traffic, names.get(axis, axis), kind, value(calls, terms), value(nbytes, terms))
    reads = {
        (file, function): value(count, terms)
        for file, function, count, _ in table("What a step reads on the host")
    }
    return traffic, Counter(reads)


def _add(traffic: Traffic, axis: str, kind: str, calls: int, nbytes: int) -> None:
    before = traffic.get((axis, kind), (0, 0))
    traffic[axis, kind] = before[0] + calls, before[1] + nbytes


@pytest.mark.parametrize(
    ("layout", "padding"),
    [
        *((layout, 0) for layout in QUICK),
        (RING, 5),  # on CPUs the blocks of ring attention are tiles, and FlexAttention is not available
        *(pytest.param(layout, 0, marks=pytest.mark.slow) for layout in SLOW),
    ],
    ids=str,
)
def test_a_warm_step_costs_as_much_as_the_page_says(pool: Pool, layout: Layout, padding: int) -> None:
    layout = replace(layout, precision="bf16", microbatches=MICROBATCHES)
    for rank, measured in enumerate(pool.run(layout.world_size, measure_warm_step, layout, padding=padding)):
        traffic, reads = budget(measured.terms)
        assert measured.traffic == traffic, f"rank {rank}"
        assert measured.reads == reads, f"rank {rank}"


def test_batches_of_new_lengths_wait_for_no_device(pool: Pool) -> None:
    """Stages describe their messages by two messages between CPUs, once for each length."""
    layout = Layout(pp=2, precision="bf16", microbatches=MICROBATCHES)
    for rank, measured in enumerate(pool.run(2, measure_warm_step, layout, lengthens=True, padding=2)):
        traffic, reads = budget(measured.terms)
        told = "recv" if rank else "send"
        assert measured.reads == reads, f"rank {rank}"
        assert measured.traffic["pp", told] == traffic["pp", told], f"rank {rank}"
        assert measured.traffic["pp", f"small {told}"][0] == 2, f"rank {rank}"


def test_experts_send_and_read_as_much_as_the_page_says(pool: Pool) -> None:
    """Bytes are those of all ranks together: a rank receives as many rows as its experts are chosen for."""
    layout = Layout(dp=2, ep=2, precision="bf16", microbatches=MICROBATCHES)
    measured = pool.run(2, measure_warm_step, layout, num_experts=4)
    ((axis, kind, *_, calls, nbytes),) = table("What experts communicate")
    terms = {**measured[0].terms, "E": 4, "K": 2, "ep": 2}
    traffic = [measurement.traffic[axis, kind] for measurement in measured]
    assert axis == "ep" and {count[0] for count in traffic} == {value(calls, terms)}
    assert sum(count[1] for count in traffic) == value(nbytes, terms)
    for measurement in measured:
        extra = measurement.reads - budget(terms)[1]
        assert extra == {("layers/expert_parallel.py", "exchange_counts"): terms["L"] * terms["m"]}


def test_owners_send_and_read_as_much_as_the_page_says(pool: Pool) -> None:
    """Bytes are those of all ranks together, since a rank gets the parameters that it owns. No host reads are added."""
    layout = Layout(dp=2, zero=1, precision="bf16", microbatches=MICROBATCHES)
    measured = pool.run(2, measure_warm_step, layout, make=torch.optim.Adafactor)
    ((_, kind, _, _, calls, nbytes),) = table("What owners communicate")
    terms = measured[0].terms
    traffic = [measurement.traffic["dp", kind] for measurement in measured]
    assert {count[0] for count in traffic} == {value(calls, terms)}
    assert sum(count[1] for count in traffic) == value(nbytes, {**terms, "F": terms["Ψ"]})
    for measurement in measured:
        assert measurement.reads == budget(terms)[1]
        beside = budget(terms)[0].keys()
        assert measurement.traffic.keys() == beside | {("dp", kind)}
