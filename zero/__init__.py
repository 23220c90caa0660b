"""Sharded optimizers: from gradients to updated parameters."""

from typing import TYPE_CHECKING

from ..migration.names import names_of

if not TYPE_CHECKING:
    __getattr__ = names_of("zero")  # names that ColossalAI has here
