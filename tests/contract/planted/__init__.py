"""Planted faults by package. What a row is, and how to add one: ../mutations.py."""

from ..mutations import Mutation
from . import checkpoint, layers, lora, pipeline, sequence, split, tables, zero

FAULTS: dict[str, Mutation] = {
    f"{module.__name__.rpartition('.')[2]}: {name}": fault
    for module in (checkpoint, layers, lora, pipeline, sequence, split, tables, zero)
    for name, fault in module.FAULTS.items()
}
