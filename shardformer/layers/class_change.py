"""Change of what a module computes, in place, by its class.

[Note: changed classes] A module that computes the same with another kernel, later, twice or in a compiled graph gets a
subclass of its class. It stays the same object: its names in `state_dict` and `named_modules`, its hooks, the
references of other modules to it, `isinstance` in the model's own code and peft's targets are those of before. A
replaced module, or one around it, would lose some of these and would add a call to each forward. Layers that are
sharded are replaced instead (`ParallelModule`), since they compute something else.
"""

from typing import Any

from torch import nn


def change_class(module: nn.Module, kind: Any) -> None:
    """Make a module an instance of `kind`, which adds no state: a subclass of its class, or one of equal attributes."""
    module.__class__ = kind
