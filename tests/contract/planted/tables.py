"""Faults in the tables of models."""

from dataclasses import replace

from echelon.shardformer.tables.heads import HeadOrder
from echelon.shardformer.tables.table import Table
from echelon.verify.layout_choice import Layout
from echelon.verify.model_choice import ModelChoice

from ..mutations import TABLES, fault, in_table, without

TP2 = Layout(tp=2)
PHI3 = ModelChoice(model_type="phi3", num_layers=2, settings=(("num_key_value_heads", 2),))


def heads_in_another_order(table: Table) -> Table:
    return replace(table, fused={**table.fused, "self_attn.qkv_proj": HeadOrder.BY_GROUP})


def gate_and_up_in_one_block(table: Table) -> Table:
    return replace(table, fused={**table.fused, "mlp.gate_up_proj": 1})


def without_second_inputs(table: Table) -> Table:
    """Leave a second input's gradient partial on each rank."""
    parts = {path: subtable and without_second_inputs(subtable) for path, subtable in table.parts.items()}
    return replace(table, second_input={}, parts=parts)


# fmt: off
FAULTS = {
    "gradients of the encoder's states are not summed": fault(TABLES, in_table("t5", without_second_inputs),
        ModelChoice(model_type="t5", num_layers=2), TP2),
    "gradients of the sound's states are not summed": fault(TABLES, in_table("whisper", without_second_inputs),
        "whisper", TP2),
    "gradients of the image's states are not summed": fault(TABLES, in_table("blip-2", without_second_inputs), "blip-2",
        TP2),
    "the router's weights are no input": fault(TABLES, in_table("mixtral", without_second_inputs), "mixtral", TP2),
    "gate and up of experts are sharded as one": fault(TABLES, in_table("mixtral", without(fused={})), "mixtral", TP2),
    "gate and up are sharded as one": fault(TABLES, in_table("phi3", gate_and_up_in_one_block), PHI3, TP2),
    "heads are sharded in another order": fault(TABLES, in_table("phi3", heads_in_another_order), PHI3, TP2),
    "partial gradients are taken for complete ones": fault(TABLES,
        in_table("swinv2", lambda table: replace(table, partial=(), whole=table.partial)), "swinv2", TP2),
}
# fmt: on
