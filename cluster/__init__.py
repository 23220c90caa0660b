"""Processes: launch, mesh and process groups, collectives, placements of parameters, random state."""

from typing import TYPE_CHECKING

from ..migration.names import names_of

if not TYPE_CHECKING:
    __getattr__ = names_of("cluster")  # names that ColossalAI has here
